// Which tiles a cluster works on, and by depth which parts of tiles.
//
// Tiles go round, one a cluster. The last round has fewer tiles than the GPU has clusters, as a rule, and
// the others would wait for it. By depth its tiles are cut, where all have the same depth. As many clusters
// as go evenly into them, up to kMostMains a tile, take parts of the same length, `mains` of each tile; those
// that are left are helpers, and take what comes before these, of one tile or of several in turn, so that
// all are done at about the same time; or nothing, where that would be too short. Clusters that work on
// neighbouring tiles are then at the same step of them, and find one another's operands in L2. The last part
// of a tile adds the sums of the others to its own, in their order.
//
// Clusters wait only for clusters of lower numbers, and helpers for nobody: no work is stuck as long as the
// GPU starts clusters in their order, even where it has not room for all.
//
// Where depths differ, or are small, tiles after the first few are handed out one by one to whoever comes for
// them. Small ones are bound by writing, and clusters that went round by themselves would drift apart, and
// with them the places in memory that are open at a time.
//
// By rows no tile is cut: a row's result depends on that row and its group's matrix alone, to the bit.
#pragma once

#include "cuda/gemm/sm90/partial_sums.cuh"
#include "cuda/gemm/sm90/tiles.cuh"

namespace grouped_linear::cuda {

constexpr int kHandSteps = 4;   // to leave sums, or to add them, takes as long, or somewhat less
constexpr int kLeastSteps = 8;  // of a helper's part
constexpr int kMostMains = 8;   // more sums would take longer to add than their products

// Of tiles that are handed out a cluster knows so many beforehand. With lines the next one is asked for when
// scales have come, too late for a tile of two steps (H200, 2026-11: 1 to 5% there, 0.5% of all).
template <typename Config>
constexpr int kAhead = Config::kLines ? 2 : 1;

// The work of this block's cluster by depth, of tiles of `steps` steps each (0: they differ).
template <typename Config>
__device__ __forceinline__ Schedule schedule_of(int tiles, int steps, bool has_room) {
  const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
  const int rest = tiles % clusters;
  Schedule schedule{};
  schedule.whole = tiles;
  if (!has_room) return schedule;
  if (steps <= kFewSteps) {
    if (tiles > kAhead<Config> * clusters && tiles < 1 << 24) {
      schedule.whole = kAhead<Config> * clusters;
      schedule.handed_out = tiles - schedule.whole;
    }
    return schedule;
  }
  if (rest == 0) return schedule;

  const int mains = min(clusters / rest, kMostMains), helpers = clusters - mains * rest;
  int of_helper = 0;
  if (helpers > 0) {  // a main part is as long as `turns` of a helper's and their sums
    const int turns = (rest + helpers - 1) / helpers, mains_turns = mains * turns;
    of_helper = (steps - mains_turns * kHandSteps) / (mains_turns + 1);
    if (of_helper < kLeastSteps) of_helper = 0;
  }
  const int of_mains = steps - of_helper;
  if (of_mains / mains + (mains + (of_helper > 0) + 1) * kHandSteps > steps) return schedule;

  schedule.whole = tiles - rest;
  schedule.mains = mains;
  schedule.has_helpers = of_helper > 0;
  if (cluster < helpers) {
    schedule.number = -1;
    schedule.parts = of_helper == 0 ? 0 : (rest - cluster + helpers - 1) / helpers;
    schedule.tile = cluster;
    schedule.stride = helpers;
    schedule.steps = of_helper;
  } else {
    const int number = (cluster - helpers) / rest;
    const int begin = number * of_mains / mains, end = (number + 1) * of_mains / mains;
    schedule.number = number;
    schedule.parts = 1;
    schedule.tile = (cluster - helpers) % rest;
    schedule.first = of_helper + begin;
    schedule.steps = end - begin;
  }
  return schedule;
}

// Makes of a tile the part of it that is this cluster's; rest: its number in the last round.
template <typename Config>
__device__ __forceinline__ void cut(Tile& tile, const Schedule& schedule, int rest) {
  const int rows = schedule.first * Config::kTileK;
  tile.begin += Config::kFp8 ? schedule.first : rows;
  tile.depth_rows = min(tile.depth_rows - rows, schedule.steps * Config::kTileK);
  tile.steps = schedule.steps;
  // A tile's helper leaves its sums in place rest * mains + 1, main part i in the i + 2nd from there.
  const int mains = schedule.mains, number = schedule.number, first_place = rest * mains + 1;
  if (number < mains - 1)
    tile.bits |= Tile::bits_of_part(0, 0, first_place + number + 1);
  else
    tile.bits |=
        Tile::bits_of_part(first_place + !schedule.has_helpers, mains - !schedule.has_helpers, 0);
}

constexpr int kNoTile = -1;

// Hands out tiles, by depth. By one thread a block.
//
// Each tile has a ticket, drawn from a counter in memory by the first block of a cluster, which tells the other.
// The memory holds anything at first. Cluster 0 stamps it; whoever draws from what is not stamped draws
// again; whoever draws the last ticket, as every cluster draws one that is worth nothing, wipes the stamp
// off. So no stamp outlives the kernel that made it.
template <typename Config>
class TileNumbers {
 public:
  __device__ TileNumbers(GemmShared<Config>& shared, uint64_t* ticket)
      : shared_(shared), ticket_(reinterpret_cast<unsigned long long*>(ticket)) {}

  // Makes the schedule.
  __device__ void begin(const TileCounts& counts) {
    shared_.schedule = schedule_of<Config>(
        shared_.taken_count * static_cast<int>(counts.matrix.divisor),
        (shared_.taken_rows + Config::kTileK - 1) / Config::kTileK, ticket_ != nullptr);
    left_ = shared_.schedule.handed_out > 0;
    sm90::barrier_arrive(&shared_.scheduled);
    if (left_ && blockIdx.x == 0) atomicExch(ticket_, kStamp);
  }

  // Whether there may be more to tell: for every tile whose loads have begun, one.
  __device__ bool left() const { return left_; }

  // Looks for the next number. It may take a while until it is there.
  __device__ void ask() {
    if (shared_.rank == 0) drawn_ = atomicAdd(ticket_, 1);
  }

  // Tells it.
  __device__ void tell() {
    int* number = &shared_.numbers[count_ % kNumberRing];
    uint64_t* numbered = &shared_.numbered[count_ % kNumberRing];
    ++count_;
    if (shared_.rank > 0) {
      sm90::barrier_arrive_expect(numbered, sizeof *number);
      return;
    }
    while ((drawn_ & ~kTickets) != kStamp) drawn_ = atomicAdd(ticket_, 1);
    const int drawn = static_cast<int>(drawn_ & kTickets);
    const int tiles = shared_.schedule.handed_out;
    left_ = drawn < tiles;
    if (drawn == tiles + static_cast<int>(gridDim.x / kCluster) - 1) atomicExch(ticket_, 0);
    *number = left_ ? shared_.schedule.whole + drawn : kNoTile;
    sm90::store_at(sm90::cluster_address(number, 1), *number, sm90::cluster_address(numbered, 1));
    sm90::barrier_arrive(numbered);
  }

 private:
  static constexpr uint64_t kStamp = 0xb54c7d93e1000000, kTickets = (1 << 24) - 1;

  GemmShared<Config>& shared_;
  unsigned long long* ticket_;
  unsigned long long drawn_ = 0;
  uint32_t count_ = 0;
  bool left_ = false;
};

// The work of this block, tile after tile, in the order in which it is done.
template <typename Config>
class Work {
 public:
  __device__ Work(GemmShared<Config>& shared, const TileCounts& counts, const GemmShape& shape)
      : shared_(shared), counts_(counts), shape_(shape), next_(blockIdx.x / kCluster) {
    if (Config::kByDepth) sm90::barrier_wait(&shared.scheduled, 0);
    const int clusters = gridDim.x / kCluster;
    const int whole =
        Config::kByDepth ? shared.schedule.whole : shared.groups.tile_end[shape.E - 1];
    whole_ = max(whole - next_ + clusters - 1, 0) / clusters;
  }

  // The next tile; steps = -1: there is no more.
  __device__ __forceinline__ Tile next() {
    const Schedule& schedule = shared_.schedule;
    int number = next_, rest = -1;
    bool ends = false;
    if (whole_ > 0) {
      --whole_;
      next_ += gridDim.x / kCluster;
    } else if (Config::kByDepth && schedule.handed_out > 0) {
      const uint32_t slot = part_ % kNumberRing;
      sm90::barrier_wait(&shared_.numbered[slot], part_++ / kNumberRing & 1);
      number = shared_.numbers[slot];
      ends = number == kNoTile;
    } else if (Config::kByDepth && part_ < schedule.parts) {
      rest = schedule.tile + part_++ * schedule.stride;
      number = schedule.whole + rest;
    } else {
      ends = true;
    }
    if (ends) {
      Tile end{};
      end.steps = -1;
      return end;
    }
    Tile tile = tile_of<Config>(number, shared_.groups, shared_.taken(), counts_, shape_);
    if constexpr (Config::kByDepth)
      if (rest >= 0) cut<Config>(tile, schedule, rest);
    return tile;
  }

 private:
  GemmShared<Config>& shared_;
  const TileCounts& counts_;
  const GemmShape& shape_;
  int next_, whole_;  // whole tile, and so many of them are left
  int part_ = 0;      // of what comes after them
};

}  // namespace grouped_linear::cuda
