// What a block-scaling pass quantizes: rows of a tensor, gathered rows, SwiGLU, SwiGLU's gradient.
//
// A source loads the calling thread's fragment of a tile, with zeros past the tile's rows and
// columns. A source with kParts == 2 loads one fragment in each half of the columns, K / 2 apart. A
// source with a Second also loads one of another matrix [T, K / kParts], which is quantized
// columnwise. A source with a Buffer prefetches into shared memory where its rows are aligned: a
// thread block starts the copies of its next tile as soon as it holds this one in registers. SwiGLU
// takes a tile in four steps of two rows a fragment and keeps two steps in flight; with one step,
// each step waited for memory.
//
// Waves are how many times over a grid fills the GPU. A thread block steps through every
// gridDim.x-th tile, and neighbouring blocks have neighbouring columns of the same rows (gathered
// rows: see below). Blocks
// that start one after another stay in that order, and so near each other in memory; blocks that
// stay for many tiles drift apart. Where a tile costs little besides its bytes, blocks are
// therefore many and brief, and do not prefetch. Where a tile costs more (SwiGLU, gathered rows),
// they are fewer and prefetch. Speed with 2, 4, 8 and 32 waves, relative to 1 (H200, 2026-11-21,
// medians over 8 cases): both layouts 1.03, 1.06, 1.08, 1.09; gathered 1.01, 1.02, 1.04, 1.02;
// SwiGLU 0.98, 0.96, 0.94, 0.92. Prefetching the next tiles into L2 alone costs 10 to 20%. More
// than 32 groups take a thread block time to look at: it stays for more tiles.
//
// A token's row is gathered once an expert. Tiles of gathered rows are therefore taken down the
// columns (kDownColumns): 128 columns of all tokens stay in L2 until every expert has read them.
// Each wave sweeps over all columns, so waves are few. The speeds above are of tiles along the
// rows.
#pragma once

#include "cuda/quantize/swiglu.cuh"

namespace grouped_linear::cuda {

// Pointers are null for what is not asked for.
struct BlockOutputs {
  uint8_t* q;            // [T, K]
  float* scale;          // [ceil(K / 128), scale_stride]
  int64_t scale_stride;  // T rounded up
  uint8_t* q_t;          // [row blocks, K, 128]
  float* scale_t;        // [row blocks, K]
  bool share_scales;     // the 128 columns of a tile share a scale_t if their amax lie near enough
  float* partial_bias_grad;  // [row blocks, K], see bias_grad.cuh
};

struct Waves {
  int few_groups, many_groups;  // at most 32, more
};

// A tile of [T, K]: its number by rows and by columns, where it starts, and how much of it is
// valid.
struct TileBounds {
  int block, col_block;
  int row_begin, rows, col, cols;
};

// Rows of x [T, K].
template <typename Element>
struct Rows {
  static constexpr int kOccupancy = kTileOccupancy<Element>, kParts = 1;
  static constexpr Waves kWaves{32, 8};
  static constexpr bool kCanShareScales = true;  // see BlockOutputs
  static constexpr bool kDownColumns = false;    // see above
  struct Buffer {};
  const Element* x;
  int64_t stride;
  bool vectorised;

  __device__ __forceinline__ void prefetch(Buffer&, const TileBounds&) const {}
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[1], Buffer&,
                                       const TileBounds& at) const {
    fragment[0].load(x + at.row_begin * stride + at.col, stride, at.rows, at.cols, vectorised);
  }
};

// Rows indices[t] of x [S, K], S >= 1. Indices out of range are clamped into it. vectorised: S and
// the bytes of a row also fit into 32 bits.
template <typename Element, typename Index>
struct GatheredRows {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 3 : 2, kParts = 1;
  static constexpr Waves kWaves{4, 1};
  static constexpr bool kCanShareScales = true;
  static constexpr bool kDownColumns = true;
  using Buffer = PrefetchBuffer<Element>;
  const Element* x;
  int64_t stride;
  bool vectorised;
  const Index* indices;
  int64_t S;

  // The row of x that is row i of the calling thread's fragment.
  __device__ __forceinline__ int64_t source_row(const TileBounds& at, int i) const {
    const int64_t s =
        indices[at.row_begin + min(Fragment<Element>::row() * kFragmentSize + i, at.rows - 1)];
    return min(max(s, int64_t{0}), S - 1);
  }
  __device__ __forceinline__ void prefetch(Buffer& buffer, const TileBounds& at) const {
    if (vectorised) {
      // Half a warp has the same eight rows: each thread looks up one.
      const auto own = static_cast<uint32_t>(source_row(at, threadIdx.x % kFragmentSize));
      const auto* first = reinterpret_cast<const uint8_t*>(x + at.col);
      const uint32_t row_bytes = static_cast<uint32_t>(stride) * sizeof(Element);
      const auto row = [&](int i) {
        const uint64_t s = __shfl_sync(kFullWarp, own, i, kFragmentSize);
        return reinterpret_cast<const Element*>(first + s * row_bytes);
      };
      Fragment<Element>::prefetch_rows(buffer, row, at.rows, at.cols);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[1], Buffer& buffer,
                                       const TileBounds& at) const {
    if (vectorised) {
      cp_async_wait();
      fragment[0].load_prefetched(buffer);
    } else {
      const auto row = [&](int i) { return x + source_row(at, i) * stride + at.col; };
      fragment[0].load_rows(row, at.rows, at.cols, false);
    }
  }
};

// h [T, K] of gate_up [T, 2 K], rounded to Element; also stored to h where h is not null. weighted:
// times weight[t], before it is rounded.
template <typename Element, typename Form, bool weighted = false>
struct SwigluRows {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 3 : 1, kParts = 1;
  static constexpr Waves kWaves{1, 1};
  static constexpr bool kCanShareScales = true;
  static constexpr bool kDownColumns = false;
  static constexpr int kRows = 2;  // of a fragment in a step: so few registers that 3 blocks fit
  struct Buffer {
    PrefetchBuffer<Element, 2 * kRows> gate, up;
  };
  const Element* gate_up;
  int64_t stride;
  bool vectorised;
  int K;
  Element* h;
  Form form;
  const float* weight = nullptr;

  __device__ __forceinline__ void prefetch(Buffer& buffer, const TileBounds& at) const {
    prefetch_step<0>(buffer, at);
    prefetch_step<kRows>(buffer, at);
  }
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[1], Buffer& buffer,
                                       const TileBounds& at) const {
    load_steps<0>(fragment[0], buffer, at);
    if (!h) return;
    const int first = Fragment<Element>::row() * kFragmentSize;
    const int column = Fragment<Element>::column() * kFragmentSize;
    const int valid_rows = column < at.cols ? at.rows - first : 0;
    Element* next = h + static_cast<int64_t>(at.row_begin + first) * K + at.col + column;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) {
      Element* to = advance_row(next, K);
      if (i < valid_rows) Fragment<Element>::store_row(fragment[0].words[i], to);
    }
  }

 private:
  // The first row of the tile, in gate_up.
  __device__ __forceinline__ const Element* gate(const TileBounds& at) const {
    return gate_up + at.row_begin * stride + gate_column(form, at.col);
  }
  template <int begin>
  __device__ __forceinline__ void prefetch_step(Buffer& buffer, const TileBounds& at) const {
    if (!vectorised) return;
    constexpr int end = begin + kRows;
    int cols = at.cols, cols_of_up = at.cols;
    if (form.interleaved) {  // the first 128 columns of the tile's gates and ups, and the other 128
      __syncwarp();          // other threads have read what this one copied before
      cols *= 2;
      cols_of_up = cols - kTile;
    }
    const Element* up = gate(at) + (form.interleaved ? kTile : K);
    Fragment<Element>::template prefetch<begin, end>(buffer.gate, gate(at), stride, at.rows, cols);
    Fragment<Element>::template prefetch<begin, end>(buffer.up, up, stride, at.rows, cols_of_up);
    cp_async_commit();
  }
  // Where gate and up are interleaved, `gate` and `up` become the two halves of 16 neighbours.
  template <int begin, int end>
  __device__ __forceinline__ void load_prefetched(Fragment<Element>& gate, Fragment<Element>& up,
                                                  const Buffer& buffer) const {
    if (!form.interleaved) {
      gate.template load_prefetched<begin, end>(buffer.gate);
      return up.template load_prefetched<begin, end>(buffer.up);
    }
    __syncwarp();
    const int column = Fragment<Element>::column(), copied_by = threadIdx.x - column;
    const auto& half = column < kFragmentsPerSide / 2 ? buffer.gate : buffer.up;
    const int fragment = 2 * column % kFragmentsPerSide;
    gate.template load_prefetched<begin, end>(half, copied_by + fragment);
    up.template load_prefetched<begin, end>(half, copied_by + fragment + 1);
  }
  // From row `begin` of the fragment on. While a step computes, later ones are in flight.
  template <int begin>
  __device__ __forceinline__ void load_steps(Fragment<Element>& fragment, Buffer& buffer,
                                             const TileBounds& at) const {
    constexpr int end = begin + kRows, in_flight = end < kFragmentSize ? 1 : 0;
    Fragment<Element> ups;
    if (vectorised) {
      cp_async_wait<in_flight>();
      load_prefetched<begin, end>(fragment, ups, buffer);
      if constexpr (end + kRows < kFragmentSize) prefetch_step<end + kRows>(buffer, at);
    } else {
      const int own = form.interleaved ? Fragment<Element>::column() * kFragmentSize : 0;
      const Element *gates = gate(at) + own, *up = gates + up_offset(form, K);
      fragment.template load<begin, end>(gates, stride, at.rows, at.cols, false);
      ups.template load<begin, end>(up, stride, at.rows, at.cols, false);
    }
    // Small groups leave most warps without rows.
    const int first = Fragment<Element>::row() * kFragmentSize;
    if (first < at.rows)
#pragma unroll
      for (int i = begin; i < end; ++i) {
        const float w = weighted && first + i < at.rows ? weight[at.row_begin + first + i] : 0.0f;
        swiglu_row<Element>(form, fragment.words[i], ups.words[i],
                            [w](float h) { return weighted ? __fmul_rn(w, h) : h; });
      }
    if constexpr (end < kFragmentSize) load_steps<end>(fragment, buffer, at);
  }
};

// d_gate_up [T, 2 K] from dh [T, K], gate_up [T, 2 K] and weight [T], rounded to Element; and
// partial sums of d_weight [col blocks, T], over a tile's columns. with_h: also weight * h [T, K],
// as the Second.
//
// parts == 2 reads everything once. It needs 16-bit elements, aligned rows and K a multiple of 128,
// so that no tile reaches from the columns of gate into those of up. With parts == 1 a fragment is
// of gate or of up alone, for K is a multiple of 16; where the two are interleaved it has four of
// each.
template <typename Element, int parts, typename Form, bool with_h>
struct SwigluGradRows {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 2 : 1, kParts = parts;
  static constexpr Waves kWaves{1, 1};
  static constexpr bool kCanShareScales = false;  // a gradient's features never share a scale
  static constexpr bool kDownColumns = false;
  static constexpr int kRows = 2;  // of a fragment in a step; with 4, registers spill
  static constexpr int kFragments = parts + with_h;
  struct Buffer {
    PrefetchBuffer<Element, 2 * kRows> dh, gate, up;
  };
  const Element* dh;
  int64_t dh_stride;
  const Element* gate_up;
  int64_t stride;
  bool vectorised;
  int K;
  Form form;
  const float* weight;
  float* partial_d_weight;
  int64_t T;
  BlockOutputs second;  // of h, where with_h

  __device__ __forceinline__ void prefetch(Buffer& buffer, const TileBounds& at) const {
    prefetch_step<0>(buffer, at, operands(at));
    prefetch_step<kRows>(buffer, at, operands(at));
  }
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[kFragments], Buffer& buffer,
                                       const TileBounds& at) const {
    load_steps<0>(fragment, buffer, at, operands(at));
  }

 private:
  // The first row of the tile in each operand, as if all of its columns were in this fragment's
  // half.
  struct Operands {
    bool of_gate, needs_up;
    const Element *dh, *gate;
  };
  __device__ __forceinline__ Operands operands(const TileBounds& at) const {
    const int own = Fragment<Element>::column() * kFragmentSize;
    const bool of_gate = parts == 2 || at.col + own < K;
    int k = of_gate ? at.col : at.col - K, dh_k = k;
    if (is_interleaved()) {
      k = at.col;
      dh_k = (at.col + own) / 2 / kFragmentSize * kFragmentSize - own;
    }
    return {of_gate, (of_gate || Form::kHasLimit) && !is_interleaved(),
            dh + at.row_begin * dh_stride + dh_k, gate_up + at.row_begin * stride + k};
  }
  __device__ __forceinline__ bool is_interleaved() const { return parts == 1 && form.interleaved; }
  template <int begin>
  __device__ __forceinline__ void prefetch_step(Buffer& buffer, const TileBounds& at,
                                                const Operands& from) const {
    if (parts == 1 && !vectorised) return;
    constexpr int end = begin + kRows;
    Fragment<Element>::template prefetch<begin, end>(buffer.dh, from.dh, dh_stride, at.rows,
                                                     at.cols);
    Fragment<Element>::template prefetch<begin, end>(buffer.gate, from.gate, stride, at.rows,
                                                     at.cols);
    if (!is_interleaved())
      Fragment<Element>::template prefetch<begin, end>(buffer.up, from.gate + K, stride,
                                                       from.needs_up ? at.rows : 0, at.cols);
    cp_async_commit();
  }
  // Adds two rows over a row of fragments, which is half a warp: its first eight threads add one
  // row, the others the other.
  template <int begin>
  __device__ __forceinline__ void store_d_weight(const float (&d_weight)[kRows],
                                                 const TileBounds& at) const {
    static_assert(kRows == 2);
    const bool second = threadIdx.x & 8;
    float sum = second ? d_weight[1] : d_weight[0];
    sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, second ? d_weight[0] : d_weight[1], 8));
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, distance));
    const int row = Fragment<Element>::row() * kFragmentSize + begin + second;
    if (threadIdx.x % 8 == 0 && row < at.rows)
      partial_d_weight[at.col_block * T + at.row_begin + row] = sum;
  }
  // From row `begin` of the fragments on. While a step computes, later ones are in flight.
  template <int begin>
  __device__ __forceinline__ void load_steps(Fragment<Element> (&fragment)[kFragments],
                                             Buffer& buffer, const TileBounds& at,
                                             const Operands& from) const {
    constexpr int end = begin + kRows, in_flight = end < kFragmentSize ? 1 : 0;
    Fragment<Element> d, up;
    float d_weight[kRows] = {};
    if (parts == 2 || vectorised) {
      cp_async_wait<in_flight>();
      d.template load_prefetched<begin, end>(buffer.dh);
      fragment[0].template load_prefetched<begin, end>(buffer.gate);
      up.template load_prefetched<begin, end>(buffer.up);
      if constexpr (end + kRows < kFragmentSize) prefetch_step<end + kRows>(buffer, at, from);
    } else {
      d.template load<begin, end>(from.dh, dh_stride, at.rows, at.cols, false);
      fragment[0].template load<begin, end>(from.gate, stride, at.rows, at.cols, false);
      up.template load<begin, end>(from.gate + K, stride, from.needs_up ? at.rows : 0, at.cols,
                                   false);
    }
    const int first = Fragment<Element>::row() * kFragmentSize;
    if (first < at.rows) {
      with_arithmetic(form, [&](const auto& arithmetic) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
          WeightedRow row{first + i < at.rows ? weight[at.row_begin + first + i] : 0.0f, 0.0f};
          if constexpr (parts == 2) {
            FragmentRow<Element> h;
            swiglu_grad_row<Element>(arithmetic, row, d.words[i], fragment[0].words[i], up.words[i],
                                     h);
            copy_row<Element>(fragment[1].words[i], up.words[i]);
            if constexpr (with_h) copy_row<Element>(fragment[2].words[i], h);
          } else if (is_interleaved()) {
            swiglu_grad_interleaved_row<Element>(arithmetic, Fragment<Element>::column() % 2 == 1,
                                                 row, d.words[i], fragment[0].words[i]);
          } else {
            swiglu_grad_half_row<Element>(arithmetic, from.of_gate, row, d.words[i],
                                          fragment[0].words[i], up.words[i]);
          }
          d_weight[i - begin] = row.d_weight;
        }
      });
    } else {
      fragment[parts - 1].template clear<begin, end>();
      if constexpr (with_h) fragment[2].template clear<begin, end>();
    }
    store_d_weight<begin>(d_weight, at);
    if constexpr (end < kFragmentSize) load_steps<end>(fragment, buffer, at, from);
  }
};

}  // namespace grouped_linear::cuda
