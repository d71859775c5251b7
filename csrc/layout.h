// SPDX-License-Identifier: Apache-2.0
// The constants and sizes that every backend agrees on.
#pragma once

#include <algorithm>
#include <cstdint>

namespace grouped_linear {

constexpr int64_t kBlock = 128;           // elements along K (rowwise) or rows (columnwise) a scale
constexpr int64_t kFeatureMultiple = 16;  // in_features and out_features: 16-byte rows in FP8
constexpr int64_t kScaleRowMultiple = 4;  // rows of a scale tensor: 16-byte strides for TMA
constexpr int64_t kMaxGroups = 1024;      // one thread a group in one CUDA block
constexpr int64_t kMxBlock = 32;          // elements a scale in the MX formats
constexpr int64_t kMaxMargin = 64;        // of delayed scaling: factors are divided by 2^margin
// Rows are counted in 32 bits, as offs are, and rounded up to whole blocks.
constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1 - kBlock;
constexpr int64_t kMaxFeatures = int64_t{1} << 29;  // gate_up has twice as many, an int32
constexpr int64_t kMaxMxfp4Features = 1 << 22;      // K: its blocks of 128 are a grid's y
constexpr int64_t kMaxRank = 512;                   // of a low-rank second product

// share_scales: the features of a block share a scale if their amaxes are within this factor.
constexpr float kShareWithin = 256;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Rows of columnwise data, in which every group starts at a multiple of kBlock. A group wastes at
// most kBlock - 1 rows, and at most min(E, T) groups have rows, so the bound does not depend on
// group sizes.
constexpr int64_t padded_rows(int64_t T, int64_t E) {
  return kBlock * ((T + (kBlock - 1) * std::min(E, T)) / kBlock);
}

}  // namespace grouped_linear
