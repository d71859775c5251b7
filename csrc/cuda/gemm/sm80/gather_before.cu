// A portable GEMM whose operand gathers rows: a pass copies the rows before it.
#include <algorithm>

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/sm80/gemm.h"

namespace grouped_linear::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kMostBlocksPerSm = 16;

// out[i] = source[rows[i]], in pieces of 16 bytes; `stride` of them from row to row of the source.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const uint4* source, int64_t stride, RowNumbers rows, uint4* out, int pieces,
                     int64_t total) {
  grid_dependency_wait();
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total;
       i += gridDim.x * int64_t{kThreads})
    out[i] = source[rows.row(static_cast<int>(i / pieces)) * stride + i % pieces];
}

// The scales of these rows: out[j, i] = scale[j, rows[i]].
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

unsigned blocks_for(const Launch& launch, int64_t total) {
  const int64_t most = int64_t{launch.multiprocessors()} * kMostBlocksPerSm;
  return static_cast<unsigned>(std::clamp<int64_t>((total + kThreads - 1) / kThreads, 1, most));
}

Tensor rows_of(const Launch& launch, const Tensor& source, const Tensor& numbers) {
  const Tensor from = vector_readable(source, 1);
  const int64_t T = numbers.size(0), row_bytes = from.size(1) * item_size(from);
  const Tensor out = new_tensor(from, {T, from.size(1)}, from.scalar_type());
  const int64_t total = T * row_bytes / 16;
  launch.run(copy_rows_kernel, blocks_for(launch, total), kThreads, 0,
             static_cast<const uint4*>(from.const_data_ptr()),
             from.stride(0) * item_size(from) / 16, row_numbers(numbers, source),
             static_cast<uint4*>(out.data_ptr()), static_cast<int>(row_bytes / 16), total);
  return out;
}

}  // namespace

GroupedGemm gather_before(const Launch& launch, GroupedGemm gemm) {
  if (gemm.b_rows) gemm.b = rows_of(launch, gemm.b, *gemm.b_rows);
  if (gemm.a_rows) {
    const Tensor source = gemm.a;
    gemm.a = rows_of(launch, source, *gemm.a_rows);
    if (gemm.scale_a) {
      const Tensor from = with_dense_rows(*gemm.scale_a);
      const int64_t T = gemm.a.size(0), blocks = from.size(0);
      const int64_t columns = ceil_div(T, kScaleRowMultiple) * kScaleRowMultiple;
      const Tensor out = new_tensor(from, {blocks, columns}, ScalarType::Float);
      launch.run(copy_scales_kernel, blocks_for(launch, blocks * T), kThreads, 0,
                 from.const_data_ptr<float>(), from.stride(0), row_numbers(gemm.a_rows, source),
                 static_cast<int>(T), static_cast<float*>(out.data_ptr()), columns, blocks * T);
      gemm.scale_a = out;
    }
  }
  gemm.a_rows.reset();
  gemm.b_rows.reset();
  return gemm;
}

}  // namespace grouped_linear::cuda::sm80
