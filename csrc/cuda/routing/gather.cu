// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/routing/copy_rows.h"
#include "cuda/routing/gather.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// Calls run with a RowGather of y's element type.
template <typename Run>
void with_row_gather(const Tensor& y, const Tensor& rows, const Run& run) {
  for_element(y.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    run(RowGather<Element>{data<Element>(y), y.stride(0), y.size(0), data<int32_t>(rows)});
  });
}

unsigned blocks_for(const Launch& launch, int64_t threads) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const int64_t blocks = ceil_div(threads, kGatherThreads);
  check(blocks <= most, launch.op(), ": too many rows for one launch on CUDA, which has at most ",
        most, " thread blocks, got ", blocks);
  return static_cast<unsigned>(blocks);
}

}  // namespace

Tensor gather_sum(const Tensor& y_in, const Tensor& rows_in, const std::optional<Tensor>& weight_in,
                  const std::optional<Tensor>& offs_in) {
  check_gather_sum(y_in, rows_in, weight_in, offs_in);

  const Launch launch("gather_sum", y_in);
  const int64_t T = rows_in.size(0), C = rows_in.size(1), H = y_in.size(1);
  Tensor out = new_tensor(y_in, {T, H}, y_in.scalar_type());
  if (T == 0) return out;
  if (y_in.size(0) == 0) {
    torch::stable::zero_(out);
    return out;
  }

  const Tensor y = with_aligned_rows(y_in), rows = int32_numbers(launch, rows_in, y);
  const std::optional<Tensor> weight = as_dense(weight_in), offs = as_dense(offs_in);
  const int32_t* end = offs ? data<int32_t>(*offs) + (offs->size(0) - 1) : nullptr;
  with_row_gather(y, rows, [&]<typename Element>(const RowGather<Element>& gathered) {
    launch.run(gather_sum_kernel<Element>, blocks_for(launch, T * H / gathered.kVectorElements),
               kGatherThreads, 0, gathered, data_or_null<float>(weight), end, T,
               static_cast<int>(C), static_cast<int>(H), mutable_data<uint4>(out));
  });
  return out;
}

Tensor gather_dot(const Tensor& a_in, const Tensor& y_in, const Tensor& rows_in) {
  check_gather_dot(a_in, y_in, rows_in);

  const Launch launch("gather_dot", y_in);
  const int64_t T = rows_in.size(0), C = rows_in.size(1), H = y_in.size(1);
  Tensor out = new_tensor(y_in, {T, C}, ScalarType::Float);
  if (T * C == 0) return out;
  if (y_in.size(0) == 0) {
    torch::stable::zero_(out);
    return out;
  }

  const Tensor a = with_aligned_rows(a_in), y = with_aligned_rows(y_in);
  const Tensor rows = int32_numbers(launch, rows_in, y);
  with_row_gather(y, rows, [&]<typename Element>(const RowGather<Element>& gathered) {
    launch.run(gather_dot_kernel<Element>, blocks_for(launch, 32 * T * C), kGatherThreads, 0,
               data<Element>(a), a.stride(0), gathered, T * C, static_cast<int>(C),
               static_cast<int>(H), mutable_data<float>(out));
  });
  return out;
}

Tensor scatter_rows(const Tensor& x_in, const Tensor& rows_in, int64_t num_rows) {
  check_scatter_rows(x_in, rows_in, num_rows);

  const Launch launch("scatter_rows", x_in);
  const int64_t T = x_in.size(0), C = rows_in.size(1), H = x_in.size(1);
  Tensor out = new_tensor(x_in, {num_rows, H}, x_in.scalar_type());
  if (T * C == 0 || num_rows == 0) return out;

  const Tensor x = with_aligned_rows(x_in), rows = int32_numbers(launch, rows_in, out);
  const int64_t per_vector = 16 / item_size(x), per_row = H / per_vector;
  launch.run(scatter_rows_kernel, blocks_for(launch, T * per_row), kGatherThreads, 0,
             static_cast<const uint4*>(x.const_data_ptr()), x.stride(0) / per_vector,
             data<int32_t>(rows), T, static_cast<int>(C), static_cast<int>(per_row), num_rows,
             mutable_data<uint4>(out));
  return out;
}

}  // namespace grouped_linear::cuda
