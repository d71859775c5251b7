// Which tiles a block computes: the first two by its own number, then whichever comes next.
//
// Blocks draw numbers from a counter in memory, so groups of any sizes keep all of them busy. No
// result depends on who computes a tile. The memory holds anything at first. Block 0 stamps it; a
// block that draws from an unstamped counter draws again; the block that draws the last number
// clears the stamp. So no stamp outlives the kernel that made it.
#pragma once

#include <cstdint>

namespace grouped_linear::cuda::sm80 {

// Used by one thread a block, which takes a number whenever it begins a tile.
class TileCounter {
 public:
  __device__ __forceinline__ TileCounter(unsigned long long* counter, int tiles)
      : counter_(counter), tiles_(tiles), next_(blockIdx.x + gridDim.x) {}

  __device__ __forceinline__ void begin() {
    if (is_dynamic() && blockIdx.x == 0) atomicExch(counter_, kStamp);
  }

  // The number of the tile after the one that begins; past the last where there are no more. Starts
  // to draw the one after it, which takes a while to arrive.
  __device__ __forceinline__ int next() {
    if (next_ < 0) {
      while ((ticket_ & ~kTicketMask) != kStamp) ticket_ = atomicAdd(counter_, 1);
      const int ticket = static_cast<int>(ticket_ & kTicketMask);
      next_ = 2 * static_cast<int>(gridDim.x) + ticket;
      // Every block draws one number past the last tile.
      if (next_ == tiles_ + static_cast<int>(gridDim.x) - 1) atomicExch(counter_, 0);
    }
    const int next = next_;
    if (next < tiles_) {
      if (is_dynamic()) {
        ticket_ = atomicAdd(counter_, 1);
        next_ = -1;
      } else {
        next_ = tiles_;
      }
    }
    return next;
  }

 private:
  static constexpr uint64_t kTicketMask = 0xffffffff, kStamp = uint64_t{0x5e1fc3a7} << 32;

  __device__ __forceinline__ bool is_dynamic() const {
    return tiles_ > 2 * static_cast<int>(gridDim.x);
  }

  unsigned long long* counter_;
  unsigned long long ticket_ = 0;
  int tiles_, next_;  // -1: it is being drawn
};

}  // namespace grouped_linear::cuda::sm80
