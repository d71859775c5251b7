// SPDX-License-Identifier: Apache-2.0
// One thread a cluster finds the cluster's tiles, in a K-grouped GEMM also slices of tiles, and
// publishes them to both blocks. Every other role only reads them.
//
// A block's tiles lie in a ring, shared.tiles. tile_full[slot] says that a tile is there, and the
// producer says at tile_empty[slot] that it has begun with it, on which the scheduler publishes the
// tile that is kTilesAhead further on. Warps that learn of a tile by other barriers (math warps
// from full[stage], store warps from epilogue_full) find it in the ring without a wait. A
// slot is reused kTileSlots tiles later, when all are done with it: see SharedStorage.
//
// The scheduler is a thread of the cluster's first block: of warp 1 where that is idle or there is
// elementwise work, else of the last store warp. A store warp publishes a tile before it waits for
// one to store. See roles.h.
//
// Static rounds: cluster c of C computes the tiles c, c + C, c + 2C ... The last round usually has
// fewer tiles than the GPU has clusters, and the other clusters would be idle.
//
// Split-K: where all groups of a K-grouped GEMM have the same number of rows, the last round's
// tiles are split along K. As many clusters as divide evenly among these tiles, up to
// kMaxSlicesPerTile a tile, take slices of equal length. The clusters that are left take leading
// slices, the first k-blocks of one tile or of several in turn, so that all clusters finish at
// about the same time; or nothing, where a leading slice would be too short. Clusters that compute
// neighbouring tiles are then at the same k-block and find one another's operands in L2. The
// cluster with a tile's last slice adds the other slices (split_k.cuh). Clusters wait only for
// clusters of lower numbers, and leading slices wait for nobody. Nothing is stuck as long as the
// GPU starts clusters in their order, even where it has no room for all of them at once.
//
// Tickets: where the sizes of a K-grouped GEMM's groups differ, or are small, the first tiles are
// static and the others go one by one to the cluster that comes first. Small tiles are bound by
// writing. Clusters in static rounds would drift apart, and with them the DRAM pages that are open
// at a time.
//
// An M-grouped GEMM draws tickets from each cluster's second tile on, or has static rounds alone:
// see scheduler_room (launch.h). Another kernel may hold SMs, as NCCL's do while they wait and copy.
// Clusters that start late then find less to do. In static rounds they begin when the others end
// (H200, 2026-11: within a long all-gather 1.81 to 1.90 times the time, with tickets 1.22 to 1.26).
// No tile is split: a row's result depends on that row and its group's matrix alone, to the bit.
//
// A ticket is drawn when the tile before it is published, so that nobody waits for it: a warp 1 that
// gathers would wait between two copies (H200, 2026-11: fprop with SwiGLU takes 1.34 of its time).
//
// A cluster draws for kTilesAhead + 1 tiles before its first one is computed. So tickets are for
// GEMMs with more tiles than that a cluster: else the clusters that start first would take all. See
// kTicketRounds.
#pragma once

#include "cuda/gemm/sm90/split_k.cuh"
#include "cuda/gemm/sm90/zero_fill.cuh"
#include "cuda/gemm/stamped_counter.cuh"

namespace grouped_linear::cuda::sm90 {

// Lengths along K, in units of Config::kUnitK. Writing accumulators, or adding them, takes about as
// long as kFixupUnits or less.
constexpr int kFixupUnits = 4;
constexpr int kMinLeadingUnits = 8;
constexpr int kMaxSlicesPerTile = 8;  // adding more slices would take longer than computing them

// Whether a kernel may draw tickets. Kernels with b in MXFP4 were not measured.
template <typename Config>
constexpr bool kDrawsTickets = Config::kKGrouped || !Config::kDecodesB;
// An M-grouped GEMM with a shorter K, or with no more tiles a cluster, has static rounds, because
// tickets may take more than 1.005 of its time (H200, 2026-11: K of 512 in FP8 1.023, with gathered
// rows 1.010; 4.7 tiles a cluster 1.011; 5.3 tiles with SwiGLU 1.009, with gathered rows too 1.08).
// Not measured: between 512 and 2048 with gathered rows; below 1024, and 6 to 11 tiles, with SwiGLU.
template <typename Config>
constexpr int kTicketsMinK = Config::kGathersRows   ? 2048
                             : Config::kElementwise ? 1024
                             : Config::kFp8         ? 768
                                                    : 512;
template <typename Config>
constexpr int kTicketRounds =
    Config::kKGrouped ? Config::kTilesAhead
                      : larger(Config::kTilesAhead, Config::kElementwise ? 11 : 5);

// The schedule of this block's cluster. units: of K, that every tile has (0: they differ).
template <typename Config>
__device__ __forceinline__ Schedule make_schedule(int tiles, int units, bool has_workspace) {
  const int clusters = gridDim.x / kClusterSize, cluster = blockIdx.x / kClusterSize;
  const int rest = tiles % clusters;
  Schedule schedule{};
  schedule.whole_tiles = tiles;
  if (!has_workspace) return schedule;
  if (units <= kShortK) {
    if (tiles > kTicketRounds<Config> * clusters) {
      schedule.whole_tiles = (Config::kKGrouped ? Config::kTilesAhead : 1) * clusters;
      schedule.dynamic_tiles = tiles - schedule.whole_tiles;
    }
    return schedule;
  }
  if (rest == 0) return schedule;

  const int slices = min(clusters / rest, kMaxSlicesPerTile);
  const int leaders = clusters - slices * rest;  // clusters with leading slices
  int leading = 0;                               // units of each
  if (leaders > 0) {  // an equal slice is as long as `turns` leading slices and their fix-up
    const int turns = (rest + leaders - 1) / leaders, slices_turns = slices * turns;
    leading = (units - slices_turns * kFixupUnits) / (slices_turns + 1);
    if (leading < kMinLeadingUnits) leading = 0;
  }
  const int equal = units - leading;
  if (equal / slices + (slices + (leading > 0) + 1) * kFixupUnits > units) return schedule;

  schedule.whole_tiles = tiles - rest;
  schedule.slices_per_tile = slices;
  schedule.has_leading_slice = leading > 0;
  if (cluster < leaders) {
    schedule.slice_index = -1;
    schedule.slices = leading == 0 ? 0 : (rest - cluster + leaders - 1) / leaders;
    schedule.first_tile = cluster;
    schedule.tile_stride = leaders;
    schedule.slice_units = leading;
  } else {
    const int index = (cluster - leaders) / rest;
    const int begin = index * equal / slices, end = (index + 1) * equal / slices;
    schedule.slice_index = index;
    schedule.slices = 1;
    schedule.first_tile = (cluster - leaders) % rest;
    schedule.slice_begin = leading + begin;
    schedule.slice_units = end - begin;
  }
  return schedule;
}

// Reduces a tile to this cluster's slice of it. last_round_tile: the tile's number in the last
// round.
template <typename Config>
__device__ __forceinline__ void take_slice(WorkTile& tile, const Schedule& schedule,
                                           int last_round_tile) {
  const int rows = schedule.slice_begin * Config::kUnitK;
  tile.k_begin += Config::kPadded ? schedule.slice_begin : rows;
  tile.k_count = min(tile.k_count - rows, schedule.slice_units * Config::kUnitK);
  tile.k_blocks =
      Config::kPadded ? schedule.slice_units : (tile.k_count + Config::kTileK - 1) / Config::kTileK;
  // A tile's slots follow one another: the leading slice's, then those of its equal slices but the
  // last.
  const int slices = schedule.slices_per_tile, index = schedule.slice_index,
            first_slot = last_round_tile * slices + 1;
  if (index < slices - 1)
    tile.bits |= WorkTile::split_k_bits(0, 0, first_slot + index + 1);
  else
    tile.bits |= WorkTile::split_k_bits(first_slot + !schedule.has_leading_slice,
                                        slices - !schedule.has_leading_slice, 0);
}

// Tile `number` of this block, which stays until its last reader is done.
__device__ __forceinline__ const WorkTile& wait_for_tile(Control& control, int number) {
  mbarrier_wait(&control.tile_full[number % kTileSlots], number / kTileSlots & 1);
  return control.tiles[number % kTileSlots];
}

// The arrivals that end a phase of tile_empty. The scheduler waits for it in the cluster's first
// block. Nobody waits in the second, whose producer arrives all the same, because a branch in its
// loop makes ptxas move TMA's operands: a number that it hardly reaches ends no phase there.
__device__ __forceinline__ int releases_of_tile() {
  constexpr int kMostArrivals = (1 << 20) - 1;
  return cluster_rank() == 0 ? 1 : kMostArrivals;
}

// The producer's: with that, the scheduler may publish another.
__device__ __forceinline__ void release_tile(Control& control, int number) {
  mbarrier_arrive(&control.tile_empty[number % kTileSlots]);
}

// By one thread of a cluster's first block. Its state is in shared memory, where it costs other
// roles no registers.
//
// Cluster 0 stamps the counter that tickets come from. Every cluster draws one ticket past the last
// tile.
template <typename Config>
class Scheduler {
 public:
  template <typename Params>
  __device__ Scheduler(SharedStorage<Config>& shared, const Params& params)
      : shared_(shared),
        counter_(params.workspace.tickets),
        counts_(params.counts),
        shape_(params.shape) {}

  __device__ void begin() {
    const int tiles = Config::kKGrouped
                          ? shared_.active_groups * static_cast<int>(counts_.matrix.divisor)
                          : shared_.groups.tile_end[shape_.E - 1];
    Schedule& schedule = shared_.schedule;
    if constexpr (kDrawsTickets<Config>) {
      const int units =
          Config::kSplitsK ? (shared_.rows_of_each + Config::kUnitK - 1) / Config::kUnitK : 0;
      schedule = make_schedule<Config>(tiles, units, counter_.exists());
      if (schedule.dynamic_tiles > 0 && blockIdx.x == 0) counter_.stamp();
    } else {
      schedule = {};
      schedule.whole_tiles = tiles;
    }
    schedule.next_tile = blockIdx.x / kClusterSize;
  }

  // Whether there are more tiles to publish. The end is one.
  __device__ bool more() const { return !shared_.schedule.ended; }

  // Whether publish() would not wait for the producer.
  __device__ bool may_publish() const {
    const int before = shared_.schedule.published - Config::kTilesAhead;
    return before < 0 ||
           mbarrier_test(&shared_.tile_empty[before % kTileSlots], before / kTileSlots & 1);
  }

  // Publishes the next tile to both blocks of the cluster.
  __device__ void publish() {
    Schedule& schedule = shared_.schedule;
    const int number = schedule.published++, before = number - Config::kTilesAhead;
    if (before >= 0)
      mbarrier_wait(&shared_.tile_empty[before % kTileSlots], before / kTileSlots & 1);
    WorkTile tile = next();
    schedule.ended = tile.k_blocks < 0;
    WorkTile& to = shared_.tiles[number % kTileSlots];
    uint64_t* full = &shared_.tile_full[number % kTileSlots];
    to = tile;
    mbarrier_arrive(full);
    // The other block's tile lies below or beside it, see tile_of.
    if (tile.cluster_along_m())
      tile.row += Config::kTileM;
    else
      tile.col += Config::kTileN;
    const uint32_t there = mapa(&to, 1), full_there = mapa(full, 1);
    mbarrier_arrive_expect_tx_remote(full_there, sizeof tile);
    st_async_16(there, tile.group, tile.row, tile.row_end, tile.col, full_there);
    st_async_16(there + 16, tile.k_blocks, tile.k_begin, tile.k_count, tile.bits, full_there);
    if constexpr (kDrawsTickets<Config>) draw();
  }

  // Publishes the tiles before tile `end`, as far as there are any.
  __device__ void publish_before(int end) {
#pragma unroll 1
    while (shared_.schedule.published < end && more()) publish();
  }

 private:
  static constexpr int kNoTile = -1;

  // Starts to draw the next tile's ticket, where it has one.
  __device__ __forceinline__ void draw() {
    const Schedule& schedule = shared_.schedule;
    if (schedule.dynamic_tiles == 0 || schedule.ended || schedule.next_tile < schedule.whole_tiles)
      return;
    if (schedule.published * static_cast<int>(gridDim.x / kClusterSize) == schedule.whole_tiles) {
      const DebugWait wait("the stamp of the tile counter");
      while (!counter_.is_stamped()) wait.check();
    }
    counter_.draw();
  }

  // The next tile of the cluster's first block; k_blocks = -1: there are no more.
  __device__ WorkTile next() {
    Schedule& schedule = shared_.schedule;
    int number = kNoTile, last_round_tile = -1;
    if (schedule.next_tile < schedule.whole_tiles) {
      number = schedule.next_tile;
      schedule.next_tile += gridDim.x / kClusterSize;
    } else if constexpr (kDrawsTickets<Config>) {
      if (schedule.dynamic_tiles > 0) {
        const int ticket = counter_.ticket(), tiles = schedule.dynamic_tiles;
        if (ticket < tiles) number = schedule.whole_tiles + ticket;
        if (ticket == tiles + static_cast<int>(gridDim.x / kClusterSize) - 1) counter_.clear();
      } else if (Config::kSplitsK && schedule.slices > 0) {
        --schedule.slices;
        last_round_tile = schedule.first_tile;
        schedule.first_tile += schedule.tile_stride;
        number = schedule.whole_tiles + last_round_tile;
      }
    }
    if (number == kNoTile) {
      WorkTile end{};
      end.k_blocks = -1;
      return end;
    }
    WorkTile tile = tile_of<Config>(number, 0, shared_.groups, shared_.active(), counts_, shape_);
    if constexpr (Config::kSplitsK)
      if (last_round_tile >= 0) take_slice<Config>(tile, schedule, last_round_tile);
    return tile;
  }

  SharedStorage<Config>& shared_;
  StampedCounter counter_;
  const TileCounts& counts_;
  const GemmShape& shape_;
};

// Schedules, and zeroes what no tile writes, by one thread of a warp 1 that has no other role.
template <typename Config, typename Params>
__device__ void schedule_tiles(SharedStorage<Config>& shared, const Params& params) {
  ZeroFill<Config> zero_fill(shared, params.epilogue, params.shape);
  zero_fill.begin();
  if (shared.rank == 0) {
    Scheduler<Config> scheduler(shared, params);
    scheduler.begin();
    while (scheduler.more()) {
      while (zero_fill.remaining() && !scheduler.may_publish()) zero_fill.step();
      scheduler.publish();
    }
  }
  zero_fill.finish();
}

}  // namespace grouped_linear::cuda::sm90
