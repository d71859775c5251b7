// SPDX-License-Identifier: Apache-2.0
// A counter in memory from which thread blocks, or clusters of them, draw tickets: 0, 1, 2, ...
//
// The memory holds anything at first. One thread of the grid sets the counter to 0 and releases the
// launch's stamp; every other one acquires the stamp before it draws. Each launch has a stamp of its
// own, so nothing that the memory held before is taken for it. Whoever draws the last ticket clears
// the stamp, because a replay of a CUDA graph has the stamp of the one before.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace grouped_linear::cuda {

// A kernel's parameter. Null: there is no counter.
struct StampedTickets {
  struct Memory {
    uint64_t stamp;
    uint32_t next;
  }* memory;
  uint64_t stamp;  // of the launch

  static StampedTickets in(void* memory) {
    static std::atomic<uint64_t> latest{uint64_t{std::random_device{}()} << 32};
    return {static_cast<Memory*>(memory), ++latest};
  }
};
constexpr int kTicketBytes = sizeof(StampedTickets::Memory);

class StampedCounter {
 public:
  __device__ __forceinline__ explicit StampedCounter(const StampedTickets& tickets)
      : stamp_(tickets.stamp), memory_(tickets.memory) {}

  __device__ __forceinline__ bool exists() const { return memory_ != nullptr; }

  __device__ __forceinline__ void stamp() {
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(&memory_->next) : "memory");
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&memory_->stamp), "l"(stamp_)
                 : "memory");
  }
  // Draws come after a call that gave true.
  __device__ __forceinline__ bool is_stamped() const {
    uint64_t stamp;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(stamp)
                 : "l"(&memory_->stamp)
                 : "memory");
    return stamp == stamp_;
  }

  // Starts to draw a ticket, which takes a while to arrive. ptxas (nvcc 13.0) would wait for it at
  // once: of an addition it makes one for all threads of the warp, and 64 bits it may move to other
  // registers.
  __device__ __forceinline__ void draw() {
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(drawn_)
                 : "l"(&memory_->next)
                 : "memory");
  }

  // The ticket of the latest draw().
  __device__ __forceinline__ int ticket() const { return drawn_; }

  __device__ __forceinline__ void clear() {
    asm volatile("st.relaxed.gpu.global.u64 [%0], 0;" ::"l"(&memory_->stamp) : "memory");
  }

 private:
  uint64_t stamp_;
  StampedTickets::Memory* memory_;
  int drawn_ = 0;
};

}  // namespace grouped_linear::cuda
