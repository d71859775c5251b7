// SPDX-License-Identifier: Apache-2.0
// What a kernel is launched with, as every role sees it.
#pragma once

#include <cstdint>

#include "cuda/gemm/sm90/tensor_maps.cuh"
#include "cuda/gemm/stamped_counter.cuh"
#include "cuda/gemm/tile_order.cuh"

namespace grouped_linear::cuda::sm90 {

// b's 128 x 128 scales by their strides, in elements: between groups, between scale blocks of b's
// rows (the output's columns), and between scale blocks of K.
struct Scale128x128View {
  const float* scale;
  int64_t group_stride, row_stride, k_stride;
};

// Slots count from 1. A slot has a flag and accumulators of every math warp of both blocks.
struct SplitKWorkspace {
  StampedTickets tickets;  // see Scheduler. Null: static rounds alone
  uint64_t* flags;         // K-grouped, as the accumulators
  float* accumulators;
};

// References to the kernel's parameters: in one struct by value, ptxas makes other code.
template <typename ProducerArguments, typename EpilogueArguments>
struct KernelParams {
  const TensorMaps& maps;
  const ProducerArguments& producer;
  const Scale128x128View& scale_b;
  const EpilogueArguments& epilogue;
  const SplitKWorkspace& workspace;
  const TileCounts& counts;  // of the tiles that are taken, wide or narrow ones
  const GemmShape& shape;
};

}  // namespace grouped_linear::cuda::sm90
