// Which tiles a cluster computes, and in a K-grouped GEMM which slices of tiles.
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
// Atomic scheduler: where the groups' sizes differ, or are small, the first tiles are static and
// the others go one by one to the cluster that comes first. Small tiles are bound by writing.
// Clusters in static rounds would drift apart, and with them the DRAM pages that are open at a
// time.
//
// An M-grouped GEMM splits no tile: a row's result depends on that row and its group's matrix
// alone, to the bit.
#pragma once

#include "cuda/gemm/sm90/split_k.cuh"

namespace grouped_linear::cuda::sm90 {

constexpr int kFixupKBlocks =
    4;  // writing accumulators, or adding them, takes about as long or less
constexpr int kMinLeadingKBlocks = 8;
constexpr int kMaxSlicesPerTile = 8;  // adding more slices would take longer than computing them

// Tiles that a cluster has in advance of the atomic scheduler. Scale1x128 draws the next one when
// scales have arrived, which is too late for a tile of two k-blocks (H200, 2026-11: 1 to 5% there,
// 0.5% of all).
template <typename Config>
constexpr int kTilesAhead = Config::kScale1x128 ? 2 : 1;

// The schedule of this block's cluster in a K-grouped GEMM of tiles of `k_blocks` k-blocks each (0:
// they differ).
template <typename Config>
__device__ __forceinline__ Schedule make_schedule(int tiles, int k_blocks, bool has_workspace) {
  const int clusters = gridDim.x / kClusterSize, cluster = blockIdx.x / kClusterSize;
  const int rest = tiles % clusters;
  Schedule schedule{};
  schedule.whole_tiles = tiles;
  if (!has_workspace) return schedule;
  if (k_blocks <= kShortK) {
    if (tiles > kTilesAhead<Config> * clusters && tiles < 1 << 24) {
      schedule.whole_tiles = kTilesAhead<Config> * clusters;
      schedule.dynamic_tiles = tiles - schedule.whole_tiles;
    }
    return schedule;
  }
  if (rest == 0) return schedule;

  const int slices = min(clusters / rest, kMaxSlicesPerTile);
  const int leaders = clusters - slices * rest;  // clusters with leading slices
  int leading = 0;                               // k-blocks of each
  if (leaders > 0) {  // an equal slice is as long as `turns` leading slices and their fix-up
    const int turns = (rest + leaders - 1) / leaders, slices_turns = slices * turns;
    leading = (k_blocks - slices_turns * kFixupKBlocks) / (slices_turns + 1);
    if (leading < kMinLeadingKBlocks) leading = 0;
  }
  const int equal = k_blocks - leading;
  if (equal / slices + (slices + (leading > 0) + 1) * kFixupKBlocks > k_blocks) return schedule;

  schedule.whole_tiles = tiles - rest;
  schedule.slices_per_tile = slices;
  schedule.has_leading_slice = leading > 0;
  if (cluster < leaders) {
    schedule.slice_index = -1;
    schedule.slices = leading == 0 ? 0 : (rest - cluster + leaders - 1) / leaders;
    schedule.first_tile = cluster;
    schedule.tile_stride = leaders;
    schedule.slice_k_blocks = leading;
  } else {
    const int index = (cluster - leaders) / rest;
    const int begin = index * equal / slices, end = (index + 1) * equal / slices;
    schedule.slice_index = index;
    schedule.slices = 1;
    schedule.first_tile = (cluster - leaders) % rest;
    schedule.slice_begin = leading + begin;
    schedule.slice_k_blocks = end - begin;
  }
  return schedule;
}

// Reduces a tile to this cluster's slice of it. last_round_tile: the tile's number in the last
// round.
template <typename Config>
__device__ __forceinline__ void take_slice(WorkTile& tile, const Schedule& schedule,
                                           int last_round_tile) {
  const int rows = schedule.slice_begin * Config::kTileK;
  tile.k_begin += Config::kFp8 ? schedule.slice_begin : rows;
  tile.k_count = min(tile.k_count - rows, schedule.slice_k_blocks * Config::kTileK);
  tile.k_blocks = schedule.slice_k_blocks;
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

constexpr int kNoTile = -1;

// Makes a K-grouped GEMM's schedule, and draws the numbers of dynamic tiles. By one thread a block.
//
// The first block of a cluster draws a ticket from a counter in memory and tells it to the other
// block. The memory holds anything at first. Cluster 0 stamps it; a cluster that draws from an
// unstamped counter draws again; the cluster that draws the last ticket clears the stamp (every
// cluster draws one ticket past the last tile). So no stamp outlives the kernel that made it.
template <typename Config>
class AtomicScheduler {
 public:
  __device__ AtomicScheduler(SharedStorage<Config>& shared, uint64_t* tile_counter)
      : shared_(shared), counter_(reinterpret_cast<unsigned long long*>(tile_counter)) {}

  __device__ void begin(const TileCounts& counts) {
    shared_.schedule = make_schedule<Config>(
        shared_.active_groups * static_cast<int>(counts.matrix.divisor),
        (shared_.rows_of_each + Config::kTileK - 1) / Config::kTileK, counter_ != nullptr);
    more_ = shared_.schedule.dynamic_tiles > 0;
    mbarrier_arrive(&shared_.schedule_ready);
    if (more_ && blockIdx.x == 0) atomicExch(counter_, kStamp);
  }

  // Whether there may be more numbers to publish. One is due for every tile that the producer has
  // begun.
  __device__ bool more() const { return more_; }

  // Starts drawing the next number, which takes a while to arrive.
  __device__ void draw() {
    if (shared_.rank == 0) ticket_ = atomicAdd(counter_, 1);
  }

  // Tells the drawn number to both blocks.
  __device__ void publish() {
    int* number = &shared_.tile_numbers[count_ % kTileNumberSlots];
    uint64_t* full = &shared_.tile_number_full[count_ % kTileNumberSlots];
    ++count_;
    if (shared_.rank > 0) {
      mbarrier_arrive_expect_tx(full, sizeof *number);
      return;
    }
    const DebugWait wait("the stamp of the tile counter");
    while ((ticket_ & ~kTicketMask) != kStamp) {
      wait.check();
      ticket_ = atomicAdd(counter_, 1);
    }
    const int ticket = static_cast<int>(ticket_ & kTicketMask);
    const int tiles = shared_.schedule.dynamic_tiles;
    more_ = ticket < tiles;
    if (ticket == tiles + static_cast<int>(gridDim.x / kClusterSize) - 1) atomicExch(counter_, 0);
    *number = more_ ? shared_.schedule.whole_tiles + ticket : kNoTile;
    st_async(mapa(number, 1), *number, mapa(full, 1));
    mbarrier_arrive(full);
  }

 private:
  static constexpr uint64_t kStamp = 0xb54c7d93e1000000, kTicketMask = (1 << 24) - 1;

  SharedStorage<Config>& shared_;
  unsigned long long* counter_;
  unsigned long long ticket_ = 0;
  uint32_t count_ = 0;
  bool more_ = false;
};

// This block's tiles, in the order in which they are computed. Every role that walks over tiles has
// its own.
template <typename Config>
class TileScheduler {
 public:
  __device__ TileScheduler(SharedStorage<Config>& shared, const TileCounts& counts,
                           const GemmShape& shape)
      : shared_(shared), counts_(counts), shape_(shape), next_(blockIdx.x / kClusterSize) {
    if (Config::kKGrouped) mbarrier_wait(&shared.schedule_ready, 0);
    const int clusters = gridDim.x / kClusterSize;
    const int whole =
        Config::kKGrouped ? shared.schedule.whole_tiles : shared.groups.tile_end[shape.E - 1];
    whole_left_ = max(whole - next_ + clusters - 1, 0) / clusters;
  }

  // The next tile; k_blocks = -1: there are no more.
  __device__ __forceinline__ WorkTile next() {
    const Schedule& schedule = shared_.schedule;
    int number = next_, last_round_tile = -1;
    bool ends = false;
    if (whole_left_ > 0) {
      --whole_left_;
      next_ += gridDim.x / kClusterSize;
    } else if (Config::kKGrouped && schedule.dynamic_tiles > 0) {
      const uint32_t slot = after_whole_ % kTileNumberSlots;
      mbarrier_wait(&shared_.tile_number_full[slot], after_whole_++ / kTileNumberSlots & 1);
      number = shared_.tile_numbers[slot];
      ends = number == kNoTile;
    } else if (Config::kKGrouped && after_whole_ < schedule.slices) {
      last_round_tile = schedule.first_tile + after_whole_++ * schedule.tile_stride;
      number = schedule.whole_tiles + last_round_tile;
    } else {
      ends = true;
    }
    if (ends) {
      WorkTile end{};
      end.k_blocks = -1;
      return end;
    }
    WorkTile tile = tile_of<Config>(number, static_cast<int>(cluster_rank()), shared_.groups,
                                    shared_.active(), counts_, shape_);
    if constexpr (Config::kKGrouped)
      if (last_round_tile >= 0) take_slice<Config>(tile, schedule, last_round_tile);
    return tile;
  }

 private:
  SharedStorage<Config>& shared_;
  const TileCounts& counts_;
  const GemmShape& shape_;
  int next_, whole_left_;  // the next whole tile, and how many of them are left
  int after_whole_ = 0;    // slices or dynamic tiles that have been taken
};

}  // namespace grouped_linear::cuda::sm90
