// SPDX-License-Identifier: Apache-2.0
// Bounds for the kernel's waiting loops, in builds with -DGROUPED_LINEAR_DEBUG (CMake's option of
// that name). A thread that has waited for kDebugWaitCycles says so and traps, where a release
// build hangs. printf is a function call: ptxas spills registers and serialises wgmma for it, so
// such a build is slow, and CI's ptxas gate fails it.
#pragma once

#ifdef GROUPED_LINEAR_DEBUG
#include <cstdio>
#endif

namespace grouped_linear::cuda::sm90 {

class DebugWait {
 public:
#ifdef GROUPED_LINEAR_DEBUG
  // what: the thing waited for.
  __device__ explicit DebugWait(const char* what) : what_(what), start_(cycles()) {}

  // To be called in every round of the loop.
  __device__ void check() const {
    if (cycles() - start_ < kDebugWaitCycles) return;
    printf("grouped GEMM: block %d, thread %d waited for %s for %lld cycles\n", int(blockIdx.x),
           int(threadIdx.x), what_, kDebugWaitCycles);
    asm volatile("trap;");
  }

 private:
  static __device__ long long cycles() {
    long long now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
    return now;
  }

  static constexpr long long kDebugWaitCycles = 10'000'000'000;  // some 5 seconds at 1.8 GHz
  const char* what_;
  long long start_;
#else
  __device__ explicit DebugWait(const char*) {}
  __device__ void check() const {}
#endif
};

}  // namespace grouped_linear::cuda::sm90
