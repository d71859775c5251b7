// SPDX-License-Identifier: Apache-2.0
// What all quantizers share: rows in groups, cut into 128 x 128 tiles, and where their bytes go.
//
// The arithmetic, for one bf16 element in both layouts: 2 bytes read and 2 written take 0.1 ns at
// the 40 GB/s of one core's copy in the L3 cache (AMD EPYC 9005). A tile of 32 KB and its 16 KB of
// codes stay in the L1 and L2 caches. There, with AVX-512 VBMI, two encodings take 0.037 ns, maxima
// 0.014, a transposition 0.012 and filling 0.03: 0.09 ns in all.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/tile.h"

namespace grouped_linear::cpu {

// Where a tile's rows come from.
template <typename Source, typename FillRow>
struct Reader {
  // source(block, r, col): the address of the data that row r of a block is made of.
  Source source;
  // fill_row(source, block, r, col, cols, row): writes a tile's row, in the dtype of the data.
  FillRow fill_row;
  // Bytes from one row to the next if the data can be used as a tile's rows in place, else 0.
  int64_t stride = 0;
};
// clang 16 and older deduce no template arguments of an aggregate.
template <typename Source, typename FillRow>
Reader(Source, FillRow, int64_t) -> Reader<Source, FillRow>;
template <typename Source, typename FillRow>
Reader(Source, FillRow) -> Reader<Source, FillRow>;

// Rows of `features` elements in groups: the rows of x [T, K] by offs, or the rows of each expert
// of a weight, which is one tensor [E, N, K] or E tensors [N, K].
struct GroupedRows {
  GroupedRows(const char* op, const Tensor& x, const Tensor& offs);
  explicit GroupedRows(const std::vector<Tensor>& weight);

  bool is_weight() const { return expert_rows > 0; }
  const char* row(const RowBlock& block, int64_t r) const {
    const int64_t begin = block.begin - block.group * expert_rows;  // in the expert
    return first[is_weight() ? block.group : 0] + (begin + r) * row_bytes;
  }
  // A reader of quantize_tiles.
  auto reader() const {
    return Reader{[this](const RowBlock& block, int64_t r, int64_t col) {
                    return row(block, r) + col * element;
                  },
                  [this](const char* from, const RowBlock&, int64_t, int64_t, int64_t cols,
                         void* to) { std::memcpy(to, from, cols * element); },
                  row_bytes};
  }

  std::vector<Tensor> values;  // keeps them alive
  ScalarType dtype;
  int64_t element, groups, features, row_bytes, expert_rows = 0;
  std::vector<const char*> first;  // first rows: of x, or of each expert
  std::vector<RowBlock> blocks;
};

// Where a tile's bytes go; null for what is not requested. A recipe derives from it, adds where its
// scales go, and defines
//   void write(Tile&, const RowBlock&, int64_t col, int64_t cols) const.
struct TileTargets {
  int64_t features;
  uint8_t* q = nullptr;         // [T, K] or [E, N, K]
  uint8_t* q_t = nullptr;       // [Tp / 128, K, 128] or, of a weight, [E, K, N]
  int64_t expert_rows = 0;      // N of a weight
  float* block_sums = nullptr;  // [blocks, K]
  bool fits_in_cache = true;    // see kCachedBytes

  // Rows of bytes from `first` on, streamed if they are whole cache lines outside the caches.
  ByteRows bytes_at(uint8_t* first, int64_t stride) const {
    return {first, stride,
            !fits_in_cache && (reinterpret_cast<uintptr_t>(first) | stride) % 64 == 0};
  }
  ByteRows rows(const RowBlock& block, int64_t col) const {
    return bytes_at(q ? q + block.begin * features + col : nullptr, features);
  }
  ByteRows columns(const RowBlock& block, int64_t col) const {
    if (!expert_rows) return bytes_at(q_t + (block.index * features + col) * kBlock, kBlock);
    return bytes_at(q_t + (block.group * features + col) * expert_rows + block.begin -
                        block.group * expert_rows,
                    expert_rows);
  }

  void add_writes(const RowBlock& block, int64_t col, int64_t cols, TilePrefetch& next) const {
    if (q) next.add_writes(0, rows(block, col), block.end - block.begin);
    if (q_t) next.add_writes(1, columns(block, col), cols);
  }
  void store(const ByteTile& bytes, const RowBlock& block, int64_t col, int64_t cols) const {
    bytes.store(rows(block, col), block.end - block.begin, cols);
  }
  void store_transposed(const ByteTile& bytes, const RowBlock& block, int64_t col, int64_t cols,
                        int64_t filled) const {
    bytes.store_transposed(columns(block, col), filled,
                           expert_rows ? block.end - block.begin : kBlock, cols);
  }
};

template <typename Targets, typename Reader>
void set_next_tile(const RowBlock& block, int64_t col, const Targets& targets, const Reader& reader,
                   TilePrefetch& next) {
  next.num_reads = block.end - block.begin;
  for (int64_t r = 0; r < next.num_reads; ++r) next.reads[r] = reader.source(block, r, col);
  targets.add_writes(block, col, std::min(kBlock, targets.features - col), next);
}

// Up to so many bytes read and written stay in or near the L2 cache: nothing is prefetched or
// streamed (AMD EPYC 9004, two cores, both layouts: no difference at 4 MiB; at 8 MiB one core takes
// 0.36 ns an element, 0.27 ns with streaming).
constexpr int64_t kCachedBytes = 4 << 20;

// Fills one tile after the other and writes what it becomes.
template <typename Targets, typename Reader>
void quantize_tiles(ScalarType dtype, const std::vector<RowBlock>& blocks, Targets targets,
                    const Reader& reader) {
  const int64_t features = targets.features, col_blocks = ceil_div(features, kBlock);
  const int64_t tiles = static_cast<int64_t>(blocks.size()) * col_blocks;
  targets.fits_in_cache = tiles * kBlock * kBlock * (element_size(dtype) + 2) <= kCachedBytes;
  const bool in_place = reader.stride > 0 && dtype != ScalarType::Half;
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    Tile tile(dtype);
    tile.prefetch.is_float32 = dtype == ScalarType::Float;
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock& block = blocks[i / col_blocks];
      const int64_t col = i % col_blocks * kBlock, cols = std::min(kBlock, features - col);
      const int64_t rows = block.end - block.begin;
      if (in_place && cols == kBlock && rows % kRowStep == 0)
        tile.view({reader.source(block, 0, col), reader.stride}, rows);
      else
        tile.fill(rows, cols, [&](int64_t r, void* row) {
          const char* source = reader.source(block, r, col);
          if (dtype != ScalarType::Half) return reader.fill_row(source, block, r, col, cols, row);
          uint16_t halves[kBlock];
          reader.fill_row(source, block, r, col, cols, halves);
          load_row(halves, dtype, cols, static_cast<float*>(row));
        });
      if (!targets.fits_in_cache && i + 1 < end)
        set_next_tile(blocks[(i + 1) / col_blocks], (i + 1) % col_blocks * kBlock, targets, reader,
                      tile.prefetch);
      if (targets.block_sums) tile.col_sums(targets.block_sums + block.index * features + col);
      targets.write(tile, block, col, cols);
    }
    if (!targets.fits_in_cache) stream_fence();
  });
}

// quantize_tiles and, unless bias_grad [groups, K] is null, bias_grad[e] = the sum of group e's
// rows: the sums of its blocks, added from the first to the last.
template <typename Targets, typename Reader>
void quantize_and_sum(ScalarType dtype, const std::vector<RowBlock>& blocks, Targets targets,
                      int64_t groups, float* bias_grad, const Reader& reader) {
  const int64_t features = targets.features;
  std::vector<float> block_sums(bias_grad ? blocks.size() * features : 0);
  if (bias_grad) targets.block_sums = block_sums.data();
  quantize_tiles(dtype, blocks, targets, reader);
  if (!bias_grad) return;

  std::fill_n(bias_grad, groups * features, 0.0f);
  for (const RowBlock& block : blocks)
    for (int64_t c = 0; c < features; ++c)
      bias_grad[block.group * features + c] += block_sums[block.index * features + c];
}

// The e4m3 numbers of `rows` x `cols` weights, w [128][128], in blocks of MXFP4 along a dimension,
// -1 or -2: those of quantize_mxfp4's codes. Returns what multiplies them to dequantize.
float encode_mxfp4(const float* w, int64_t rows, int64_t cols, int64_t dim, ByteTile& bytes);

// An output of an op, or an empty tensor if it is not requested.
inline Tensor output_if(bool requested, const Tensor& like, const Shape& shape, ScalarType dtype) {
  return new_output(like, requested ? shape : Shape{0}, dtype);
}

template <typename Element>
Element* pointer_if(bool requested, const Tensor& t) {
  return requested ? static_cast<Element*>(t.data_ptr()) : nullptr;
}

template <typename Element>
Element* pointer_if(const std::optional<Tensor>& t) {
  return t ? static_cast<Element*>(t->data_ptr()) : nullptr;
}

}  // namespace grouped_linear::cpu
