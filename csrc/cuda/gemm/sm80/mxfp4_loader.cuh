// b in MXFP4: its tile is decoded on the way to shared memory, stage by stage, and lies there as
// loader.cuh would have put it.
//
// A thread reads the codes of the stage after the one that it writes, so that memory has a stage's
// time to answer. Bytes: a quarter of b's in 16 bits. Decoding takes some ten instructions an element,
// for each row tile anew, which mma does not hide: what this is for is that the weight fits.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/gemm/sm80/loader.cuh"
#include "mxfp4_math.h"

namespace grouped_linear::cuda::sm80 {

// A weight w [E, N, K] in global memory, strides in bytes. FP8: the largest scale of each 128 x 128
// block, with strides along the output's columns and along what is summed.
struct Mxfp4View {
  const uint8_t *codes, *scales, *largest;
  int64_t code_group_stride, code_stride, scale_group_stride, scale_stride;
  int64_t largest_group_stride, largest_col_stride, largest_k_stride;
};

__device__ __forceinline__ void st_shared_16(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// How the elements of a 16-byte chunk of the stage lie in memory: along in_features, or along
// out_features, in as many rows.
template <typename Config>
class Mxfp4Loader {
  using T = typename Config::B;
  static constexpr bool kFp8 = Config::kFp8, kTransposed = Config::kTransposesB;
  static constexpr bool kMajorMN = Config::kBMajor == Major::kMN;
  static constexpr int kEach = 16 / sizeof(T);  // elements of a chunk
  static constexpr int kChunks = (kMajorMN ? kMajorMNLine : Config::kStageLine) / 16;
  static constexpr int kLinesPerPass = Config::kThreads / kChunks;
  static constexpr int kPasses =
      kMajorMN ? kMajorMNLines<Config> / kLinesPerPass * (Config::kTileN / kMajorMNColumn)
               : Config::kTileN / kLinesPerPass;
  static constexpr int kColumns = Config::kTileN / kMajorMNColumn;
  // Of FP8 a chunk lies in kEach rows of w where b is transposed; in 16 bits it never does.
  static constexpr bool kInRows = kFp8 && kTransposed;
  static_assert(kMajorMN == (kTransposed && !kFp8), "of 16 bits ldmatrix transposes");
  static_assert(kLinesPerPass % 8 == 0, "chunks are exchanged alike in every pass");
  static_assert(!kMajorMN || kMajorMNLines<Config> % kLinesPerPass == 0);

 public:
  __device__ __forceinline__ Mxfp4Loader() {
    const int line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    to_ = kMajorMN ? line * kMajorMNLine + (chunk ^ (line % 8)) * 16
                   : line * Config::kStageLine + (chunk ^ exchanged_by<Config>(line)) * 16;
  }

  // [first, end): the output's columns. K: what is summed.
  __device__ __forceinline__ void begin_tile(const Mxfp4View& view, int group, int first, int end,
                                             int K) {
    const int line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    codes_ = view.codes + group * view.code_group_stride;
    scales_ = view.scales + group * view.scale_group_stride;
    if constexpr (kFp8)
      largest_ = view.largest + group * view.largest_group_stride +
                 first / kScaleBlock * view.largest_col_stride;
    col_ = first + (kMajorMN ? chunk * kEach : line), end_ = end;
    k_ = kMajorMN ? line : chunk * kEach, K_ = K;
    fetch(view);
  }

  __device__ __forceinline__ void load_zeros() {
    k_ = K_ = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) clear(i);
  }

  // Writes the stage that was fetched, and fetches the next one.
  __device__ __forceinline__ void load(const Mxfp4View& view, uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      uint32_t words[4];
      decode(i, words);
      const int line = kMajorMN ? i / kColumns : i, column = kMajorMN ? i % kColumns : 0;
      const int bytes = kMajorMN ? kMajorMNLine : Config::kStageLine;
      st_shared_16(stage + to_ + line * kLinesPerPass * bytes + column * kMajorMNBytes<Config>,
                   words);
    }
    k_ += Config::kStageK;
    fetch(view);
  }

 private:
  static constexpr int kCodeWords = kInRows ? 4 : kEach / 8;  // kInRows: a byte for each row
  static constexpr int kScaleWords = kInRows ? 4 : 1;

  __device__ __forceinline__ void clear(int i) {
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) words_[i][w] = 0;
#pragma unroll
    for (int w = 0; w < kScaleWords; ++w) scale_words_[i][w] = 0;
  }

  __device__ __forceinline__ void fetch(const Mxfp4View& view) {
    if constexpr (kFp8) {
      if (k_ < K_) of_block_ = largest_[k_ / kScaleBlock * view.largest_k_stride];
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int col = col_ + (kMajorMN ? i % kColumns * kMajorMNColumn : i * kLinesPerPass);
      const int k = k_ + (kMajorMN ? i / kColumns * kLinesPerPass : 0);
      clear(i);
      if (col >= end_ || k >= K_) continue;
      // w's row and its element.
      const int64_t n = kTransposed ? k : col;
      const int element = kTransposed ? col : k;
      const uint8_t* codes = codes_ + n * view.code_stride + element / 2;
      const uint8_t* scales = scales_ + n * view.scale_stride + element / kMxBlock;
      if constexpr (kInRows) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const uint32_t code = codes[j * view.code_stride] >> (element % 2 * 4) & 15;
          words_[i][j / 4] |= code << (j % 4 * 8);
          scale_words_[i][j / 4] |= uint32_t{scales[j * view.scale_stride]} << (j % 4 * 8);
        }
      } else {
        if constexpr (kCodeWords == 1) {
          words_[i][0] = *reinterpret_cast<const uint32_t*>(codes);
        } else {
          const uint2 read = *reinterpret_cast<const uint2*>(codes);
          words_[i][0] = read.x, words_[i][1] = read.y;
        }
        scale_words_[i][0] = *scales;
      }
    }
  }

  __device__ __forceinline__ void decode(int i, uint32_t (&words)[4]) const {
    if constexpr (!kFp8) {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const float first = mxfp4::decode(words_[i][0] >> (4 * e) & 15, scale_words_[i][0]);
        const float second = mxfp4::decode(words_[i][0] >> (4 * e + 4) & 15, scale_words_[i][0]);
        words[e / 2] = Format<T>::from_floats(first, second);
      }
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int e = 4 * w + b;
          const uint32_t code =
              kInRows ? words_[i][w] >> (8 * b) & 15 : words_[i][e / 8] >> (e % 8 * 4) & 15;
          const uint32_t scale = kInRows ? scale_words_[i][w] >> (8 * b) & 255 : scale_words_[i][0];
          words[w] |= mxfp4::to_e4m3(code, of_block_ - scale, scale) << (8 * b);
        }
      }
    }
  }

  const uint8_t *codes_ = nullptr, *scales_ = nullptr, *largest_ = nullptr;
  int col_ = 0, end_ = 0, k_ = 0, K_ = 0;
  uint32_t to_, of_block_ = 0;
  uint32_t words_[kPasses][kCodeWords], scale_words_[kPasses][kScaleWords];
};

}  // namespace grouped_linear::cuda::sm80
