// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: the next kernel in a stream is launched while this one still runs.
// Its thread blocks take the multiprocessors that this one leaves, and wait for its results.
//
// Every kernel of the library calls grid_dependency_wait() before its first access to global memory
// that another kernel may write or read. Its work before that overlaps with the kernel before. As
// every kernel waits, everything that was launched earlier is complete, too. Launch::run launches
// them. Before compute capability 9.0 kernels follow one another, and the wait is nothing.
#pragma once

namespace grouped_linear::cuda {

// Lets the next kernel in the stream be launched, then waits until the kernel before is complete
// and its writes are visible. See "Programmatic Dependent Launch" in the CUDA C++ Programming
// Guide.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace grouped_linear::cuda
