// SPDX-License-Identifier: Apache-2.0
// Zeros in the output: rows that belong to no group, or K-grouped the matrices of groups without
// rows.
//
// They are bulk copies from one zeroed piece of shared memory, issued between the tiles' copies. A
// fill beforehand would cost as many bytes' time beside a kernel that is bound by tensor cores.
#pragma once

#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm90/smem_layout.cuh"

namespace grouped_linear::cuda::sm90 {

// K-grouped: clears the source of the copies, which shares its room with the active groups'
// indices. By one warp.
__device__ __forceinline__ void clear_zeros(Control& control) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < Control::kKGroupedZeroBytes / 16; i += 32)
    reinterpret_cast<uint4*>(control.zeros)[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  __syncwarp();
}

// By one thread a block. Its state is in shared memory, where it costs other roles no registers.
template <typename Config>
class ZeroFill {
 public:
  __device__ ZeroFill(SharedStorage<Config>& shared, const EpilogueArguments& epilogue,
                      const GemmShape& shape)
      : shared_(shared), epilogue_(epilogue), shape_(shape) {}

  __device__ void begin() {
    ZeroFillState& state = shared_.zero_fill;
    state = {};
    state.at = blockIdx.x * int64_t{kPieceBytes};
    state.remaining =
        !Config::kKGrouped || (overwrites(epilogue_) && shared_.active_groups < shape_.E);
    state.range = Config::kKGrouped ? 0 : shared_.groups.row_end[shape_.E - 1] * row_bytes();
  }

  __device__ bool remaining() const { return shared_.zero_fill.remaining; }

  __device__ void finish() {
    while (remaining()) step();
    bulk_wait_read<0>();
  }

  // Zeroes up to eight more pieces.
  __device__ void step() {
    ZeroFillState& state = shared_.zero_fill;
    const int64_t bytes =
        Config::kKGrouped ? shape_.rows * row_bytes() : shape_.T * row_bytes() - state.range;
    bool skips = state.at >= bytes;
    if constexpr (Config::kKGrouped)
      if (state.next_active < shared_.active_groups &&
          shared_.active()[state.next_active] == state.group) {
        ++state.next_active;
        skips = true;
      }
    if (skips) {
      state.remaining = Config::kKGrouped && ++state.group < shape_.E;
      state.range += bytes;
      state.at = blockIdx.x * int64_t{kPieceBytes};
      return;
    }
    int64_t at = state.at;
#pragma unroll 1
    for (int i = 0; i < 8 && at < bytes; ++i, at += gridDim.x * int64_t{kPieceBytes})
      bulk_store(static_cast<char*>(epilogue_.out) + state.range + at, shared_.zeros,
                 static_cast<uint32_t>(min(bytes - at, int64_t{kPieceBytes})));
    bulk_commit();
    bulk_wait_read<1>();
    state.at = at;
  }

 private:
  static constexpr int kPieceBytes = Config::kKGrouped ? Control::kKGroupedZeroBytes : kZeroBytes;
  __device__ int64_t row_bytes() const {
    return shape_.cols * (epilogue_.type == OutputType::kFloat ? 4 : 2);
  }
  SharedStorage<Config>& shared_;
  const EpilogueArguments& epilogue_;
  const GemmShape& shape_;
};

}  // namespace grouped_linear::cuda::sm90
