// SPDX-License-Identifier: Apache-2.0
// Which tiles a block computes: the first two by its own number, then whichever comes next.
//
// Blocks draw numbers from a counter in memory, so groups of any sizes keep all of them busy. No
// result depends on who computes a tile.
#pragma once

#include "cuda/gemm/stamped_counter.cuh"

namespace grouped_linear::cuda::sm80 {

// One thread a block uses it, and takes a number whenever it begins a tile.
class TileCounter {
 public:
  __device__ __forceinline__ TileCounter(const StampedTickets& tickets, int tiles)
      : counter_(tickets), tiles_(tiles), next_(blockIdx.x + gridDim.x) {}

  __device__ __forceinline__ void begin() {
    if (is_dynamic() && blockIdx.x == 0) counter_.stamp();
  }

  // The number of the tile after the one that begins; past the last where there are no more. Starts
  // to draw the one after it.
  __device__ __forceinline__ int next() {
    if (next_ < 0) {
      next_ = 2 * static_cast<int>(gridDim.x) + counter_.ticket();
      // Every block draws one number past the last tile.
      if (next_ == tiles_ + static_cast<int>(gridDim.x) - 1) counter_.clear();
    } else if (is_dynamic()) {
      while (!counter_.is_stamped()) continue;  // before the first draw
    }
    const int next = next_;
    if (next < tiles_) {
      if (is_dynamic()) {
        counter_.draw();
        next_ = -1;
      } else {
        next_ = tiles_;
      }
    }
    return next;
  }

 private:
  __device__ __forceinline__ bool is_dynamic() const {
    return tiles_ > 2 * static_cast<int>(gridDim.x);
  }

  StampedCounter counter_;
  int tiles_, next_;  // -1: it is being drawn
};

}  // namespace grouped_linear::cuda::sm80
