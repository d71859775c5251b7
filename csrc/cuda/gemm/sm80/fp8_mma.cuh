// SPDX-License-Identifier: Apache-2.0
// Products of FP8 fragments, three ways with the same meaning:
//   8.9, and 12.0 on   the tensor cores' own (e4m3, e5m2)
//   9.0 to 11.x        mma has no FP8 there (only wgmma and tcgen05 do): fp16, by cvt
//   8.0 and 8.6        fp16, by integer operations
//
// fp16 has every e4m3 and e5m2 number, so nothing is rounded on the way, and their products are
// exact in float32.
#pragma once

#include <cuda_fp8.h>

#include "cuda/gemm/sm80/ptx.cuh"

namespace grouped_linear::cuda::sm80 {

enum class Fp8Math { kNative, kConverted, kBits };

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1200 || __CUDA_ARCH__ == 890
constexpr Fp8Math kFp8Math = Fp8Math::kNative;
#elif __CUDA_ARCH__ >= 900
constexpr Fp8Math kFp8Math = Fp8Math::kConverted;
#else
constexpr Fp8Math kFp8Math = Fp8Math::kBits;
#endif

template <typename T>
constexpr bool kIsE5m2 = std::is_same_v<T, __nv_fp8_e5m2>;

// The factor of a product for each operand. The bits of an e4m3 in an fp16's place mean
// 2^-8 times the number, as fp16's exponent is 8 larger.
template <typename T>
constexpr float kFp8Factor = kFp8Math == Fp8Math::kBits && !kIsE5m2<T> ? 256 : 1;

constexpr uint32_t kE4m3NanBits = 0x3f80;  // that of kBits: of a number that fp16 takes for 1.875

// Two bytes of a word as two fp16: the first two, or the last two.
template <typename T, int half>
__device__ __forceinline__ uint32_t fp8_to_fp16(uint32_t word) {
  uint32_t pair;
  if constexpr (kFp8Math == Fp8Math::kConverted) {
    uint16_t bytes[2];
    asm("mov.b32 {%0, %1}, %2;" : "=h"(bytes[0]), "=h"(bytes[1]) : "r"(word));
    if constexpr (kIsE5m2<T>)
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(bytes[half]));
    else
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes[half]));
  } else {
    pair = __byte_perm(word, 0, half == 0 ? 0x1404 : 0x3424);  // each byte in the upper half
    if constexpr (!kIsE5m2<T>) pair = (pair & 0x80008000) | ((pair & 0x7f007f00) >> 1);
  }
  return pair;
}

// Bit 7 of each byte is set where an e4m3 is NaN.
__device__ __forceinline__ uint32_t e4m3_nans(uint32_t word) {
  return (word & 0x7f7f7f7f) + 0x01010101;
}

__device__ __forceinline__ void restore_nans(uint32_t& pair) {
  pair |= __vcmpeq2(pair & 0x7fff7fff, kE4m3NanBits << 16 | kE4m3NanBits) & 0x7fff7fff;
}

// Words of FP8, each in K's order, as fp16: first the two pairs of word 0, then those of word 1 ...
template <typename T, int words>
__device__ __forceinline__ void words_to_fp16(uint32_t (&to)[2 * words],
                                              const uint32_t (&from)[words]) {
#pragma unroll
  for (int i = 0; i < words; ++i) {
    to[2 * i] = fp8_to_fp16<T, 0>(from[i]);
    to[2 * i + 1] = fp8_to_fp16<T, 1>(from[i]);
  }
  if constexpr (kFp8Math == Fp8Math::kBits && !kIsE5m2<T>) {
    uint32_t nans = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) nans |= e4m3_nans(from[i]);
    if (nans & 0x80808080) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < 2 * words; ++i) restore_nans(to[i]);
    }
  }
}

// 16 rows x 32 bytes of a, as ldmatrix reads them: words 0 and 1 are rows 0 and 8 in the first half
// of K, words 2 and 3 in the second.
template <typename T>
struct Fp8FragmentA {
  static constexpr bool kNative = kFp8Math == Fp8Math::kNative;
  // fp16: a product of 32 of K is two of 16. Each takes the bytes of one half; which of them an
  // instruction takes for which place along K is the same in a and b, so it makes no difference.
  uint32_t parts[kNative ? 1 : 2][4];

  __device__ __forceinline__ void set(const uint32_t (&words)[4]) {
    if constexpr (kNative) {
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[0][i] = words[i];
    } else {
      uint32_t pairs[8];
      words_to_fp16<T>(pairs, words);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        parts[half][0] = pairs[4 * half];
        parts[half][1] = pairs[4 * half + 2];
        parts[half][2] = pairs[4 * half + 1];
        parts[half][3] = pairs[4 * half + 3];
      }
    }
  }
};

// 8 rows x 32 bytes of b: words of the first and the second half of K.
template <typename T>
struct Fp8FragmentB {
  static constexpr bool kNative = kFp8Math == Fp8Math::kNative;
  uint32_t parts[kNative ? 2 : 4];

  __device__ __forceinline__ void set(uint32_t first, uint32_t second) {
    const uint32_t words[] = {first, second};
    if constexpr (kNative) {
#pragma unroll
      for (int i = 0; i < 2; ++i) parts[i] = words[i];
    } else {
      words_to_fp16<T>(parts, words);
    }
  }
};

// d (or nothing, where `first`) += a @ b.T
template <typename A, typename B>
__device__ __forceinline__ void mma_fp8(float (&d)[4], const Fp8FragmentA<A>& fragment_a,
                                        const Fp8FragmentB<B>& fragment_b, bool first) {
  float c[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = first ? 0.0f : d[i];
  const uint32_t* b = fragment_b.parts;
  if constexpr (kFp8Math == Fp8Math::kNative) {
    const auto& a = fragment_a.parts[0];
    const uint32_t b0 = b[0], b1 = b[1];
    if constexpr (kIsE5m2<A>)
      GROUPED_LINEAR_MMA("m16n8k32", "e5m2", "e4m3");
    else
      GROUPED_LINEAR_MMA("m16n8k32", "e4m3", "e4m3");
  } else {
    mma_16bit<__half>(d, fragment_a.parts[0], b[0], b[1], c);
    mma_16bit<__half>(d, fragment_a.parts[1], b[2], b[3], d);
  }
}

}  // namespace grouped_linear::cuda::sm80
