// SPDX-License-Identifier: Apache-2.0
// The M-grouped GEMM in BF16 of a weight in MXFP4: four bits an element, and a scale for each 32.
//
//   fprop (b K-major):   out[t, n] = sum_k a[t, k] * w[e, n, k]   rows t of group e
//   dgrad (b MN-major):  out[t, k] = sum_n a[t, n] * w[e, n, k]
//
// The math warps compute the transpose of out: the weight is wgmma's first operand, which it takes
// from registers, and a's tile the second one, from shared memory. So a decoded weight never goes
// through shared memory, and needs neither a stage nor a fence. Each of two math warpgroups has 64 of
// a tile's 128 columns, for all of its 256 rows; the last row tile of a group may have 128. While
// the tensor cores multiply a k-block, both decode the next one.
//
// Floor: a k-block of 64 takes 1024 cycles of the tensor cores. A thread decodes 32 elements of it,
// with some 150 instructions, 90 of which a scheduler issues every second cycle: 360 cycles for its
// two math warps. Shared memory moves 128 bytes a cycle: wgmma reads a's tile twice, 512 cycles, TMA
// writes it, 256, and the codes are written and read, 128.
//
//   role           warps     waits for                         signals
//   producer       0         tile_full, empty[stage]           tile_empty, full[stage]
//   scheduler,     2         tile_empty                        tile_full, in both blocks
//   and zeros
//   packed loader  3         tile_full, packed_empty[stage]    packed_full[stage]
//   math           4 to 11   full[stage], packed_full[stage]   empty[stage] of both blocks,
//                                                              packed_empty[stage]
//
// The blocks of a cluster do not share b, whose bytes are few. Math warps store their part of a tile
// themselves: their buffers are not written again before the next tile ends.
//
// Where groups have few rows, kernel_mxfp4_few_rows.cuh takes its place in fprop. dgrad has tiles of 64
// rows there, whose accumulators leave room for two blocks, so that one decodes while the other waits.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/gemm/mxfp4_bf16.cuh"
#include "cuda/gemm/sm90/gather_producer.cuh"
#include "cuda/gemm/sm90/group_table.cuh"

namespace grouped_linear::cuda::sm90 {

// Blocks of a multiprocessor.
template <typename Config>
constexpr int kMxfp4Blocks = Config::kTileM == kTileMxfp4FewRows.m ? 2 : 1;

// A thread of warpgroup 0 has so many registers, and leaves the rest of those that each has at
// first to the math warps.
constexpr int kMxfp4HelperRegisters = TmaProducer::kRegisters;
template <typename Config>
constexpr int kMxfp4MathRegisters =
    (Config::kThreads / 128 * ((1 << 16) / kMxfp4Blocks<Config> / Config::kThreads / 8 * 8) -
     kMxfp4HelperRegisters) /
    Config::kMathWarpgroups / 8 * 8;

__device__ __forceinline__ uint4 ld_shared_uint4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
// By one warp: loads packed tiles, and their scales.
template <typename Config>
__device__ void load_packed(SharedStorage<Config>& shared, const TensorMaps& maps) {
  constexpr int blocks = Config::kPackedK / Config::kTileK;
  PipelineState<Config::kPackedStages> state;
#pragma unroll 1
  for (int number = 0;; ++number) {
    const WorkTile tile = wait_for_tile(shared, number);
    if (tile.k_blocks < 0) return;
    const int stages = (tile.k_blocks + blocks - 1) / blocks;
#pragma unroll 1
    for (int k = 0; k < stages; ++k, state.advance()) {
      uint64_t* full = &shared.packed_full[state.stage];
      uint8_t *codes = shared.codes[state.stage], *scales = shared.scales[state.stage];
      mbarrier_wait(&shared.packed_empty[state.stage], state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, Config::kPackedBytes + Config::kScaleBytes);
      if constexpr (Config::kBMajor == Major::kK) {
        tma_load_3d(codes, &maps.b, full, 0, k * (Config::kPackedK / 2), tile.col, tile.group);
        tma_load_3d(scales, &maps.scale_b, full, 0, tile.col, k * blocks, tile.group);
      } else {
        tma_load_3d(codes, &maps.b, full, 0, tile.col / 2, k * Config::kPackedK, tile.group);
        tma_load_3d(scales, &maps.scale_b, full, 0, k * Config::kPackedK, tile.col / 32,
                    tile.group);
      }
    }
  }
}

// A math thread's part of the weight: wgmma's first operand, four registers for each 16 along K.
//
// load reads a tile's next k-block from the packed ring into registers, decode makes the operand of
// what was loaded.
template <typename Config>
class WeightFragments {
  static constexpr bool kKMajor = Config::kBMajor == Major::kK;
  static constexpr int kBlocks = Config::kPackedK / Config::kTileK;  // k-blocks of a packed stage

 public:
  // Lines of packed tiles have 64 bytes, whose four pieces TMA swizzles: eight lines that follow one
  // another, or every second of sixteen, lie in different banks.
  __device__ WeightFragments(SharedStorage<Config>& shared, int warpgroup)
      : shared_(shared), is_first_lane_(kept(threadIdx.x % 32 == 0)) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, quad = lane % 4;
    if constexpr (kKMajor) {
      // Rows of the operand are columns of out in order.
      const int row = warpgroup * kWgmmaM + warp * 16 + lane / 4;
      codes_ = smem_address(shared.codes) + row * (Config::kPackedK / 2) + row / 2 % 4 * 16;
      scales_ = smem_address(shared.scales) + row * 4;
      selector_ = kept(quad | (quad + 4) << 4);
      col_ = row;
    } else {
      // Two warps have 32 columns of out together: of each four neighbours one warp has the first
      // two, the other the last two. So a row and the one 8 below share a byte of codes.
      const int block = warpgroup * 2 + warp / 2, odd = warp % 2;
      codes_ =
          smem_address(shared.codes) + lane * (Config::kTileN / 2) + (block ^ (lane / 2 % 4)) * 16;
      scales_ = smem_address(shared.scales) + block * 128 + quad * 4;
      selector_ = kept(0x6420 + odd * 0x1111);
      col_ = block * 32 + lane / 4 * 4 + odd * 2;
    }
    codes_ = kept(codes_);
    scales_ = kept(scales_);
  }

  // The column of out, in the tile, of the operand's row lane / 4, and that of the one 8 below.
  __device__ int first_col() const { return col_; }
  __device__ int second_col() const { return col_ + (kKMajor ? 8 : 1); }

  __device__ __forceinline__ void load(int k_block) {
    const int of_stage = k_block % kBlocks;
    if (of_stage == 0) wait();
    const uint32_t codes = codes_ + state_.stage * Config::kPackedBytes;
    const uint32_t scales = scales_ + state_.stage * Config::kScaleBytes;
    if constexpr (kKMajor) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factors_[r] = ld_shared_uint(scales + of_stage * Config::kTileN * 4 + r * 32);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 block =
              ld_shared_uint4((codes ^ (of_stage * 32 + i * 16)) + r * 8 * (Config::kPackedK / 2));
          const int at = 8 * r + 4 * i;
          words_[at] = block.x, words_[at + 1] = block.y, words_[at + 2] = block.z,
          words_[at + 3] = block.w;
        }
      }
    } else {
      ldmatrix_x4<true>(words_, codes);
      ldmatrix_x4<true>(words_ + 4, codes + 32 * (Config::kTileN / 2));
#pragma unroll
      for (int i = 0; i < 8; ++i) factors_[i] = ld_shared_uint(scales + i * 16);
    }
  }

  // Decodes the k-block that was loaded. Then its stage may be filled again.
  __device__ __forceinline__ void decode(int k_block, bool is_last, uint32_t (&to)[16]) {
    if constexpr (kKMajor) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // This thread's byte of each eight elements.
          const uint32_t* words = words_ + 8 * r + 4 * i;
          const uint32_t codes = prmt(prmt(words[0], words[1], selector_),
                                      prmt(words[2], words[3], selector_), 0x5410);
          const uint32_t factor = prmt(factors_[r], 0, i == 0 ? 0x1010 : 0x3232);
          for_halves(codes, [&](int half, uint32_t low, uint32_t high) {
            to[8 * i + 4 * half + r] = multiply_pairs(prmt(low, high, 0x5140), factor);
            to[8 * i + 4 * half + 2 + r] = multiply_pairs(prmt(low, high, 0x7362), factor);
          });
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t codes = prmt(words_[2 * i], words_[2 * i + 1], selector_);
        for_halves(codes, [&](int half, uint32_t low, uint32_t high) {
          const uint32_t factor = factors_[2 * i + half];
          to[4 * i + 2 * half] = multiply_pairs(prmt(low, high, 0x6240), factor);
          to[4 * i + 2 * half + 1] = multiply_pairs(prmt(low, high, 0x7351), factor);
        });
      }
    }
    if (k_block % kBlocks == kBlocks - 1 || is_last) release();
  }

  // Passes a k-block.
  __device__ void skip(int k_block) {
    if (k_block % kBlocks != 0) return;
    wait();
    release();
  }

 private:
  template <typename Take>
  static __device__ __forceinline__ void for_halves(uint32_t codes, const Take& take) {
    uint32_t low, high;
    decode_four<0>(codes, low, high);
    take(0, low, high);
    decode_four<1>(codes, low, high);
    take(1, low, high);
  }
  __device__ __forceinline__ void wait() {
    mbarrier_wait(&shared_.packed_full[state_.stage], state_.phase);
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (kEveryLaneArrives || is_first_lane_) mbarrier_arrive(&shared_.packed_empty[state_.stage]);
    state_.advance();
  }

  SharedStorage<Config>& shared_;
  PipelineState<Config::kPackedStages> state_;
  uint32_t codes_, scales_, selector_, is_first_lane_;
  int col_;
  uint32_t words_[kKMajor ? 16 : 8], factors_[kKMajor ? 2 : 8];
};

// A second product's operands: a_low goes through a's stages (low_rank.cuh), b_low is read from
// memory, by its strides in elements. Its bytes are few.
template <typename Config, bool low_rank = Config::kLowRank>
struct Mxfp4LowRank {
  NoLowRank operands;
};
template <typename Config>
struct Mxfp4LowRank<Config, true> {
  LowRankOperands operands;  // without b's map
  const uint16_t* b;         // bfloat16
  int64_t group_stride, col_stride, r_stride;
};

template <int count>
__device__ __forceinline__ void keep(uint32_t (&r)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// A barrier of one math warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
  asm volatile("barrier.cta.sync.aligned %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Stores a warpgroup's 64 columns of a tile. accum[4 j + 2 h + i] is of the operand's row lane / 4 + 8
// h, and of row 8 j + 2 (lane % 4) + i of the tile.
template <typename T, typename Config>
__device__ __forceinline__ void store_part(float (&accum)[Config::kTileM / 2],
                                           SharedStorage<Config>& shared, const TensorMaps& maps,
                                           const EpilogueArguments& epilogue,
                                           const GemmShape& shape, const WorkTile& tile,
                                           const WeightFragments<Config>& weight, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first = tile.col + weight.first_col(), second = tile.col + weight.second_col();
  if (epilogue.bias != nullptr) {
    const T* bias = static_cast<const T*>(epilogue.bias) + tile.group * epilogue.bias_stride;
    const float x = first < shape.cols ? static_cast<float>(bias[first]) : 0,
                y = second < shape.cols ? static_cast<float>(bias[second]) : 0;
#pragma unroll
    for (int j = 0; j < Config::kTileM / 2; ++j) accum[j] += j % 4 < 2 ? x : y;
  }
  if constexpr (sizeof(T) == 2) {
    if (epilogue.aligned) {
      uint8_t* buffer = shared.epilogue[warpgroup];
      const bool stores = threadIdx.x % 128 == 0;
      if (stores) bulk_wait_read<0>();  // of the tile before
      __syncwarp();
      warpgroup_sync(warpgroup);
#pragma unroll
      for (int j = 0; j < Config::kTileM / 8; j += 2) {
        if constexpr (Config::kBMajor == Major::kK) {
          const int row = 8 * j + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
          stmatrix_x4_trans(&buffer[row * kSwizzleBytes + ((piece ^ (row % 8)) * 16)],
                            Format<T>::from_floats(accum[4 * j], accum[4 * j + 1]),
                            Format<T>::from_floats(accum[4 * j + 2], accum[4 * j + 3]),
                            Format<T>::from_floats(accum[4 * j + 4], accum[4 * j + 5]),
                            Format<T>::from_floats(accum[4 * j + 6], accum[4 * j + 7]));
        } else {
          const int byte = weight.first_col() % 64 * 2;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = 4 * (j + i / 2) + i % 2, row = 8 * (j + i / 2) + lane % 4 * 2 + i % 2;
            *reinterpret_cast<uint32_t*>(&buffer[row * kSwizzleBytes + (byte ^ (row % 8 * 16))]) =
                Format<T>::from_floats(accum[at], accum[at + 2]);
          }
        }
      }
      fence_proxy_async();
      warpgroup_sync(warpgroup);
      if (stores) {
        const RaggedRows rows(tile.row, tile.row_end);
#pragma unroll
        for (int row = 0; row < Config::kTileM; row += kWgmmaM)
          if (tile.row + row < tile.row_end)
            tma_store_4d(&maps.out, buffer + row * kSwizzleBytes, tile.col + warpgroup * kWgmmaM,
                         rows.c1 + row, rows.c2, rows.kOrigin);
        bulk_commit();
      }
      __syncwarp();
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < Config::kTileM / 2; ++j) {
    const int row = tile.row + j / 4 * 8 + lane % 4 * 2 + j % 2, col = j % 4 < 2 ? first : second;
    if (row < tile.row_end && col < shape.cols)
      static_cast<T*>(epilogue.out)[int64_t{row} * shape.cols + col] = static_cast<T>(accum[j]);
  }
}

// a's stages as a math warp sees them: its tile, K-major, whose rows are the output's.
template <typename Config>
class RowStages {
 public:
  __device__ explicit RowStages(SharedStorage<Config>& shared)
      : shared_(shared),
        lane_(kept(threadIdx.x % 32)),
        first_empty_(mapa(&shared.empty[0], lane_ % kClusterSize)),
        rows_(__shfl_sync(0xffffffff, smem_descriptor_low(shared.stages[0].a, 16), 0)) {}

  __device__ __forceinline__ void wait() const {
    mbarrier_wait(&shared_.full[state.stage], state.phase);
  }
  __device__ __forceinline__ void release(int stage) const {
    release_stage(first_empty_, stage, static_cast<int>(lane_));
  }
  __device__ __forceinline__ void pass() const {
    wait();
    release(state.stage);
  }
  // wgmma's second operand, from element k of a stage on.
  __device__ __forceinline__ uint64_t operand(int stage, int k) const {
    return smem_descriptor(rows_ + stage * (Config::kStageBytes / 16) + k * 2 / 16,
                           8 * kSwizzleBytes);
  }

  PipelineState<Config::kStages> state;

 private:
  SharedStorage<Config>& shared_;
  uint32_t lane_, first_empty_, rows_;
};

// accum += a tile's k_blocks, for so many of its rows. The first one is decoded, in `even`, and the
// second one loaded.
template <int rows, typename Config>
__device__ __forceinline__ void multiply_k_blocks(RowStages<Config>& stages,
                                                  WeightFragments<Config>& weight, int k_blocks,
                                                  uint32_t (&even)[16],
                                                  float (&accum)[Config::kTileM / 2]) {
  uint32_t odd[16];
  const auto step = [&](int k_block, uint32_t (&current)[16], uint32_t (&next)[16]) {
    const int stage = stages.state.stage;
    stages.wait();
    fence_operand(accum);
    keep(current);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      wgmma_registers<rows>(accum, current + 4 * i, stages.operand(stage, 16 * i));
    wgmma_commit();
    stages.state.advance();
    if (k_block + 1 < k_blocks) weight.decode(k_block + 1, k_block + 2 == k_blocks, next);
    if (k_block + 2 < k_blocks) weight.load(k_block + 2);
    wgmma_wait<0>();
    fence_operand(accum);
    keep(current);
    stages.release(stage);
  };
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; k_block += 2) {
    step(k_block, even, odd);
    if (k_block + 1 < k_blocks) step(k_block + 1, odd, even);
  }
}

// accum += a second product.
template <int rows, typename Config>
__device__ __forceinline__ void multiply_low_rank(RowStages<Config>& stages,
                                                  const WeightFragments<Config>& weight,
                                                  const Mxfp4LowRank<Config>& low,
                                                  const WorkTile& tile, int tile_cols,
                                                  float (&accum)[Config::kTileM / 2]) {
  const uint16_t* b = low.b + tile.group * low.group_stride;
  const int cols[] = {tile.col + weight.first_col(), tile.col + weight.second_col()};
#pragma unroll 1
  for (int k = 0; k < low.operands.r; k += 16) {
    // Elements 2 (lane % 4) and the next of two columns, then those 8 further on.
    uint32_t fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = k + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2, col = cols[i % 2];
      const bool inside = col < tile_cols;
      const uint16_t* from = b + (inside ? col * low.col_stride + at * low.r_stride : 0);
      const uint32_t first = from[0], second = from[low.r_stride];
      fragment[i] = inside ? first | second << 16 : 0;
    }
    if (k % kLowRankK == 0) stages.wait();
    fence_operand(accum);
    keep(fragment);
    wgmma_fence();
    wgmma_registers<rows>(accum, fragment, stages.operand(stages.state.stage, k % kLowRankK));
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(accum);
    keep(fragment);
    if (k % kLowRankK == kLowRankK - 16 || k == low.operands.r - 16) {
      stages.release(stages.state.stage);
      stages.state.advance();
    }
  }
}

// A math warpgroup: its 64 columns of every tile of this block.
template <typename Config>
__device__ void multiply_tiles(SharedStorage<Config>& shared, const TensorMaps& maps,
                               const Mxfp4LowRank<Config>& low, const EpilogueArguments& epilogue,
                               const GemmShape& shape) {
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
  RowStages<Config> stages(shared);
  WeightFragments<Config> weight(shared, warpgroup);
#pragma unroll 1
  for (int number = 0;; ++number) {
    stages.wait();
    const WorkTile& tile = shared.tiles[number % kTileSlots];
    const int k_blocks = tile.k_blocks;
    if (k_blocks < 0) break;
    if (tile.col + warpgroup * kWgmmaM >= shape.cols) {
#pragma unroll 1
      for (int k_block = 0; k_block < k_blocks; ++k_block, stages.state.advance()) {
        stages.pass();
        weight.skip(k_block);
      }
      if constexpr (Config::kLowRank) {
#pragma unroll 1
        for (int i = 0; i < low_rank_blocks(low.operands); ++i, stages.state.advance())
          stages.pass();
      }
      continue;
    }

    float accum[Config::kTileM / 2];
    uint32_t decoded[16];
    clear_accumulator(accum);
    weight.load(0);
    weight.decode(0, k_blocks == 1, decoded);
    if (k_blocks > 1) weight.load(1);
    const auto multiply = [&]<int rows>() {
      multiply_k_blocks<rows>(stages, weight, k_blocks, decoded, accum);
      if constexpr (Config::kLowRank)
        multiply_low_rank<rows>(stages, weight, low, tile, shape.cols, accum);
    };
    if (tile.row_end - tile.row > Config::kTileM / 2)
      multiply.template operator()<Config::kTileM>();
    else
      multiply.template operator()<Config::kTileM / 2>();
    with_output_type(epilogue.type, [&]<typename T>() {
      store_part<T>(accum, shared, maps, epilogue, shape, tile, weight, warpgroup);
    });
  }
  bulk_wait_read<0>();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, kMxfp4Blocks<Config>)
    __cluster_dims__(kClusterSize)
        mxfp4_gemm_kernel(const __grid_constant__ TensorMaps maps, const int32_t* offs,
                          const __grid_constant__ Mxfp4LowRank<Config> low,
                          const EpilogueArguments epilogue,
                          const __grid_constant__ TileCounts counts, const GemmShape shape) {
  constexpr int math_warps = 4 * Config::kMathWarpgroups;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  if (threadIdx.x == 0) {
    TmaProducer::prefetch<Config>(maps);
    prefetch_tensor_map(&maps.scale_b);
    prefetch_tensor_map(&maps.out);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], TmaProducer::kArrivals<Config>);
      mbarrier_init(&shared.empty[stage], math_warps * kClusterSize * kArrivingLanes);
    }
    for (int stage = 0; stage < Config::kPackedStages; ++stage) {
      mbarrier_init(&shared.packed_full[stage], 1);
      mbarrier_init(&shared.packed_empty[stage], math_warps * kArrivingLanes);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      mbarrier_init(&shared.tile_full[slot], 1);
      mbarrier_init(&shared.tile_empty[slot], releases_of_tile());
    }
    shared.rank = static_cast<int>(cluster_rank());
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < kZeroBytes / 16; i += Config::kThreads)
    reinterpret_cast<uint4*>(shared.zeros)[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  cluster_sync();
  grid_dependency_wait();
  build_group_table<Config>(shared.groups, offs, shape);

  const KernelParams params{maps, low.operands, {}, epilogue, {}, counts, shape};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<kMxfp4HelperRegisters>();
    if (threadIdx.x == 0) TmaProducer::run<Config>(shared, params);
    if (warp == 2 && elect_one()) schedule_tiles<Config>(shared, params);
    if (warp == 3 && elect_one()) load_packed<Config>(shared, maps);
  } else {
    setmaxnreg_inc<kMxfp4MathRegisters<Config>>();
    multiply_tiles<Config>(shared, maps, low, epilogue, shape);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while another may still arrive at its mbarriers
}

}  // namespace grouped_linear::cuda::sm90
