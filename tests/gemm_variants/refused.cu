// SPDX-License-Identifier: Apache-2.0
// Configurations that the sm_90 GEMM refuses to be compiled for, see tests/test_gemm_variants.py.
#include "cuda/gemm/sm90/kernel.cuh"

namespace grouped_linear::cuda::sm90 {

constexpr GemmTraits traits(int tile_n, int stages, Scaling scaling, Major b_major) {
  return {.grouping = Grouping::kM,
          .scaling = scaling,
          .a_major = Major::kK,
          .b_major = b_major,
          .gathers = false,
          .transposed = false,
          .store_work = StoreWork::kStore,
          .tile_n = tile_n,
          .stages = stages};
}
template <int tile_n, int stages, Scaling scaling = Scaling::kScale128x128>
using Fp8 = GemmConfig<__nv_fp8_e4m3, __nv_fp8_e4m3, traits(tile_n, stages, scaling, Major::kK)>;
template <int tile_n, int stages, Major b_major = Major::kK>
using Bf16 =
    GemmConfig<__nv_bfloat16, __nv_bfloat16, traits(tile_n, stages, Scaling::kNone, b_major)>;

#ifdef WITHOUT_STAGES
constexpr GemmTraits forgotten{.grouping = Grouping::kM,
                               .scaling = Scaling::kNone,
                               .a_major = Major::kK,
                               .b_major = Major::kK,
                               .gathers = false,
                               .transposed = false,
                               .store_work = StoreWork::kStore,
                               .tile_n = 256};
#endif

constexpr int refused[] = {
    shared_bytes<Fp8<192, 5>>(),       // does not fit
    Fp8<128, 1>::kStages,              // nothing is loaded ahead
    Fp8<128, 7>::kStages,              // more than mbarriers
    Fp8<256, 2>::kStages,              // more registers than a thread has
    Bf16<96, 3>::kStages,              // no such wgmma here
    Bf16<64, 3, Major::kMN>::kStages,  // half a tile is less than a swizzle's line
    Fp8<128, 4, Scaling::kScale1x128>::kStages,
};

}  // namespace grouped_linear::cuda::sm90
