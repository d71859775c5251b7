// Block scaling of a 128 x 128 tile that 256 threads hold in registers.
//
// A thread holds a patch of 8 rows x 8 columns: a row of a patch is one 16-byte load of a 16-bit
// format and 8 bytes of q, a column is 8 bytes of q_t, so rowwise and columnwise data both come
// straight from registers and only q_t passes through shared memory, once, to reach its long rows:
// 16 KB written and read of the 128 bytes a cycle an SM has, 256 cycles a tile. Copying the same
// 65 KB (32 in, 33 out) through an SM's share of 4.27 TB/s takes about 3600.
//
// The numbers are those of cpu/tile.cpp and cpu/numerics.h, bit for bit: every operation below is
// IEEE, rounds to nearest, keeps subnormals and is never contracted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace grouped_linear::cuda {

constexpr int kTile = 128;                // rows and columns of a tile
constexpr int kPatch = 8;                 // rows and columns of one thread's share
constexpr int kPatches = kTile / kPatch;  // patches along a side
constexpr int kTileThreads = kPatches * kPatches;
constexpr int kTileWarps = kTileThreads / 32;
constexpr uint32_t kFullWarp = 0xffffffff;

// CTAs an SM is to hold: what the registers of a patch leave room for.
template <typename Element>
constexpr int kTileOccupancy = sizeof(Element) == 2 ? 4 : 2;

struct ScaleRule {
  float amax_epsilon;
  bool power_of_two;
};

// What a block is multiplied by to quantize it, and by to dequantize it.
struct BlockScale {
  float factor, scale;
};

// fp8_max is 1.75 times a power of two, in e4m3 and in e5m2.
__device__ __forceinline__ BlockScale block_scale(float amax, ScaleRule rule,
                                                  float fp8_max = 448.0f) {
  amax = fmaxf(amax, rule.amax_epsilon);
  if (amax == 0) return {1, 1};
  if (rule.power_of_two) {
    // The exponent of fp8_max / amax, without dividing; at most 126, so that 1 / factor is a normal
    // number. A denormal amax reaches that.
    const uint32_t bits = __float_as_uint(amax), mantissa = 0x7fffff;
    const uint32_t top = (__float_as_uint(fp8_max) >> 23) + 127;
    const uint32_t exponent = min(top - (bits >> 23) - ((bits & mantissa) > 0x600000), 253u);
    return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
  }
  const float factor = fminf(__fdiv_rn(fp8_max, amax), 0x1p126f);
  return {factor, __fdiv_rn(1.0f, factor)};
}

// Four e4m3 numbers, the first in the lowest byte. NaN becomes 0x7f, but infinity saturates like
// any other number: Patch::find_amax leaves none.
__device__ __forceinline__ uint32_t to_e4m3x4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// A pointer to a row, which then moves on to the next. Opaque: for every row of a patch the compiler
// would rather multiply 64-bit numbers than keep a pointer, which is ten instructions and not two.
template <typename T>
__device__ __forceinline__ T* take_row(T*& next, int64_t stride) {
  T* row = next;
  next += stride;
  asm("" : "+l"(next));
  __builtin_assume(__isGlobal(next));
  return row;
}

// Starts to copy from global to shared memory; zeros where there is nothing to read.
__device__ __forceinline__ void copy_16_bytes(uint4* to, const uint4* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// Ends a batch of copies.
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Every batch that this thread ended is complete after, but the last `in_flight`.
template <int in_flight = 0>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(in_flight) : "memory");
}

// Magnitudes of floats are ordered as integers, and from kInfinity up they are not finite.
template <typename Element>
struct Format;

template <>
struct Format<__nv_bfloat16> {
  using Bits = uint16_t;
  static constexpr uint32_t kInfinity = 0x7f80;
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return __uint_as_float(bits << 16);
  }
  static __device__ __forceinline__ uint32_t from_floats(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Format<__half> {
  using Bits = uint16_t;
  static constexpr uint32_t kInfinity = 0x7c00;
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  static __device__ __forceinline__ uint32_t from_floats(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Format<float> {
  using Bits = uint32_t;
  static constexpr uint32_t kInfinity = 0x7f800000;
  static __device__ __forceinline__ float to_float(uint32_t bits) { return __uint_as_float(bits); }
};

// One 32-bit word of elements: two of a 16-bit format, or a float32.
template <typename Element>
struct Word {
  static constexpr int kElements = 4 / sizeof(Element);
  static constexpr uint32_t kMagnitudes = kElements == 2 ? 0x7fff7fff : 0x7fffffff;

  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    if constexpr (kElements == 2)
      return __vmaxu2(a, b);
    else
      return ::max(a, b);
  }
  static __device__ __forceinline__ uint32_t largest(uint32_t word) {
    if constexpr (kElements == 2)
      return ::max(word & 0xffff, word >> 16);
    else
      return word;
  }
  // All ones over every magnitude that is not finite.
  static __device__ __forceinline__ uint32_t not_finite(uint32_t magnitudes) {
    constexpr uint32_t infinity = Format<Element>::kInfinity;
    if constexpr (kElements == 2)
      return __vcmpgeu2(magnitudes, infinity | infinity << 16);
    else
      return magnitudes >= infinity ? 0xffffffff : 0;
  }
};

// Shared memory for some rows of a tile's patches, on their way. Every thread copies what it reads
// itself, so none waits for another. It may start copies as soon as it has issued its reads: a
// thread's accesses to shared memory are in order.
template <typename Element, int rows = kPatch>
struct TileAhead {
  static constexpr int kRows = rows;
  static constexpr int kPieces = kPatch * sizeof(Element) / 16;  // of a row of a patch
  uint4 pieces[rows][kPieces][kTileThreads];
};

template <typename Element>
struct Patch {
  static constexpr int kWords = kPatch / Word<Element>::kElements;

  uint32_t words[kPatch][kWords];

  // The patch's place in the tile. The 16 patches of a row of patches are half a warp.
  static __device__ __forceinline__ int column() { return threadIdx.x % kPatches; }
  static __device__ __forceinline__ int row() { return threadIdx.x / kPatches; }

  // Rows begin to end of the patch. row(i) points at column 0 of the tile in row i of the patch. Rows
  // and columns from `rows` and `cols` on are not read and are zero; cols is a multiple of 8.
  // vectorised: every row is aligned to 16 bytes.
  template <int begin = 0, int end = kPatch, typename Row>
  __device__ __forceinline__ void load_rows(const Row& row_pointer, int rows, int cols,
                                            bool vectorised) {
    const int here = column() * kPatch < cols ? rows - row() * kPatch : 0;
    const auto load_all = [&](auto in_words) {
#pragma unroll
      for (int i = begin; i < end; ++i) {
        const Element* from = row_pointer(i) + column() * kPatch;
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][w] = 0;
        if (i < here) load_words(from, decltype(in_words)::value, words[i]);
      }
    };
    if (vectorised)
      load_all(std::true_type());
    else
      load_all(std::false_type());
  }

  // tile: its first element; `stride` elements between rows.
  template <int begin = 0, int end = kPatch>
  __device__ __forceinline__ void load(const Element* tile, int64_t stride, int rows, int cols,
                                       bool vectorised) {
    const Element* next = tile + (row() * kPatch + begin) * stride;
    load_rows<begin, end>([&](int) { return take_row(next, stride); }, rows, cols, vectorised);
  }

  // Starts to copy what load_rows would load. All rows are aligned to 16 bytes.
  template <int begin = 0, int end = kPatch, typename Ahead, typename Row>
  static __device__ __forceinline__ void start_rows(Ahead& ahead, const Row& row_pointer, int rows,
                                                    int cols) {
    const int here = column() * kPatch < cols ? rows - row() * kPatch : 0;
#pragma unroll
    for (int i = begin; i < end; ++i) {
      const auto* from = reinterpret_cast<const uint4*>(row_pointer(i) + column() * kPatch);
#pragma unroll
      for (int v = 0; v < Ahead::kPieces; ++v)
        copy_16_bytes(&ahead.pieces[i % Ahead::kRows][v][threadIdx.x], from + v, i < here);
    }
  }
  template <int begin = 0, int end = kPatch, typename Ahead>
  static __device__ __forceinline__ void start(Ahead& ahead, const Element* tile, int64_t stride,
                                               int rows, int cols) {
    const Element* next = tile + (row() * kPatch + begin) * stride;
    start_rows<begin, end>(ahead, [&](int) { return take_row(next, stride); }, rows, cols);
  }
  // After wait_for_copies(). What another thread of the warp has copied: after __syncwarp(), too.
  template <int begin = 0, int end = kPatch, typename Ahead>
  __device__ __forceinline__ void take(const Ahead& ahead, int copied_by = threadIdx.x) {
#pragma unroll
    for (int i = begin; i < end; ++i)
#pragma unroll
      for (int v = 0; v < Ahead::kPieces; ++v) {
        const uint4 four = ahead.pieces[i % Ahead::kRows][v][copied_by];
        words[i][4 * v] = four.x;
        words[i][4 * v + 1] = four.y;
        words[i][4 * v + 2] = four.z;
        words[i][4 * v + 3] = four.w;
      }
  }

  template <int begin, int end>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = begin; i < end; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = 0;
  }

  // The elements of a patch's row, from memory.
  static __device__ __forceinline__ void load_words(const Element* from, bool vectorised,
                                                    uint32_t (&to)[kWords]) {
    if (vectorised) {
#pragma unroll
      for (int v = 0; v < kWords / 4; ++v) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[v];
        to[4 * v] = four.x;
        to[4 * v + 1] = four.y;
        to[4 * v + 2] = four.z;
        to[4 * v + 3] = four.w;
      }
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

  // And to memory, aligned to 16 bytes.
  static __device__ __forceinline__ void store_words(const uint32_t (&from)[kWords], Element* to) {
#pragma unroll
    for (int v = 0; v < kWords / 4; ++v)
      reinterpret_cast<uint4*>(to)[v] =
          make_uint4(from[4 * v], from[4 * v + 1], from[4 * v + 2], from[4 * v + 3]);
  }

  // Element c of a patch's row as float32. c is a constant of an unrolled loop.
  static __device__ __forceinline__ float element(const uint32_t (&row_words)[kWords], int c) {
    constexpr int per_word = Word<Element>::kElements;
    const uint32_t word = row_words[c / per_word];
    if constexpr (per_word == 1)
      return Format<Element>::to_float(word);
    else
      return Format<Element>::to_float(c % 2 == 0 ? word & 0xffff : word >> 16);
  }

  // The word of elements from c on: rounded to nearest even.
  static __device__ __forceinline__ uint32_t word_of(float first, float second) {
    if constexpr (Word<Element>::kElements == 1)
      return __float_as_uint(first);
    else
      return Format<Element>::from_floats(first, second);
  }

  // Column sums of the patch, from its first row to its last, starting from +0.
  __device__ __forceinline__ void column_sums(float (&sums)[kPatch]) const {
#pragma unroll
    for (int c = 0; c < kPatch; ++c) {
      sums[c] = 0;
#pragma unroll
      for (int i = 0; i < kPatch; ++i) sums[c] = __fadd_rn(sums[c], element(words[i], c));
    }
  }

  // The largest finite magnitude of every row (as bits) and of every column (as packed bits).
  //
  // Elements that are not finite turn into positive NaN in the patch: cvt.satfinite would make an
  // infinity 448. As magnitudes they pass every maximum, so a patch without any finds that out for
  // one comparison.
  __device__ __forceinline__ void find_amax(uint32_t (&row_amax)[kPatch],
                                            uint32_t (&col_amax)[kWords]) {
    amax<false>(row_amax, col_amax);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) largest = ::max(largest, row_amax[i]);
    if (largest < Format<Element>::kInfinity) return;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t bad = Word<Element>::not_finite(words[i][w] & Word<Element>::kMagnitudes);
        words[i][w] = (words[i][w] & ~bad) | (Word<Element>::kMagnitudes & bad);
      }
    }
    amax<true>(row_amax, col_amax);
  }

  // q of row i and of column c of the patch: the first element in the lowest byte.
  __device__ __forceinline__ uint2 quantize_row(int i, float factor) const {
    float p[kPatch];
#pragma unroll
    for (int c = 0; c < kPatch; ++c) p[c] = __fmul_rn(element(words[i], c), factor);
    return make_uint2(to_e4m3x4(p[0], p[1], p[2], p[3]), to_e4m3x4(p[4], p[5], p[6], p[7]));
  }
  __device__ __forceinline__ uint2 quantize_column(int c, float factor) const {
    float p[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) p[i] = __fmul_rn(element(words[i], c), factor);
    return make_uint2(to_e4m3x4(p[0], p[1], p[2], p[3]), to_e4m3x4(p[4], p[5], p[6], p[7]));
  }

 private:
  template <bool finite_only>
  __device__ __forceinline__ void amax(uint32_t (&row_amax)[kPatch],
                                       uint32_t (&col_amax)[kWords]) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) col_amax[w] = 0;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      uint32_t row = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t magnitudes = words[i][w] & Word<Element>::kMagnitudes;
        if constexpr (finite_only) magnitudes &= ~Word<Element>::not_finite(magnitudes);
        row = Word<Element>::max(row, magnitudes);
        col_amax[w] = Word<Element>::max(col_amax[w], magnitudes);
      }
      row_amax[i] = Word<Element>::largest(row);
    }
  }
};

// 4 x 4 bytes, rows in words, to columns in words.
__device__ __forceinline__ void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t top_left = __byte_perm(w[0], w[1], 0x5140);
  const uint32_t bottom_left = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t top_right = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t bottom_right = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(top_left, bottom_left, 0x5410);
  w[1] = __byte_perm(top_left, bottom_left, 0x7632);
  w[2] = __byte_perm(top_right, bottom_right, 0x5410);
  w[3] = __byte_perm(top_right, bottom_right, 0x7632);
}

// The maximum over the 16 patches of a row of patches; patch c returns that of row c % 8. Every
// step halves the rows a thread still works on: 8 shuffles, not 32.
__device__ __forceinline__ uint32_t row_amax_of_half_warp(uint32_t (&amax)[kPatch]) {
#pragma unroll
  for (int count = kPatch / 2; count >= 1; count /= 2) {
    const bool upper = threadIdx.x & count;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32_t keep = upper ? amax[i + count] : amax[i];
      const uint32_t send = upper ? amax[i] : amax[i + count];
      amax[i] = max(keep, __shfl_xor_sync(kFullWarp, send, count));
    }
  }
  return max(amax[0], __shfl_xor_sync(kFullWarp, amax[0], kPatch));
}

// A quantized tile turned over in shared memory: [128 columns][16 granules of 8 rows]. Granule g of
// column k is kept at g ^ (k / 8): half a warp writes 8 bytes to each of 16 columns 1 KB apart, and
// so reaches all banks once. The two granules of 16 rows stay neighbours, in either order.
struct alignas(16) TurnedTile {
  uint2 granules[kTile][kPatches];

  // 8 rows of column c of the calling thread's patch.
  __device__ __forceinline__ void put(int c, uint2 rows) {
    const int patch_col = threadIdx.x % kPatches, patch_row = threadIdx.x / kPatches;
    granules[patch_col * kPatch + c][patch_row ^ patch_col] = rows;
  }

  // Column k to q_t + k * pitch, for the columns below cols and the rows below rows, a multiple of
  // 16. Eight threads write the 128 bytes of a column.
  __device__ __forceinline__ void write(uint8_t* q_t, int64_t pitch, int rows, int cols) const {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int step = 0; step < kTile * 8 / kTileThreads; ++step) {
      const int k = step * (kTileThreads / 8) + threadIdx.x / 8, swizzle = k / kPatch;
      const uint4 v = reinterpret_cast<const uint4*>(granules[k])[chunk ^ (swizzle / 2)];
      const uint4 in_order = swizzle % 2 == 0 ? v : make_uint4(v.z, v.w, v.x, v.y);
      if (k < cols && chunk * 16 < rows)
        *reinterpret_cast<uint4*>(q_t + k * pitch + chunk * 16) = in_order;
    }
  }
};

}  // namespace grouped_linear::cuda
