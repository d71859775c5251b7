// Grouped matrix products on Hopper's tensor cores, BF16, FP16 and block-scaled FP8.
//
//   by rows (fprop, dgrad):  out[t, n]    = sum_k a[t, k] * b[e, n, k]   for the rows t of group e
//   by depth (wgrad):        out[e, n, k] = sum_t a[t, n] * b[t, k]      over the rows t of group e
//
// Arithmetic: 2 T N K operations either way. On an H200 (132 SMs; dense cuBLAS reaches about 700
// TFLOP/s in bf16 and 1300 to 1500 in FP8) the shapes that train are bound by it. wgrad writes E N K
// outputs, which bounds it where groups have less than about 500 rows.
//
// Floor: for 128 of the depth, a 128 x 192 tile of FP8 takes 768 cycles of the tensor cores. Shared
// memory moves 128 bytes a cycle: 512 cycles of operands read by wgmma and 320 of them written by
// TMA make 832, and by depth scales of columns, 48 a thread, add 384 (none where 128 columns share
// one). 16-bit tiles: 1024 cycles of tensor cores, 1024 of shared memory.
//
// Reaches (H200, 2026-11): FP8 by rows 880 cycles; by depth 900 where columns share scales, and where none
// do some 1600, by its share of a dense product.
// benchmarks/results/bench_grouped_mm_nvidia_h200.md has the shares of a dense product.
//
// One persistent block an SM, in clusters of two, walks over output tiles of 128 x kTileN.
// Warpgroup 0 copies operand stages with TMA into a ring in shared memory; warpgroups 1 and 2
// multiply 64 rows each with wgmma and stage the results, which another warp of warpgroup 0 for each sends to
// memory. Sizes are read on the device. By rows a result does not depend on T, E or the splits; by depth the
// order in which its parts are added may.
//
// The two tiles of a cluster are neighbours. As long as a group has a pair of row tiles, they lie
// one below the other and share b's tile, else beside one another and share a's. Each block copies
// one half of what is shared to both.
//
// Group borders fall anywhere. Loads by rows may run past a group's end, into the next group's
// rows: they only reach outputs that are not stored. Loads by depth find zeros there, in the padded
// layout (FP8) or because the tensor map ends there (16-bit, see RaggedRows). Stores end with the
// group by the same kind of map. A group without rows has no tiles by depth: its matrix is zeroed while
// others multiply. A warp that is idle else finds scales that are the same for many columns.
//
// By depth, what is left after the last full round of tiles is cut up for all clusters (gemm_schedule.cuh,
// gemm_partial_sums.cuh).
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/sm90/epilogue.cuh"
#include "cuda/gemm/sm90/partial_sums.cuh"
#include "cuda/gemm/sm90/schedule.cuh"
#include "cuda/gemm/sm90/tiles.cuh"

namespace grouped_linear::cuda {

// Copies one half of a's tile, 64 rows of it, into a stage; mask: of the cluster's blocks, see sm90.
template <typename Config>
__device__ __forceinline__ void load_a(GemmShared<Config>& shared, const TensorMaps& maps,
                                       const Tile& tile, int stage, int step, int half,
                                       uint16_t mask) {
  uint8_t* to = shared.stages[stage].a + half * (Config::kABytes / 2);
  uint64_t* full = &shared.full[stage];
  const int row = tile.row + half * (kTileM / 2);
  if constexpr (Config::kFp8 && Config::kByDepth) {
    sm90::load_3d(to, &maps.a, full, mask, 0, row, tile.begin + step);
  } else if constexpr (Config::kByDepth) {
    const int at = tile.begin + step * Config::kTileK;
    const RaggedRows rows(at, tile.begin + tile.depth_rows);
    sm90::load_4d(to, &maps.a, full, mask, row, rows.c1, rows.c2, rows.kOrigin);
  } else {
    sm90::load_2d(to, &maps.a, full, mask, step * Config::kTileK, row);
  }
}

// The same of one of b's pieces, kTileN / kBPieces columns of the output.
template <typename Config>
__device__ __forceinline__ void load_b(GemmShared<Config>& shared, const TensorMaps& maps,
                                       const GemmShape& shape, const Tile& tile, int stage,
                                       int step, int piece, uint16_t mask) {
  constexpr int cols = Config::kTileN / Config::kBPieces;
  uint8_t* to = shared.stages[stage].b + piece * (Config::kBBytes / Config::kBPieces);
  uint64_t* full = &shared.full[stage];
  const int col = tile.col + piece * cols;
  if constexpr (Config::kFp8 && Config::kByDepth) {
    sm90::load_3d(to, &maps.b, full, mask, 0, col, tile.begin + step);
  } else if constexpr (Config::kBMajor == 0) {
    sm90::load_3d(to, Config::kNarrow ? &maps.narrow_b : &maps.b, full, mask, step * Config::kTileK,
                  col, tile.group);
  } else {
    const int at = tile.begin + step * Config::kTileK;
    const RaggedRows rows(at, tile.begin + tile.depth_rows);
#pragma unroll
    for (int c = 0; c < cols; c += 64) {
      uint8_t* column = to + c * kLineBytes;
      if constexpr (Config::kByDepth)
        sm90::load_4d(column, &maps.b, full, mask, col + c, rows.c1, rows.c2, rows.kOrigin);
      else
        sm90::load_3d(column, &maps.b, full, mask, col + c, at, tile.group);
    }
  }
}

// Copies every step of every tile of this block into the ring. A tile without steps takes a stage
// too, as does the end.
template <typename Config>
__device__ void produce(GemmShared<Config>& shared, const TensorMaps& maps,
                        const TileCounts& counts, const GemmShape& shape) {
  constexpr int scale_bytes = Config::kBlocks ? 4 * Config::kRowScales : 0;
  constexpr uint16_t all = (1 << kCluster) - 1;
  // From memory: a special register would be read in every step (H200, 2026-11: 0.8% of FP8 by depth).
  const int rank = shared.rank;
  RingPosition<Config::kStages> ring;
  Work<Config> work(shared, counts, shape);
  for (int count = 0;; ++count) {
    const Tile tile = work.next();
    sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    shared.tiles[count % kTileRing] = tile;
    if constexpr (Config::kByDepth && !Config::kLines) sm90::barrier_arrive(&shared.begun);
    if (tile.steps <= 0) {
      sm90::barrier_arrive(&shared.full[ring.stage]);
      if constexpr (Config::kLines) sm90::barrier_arrive(&shared.scaled[ring.stage]);
      if (tile.steps < 0) return;
      ring.advance();
    }
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step, ring.advance()) {
      const int stage = ring.stage;
      uint64_t* full = &shared.full[stage];
      sm90::barrier_wait(&shared.empty[stage], ring.parity ^ 1);
      if constexpr (Config::kLines) {  // first: find_shared_scales looks at them while others come
        uint64_t* scaled = &shared.scaled[stage];
        sm90::barrier_arrive_expect(scaled, sizeof(shared.scales[stage].columns));
        sm90::load_2d(shared.scales[stage].columns, &maps.scale_b, scaled, 0, tile.col,
                      tile.begin + step);
      }
      sm90::barrier_arrive_expect(full, Config::kABytes + Config::kBBytes + scale_bytes);
      if (!Config::kNarrow && tile.shares_b()) {
        load_a<Config>(shared, maps, tile, stage, step, 0, 0);
        load_a<Config>(shared, maps, tile, stage, step, 1, 0);
        load_b<Config>(shared, maps, shape, tile, stage, step, rank, all);
      } else {
        load_a<Config>(shared, maps, tile, stage, step, rank, all);
#pragma unroll
        for (int piece = 0; piece < Config::kBPieces; ++piece)
          load_b<Config>(shared, maps, shape, tile, stage, step, piece, 0);
      }
      if constexpr (Config::kLines) {
        sm90::load_2d(shared.scales[stage].rows, &maps.scale_a, full, 0, tile.row,
                      tile.begin + step);
      } else if constexpr (Config::kBlocks) {
        // The innermost coordinate of a copy must be a multiple of 16 bytes (H200, 2026-11: an
        // "illegal instruction" otherwise), and a group may start at any row.
        sm90::load_2d(shared.scales[stage].rows, &maps.scale_a, full, 0, tile.row & ~3, step);
      }
    }
  }
}

// Puts b's scales of squares beside the operands of every step. A tile of 192 columns meets two
// squares of 128: one with its first 64 columns, the other with its last 64, and either with those
// between. A warp reads 32 steps at once: however the scales lie, their latency is paid while the
// ring is full.
template <typename Config>
__device__ void produce_square_scales(GemmShared<Config>& shared, const SquareScale& scale,
                                      const TileCounts& counts, const GemmShape& shape) {
  const int lane = threadIdx.x % 32;
  RingPosition<Config::kStages> ring;
  const auto put = [&](float of_first, float of_last) {
    sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    if (lane == 0) {
      shared.scales[ring.stage].squares = make_float2(of_first, of_last);
      sm90::barrier_arrive(&shared.full[ring.stage]);
    }
    ring.advance();
  };
  Work<Config> work(shared, counts, shape);
#pragma unroll 1
  while (true) {
    const Tile tile = work.next();
    if (tile.steps < 0) break;
    const int first = min(tile.col, shape.cols - 1) / kTileM;
    const int last = min(tile.col + kTileM, shape.cols - 1) / kTileM;
    const float* group = scale.scale + tile.group * scale.group_stride;
#pragma unroll 1
    for (int begin = 0; begin < tile.steps; begin += 32) {
      const int64_t step = min(begin + lane, tile.steps - 1) * scale.depth_stride;
      const float of_first = group[first * scale.row_stride + step];
      const float of_last = group[last * scale.row_stride + step];
#pragma unroll 1
      for (int i = 0; i < min(32, tile.steps - begin); ++i)
        put(__shfl_sync(0xffffffff, of_first, i), __shfl_sync(0xffffffff, of_last, i));
    }
  }
  put(0, 0);  // the end takes a stage too
}

// Finds out, for every step, whether the columns of each square of 128 share a scale, and puts it where
// scales of squares are. By one warp, as soon as the columns' scales are there: mostly while the operands
// are still on their way. It hands out tiles too.
template <typename Config>
__device__ void find_shared_scales(GemmShared<Config>& shared, const PartialSums& partial,
                                   const TileCounts& counts, const GemmShape& shape) {
  const int lane = threadIdx.x % 32;
  TileNumbers<Config> numbers(shared, partial.ticket);
  if (lane == 0) numbers.begin(counts);
  RingPosition<Config::kStages> ring;
  for (int number = 0;; ++number) {
    const Tile& tile = shared.tiles[number % kTileRing];
    sm90::barrier_wait(&shared.scaled[ring.stage], ring.parity);
    const bool tells = numbers.left() && tile.steps >= 0;
    if (tells) numbers.ask();
    const int steps = tile.steps, columns = shape.cols - tile.col;
    const bool between_is_first = tile.col % kTileM == 0;
    const int first_of_last = max(min(between_is_first ? 128 : 64, columns - 1), 0);
    const auto find = [&] {
      auto& scales = shared.scales[ring.stage];
      const float first = scales.columns[0], last = scales.columns[first_of_last];
      const float of_part[] = {first, between_is_first ? first : last, last};
      bool same = true;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const float2 two = *reinterpret_cast<const float2*>(&scales.columns[64 * i + 2 * lane]);
        same =
            same && ((two.x == of_part[i] && two.y == of_part[i]) || 64 * i + 2 * lane >= columns);
      }
      same = __all_sync(0xffffffff, same);
      if (lane == 0) {
        scales.squares = make_float2(same ? first : kOwn, last);
        sm90::barrier_arrive(&shared.full[ring.stage]);
      }
      ring.advance();
    };
    find();
    if (tells) numbers.tell();
    __syncwarp();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {  // a tile without steps takes a stage too
      sm90::barrier_wait(&shared.scaled[ring.stage], ring.parity);
      find();
    }
    if (steps < 0) return;
  }
}

// The operands of one warpgroup. Descriptors count addresses in units of 16 bytes, so those of a
// stage and of a step along K are the first ones plus constants, in their lower halves.
template <typename Config>
class WarpgroupOperands {
 public:
  __device__ WarpgroupOperands(const GemmShared<Config>& shared, int math_group)
      : a_(first_of(shared.stages[0].a, Config::kAMajor) +
           math_group * (Config::kAMajor == 0 ? 64 * kLineBytes : kColumn) / 16),
        b_(first_of(shared.stages[0].b, Config::kBMajor)) {
    // The same for all lanes, which the compiler cannot see: it keeps them in uniform registers
    // then.
    a_ = __shfl_sync(0xffffffff, a_, 0);
    b_ = __shfl_sync(0xffffffff, b_, 0);
  }

  // acc = (add ? acc : 0) + a @ b.T over the first `depth` of kTileK.
  template <int depth = Config::kTileK>
  __device__ __forceinline__ void multiply(int stage, float (&acc)[Config::kTileN / 2],
                                           bool add) const {
    const uint32_t at =
        stage * static_cast<uint32_t>(sizeof(typename GemmShared<Config>::Stage) / 16);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < depth; k += Config::kMmaK) {
      constexpr int k_major = sizeof(typename Config::A), mn_major = kLineBytes;
      const uint64_t a = sm90::operand(
          a_ + at + k * (Config::kAMajor == 0 ? k_major : mn_major) / 16, 8 * kLineBytes);
      const uint64_t b = sm90::operand(
          b_ + at + k * (Config::kBMajor == 0 ? k_major : mn_major) / 16, 8 * kLineBytes);
      sm90::wgmma<typename Config::A, typename Config::B, Config::kTileN, Config::kAMajor,
                  Config::kBMajor>(acc, a, b, add || k > 0);
    }
    sm90::wgmma_commit();
  }

 private:
  static constexpr int kColumn = Config::kTileK * kLineBytes;  // a 64-element column, M/N-major
  static __device__ uint32_t first_of(const uint8_t* data, int major) {
    return sm90::operand_start(data, major == 0 ? 16 : kColumn);
  }
  uint32_t a_, b_;
};

// A number that the compiler knows where it is passed on.
template <int value>
struct Constant {
  __device__ constexpr operator int() const { return value; }
};

// Multiplies every tile of this block, 64 rows a warpgroup.
template <typename Config>
__device__ void consume(GemmShared<Config>& shared, const TensorMaps& maps,
                        const Epilogue& epilogue, const PartialSums& partial,
                        const GemmShape& shape) {
  const int math_group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4,
            lane = threadIdx.x % 32;
  const uint32_t first_empty = sm90::cluster_address(&shared.empty[0], lane % kCluster);
  const auto release = [&](int stage) {
    __syncwarp();  // the whole warp has read the stage's scales
    if (lane >= kCluster) return;
    sm90::barrier_arrive_at(first_empty + stage * sizeof(shared.empty[0]));
  };
  // Nothing is added, but ptxas does not know: with lines it would keep the address in a uniform register
  // and take others for the sums (1% of an FP8 product, H200, 2026-11).
  const uint32_t full =
      sm90::kept_address(shared.full) + (Config::kLines ? sm90::lane_index() / 32 : 0);
  const auto full_of = [&](int stage) -> uint32_t { return full + stage * sizeof(uint64_t); };
  const bool overwrite = !Config::kByDepth || is_overwritten(epilogue);
  constexpr int count = Config::kTileN / 2;
  const WarpgroupOperands<Config> operands(shared, math_group);
  RingPosition<Config::kStages> ring;
  for (int number = 0;; ++number) {
    const auto take_turn = [&](int turn, const auto& stage) {
      sm90::barrier_wait(&shared.ready[math_group], turn_parity(epilogue, number, turn));
      stage();
      __syncwarp();
      if (lane == 0) sm90::barrier_arrive(&shared.staged[math_group]);
    };
    const auto take_empty_turns = [&] {
      for (int turn = 0; turn < turns_of_tile(epilogue); ++turn) take_turn(turn, [] {});
    };
    const Tile& tile = shared.tiles[number % kTileRing];
    sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
    const int steps = tile.steps;
    if (steps < 0) return take_turn(0, [] {});  // tells that there are no more
    if (steps == 0) {
      release(ring.stage);
      ring.advance();
    }
    const bool outside =
        tile.row + math_group * kStoreRows >= tile.row_limit || tile.col >= shape.cols;
    if (outside || (steps == 0 && !overwrite)) {  // an empty group adds nothing
      for (int step = 0; step < steps; ++step, ring.advance()) {
        sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
        release(ring.stage);
      }
      take_empty_turns();
      continue;
    }

    const bool is_cut = Config::kByDepth && tile.is_cut();

    float sum[count];
    const auto clear = [&] {
      const float zero = sm90::opaque_zero();
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = zero;
    };
    // Elsewhere beneath the first products; without blocks ptxas would spill, or serialise wgmma.
    if (steps == 0 || !Config::kBlocks) clear();
    if constexpr (Config::kFp8) {
      // Promotion: every 128 of the depth is summed by the tensor cores on its own, scaled, and
      // added in float32. The tensor cores keep about 14 bits of a sum in FP8; float32 keeps 24.
      //
      // One warpgroup's products run while the other one scales. Whatever the next step needs is
      // made ready while the products run: what a warpgroup does besides counts twice.
      uint32_t row_scales = 0, column_scales = 0, squares = 0;  // of the first stage
      if constexpr (Config::kBlocks) {
        const int row = math_group * kStoreRows + warp % 4 * 16 + lane / 4;
        auto& scales = shared.scales[0];
        row_scales = sm90::kept_address(&scales.rows[row + (Config::kByDepth ? 0 : tile.row % 4)]);
        squares = sm90::kept_address(&scales.squares);
        if constexpr (Config::kLines)
          column_scales = sm90::kept_address(&scales.columns[2 * (lane % 4)]);
      }
      bool ready = true, fresh = true;
      int left = steps;
      float acc[count];
      const bool between_is_first = tile.col % kTileM == 0;
      float by[6];  // the scales of each 64 columns' square, times those of this thread's two rows
      // Multiplies the step at `stage` of the ring; whether columns share scales.
      const auto multiply = [&](auto stage) {
        if (!ready) sm90::barrier_wait(full_of(stage), ring.parity);
        sm90::pin(acc);
        operands.multiply(stage, acc, false);
        if (Config::kBlocks && fresh) clear();  // while the products run
        fresh = false;
        const int next = stage + 1 == Config::kStages ? 0 : stage + 1;
        if (next == 0) ring.parity ^= 1;
        bool shares = true;
        if constexpr (Config::kBlocks) {
          const uint32_t here = stage * sizeof(shared.scales[0]);
          const float2 square = sm90::load_float2(squares + here);
          const float columns[] = {square.x, between_is_first ? square.x : square.y, square.y};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float scale = sm90::load_float(row_scales + here + h * 8 * sizeof(float));
#pragma unroll
            for (int i = 0; i < 3; ++i) by[2 * i + h] = scale * columns[i];
          }
          sm90::pin(by);
          shares = !Config::kLines || square.x != kOwn;
        }
        ready = sm90::barrier_test(full_of(next), ring.parity);
        sm90::wgmma_wait<0>();
        sm90::pin(acc);
        ring.stage = next;
        return shares;
      };
      const auto promote = [&](auto stage) {
        release(stage);
#pragma unroll
        for (int i = 0; i < count; ++i) {
          if constexpr (Config::kBlocks)
            sum[Config::sum_of(i)] += by[i / 32 * 2 + i / 2 % 2] * acc[i];
          else
            sum[i] += acc[i];
        }
      };
      // The same with every column's own scale.
      const auto promote_columns = [&](int stage) {
        const uint32_t here = stage * sizeof(shared.scales[0]);
        const float scale_0 = sm90::load_float(row_scales + here),
                    scale_1 = sm90::load_float(row_scales + here + 8 * sizeof(float));
#pragma unroll
        for (int i = 0; i < count; i += 4) {
          const float2 scale = sm90::load_float2(column_scales + here + i * 2 * sizeof(float));
          sum[Config::sum_of(i + 0)] += scale_0 * (scale.x * acc[i + 0]);
          sum[Config::sum_of(i + 1)] += scale_0 * (scale.y * acc[i + 1]);
          sum[Config::sum_of(i + 2)] += scale_1 * (scale.x * acc[i + 2]);
          sum[Config::sum_of(i + 3)] += scale_1 * (scale.y * acc[i + 3]);
        }
        release(stage);
      };
      // Whole rounds of the ring have their stages' addresses in the instructions: what else there
      // is to compute for a step costs time that the tensor cores do not get back. A step whose
      // columns share no scales ends a round: one copy of the code for those, at the price of their time.
#pragma unroll 1
      while (left > 0) {
        if (ring.stage == 0 && left >= Config::kStages) {
          bool all_shared = false;
          while (!all_shared) {
            if (!multiply(Constant<0>())) break;
            promote(Constant<0>());
            if (!multiply(Constant<1>())) break;
            promote(Constant<1>());
            if (!multiply(Constant<2>())) break;
            promote(Constant<2>());
            if (!multiply(Constant<3>())) break;
            promote(Constant<3>());
            left -= Config::kStages;
            all_shared = left < Config::kStages;
          }
          if (all_shared) continue;
          left -= ring.stage == 0 ? Config::kStages : ring.stage;
        } else {
          const int stage = ring.stage;
          --left;
          if (multiply(stage)) {
            promote(stage);
            continue;
          }
        }
        if constexpr (Config::kLines)
          promote_columns(ring.stage == 0 ? Config::kStages - 1 : ring.stage - 1);
      }
    } else {
      // By depth, the last step may have fewer rows, in so many kMmaK; the others there are zero.
      constexpr int whole = Config::kTileK / Config::kMmaK;
      int last = whole;
      if constexpr (Config::kByDepth)
        last = (tile.depth_rows - (steps - 1) * Config::kTileK + Config::kMmaK - 1) / Config::kMmaK;
      const int whole_steps = last < whole ? steps - 1 : steps;
      // One stage's products stay in flight while the next is issued; a stage is given back when
      // the products of the one after it have been issued and its own are done.
      int previous = -1;
      bool ready = true;
#pragma unroll 1
      for (int step = 0; step < whole_steps; ++step) {
        if (!ready) sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
        sm90::pin(sum);
        operands.multiply(ring.stage, sum, true);
        const int stage = ring.stage;
        ring.advance();
        ready = sm90::barrier_test(full_of(ring.stage), ring.parity);
        sm90::wgmma_wait<1>();
        if (previous >= 0) release(previous);
        previous = stage;
      }
      sm90::wgmma_wait<0>();
      sm90::pin(sum);
      if (previous >= 0) release(previous);
      if constexpr (Config::kByDepth) {
        const auto rest = [&](auto parts) {
          if (!ready) sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
          sm90::pin(sum);
          operands.template multiply<parts * Config::kMmaK>(ring.stage, sum, true);
          sm90::wgmma_wait<0>();
          sm90::pin(sum);
          release(ring.stage);
          ring.advance();
        };
        static_assert(whole == 4);
        switch (last) {
          case 1: rest(Constant<1>()); break;
          case 2: rest(Constant<2>()); break;
          case 3: rest(Constant<3>()); break;
        }
      }
    }

    // is_cut was read where that costs no time; with scales of groups ptxas would spill, so not there.
    if (Config::kByDepth && (Config::kGroups ? tile.is_cut() : is_cut)) {
      add_sums(partial, tile.takes(), tile.take_count(), sum);
      if (tile.leaves() > 0) {
        leave_sums(partial, tile.leaves(), sum);
        take_empty_turns();
        continue;
      }
    }
    if constexpr (Config::kGroups) {
      const float scale_a = epilogue.scale_a[tile.group], scale_b = epilogue.scale_b[tile.group];
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = sum[i] * scale_a * scale_b;
    }
    const int thread = sm90::thread_index();
    auto& staging =
        shared.store[thread / 128 - 1][Config::kStagedRows < kStoreRows ? thread / 32 % 4 : 0];
    const int first_row = tile.row + (thread / 32 - 4) * 16;
    switch (epilogue.dtype) {
      case Output::kBFloat16:
        store_tile<__nv_bfloat16, Config>(sum, staging, epilogue, shape, tile, first_row, overwrite,
                                          take_turn);
        break;
      case Output::kHalf:
        store_tile<__half, Config>(sum, staging, epilogue, shape, tile, first_row, overwrite,
                                   take_turn);
        break;
      case Output::kFloat:
        store_tile<float, Config>(sum, staging, epilogue, shape, tile, first_row, overwrite,
                                  take_turn);
        break;
    }
  }
}

// Leaves groups without rows out of the table by depth: their zeros are copied beside the products, or they
// add nothing. They stay where the copy engine cannot reach out. By one warp, after load_groups.
template <typename Config>
__device__ void take_groups(GemmShared<Config>& shared, const Epilogue& epilogue,
                            const GemmShape& shape) {
  GroupTable& groups = shared.groups;
  const bool all = !epilogue.copied && is_overwritten(epilogue);
  int count = 0, most_rows = 0, least_rows = shape.T + 1;
#pragma unroll 1
  for (int first = 0; first < shape.E; first += 32) {
    const int e = first + threadIdx.x, at = min(e, shape.E - 1);
    const int row_end = groups.row_end[at], tile_end = groups.tile_end[at];
    const int rows = row_end - groups.row_begin(at);
    const bool takes = e < shape.E && (all || rows > 0);
    const unsigned others = __ballot_sync(0xffffffff, takes);
    __syncwarp();  // all have read what others write over
    if (takes) {
      most_rows = max(most_rows, rows);
      least_rows = min(least_rows, rows);
      const int to = count + __popc(others & ((1u << threadIdx.x) - 1));
      groups.row_end[to] = row_end;
      groups.tile_end[to] = tile_end;
      shared.taken()[to] = static_cast<uint16_t>(e);
    }
    count += __popc(others);
    __syncwarp();
  }
  most_rows = __reduce_max_sync(0xffffffff, most_rows);
  shared.taken_count = count;
  shared.taken_rows = most_rows == __reduce_min_sync(0xffffffff, least_rows) ? most_rows : 0;
}

template <typename Config>
__device__ void find_groups(GroupTable& groups, const int32_t* offs, const GemmShape& shape) {
  if constexpr (Config::kByDepth) {
    load_groups<kThreads>(groups, offs, shape.E, shape.T, TilesOf{kTileM});
  } else {
    const int cols = col_tiles<Config>(shape);
    load_groups<kThreads>(groups, offs, shape.E, shape.T, [cols](int rows) {
      return cluster_tiles<Config>(row_tiles(rows), cols);
    });
  }
}

// Hands out tiles, and copies zeros while it waits. By one thread of a warp that is idle else: code like this
// before the producer's loop would make it slow, see DESIGN.md, "The last round".
template <typename Config>
__device__ void hand_out(GemmShared<Config>& shared, const PartialSums& partial,
                         const Epilogue& epilogue, const TileCounts& counts,
                         const GemmShape& shape) {
  TileNumbers<Config> numbers(shared, partial.ticket);
  numbers.begin(counts);
  Zeros<Config> zeros(shared, epilogue, shape);
  zeros.begin();
  for (uint32_t number = 0; numbers.left(); ++number) {
    const uint32_t parity = number & 1;
    while (zeros.left() && !sm90::barrier_test(sm90::shared_address(&shared.begun), parity))
      zeros.copy();
    sm90::barrier_wait(&shared.begun, parity);
    if (shared.tiles[number % kTileRing].steps < 0) break;
    numbers.ask();
    numbers.tell();
  }
  zeros.copy_rest();
}

// Whether all narrow tiles find room at once: then none waits for another, and more blocks work.
// A row tile takes at least half as many clusters as there are wide columns, so the clusters of the
// wide product tell how many row tiles there are at most.
template <typename Config>
__device__ bool fits_narrow(const GroupTable& groups, const GemmShape& shape) {
  const int64_t row_tiles = 2 * int64_t{groups.tile_end[shape.E - 1]} / col_tiles<Config>(shape);
  const int narrow_pairs = (col_tiles<NarrowOf<Config>>(shape) + 1) / 2;
  return row_tiles * narrow_pairs <= gridDim.x / kCluster;
}

template <typename Config>
__device__ void multiply(GemmShared<Config>& shared, const TensorMaps& maps,
                         const SquareScale& square_scale, const Epilogue& epilogue,
                         const PartialSums& partial, const TileCounts& counts,
                         const GemmShape& shape) {
  if (threadIdx.x < 128) {
    sm90::give_registers<40>();
    if (threadIdx.x == 0) produce<Config>(shared, maps, counts, shape);
    if constexpr (Config::kSquares)
      if (threadIdx.x / 32 == 1) produce_square_scales<Config>(shared, square_scale, counts, shape);
    constexpr int zeroing_warp = kHasIdleWarp<Config> ? 1 : 2;
    if (Config::kByDepth && threadIdx.x / 32 == zeroing_warp && shared.taken_count < shape.E)
      clear_zeros(shared);
    if constexpr (Config::kLines) {
      if (threadIdx.x / 32 == 1) find_shared_scales<Config>(shared, partial, counts, shape);
    } else if constexpr (Config::kByDepth) {
      if (threadIdx.x / 32 == 1 && sm90::elect())
        hand_out<Config>(shared, partial, epilogue, counts, shape);
    } else if constexpr (kHasIdleWarp<Config>) {
      if (threadIdx.x / 32 == 1 && sm90::elect()) {
        Zeros<Config> zeros(shared, epilogue, shape);
        zeros.begin();
        zeros.copy_rest();
      }
    }
    if (threadIdx.x >= 64 && sm90::elect()) {
      const auto send_all = [&](auto whole_rows) {
        send<Config, whole_rows>(shared, maps.out, epilogue, counts, shape, threadIdx.x / 32 - 2);
      };
      if (sends_whole_rows<Config>(epilogue, shape.cols))
        send_all(Constant<true>());
      else
        send_all(Constant<false>());
    }
  } else {
    sm90::take_registers<232>();
    consume<Config>(shared, maps, epilogue, partial, shape);
  }
  __syncwarp();
  sm90::cluster_sync();  // nor leaves while another may still arrive at its barriers
}

// What needs no size, while the kernel before this one runs.
template <typename Config>
__device__ void prepare(GemmControl& control, const TensorMaps& maps) {
  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(&maps.a);
    sm90::prefetch_tensor_map(&maps.b);
    if (Config::kBlocks) sm90::prefetch_tensor_map(&maps.scale_a);
    if (Config::kLines) sm90::prefetch_tensor_map(&maps.scale_b);
    if (!Config::kByDepth) sm90::prefetch_tensor_map(&maps.narrow_b);
    sm90::prefetch_tensor_map(&maps.out);
    for (int s = 0; s < GemmControl::kMostStages; ++s) {
      sm90::barrier_init(&control.full[s], Config::kBlocks ? 2 : 1);
      sm90::barrier_init(&control.empty[s], kMathWarps * kCluster);
      if (Config::kLines) sm90::barrier_init(&control.scaled[s], 1);
    }
    sm90::barrier_init(&control.scheduled, 1);
    sm90::barrier_init(&control.begun, 1);
    for (uint64_t& numbered : control.numbered) sm90::barrier_init(&numbered, 1);
    control.rank = static_cast<int>(sm90::cluster_rank());
    for (int i = 0; i < kMathGroups; ++i) {
      sm90::barrier_init(&control.staged[i], kMathWarps / kMathGroups);
      sm90::barrier_init(&control.ready[i], 1);
    }
    sm90::fence_barrier_init();
  }
  if constexpr (!Config::kByDepth) {
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(control.zeros)[i] = make_uint4(0, 0, 0, 0);
    sm90::fence_shared_for_async();
  }
  // No block copies into another, or arrives there, before its barriers stand.
  sm90::cluster_sync();
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster)
    grouped_gemm_kernel(const __grid_constant__ TensorMaps maps, const int32_t* offs,
                        const SquareScale square_scale, const Epilogue epilogue,
                        const PartialSums partial, const __grid_constant__ TileCounts counts,
                        const __grid_constant__ TileCounts narrow_counts, const GemmShape shape) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<GemmShared<Config>*>(raw);
  prepare<Config>(shared, maps);
  grid_dependency_wait();
  find_groups<Config>(shared.groups, offs, shape);
  if constexpr (Config::kByDepth) {
    if (threadIdx.x < 32) take_groups<Config>(shared, epilogue, shape);
    __syncthreads();
  }
  if constexpr (!Config::kByDepth) {
    if (fits_narrow<Config>(shared.groups, shape)) {
      __syncthreads();  // every thread knows it, and the table changes
      using Narrow = NarrowOf<Config>;
      auto& narrow = *reinterpret_cast<GemmShared<Narrow>*>(raw);
      find_groups<Narrow>(narrow.groups, offs, shape);
      return multiply<Narrow>(narrow, maps, square_scale, epilogue, partial, narrow_counts, shape);
    }
  }
  multiply<Config>(shared, maps, square_scale, epilogue, partial, counts, shape);
}

}  // namespace grouped_linear::cuda
