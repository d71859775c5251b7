// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread starts and waits for later (cp.async).
#pragma once

#include <cstdint>

namespace grouped_linear::cuda {

// Starts a copy of 16 bytes, through L2 alone. Writes zeros where in_bounds is false.
__device__ __forceinline__ void cp_async_16(uint4* to, const uint4* from, bool in_bounds) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(in_bounds ? 16 : 0)
               : "memory");
}

// Commits the copies that this thread has started as one group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups that this thread has committed but the last `in_flight`.
template <int in_flight = 0>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(in_flight) : "memory");
}

}  // namespace grouped_linear::cuda
