// Descriptors of tensors for the copy engine (TMA), made on the host for each launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "checks.h"

namespace grouped_linear::cuda {

inline CUtensorMapDataType tensor_map_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ScalarType::Half: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case ScalarType::Float: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

// The driver's entry point, looked up at run time: the library does not link to libcuda, so it also
// loads where there is no driver.
inline decltype(&cuTensorMapEncodeTiled) encode_tiled() {
  static const auto entry = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return entry;
}

// sizes and box: elements, innermost first. strides: elements, of every dimension but the
// innermost.
inline CUtensorMap tensor_map(const char* op, const void* first, ScalarType dtype, int64_t item,
                              std::initializer_list<int64_t> sizes,
                              std::initializer_list<int64_t> strides,
                              std::initializer_list<uint32_t> box, bool swizzled) {
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
  CUtensorMap map{};
  const auto encode = encode_tiled();
  check(encode != nullptr, op, ": the CUDA driver has no tensor maps, it must be 12.0 or newer");
  const CUresult result =
      encode(&map, tensor_map_dtype(dtype), rank, const_cast<void*>(first), map_sizes, map_strides,
             map_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, op, ": no tensor map for these sizes and strides, driver error ",
        static_cast<int>(result));
  return map;
}

}  // namespace grouped_linear::cuda
