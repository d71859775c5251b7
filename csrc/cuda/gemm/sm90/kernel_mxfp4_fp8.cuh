// The M-grouped GEMM in FP8 of a weight in MXFP4, fprop: kernel_mxfp4.cuh's plan with promotion.
//
//   out[t, n] = sum_k a[t, k] * w[e, n, k]   rows t of group e
//
// a has a scale for each 1 x 128. w's numbers become e4m3 relative to the largest scale of their 128 x
// 128 block (mxfp4_math.h). The sum of a k-block of 128 is multiplied by a's scale times the block's,
// and added in float32. All columns of a tile lie in one block.
//
// Floor: a k-block of 128 of a 192 x 128 tile takes 768 cycles of the tensor cores. A math warp
// issues 303 instructions beside them: 96 FFMA, 50 loads from shared memory, 88 that decode, 8 wgmma.
// Reaches some 1400 cycles (H100, 2026-11): a scheduler has two math warps, whose instructions take
// 4.5 cycles each. See docs/notes/mxfp4.md.
//
// Registers: 96 accumulators, 48 partial ones, of half of the tile's rows at a time, and two k-blocks
// of the operand, of 16. What a k-block reads from shared memory is asked for a k-block before. With
// 256 rows a tile nothing of that has room, and a k-block takes some 2000 cycles.
//
//   role         warps    waits for                signals
//   producer     0        tile_full, empty[stage]  tile_empty, full[stage]
//   scale warp   1        tile_full, empty[stage]  full[stage]
//   scheduler,   2        tile_empty               tile_full, in both blocks
//   and zeros
//   math         4 to 11  full[stage]              empty[stage] of both blocks
//
// The tiles of a cluster lie side by side and share a.
#pragma once

#include "cuda/gemm/sm90/kernel_mxfp4.cuh"
#include "cuda/gemm/sm90/mxfp4_scales.cuh"

namespace grouped_linear::cuda::sm90 {

// a's scales [ceil(K / 128), T], by the elements between k-blocks, and those of w's blocks.
struct Mxfp4Fp8Scales {
  const float* rows;
  int64_t row_stride;
  Scale128x128View blocks;
};

// A warpgroup multiplies a part of a tile's rows at a time.
template <typename Config>
constexpr int kPartRows = Config::kTileM / 2;

// The parts of a tile that have rows.
template <typename Config>
__device__ __forceinline__ int row_parts(const WorkTile& tile) {
  return tile.row_end - tile.row > kPartRows<Config> ? 2 : 1;
}

// Stages of the second product, before the first one's.
template <typename Config>
__device__ __forceinline__ int low_rank_stages(const LowRankArguments<Config>& low) {
  if constexpr (Config::kLowRank) return low_rank_blocks(low);
  return 0;
}

// By one thread: loads a, w's codes and their distances.
template <typename Config>
__device__ void load_operands(SharedStorage<Config>& shared, const TensorMaps& maps,
                              const LowRankArguments<Config>& low) {
  constexpr int part_rows = kPartRows<Config>, shared_rows = part_rows / kClusterSize;
  constexpr int part_bytes = part_rows * kSwizzleBytes;
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  const int first_row = shared.rank * shared_rows;
  PipelineState<Config::kStages> state;
#pragma unroll 1
  for (int number = 0;; ++number) {
    const WorkTile tile = wait_for_tile(shared, number);
    release_tile(shared, number);
    if (tile.k_blocks < 0) break;
    const int parts = row_parts<Config>(tile);
#pragma unroll 1
    for (int i = -low_rank_stages<Config>(low); i < tile.k_blocks; ++i, state.advance()) {
      const int stage = state.stage;
      uint64_t* full = &shared.full[stage];
      const auto load_rows = [&](const CUtensorMap& map, int k) {
#pragma unroll 1
        for (int part = 0; part < parts; ++part)
          tma_load_2d(shared.stages[stage].a + part * part_bytes + first_row * kSwizzleBytes, &map,
                      full, all, k, tile.row + part * part_rows + first_row);
      };
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
      if constexpr (Config::kLowRank) {
        if (i < 0) {
          mbarrier_arrive_expect_tx(full, parts * part_bytes);
          load_rows(low.a, (i + low_rank_blocks(low)) * kLowRankK);
          continue;
        }
      }
      const int k = i * Config::kTileK;
      mbarrier_arrive_expect_tx(full,
                                parts * part_bytes + Config::kPackedBytes + Config::kScaleBytes);
      load_rows(maps.a, k);
      tma_load_3d(shared.codes[stage], &maps.b, full, 0, k / 2, tile.col, tile.group);
      tma_load_3d(shared.scales[stage], &maps.scale_b, full, 0, tile.col, i, tile.group);
    }
  }
  mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
  mbarrier_arrive(&shared.full[state.stage]);  // the end takes a stage too
}

// By one warp: multiplies a's scales by the blocks'.
template <typename Config>
__device__ void multiply_scales(SharedStorage<Config>& shared, const Mxfp4Fp8Scales& scales,
                                const LowRankArguments<Config>& low, const GemmShape& shape) {
  constexpr int count = Config::kTileM / 32;
  const int lane = threadIdx.x % 32;
  PipelineState<Config::kStages> state;
  const auto wait = [&] { mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1); };
  const auto arrive = [&] {  // every lane, after what it has written
    mbarrier_arrive(&shared.full[state.stage]);
    state.advance();
  };
#pragma unroll 1
  for (int number = 0;; ++number) {
    const WorkTile& tile = wait_for_tile(shared, number);
    if (tile.k_blocks < 0) break;
#pragma unroll 1
    for (int i = 0; i < low_rank_stages<Config>(low); ++i) {
      wait();
      arrive();
    }
    const int left = shape.T - tile.row - lane;
    const Scale128x128View& blocks = scales.blocks;
    const float* block = blocks.scale + tile.group * blocks.group_stride +
                         min(tile.col, shape.cols - 1) / kScaleBlock * blocks.row_stride;
    const float* rows = scales.rows + tile.row + lane;
#pragma unroll 1
    for (int k_blocks = tile.k_blocks; k_blocks > 0; --k_blocks) {
      float factors[count];
#pragma unroll
      for (int i = 0; i < count; ++i) factors[i] = 32 * i < left ? rows[32 * i] : 0;
      const float of_block = *block;
      wait();
#pragma unroll
      for (int i = 0; i < count; ++i)
        shared.factors[state.stage][32 * i + lane] = factors[i] * of_block;
      arrive();
      block += blocks.k_stride;
      rows += scales.row_stride;
    }
  }
  wait();
  arrive();  // the end takes a stage too
}

__device__ __forceinline__ uint32_t ld_shared_ushort(uint32_t address) {
  uint32_t v;
  asm volatile("{\n.reg .u16 half;\nld.shared.u16 half, [%1];\ncvt.u32.u16 %0, half;\n}\n"
               : "=r"(v)
               : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 ld_shared_uint2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// A tile of the ring. It is read where it is needed: in registers it, or a pointer to it, would spill.
__device__ __forceinline__ WorkTile ld_shared_tile(uint32_t address) {
  const uint4 v = ld_shared_uint4(address), w = ld_shared_uint4(address + 16);
  const auto of = [](uint32_t x) { return static_cast<int>(x); };
  return {of(v.x), of(v.y), of(v.z), of(v.w), of(w.x), of(w.y), of(w.z), w.w};
}

// A value that ptxas does not compute anew from the thread's index either.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  return __shfl_sync(0xffffffff, value, threadIdx.x % 32);
}

// A math thread's part of the weight as e4m3: wgmma's first operand, four registers for each 32 along
// K. All that depends on the thread is one register.
template <typename Config>
class Fp8WeightFragments {
  static constexpr int kLineBytes = Config::kPackedK / 2;

 public:
  __device__ explicit Fp8WeightFragments(SharedStorage<Config>& shared)
      : numbers_(smem_address(shared.numbers)),
        codes_(smem_address(shared.codes)),
        distances_(smem_address(shared.scales)) {
    // Lines of packed tiles are swizzled, see WeightFragments.
    const int row = first_col();
    thread_ = opaque(row * kLineBytes + row / 2 % 4 * 16 + threadIdx.x % 4 * 2);
  }

  // The column of out, in the tile, of the operand's row lane / 4, and that of the one 8 below.
  static __device__ int first_col() {
    const int thread = reread_thread_index();
    return (thread / 128 - 1) * kWgmmaM + thread / 32 % 4 * 16 + thread % 32 / 4;
  }
  static __device__ int second_col() { return first_col() + 8; }
  __device__ uint32_t quad() const { return kept(thread_) % 8 / 2; }

  // The distances of a stage's k-block.
  __device__ __forceinline__ void load_distances(int stage) {
    const uint32_t from = distances_ + kept(thread_) / kLineBytes * 4 + stage * Config::kScaleBytes;
#pragma unroll
    for (int r = 0; r < 2; ++r) of_row_[r] = ld_shared_uint(from + r * 32);
  }
  // The codes of its elements 32 step to 32 step + 31, one register of the operand's for each four.
  __device__ __forceinline__ void load(int stage, int step, uint32_t* to) const {
    const uint32_t line = codes_ + (thread_ ^ (step * 16)) + stage * Config::kPackedBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = ld_shared_ushort(line + i % 2 * 8 * kLineBytes + i / 2 * 8);
  }
  // The numbers that these codes stand for in this thread's two rows. A distance is their offset.
  __device__ __forceinline__ void load_numbers(int step, uint2 (&numbers)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      numbers[r] = ld_shared_uint2(prmt(of_row_[r], numbers_, 0x7650 + step));
  }
  // Codes become e4m3, in place.
  __device__ __forceinline__ void decode(const uint2 (&numbers)[2], uint32_t* codes) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t c = codes[i];
      codes[i] = prmt(numbers[i % 2].x, numbers[i % 2].y, c & 0x7777) |
                 (prmt(c << 4, c, 0x5140) & 0x80808080);
    }
  }

 private:
  uint32_t numbers_, codes_, distances_, thread_;
  uint32_t of_row_[2];
};

// Elements k to k + 15 along r of b_low, as wgmma's first operand: of two columns elements 2 (lane % 4)
// and the next, then those 8 further on.
template <typename Config>
__device__ __forceinline__ void load_low_rank_fragment(const Mxfp4LowRank<Config>& low,
                                                       const GemmShape& shape, const WorkTile& tile,
                                                       int k, uint32_t (&fragment)[4]) {
  using Fragments = Fp8WeightFragments<Config>;
  const uint16_t* b = low.b + tile.group * low.group_stride;
  const int cols[] = {tile.col + Fragments::first_col(), tile.col + Fragments::second_col()};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = k + i / 2 * 8 + threadIdx.x % 4 * 2, col = cols[i % 2];
    const bool inside = col < shape.cols;
    const uint16_t* from = b + (inside ? col * low.col_stride + at * low.r_stride : 0);
    const uint32_t first = from[0], second = from[low.r_stride];
    fragment[i] = inside ? first | second << 16 : 0;
  }
}

// Where a math thread is: the stage, and in one register its phase and the tile's slot.
template <int stages>
struct MathState {
  int stage = 0;
  uint32_t bits = 0;
  __device__ uint32_t phase() const { return bits % 2; }
  __device__ int slot() const { return bits / 2 % kTileSlots; }
  __device__ void next_tile() { bits += 2; }
  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      bits ^= 1;
    }
  }
};

// A math warpgroup: its 64 columns of every tile of this block.
template <typename Config>
__device__ void multiply_tiles_fp8(SharedStorage<Config>& shared, const TensorMaps& maps,
                                   const Mxfp4LowRank<Config>& low,
                                   const EpilogueArguments& epilogue, const GemmShape& shape) {
  constexpr int part_rows = kPartRows<Config>, count = part_rows / 2, stages = Config::kStages;
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
  // The first lanes arrive at both blocks' barriers, the others have 0.
  const uint32_t first_empty =
      opaque(threadIdx.x % 32 < kClusterSize ? mapa(&shared.empty[0], threadIdx.x % 32) : 0);
  // a's tile, K-major, whose rows are the output's.
  const uint32_t rows = __shfl_sync(0xffffffff, smem_descriptor_low(shared.stages[0].a, 16), 0);
  const uint32_t first_full = __shfl_sync(0xffffffff, smem_address(shared.full), 0);
  const uint32_t first_tile = __shfl_sync(0xffffffff, smem_address(shared.tiles), 0);
  Fp8WeightFragments<Config> weight(shared);
  MathState<stages> state;
  const auto wait = [&](int stage, uint32_t phase) {
    mbarrier_wait(first_full + stage * static_cast<uint32_t>(sizeof(uint64_t)), phase);
  };
  const auto release = [&](int stage) {
    __syncwarp();
    if (first_empty != 0) mbarrier_arrive_remote(first_empty + stage * sizeof(uint64_t));
  };
#pragma unroll 1
  for (;; state.next_tile()) {
    wait(state.stage, state.phase());
    const WorkTile tile = ld_shared_tile(first_tile + state.slot() * sizeof(WorkTile));
    const int k_blocks = tile.k_blocks;
    if (k_blocks < 0) break;
    if (tile.col + warpgroup * kWgmmaM >= shape.cols) {
#pragma unroll 1
      for (int i = low_rank_stages<Config>(low.operands) + k_blocks; i > 0; --i, state.advance()) {
        wait(state.stage, state.phase());
        release(state.stage);
      }
      continue;
    }

    float accum[Config::kTileM / 2], partial[count];
    // As accumulator_of, for what ptxas makes of this kernel.
    const auto swapped = [](int i) { return i < count ? i ^ 1 : i; };
    clear_accumulator(accum);
    if constexpr (Config::kLowRank) {
      float second[count];
      clear_accumulator(partial);
      clear_accumulator(second);
      const auto add = [&]<typename T>(int k, uint32_t (&fragment)[4]) {
        const uint32_t from =
            rows + state.stage * (Config::kStageBytes / 16) + k % kLowRankK * 2 / 16;
        wgmma_fence();
        wgmma_registers<part_rows, T>(partial, fragment, smem_descriptor(from, 8 * kSwizzleBytes));
        wgmma_registers<part_rows, T>(
            second, fragment,
            smem_descriptor(from + part_rows * kSwizzleBytes / 16, 8 * kSwizzleBytes));
        wgmma_commit();
      };
#pragma unroll 1
      for (int k = 0; k < low.operands.r; k += 16) {
        uint32_t fragment[4];
        load_low_rank_fragment(low, shape, tile, k, fragment);
        if (k % kLowRankK == 0) wait(state.stage, state.phase());
        fence_operand(partial);
        fence_operand(second);
        keep(fragment);
        if (low.operands.bfloat16)
          add.template operator()<__nv_bfloat16>(k, fragment);
        else
          add.template operator()<__half>(k, fragment);
        wgmma_wait<0>();
        fence_operand(partial);
        fence_operand(second);
        keep(fragment);
        if (k % kLowRankK == kLowRankK - 16 || k == low.operands.r - 16) {
          release(state.stage);
          state.advance();
        }
      }
#pragma unroll
      for (int i = 0; i < count; ++i)
        accum[swapped(i)] += partial[i], accum[swapped(count + i)] += second[i];
    }

    int left = k_blocks;
    // A stage's k-block, whose operand is `current`. Decodes the next one: `next` has its codes, and
    // `numbers` what they stand for. Loads the codes of the one after to `current`.
    uint2 numbers[4][2];
    const auto step = [&](auto parts, auto at, uint32_t (&current)[16], uint32_t (&next)[16]) {
      constexpr int after = (at + 2) % stages;
      float2 factors[count / 4];
      const auto issue = [&](auto part) {
        fence_operand(partial);
        keep(current);
        wgmma_fence();
        const uint32_t first = kept(rows);  // else all descriptors are computed before the loop
        const auto add = [&](auto i) {
          wgmma_registers_e4m3<i != 0>(
              partial, current + 4 * i,
              smem_descriptor(first + at * (Config::kStageBytes / 16) +
                                  part * (part_rows * kSwizzleBytes / 16) + i * 2,
                              8 * kSwizzleBytes));
        };
        add(Int<0>());
        add(Int<1>());
        add(Int<2>());
        add(Int<3>());
        wgmma_commit();
      };
      const auto load_factors = [&](auto part) {
        const uint32_t from =
            smem_address(shared.factors[at] + part * part_rows) + weight.quad() * 8;
#pragma unroll
        for (int j = 0; j < count / 4; ++j) factors[j] = ld_shared_float2(from + j * 32);
      };
      const auto promote = [&](auto part) {
#pragma unroll
        for (int i = 0; i < count; ++i)
          accum[swapped(part * count + i)] +=
              (i % 2 ? factors[i / 4].y : factors[i / 4].x) * partial[i];
      };
      const auto decode = [&](int first) {
#pragma unroll
        for (int i = first; i < first + 2; ++i) weight.decode(numbers[i], next + 4 * i);
      };

      issue(Int<0>());
      if constexpr (parts == 1) {
        if (left > 1) decode(0), decode(2);
      } else {
        if (left > 1) decode(0);
        load_factors(Int<0>());
        wgmma_wait<0>();
        fence_operand(partial);
        promote(Int<0>());
        issue(Int<1>());
        if (left > 1) decode(2);
      }
      load_factors(Int<parts - 1>());
      wgmma_wait<0>();
      fence_operand(partial);
      keep(current);
      if (left > 2) {
        wait(after, state.phase() ^ (at + 2 >= stages));
        weight.load_distances(after);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight.load(after, i, current + 4 * i);
      }
      promote(Int<parts - 1>());
      release(at);
      if (left > 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weight.load_numbers(i, numbers[i]);
      }
      --left;
      state.advance();
    };
    const auto multiply = [&](auto parts) {
      uint32_t even[16], odd[16];
      const auto load = [&](const MathState<stages>& from, uint32_t (&to)[16]) {
        wait(from.stage, from.phase());
        weight.load_distances(from.stage);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight.load(from.stage, i, to + 4 * i);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight.load_numbers(i, numbers[i]);
      };
      load(state, even);
#pragma unroll
      for (int i = 0; i < 4; ++i) weight.decode(numbers[i], even + 4 * i);
      if (left > 1) {
        MathState<stages> next = state;
        next.advance();
        load(next, odd);
      }
      if (state.stage % 2 != 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const uint32_t codes = odd[i];
          odd[i] = even[i], even[i] = codes;
        }
      }
#pragma unroll 1
      while (true) {
        if (state.stage == 0) step(parts, Int<0>(), even, odd);
        if (left == 0) break;
        if (state.stage == 1) step(parts, Int<1>(), odd, even);
        if (left == 0) break;
        if (state.stage == 2) step(parts, Int<2>(), even, odd);
        if (left == 0) break;
        step(parts, Int<3>(), odd, even);
        if (left == 0) break;
      }
    };
    if (row_parts<Config>(tile) == 2)
      multiply(Int<2>());
    else
      multiply(Int<1>());
    float out[Config::kTileM / 2];
#pragma unroll
    for (int i = 0; i < Config::kTileM / 2; ++i) out[i] = accum[swapped(i)];
    const auto store = [&]<typename T>() {
      store_part<T>(out, shared, maps, epilogue, shape,
                    ld_shared_tile(first_tile + state.slot() * sizeof(WorkTile)), weight,
                    warpgroup);
    };
    switch (epilogue.type) {
      case OutputType::kBFloat16: store.template operator()<__nv_bfloat16>(); break;
      case OutputType::kHalf: store.template operator()<__half>(); break;
      case OutputType::kFloat: store.template operator()<float>();
    }
  }
  bulk_wait_read<0>();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) __cluster_dims__(kClusterSize)
    mxfp4_fp8_gemm_kernel(const __grid_constant__ TensorMaps maps, const int32_t* offs,
                          const __grid_constant__ Mxfp4LowRank<Config> low,
                          const Mxfp4Fp8Scales scales, const EpilogueArguments epilogue,
                          const __grid_constant__ TileCounts counts, const GemmShape shape) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  if (threadIdx.x < sizeof(shared.numbers)) {
    const uint32_t below = threadIdx.x / 8, code = threadIdx.x % 8;
    shared.numbers[below][code] = static_cast<uint8_t>(
        mxfp4::to_e4m3(code, below, below == kNanBelow ? mxfp4::kNanScale : 0));
  }
  if (threadIdx.x == 0) {
    TmaProducer::prefetch<Config>(maps);
    prefetch_tensor_map(&maps.scale_b);
    prefetch_tensor_map(&maps.out);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], 1 + 32);  // the producer, lanes of the scale warp
      mbarrier_init(&shared.empty[stage], 4 * Config::kMathWarpgroups * kClusterSize);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      mbarrier_init(&shared.tile_full[slot], 1);
      mbarrier_init(&shared.tile_empty[slot], 1);
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

  const KernelParams params{maps, low.operands, scales.blocks, epilogue, {}, counts, shape};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<kMxfp4HelperRegisters>();
    if (threadIdx.x == 0) load_operands<Config>(shared, maps, low.operands);
    if (warp == 1) multiply_scales<Config>(shared, scales, low.operands, shape);
    if (warp == 2 && elect_one()) schedule_tiles<Config>(shared, params);
  } else {
    setmaxnreg_inc<kMxfp4MathRegisters<Config>>();
    multiply_tiles_fp8<Config>(shared, maps, low, epilogue, shape);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while another may still arrive at its mbarriers
}

}  // namespace grouped_linear::cuda::sm90
