// SPDX-License-Identifier: Apache-2.0
// The step of delayed scaling: for every operand of a model, amax [E] enters the history [H, E],
// and the history gives the scale [E].
//
// Bytes: reads and writes each history once. 360 operands of 64 groups and 1024 steps are 94 MB
// each way, 45 us at the 4.27 TB/s of a copy.
//
// A thread block has 32 groups of one operand, side by side in a warp's lanes. It moves 256 steps
// at a time by one, the oldest first: all of them are in registers before any is written.
#pragma once

#include <cstdint>

#include "cuda/common/pdl.cuh"

namespace grouped_linear::cuda {

struct OperandScales {
  float* scale;    // [E]
  float* amax;     // [E]
  float* history;  // [H, E]
  int E, H;
  float fp8_max;
};

// Kernel arguments hold 32764 bytes.
constexpr int kOperandsPerLaunch = 800;
struct OperandTable {
  OperandScales operands[kOperandsPerLaunch];
};
static_assert(sizeof(OperandTable) <= 32 * 1024 - 4 - 16);

constexpr int kUpdateWarps = 32, kStepsPerThread = 8;
constexpr int kUpdateThreads = 32 * kUpdateWarps, kStepsAtOnce = kUpdateWarps * kStepsPerThread;

static __global__ void __launch_bounds__(kUpdateThreads)
    update_scales_kernel(const __grid_constant__ OperandTable table, float inverse_margin,
                         bool most_recent) {
  grid_dependency_wait();
  __shared__ uint32_t warp_amax[kUpdateWarps][32];
  const OperandScales operand = table.operands[blockIdx.y];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int E = operand.E, H = operand.H;
  if (blockIdx.x * 32 >= E) return;
  const int e = blockIdx.x * 32 + lane;
  const bool in_bounds = e < E;

  uint32_t largest = 0;
  for (int begin = (H - 1) / kStepsAtOnce * kStepsAtOnce; begin >= 0; begin -= kStepsAtOnce) {
    float step[kStepsPerThread];
#pragma unroll
    for (int i = 0; i < kStepsPerThread; ++i) {
      const int h = begin + i * kUpdateWarps + warp;
      // The oldest step is dropped.
      step[i] = in_bounds && h + 1 < H ? operand.history[static_cast<int64_t>(h) * E + e] : 0;
      largest = max(largest, __float_as_uint(step[i]) & 0x7fffffff);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kStepsPerThread; ++i) {
      const int h = begin + i * kUpdateWarps + warp;
      if (in_bounds && h + 1 < H) operand.history[static_cast<int64_t>(h + 1) * E + e] = step[i];
    }
  }
  warp_amax[warp][lane] = largest;
  __syncthreads();
  if (warp != 0 || !in_bounds) return;

  const uint32_t now = __float_as_uint(operand.amax[e]) & 0x7fffffff;
  const bool finite = now < 0x7f800000;
  largest = finite ? now : 0;
  operand.history[e] = __uint_as_float(largest);
  if (!most_recent)
    for (int w = 0; w < kUpdateWarps; ++w) largest = max(largest, warp_amax[w][lane]);
  if (finite && largest > 0 && largest < 0x7f800000) {
    float factor = __fdiv_rn(operand.fp8_max, __uint_as_float(largest));
    factor = __fmul_rn(factor, inverse_margin);
    operand.scale[e] = __fdiv_rn(1.0f, fminf(fmaxf(factor, 0x1p-126f), 0x1p126f));
  }
  operand.amax[e] = 0;
}

}  // namespace grouped_linear::cuda
