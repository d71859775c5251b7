// SPDX-License-Identifier: Apache-2.0
// A 128 x 128 tile in the registers of 256 threads.
//
// A thread holds a fragment of 8 rows x 8 columns. A row of a fragment is one 16-byte load of a
// 16-bit format and 8 bytes of q, and a column is 8 bytes of q_t: rowwise and columnwise data both
// come straight from registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/common/fp8.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/shared_memory.cuh"

namespace grouped_linear::cuda {

// Rows and columns of a tile. A weight's tile is one scale block, so it computes its own scale.
constexpr int kTileSide = 128;
static_assert(kTileSide == kBlock, "a tile has the columns and the rows of one scale block");
constexpr int kFragmentSize = 8;                              // rows and columns of a fragment
constexpr int kFragmentsPerSide = kTileSide / kFragmentSize;  // of a tile
constexpr int kTileThreads = kFragmentsPerSide * kFragmentsPerSide;
constexpr int kTileWarps = kTileThreads / 32;

// Thread blocks that an SM must hold at once: as many as the registers of a fragment leave room
// for.
template <typename Element>
constexpr int kTileOccupancy = sizeof(Element) == 2 ? 4 : 2;

// Returns a pointer to a row and moves `next` to the row after it. The asm hides the address: for
// every row of a fragment the compiler would rather multiply 64-bit numbers than keep a pointer,
// which takes ten instructions instead of two (nvcc 13.0).
template <typename T>
__device__ __forceinline__ T* advance_row(T*& next, int64_t stride) {
  T* row = next;
  next += stride;
  asm("" : "+l"(next));
  __builtin_assume(__isGlobal(next));
  return row;
}

// Shared memory into which rows of a tile's fragments are prefetched. Every thread copies what it
// reads itself, so no thread waits for another. It may start copies as soon as it has issued its
// reads: a thread's accesses to shared memory are in order.
template <typename Element, int rows = kFragmentSize>
struct PrefetchBuffer {
  static constexpr int kRows = rows;
  static constexpr int kVectors = kFragmentSize * sizeof(Element) / 16;  // in a row of a fragment
  uint4 vectors[rows][kVectors][kTileThreads];
};

// A row of a fragment: eight elements, packed in words.
template <typename Element>
using FragmentRow = uint32_t[kFragmentSize / Word<Element>::kElements];

template <typename Element>
struct Fragment {
  static constexpr int kWords = kFragmentSize / Word<Element>::kElements;

  FragmentRow<Element> words[kFragmentSize];

  // Where the calling thread's fragment is in the tile, in fragments. The 16 fragments of a row of
  // fragments are half a warp.
  static __device__ __forceinline__ int column() { return threadIdx.x % kFragmentsPerSide; }
  static __device__ __forceinline__ int row() { return threadIdx.x / kFragmentsPerSide; }

  // Loads rows begin to end of the fragment. row_pointer(i) points at column 0 of the tile in row i
  // of the fragment. Rows and columns from `rows` and `cols` on are not read and become zero; cols
  // is a multiple of 8. vectorised: every row is aligned to 16 bytes.
  template <int begin = 0, int end = kFragmentSize, typename Row>
  __device__ __forceinline__ void load_rows(const Row& row_pointer, int rows, int cols,
                                            bool vectorised) {
    const int valid_rows = column() * kFragmentSize < cols ? rows - row() * kFragmentSize : 0;
    const auto load_all = [&](auto in_vectors) {
#pragma unroll
      for (int i = begin; i < end; ++i) {
        const Element* from = row_pointer(i) + column() * kFragmentSize;
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][w] = 0;
        if (i < valid_rows) load_row(from, decltype(in_vectors)::value, words[i]);
      }
    };
    if (vectorised)
      load_all(std::true_type());
    else
      load_all(std::false_type());
  }

  // tile: its first element; `stride` elements between rows.
  template <int begin = 0, int end = kFragmentSize>
  __device__ __forceinline__ void load(const Element* tile, int64_t stride, int rows, int cols,
                                       bool vectorised) {
    const Element* next = tile + (row() * kFragmentSize + begin) * stride;
    load_rows<begin, end>([&](int) { return advance_row(next, stride); }, rows, cols, vectorised);
  }

  // Starts to copy what load_rows and load would load. All rows are aligned to 16 bytes.
  template <int begin = 0, int end = kFragmentSize, typename Buffer, typename Row>
  static __device__ __forceinline__ void prefetch_rows(Buffer& buffer, const Row& row_pointer,
                                                       int rows, int cols) {
    const int valid_rows = column() * kFragmentSize < cols ? rows - row() * kFragmentSize : 0;
#pragma unroll
    for (int i = begin; i < end; ++i) {
      const auto* from = reinterpret_cast<const uint4*>(row_pointer(i) + column() * kFragmentSize);
#pragma unroll
      for (int v = 0; v < Buffer::kVectors; ++v)
        cp_async_16(smem_address(&buffer.vectors[i % Buffer::kRows][v][threadIdx.x]), from + v,
                    i < valid_rows);
    }
  }
  template <int begin = 0, int end = kFragmentSize, typename Buffer>
  static __device__ __forceinline__ void prefetch(Buffer& buffer, const Element* tile,
                                                  int64_t stride, int rows, int cols) {
    const Element* next = tile + (row() * kFragmentSize + begin) * stride;
    prefetch_rows<begin, end>(buffer, [&](int) { return advance_row(next, stride); }, rows, cols);
  }
  // Reads prefetched rows after cp_async_wait(). Rows that another thread of the warp has
  // copied can be read after __syncwarp(), too.
  template <int begin = 0, int end = kFragmentSize, typename Buffer>
  __device__ __forceinline__ void load_prefetched(const Buffer& buffer,
                                                  int copied_by = threadIdx.x) {
#pragma unroll
    for (int i = begin; i < end; ++i)
#pragma unroll
      for (int v = 0; v < Buffer::kVectors; ++v)
        unpack(buffer.vectors[i % Buffer::kRows][v][copied_by], v, words[i]);
  }

  template <int begin, int end>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = begin; i < end; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = 0;
  }

  static __device__ __forceinline__ void load_row(const Element* from, bool vectorised,
                                                  FragmentRow<Element>& to) {
    if (vectorised) {
#pragma unroll
      for (int v = 0; v < kWords / 4; ++v) unpack(reinterpret_cast<const uint4*>(from)[v], v, to);
    } else {
      const auto* bits = reinterpret_cast<const typename Format<Element>::Bits*>(from);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        to[w] = 0;
#pragma unroll
        for (int part = 0; part < Word<Element>::kElements; ++part)
          to[w] |= static_cast<uint32_t>(bits[w * Word<Element>::kElements + part]) << 16 * part;
      }
    }
  }

  // `to` is aligned to 16 bytes.
  static __device__ __forceinline__ void store_row(const FragmentRow<Element>& from, void* to) {
#pragma unroll
    for (int v = 0; v < kWords / 4; ++v)
      static_cast<uint4*>(to)[v] =
          make_uint4(from[4 * v], from[4 * v + 1], from[4 * v + 2], from[4 * v + 3]);
  }

  // Element c of a row, as bits and as float32. c is a constant of an unrolled loop.
  static __device__ __forceinline__ uint32_t bits(const FragmentRow<Element>& row, int c) {
    constexpr int per_word = Word<Element>::kElements;
    return Word<Element>::bits(row[c / per_word], c % per_word);
  }
  static __device__ __forceinline__ float element(const FragmentRow<Element>& row, int c) {
    return Format<Element>::to_float(bits(row, c));
  }

  // Sums of the columns, from the first row to the last, starting from +0.
  __device__ __forceinline__ void column_sums(float (&sums)[kFragmentSize]) const {
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) {
      sums[c] = 0;
#pragma unroll
      for (int i = 0; i < kFragmentSize; ++i) sums[c] = __fadd_rn(sums[c], element(words[i], c));
    }
  }

  // The largest magnitude, as bits.
  template <bool finite_only>
  __device__ __forceinline__ uint32_t amax() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        largest = Word<Element>::max(largest, magnitudes<finite_only>(i, w));
    return Word<Element>::largest(largest);
  }

  // Finds the largest finite magnitude of every row (as bits) and of every column (as packed bits).
  //
  // Elements that are not finite become positive NaN in the fragment, because cvt.satfinite would
  // turn infinity into 448. Their magnitudes exceed every finite one, so one comparison tells a
  // fragment that it has none.
  __device__ __forceinline__ void find_amax(uint32_t (&row_amax)[kFragmentSize],
                                            FragmentRow<Element>& col_amax) {
    find_amax_of<false>(row_amax, col_amax);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) largest = ::max(largest, row_amax[i]);
    if (largest < Format<Element>::kInfinity) return;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t bad = Word<Element>::not_finite(magnitudes<false>(i, w));
        words[i][w] = (words[i][w] & ~bad) | (Word<Element>::kMagnitudes & bad);
      }
    }
    find_amax_of<true>(row_amax, col_amax);
  }

  // e4m3 of row i and of column c, the first element in the lowest byte. No element is infinite.
  __device__ __forceinline__ uint2 quantize_row(int i, float factor) const {
    float p[kFragmentSize];
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) p[c] = __fmul_rn(element(words[i], c), factor);
    return to_fp8x8(p);
  }
  __device__ __forceinline__ uint2 quantize_column(int c, float factor) const {
    float p[kFragmentSize];
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) p[i] = __fmul_rn(element(words[i], c), factor);
    return to_fp8x8(p);
  }

 private:
  static __device__ __forceinline__ void unpack(uint4 vector, int v, FragmentRow<Element>& to) {
    to[4 * v] = vector.x;
    to[4 * v + 1] = vector.y;
    to[4 * v + 2] = vector.z;
    to[4 * v + 3] = vector.w;
  }
  // The magnitudes of word w of row i. Non-finite ones become zero where finite_only is true.
  template <bool finite_only>
  __device__ __forceinline__ uint32_t magnitudes(int i, int w) const {
    uint32_t magnitudes = words[i][w] & Word<Element>::kMagnitudes;
    if constexpr (finite_only) magnitudes &= ~Word<Element>::not_finite(magnitudes);
    return magnitudes;
  }
  template <bool finite_only>
  __device__ __forceinline__ void find_amax_of(uint32_t (&row_amax)[kFragmentSize],
                                               FragmentRow<Element>& col_amax) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) col_amax[w] = 0;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) {
      uint32_t row = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t both = magnitudes<finite_only>(i, w);
        row = Word<Element>::max(row, both);
        col_amax[w] = Word<Element>::max(col_amax[w], both);
      }
      row_amax[i] = Word<Element>::largest(row);
    }
  }
};

// The maximum over the 16 fragments of a row of fragments; fragment c returns that of row c % 8.
// Every step halves the rows that a thread still works on: 8 shuffles instead of 32.
__device__ __forceinline__ uint32_t row_amax_of_half_warp(uint32_t (&amax)[kFragmentSize]) {
#pragma unroll
  for (int count = kFragmentSize / 2; count >= 1; count /= 2) {
    const bool upper = threadIdx.x & count;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32_t keep = upper ? amax[i + count] : amax[i];
      const uint32_t send = upper ? amax[i] : amax[i + count];
      amax[i] = max(keep, __shfl_xor_sync(kFullWarp, send, count));
    }
  }
  return max(amax[0], __shfl_xor_sync(kFullWarp, amax[0], kFragmentSize));
}

// The maximum over all threads of a tile; with a barrier.
__device__ __forceinline__ uint32_t max_of_tile(uint32_t number) {
  __shared__ uint32_t of_warps[kTileWarps];
  number = __reduce_max_sync(kFullWarp, number);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kTileWarps; ++w) number = max(number, of_warps[w]);
  return number;
}

// The largest magnitude of every column of a tile, for each warp: of 16 rows.
template <typename Element>
struct alignas(16) ColumnAmax {
  typename Format<Element>::Bits of_warps[kTileWarps][kTileSide];

  // Called by every thread with its fragment's; then a barrier.
  __device__ __forceinline__ void put(FragmentRow<Element>& col_amax) {
    constexpr int kWords = Fragment<Element>::kWords;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      col_amax[w] = Word<Element>::max(col_amax[w],
                                       __shfl_xor_sync(kFullWarp, col_amax[w], kFragmentsPerSide));
    if (threadIdx.x % 32 < kFragmentsPerSide)
      Fragment<Element>::store_row(
          col_amax, &of_warps[threadIdx.x / 32][Fragment<Element>::column() * kFragmentSize]);
  }
  // Of the 32 rows of the calling thread's warp and its neighbour.
  __device__ __forceinline__ uint32_t of_two_warps(int c) const {
    const int warp = threadIdx.x / 32;
    return max(uint32_t{of_warps[warp & ~1][c]}, uint32_t{of_warps[warp | 1][c]});
  }
};

}  // namespace grouped_linear::cuda
