// SPDX-License-Identifier: Apache-2.0
// Encoding and transposing a tile with the byte permutes of AVX-512 VBMI (Intel Ice Lake, AMD Zen 4
// and newer), which compilers do not find. encode_tile.cpp and byte_tile.cpp do the same in loops
// for every CPU; the bytes are equal.
#pragma once

#include "cpu/encode_tile.h"

namespace grouped_linear::cpu {

// Encodes a tile of bf16 whose elements are all finite. Returns false, and does nothing, if the CPU
// has no VBMI or a factor is not a power of two from 2^-99 to 2^116.
bool encode_avx512(const TileSource& tile, const Encoding& to, const TilePrefetch& prefetch);

// ByteTile::store_transposed. Returns false, and does nothing, if the CPU has no VBMI.
bool store_transposed_avx512(const ByteTile& tile, ByteRows q_t, int64_t filled, int64_t rows,
                             int64_t cols);

}  // namespace grouped_linear::cpu
