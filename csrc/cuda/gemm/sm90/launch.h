// What the launchers of the grouped products share.
#pragma once

#include <limits>

#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/common/tensor_map.h"
#include "cuda/gemm/sm90/grouped_gemm.cuh"
#include "cuda/gemm/sm90/tiles.h"

namespace grouped_linear::cuda {

// t itself where the copy engine can read it: its base and its rows aligned to 16 bytes, its
// elements next to one another along `inner`; else a dense copy.
inline Tensor tma_operand(const Tensor& t, int64_t inner) {
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t item = item_size(t);
  bool readable = is_aligned(t) && strides[inner] == 1;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (d != inner && sizes[d] > 1)
      readable = readable && strides[d] * item % 16 == 0 && strides[d] >= sizes[inner];
  return readable ? t : dense_copy(t);
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
          nullptr,
          nullptr,
          accumulate,
          overwrite ? overwrite->const_data_ptr<bool>() : nullptr};
}

// Rows in pieces of lines of 128 bytes, with ends that the kernel chooses: see RaggedRows.
inline CUtensorMap ragged_map(const char* op, const void* first, ScalarType dtype, int64_t item,
                              int64_t cols, int64_t stride, uint32_t box_rows) {
  constexpr int64_t origin = RaggedRows::kOrigin, most = std::numeric_limits<int32_t>::max();
  return tensor_map(op, first, dtype, item, {cols, origin, most, most},
                    {stride, stride, (int64_t{1} << 34) / item - stride},
                    {static_cast<uint32_t>(kLineBytes / item), box_rows, 1, 1}, true);
}

// out seen as one matrix (all groups' below one another), in boxes of kStagedRows rows and one line of 128 bytes
// (coordinates: column, RaggedRows), or all of a turn's lines (0, row, line, the rest of RaggedRows).
template <typename Config>
CUtensorMap out_map(const char* op, const Epilogue& epilogue, int cols) {
  const int64_t item = epilogue.dtype == Output::kFloat ? 4 : 2;
  const ScalarType dtype = epilogue.dtype == Output::kFloat      ? ScalarType::Float
                           : epilogue.dtype == Output::kBFloat16 ? ScalarType::BFloat16
                                                                 : ScalarType::Half;
  const int64_t line = kLineBytes / item, origin = RaggedRows::kOrigin;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (!sends_whole_rows<Config>(epilogue, cols))
    return ragged_map(op, epilogue.out, dtype, item, cols, cols, Config::kStagedRows);
  return tensor_map(op, epilogue.out, dtype, item, {line, origin, cols / line, most, most},
                    {cols, line, cols, (int64_t{1} << 34) / item - cols},
                    {static_cast<uint32_t>(line), Config::kStagedRows, Config::kTileN / 64, 1, 1},
                    true);
}

// Room for the sums that clusters leave for one another, where tiles may be worth cutting.
template <typename Config>
std::optional<Tensor> room_for_sums(const Tensor& like, const GemmShape& shape, int clusters) {
  constexpr int64_t place_bytes =
      kMarksOfPlace * sizeof(uint64_t) + kSumsOfPlace<Config> * sizeof(float);
  if (!Config::kByDepth || shape.T < 2 * kLeastSteps * Config::kTileK) return {};
  return new_tensor(like, {kTicketWords * int64_t{sizeof(uint64_t)} + clusters * place_bytes},
                    ScalarType::Byte);
}

template <typename Config>
void launch_gemm(const Launch& launch, TensorMaps maps, const Tensor& offs,
                 const SquareScale& square_scale, const Epilogue& epilogue,
                 const GemmShape& shape) {
  constexpr GemmTile tile = Config::kFp8 ? kTileFp8 : kTile16Bit;
  static_assert(tile.rows == kTileM && tile.depth == Config::kTileK && tile.cluster == kCluster);
  constexpr int shared_bytes = sizeof(GemmShared<Config>);
  static_assert(shared_bytes <= 227 * 1024);
  if (Config::kByDepth) row_count(launch.op(), int64_t{shape.rows} * shape.E);  // of all groups
  constexpr auto kernel = grouped_gemm_kernel<Config>;
  maps.out = epilogue.copied ? out_map<Config>(launch.op(), epilogue, shape.cols) : maps.a;
  const int blocks = launch.multiprocessors() / kCluster * kCluster;
  launch.allow_shared_bytes<kernel>(shared_bytes);
  const int clusters = blocks / kCluster;
  const std::optional<Tensor> room = room_for_sums<Config>(offs, shape, clusters);
  PartialSums partial{};
  if (room) {
    partial.ticket = static_cast<uint64_t*>(room->data_ptr());
    partial.marks = partial.ticket + kTicketWords;
    partial.sums = reinterpret_cast<float*>(partial.marks + clusters * kMarksOfPlace);
  }
  launch.run(kernel, blocks, kThreads, shared_bytes, maps, offs.const_data_ptr<int32_t>(),
             square_scale, epilogue, partial, tile_counts<Config>(shape),
             tile_counts<NarrowOf<Config>>(shape), shape);
}

}  // namespace grouped_linear::cuda
