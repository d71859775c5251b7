// What watch_operand_ counts of an operand, and which of its rows it reads: the same on CPU and
// CUDA.
#pragma once

#include <cstdint>

#include "exact_math.h"
#include "layout.h"

namespace grouped_linear {

// The numbers that are kept of each group, as float64, in some parts, which different thread blocks
// add to. kAmax and kScaledAmax are maxima, the others are sums. kCalls, kRows and kDropped are in
// part 0; the i-th row, row of scales or block that is read adds to part i % parts.
enum WatchColumn {
  kCalls,
  kRows,        // of the group
  kNumbers,     // read
  kCompared,    // read in both forms, and finite
  kAmax,        // of what was read
  kScaledAmax,  // that the largest scale can stand for
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

// Of each group so many rows are read, blocks of 128 rows, and rows of scales; all where it has
// fewer. They are evenly spaced. Of a weight at least a row of each block of 128.
constexpr int64_t kMaxParts = 64;
constexpr int kWatchedRows = 8, kWatchedBlocks = 8, kWatchedScaleRows = 1024;

GROUPED_LINEAR_DEVICE int watched_rows(int rows, bool of_weight) {
  constexpr int kRowsOfBlock = static_cast<int>(kBlock);
  const int blocks = rows / kRowsOfBlock + (rows % kRowsOfBlock != 0);
  const int most = of_weight && blocks > kWatchedRows ? blocks : kWatchedRows;
  return rows < most ? rows : most;
}

// The i-th of `count` rows out of n. Spaces differ by one, the larger ones first.
GROUPED_LINEAR_DEVICE int nth_of(int i, int count, int n) {
  const int larger = n % count;
  return i * (n / count) + (i < larger ? i : larger);
}

// e4m3 and e5m2: the largest number, and half a step beyond it.
struct Fp8Range {
  float largest, beyond;
};
constexpr Fp8Range kE4m3Range{448.0f, 464.0f}, kE5m2Range{57344.0f, 61440.0f};

}  // namespace grouped_linear
