// What any architecture's epilogue computes: conversion to the output's type, and whether to
// overwrite.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

// Whether out is overwritten, not added to.
__device__ __forceinline__ bool overwrites(const EpilogueArguments& epilogue) {
  return !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);
}

}  // namespace grouped_linear::cuda
