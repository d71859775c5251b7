// SPDX-License-Identifier: Apache-2.0
// What every architecture's kernel is told about a grouped GEMM. Plain C++.
//
//   M-grouped (fprop, dgrad): out[t, n]    = sum_k a[t, k] * b[e, n, k]   rows t of group e
//                                            + sum_i a_low[t, i] * b_low[e, n, i], if it is given
//   K-grouped (wgrad):        out[e, n, k] = sum_t a[t, n] * b[t, k]      rows t of group e
#pragma once

#include <cstdint>

namespace grouped_linear::cuda {

// Groups divide the rows of a and of out (M-grouped), or the rows of both operands along K
// (K-grouped).
enum class Grouping { kM, kK };

// The block with one scale in FP8 operands. a: a group, or 1 x 128 along K. b: or 128 x 128 too.
enum class Scaling { kNone, kScalePerGroup, kScale1x128, kScale128x128 };

// The dimension in which an operand's elements are neighbours where a kernel reads them.
enum class Major { kK, kMN };

struct GemmShape {
  int T, E;        // rows of all groups, groups
  int rows, cols;  // of an output matrix: (T, N) M-grouped, (N, K) K-grouped
  int K;           // M-grouped: the length of a dot product. K-grouped: 0, each group has its own
};

enum class OutputType : int { kBFloat16, kHalf, kFloat };

// How accumulators become `out`: scaled, biased, converted, and stored or added.
struct EpilogueArguments {
  void* out;
  OutputType type;
  bool aligned;                    // out starts at a multiple of 16 bytes
  const void* bias;                // [E, cols] of out's type, or null (M-grouped)
  int64_t bias_stride;             // elements between groups
  const float *scale_a, *scale_b;  // [E], where FP8 operands have a scale per group
  bool accumulate;                 // add to out (K-grouped)
  const bool* overwrite;  // with accumulate, or null: where it points to true, store instead
};

}  // namespace grouped_linear::cuda
