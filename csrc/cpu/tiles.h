// What all quantizers share: rows in groups, cut into 128 x 128 tiles, and where their bytes go.
//
// The arithmetic, for an element of bf16 in both layouts: 2 bytes read and 2 written, 0.1 ns at the
// 40 GB/s of a core's copy in the L3 cache (AMD EPYC 9005). A tile of 32 KB and its bytes of 16 KB stay
// in the L1 and L2 caches; there, with AVX-512 VBMI, two encodings take 0.037 ns, maxima 0.014, a turn 0.012,
// filling 0.03, 0.09 in all. DESIGN.md has what whole calls reach.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/tile.h"

namespace grouped_linear::cpu {

// Where a tile's rows come from.
template <typename Source, typename FillRow>
struct Reader {
  Source source;  // source(block, r, col): the address of what row r of a block is made of
  FillRow
      fill_row;  // fill_row(source, block, r, col, cols, row): makes a tile's row of it, in `dtype`
  int64_t stride = 0;  // bytes from a row to the next, where these are a tile's rows as they are
};

// Rows of `features` elements, and which of them are each group's: those of x [T, K] as offs say,
// or the rows of every expert of a weight, one tensor [E, N, K] or E of [N, K].
struct GroupedRows {
  GroupedRows(const char* op, const Tensor& x, const Tensor& offs);
  explicit GroupedRows(const std::vector<Tensor>& weight);

  bool is_weight() const { return expert_rows > 0; }
  const char* row(const RowBlock& block, int64_t r) const {
    const int64_t of_expert = block.begin - block.group * expert_rows;
    return first[is_weight() ? block.group : 0] + (of_expert + r) * row_bytes;
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
  std::vector<const char*> first;  // of x, or of every expert
  std::vector<RowBlock> blocks;
};

// Where a tile's bytes go; null for what is not asked for. A recipe adds where its scales go, and
//   void write(Tile&, const RowBlock&, int64_t col, int64_t cols) const.
struct TileTargets {
  int64_t features;
  uint8_t* q = nullptr;         // [T, K] or [E, N, K]
  uint8_t* q_t = nullptr;       // [Tp / 128, K, 128] or, of a weight, [E, K, N]
  int64_t expert_rows = 0;      // N of a weight
  float* block_sums = nullptr;  // [blocks, K]
  bool near = true;             // in or near the L2 cache: kNear

  // Where a tile's bytes go, streamed where that is far and whole cache lines.
  ByteRows bytes_at(uint8_t* first, int64_t stride) const {
    return {first, stride, !near && (reinterpret_cast<uintptr_t>(first) | stride) % 64 == 0};
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

  void foresee(const RowBlock& block, int64_t col, int64_t cols, Ahead& ahead) const {
    if (q) ahead.foresee_writes(0, rows(block, col), block.end - block.begin);
    if (q_t) ahead.foresee_writes(1, columns(block, col), cols);
  }
  void store(const ByteTile& bytes, const RowBlock& block, int64_t col, int64_t cols) const {
    bytes.store(rows(block, col), block.end - block.begin, cols);
  }
  void store_turned(const ByteTile& bytes, const RowBlock& block, int64_t col, int64_t cols,
                    int64_t filled) const {
    bytes.store_turned(columns(block, col), filled, expert_rows ? block.end - block.begin : kBlock,
                       cols);
  }
};

template <typename Targets, typename Reader>
void foresee(const RowBlock& block, int64_t col, const Targets& targets, const Reader& reader,
             Ahead& ahead) {
  ahead.n_reads = block.end - block.begin;
  for (int64_t r = 0; r < ahead.n_reads; ++r) ahead.reads[r] = reader.source(block, r, col);
  targets.foresee(block, col, std::min(kBlock, targets.features - col), ahead);
}

// Bytes read and written that are in or near the L2 cache: nothing is asked for ahead, and results stay there
// (AMD EPYC 9004, two cores, both layouts: no difference at 4 MiB; at 8 MiB 0.36 ns of a core an element, 0.27
// when streamed).
constexpr int64_t kNear = 4 << 20;

// Fills tiles in turn and has them written.
template <typename Targets, typename Reader>
void quantize_tiles(ScalarType dtype, const std::vector<RowBlock>& blocks, Targets targets,
                    const Reader& reader) {
  const int64_t features = targets.features, col_blocks = ceil_div(features, kBlock);
  const int64_t tiles = static_cast<int64_t>(blocks.size()) * col_blocks;
  targets.near = tiles * kBlock * kBlock * (element_size(dtype) + 2) <= kNear;
  const bool as_it_is = reader.stride > 0 && dtype != ScalarType::Half;
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    Tile tile(dtype);
    tile.ahead.wide = dtype == ScalarType::Float;
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock& block = blocks[i / col_blocks];
      const int64_t col = i % col_blocks * kBlock, cols = std::min(kBlock, features - col);
      const int64_t rows = block.end - block.begin;
      if (as_it_is && cols == kBlock && rows % kRowStep == 0)
        tile.look_at({reader.source(block, 0, col), reader.stride}, rows);
      else
        tile.fill(rows, cols, [&](int64_t r, void* row) {
          const char* source = reader.source(block, r, col);
          if (dtype != ScalarType::Half) return reader.fill_row(source, block, r, col, cols, row);
          uint16_t halves[kBlock];
          reader.fill_row(source, block, r, col, cols, halves);
          load_row(halves, dtype, cols, static_cast<float*>(row));
        });
      if (!targets.near && i + 1 < end)
        foresee(blocks[(i + 1) / col_blocks], (i + 1) % col_blocks * kBlock, targets, reader,
                tile.ahead);
      if (targets.block_sums) tile.col_sums(targets.block_sums + block.index * features + col);
      targets.write(tile, block, col, cols);
    }
    if (!targets.near) end_of_streams();
  });
}

// quantize_tiles and, unless bias_grad [groups, K] is null, bias_grad[e] = the sums of group e's
// blocks, from the first to the last.
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

// An output of an op, for what is asked for.
inline Tensor output_if(bool wanted, const Tensor& like, const Shape& shape, ScalarType dtype) {
  return new_output(like, wanted ? shape : Shape{0}, dtype);
}

template <typename Element>
Element* pointer_if(bool wanted, const Tensor& t) {
  return wanted ? static_cast<Element*>(t.data_ptr()) : nullptr;
}

template <typename Element>
Element* pointer_if(const std::optional<Tensor>& t) {
  return t ? static_cast<Element*>(t->data_ptr()) : nullptr;
}

}  // namespace grouped_linear::cpu
