// What tiles.h needs most often, written for AVX-512 with byte permutes (VBMI: Intel Ice Lake, AMD Zen 4 and
// newer), where a compiler does not find it. tile.cpp has the same in loops for every CPU; the bytes are equal.
#pragma once

#include "cpu/tile.h"

namespace grouped_linear::cpu {

// tile [128, 128] of bf16, all finite, as Tile::quantize stores it. False, and nothing done, where the CPU has
// no VBMI, or a factor is not a power of two from 2^-99 to 2^116.
bool encode_avx512(TileRows tile, int64_t rows, int64_t part, const float* row_factor,
                   const float* col_factor, ByteRows q, int64_t cols, ByteTile* by_cols,
                   const Ahead& ahead);

// As ByteTile::store_turned does. False, and nothing done, where the CPU has no VBMI.
bool store_turned_avx512(const ByteTile& tile, ByteRows q_t, int64_t filled, int64_t rows,
                         int64_t cols);

}  // namespace grouped_linear::cpu
