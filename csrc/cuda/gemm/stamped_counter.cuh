// SPDX-License-Identifier: Apache-2.0
// A counter in memory from which thread blocks, or clusters of them, draw tickets: 0, 1, 2, ...
//
// The memory holds anything at first. One thread of the grid stamps it, and nobody draws before;
// whoever draws the last ticket clears the stamp. So no stamp outlives the kernel that made it, and
// nothing has to be zeroed before a launch.
#pragma once

#include <cstdint>

namespace grouped_linear::cuda {

class StampedCounter {
 public:
  __device__ __forceinline__ explicit StampedCounter(unsigned long long* counter)
      : counter_(counter) {}

  __device__ __forceinline__ bool exists() const { return counter_ != nullptr; }

  __device__ __forceinline__ void stamp() { atomicExch(counter_, kStamp); }
  __device__ __forceinline__ bool is_stamped() const {
    uint32_t stamp;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1+4];" : "=r"(stamp) : "l"(counter_) : "memory");
    return stamp == kStamp >> 32;
  }

  // Starts to draw a ticket, which takes a while to arrive. ptxas (nvcc 13.0) would wait for it at
  // once: of an addition it makes one for all threads of the warp, and 64 bits it may move to other
  // registers.
  __device__ __forceinline__ void draw() {
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(drawn_)
                 : "l"(counter_)
                 : "memory");
  }

  // The ticket of the latest draw().
  __device__ __forceinline__ int ticket() const { return drawn_; }

  __device__ __forceinline__ void clear() { atomicExch(counter_, 0); }

 private:
  static constexpr uint64_t kStamp = uint64_t{0x5e1fc3a7} << 32;  // above the ticket's 32 bits

  unsigned long long* counter_;
  int drawn_ = 0;
};

}  // namespace grouped_linear::cuda
