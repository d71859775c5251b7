// SPDX-License-Identifier: Apache-2.0
// What watch_operand_ counts of an operand, and which of its rows it reads: the same on CPU and
// CUDA.
#pragma once

#include <cstdint>

#include "exact_math.h"
#include "layout.h"

namespace grouped_linear {

// The numbers that are kept of each group, as float64, in some parts, which different thread blocks
// add to. kAmax and kScaledAmax are maxima, the others are sums. kCalls, kRows and kDropped are in
// part 0; the i-th row or block that is read adds to part i % parts, and so do 32 rows of scales.
enum WatchColumn {
  kCalls,
  kRows,        // of the group
  kNumbers,     // read
  kCompared,    // read in both forms, and finite
  kAmax,        // of what was read
  kScaledAmax,  // that the largest scale of a block with a number can stand for
  kUnderflow,   // zero, and was not
  kSaturated,   // beyond the format's largest number by more than half a step
  kNonFinite,
  kError,   // the sum of squares of what quantization changed
  kSquare,  // the sum of squares
  kBlocks,  // of 128 rows and 128 features, columnwise
  kShared,  // of them those with one scale
  kDropped,
  kWatchColumns
};

constexpr int64_t kMaxParts = 64;

// At most so many of each group are read: rows, blocks of 128 rows, and 128 times as many rows of
// scales.
GROUPED_LINEAR_DEVICE int watched_of(int n, int64_t most) {
  return n < most ? n : static_cast<int>(most);
}
constexpr int kScaleRowsAtOnce = 32;

// The i-th of `count` rows out of n: one of each of `count` spaces, the larger ones first. The turn
// says which. Turns go by the golden ratio: any few of them are far apart, and many are even.
GROUPED_LINEAR_DEVICE int nth_of(int i, int count, int n, int turn) {
  const int larger = n % count, space = n / count + (i < larger);
  const uint32_t share = (static_cast<uint32_t>(turn) - 1u) * 2654435769u;  // of 2^32
  return i * (n / count) + (i < larger ? i : larger) +
         static_cast<int>(uint64_t{share} * static_cast<uint32_t>(space) >> 32);
}

// e4m3 and e5m2: the largest number, and half a step beyond it.
struct Fp8Range {
  float largest, beyond;
};
constexpr Fp8Range kE4m3Range{448.0f, 464.0f}, kE5m2Range{57344.0f, 61440.0f};

}  // namespace grouped_linear
