// SPDX-License-Identifier: Apache-2.0
// Thin wrappers of Hopper's PTX: mbarriers, TMA, memory accesses with an explicit order,
// setmaxnreg. wgmma.cuh has the tensor cores' instructions. PTX ISA 8.x,
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/common/shared_memory.cuh"
#include "cuda/gemm/sm90/debug_wait.cuh"

namespace grouped_linear::cuda::sm90 {

// --- shared memory -------------------------------------------------------------------------------

__device__ __forceinline__ float ld_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void st_shared_float2(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit values from a warp's fragments: lane i gives the address of
// a 16-byte row of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(void* row, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// The same with the matrices transposed: lane i gives the address of a column.
__device__ __forceinline__ void stmatrix_x4_trans(void* row, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   smem_address(row)),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
// Orders this thread's ordinary writes to shared memory before the reads of wgmma and of TMA.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- cp.async ------------------------------------------------------------------------------------
// Copies by this thread from global to shared memory, which arrive later. They are ordinary writes:
// fence_proxy_async must come between them and wgmma.

__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Arrives at an mbarrier once this thread's copies before it have arrived.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

// --- global memory that multiprocessors share ----------------------------------------------------

// .cg bypasses L1, which does not see what other multiprocessors write.
__device__ __forceinline__ void st_global_cg(float* to, float value) {
  asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
__device__ __forceinline__ float ld_global_cg(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// A thread that acquires the value sees everything written before the value was released.
__device__ __forceinline__ void st_release(uint64_t* to, uint64_t value) {
  asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value)
               : "memory");
}
__device__ __forceinline__ uint64_t ld_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// --- the cluster ---------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
}

// The cluster-wide address of what block `rank` has where this block has `own`.
__device__ __forceinline__ uint32_t mapa(const void* own, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(smem_address(own)), "r"(rank));
  return there;
}

// Stores 16 bytes in a block of the cluster and completes them at an mbarrier of that block.
__device__ __forceinline__ void st_async_16(uint32_t cluster_address, uint32_t v0, uint32_t v1,
                                            uint32_t v2, uint32_t v3,
                                            uint32_t mbarrier_cluster_address) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_address),
      "r"(v0), "r"(v1), "r"(v2), "r"(v3), "r"(mbarrier_cluster_address)
      : "memory");
}

// --- mbarriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(arrivals));
}

// Makes initialised mbarriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives, and keeps the phase incomplete until `bytes` more bytes have been copied in.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives at an mbarrier of any block of the cluster. It has no .cluster scope: that release would
// be a MEMBAR, which took a third of a kernel's time, and a consumer has only read what it gives
// back.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t cluster_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}

// Arrives at one, and keeps its phase incomplete until `bytes` more bytes have been stored there.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_remote(uint32_t cluster_address,
                                                                 uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_address),
               "r"(bytes)
               : "memory");
}

// Whether the phase of the given parity is complete.
__device__ __forceinline__ bool mbarrier_test(uint32_t address, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(address), "r"(phase)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, uint32_t phase) {
  return mbarrier_test(smem_address(barrier), phase);
}

// Waits until the phase of the given parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t address, uint32_t phase) {
#ifdef GROUPED_LINEAR_DEBUG
  for (DebugWait wait("an mbarrier"); !mbarrier_test(address, phase);) wait.check();
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished%=;\n"
      "bra again%=;\n"
      "finished%=:\n"
      "}\n" ::"r"(address),
      "r"(phase)
      : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t phase) {
  mbarrier_wait(smem_address(barrier), phase);
}

// --- TMA -----------------------------------------------------------------------------------------
// Coordinates are in elements, innermost first. Elements outside the tensor are loaded as zero and
// not stored.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box into this block (mask 0), or into every block of the cluster that `mask` names: at
// the same shared memory offset in each, and counted by each block's own mbarrier.
#define GROUPED_LINEAR_LOAD ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
#define GROUPED_LINEAR_LOAD_OR_MULTICAST(dims, at, mask_at, ...)                     \
  if (mask == 0)                                                                     \
    asm volatile("cp.async.bulk.tensor." dims GROUPED_LINEAR_LOAD " [%0], [%1, {" at \
                 "}], [%2];" ::"r"(smem_address(to)),                                \
                 "l"(map), "r"(smem_address(barrier)), __VA_ARGS__                   \
                 : "memory");                                                        \
  else                                                                               \
    asm volatile("cp.async.bulk.tensor." dims GROUPED_LINEAR_LOAD                    \
                 ".multicast::cluster [%0], [%1, {" at "}], [%2], " mask_at          \
                 ";" ::"r"(smem_address(to)),                                        \
                 "l"(map), "r"(smem_address(barrier)), __VA_ARGS__, "h"(mask)        \
                 : "memory")
__device__ __forceinline__ void tma_load_2d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            uint16_t mask, int c0, int c1) {
  GROUPED_LINEAR_LOAD_OR_MULTICAST("2d", "%3, %4", "%5", "r"(c0), "r"(c1));
}
__device__ __forceinline__ void tma_load_3d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            uint16_t mask, int c0, int c1, int c2) {
  GROUPED_LINEAR_LOAD_OR_MULTICAST("3d", "%3, %4, %5", "%6", "r"(c0), "r"(c1), "r"(c2));
}
__device__ __forceinline__ void tma_load_4d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            uint16_t mask, int c0, int c1, int c2, int c3) {
  GROUPED_LINEAR_LOAD_OR_MULTICAST("4d", "%3, %4, %5, %6", "%7", "r"(c0), "r"(c1), "r"(c2),
                                   "r"(c3));
}
#undef GROUPED_LINEAR_LOAD_OR_MULTICAST

// For this block alone.
__device__ __forceinline__ void tma_load_5d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d" GROUPED_LINEAR_LOAD
               " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(to)),
               "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
#undef GROUPED_LINEAR_LOAD

// Writes a box from shared memory: tma_store overwrites, tma_reduce_add adds. The issuing thread
// commits its writes in groups and waits for them.
#define GROUPED_LINEAR_STORE(name, instruction, mode)                                         \
  __device__ __forceinline__ void name##_4d(const CUtensorMap* map, const void* from, int c0, \
                                            int c1, int c2, int c3) {                         \
    asm volatile(instruction ".4d.global.shared::cta" mode                                    \
                             ".bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),          \
                 "r"(smem_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)                  \
                 : "memory");                                                                 \
  }                                                                                           \
  __device__ __forceinline__ void name##_5d(const CUtensorMap* map, const void* from, int c0, \
                                            int c1, int c2, int c3, int c4) {                 \
    asm volatile(instruction ".5d.global.shared::cta" mode                                    \
                             ".bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),      \
                 "r"(smem_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)         \
                 : "memory");                                                                 \
  }
GROUPED_LINEAR_STORE(tma_store, "cp.async.bulk.tensor", ".tile")
GROUPED_LINEAR_STORE(tma_reduce_add, "cp.reduce.async.bulk.tensor", ".add.tile")
#undef GROUPED_LINEAR_STORE

// Copies of consecutive bytes, without a tensor map.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(smem_address(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `in_flight` groups still have to be read from shared memory.
template <int in_flight>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(in_flight) : "memory");
}

// --- warps and registers -------------------------------------------------------------------------

template <int count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// True in one thread of a converged warp. The compiler knows that it is one thread, and keeps what
// TMA needs in uniform registers without a loop over the threads.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred chosen;\nelect.sync _|chosen, 0xffffffff;\nselp.u32 %0, 1, 0, chosen;\n}\n"
      : "=r"(chosen));
  return chosen != 0;
}

}  // namespace grouped_linear::cuda::sm90
