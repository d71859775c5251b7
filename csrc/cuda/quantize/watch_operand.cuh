// SPDX-License-Identifier: Apache-2.0
// What quantization does to some rows of each group: see watch.h for what is counted.
//
// A thread block has a part of a group, and is the only one that writes the part's numbers, so that
// every sum has a fixed order. Of a group 4 rows are read, whatever its size, and the scales of up
// to 512. Bytes: 128 groups of 2048 features in bf16 and e4m3 are 3.1 MB and 4.2 MB of scales, 2.2
// us at 3.3 TB/s. What takes longer are the loads that wait for one another (the turn, the group's
// ends, row numbers, rows) and the sums over a block. So thread blocks are small: 4 parts of 128
// groups are on an H100's 132 multiprocessors at once, and most threads load two vectors of a row
// and 16 scales. Where the turn on the device is 0, a block reads four bytes.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/fp8.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_numbers.cuh"
#include "swiglu_math.h"
#include "watch.h"

namespace grouped_linear::cuda {

constexpr int kWatchThreads = 128, kWatchWarps = kWatchThreads / 32, kWatchVector = 8;
constexpr int kRowsOfBlock = static_cast<int>(kBlock);

enum class WatchedFormat { kNone, kE4m3, kE5m2, kBf16, kHalf, kFloat };

// A matrix, or of a weight E of them; strides in elements.
struct WatchedRows {
  const void* data;
  int64_t expert, row, column;
  bool aligned;  // rows of vectors of 16 bytes
};

struct WatchedOperand {
  double* stats;  // [parts, E, kWatchColumns]
  const int32_t* turn;
  const int32_t* offs;    // [E]; null for a weight of N rows an expert
  const int32_t* routed;  // [E] or null
  int64_t most;
  int E, T, N, K;
  WatchedRows x, gate_up, q;  // data is null for what there is not
  RowNumbers x_rows, q_rows;
  const float* weight;
  int64_t weight_stride;
  WatchedFormat format;  // of q
  const float* scale;    // or null
  int scale_dim;
  int64_t scale_strides[3];
  const float* scale_t;  // [blocks, K_t] or null
  int blocks, K_t;
  SwigluForm form;
};

template <typename Element>
__device__ __forceinline__ float element_at(const void* data, int64_t i) {
  return Format<Element>::to_float(static_cast<const typename Format<Element>::Bits*>(data)[i]);
}

// Eight neighbours of a row.
template <typename Element>
__device__ __forceinline__ void load_watched(const WatchedRows& rows, int64_t first,
                                             float (&values)[kWatchVector]) {
  if (!rows.aligned) {
#pragma unroll
    for (int c = 0; c < kWatchVector; ++c)
      values[c] = element_at<Element>(rows.data, first + c * rows.column);
    return;
  }
  constexpr int kVectors = kWatchVector * sizeof(Element) / 16;
  uint4 vectors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    vectors[i] = reinterpret_cast<const uint4*>(static_cast<const Element*>(rows.data) + first)[i];
  const auto* words = reinterpret_cast<const uint32_t*>(vectors);
#pragma unroll
  for (int c = 0; c < kWatchVector; ++c) {
    constexpr int per_word = Word<Element>::kElements;
    values[c] = Format<Element>::to_float(Word<Element>::bits(words[c / per_word], c % per_word));
  }
}

template <__nv_fp8_interpretation_t format>
__device__ __forceinline__ float from_fp8(uint32_t byte) {
  return __half2float(
      __half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(byte), format)));
}

// Eight neighbours of q and their scale, on the way from memory.
struct LoadedQuantized {
  int64_t first;
  uint2 fp8;
  float scale;
};

__device__ __forceinline__ bool is_fp8(WatchedFormat format) {
  return format == WatchedFormat::kE4m3 || format == WatchedFormat::kE5m2;
}

__device__ __forceinline__ uint2 load_fp8(const WatchedRows& rows, int64_t first) {
  const auto* bytes = static_cast<const uint8_t*>(rows.data);
  if (rows.aligned) return *reinterpret_cast<const uint2*>(bytes + first);
  uint32_t words[2] = {};
#pragma unroll 1
  for (int c = 0; c < kWatchVector; ++c)
    words[c / 4] |= uint32_t{bytes[first + c * rows.column]} << c % 4 * 8;
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void to_floats(const WatchedRows& rows, WatchedFormat format,
                                          const LoadedQuantized& q, float (&values)[kWatchVector]) {
  switch (format) {
    case WatchedFormat::kBf16: return load_watched<__nv_bfloat16>(rows, q.first, values);
    case WatchedFormat::kHalf: return load_watched<__half>(rows, q.first, values);
    case WatchedFormat::kFloat: return load_watched<float>(rows, q.first, values);
    default: break;
  }
#pragma unroll
  for (int c = 0; c < kWatchVector; ++c) {
    const uint32_t byte = (c < 4 ? q.fp8.x : q.fp8.y) >> c % 4 * 8 & 0xff;
    values[c] =
        format == WatchedFormat::kE4m3 ? from_fp8<__NV_E4M3>(byte) : from_fp8<__NV_E5M2>(byte);
  }
}

// What one thread, then one block, has counted.
struct WatchCounts {
  double error, square;
  float amax, largest_scale;
  unsigned underflow, saturated, not_finite, shared;

  __device__ __forceinline__ void add(float before, float after, bool compared, float beyond) {
    if (!(fabsf(before) < INFINITY) || !(fabsf(after) < INFINITY)) {
      ++not_finite;
      return;
    }
    amax = fmaxf(amax, fabsf(before));
    if (!compared) return;
    underflow += before != 0 && after == 0;
    saturated += fabsf(before) > beyond;
    const double off = static_cast<double>(after) - before, size = before;
    error = __dadd_rn(error, __dmul_rn(off, off));
    square = __dadd_rn(square, __dmul_rn(size, size));
  }
  // The sums and maxima over a warp, in lane 0.
  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      error += __shfl_down_sync(kFullWarp, error, distance);
      square += __shfl_down_sync(kFullWarp, square, distance);
    }
    // Magnitudes are ordered as integers.
    amax = __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(amax)));
    largest_scale = __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(largest_scale)));
    underflow = __reduce_add_sync(kFullWarp, underflow);
    saturated = __reduce_add_sync(kFullWarp, saturated);
    not_finite = __reduce_add_sync(kFullWarp, not_finite);
    shared = __reduce_add_sync(kFullWarp, shared);
  }
  __device__ __forceinline__ void merge(const WatchCounts& other) {
    error += other.error;
    square += other.square;
    amax = fmaxf(amax, other.amax);
    largest_scale = fmaxf(largest_scale, other.largest_scale);
    underflow += other.underflow;
    saturated += other.saturated;
    not_finite += other.not_finite;
    shared += other.shared;
  }
};

// The rows of a group, and the first of its columnwise blocks.
struct WatchedGroup {
  int begin, rows, first_block, blocks;
};

__device__ __forceinline__ WatchedGroup watched_group(const WatchedOperand& a, GroupTable& table) {
  const int e = blockIdx.x;
  if (a.offs == nullptr) return {e * a.N, a.N, 0, 0};
  if (a.scale_t == nullptr) {
    const int begin = last_row_end(a.offs, e, a.T);
    return {begin, max(min(a.offs[e], a.T), begin) - begin, 0, 0};
  }
  load_groups<kWatchThreads>(table, a.offs, a.E, a.T, TilesOf{kRowsOfBlock});
  const int begin = table.row_begin(e);
  const int first = min(table.tile_begin(e), a.blocks), last = min(table.tile_end[e], a.blocks);
  return {begin, table.row_end[e] - begin, first, last - first};
}

// Where the scale of row r of the group lies in k-block 0, and the step to the next k-block.
struct WatchedScales {
  int64_t first, step;
};
__device__ __forceinline__ WatchedScales watched_scales(const WatchedOperand& a,
                                                        const WatchedGroup& group, int r) {
  const int64_t of_expert = blockIdx.x * a.scale_strides[0];
  if (a.scale_dim == 1) return {of_expert, 0};
  if (a.scale_dim == 2) return {a.q_rows.row(r) * a.scale_strides[1], a.scale_strides[0]};
  const int n = (r - group.begin) / kRowsOfBlock;
  return {of_expert + n * a.scale_strides[1], a.scale_strides[2]};
}

// Where q's row r of the group begins.
__device__ __forceinline__ int64_t first_of_quantized(const WatchedOperand& a,
                                                      const WatchedGroup& group, int r) {
  if (a.offs == nullptr) return blockIdx.x * a.q.expert + (r - group.begin) * a.q.row;
  return a.q_rows.row(r) * a.q.row;
}

// Begins to load eight neighbours of q's row r from column c on.
__device__ __forceinline__ LoadedQuantized load_quantized(const WatchedOperand& a,
                                                          const WatchedGroup& group, int r, int c) {
  LoadedQuantized q{0, {}, 1.0f};
  if (a.format == WatchedFormat::kNone) return q;
  q.first = first_of_quantized(a, group, r) + c * a.q.column;
  if (is_fp8(a.format)) q.fp8 = load_fp8(a.q, q.first);
  if (a.scale != nullptr) {
    const WatchedScales scales = watched_scales(a, group, r);
    q.scale = a.scale[scales.first + c / kRowsOfBlock * scales.step];
  }
  return q;
}

// Counts what was loaded. before: null for what is q alone.
__device__ __forceinline__ void count_watched(const WatchedOperand& a, const LoadedQuantized& q,
                                              const float (*before)[kWatchVector],
                                              WatchCounts& counts) {
  float after[kWatchVector];
  const bool has_q = a.format != WatchedFormat::kNone;
  float beyond = INFINITY;
  if (has_q) {
    to_floats(a.q, a.format, q, after);
    if (a.format == WatchedFormat::kE4m3) beyond = __fmul_rn(kE4m3Range.beyond, q.scale);
    if (a.format == WatchedFormat::kE5m2) beyond = __fmul_rn(kE5m2Range.beyond, q.scale);
  }
#pragma unroll
  for (int i = 0; i < kWatchVector; ++i) {
    const float dequantized = has_q ? __fmul_rn(after[i], q.scale) : (*before)[i];
    counts.add(before ? (*before)[i] : dequantized, dequantized, before && has_q, beyond);
  }
}

// What an operand is made of, as in library.cpp.
enum class WatchedSource { kQuantized, kRows, kSwiglu, kSwigluGrad };

template <typename Element>
__device__ __forceinline__ float rounded_to(float value) {
  return Format<Element>::to_float(Word<Element>::bits(Word<Element>::from_floats(value, 0.0f), 0));
}

// What lies 16 neighbours apart, of two vectors, and back.
__device__ __forceinline__ void deinterleave(float (&first)[kWatchVector],
                                             float (&second)[kWatchVector]) {
  float both[2 * kWatchVector];
#pragma unroll
  for (int i = 0; i < kWatchVector; ++i) both[i] = first[i], both[kWatchVector + i] = second[i];
#pragma unroll
  for (int i = 0; i < kWatchVector; ++i) first[i] = both[2 * i], second[i] = both[2 * i + 1];
}
__device__ __forceinline__ void interleave(float (&first)[kWatchVector],
                                           float (&second)[kWatchVector]) {
  float both[2 * kWatchVector];
#pragma unroll
  for (int i = 0; i < kWatchVector; ++i) both[2 * i] = first[i], both[2 * i + 1] = second[i];
#pragma unroll
  for (int i = 0; i < kWatchVector; ++i) first[i] = both[i], second[i] = both[kWatchVector + i];
}

template <typename Element, WatchedSource source>
__device__ __forceinline__ void count_row(const WatchedOperand& a, const WatchedGroup& group, int r,
                                          int c, WatchCounts& counts) {
  if constexpr (source == WatchedSource::kQuantized) {
    count_watched(a, load_quantized(a, group, r, c), nullptr, counts);
  } else if constexpr (source == WatchedSource::kRows) {
    float x[kWatchVector];
    const int64_t first = a.offs == nullptr ? blockIdx.x * a.x.expert + (r - group.begin) * a.x.row
                                            : a.x_rows.row(r) * a.x.row;
    const LoadedQuantized q = load_quantized(a, group, r, c);
    load_watched<Element>(a.x, first + c * a.x.column, x);
    count_watched(a, q, &x, counts);
  } else {
    constexpr bool is_grad = source == WatchedSource::kSwigluGrad;
    const SwigluForm& form = a.form;
    const int F = is_grad ? a.K / 2 : a.K;
    const int gate_column = form.interleaved ? 2 * c : c;
    const int up_column = form.interleaved ? gate_column + kWatchVector : F + c;
    const LoadedQuantized q = load_quantized(a, group, r, is_grad ? gate_column : c);
    LoadedQuantized q_up;
    if constexpr (is_grad) q_up = load_quantized(a, group, r, up_column);
    float gate[kWatchVector], up[kWatchVector];
    const int64_t row = r * a.gate_up.row, step = a.gate_up.column;
    load_watched<Element>(a.gate_up, row + gate_column * step, gate);
    load_watched<Element>(a.gate_up, row + up_column * step, up);
    if (form.interleaved) deinterleave(gate, up);
    if constexpr (!is_grad) {
#pragma unroll
      for (int i = 0; i < kWatchVector; ++i)
        gate[i] = rounded_to<Element>(swiglu_of(form, gate[i], up[i]));
      count_watched(a, q, &gate, counts);
    } else {
      float dh[kWatchVector];
      load_watched<Element>(a.x, r * a.x.row + c * a.x.column, dh);
      const float weight = a.weight[r * a.weight_stride];
#pragma unroll
      for (int i = 0; i < kWatchVector; ++i) {
        const float d = __fmul_rn(weight, dh[i]), g = gate[i], u = up[i];
        gate[i] = rounded_to<Element>(swiglu_grad_gate(form, g, u, d));
        up[i] = rounded_to<Element>(swiglu_grad_up(form, g, u, d));
      }
      if (form.interleaved) interleave(gate, up);
      count_watched(a, q, &gate, counts);
      count_watched(a, q_up, &up, counts);
    }
  }
}

// Whether block b of the group's columnwise blocks has one scale in features k .. k + 127.
__device__ __forceinline__ bool shares_scale(const WatchedOperand& a, int block, int k) {
  const float* of_block = a.scale_t + int64_t{block} * a.K_t;
  const float first = of_block[k];
  bool same = true;
#pragma unroll
  for (int i = threadIdx.x % 32; i < kRowsOfBlock; i += 32)
    if (k + i < a.K_t) same &= of_block[k + i] == first;
  return __all_sync(kFullWarp, same);
}

// Whether some rows of q have a number other than 0 in so many columns, a multiple of 8.
__device__ __forceinline__ bool has_number(const WatchedOperand& a, int64_t first, int rows,
                                           int columns) {
  for (int n = 0; n < rows; ++n)
    for (int c = 0; c < columns; c += kWatchVector) {
      const uint2 q = load_fp8(a.q, first + n * a.q.row + c * a.q.column);
      if ((q.x | q.y) & 0x7f7f7f7f) return true;
    }
  return false;
}

// The largest scale of some rows of the group: of 32 rows at once, a warp's. Zeros have scale 1,
// and count nothing.
__device__ __forceinline__ float largest_scale(const WatchedOperand& a, const WatchedGroup& group,
                                               int turn) {
  const int step = a.offs == nullptr ? kRowsOfBlock : 1;  // rows of a weight's block share theirs
  const int all = (group.rows + step - 1) / step;
  const int count = watched_of(all, a.most * kRowsOfBlock);
  const int width = a.scale_dim == 1 ? a.K : kRowsOfBlock;
  const int col_blocks = (a.K + width - 1) / width;
  float largest = 0;
  for (int first = (blockIdx.y + threadIdx.x / 32 * gridDim.y) * kScaleRowsAtOnce; first < count;
       first += kWatchWarps * gridDim.y * kScaleRowsAtOnce) {
    const int i = first + threadIdx.x % 32;
    if (i >= count) continue;
    const int n = nth_of(i, count, all, turn) * step, r = group.begin + n;
    const WatchedScales scales = watched_scales(a, group, r);
    const int64_t row = first_of_quantized(a, group, r);
    const int rows = min(step, group.rows - n);
    bool some_are_1 = false;
#pragma unroll 8
    for (int b = 0; b < col_blocks; ++b) {
      const float scale = a.scale[scales.first + b * scales.step];
      some_are_1 |= scale == 1.0f;
      largest = fmaxf(largest, scale == 1.0f ? 0.0f : scale);
    }
    // Apart, so that the scales above are loaded at once.
    for (int b = 0; some_are_1 && largest < 1.0f && b < col_blocks; ++b) {
      const int c = b * width;
      if (a.scale[scales.first + b * scales.step] == 1.0f &&
          has_number(a, row + c * a.q.column, rows, min(width, a.K - c)))
        largest = 1.0f;
    }
  }
  return largest;
}

template <typename Element, WatchedSource source, bool has_operand>
__global__ void __launch_bounds__(kWatchThreads, 4)
    watch_operand_kernel(const __grid_constant__ WatchedOperand a) {
  grid_dependency_wait();
  const int turn = *a.turn;
  if (turn == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = blockIdx.y, parts = gridDim.y;
  // Loaded now, added to at the end.
  double* of_lane = a.stats + (int64_t{part} * a.E + blockIdx.x) * kWatchColumns + lane;
  const double before = warp == 0 && lane < kWatchColumns ? *of_lane : 0;
  __shared__ GroupTable table;
  __shared__ WatchCounts of_warps[kWatchWarps];
  __shared__ double now[kWatchColumns];
  const WatchedGroup group = watched_group(a, table);
  // How many of n are this part's: part, part + parts, ...
  const auto mine = [part, parts](int n) { return n > part ? (n - part - 1) / parts + 1 : 0; };
  WatchCounts counts{};

  int my_rows = 0, my_blocks = 0;
  const int blocks_t = (a.K_t + kRowsOfBlock - 1) / kRowsOfBlock;
  if constexpr (has_operand) {
    if (a.scale != nullptr && is_fp8(a.format))
      counts.largest_scale = largest_scale(a, group, turn);
    const int count = watched_of(group.rows, a.most);
    const int columns = source == WatchedSource::kSwigluGrad ? a.K / 2 : a.K;
    const int vectors = columns / kWatchVector;  // in a row
    my_rows = mine(count);
    constexpr int at_once = source == WatchedSource::kRows ? 2 : 1;
#pragma unroll at_once
    for (int i = threadIdx.x; i < my_rows * vectors; i += kWatchThreads) {
      const int r = group.begin + nth_of(part + i / vectors * parts, count, group.rows, turn);
      count_row<Element, source>(a, group, r, i % vectors * kWatchVector, counts);
    }
  }
  if (a.scale_t != nullptr) {
    const int blocks = watched_of(group.blocks, a.most);
    my_blocks = mine(blocks);
    for (int i = warp; i < my_blocks * blocks_t; i += kWatchWarps) {
      const int nth = nth_of(part + i / blocks_t * parts, blocks, group.blocks, turn);
      const bool shared = shares_scale(a, group.first_block + nth, i % blocks_t * kRowsOfBlock);
      counts.shared += shared && lane == 0;
    }
  }

  counts.merge_warp();
  if (lane == 0) of_warps[warp] = counts;
  __syncthreads();
  if (warp != 0) return;
  if (lane == 0) {
    for (int w = 1; w < kWatchWarps; ++w) counts.merge(of_warps[w]);
    for (double& number : now) number = 0;
    if constexpr (has_operand) {
      const double numbers = static_cast<double>(my_rows) * a.K;
      now[kCalls] = part == 0;
      now[kRows] = part == 0 ? group.rows : 0;
      now[kNumbers] = numbers;
      if (source != WatchedSource::kQuantized && a.format != WatchedFormat::kNone)
        now[kCompared] = numbers - counts.not_finite;
      const double largest =
          a.format == WatchedFormat::kE5m2 ? kE5m2Range.largest : kE4m3Range.largest;
      now[kAmax] = counts.amax;
      now[kScaledAmax] = counts.largest_scale * largest;
      now[kUnderflow] = counts.underflow;
      now[kSaturated] = counts.saturated;
      now[kNonFinite] = counts.not_finite;
      now[kError] = counts.error;
      now[kSquare] = counts.square;
    }
    now[kBlocks] = static_cast<double>(my_blocks) * blocks_t;
    now[kShared] = counts.shared;
    if (a.routed != nullptr && part == 0) {
      const int e = blockIdx.x;
      const int64_t chosen = int64_t{a.routed[e]} - (e == 0 ? 0 : a.routed[e - 1]);
      now[kDropped] = static_cast<double>(max(chosen - group.rows, int64_t{0}));
    }
  }
  __syncwarp();
  if (lane >= kWatchColumns) return;
  const bool is_max = lane == kAmax || lane == kScaledAmax;
  *of_lane = is_max ? max(before, now[lane]) : before + now[lane];
}

}  // namespace grouped_linear::cuda
