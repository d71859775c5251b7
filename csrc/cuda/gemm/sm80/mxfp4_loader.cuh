// SPDX-License-Identifier: Apache-2.0
// b's tile of a weight in MXFP4, decoded to bfloat16 on its way to shared memory, where it lies as
// loader.cuh would have copied it.
//
// A thread reads whole blocks of 32 elements, 16 bytes of codes and their scale, stages ahead of the
// one that it writes: memory has their time to answer. A block takes some 95 instructions, beside 64
// mma and 69 others for a stage of many rows.
#pragma once

#include "cuda/gemm/mxfp4_bf16.cuh"
#include "cuda/gemm/sm80/loader.cuh"

namespace grouped_linear::cuda::sm80 {

// A weight [E, rows, 32 row_blocks] in global memory, dense: block by block.
struct Mxfp4View {
  const uint4* codes;
  const uint8_t* scales;
  int rows, row_blocks;
};

template <typename Config>
class Mxfp4Loader {
  static_assert(std::is_same_v<typename Config::B, __nv_bfloat16>);
  static constexpr bool kKMajor = Config::kBMajor == Major::kK;
  static constexpr int kBlockSize = static_cast<int>(kMxBlock);
  static constexpr int kAhead = Config::kFewRows ? 2 : 1;  // stages in registers
  // The block's threads write so many blocks of a line at once, of so many lines.
  static constexpr int kLineBlocks = (kKMajor ? Config::kStageK : Config::kTileN) / kBlockSize;
  static constexpr int kLines = Config::kThreads / kLineBlocks;
  static constexpr int kPasses = (kKMajor ? Config::kTileN : Config::kStageK) / kLines;
  static_assert(kLines % 8 == 0 &&
                kPasses * kLines == (kKMajor ? Config::kTileN : Config::kStageK));

 public:
  // Until a tile begins, it loads zeros.
  __device__ __forceinline__ Mxfp4Loader() {
    const int chunk = block() * (kBlockSize / 8);
    to_ = kKMajor ? line() * Config::kStageLine + (chunk ^ exchanged_by<Config>(line())) * 16
                  : chunk / 8 * kMajorMNBytes<Config> + line() * kMajorMNLine +
                        (chunk % 8 ^ (line() % 8)) * 16;
  }

  // [first, end): the output's columns. K: how many products an output sums.
  __device__ __forceinline__ void begin_tile(const Mxfp4View& view, int group, const WorkTile&,
                                             int first, int end, int K) {
    const int col = first + (kKMajor ? line() : block() * kBlockSize);
    const int k = kKMajor ? block() * kBlockSize : line();
    at_ = (static_cast<int64_t>(group) * view.rows + (kKMajor ? col : k)) * view.row_blocks +
          (kKMajor ? k : col) / kBlockSize;
    cols_left_ = end - col;
    k_left_ = cols_left_ > 0 ? K - k : 0;
#pragma unroll
    for (Stage& stage : stages_) read(view, stage);
  }

  // From now on.
  __device__ __forceinline__ void load_zeros() { k_left_ = 0; }

  // Writes the stage that was read first, and reads the one after the last.
  __device__ __forceinline__ void load(const Mxfp4View& view, uint32_t stage, bool) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t to = stage + to_ + i * kLines * (kKMajor ? Config::kStageLine : kMajorMNLine);
      const uint32_t scale = bfloat16_of_scale(stages_[0].scales[i]) * 0x10001;
      const uint4 codes = stages_[0].codes[i];
      write(to, codes.x, scale);
      write(to ^ 16, codes.y, scale);
      write(to ^ 32, codes.z, scale);
      write(to ^ 48, codes.w, scale);
    }
#pragma unroll
    for (int s = 1; s < kAhead; ++s) stages_[s - 1] = stages_[s];
    read(view, stages_[kAhead - 1]);
  }

 private:
  // A thread's blocks of a stage, pass by pass.
  struct Stage {
    uint4 codes[kPasses];
    uint32_t scales[kPasses];
  };

  // Eight neighbouring lanes write at once, to different banks: M/N-major they have eight lines.
  static __device__ __forceinline__ int line() {
    if constexpr (kKMajor) return threadIdx.x / kLineBlocks;
    static_assert(kKMajor || kLines == 32);
    return threadIdx.x / 32 % 4 * 8 + threadIdx.x % 8;
  }
  static __device__ __forceinline__ int block() {
    return kKMajor ? threadIdx.x % kLineBlocks : threadIdx.x / 128 * 4 + threadIdx.x % 32 / 8;
  }

  __device__ __forceinline__ void read(const Mxfp4View& view, Stage& stage) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const bool inside =
          kKMajor ? k_left_ > 0 && (kPasses == 1 || i * kLines < cols_left_) : i * kLines < k_left_;
      const int64_t at = at_ + i * kLines * view.row_blocks;
      stage.codes[i] = inside ? ld_global_16(view.codes + at) : make_uint4(0, 0, 0, 0);
      stage.scales[i] = inside ? __ldg(view.scales + at) : 0;
    }
    at_ += kKMajor ? kLineBlocks : Config::kStageK * view.row_blocks;
    k_left_ -= Config::kStageK;
  }

  // Eight elements.
  static __device__ __forceinline__ void write(uint32_t to, uint32_t codes, uint32_t scale) {
    uint32_t words[4], low, high;
    decode_four<0>(codes, low, high);
    words[0] = prmt(low, high, 0x5140), words[1] = prmt(low, high, 0x7362);
    decode_four<1>(codes, low, high);
    words[2] = prmt(low, high, 0x5140), words[3] = prmt(low, high, 0x7362);
#pragma unroll
    for (uint32_t& word : words) word = multiply_pairs(word, scale);
    st_shared_16(to, words);
  }

  int64_t at_ = 0;  // the block that is read next
  // From there to the end: elements along K, none if at most 0, and columns.
  int k_left_ = 0, cols_left_ = 0;
  uint32_t to_;
  Stage stages_[kAhead] = {};
};

}  // namespace grouped_linear::cuda::sm80
