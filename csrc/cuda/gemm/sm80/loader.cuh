// SPDX-License-Identifier: Apache-2.0
// Copies of an operand's tile to shared memory, stage by stage.
//
// A stage has kStageLine bytes of K. K-major: lines of so many bytes, one a row of the tile, whose
// chunks of 16 bytes are exchanged: four by row / 2 % 4, or eight by row % 8. M/N-major (16-bit):
// columns of 64 elements, each a line of 128 bytes for each element of K, whose eight chunks are
// exchanged by line % 8. So neither cp.async nor ldmatrix meets a bank twice.
#pragma once

#include <utility>

#include "cuda/gemm/sm80/config.h"
#include "cuda/gemm/sm80/ptx.cuh"
#include "cuda/gemm/tile_order.cuh"

namespace grouped_linear::cuda::sm80 {

// An operand in global memory. Strides are in bytes.
//   M-grouped a [T, K]: `stride` between rows.
//   M-grouped b [E, N, K]: `group_stride` between groups, `stride` along the other dimension that
//     is not dense.
//   K-grouped, 16-bit [T, N or K]: `stride` between rows.
//   K-grouped, FP8 [blocks, N or K, 128]: `group_stride` between blocks, `stride` between features.
struct OperandView {
  const char* first;
  int64_t group_stride, stride;
};

constexpr int kMajorMNColumn = 64;                // elements
constexpr int kMajorMNLine = 2 * kMajorMNColumn;  // bytes
template <typename Config>
constexpr int kMajorMNLines = Config::kStageLine / 2;  // in a stage
template <typename Config>
constexpr int kMajorMNBytes = kMajorMNLine * kMajorMNLines<Config>;

// By what the chunks of a K-major row are exchanged.
template <typename Config>
__device__ __forceinline__ int exchanged_by(int row) {
  static_assert(Config::kStageLine == 64 || Config::kStageLine == 128);
  return Config::kStageLine == 64 ? row / 2 % 4 : row % 8;
}

// A thread's copies of a tile of `extent` rows (or columns) of the output.
template <typename Config, int extent, Major major>
class Loader {
 public:
  // Until a tile begins, it loads zeros.
  __device__ __forceinline__ Loader() {
    const int thread = threadIdx.x, line = thread / kChunks, chunk = thread % kChunks;
    to_ = major == Major::kK ? line * Config::kStageLine + (chunk ^ exchanged_by<Config>(line)) * 16
                             : line * kMajorMNLine + (chunk ^ (line % 8)) * 16;
  }

  // [first, end): what the tile may read along M or N.
  __device__ __forceinline__ void begin_tile(const OperandView& view, int group,
                                             const WorkTile& tile, int first, int end, int K) {
    const int thread = threadIdx.x, line = thread / kChunks, chunk = thread % kChunks;
    const char* base = view.first;
    if constexpr (Config::kKGrouped) {
      if constexpr (Config::kPadded)
        base += tile.k_begin * view.group_stride;
      else
        base += tile.k_begin * view.stride;
    } else {
      base += group * view.group_stride;
    }
    if constexpr (major == Major::kK) {
      from_ = base + (first + line) * view.stride + chunk * 16;
      k_left_ = Config::kKGrouped ? tile.k_blocks
                                  : K * static_cast<int>(sizeof(typename Config::A)) - chunk * 16;
      valid_ = 0;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) valid_ |= (first + line + i * kLinesPerPass < end) << i;
    } else {
      from_ = base + line * view.stride + (first + chunk * 8) * 2;
      k_left_ = (Config::kKGrouped ? tile.k_count : K) - line;
      valid_ = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        valid_ |= (first + chunk * 8 + i * kMajorMNColumn < end) << i;
    }
  }

  // From now on.
  __device__ __forceinline__ void load_zeros() { valid_ = 0; }

  // Starts the copies of the next stage. second: of the stages of a k-block.
  __device__ __forceinline__ void load(const OperandView& view, uint32_t stage, bool second) {
    const uint32_t to = stage + to_;
    if constexpr (major == Major::kK) {
      copy_lines(view, to, k_left_ > 0 ? valid_ : 0, std::make_integer_sequence<int, kPasses>());
      from_ += Config::kStageLine;
      if constexpr (Config::kKGrouped) {
        if (second) from_ += view.group_stride - Config::kTileK;  // FP8: to the next block
      } else {
        k_left_ -= Config::kStageLine;
      }
    } else {
#pragma unroll
      for (int line = 0; line < kMajorMNLines<Config>; line += kLinesPerPass) {
        copy_columns(to + line * kMajorMNLine, k_left_ > 0 ? valid_ : 0,
                     std::make_integer_sequence<int, kColumns>());
        from_ += kLinesPerPass * view.stride;
        k_left_ -= kLinesPerPass;
      }
    }
  }

 private:
  static constexpr int kChunks = (major == Major::kK ? Config::kStageLine : kMajorMNLine) / 16;
  static constexpr int kLinesPerPass = Config::kThreads / kChunks;
  static constexpr int kPasses = extent / kLinesPerPass;    // K-major
  static constexpr int kColumns = extent / kMajorMNColumn;  // M/N-major
  static_assert(extent % (major == Major::kK ? kLinesPerPass : kMajorMNColumn) == 0);
  static_assert(kLinesPerPass % 8 == 0, "chunks are exchanged alike in every pass");
  static_assert(major == Major::kK || kMajorMNLines<Config> % kLinesPerPass == 0);

  template <int... pass>
  __device__ __forceinline__ void copy_lines(const OperandView& view, uint32_t to, uint32_t bits,
                                             std::integer_sequence<int, pass...>) {
    (cp_async_16_of_bits<1u << pass>(to + pass * kLinesPerPass * Config::kStageLine,
                                     from_ + pass * (kLinesPerPass * view.stride), bits),
     ...);
  }
  template <int... column>
  __device__ __forceinline__ void copy_columns(uint32_t to, uint32_t bits,
                                               std::integer_sequence<int, column...>) {
    (cp_async_16_of_bits<1u << column>(to + column * kMajorMNBytes<Config>,
                                       from_ + column * kMajorMNLine, bits),
     ...);
  }

  const char* from_ = nullptr;
  uint32_t to_, valid_ = 0;  // valid_: a bit for each pass
  // Bytes (K-major) or lines from this thread's chunk to the end; 0: there is no K.
  int k_left_ = 0;
};

// Where a warp's fragments are in a stage: at most 64 rows of a (of_a) or b from `first` on, which
// is a multiple of how many they are.
template <typename Config, Major major, bool of_a>
class FragmentReader {
 public:
  __device__ __forceinline__ FragmentReader(int lane, int first) {
    // The two halves of a matrix pair: a's run along rows first, b's along K first.
    const int along_rows = of_a ? lane / 8 % 2 : lane / 16,
              along_k = of_a ? lane / 16 : lane / 8 % 2;
    if constexpr (major == Major::kK) {
      const int row = along_rows * 8 + lane % 8;
      lane_ = kept((first + row) * Config::kStageLine + (along_k ^ exchanged_by<Config>(row)) * 16);
    } else {
      const int chunk = first % kMajorMNColumn / 8 + along_rows;
      lane_ = kept((along_k * 8 + lane % 8) * kMajorMNLine + (chunk ^ (lane % 8)) * 16 +
                   first / kMajorMNColumn * kMajorMNBytes<Config>);
    }
  }

  // Rows 16 i to 16 i + 15, bytes 32 k to 32 k + 31 of K.
  __device__ __forceinline__ void read(uint32_t (&to)[4], uint32_t operand, int i, int k) const {
    if constexpr (major == Major::kK) {
      ldmatrix_x4(to, ((operand + lane_) ^ (32 * k)) + i * 16 * Config::kStageLine);
    } else {
      ldmatrix_x4<true>(to, ((operand + lane_) ^ (32 * i)) + k * 16 * kMajorMNLine);
    }
  }

 private:
  uint32_t lane_;
};

}  // namespace grouped_linear::cuda::sm80
