// SPDX-License-Identifier: Apache-2.0
// Sorts tokens' choices by expert: a stable counting sort in one launch, or in two where the
// choices are many.
//
// Bytes: R choices are read up to three times and three int32 are written for each, 36 R with
// int64. The chain of dependent steps and the writes of single rows take the time, not the bytes.
// Measurements: docs/notes/expert_layer.md, "Routing".
//
// A thread block has 1024 neighbouring choices or more, and each of its warps counts a run of them.
// The first launch counts what each block has of each expert. From that and from the counts of the
// warps before it, a warp knows where its first row of each expert goes; then it reads its run once
// more, in order. No two warps share a counter, so nothing depends on the order in which they run.
#pragma once

#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "layout.h"

namespace grouped_linear::cuda {

constexpr int kSortThreads = 256, kSortWarps = kSortThreads / 32;
constexpr int kLoadsInFlight = 4, kCountsInFlight = 16;  // of a thread
constexpr int kMinChoicesPerBlock = kSortThreads * kLoadsInFlight, kMaxSortBlocks = 256;

// Every warp has a counter for each expert and one for choices of no expert.
constexpr int sort_shared_bytes(int64_t E) {
  return kSortWarps * static_cast<int>((E + 1) * sizeof(int32_t));
}

// The choices of one warp.
template <typename Expert>
struct WarpChoices {
  const Expert* experts;
  int E, first, end;

  __device__ WarpChoices(const Expert* all, int R, int E_) : experts(all), E(E_) {
    const int64_t warps = int64_t{gridDim.x} * kSortWarps;
    const int64_t run = (R + 32 * warps - 1) / (32 * warps) * 32;
    const int64_t begin = (int64_t{blockIdx.x} * kSortWarps + threadIdx.x / 32) * run;
    first = static_cast<int>(min(begin, int64_t{R}));
    end = static_cast<int>(min(begin + run, int64_t{R}));
  }

  // Calls visit(i, bin, peers) for every choice i, 32 at a time and in order. bin is -1 past the
  // last choice; peers are the lanes with the same bin.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    const int lane = threadIdx.x % 32;
    for (int begin = first; begin < end; begin += 32 * kLoadsInFlight) {
      int bin[kLoadsInFlight];
#pragma unroll
      for (int a = 0; a < kLoadsInFlight; ++a) {
        const int i = begin + 32 * a + lane;
        bin[a] = -1;
        if (i < end) {
          const Expert expert = experts[i];
          bin[a] = expert >= 0 && expert < E ? static_cast<int>(expert) : E;
        }
      }
#pragma unroll
      for (int a = 0; a < kLoadsInFlight; ++a) {
        visit(begin + 32 * a + lane, bin[a], __match_any_sync(0xffffffff, bin[a]));
        __syncwarp();
      }
    }
  }
};

// Adds 32 choices to the counters of their warp.
__device__ __forceinline__ void count_peers(int32_t* own, int bin, unsigned peers) {
  if (bin >= 0 && static_cast<int>(threadIdx.x % 32) == __ffs(peers) - 1) own[bin] += __popc(peers);
}

// counts [kSortWarps][E + 1] become how many choices the warps before each one have. Calls
// total(bin, count) with how many the block has. Called by all threads; ends without a barrier.
template <typename Expert, typename Total>
__device__ void count_block(const WarpChoices<Expert>& choices, int32_t* counts,
                            const Total& total) {
  const int bins = choices.E + 1;
  for (int i = threadIdx.x; i < kSortWarps * bins; i += kSortThreads) counts[i] = 0;
  __syncthreads();
  int32_t* own = counts + threadIdx.x / 32 * bins;
  choices.each([&](int, int bin, unsigned peers) { count_peers(own, bin, peers); });
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += kSortThreads) {
    int before = 0;
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = counts[w * bins + b];
      counts[w * bins + b] = before;
      before += count;
    }
    total(b, before);
  }
}

// block_counts [blocks, E + 1]
template <typename Expert>
__global__ void __launch_bounds__(kSortThreads)
    count_by_expert_kernel(const Expert* experts, int R, int E, int32_t* block_counts) {
  extern __shared__ int32_t counts[];
  grid_dependency_wait();
  count_block(WarpChoices<Expert>(experts, R, E), counts, [&](int b, int count) {
    block_counts[static_cast<int64_t>(blockIdx.x) * (E + 1) + b] = count;
  });
}

// choice [R] and token [R]: which element of experts [T, C] each sorted row is, and of which token.
// row [R]: where each choice went. offs [E]: the group ends. Choices outside [0, E) come last and
// belong to no expert. block_counts is null where there is one block.
template <typename Expert>
__global__ void __launch_bounds__(kSortThreads)
    sort_by_expert_kernel(const Expert* experts, int R, int C, int E, const int32_t* block_counts,
                          int32_t* choice, int32_t* token, int32_t* row, int32_t* offs) {
  extern __shared__ int32_t counts[];
  __shared__ int32_t starts[kMaxGroups + 1];  // where this block's first row of each expert goes
  __shared__ int32_t rows[kMaxGroups + 1];    // how many each expert has, of all blocks
  __shared__ int32_t warp_rows[kSortWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, bins = E + 1;
  grid_dependency_wait();
  const WarpChoices<Expert> choices(experts, R, E);
  count_block(choices, counts, [&](int b, int count) {
    int before = 0, all = block_counts ? 0 : count;
    for (unsigned first = 0; block_counts && first < gridDim.x; first += kCountsInFlight) {
      int of_block[kCountsInFlight];
#pragma unroll
      for (unsigned k = 0; k < kCountsInFlight; ++k)
        of_block[k] =
            first + k < gridDim.x ? block_counts[static_cast<int64_t>(first + k) * bins + b] : 0;
#pragma unroll
      for (unsigned k = 0; k < kCountsInFlight; ++k) {
        if (first + k < blockIdx.x) before += of_block[k];
        all += of_block[k];
      }
    }
    starts[b] = before;
    rows[b] = all;
  });
  __syncthreads();

  // Every thread scans a run of neighbouring experts: their rows begin where those of the run
  // before end.
  const int run = (E + kSortThreads - 1) / kSortThreads,
            first = min(E, static_cast<int>(threadIdx.x) * run), end = min(E, first + run);
  int own_rows = 0;
  for (int e = first; e < end; ++e) own_rows += rows[e];
  const int scanned = scan_warp(own_rows, [](int a, int b) { return a + b; });
  if (lane == 31) warp_rows[warp] = scanned;
  __syncthreads();
  int at = scanned - own_rows;
  for (int w = 0; w < warp; ++w) at += warp_rows[w];
  for (int e = first; e < end; ++e) {
    starts[e] += at;
    at += rows[e];
    if (blockIdx.x == 0) offs[e] = at;
    if (e == E - 1) starts[E] += at;
  }
  __syncthreads();

  int32_t* own = counts + warp * bins;
  choices.each([&](int i, int bin, unsigned peers) {
    const int to = bin < 0 ? 0 : starts[bin] + own[bin] + __popc(peers & ((1u << lane) - 1));
    __syncwarp();  // all lanes have read own[bin]
    count_peers(own, bin, peers);
    if (bin < 0) return;
    choice[to] = i;
    token[to] = i / C;
    row[i] = to;
  });
}

}  // namespace grouped_linear::cuda
