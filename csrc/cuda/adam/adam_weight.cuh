// A step of Adam over a quantized weight: one pass reads q, the gradient and the moments, and
// writes q, q_t and the moments. A thread block has a tile of 128 x 128 numbers, which share a
// scale, and holds their new values in registers until it knows their amax.
//
// Bytes an element with bf16 gradients and moments: 1 + 6 read, 1 + 1 + 4 written: 13. Torch's
// fused AdamW over a bf16 parameter: 14. 8 x 4096 x 7168 at 2.8 TB/s: 1.1 ms.
#pragma once

#include "adam_math.h"
#include "cuda/common/pdl.cuh"
#include "cuda/common/transposed_tile.cuh"

namespace grouped_linear::cuda {

// Scalars on the device; null for those that were not given.
struct AdamScalars {
  const float *step, *lr, *grad_scale, *found_inf;
};

template <typename Element>
struct AdamTensors {
  int N, K;
  uint8_t *q, *q_t;  // [E, N, K] and [E, K, N]; q_t may be null
  float* scale;      // [E, ceil(N / 128), ceil(K / 128)]
  Element *grad, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;  // [E, N, K]; the last may be null
};

// A row of a thread's fragment.
template <typename Element>
struct AdamRow {
  uint2 q;
  FragmentRow<Element> grad, exp_avg, exp_avg_sq, max_exp_avg_sq;

  template <bool amsgrad>
  __device__ __forceinline__ void load(const AdamTensors<Element>& t, int64_t i) {
    using Tile = Fragment<Element>;
    q = *reinterpret_cast<const uint2*>(t.q + i);
    Tile::load_row(t.grad + i, true, grad);
    Tile::load_row(t.exp_avg + i, true, exp_avg);
    Tile::load_row(t.exp_avg_sq + i, true, exp_avg_sq);
    if constexpr (amsgrad) Tile::load_row(t.max_exp_avg_sq + i, true, max_exp_avg_sq);
  }

  // Updates the row, stores its moments, and puts its new weights into w.
  template <bool amsgrad>
  __device__ __forceinline__ void update(const AdamTensors<Element>& t, int64_t i,
                                         const AdamStep& step, float scale, bool scaled,
                                         float unscale, FragmentRow<float>& w) {
    using Tile = Fragment<Element>;
    float g[kFragmentSize], m[kFragmentSize], v[kFragmentSize], max_v[kFragmentSize];
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) {
      g[c] = Tile::element(grad, c);
      if (scaled) g[c] = __fmul_rn(g[c], unscale);
      m[c] = Tile::element(exp_avg, c);
      v[c] = Tile::element(exp_avg_sq, c);
      if constexpr (amsgrad) max_v[c] = Tile::element(max_exp_avg_sq, c);
    }
    if (scaled) store(g, t.grad + i);
#pragma unroll
    for (int pair = 0; pair < kFragmentSize / 2; ++pair) {
      const float2 old = from_e4m3x2((pair < 2 ? q.x : q.y) >> (pair % 2 * 16));
      const int c = 2 * pair;
      w[c] = __float_as_uint(
          step.update(__fmul_rn(old.x, scale), g[c], m[c], v[c], amsgrad ? max_v + c : nullptr));
      w[c + 1] = __float_as_uint(step.update(__fmul_rn(old.y, scale), g[c + 1], m[c + 1], v[c + 1],
                                             amsgrad ? max_v + c + 1 : nullptr));
    }
    store(m, t.exp_avg + i);
    store(v, t.exp_avg_sq + i);
    if constexpr (amsgrad) store(max_v, t.max_exp_avg_sq + i);
  }

  static __device__ __forceinline__ void store(const float (&values)[kFragmentSize], Element* to) {
    FragmentRow<Element> row;
    constexpr int per_word = Word<Element>::kElements;
#pragma unroll
    for (int word = 0; word < Fragment<Element>::kWords; ++word)
      row[word] = Word<Element>::from_floats(values[word * per_word],
                                             values[word * per_word + per_word - 1]);
    Fragment<Element>::store_row(row, to);
  }
};

// Thread blocks on an SM: two hold 128 registers a thread each. AMSGrad in float32 would spill up to
// 20 bytes of them, but for Hopper (nvcc 13.0).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
template <typename Element>
constexpr bool kSpillsAmsgrad = std::is_same_v<Element, float>;
#else
template <typename Element>
constexpr bool kSpillsAmsgrad = false;
#endif
template <typename Element, bool amsgrad>
constexpr int kAdamOccupancy = amsgrad && kSpillsAmsgrad<Element> ? 1 : kTileOccupancy<float>;

// Every tensor is aligned to 16 bytes. Changes nothing where found_inf is given and not zero.
template <typename Element, bool amsgrad>
__global__ void __launch_bounds__(kTileThreads, kAdamOccupancy<Element, amsgrad>)
    adam_weight_kernel(AdamTensors<Element> t, AdamScalars scalars, AdamOptions options,
                       ScaleRule rule) {
  grid_dependency_wait();
  if (scalars.found_inf && *scalars.found_inf != 0) return;
  __shared__ TransposedTile transposed;
  __shared__ uint32_t warp_amax[kTileWarps];

  const int N = t.N, K = t.K;
  const unsigned number = blockIdx.x;
  const int row_blocks = (N + kTileSide - 1) / kTileSide,
            col_blocks = (K + kTileSide - 1) / kTileSide;
  const int64_t e = number / (row_blocks * col_blocks);
  const int row = number / col_blocks % row_blocks * kTileSide;
  const int col = number % col_blocks * kTileSide;
  const int rows = min(kTileSide, N - row), cols = min(kTileSide, K - col);
  const int fragment_row = Fragment<float>::row() * kFragmentSize;
  const int fragment_col = Fragment<float>::column() * kFragmentSize;
  const int valid = fragment_col < cols ? rows - fragment_row : 0;  // rows of this fragment
  const int64_t first = (e * N + row + fragment_row) * K + col + fragment_col;

  // The next row is loaded while one is computed. With other types that would spill (nvcc 13.0).
  constexpr bool kAhead = std::is_same_v<Element, __nv_bfloat16> && !amsgrad;
  AdamRow<Element> next;
  if (kAhead && 0 < valid) next.template load<amsgrad>(t, first);
  const float scale = t.scale[number];
  const bool scaled = scalars.grad_scale;
  const float unscale = scaled ? __fdiv_rn(1, *scalars.grad_scale) : 1;
  const AdamStep step(options, scalars.lr ? *scalars.lr : options.lr, *scalars.step);
  Fragment<float> w;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    AdamRow<Element> current = next;
    const int load = kAhead ? i + 1 : i;
    if (load < kFragmentSize && load < valid)
      (kAhead ? next : current).template load<amsgrad>(t, first + static_cast<int64_t>(load) * K);
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) w.words[i][c] = 0;
    if (i < valid)
      current.template update<amsgrad>(t, first + static_cast<int64_t>(i) * K, step, scale, scaled,
                                       unscale, w.words[i]);
  }

  // Before its amax is known: numbers that are not finite become NaN and count as zero.
  uint32_t row_amax[kFragmentSize], amax = 0;
  FragmentRow<float> col_amax;
  w.find_amax(row_amax, col_amax);
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) amax = max(amax, row_amax[i]);
  amax = __reduce_max_sync(kFullWarp, amax);
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTileWarps; ++i) amax = max(amax, warp_amax[i]);

  const BlockScale tile = block_scale(__uint_as_float(amax), rule);
  if (threadIdx.x == 0) t.scale[number] = tile.scale;  // everyone has read the old one
  const auto position_of_fragment = static_cast<uint32_t>(first - e * N * K);
  QuantizedFragment quantized;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    uint2 bytes;
    if (options.stochastic_rounding) {
      const uint32_t position = position_of_fragment + static_cast<uint32_t>(i * K);
      uint32_t words[2] = {0, 0};
#pragma unroll
      for (int c = 0; c < kFragmentSize; ++c) {
        const float v = __uint_as_float(w.words[i][c]);
        words[c / 4] |=
            to_e4m3_stochastically(__fmul_rn(v, tile.factor), step.noise(v, position + c))
            << (c % 4 * 8);
      }
      bytes = make_uint2(words[0], words[1]);
    } else {
      bytes = w.quantize_row(i, tile.factor);
    }
    quantized.set_row(i, bytes);
    if (i < valid) *reinterpret_cast<uint2*>(t.q + first + static_cast<int64_t>(i) * K) = bytes;
  }

  if (!t.q_t) return;
  quantized.put_transposed(transposed);
  __syncthreads();
  transposed.write(t.q_t + (e * K + col) * N + row, N, rows, cols);
}

}  // namespace grouped_linear::cuda
