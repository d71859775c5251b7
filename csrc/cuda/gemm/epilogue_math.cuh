// SPDX-License-Identifier: Apache-2.0
// What any architecture's epilogue computes: conversion to the output's type, whether to overwrite,
// and zeros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/groups.cuh"
#include "cuda/gemm/kernel_arguments.h"

namespace grouped_linear::cuda {

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float(float value) {
  return __float2half_rn(value);
}

// Calls run.operator()<T>() with the output's type.
template <typename Run>
__device__ __forceinline__ void with_output_type(OutputType type, const Run& run) {
  switch (type) {
    case OutputType::kBFloat16: return run.template operator()<__nv_bfloat16>();
    case OutputType::kHalf: return run.template operator()<__half>();
    case OutputType::kFloat: return run.template operator()<float>();
  }
}

// Whether out is overwritten, not added to.
__device__ __forceinline__ bool overwrites(const EpilogueArguments& epilogue) {
  return !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);
}

// M-grouped: zeros in the rows that belong to no group. By all blocks of the grid.
__device__ __forceinline__ void zero_tail_rows(const EpilogueArguments& args,
                                               const GroupTable& groups, const GemmShape& shape) {
  const int64_t row_bytes = int64_t{shape.cols} * (args.type == OutputType::kFloat ? 4 : 2);
  const int64_t begin = groups.row_end[shape.E - 1] * row_bytes, end = shape.T * row_bytes;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  char* out = static_cast<char*>(args.out);
  if (args.aligned) {
    for (int64_t at = begin + thread * 16; at < end; at += threads * 16)
      *reinterpret_cast<uint4*>(out + at) = make_uint4(0, 0, 0, 0);
  } else {
    for (int64_t at = begin + thread * 2; at < end; at += threads * 2)
      *reinterpret_cast<uint16_t*>(out + at) = 0;
  }
}

}  // namespace grouped_linear::cuda
