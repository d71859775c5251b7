// SPDX-License-Identifier: Apache-2.0
// A quantized 128 x 128 tile, and how its bytes are stored as they are or transposed.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/rows.h"

namespace grouped_linear::cpu {

constexpr int64_t kCacheLine = 64;  // bytes

// Rows of bytes in memory: row r begins at first + r * stride. Streamed rows are whole cache lines
// that are stored past the caches, which would otherwise read each line first (AMD EPYC 9004, two
// cores, [4096, 2048] in both layouts: as fast as a copy; 1.3 times its time without streaming).
struct ByteRows {
  uint8_t* first;
  int64_t stride;
  bool streamed = false;

  uint8_t* operator[](int64_t r) const { return first + r * stride; }
};

// Stores whole cache lines past the caches.
GROUPED_LINEAR_INLINE void stream_copy(const void* from, void* to, int64_t bytes) {
#ifdef __SSE2__
  const auto *in = static_cast<const __m128i*>(from), *end = in + bytes / sizeof(__m128i);
  for (auto* out = static_cast<__m128i*>(to); in < end; ++in, ++out)
    _mm_stream_si128(out, _mm_loadu_si128(in));
#else
  std::memcpy(to, from, bytes);
#endif
}
// Orders streamed stores before all later stores.
inline void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Stores n <= 128 bytes of row r. A copy of constant size compiles to two moves.
GROUPED_LINEAR_INLINE void store_row_bytes(const void* from, ByteRows to, int64_t r, int64_t n) {
  if (to.streamed) return stream_copy(from, to[r], n);
  n == kBlock ? std::memcpy(to[r], from, kBlock) : std::memcpy(to[r], from, n);
}

struct ByteTile {
  alignas(kCacheLine) uint8_t bytes[kBlock][kBlock];

  // q[r][c] = bytes[r][c] for r < rows and c < cols.
  void store(ByteRows q, int64_t rows, int64_t cols) const;
  // q_t[c][r] = bytes[r][c] for r < rows and c < cols, both multiples of 16; zero for r >= filled.
  void store_transposed(ByteRows q_t, int64_t filled, int64_t rows, int64_t cols) const;
};

}  // namespace grouped_linear::cpu
