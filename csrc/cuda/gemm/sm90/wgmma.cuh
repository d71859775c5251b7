// SPDX-License-Identifier: Apache-2.0
// wgmma: the warpgroup's matrix instructions, and the descriptors of their shared memory operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/gemm/sm90/config.h"
#include "cuda/gemm/sm90/ptx.cuh"
#include "cuda/gemm/sm90/wgmma_operands.h"

namespace grouped_linear::cuda::sm90 {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int in_flight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(in_flight) : "memory");
}

// The descriptor of an operand in shared memory with the 128-byte swizzle. The swizzle's atoms are
// 8 lines of 128 bytes, so an operand starts at a multiple of 1024 bytes; along K a descriptor may
// start inside an atom.
//   K-major (a line is 128 bytes along K): stride = bytes between groups of 8 lines; no leading.
//   M/N-major (a line is 64 elements along M or N): leading = bytes between columns of 64 elements,
//   stride = bytes between groups of 8 lines along K.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t low, uint32_t stride_bytes) {
  return uint64_t{low} | uint64_t{stride_bytes >> 4 | uint32_t{1} << 30} << 32;
}

// The lower half of a descriptor: the address in units of 16 bytes, to which offsets may be added,
// and `leading`. The block's rank in the cluster, in the address's upper bits, is cut off.
__device__ __forceinline__ uint32_t smem_descriptor_low(const void* pointer,
                                                        uint32_t leading_bytes) {
  return smem_address(pointer) % (1 << 24) / 16 | leading_bytes >> 4 << 16;
}

// a, b and add are the three operands after the registers.
#define GROUPED_LINEAR_WGMMA_N(n, a_at, b_at, add_at, k, types, majors)                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_at                             \
               ", 0;\n"                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k" k ".f32." types                 \
               " "                                                                        \
               "{" GROUPED_LINEAR_R##n "}, " a_at ", " b_at ", add, 1, 1" majors ";\n}\n" \
               : GROUPED_LINEAR_D##n                                                      \
               : "l"(a), "l"(b), "r"(add))

// d = (add ? d : 0) + a @ b.T, a 64 x n product, in the first n / 2 registers of d.
template <typename A, typename B, int n, Major a_major, Major b_major, int count>
__device__ __forceinline__ void wgmma(float (&d)[count], uint64_t a, uint64_t b, int add) {
  static_assert(n / 2 <= count && n % 16 == 0 && n > 0 && (n <= 192 || n == 256),
                "wgmma.cuh has instructions for multiples of 16 columns to 192, and for 256");
#define GROUPED_LINEAR_WGMMA_CASE(n_, a_at, b_at, add_at, k, types, majors) \
  if constexpr (n == n_) GROUPED_LINEAR_WGMMA_N(n_, a_at, b_at, add_at, k, types, majors)
#define GROUPED_LINEAR_WGMMA(k, types, majors)                           \
  GROUPED_LINEAR_WGMMA_CASE(16, "%8", "%9", "%10", k, types, majors);    \
  GROUPED_LINEAR_WGMMA_CASE(32, "%16", "%17", "%18", k, types, majors);  \
  GROUPED_LINEAR_WGMMA_CASE(48, "%24", "%25", "%26", k, types, majors);  \
  GROUPED_LINEAR_WGMMA_CASE(64, "%32", "%33", "%34", k, types, majors);  \
  GROUPED_LINEAR_WGMMA_CASE(80, "%40", "%41", "%42", k, types, majors);  \
  GROUPED_LINEAR_WGMMA_CASE(96, "%48", "%49", "%50", k, types, majors);  \
  GROUPED_LINEAR_WGMMA_CASE(112, "%56", "%57", "%58", k, types, majors); \
  GROUPED_LINEAR_WGMMA_CASE(128, "%64", "%65", "%66", k, types, majors); \
  GROUPED_LINEAR_WGMMA_CASE(144, "%72", "%73", "%74", k, types, majors); \
  GROUPED_LINEAR_WGMMA_CASE(160, "%80", "%81", "%82", k, types, majors); \
  GROUPED_LINEAR_WGMMA_CASE(176, "%88", "%89", "%90", k, types, majors); \
  GROUPED_LINEAR_WGMMA_CASE(192, "%96", "%97", "%98", k, types, majors); \
  GROUPED_LINEAR_WGMMA_CASE(256, "%128", "%129", "%130", k, types, majors)
#define GROUPED_LINEAR_WGMMA_MAJORS(types)                      \
  if constexpr (a_major == Major::kK && b_major == Major::kK) { \
    GROUPED_LINEAR_WGMMA("16", types, ", 0, 0");                \
  } else if constexpr (a_major == Major::kK) {                  \
    GROUPED_LINEAR_WGMMA("16", types, ", 0, 1");                \
  } else if constexpr (b_major == Major::kK) {                  \
    GROUPED_LINEAR_WGMMA("16", types, ", 1, 0");                \
  } else {                                                      \
    GROUPED_LINEAR_WGMMA("16", types, ", 1, 1");                \
  }
  if constexpr (sizeof(A) == 1) {
    static_assert(a_major == Major::kK && b_major == Major::kK, "wgmma reads FP8 K-major only");
    static_assert(std::is_same_v<B, __nv_fp8_e4m3>, "b is e4m3; a may be e4m3 or e5m2");
    if constexpr (std::is_same_v<A, __nv_fp8_e4m3>) {
      GROUPED_LINEAR_WGMMA("32", "e4m3.e4m3", "");
    } else {
      GROUPED_LINEAR_WGMMA("32", "e5m2.e4m3", "");
    }
  } else if constexpr (std::is_same_v<A, __nv_bfloat16>) {
    GROUPED_LINEAR_WGMMA_MAJORS("bf16.bf16")
  } else {
    GROUPED_LINEAR_WGMMA_MAJORS("f16.f16")
  }
#undef GROUPED_LINEAR_WGMMA_MAJORS
#undef GROUPED_LINEAR_WGMMA
#undef GROUPED_LINEAR_WGMMA_CASE
}

// d += a @ b.T, a 64 x n product over 16 elements of bfloat16, with a in registers: of a thread, of
// rows lane / 4 and 8 below in turn, elements 2 (lane % 4) and the next, then the ones 8 further on.
template <int n, int count>
__device__ __forceinline__ void wgmma_registers(float (&d)[count], const uint32_t* a, uint64_t b) {
  static_assert(n == 32 || n == 64 || n == 128 || n == 256);
#define GROUPED_LINEAR_WGMMA_A(n, a0, a1, a2, a3, b_at)                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n                               \
               "k16.f32.bf16.bf16 "                                                 \
               "{" GROUPED_LINEAR_R##n "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_at \
                                       ", 1, 1, 1, 0;\n"                            \
               : GROUPED_LINEAR_D##n                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (n == 32)
    GROUPED_LINEAR_WGMMA_A(32, "%16", "%17", "%18", "%19", "%20");
  else if constexpr (n == 64)
    GROUPED_LINEAR_WGMMA_A(64, "%32", "%33", "%34", "%35", "%36");
  else if constexpr (n == 128)
    GROUPED_LINEAR_WGMMA_A(128, "%64", "%65", "%66", "%67", "%68");
  else
    GROUPED_LINEAR_WGMMA_A(256, "%128", "%129", "%130", "%131", "%132");
#undef GROUPED_LINEAR_WGMMA_A
}

#undef GROUPED_LINEAR_WGMMA_N

// The operands of one warpgroup. The descriptors of a stage and of a step along K are the first
// ones plus constants in their lower halves.
template <typename Config>
class WgmmaOperands {
  static constexpr Major kAMajor = Config::kSwapped ? Config::kBMajor : Config::kAMajor;
  static constexpr Major kBMajor = Config::kSwapped ? Config::kAMajor : Config::kBMajor;

 public:
  // wgmma's a and b, in the first stage. Stages are kStageBytes apart.
  __device__ WgmmaOperands(const uint8_t* a, const uint8_t* b, int warpgroup)
      : a_(first_of(a, kAMajor) +
           warpgroup * (kAMajor == Major::kK ? kWgmmaM * kSwizzleBytes : kColumnBytes) / 16),
        b_(first_of(b, kBMajor)) {
    // All lanes have the same values, which the compiler cannot see. After the shuffle it keeps
    // them in uniform registers.
    a_ = __shfl_sync(0xffffffff, a_, 0);
    b_ = __shfl_sync(0xffffffff, b_, 0);
  }

  // accum = (add ? accum : 0) + a @ b.T over the first `k_extent` elements of the stage's kTileK,
  // with n lines of b.
  template <int k_extent = Config::kTileK, int n = Config::kTileN>
  __device__ __forceinline__ void issue(int stage, float (&accum)[Config::kAccumulators],
                                        bool add) const {
    const uint32_t at = stage * static_cast<uint32_t>(Config::kStageBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < k_extent; k += Config::kWgmmaK) {
      constexpr int k_major = sizeof(typename Config::A), mn_major = kSwizzleBytes;
      const uint64_t a = smem_descriptor(
          a_ + at + k * (kAMajor == Major::kK ? k_major : mn_major) / 16, 8 * kSwizzleBytes);
      const uint64_t b = smem_descriptor(
          b_ + at + k * (kBMajor == Major::kK ? k_major : mn_major) / 16, 8 * kSwizzleBytes);
      wgmma<typename Config::A, typename Config::B, n, kAMajor, kBMajor>(accum, a, b, add || k > 0);
    }
    wgmma_commit();
  }

  // The same of elements k to k + 15 along r in the second product's stage. a is K-major.
  template <typename T, Major b_major>
  __device__ __forceinline__ void issue_low_rank(int stage, int k,
                                                 float (&accum)[Config::kTileN / 2],
                                                 bool add) const {
    static_assert(Config::kAMajor == Major::kK);
    const uint32_t at = stage * static_cast<uint32_t>(Config::kStageBytes / 16);
    constexpr uint32_t column_bytes = kLowRankK * kSwizzleBytes;
    const uint32_t first_b = b_ % (1 << 16) | (b_major == Major::kK ? 16 : column_bytes) / 16 << 16;
    constexpr int b_step = b_major == Major::kK ? sizeof(T) : kSwizzleBytes;
    const uint64_t a = smem_descriptor(a_ + at + k * sizeof(T) / 16, 8 * kSwizzleBytes);
    const uint64_t b = smem_descriptor(first_b + at + k * b_step / 16, 8 * kSwizzleBytes);
    wgmma_fence();
    wgmma<T, T, Config::kTileN, Major::kK, b_major>(accum, a, b, add);
    wgmma_commit();
  }

 private:
  // M/N-major: a column of 64 elements, over the whole k-block.
  static constexpr int kColumnBytes = Config::kTileK * kSwizzleBytes;
  static __device__ uint32_t first_of(const uint8_t* data, Major major) {
    return smem_descriptor_low(data, major == Major::kK ? 16 : kColumnBytes);
  }
  uint32_t a_, b_;
};

}  // namespace grouped_linear::cuda::sm90
