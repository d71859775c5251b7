// SPDX-License-Identifier: Apache-2.0
// Bytes: 12 a number; a row is read once and written once.
#include <algorithm>
#include <limits>

#include "cuda/common/pdl.cuh"
#include "cuda/routing/copy_rows.h"

namespace grouped_linear::cuda {
namespace {

constexpr int kCopyThreads = 256, kMostCopyBlocksPerSm = 16;

__global__ void __launch_bounds__(kCopyThreads)
    int32_numbers_kernel(const int64_t* rows, int64_t count, int32_t* out) {
  grid_dependency_wait();
  for (int64_t i = blockIdx.x * int64_t{kCopyThreads} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{kCopyThreads})
    out[i] = static_cast<int32_t>(min(max(rows[i], int64_t{INT32_MIN}), int64_t{INT32_MAX}));
}

// out[i] = source[rows[i]], in pieces of 16 bytes; `stride` of them from row to row of the source.
__global__ void __launch_bounds__(kCopyThreads)
    copy_rows_kernel(const uint4* source, int64_t stride, int64_t source_rows, const int32_t* rows,
                     int pieces, int64_t total, uint4* out) {
  grid_dependency_wait();
  for (int64_t i = blockIdx.x * int64_t{kCopyThreads} + threadIdx.x; i < total;
       i += gridDim.x * int64_t{kCopyThreads}) {
    const int64_t row = min(max(int64_t{rows[i / pieces]}, int64_t{0}), source_rows - 1);
    out[i] = source[row * stride + i % pieces];
  }
}

unsigned blocks_of(const Launch& launch, int64_t total) {
  const int64_t most = int64_t{launch.multiprocessors()} * kMostCopyBlocksPerSm;
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(total, kCopyThreads), 1, most));
}

}  // namespace

Tensor int32_numbers(const Launch& launch, const Tensor& rows_in, const Tensor& source) {
  const Tensor rows = as_dense(rows_in);
  if (rows.scalar_type() == ScalarType::Int) return rows;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  check(source.size(0) <= most, launch.op(), ": rows are gathered from at most ", most,
        " rows on CUDA, got ", source.size(0));
  const Tensor out = new_tensor(rows, Shape::of(rows), ScalarType::Int);
  if (rows.numel() > 0)
    launch.run(int32_numbers_kernel, blocks_of(launch, rows.numel()), kCopyThreads, 0,
               data<int64_t>(rows), rows.numel(), mutable_data<int32_t>(out));
  return out;
}

Tensor copy_rows(const Launch& launch, const Tensor& source, const Tensor& rows) {
  const Tensor from = vector_readable(source, 1);
  const int64_t T = rows.size(0), row_bytes = from.size(1) * item_size(from);
  Tensor out = new_tensor(from, {T, from.size(1)}, from.scalar_type());
  if (from.size(0) == 0) return torch::stable::zero_(out);
  const int64_t total = T * row_bytes / 16;
  launch.run(copy_rows_kernel, blocks_of(launch, total), kCopyThreads, 0, data<uint4>(from),
             from.stride(0) * item_size(from) / 16, from.size(0), data<int32_t>(rows),
             static_cast<int>(row_bytes / 16), total, mutable_data<uint4>(out));
  return out;
}

}  // namespace grouped_linear::cuda
