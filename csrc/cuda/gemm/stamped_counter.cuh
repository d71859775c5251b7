// A counter in memory from which thread blocks, or clusters of them, draw tickets: 0, 1, 2, ...
//
// The memory holds anything at first. One thread of the grid stamps it; a thread that draws from an
// unstamped counter draws again; whoever draws the last ticket clears the stamp. So no stamp
// outlives the kernel that made it, and nothing has to be zeroed before a launch.
#pragma once

#include <cstdint>

namespace grouped_linear::cuda {

class StampedCounter {
 public:
  __device__ __forceinline__ explicit StampedCounter(unsigned long long* counter)
      : counter_(counter) {}

  __device__ __forceinline__ void stamp() { atomicExch(counter_, kStamp); }

  // Starts to draw a ticket, which takes a while to arrive.
  __device__ __forceinline__ void draw() { drawn_ = atomicAdd(counter_, 1); }

  // The ticket of the latest draw().
  __device__ __forceinline__ int ticket() {
    while ((drawn_ & ~kTicketMask) != kStamp) draw();
    return static_cast<int>(drawn_ & kTicketMask);
  }

  __device__ __forceinline__ void clear() { atomicExch(counter_, 0); }

 private:
  static constexpr uint64_t kTicketMask = 0xffffffff, kStamp = uint64_t{0x5e1fc3a7} << 32;

  unsigned long long* counter_;
  unsigned long long drawn_ = 0;
};

}  // namespace grouped_linear::cuda
