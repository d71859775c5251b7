// b's tile of a weight in MXFP4, decoded to bfloat16 on its way to shared memory, where it lies as
// loader.cuh would have copied it.
//
// A thread reads whole blocks of 32 elements, 16 bytes of codes and their scale, a stage ahead of
// the one that it writes: memory has a stage's time to answer. A block takes some 95 instructions,
// beside 64 mma and 69 others for a stage of many rows.
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
  static constexpr bool kKMajor = Config::kBMajor == Major::kK;
  static constexpr int kBlockSize = static_cast<int>(kMxBlock);
  static constexpr int kLines = 32;  // M/N-major: that the block's threads write at once
  static_assert(std::is_same_v<typename Config::B, __nv_bfloat16>);
  // A thread's blocks of a stage lie along K.
  static constexpr int kBlocks = Config::kTileN * Config::kStageK / kBlockSize / Config::kThreads;
  static_assert(kKMajor ? Config::kTileN == Config::kThreads
                        : Config::kTileN == Config::kThreads / kLines * kBlockSize);

 public:
  // Until a tile begins, it loads zeros.
  __device__ __forceinline__ Mxfp4Loader() {
    const int line = this->line();
    to_ = kKMajor ? line * Config::kStageLine + exchanged_by<Config>(line) * 16
                  : column() / kMajorMNColumn * kMajorMNBytes<Config> + line * kMajorMNLine +
                        ((column() % kMajorMNColumn / 8) ^ (line % 8)) * 16;
  }

  // [first, end): the output's columns. K: how many products an output sums.
  __device__ __forceinline__ void begin_tile(const Mxfp4View& view, int group, const WorkTile&,
                                             int first, int end, int K) {
    const int col = first + (kKMajor ? line() : column());
    const int row = kKMajor ? col : line(), block = kKMajor ? 0 : col / kBlockSize;
    left_ = col < end ? K - (kKMajor ? 0 : row) : 0;
    at_ = (static_cast<int64_t>(group) * view.rows + row) * view.row_blocks + block;
    read(view);
  }

  // From now on.
  __device__ __forceinline__ void load_zeros() { left_ = 0; }

  // Writes the stage that was read, and reads the next one.
  __device__ __forceinline__ void load(const Mxfp4View& view, uint32_t stage, bool) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint32_t scale = bfloat16_of_scale(scales_[i]) * 0x10001;
      const uint32_t to = stage + to_ + (kKMajor ? 0 : i * kLines * kMajorMNLine);
      const int chunk = kKMajor ? i * (kBlockSize / 8) : 0;
      write<0>(to, chunk, codes_[i].x, scale);
      write<1>(to, chunk, codes_[i].y, scale);
      write<2>(to, chunk, codes_[i].z, scale);
      write<3>(to, chunk, codes_[i].w, scale);
    }
    at_ += kKMajor ? kBlocks : Config::kStageK * view.row_blocks;
    left_ -= Config::kStageK;
    read(view);
  }

 private:
  // Eight neighbouring lanes write at once: they have eight lines, in different banks.
  static __device__ __forceinline__ int line() {
    return kKMajor ? threadIdx.x : threadIdx.x / 32 % 4 * 8 + threadIdx.x % 8;
  }
  // M/N-major: the first column of the thread's blocks.
  static __device__ __forceinline__ int column() {
    return (threadIdx.x / 128 * 4 + threadIdx.x % 32 / 8) * kBlockSize;
  }

  __device__ __forceinline__ void read(const Mxfp4View& view) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const bool inside = i * (kKMajor ? kBlockSize : kLines) < left_;
      const int64_t at = at_ + i * (kKMajor ? 1 : kLines * view.row_blocks);
      codes_[i] = inside ? __ldg(view.codes + at) : make_uint4(0, 0, 0, 0);
      scales_[i] = inside ? __ldg(view.scales + at) : 0;
    }
  }

  // Eight elements of a block. Chunks of 16 bytes are exchanged in a line.
  template <int eighth>
  static __device__ __forceinline__ void write(uint32_t to, int chunk, uint32_t codes,
                                               uint32_t scale) {
    uint32_t words[4], low, high;
    decode_four<0>(codes, low, high);
    words[0] = prmt(low, high, 0x5140), words[1] = prmt(low, high, 0x7362);
    decode_four<1>(codes, low, high);
    words[2] = prmt(low, high, 0x5140), words[3] = prmt(low, high, 0x7362);
#pragma unroll
    for (uint32_t& word : words) word = multiply_pairs(word, scale);
    st_shared_16(to ^ ((chunk + eighth) * 16), words);
  }

  int64_t at_ = 0;  // the block that is read next
  int left_ = 0;    // elements along K from there to the end; at most 0: there are none
  uint32_t to_;
  uint4 codes_[kBlocks] = {};
  uint32_t scales_[kBlocks] = {};
};

}  // namespace grouped_linear::cuda::sm80
