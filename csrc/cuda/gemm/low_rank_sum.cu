// SPDX-License-Identifier: Apache-2.0
// Two products that no kernel computes as one sum: float32 operands, for which there are no tensor
// cores, and the portable kernels.
//
// Bytes: 8 a number are read, and the result is written.
#include <algorithm>

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/gemm.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

constexpr int kSumThreads = 256, kMostSumBlocksPerSm = 8;

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T values[4];
};

// In fours: N is a multiple of 16. out may be `first`.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    low_rank_sum_kernel(const float4* first, const float4* second, int64_t fours, Four<T>* out) {
  grid_dependency_wait();
  for (int64_t i = blockIdx.x * int64_t{kSumThreads} + threadIdx.x; i < fours;
       i += gridDim.x * int64_t{kSumThreads}) {
    const float4 a = first[i], b = second[i];
    out[i] = {from_float<T>(a.x + b.x), from_float<T>(a.y + b.y), from_float<T>(a.z + b.z),
              from_float<T>(a.w + b.w)};
  }
}

}  // namespace

Tensor low_rank_sum(const Launch& launch, const Tensor& first, const LowRank& low,
                    const Tensor& offs, ScalarType dtype) {
  const Tensor second = grouped_mm_nt(*low.a, *low.b, offs, {}, ScalarType::Float, {}, {});
  const Tensor out =
      dtype == ScalarType::Float ? first : new_tensor(first, Shape::of(first), dtype);
  const int64_t fours = first.numel() / 4;
  const int64_t most = int64_t{launch.multiprocessors()} * kMostSumBlocksPerSm;
  const auto grid =
      static_cast<unsigned>(std::clamp<int64_t>(ceil_div(fours, kSumThreads), 1, most));
  for_element(dtype, [&]<typename T>(std::type_identity<T>) {
    launch.run(low_rank_sum_kernel<T>, grid, kSumThreads, 0, data<float4>(first),
               data<float4>(second), fours, mutable_data<Four<T>>(out));
  });
  return out;
}

}  // namespace grouped_linear::cuda
