// Thin names for the PTX of Hopper: mbarriers, tensor copies (TMA), warpgroup products (wgmma).
// PTX ISA 8.x, https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace grouped_linear::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// An address that stays in a register: in a long loop the compiler would rather compute it anew.
__device__ __forceinline__ uint32_t kept_address(const void* pointer) {
  uint32_t address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return address;
}

__device__ __forceinline__ float load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ float2 load_float2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_float2(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// threadIdx.x, read anew: for what is rare, where a register for it would be one too many elsewhere.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The lane, whose range the compiler does not know.
__device__ __forceinline__ uint32_t lane_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(index));
  return index;
}

// --- memory that blocks share
// ---------------------------------------------------------------------------------------

// Past L1, which does not see what other multiprocessors write.
__device__ __forceinline__ void store_past_l1(float* to, float value) {
  asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
__device__ __forceinline__ float load_past_l1(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// Whoever loads the value sees what was written before it was stored.
__device__ __forceinline__ void store_release(uint64_t* to, uint64_t value) {
  asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value)
               : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// --- mbarriers
// ---------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and holds the phase until `bytes` more have been copied in.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Where a block of the cluster has what this block has at `own`.
__device__ __forceinline__ uint32_t cluster_address(const void* own, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(own)), "r"(rank));
  return there;
}

// Arrives at a barrier of any block of the cluster. Without .cluster scope: its release would be a
// MEMBAR (measured: a third of a kernel's time), and what is handed over here was only read.
__device__ __forceinline__ void barrier_arrive_at(uint32_t cluster_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}

// Stores a value in any block of the cluster, and counts its bytes at a barrier of that block.
__device__ __forceinline__ void store_at(uint32_t cluster_address, int value,
                                         uint32_t barrier_address) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
          cluster_address),
      "r"(value), "r"(barrier_address)
      : "memory");
}

// Waits until the phase of the given parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t address, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished%=;\n"
      "bra again%=;\n"
      "finished%=:\n"
      "}\n" ::"r"(address),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait(shared_address(barrier), parity);
}

// Whether the phase of the given parity is over.
__device__ __forceinline__ bool barrier_test(uint32_t address, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(address), "r"(parity)
      : "memory");
  return done != 0;
}

// --- tensor copies
// ----------------------------------------------------------------------------------- Coordinates
// are in elements, innermost first; what lies outside the tensor arrives as zero.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A tile from the coordinates c0, c1, ... on, to this block (mask 0) or to every block of the cluster
// that `mask` names, at the same place in each, and counted by each one's own barrier.
#define GROUPED_LINEAR_LOAD ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
__device__ __forceinline__ void load_2d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                        uint16_t mask, int c0, int c1) {
  if (mask == 0)
    asm volatile("cp.async.bulk.tensor.2d" GROUPED_LINEAR_LOAD
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d" GROUPED_LINEAR_LOAD
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(mask)
                 : "memory");
}

__device__ __forceinline__ void load_3d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                        uint16_t mask, int c0, int c1, int c2) {
  if (mask == 0)
    asm volatile("cp.async.bulk.tensor.3d" GROUPED_LINEAR_LOAD
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d" GROUPED_LINEAR_LOAD
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(mask)
        : "memory");
}

__device__ __forceinline__ void load_4d(void* to, const CUtensorMap* map, uint64_t* barrier,
                                        uint16_t mask, int c0, int c1, int c2, int c3) {
  if (mask == 0)
    asm volatile("cp.async.bulk.tensor.4d" GROUPED_LINEAR_LOAD
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d" GROUPED_LINEAR_LOAD
        ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask)
        : "memory");
}

// A box for this block alone, by its coordinates in a map of four or five dimensions.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2, int c3) {
  load_4d(to, map, barrier, 0, c0, c1, c2, c3);
}

__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d" GROUPED_LINEAR_LOAD
               " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
#undef GROUPED_LINEAR_LOAD

// Copies out of shared memory, in groups that the issuing thread commits and waits for: of a box, by its
// coordinates in a map of four or five dimensions. add_box adds to what is there.
#define GROUPED_LINEAR_SEND(send_box, copy, how)                                             \
  __device__ __forceinline__ void send_box(const CUtensorMap* map, const void* from, int c0, \
                                           int c1, int c2, int c3) {                         \
    asm volatile(copy ".4d.global.shared::cta" how                                           \
                      ".bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),                \
                 "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)               \
                 : "memory");                                                                \
  }                                                                                          \
  __device__ __forceinline__ void send_box(const CUtensorMap* map, const void* from, int c0, \
                                           int c1, int c2, int c3, int c4) {                 \
    asm volatile(copy ".5d.global.shared::cta" how                                           \
                      ".bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),            \
                 "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)      \
                 : "memory");                                                                \
  }
GROUPED_LINEAR_SEND(store_box, "cp.async.bulk.tensor", ".tile")
GROUPED_LINEAR_SEND(add_box, "cp.reduce.async.bulk.tensor", ".add.tile")
#undef GROUPED_LINEAR_SEND

__device__ __forceinline__ void store_bytes(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `in_flight` groups still have to be read from shared memory.
template <int in_flight>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(in_flight) : "memory");
}

// Orders this thread's ordinary writes to shared memory before what wgmma and the copy engine read
// there.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- warps and registers
// -----------------------------------------------------------------------------

template <int count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// True in one thread of a warp that is here as a whole. The compiler knows that it is one, and keeps
// what the copy engine needs in uniform registers without a loop over the threads.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred chosen;\nelect.sync _|chosen, 0xffffffff;\nselp.u32 %0, 1, 0, chosen;\n}\n"
      : "=r"(chosen));
  return chosen != 0;
}

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

// A barrier of `threads` threads; ids from 1 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Stores four 8 x 8 tiles of 16-bit values from a warp's fragments: lane i names a line of 16 bytes
// of tile i / 8.
__device__ __forceinline__ void store_matrix(void* line, uint32_t r0, uint32_t r1, uint32_t r2,
                                             uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(line)),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Loads them.
__device__ __forceinline__ void load_matrix(const void* line, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(line))
               : "memory");
}

// --- warpgroup products
// ------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int in_flight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(in_flight) : "memory");
}

// A zero that the compiler does not know as one: it would spill registers elsewhere to keep sums that it
// clears two at a time in pairs.
__device__ __forceinline__ float opaque_zero() {
  float zero;
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(zero));
  return zero;
}

// Keeps the compiler from moving uses of an accumulator across a wgmma wait or fence.
template <int count>
__device__ __forceinline__ void pin(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The descriptor of an operand in shared memory with the 128-byte swizzle (atoms of 8 lines of 128
// bytes, so bases are multiples of 1024 bytes, plus the step along K).
//   K-major (a line is 128 bytes along K): stride = bytes between groups of 8 lines; leading
//   unused. M/N-major (a line is 64 elements along M or N): leading = bytes between 64-element
//   columns, stride = bytes between groups of 8 lines along K.
__device__ __forceinline__ uint64_t operand(uint32_t lower_half, uint32_t stride_bytes) {
  return uint64_t{lower_half} | uint64_t{stride_bytes >> 4 | uint32_t{1} << 30} << 32;
}

// The lower half of a descriptor: an address, which may be counted on from there in units of 16 bytes, and
// `leading`. Without the block's rank in the cluster, which is in the address's upper bits.
__device__ __forceinline__ uint32_t operand_start(const void* pointer, uint32_t leading_bytes) {
  return shared_address(pointer) % (1 << 24) / 16 | leading_bytes >> 4 << 16;
}

// One m64n64 product with 32 accumulators a thread.
#define GROUPED_LINEAR_WGMMA_N64(k, types, majors)                                                 \
  asm volatile(                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n64k" k ".f32." types                                       \
      " "                                                                                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "          \
      "%32, %33, add, 1, 1" majors ";\n}\n"                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "l"(a), "l"(b), "r"(add))

// One m64n192 product with 96 accumulators a thread.
#define GROUPED_LINEAR_WGMMA_N192(k, types, majors)                                                \
  asm volatile(                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n192k" k ".f32." types                                      \
      " "                                                                                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "           \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "          \
      "%96, %97, add, 1, 1" majors ";\n}\n"                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])                            \
      : "l"(a), "l"(b), "r"(add))

// One m64n256 product with 128 accumulators a thread.
#define GROUPED_LINEAR_WGMMA_N256(k, types, majors)                                                       \
  asm volatile(                                                                                           \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                   \
      "wgmma.mma_async.sync.aligned.m64n256k" k ".f32." types                                             \
      " "                                                                                                 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
      "%128, %129, add, 1, 1" majors ";\n}\n"                                                             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),               \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),           \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),        \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),        \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),        \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),        \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),        \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),        \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),        \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),        \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),        \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),        \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),        \
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),                 \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),               \
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),               \
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),               \
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])                \
      : "l"(a), "l"(b), "r"(add))

// d = (add ? d : 0) + a @ b.T, a 64 x n product. Majors: 0 K-major, 1 M/N-major.
template <typename A, typename B, int n, int a_major, int b_major>
__device__ __forceinline__ void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b, int add) {
  static_assert(n == 64 || n == 192 || n == 256);
#define GROUPED_LINEAR_WGMMA(k, types, majors)   \
  if constexpr (n == 64)                         \
    GROUPED_LINEAR_WGMMA_N64(k, types, majors);  \
  else if constexpr (n == 192)                   \
    GROUPED_LINEAR_WGMMA_N192(k, types, majors); \
  else                                           \
    GROUPED_LINEAR_WGMMA_N256(k, types, majors)
#define GROUPED_LINEAR_WGMMA_MAJORS(types)       \
  if constexpr (a_major == 0 && b_major == 0) {  \
    GROUPED_LINEAR_WGMMA("16", types, ", 0, 0"); \
  } else if constexpr (a_major == 0) {           \
    GROUPED_LINEAR_WGMMA("16", types, ", 0, 1"); \
  } else if constexpr (b_major == 0) {           \
    GROUPED_LINEAR_WGMMA("16", types, ", 1, 0"); \
  } else {                                       \
    GROUPED_LINEAR_WGMMA("16", types, ", 1, 1"); \
  }
  if constexpr (sizeof(A) == 1) {
    static_assert(a_major == 0 && b_major == 0, "FP8 operands are K-major");
    static_assert(std::is_same_v<B, __nv_fp8_e4m3>);
    if constexpr (std::is_same_v<A, __nv_fp8_e4m3>) {
      GROUPED_LINEAR_WGMMA("32", "e4m3.e4m3", "");
    } else {
      GROUPED_LINEAR_WGMMA("32", "e5m2.e4m3", "");
    }
  } else if constexpr (std::is_same_v<A, __nv_bfloat16>) {
    GROUPED_LINEAR_WGMMA_MAJORS("bf16.bf16")
  } else {
    GROUPED_LINEAR_WGMMA_MAJORS("f16.f16")
  }
#undef GROUPED_LINEAR_WGMMA_MAJORS
#undef GROUPED_LINEAR_WGMMA
}

}  // namespace grouped_linear::cuda::sm90
