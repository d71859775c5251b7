// SPDX-License-Identifier: Apache-2.0
// Prefetches of rows of tiles. The rows of a tile are far apart in memory, so the hardware does not
// predict them.
#pragma once

#include "cpu/byte_tile.h"
#include "cpu/rows.h"

namespace grouped_linear::cpu {

// Prefetches the cache lines of one row to read or to write them, into the L1 or the L2 cache.
template <bool write = false, int level = 1>
GROUPED_LINEAR_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(row) + i, write, 4 - level);
}

// Prefetches the next tile's reads and writes while this tile is quantized.
//
// Each row of this tile prefetches a few cache lines. A core has only some twenty requests in
// flight and stalls with more (AMD EPYC 9005, [4096, 2048] in both layouts, one core: 0.27 ns an
// element; 0.33 if the lines of a whole tile are requested at once). The lines go to the L2 cache.
// In the L1 cache, rows a power of two apart share a few sets, which evict them before they are
// read (AMD EPYC 9004: 1.3 times the time). No loop here has a varying number of steps: that would
// cost half of the gain.
struct TilePrefetch {
  static constexpr int64_t kReadBytes = kBlock * 2;
  int64_t num_reads = 0;
  bool is_float32 = false;  // twice the bytes to read
  const char* reads[kBlock];
  ByteRows writes[4];  // rows of kBlock bytes
  int64_t num_writes[4] = {};

  // Streamed rows do not pass through the caches and need no prefetch.
  void add_writes(int i, ByteRows rows, int64_t n) {
    writes[i] = rows, num_writes[i] = rows.streamed ? 0 : n;
  }

  // Prefetches row r of the next tile, if it has one.
  GROUPED_LINEAR_INLINE void row(int64_t r) const {
    if (r < num_reads) prefetch_row<false, 2>(reads[r], kReadBytes);
    if (r < num_reads && is_float32) prefetch_row<false, 2>(reads[r] + kReadBytes, kReadBytes);
    for (int i = 0; i < 4; ++i)
      if (r < num_writes[i]) prefetch_row<true, 2>(writes[i][r], kBlock);
  }
  void rows_from(int64_t r) const {
    for (; r < kBlock; ++r) row(r);
  }
};

}  // namespace grouped_linear::cpu
