// SPDX-License-Identifier: Apache-2.0
// The experts with the largest scores and their weights, and the gradient by the logits: a warp a
// token.
//
// Bytes: T E logits are read once, and 12 T k are written; the gradient reads and writes T E.
// Each choice costs two reductions over a warp and four instructions for each of a lane's experts.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "routing_math.h"

namespace grouped_linear::cuda {

constexpr int kTopkThreads = 256, kTopkWarps = kTopkThreads / 32;

// Blocks of an SM that a kernel leaves registers for, 64 or 128 a thread. Asked for none, ptxas
// takes 32 or 40, and spills one across the division.
template <int per_lane>
constexpr int kTopkBlocks = per_lane <= 16 ? 4 : 2;

// Larger for larger scores and largest for NaN; the same for both zeros; never 0.
__device__ __forceinline__ uint32_t rank_of(float score) {
  if (isnan(score)) return 0xffffffff;
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));  // -0 becomes 0
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// The score of a rank.
__device__ __forceinline__ float score_of(uint32_t rank) {
  return __uint_as_float(rank & 0x80000000 ? rank ^ 0x80000000 : ~rank);
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = __fadd_rn(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

// experts and weights [T, k] of logits [T, E]: a lane has every 32nd expert, at most per_lane of
// them. bias [E] is added to scores where experts are chosen, and nowhere else.
template <typename Element, int per_lane>
__global__ void __launch_bounds__(kTopkThreads, kTopkBlocks<per_lane>)
    topk_experts_kernel(const Element* logits, int64_t stride, const float* bias, int64_t T, int E,
                        int k, Scoring scoring, float* weights, int64_t* experts) {
  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const int64_t t = (int64_t{blockIdx.x} * kTopkThreads + threadIdx.x) / 32;
  if (t >= T) return;
  logits += t * stride;
  uint32_t rank[per_lane];  // 0: chosen already, or no expert
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int e = 32 * i + lane;
    rank[i] = e < E ? rank_of(static_cast<float>(logits[e])) : 0;
  }
  float max = 0, sum = 1;
  if (scoring.is_softmax()) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) largest = ::max(largest, rank[i]);
    max = score_of(__reduce_max_sync(kFullWarp, largest));
    if (bias || !scoring.normalize) {
      float of_lane = 0;
#pragma unroll
      for (int i = 0; i < per_lane; ++i)
        if (32 * i + lane < E)
          of_lane = __fadd_rn(of_lane, scoring.score(score_of(rank[i]), max, 1));
      sum = sum_of_warp(of_lane);
    }
  }
  if (bias) {
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      const int e = 32 * i + lane;
      if (e < E) rank[i] = rank_of(__fadd_rn(scoring.score(score_of(rank[i]), max, sum), bias[e]));
    }
  }

  int64_t* chosen = experts + t * k;
  unsigned own = 0;  // every 32nd choice, until 32 are written at once
  for (int c = 0; c < k; ++c) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) largest = ::max(largest, rank[i]);
    largest = __reduce_max_sync(kFullWarp, largest);
    unsigned first = 32 * per_lane;
#pragma unroll
    for (int i = per_lane - 1; i >= 0; --i)
      if (rank[i] == largest) first = 32 * i + lane;
    first = __reduce_min_sync(kFullWarp, first);
#pragma unroll
    for (int i = 0; i < per_lane; ++i)
      if (32 * i + lane == first) rank[i] = 0;
    if (lane == c % 32) own = first;
    if ((c % 32 == 31 || c == k - 1) && lane <= c % 32) chosen[c / 32 * 32 + lane] = own;
  }

  // A lane reads the choices that it has written.
  const auto score = [&](int c) {
    return scoring.score(static_cast<float>(logits[chosen[c]]), max, sum);
  };
  float total = 0;
  if (scoring.normalize) {
    for (int c = lane; c < k; c += 32) total = __fadd_rn(total, score(c));
    total = sum_of_warp(total);
  }
  for (int c = lane; c < k; c += 32) weights[t * k + c] = scoring.weight(score(c), total);
}

// d_logits [T, E] of d_weights [T, k], from the same logits. Each warp has a row of E numbers in
// shared memory. Experts outside of [0, E) have no gradient.
template <typename Element>
__global__ void __launch_bounds__(kTopkThreads, kTopkBlocks<1>)
    topk_experts_grad_kernel(const float* d_weights, const Element* logits, int64_t stride,
                             const int64_t* experts, int64_t T, int E, int k, Scoring scoring,
                             Element* d_logits) {
  extern __shared__ float rows[];
  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const int64_t t = (int64_t{blockIdx.x} * kTopkThreads + threadIdx.x) / 32;
  if (t >= T) return;
  float* row = rows + threadIdx.x / 32 * E;
  logits += t * stride, experts += t * k, d_weights += t * k;
  const auto logit = [&](int64_t e) { return static_cast<float>(logits[e]); };
  float max = 0, sum = 1;
  if (scoring.is_softmax()) {
    uint32_t largest = 0;
    for (int e = lane; e < E; e += 32) largest = ::max(largest, rank_of(logit(e)));
    max = score_of(__reduce_max_sync(kFullWarp, largest));
  }
  const auto sum_of_scores = [&] {
    float of_lane = 0;
    for (int e = lane; e < E; e += 32)
      of_lane = __fadd_rn(of_lane, scoring.score(logit(e), max, 1));
    return sum_of_warp(of_lane);
  };
  bool dense = scoring.others_have_gradients();
  if (dense) sum = sum_of_scores();

  float total = 0, dot = 0;
  for (int c = lane; c < k; c += 32) {
    const int64_t e = experts[c];
    if (e < 0 || e >= E) continue;
    const float s = scoring.score(logit(e), max, sum);
    total = __fadd_rn(total, s);
    dot = __fadd_rn(dot, __fmul_rn(d_weights[c], s));
  }
  total = sum_of_warp(total), dot = sum_of_warp(dot);
  float epsilon = kWeightEpsilon, dot_of_others = dot;
  if (scoring.epsilon_counts(total)) {
    epsilon = __fmul_rn(kWeightEpsilon, sum_of_scores());
    dot_of_others = scoring.dot_of_epsilon(total, dot, epsilon);
    dense = true;
  }
  const auto of_others = [&](int64_t e) {
    return scoring.gradient_of_others(scoring.score(logit(e), max, sum), dot_of_others);
  };
  for (int e = lane; e < E; e += 32) row[e] = dense ? of_others(e) : 0.0f;
  __syncwarp();
  for (int c = lane; c < k; c += 32) {
    const int64_t e = experts[c];
    if (e < 0 || e >= E) continue;
    const float s = scoring.score(logit(e), max, sum);
    row[e] = scoring.gradient(s, d_weights[c], total, dot, epsilon);
  }
  __syncwarp();
  for (int e = lane; e < E; e += 32) d_logits[t * E + e] = static_cast<Element>(row[e]);
}

}  // namespace grouped_linear::cuda
