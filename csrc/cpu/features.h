// SPDX-License-Identifier: Apache-2.0
// The CPU features that kernels use. _host exposes them, so that a report can name the kernels that
// run.
#pragma once

namespace grouped_linear::cpu {

// AVX-512 BF16, for FP8 GEMMs (fp8_mm.cpp).
inline bool has_bf16_units() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

// AVX-512 VBMI, for quantizers (tile_avx512.cpp).
inline bool has_byte_permutes() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
#else
  return false;
#endif
}

}  // namespace grouped_linear::cpu
