// SPDX-License-Identifier: Apache-2.0
// A GEMM whose operand gathers rows, where no kernel does: passes copy the rows and their scales
// before it.
#include <algorithm>

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/gemm.h"
#include "cuda/routing/copy_rows.h"

namespace grouped_linear::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocksPerSm = 16;

// The scales of gathered rows: out[j, i] = scale[j, rows[i]].
__global__ void __launch_bounds__(kThreads)
    copy_scales_kernel(const float* scale, int64_t stride, RowNumbers rows, int count, float* out,
                       int64_t out_stride, int64_t total) {
  grid_dependency_wait();
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total;
       i += gridDim.x * int64_t{kThreads}) {
    const int64_t j = i / count, row = i % count;
    out[j * out_stride + row] = scale[j * stride + rows.row(static_cast<int>(row))];
  }
}

Tensor scales_of(const Launch& launch, const Tensor& scale, const RowNumbers& rows, int64_t T) {
  const Tensor from = with_dense_rows(scale);
  const int64_t blocks = from.size(0), columns = round_up(T, kScaleRowMultiple), total = blocks * T;
  Tensor out = new_tensor(from, {blocks, columns}, ScalarType::Float);
  if (rows.rows == 0) return torch::stable::zero_(out);
  const int64_t most = int64_t{launch.multiprocessors()} * kMostBlocksPerSm;
  const int64_t grid = std::clamp<int64_t>(ceil_div(total, kThreads), 1, most);
  launch.run(copy_scales_kernel, static_cast<unsigned>(grid), kThreads, 0,
             from.const_data_ptr<float>(), from.stride(0), rows, static_cast<int>(T),
             static_cast<float*>(out.data_ptr()), columns, total);
  return out;
}

Tensor rows_of(const Launch& launch, const Tensor& source, const Tensor& rows) {
  return copy_rows(launch, source, int32_numbers(launch, rows, source));
}

}  // namespace

GroupedGemm gather_before(const Launch& launch, GroupedGemm gemm) {
  if (gemm.b_rows) gemm.b = rows_of(launch, gemm.b, *gemm.b_rows);
  if (gemm.a_rows) {
    if (gemm.scale_a)
      gemm.scale_a =
          scales_of(launch, *gemm.scale_a, row_numbers(gemm.a_rows, gemm.a), gemm.a_rows->size(0));
    gemm.a = rows_of(launch, gemm.a, *gemm.a_rows);
  }
  gemm.a_rows.reset();
  gemm.b_rows.reset();
  return gemm;
}

}  // namespace grouped_linear::cuda
