// SPDX-License-Identifier: Apache-2.0
// An epilogue that goes on with elementwise arithmetic: SwiGLU after gate and up, or its gradient
// after down's dgrad.
//
// The math warps only round their accumulators into the epilogue's buffers. The store warps do the
// arithmetic, with all their threads, while the math warps compute the next tile: a tile of 128 x
// 256 takes 1024 cycles of tensor cores a k-block, in which the SM's other units have next to
// nothing to do. In the math warps the same arithmetic would stop the tensor cores.
//
// SwiGLU of a tile is some 7000 instructions of each store warp, and its gradient some 25000, to be
// compared with 32000 cycles of tensor cores for K = 2048.
#pragma once

#include "cuda/gemm/sm90/epilogue.cuh"
#include "cuda/gemm/sm90/scheduler.cuh"
#include "cuda/swiglu/swiglu.cuh"

namespace grouped_linear::cuda::sm90 {

// The address of eight columns, the number `piece` of a row, in the buffers of a warpgroup.
template <typename T, typename Buffers>
__device__ __forceinline__ const T* eight_at(const Buffers& buffers, int row, int piece) {
  return reinterpret_cast<const T*>(
      &buffers[piece / 8][row * kSwizzleBytes + ((piece ^ row) % 8) * 16]);
}

// Zeros in the rows from the last group's end on, of two dense matrices. The store warps of all
// blocks share them, and write them while they wait for tiles.
class TailZeros {
 public:
  // warp: this one of `warps`.
  __device__ TailZeros(int warp, int warps)
      : at_(warp * 32 + threadIdx.x % 32), step_(warps * 32) {}

  template <typename T>
  __device__ void first(T* matrix, int cols, int end, int rows) {
    first_ = vectors(matrix, cols, end);
    first_count_ = count_ = count(matrix, cols, end, rows);
  }
  template <typename T>
  __device__ void second(T* matrix, int cols, int end, int rows) {
    second_ = vectors(matrix, cols, end) - first_count_;
    count_ = first_count_ + count(matrix, cols, end, rows);
  }

  // Whether any lane has more to write.
  __device__ bool remaining() const { return __any_sync(0xffffffff, at_ < count_); }

  __device__ void write_some() {
#pragma unroll 1
    for (int i = 0; i < 8 && at_ < count_; ++i, at_ += step_) {
      uint4* to = first_ + at_;
      if (at_ >= first_count_) to = second_ + at_;
      *to = make_uint4(0, 0, 0, 0);
    }
  }

 private:
  template <typename T>
  static __device__ uint4* vectors(T* matrix, int cols, int end) {
    return reinterpret_cast<uint4*>(matrix + static_cast<int64_t>(end) * cols);
  }
  template <typename T>
  static __device__ int64_t count(T*, int cols, int end, int rows) {
    return static_cast<int64_t>(rows - end) * cols * sizeof(T) / 16;
  }

  uint4 *first_ = nullptr, *second_ = nullptr;
  int64_t first_count_ = 0, count_ = 0, at_;
  int step_;
};

// The buffers of all the tile's columns: a warpgroup's, or swapped both's.
template <typename Config>
using RowBuffers = uint8_t[Config::kTileN / 64][Config::kEpilogueRows * kSwizzleBytes];

// A store warp's part of a tile: rows in the same buffers that belong to the group.
template <typename Config>
struct StoredRows {
  const RowBuffers<Config>& buffers;
  const WorkTile& tile;
  int row;         // of the output matrix, where the buffers' rows start
  int begin, end;  // from there
};

// Elementwise says what is computed:
//   Arguments   EpilogueArguments with more
//   kRegisters  of warpgroup 0
//   add_bias    to a thread's accumulators
//   tail        names the zeros past the last group
//   store       writes what it computes from the buffers; by a whole warp, without a wait for TMA's
//               reads of the buffers. Only the first warp of a buffer's rows has begin = 0.
//
// Where warp 1 stores too, it takes a third of the rows of both warpgroups, and schedules. Swapped,
// all three share the tile's rows.
template <typename Elementwise>
struct ElementwiseEpilogue {
  using Arguments = typename Elementwise::Arguments;
  static constexpr int kRegisters = Elementwise::kRegisters;

  static __device__ __forceinline__ int subtiles(const Arguments&) { return 1; }

  static __device__ void prefetch(const TensorMaps& maps) { prefetch_tensor_map(&maps.out); }

  template <typename Config, typename Params, typename Sync>
  static __device__ __forceinline__ void apply(float (&accum)[Config::kTileN / 2],
                                               SharedStorage<Config>& shared, const Params& params,
                                               const WorkTile& tile, bool, const Sync& sync) {
    static_assert(Config::kElementwise);
    auto& buffers = shared.epilogue[reread_thread_index() / 128 - 1][0];
    Elementwise::template add_bias<Config>(accum, params.epilogue, params.shape, tile);
    sync(0, [&] {
      write_buffers<typename Config::A, Config>(accum, buffers, 0);
      fence_proxy_async();
    });
  }

  // warp: 1, or 2 and 3 for the warpgroups 0 and 1.
  template <typename Config, typename Params>
  static __device__ void run_store_warp(SharedStorage<Config>& shared, const Params& params,
                                        int warp) {
    const Arguments& args = params.epilogue;
    const GemmShape& shape = params.shape;
    constexpr Roles roles = Config::kRoles;
    // Three warps share the 128 rows of both warpgroups. SwigluBackward loads four rows at a time,
    // so two of them have a third, up to whole fours: 44. The one that helps has the other 2 x 20.
    constexpr int warps = roles.count(Role::kStore);
    constexpr int own_rows = warps == 3 ? (2 * kWgmmaM / 3 + 3) / 4 * 4 : kWgmmaM;
    constexpr bool swapped = Config::kSwapped;
    const bool helps = warp == 1, both = helps || swapped;
    const int first = both ? 0 : warp - 2, last = both ? kMathWarpgroups : warp - 1;
    const int begin = helps ? own_rows : 0, end = helps ? kWgmmaM : own_rows;
    TailZeros zeros(blockIdx.x * warps + 3 - warp, gridDim.x * warps);
    Elementwise::template tail<Config>(zeros, args, shape, shared.groups.row_end[shape.E - 1]);
    Scheduler<Config> scheduler(shared, params);
    constexpr bool may_schedule = roles.schedules(Role::kStore);
    const bool schedules =
        may_schedule && warp == roles.scheduler && shared.rank == 0 && threadIdx.x % 32 == 0;
    if (schedules) scheduler.begin();
    uint32_t phase = 0;
#pragma unroll 1
    for (int number = 0;; ++number, phase ^= 1) {
      __syncwarp();  // every lane has read the buffers
      if (elect_one()) {
        bulk_wait_read<0>();
        for (int i = first; i < last; ++i) mbarrier_arrive(&shared.epilogue_empty[i]);
      }
      if (schedules) scheduler.publish_before(number + Config::kTilesAhead);
      __syncwarp();
#pragma unroll 1
      for (int i = first; i < last; ++i) {
        uint64_t* full = &shared.epilogue_full[i];
        while (zeros.remaining() && !__any_sync(0xffffffff, mbarrier_test(full, phase)))
          zeros.write_some();
        mbarrier_wait(full, phase);
        const WorkTile tile = shared.tiles[number % kTileSlots];
        if (tile.k_blocks < 0) {
          while (zeros.remaining()) zeros.write_some();
          return;
        }
        if (swapped && i + 1 < last) continue;  // a row has columns of both warpgroups
        const int row = tile.row + (swapped ? 0 : i * kWgmmaM), rows = tile.row_end - row;
        const int from = swapped ? rows * (warp - 1) / warps : begin;
        const int to = swapped ? rows * warp / warps : min(rows, end);
        if (to <= from || tile.col >= shape.cols) continue;
        const auto& buffers =
            reinterpret_cast<const RowBuffers<Config>&>(shared.epilogue[swapped ? 0 : i]);
        Elementwise::template store<Config>({buffers, tile, row, from, to}, params.maps, args,
                                            shape);
      }
    }
  }
};

// h = SwiGLU of gate and up. The output [T, 2 F] is gate_up, with bias, which may be left
// unwritten. A tile has the same columns of gate and of up (kGated in config.h) or, interleaved,
// neighbours.
template <typename Form, bool interleaved>
struct SwigluForward {
  struct Arguments : EpilogueArguments {
    void* h;  // [T, F] of the operands' type
    bool keep_gate_up;
    Form form;
  };
  static constexpr int kRegisters = 72;

  template <typename Config>
  static __device__ __forceinline__ void add_bias(float (&accum)[Config::kTileN / 2],
                                                  const Arguments& args, const GemmShape& shape,
                                                  const WorkTile& tile) {
    using T = typename Config::A;
    static_assert(interleaved != Config::kGated);
    if (args.bias == nullptr) return;
    const T* bias = static_cast<const T*>(args.bias) + tile.group * args.bias_stride;
    constexpr int parts = interleaved ? 1 : 2;
    const int cols = interleaved ? shape.cols : shape.cols / 2;
    sm90::add_bias<T, Config, Config::kTileN / parts>(accum, bias,
                                                      interleaved ? tile.col : tile.col / 2, cols);
  }

  template <typename Config>
  static __device__ __forceinline__ void tail(TailZeros& zeros, const Arguments& args,
                                              const GemmShape& shape, int end) {
    using T = typename Config::A;
    zeros.first(static_cast<T*>(args.h), shape.cols / 2, end, shape.T);
    if (args.keep_gate_up) zeros.second(static_cast<T*>(args.out), shape.cols, end, shape.T);
  }

  template <typename Config>
  static __device__ __forceinline__ void store(const StoredRows<Config>& rows,
                                               const TensorMaps& maps, const Arguments& args,
                                               const GemmShape& shape) {
    using T = typename Config::A;
    constexpr int lines = Config::kTileN / 64, line_cols = kSwizzleBytes / sizeof(T);
    constexpr int pieces = Config::kTileN / 16;  // of a row of h
    const int F = shape.cols / 2, col = rows.tile.col / 2, lane = threadIdx.x % 32;
    if (args.keep_gate_up && rows.begin == 0 && elect_one()) {
      const RaggedRows ragged(rows.row, rows.tile.row_end);
      const auto store_line = [&](int i, int at) {
        tma_store_4d(&maps.out, rows.buffers[i], at, ragged.c1, ragged.c2, ragged.kOrigin);
      };
      // Gate and up consist of whole lines; interleaved, both together do.
#pragma unroll
      for (int i = 0; i < lines; ++i) {
        if constexpr (interleaved) {
          const int at = rows.tile.col + i * line_cols;
          if (at < shape.cols) store_line(i, at);
        } else {
          const int at = col + i % (lines / 2) * line_cols;
          if (at < F) store_line(i, (i < lines / 2 ? 0 : F) + at);
        }
      }
      bulk_commit();
    }
    __syncwarp();
    const int piece = lane % pieces;
    if (col + 8 * piece >= F) return;
    const int first = interleaved ? 2 * piece : piece,
              second = interleaved ? first + 1 : pieces + piece;
    T* to = static_cast<T*>(args.h) + static_cast<int64_t>(rows.row) * F + col + 8 * piece;
#pragma unroll 2
    for (int r = rows.begin + lane / pieces; r < rows.end; r += 32 / pieces) {
      FragmentRow<T> gate, up;
      Fragment<T>::load_row(eight_at<T>(rows.buffers, r, first), true, gate);
      Fragment<T>::load_row(eight_at<T>(rows.buffers, r, second), true, up);
      swiglu_row<T>(Approximate<Form>(args.form), gate, up, [](float h) { return h; });
      Fragment<T>::store_row(gate, to + static_cast<int64_t>(r) * F);
    }
  }
};

// The gradient of SwiGLU, of dh that the GEMM computes: what swiglu_grad returns. d_weight is left
// as partial sums of 64 columns each, whatever the tile's width, so that a row's sum does not
// depend on other rows.
template <typename Form, bool interleaved>
struct SwigluBackward {
  struct Arguments : EpilogueArguments {
    const void* gate_up;  // [T, 2 F] of the operands' type
    int64_t stride;       // elements between its rows, which are aligned to 16 bytes
    const float* weight;  // [T]
    void *d_gate_up, *h;  // [T, 2 F], [T, F]
    float* d_weight;      // [F / 64, T]
    Form form;
  };
  static constexpr int kRegisters = 168;

  template <typename Config>
  static __device__ __forceinline__ void add_bias(float (&)[Config::kTileN / 2], const Arguments&,
                                                  const GemmShape&, const WorkTile&) {}

  template <typename Config>
  static __device__ __forceinline__ void tail(TailZeros& zeros, const Arguments& args,
                                              const GemmShape& shape, int end) {
    using T = typename Config::A;
    zeros.first(static_cast<T*>(args.d_gate_up), 2 * shape.cols, end, shape.T);
    zeros.second(static_cast<T*>(args.h), shape.cols, end, shape.T);
  }

  template <typename Config>
  static __device__ __forceinline__ void store(const StoredRows<Config>& rows, const TensorMaps&,
                                               const Arguments& args, const GemmShape& shape) {
    using T = typename Config::A;
    constexpr int pieces = Config::kTileN / 8, step = 32 / pieces;
    const int F = shape.cols, lane = threadIdx.x % 32, piece = lane % pieces;
    const int col = rows.tile.col + 8 * piece;
    const bool inside = col < F;  // of a row; F consists of whole lines
    // Where eight gates are in a row of gate_up, and how far their ups are; interleaved, the halves
    // of 16 neighbours.
    const int gate_col = inside ? (interleaved ? 2 : 1) * col : 0, up = interleaved ? 8 : F;
    const auto* from = static_cast<const T*>(args.gate_up) + gate_col;
    // Gate and up of so many rows are on their way while others are computed.
    constexpr int ahead = 4;
    FragmentRow<T> next_gate[ahead], next_up[ahead];
    float next_weight[ahead];
    const auto prefetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int r = min(first + i * step + lane / pieces, rows.end - 1);
        const T* at = from + (rows.row + r) * args.stride;
        Fragment<T>::load_row(at, true, next_gate[i]);
        Fragment<T>::load_row(at + up, true, next_up[i]);
        next_weight[i] = args.weight[rows.row + r];
      }
    };
    prefetch(rows.begin);
    with_arithmetic(args.form, [&](const auto& exact) {
      const Approximate<std::decay_t<decltype(exact)>> arithmetic(exact);
#pragma unroll 1
      for (int first = rows.begin; first < rows.end; first += ahead * step) {
        FragmentRow<T> gates[ahead], ups[ahead];
        float weight[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          copy_row<T>(gates[i], next_gate[i]);
          copy_row<T>(ups[i], next_up[i]);
          weight[i] = next_weight[i];
        }
        prefetch(first + ahead * step);
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          if (first + i * step >= rows.end) break;
          const int r = first + i * step + lane / pieces;
          const bool stored = inside && r < rows.end;
          FragmentRow<T> dh, h;
          WeightedRow row{weight[i], 0};
          Fragment<T>::load_row(eight_at<T>(rows.buffers, min(r, Config::kEpilogueRows - 1), piece),
                                true, dh);
          if constexpr (interleaved) deinterleave<T>(gates[i], ups[i]);
          swiglu_grad_row<T>(arithmetic, row, dh, gates[i], ups[i], h);
          if constexpr (interleaved) interleave<T>(gates[i], ups[i]);
          if (stored) {
            const int64_t at = rows.row + r;
            T* to = static_cast<T*>(args.d_gate_up) + at * 2 * F + gate_col;
            Fragment<T>::store_row(gates[i], to);
            Fragment<T>::store_row(ups[i], to + up);
            Fragment<T>::store_row(h, static_cast<T*>(args.h) + at * F + col);
          }
          float sum = row.d_weight;
#pragma unroll
          for (int distance = 4; distance > 0; distance /= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, distance));
          if (stored && lane % 8 == 0)
            args.d_weight[static_cast<int64_t>(col / 64) * shape.T + rows.row + r] = sum;
        }
      }
    });
  }
};

}  // namespace grouped_linear::cuda::sm90
