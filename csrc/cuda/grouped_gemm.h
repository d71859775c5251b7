// What the launchers of the grouped products share.
#pragma once

#include <limits>

#include "kernels/grouped_gemm.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace grouped_linear::cuda {

inline int64_t item_size(const Tensor& t) { return static_cast<int64_t>(t.element_size()); }

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

// t itself where the copy engine can read it: its base and its rows aligned to 16 bytes, its
// elements next to one another along `inner`; else a dense copy (the allocator aligns to 512
// bytes).
inline Tensor tma_operand(const Tensor& t, int64_t inner) {
  bool readable = is_aligned(t) && t.stride(inner) == 1;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (d != inner && t.size(d) > 1)
      readable = readable && t.stride(d) * item_size(t) % 16 == 0 && t.stride(d) >= t.size(inner);
  if (readable) return t;
  return t.is_contiguous() ? torch::stable::clone(t) : torch::stable::contiguous(t);
}

// Dimensions of size 1 may have any stride; the copy engine wants a multiple of 16 bytes.
inline int64_t map_stride(const Tensor& t, int64_t d, int64_t dense) {
  return t.size(d) > 1 ? t.stride(d) : dense;
}

// Without rows nothing is read: any aligned address will do, but a map must have one.
inline const void* map_address(const Tensor& t, const void* any) {
  if (t.numel() > 0) return t.data_ptr();
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(any) & ~uintptr_t{15});
}

// Kernels count rows in 32 bits, as offs does, and round them up to whole tiles.
inline int row_count(const char* op, int64_t rows) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max() - kBlock;
  check(rows <= most, op, ": at most ", most, " rows are supported on CUDA, got ", rows);
  return static_cast<int>(rows);
}

inline Output output_of(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 ? Output::kBFloat16
         : dtype == ScalarType::Half   ? Output::kHalf
                                       : Output::kFloat;
}

inline Epilogue epilogue_of(const Tensor& out, const std::optional<Tensor>& bias, bool accumulate,
                            const std::optional<Tensor>& overwrite) {
  return {out.data_ptr(),
          output_of(out.scalar_type()),
          is_aligned(out),
          bias ? bias->data_ptr() : nullptr,
          bias ? bias->stride(0) : 0,
          accumulate,
          overwrite ? overwrite->const_data_ptr<bool>() : nullptr};
}

template <typename Config>
void launch_gemm(const Launch& launch, const CUtensorMap& a, const CUtensorMap& b,
                 const CUtensorMap& scale_a, const CUtensorMap& scale_b, const Tensor& offs,
                 const WeightScale& weight_scale, const Epilogue& epilogue,
                 const GemmShape& shape) {
  constexpr int shared_bytes = sizeof(GemmShared<Config>);
  static_assert(shared_bytes <= 227 * 1024);
  const auto kernel = grouped_gemm_kernel<Config>;
  // One tile of output a cluster at the least, one block an SM at the most. Group borders add at
  // most a tile of rows each.
  const int64_t row_tiles = Config::kByDepth
                                ? ceil_div(shape.rows, kTileM) * shape.E
                                : ceil_div(shape.rows, kTileM) + std::min(shape.E, shape.T) + 1;
  const int64_t tiles = row_tiles * ceil_div(shape.cols, Config::kTileN * Config::kCluster);
  const int clusters =
      static_cast<int>(std::min<int64_t>(tiles, launch.multiprocessors() / Config::kCluster));
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  kernel<<<clusters * Config::kCluster, kThreads, shared_bytes, launch.stream()>>>(
      a, b, scale_a, scale_b, offs.const_data_ptr<int32_t>(), weight_scale, epilogue, shape);
  launch.check_launched();
}

}  // namespace grouped_linear::cuda
