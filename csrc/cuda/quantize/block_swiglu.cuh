// SPDX-License-Identifier: Apache-2.0
// What a block-scaling pass quantizes of SwiGLU: its output, or its gradient beside its output. What
// a source is, and what waves are: block_sources.cuh.
//
// SwiGLU takes a tile in four steps of two rows a fragment and keeps two steps in flight; with one
// step, each step waited for memory.
#pragma once

#include "cuda/quantize/block_sources.cuh"
#include "cuda/swiglu/swiglu.cuh"

namespace grouped_linear::cuda {

// h [T, K] of gate_up [T, 2 K], rounded to Element; also stored to h where h is not null. weighted:
// times weight[t], before it is rounded.
template <typename Element, typename Form, bool weighted = false>
struct SwigluRows {
  static_assert(sizeof(Element) == 2, "three blocks of 16-bit elements fit on an SM");
  static constexpr int kOccupancy = 3, kParts = 1;
  static constexpr Waves kWaves{1, 1};
  static constexpr bool kCanShareScales = true;
  static constexpr bool kDownColumns = false, kSingleRows = true;
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
  __device__ __forceinline__ void load_row(int row, int col, FragmentRow<Element>& to) const {
    const Element* from = gate_up + row * stride + gate_column(form, col);
    FragmentRow<Element> up;
    Fragment<Element>::load_row(from, vectorised, to);
    Fragment<Element>::load_row(from + up_offset(form, K), vectorised, up);
    const float w = weighted ? weight[row] : 0.0f;
    swiglu_row<Element>(form, to, up, [w](float x) { return weighted ? __fmul_rn(w, x) : x; });
    if (h) Fragment<Element>::store_row(to, h + static_cast<int64_t>(row) * K + col);
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
      cols_of_up = cols - kTileSide;
    }
    const Element* up = gate(at) + (form.interleaved ? kTileSide : K);
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

// Beside SwiGLU's gradient weight * h [T, K] is quantized as the Second, or stored, or neither.
enum class WeightedH { kNone, kQuantized, kStored };

// d_gate_up [T, 2 K] from dh [T, K], gate_up [T, 2 K] and weight [T], rounded to Element; and
// partial sums of d_weight [col blocks, T], over a tile's columns.
//
// Everything is read once, for both halves of the gradient. Rows are aligned, and K is a multiple of
// 128, so that no tile reaches from the columns of gate into those of up.
template <typename Element, typename Form, WeightedH weighted_h>
struct SwigluGradRows {
  static_assert(sizeof(Element) == 2, "two blocks of 16-bit elements fit on an SM");
  static constexpr int kOccupancy = 2, kParts = 2;
  static constexpr Waves kWaves{1, 1};
  static constexpr bool kCanShareScales = false;  // a gradient's features never share a scale
  static constexpr bool kDownColumns = false;
  static constexpr int kRows = 2;  // of a fragment in a step; with 4, registers spill
  static constexpr int kFragments = kParts + (weighted_h == WeightedH::kQuantized);
  struct Buffer {
    PrefetchBuffer<Element, 2 * kRows> dh, gate, up;
  };
  const Element* dh;
  int64_t dh_stride;
  const Element* gate_up;
  int64_t stride;
  int K;
  Form form;
  const float* weight;
  float* partial_d_weight;
  int64_t T;
  BlockOutputs second;  // of h, where it is quantized
  Element* h;           // where it is stored

  __device__ __forceinline__ void prefetch(Buffer& buffer, const TileBounds& at) const {
    prefetch_step<0>(buffer, at, operands(at));
    prefetch_step<kRows>(buffer, at, operands(at));
  }
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[kFragments], Buffer& buffer,
                                       const TileBounds& at) const {
    load_steps<0>(fragment, buffer, at, operands(at));
  }

 private:
  // The first row of the tile in each operand.
  struct Operands {
    const Element *dh, *gate;
  };
  __device__ __forceinline__ Operands operands(const TileBounds& at) const {
    return {dh + at.row_begin * dh_stride + at.col, gate_up + at.row_begin * stride + at.col};
  }
  template <int begin>
  __device__ __forceinline__ void prefetch_step(Buffer& buffer, const TileBounds& at,
                                                const Operands& from) const {
    constexpr int end = begin + kRows;
    Fragment<Element>::template prefetch<begin, end>(buffer.dh, from.dh, dh_stride, at.rows,
                                                     at.cols);
    Fragment<Element>::template prefetch<begin, end>(buffer.gate, from.gate, stride, at.rows,
                                                     at.cols);
    Fragment<Element>::template prefetch<begin, end>(buffer.up, from.gate + K, stride, at.rows,
                                                     at.cols);
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
  __device__ __forceinline__ void store_h(const FragmentRow<Element>& row, int number,
                                          const TileBounds& at) const {
    const int column = at.col + Fragment<Element>::column() * kFragmentSize;
    if (number < at.rows)
      Fragment<Element>::store_row(row,
                                   h + static_cast<int64_t>(at.row_begin + number) * K + column);
  }
  // From row `begin` of the fragments on. While a step computes, later ones are in flight.
  template <int begin>
  __device__ __forceinline__ void load_steps(Fragment<Element> (&fragment)[kFragments],
                                             Buffer& buffer, const TileBounds& at,
                                             const Operands& from) const {
    constexpr int end = begin + kRows, in_flight = end < kFragmentSize ? 1 : 0;
    Fragment<Element> d, up;
    float d_weight[kRows] = {};
    cp_async_wait<in_flight>();
    d.template load_prefetched<begin, end>(buffer.dh);
    fragment[0].template load_prefetched<begin, end>(buffer.gate);
    up.template load_prefetched<begin, end>(buffer.up);
    if constexpr (end + kRows < kFragmentSize) prefetch_step<end + kRows>(buffer, at, from);
    const int first = Fragment<Element>::row() * kFragmentSize;
    if (first < at.rows) {
      with_arithmetic(form, [&](const auto& arithmetic) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
          WeightedRow row{first + i < at.rows ? weight[at.row_begin + first + i] : 0.0f, 0.0f};
          FragmentRow<Element> h;
          swiglu_grad_row<Element>(arithmetic, row, d.words[i], fragment[0].words[i], up.words[i],
                                   h);
          copy_row<Element>(fragment[1].words[i], up.words[i]);
          if constexpr (weighted_h == WeightedH::kQuantized)
            copy_row<Element>(fragment[2].words[i], h);
          if constexpr (weighted_h == WeightedH::kStored) store_h(h, first + i, at);
          d_weight[i - begin] = row.d_weight;
        }
      });
    } else {
      fragment[1].template clear<begin, end>();
      if constexpr (weighted_h == WeightedH::kQuantized) fragment[2].template clear<begin, end>();
    }
    store_d_weight<begin>(d_weight, at);
    if constexpr (end < kFragmentSize) load_steps<end>(fragment, buffer, at, from);
  }
};

}  // namespace grouped_linear::cuda
