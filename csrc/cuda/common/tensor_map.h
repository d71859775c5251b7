// SPDX-License-Identifier: Apache-2.0
// Tensor maps: descriptors with which TMA loads and stores tiles, encoded on the host for each
// launch.
#pragma once

#include <cuda.h>

#include <initializer_list>

#include "checks.h"
#include "cuda/common/device.h"

namespace grouped_linear::cuda {

inline CUtensorMapDataType tensor_map_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ScalarType::Half: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case ScalarType::Float: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

// sizes and box: elements, innermost first. strides: elements, of every dimension but the
// innermost.
inline CUtensorMap tensor_map(const char* op, const void* first, ScalarType dtype, int64_t item,
                              std::initializer_list<int64_t> sizes,
                              std::initializer_list<int64_t> strides,
                              std::initializer_list<uint32_t> box, CUtensorMapSwizzle swizzle) {
  cuuint64_t map_sizes[5], map_strides[5];
  cuuint32_t map_box[5], steps[5];
  int rank = 0;
  for (const int64_t size : sizes) map_sizes[rank++] = static_cast<cuuint64_t>(size);
  int d = 0;
  for (const int64_t stride : strides) map_strides[d++] = static_cast<cuuint64_t>(stride * item);
  d = 0;
  for (const uint32_t extent : box) {
    map_box[d] = extent;
    steps[d++] = 1;
  }

  static const auto encode_tiled =
      driver_function<decltype(cuTensorMapEncodeTiled)>(op, "cuTensorMapEncodeTiled", 12000);
  CUtensorMap map{};
  const auto encode = [&] {
    return encode_tiled(&map, tensor_map_dtype(dtype), rank, const_cast<void*>(first), map_sizes,
                        map_strides, map_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  // A thread that has only called cudaGetDevice, as a new thread of autograd, has no context.
  // cudaSetDevice makes one. Called for every launch it would cost 0.1 us (CUDA 13.0, driver 580).
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    int device = 0;
    check_cuda(op, "no current CUDA device", cudaGetDevice(&device));
    check_cuda(op, "no CUDA context on the current device", cudaSetDevice(device));
    result = encode();
  }
  check(result == CUDA_SUCCESS, op, ": no tensor map for these sizes and strides, driver error ",
        static_cast<int>(result));
  return map;
}

inline CUtensorMap tensor_map(const char* op, const void* first, ScalarType dtype, int64_t item,
                              std::initializer_list<int64_t> sizes,
                              std::initializer_list<int64_t> strides,
                              std::initializer_list<uint32_t> box, bool swizzled) {
  return tensor_map(op, first, dtype, item, sizes, strides, box,
                    swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace grouped_linear::cuda
