// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM on Hopper's tensor cores: BF16, FP16 and block-scaled FP8.
//
//   M-grouped (fprop, dgrad): out[t, n]    = sum_k a[t, k] * b[e, n, k]   rows t of group e
//   K-grouped (wgrad):        out[e, n, k] = sum_t a[t, n] * b[t, k]      rows t of group e
//
// Arithmetic: 2 T N K operations either way. On an H200 (132 SMs; dense cuBLAS reaches about 700
// TFLOP/s in bf16 and 1300 to 1500 in FP8) the shapes that train are bound by it. wgrad writes E N
// K outputs, which bounds it where groups have less than about 500 rows.
//
// Floor: a k-block of 128 of a 128 x 192 tile of FP8 takes 768 cycles of the tensor cores. Shared
// memory moves 128 bytes a cycle: wgmma reads operands for 512 cycles and TMA writes them for 320,
// together 832; scales of single columns, 48 a thread in a K-grouped GEMM, add 384 (none where 128
// columns share one). 16-bit tiles: 1024 cycles of tensor cores, 1024 of shared memory.
//
// Reaches (H200, 2026-11): FP8 M-grouped 880 cycles a k-block; K-grouped 900 where columns share
// scales, and some 1600 where none do, by its share of a dense GEMM.
// benchmarks/results/bench_grouped_mm_nvidia_h200.md has the shares of a dense GEMM.
//
// One persistent block an SM, in clusters of two, walks over output tiles of 128 x kTileN. Group
// sizes are read on the device. An M-grouped GEMM's result does not depend on T, E or the groups'
// sizes; in a K-grouped one the order in which split-K slices are added may.
//
// The roles of a block's warps, of which roles.h says which warp has which. Warps 4 to 11 do the
// products, 64 rows a warpgroup. Registers are a thread's: warps 0 to 3 have kHelperRegisters, the
// math warps what these leave (kMathRegisters).
//
//   role        waits for                          signals
//   scheduler   tile_empty                         tile_full, in both blocks
//   producer    tile_full, empty[stage]            tile_empty, full[stage]; Scale1x128:
//                                                  scales_full[stage]
//   scales      tile_full, empty[stage] or         full[stage]
//               scales_full[stage]
//   math        full[stage], epilogue_empty        empty[stage] of both blocks, epilogue_full
//   store       epilogue_full; to add: tile_full   epilogue_empty
//
// They are in scheduler.cuh, producer.cuh, gather_producer.cuh, scale_warp.cuh, mainloop_*.cuh and
// epilogue.cuh, and store_warp.cuh or elementwise_epilogue.cuh, in this order. Zeros are written by
// the scheduler, or by a store warp while it waits: zero_fill.cuh. With a low-rank second product,
// producer and math warps go on with its k-blocks: low_rank.cuh. With swapped operands a tile's
// rows lie along wgmma's N: swapped.cuh.
//
// The two tiles of a cluster are neighbours and share an operand's tile, see tile_order.cuh. Each
// block loads one half of it into both.
//
// Group ends fall anywhere. Loads past a group's end are harmless (producer.cuh), and stores end
// with the group (RaggedRows). A group without rows has no tiles in a K-grouped GEMM: its matrix is
// zeroed beside the tiles (zero_fill.cuh).
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/sm90/gather_producer.cuh"
#include "cuda/gemm/sm90/group_table.cuh"
#include "cuda/gemm/sm90/low_rank.cuh"
#include "cuda/gemm/sm90/mainloop_16bit.cuh"
#include "cuda/gemm/sm90/mainloop_fp8.cuh"
#include "cuda/gemm/sm90/scale_warp.cuh"
#include "cuda/gemm/sm90/store_warp.cuh"
#include "cuda/gemm/sm90/swapped.cuh"

namespace grouped_linear::cuda::sm90 {

// A math warpgroup: the main loop, split-K fix-up and epilogue of its 64 rows, or swapped its 64
// columns, of every tile of this block.
template <typename Config, typename Epilogue, typename Params>
__device__ void compute_tiles(SharedStorage<Config>& shared, const Params& params) {
  const auto& epilogue = params.epilogue;
  // Shuffled, ptxas keeps wgmma's descriptors in uniform registers, in 16 bits.
  const int warpgroup = threadIdx.x / 128 - 1;
  const MathThread thread{Config::kFp8 ? warpgroup : __shfl_sync(0xffffffff, warpgroup, 0),
                          static_cast<int>(threadIdx.x / 32 - 4),
                          static_cast<int>(threadIdx.x % 32)};
  ConsumerPipeline<Config> pipeline(shared, thread.lane);
  auto& state = pipeline.state;
  const bool overwrite = !Config::kAdds || overwrites(epilogue);
  const auto& first = shared.stages[0];
  const WgmmaOperands<Config> operands(Config::kSwapped ? first.b : first.a,
                                       Config::kSwapped ? first.a : first.b, thread.warpgroup);
  for (int number = 0;; ++number) {
    const auto sync = [&](int subtile, const auto& fill) {
      const uint32_t phase = (number * Epilogue::subtiles(epilogue) + subtile) & 1;
      mbarrier_wait(&shared.epilogue_empty[thread.warpgroup], phase);
      fill();
      __syncwarp();
      if (kEveryLaneArrives || thread.lane == 0)
        mbarrier_arrive(&shared.epilogue_full[thread.warpgroup]);
    };
    const auto skip_epilogue = [&] {
      for (int i = 0; i < Epilogue::subtiles(epilogue); ++i) sync(i, [] {});
    };
    const WorkTile& tile = shared.tiles[number % kTileSlots];
    mbarrier_wait(&shared.full[state.stage], state.phase);
    const int k_blocks = tile.k_blocks;
    if (k_blocks < 0) return sync(0, [] {});  // tells the store warp that there are no more tiles
    if (k_blocks == 0) {
      pipeline.release(state.stage);
      state.advance();
    }
    const bool outside =
        !Config::kSwapped &&
        (tile.row + thread.warpgroup * kWgmmaM >= tile.row_end || tile.col >= params.shape.cols);
    if (outside || (k_blocks == 0 && !overwrite)) {  // an empty group adds nothing
      int stages = k_blocks;
      if constexpr (Config::kLowRank) stages += low_rank_blocks(params.producer);
      for (int k_block = 0; k_block < stages; ++k_block, state.advance()) {
        mbarrier_wait(&shared.full[state.stage], state.phase);
        pipeline.release(state.stage);
      }
      skip_epilogue();
      continue;
    }

    const bool is_split_k = Config::kSplitsK && tile.is_split_k();

    const int units = Config::kSwapped ? __shfl_sync(0xffffffff, swapped_units(tile), 0) : 0;
    float accum[Config::kAccumulators];
    // With block scales the main loop clears it beneath the first wgmma. Without, ptxas would
    // spill, or serialise wgmma.
    if (k_blocks == 0 || !Config::kBlockScaled) clear_accumulator(accum);
    if constexpr (Config::kFp8)
      mainloop_fp8<Config>(shared, pipeline, operands, tile, k_blocks, thread, params, accum);
    else if constexpr (Config::kSwapped)
      with_rows<Config>(units, [&](auto rows) {
        mainloop_16bit<Config, rows>(shared, pipeline, operands, tile, k_blocks, params, accum);
      });
    else
      mainloop_16bit<Config>(shared, pipeline, operands, tile, k_blocks, params, accum);

    // is_split_k was read where that costs no time. With scales per group ptxas would spill for it.
    if (Config::kSplitsK && (Config::kScalePerGroup ? tile.is_split_k() : is_split_k)) {
      add_partials(params.workspace, tile.source_slot(), tile.source_count(), accum);
      if (tile.destination_slot() > 0) {
        write_partial(params.workspace, tile.destination_slot(), accum);
        skip_epilogue();
        continue;
      }
    }
    if constexpr (Config::kSwapped)
      sync(0,
           [&] { write_swapped<Config>(accum, shared.epilogue[thread.warpgroup][0][0], units); });
    else
      Epilogue::template apply<Config>(accum, shared, params, tile, overwrite, sync);
  }
}

// A thread of warpgroup 0 has so many registers, and leaves the rest of the 168 that each has at
// first to the math warps.
template <typename Config, typename Epilogue>
constexpr int kHelperRegisters = larger(ProducerOf<Config>::kRegisters, Epilogue::kRegisters);
template <typename Config, typename Epilogue>
constexpr int kMathRegisters = (3 * 168 - kHelperRegisters<Config, Epilogue>) / 2;

// The roles of the block's warps, one after the other: from a switch ptxas makes other code.
template <typename Config, typename Epilogue, typename Params>
__device__ void run_roles(SharedStorage<Config>& shared, const Params& params) {
  using Producer = ProducerOf<Config>;
  constexpr Roles roles = Config::kRoles;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<kHelperRegisters<Config, Epilogue>>();
    if (threadIdx.x < Producer::kThreads) Producer::template run<Config>(shared, params);
    if (Config::kKGrouped && threadIdx.x / 32 == roles.zeros &&
        shared.active_groups < params.shape.E)
      clear_zeros(shared);
    if constexpr (roles.warp[1] == Role::kScales) {
      if (threadIdx.x / 32 == 1) prepare_scales<Config>(shared, params);
    } else if constexpr (roles.warp[1] == Role::kScheduler) {
      if (threadIdx.x / 32 == 1 && elect_one()) schedule_tiles<Config>(shared, params);
    }
    if (threadIdx.x >= 32 * roles.first(Role::kStore) && (Config::kElementwise || elect_one()))
      Epilogue::template run_store_warp<Config>(shared, params, threadIdx.x / 32);
  } else {
    setmaxnreg_inc<kMathRegisters<Config, Epilogue>>();
    compute_tiles<Config, Epilogue>(shared, params);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while another may still arrive at its mbarriers
}

// The setup that needs no group sizes, while the kernel before this one runs.
template <typename Config, typename Epilogue>
__device__ void prologue(Control& control, const TensorMaps& maps) {
  using Producer = ProducerOf<Config>;
  constexpr Roles roles = Config::kRoles;
  if (threadIdx.x == 0) {
    Producer::template prefetch<Config>(maps);
    Epilogue::prefetch(maps);
    for (int stage = 0; stage < kMaxStages; ++stage) {
      mbarrier_init(&control.full[stage],
                    Producer::template kArrivals<Config> + roles.count(Role::kScales));
      // Every math warp of the cluster arrives: a stage has parts that the other block loads.
      mbarrier_init(&control.empty[stage], kMathWarps * kClusterSize * kArrivingLanes);
      if (Config::kScale1x128) mbarrier_init(&control.scales_full[stage], 1);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      mbarrier_init(&control.tile_full[slot], 1);
      mbarrier_init(&control.tile_empty[slot], releases_of_tile());
    }
    control.rank = static_cast<int>(cluster_rank());
    for (int i = 0; i < kMathWarpgroups; ++i) {
      mbarrier_init(&control.epilogue_full[i], kMathWarps / kMathWarpgroups * kArrivingLanes);
      // A third store warp reads the buffers of both warpgroups. Swapped, all three do.
      const int readers = roles.count(Role::kStore) < 3 ? 1 : Config::kSwapped ? 3 : 2;
      mbarrier_init(&control.epilogue_empty[i], readers);
    }
    fence_mbarrier_init();
  }
  if constexpr (!Config::kKGrouped) {
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(control.zeros)[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
  }
  // No block loads into another, or arrives there, before its mbarriers are initialised.
  cluster_sync();
}

template <typename Config, typename Epilogue = LinearEpilogue>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kClusterSize)
    grouped_gemm_kernel(const __grid_constant__ TensorMaps maps, const int32_t* offs,
                        const __grid_constant__ typename ProducerOf<Config>::Arguments producer,
                        const Scale128x128View scale_b, const typename Epilogue::Arguments epilogue,
                        const SplitKWorkspace workspace, const __grid_constant__ TileCounts counts,
                        const __grid_constant__ TileCounts narrow_counts, const GemmShape shape) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  prologue<Config, Epilogue>(shared, maps);
  grid_dependency_wait();
  build_group_table<Config>(shared.groups, offs, shape);
  if constexpr (Config::kKGrouped) {
    if (threadIdx.x < 32) keep_active_groups<Config>(shared, epilogue, shape);
    __syncthreads();
  }
  if constexpr (Config::kHasNarrow) {
    if (takes_narrow<Config>(shared.groups, shape)) {
      __syncthreads();  // every thread has read the table, which changes now
      using Narrow = NarrowOf<Config>;
      auto& narrow = *reinterpret_cast<SharedStorage<Narrow>*>(raw);
      build_group_table<Narrow>(narrow.groups, offs, shape);
      return run_roles<Narrow, Epilogue>(
          narrow, KernelParams{maps, producer, scale_b, epilogue, workspace, narrow_counts, shape});
    }
  }
  run_roles<Config, Epilogue>(
      shared, KernelParams{maps, producer, scale_b, epilogue, workspace, counts, shape});
}

// The kernel's narrow_counts.
template <typename Config>
TileCounts narrow_tile_counts(const GemmShape& shape) {
  if constexpr (Config::kHasNarrow)
    return tile_counts<NarrowOf<Config>>(shape);
  else
    return {};
}

}  // namespace grouped_linear::cuda::sm90
