// Which tiles a block computes: the first by its own number, then whichever comes next.
//
// Blocks draw numbers from a counter in memory, so groups of any sizes keep all of them busy. No
// result depends on who computes a tile. The memory holds anything at first. Block 0 stamps it; a
// block that draws from an unstamped counter draws again; the block that draws the last number
// clears the stamp. So no stamp outlives the kernel that made it.
#pragma once

#include <cstdint>

namespace grouped_linear::cuda::sm80 {

// Used by thread 0 of each block, but for count().
class TileCounter {
 public:
  __device__ __forceinline__ TileCounter(unsigned long long* counter, int count)
      : counter_(counter), count_(count) {
    if (is_dynamic() && blockIdx.x == 0 && threadIdx.x == 0) atomicExch(counter_, kStamp);
  }

  __device__ __forceinline__ int count() const { return count_; }

  // Starts drawing a number, which takes a while to arrive. Once for each tile of the block.
  __device__ __forceinline__ void draw() {
    if (is_dynamic()) ticket_ = atomicAdd(counter_, 1);
  }

  // The drawn tile, at least count() where there are no more.
  __device__ __forceinline__ int drawn() {
    if (!is_dynamic()) return count_;
    while ((ticket_ & ~kTicketMask) != kStamp) ticket_ = atomicAdd(counter_, 1);
    const int ticket = static_cast<int>(ticket_ & kTicketMask);
    // Every tile was drawn for once: each block draws once for each of its tiles.
    if (ticket == count_ - 1) atomicExch(counter_, 0);
    return static_cast<int>(gridDim.x) + ticket;
  }

 private:
  static constexpr uint64_t kTicketMask = 0xffffffff, kStamp = uint64_t{0x5e1fc3a7} << 32;

  // Whether there are tiles besides each block's first.
  __device__ __forceinline__ bool is_dynamic() const { return count_ > static_cast<int>(gridDim.x); }

  unsigned long long* counter_;
  unsigned long long ticket_ = 0;
  int count_;
};

}  // namespace grouped_linear::cuda::sm80
