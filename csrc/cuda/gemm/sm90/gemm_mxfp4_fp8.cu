// fprop in FP8 with a weight in MXFP4.
#include "cuda/gemm/sm90/kernel_mxfp4_fp8.cuh"
#include "cuda/gemm/sm90/launch.h"
#include "cuda/gemm/sm90/mxfp4_distances.cuh"

namespace grouped_linear::cuda::sm90 {
namespace {

using E4m3 = __nv_fp8_e4m3;

template <bool low_rank>
using Mxfp4Fp8Gemm = GemmConfig<E4m3, Mxfp4<E4m3, kTileMxfp4Fp8.m>,
                                GemmTraits{.grouping = Grouping::kM,
                                           .scaling = Scaling::kScale128x128,
                                           .a_major = Major::kK,
                                           .b_major = Major::kK,
                                           .gathers = false,
                                           .transposed = false,
                                           .store_work = StoreWork::kStore,
                                           .tile_n = kTileMxfp4Fp8.n,
                                           .stages = kTileMxfp4Fp8.stages,
                                           .low_rank = low_rank}>;

// What the kernel reads in place of w's scales, see mxfp4_distances_kernel.
struct Distances {
  Tensor words, blocks;
};
Distances distances(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor scale = as_dense(*gemm.scale_b);
  const int64_t E = scale.size(0), N = scale.size(1), row_bytes = scale.size(2);
  const int64_t k_blocks = ceil_div(row_bytes, 4);
  const Tensor words = new_tensor(scale, {E, k_blocks, round_up(N, 4)}, ScalarType::Int);
  const Tensor blocks = new_tensor(scale, {E, ceil_div(N, kBlock), k_blocks}, ScalarType::Float);
  const dim3 grid(static_cast<unsigned>(ceil_div(N, kScaleRows)),
                  static_cast<unsigned>(ceil_div(row_bytes, kScaleBytesAtOnce)),
                  static_cast<unsigned>(E));
  launch.run(mxfp4_distances_kernel, grid, kScaleThreads, 0, scale.const_data_ptr<uint8_t>(),
             gemm.offs.const_data_ptr<int32_t>(), static_cast<uint32_t*>(words.data_ptr()),
             static_cast<float*>(blocks.data_ptr()), static_cast<int>(N),
             static_cast<int>(words.size(2)), static_cast<int>(row_bytes));
  return {words, blocks};
}

template <bool low_rank>
void launch_mxfp4_fp8(const Launch& launch, const GroupedGemm& gemm) {
  using Gemm = Mxfp4Fp8Gemm<low_rank>;
  static_assert(Gemm::kTileM == kTileMxfp4Fp8.m && Gemm::kTileK == kTileMxfp4Fp8.k);
  constexpr uint32_t box_rows = kPartRows<Gemm> / kClusterSize;
  const char* op = launch.op();
  const GemmShape& shape = gemm.shape;
  check(shape.T <= RaggedRows::kOrigin, op, ": at most ", RaggedRows::kOrigin,
        " rows are supported on CUDA, got ", shape.T);
  const Tensor a = tma_readable(gemm.a, 1), codes = tma_readable(gemm.b, 2);
  const Tensor scale_a = with_dense_rows(*gemm.scale_a);
  const auto [words, blocks] = distances(launch, gemm);
  const int64_t E = codes.size(0), N = codes.size(1), bytes = codes.size(2);

  const CUtensorMap map_a =
      tensor_map(op, a.data_ptr(), a.scalar_type(), 1, {a.size(1), a.size(0)},
                 {map_stride(a, 0, a.size(1))}, {kSwizzleBytes, box_rows}, true);
  const CUtensorMap map_b =
      tensor_map(op, codes.data_ptr(), ScalarType::Byte, 1, {bytes, N, E},
                 {map_stride(codes, 1, bytes), map_stride(codes, 0, N * bytes)},
                 {Gemm::kPackedK / 2, Gemm::kTileN, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
  const int64_t k_blocks = words.size(1), stride = words.size(2);
  const CUtensorMap map_distances =
      tensor_map(op, words.data_ptr(), ScalarType::Float, 4, {N, k_blocks, E},
                 {stride, k_blocks * stride}, {Gemm::kTileN, 1, 1}, false);
  TensorMaps maps{map_a, map_b, map_a, map_distances, map_a, map_b};
  if (gemm.epilogue.aligned) maps.out = out_map<Gemm>(op, gemm.epilogue, shape.cols);
  const Mxfp4Fp8Scales scales{
      scale_a.const_data_ptr<float>(),
      map_stride(scale_a, 0, scale_a.size(1)),
      {static_cast<const float*>(blocks.data_ptr()), blocks.stride(0), blocks.stride(1), 1}};
  Mxfp4LowRank<Gemm> low{};
  std::optional<Tensor> low_a;
  if constexpr (low_rank) {
    low_a = tma_readable(*gemm.low.a, 1);
    const Tensor& low_b = *gemm.low.b;
    const int64_t r = low_a->size(1);
    low.operands.a = tensor_map(op, low_a->data_ptr(), low_a->scalar_type(), 2, {r, low_a->size(0)},
                                {map_stride(*low_a, 0, r)}, {kLowRankK, box_rows}, true);
    low.operands.r = static_cast<int>(r);
    low.operands.bfloat16 = low_a->scalar_type() == ScalarType::BFloat16;
    low.b = static_cast<const uint16_t*>(low_b.const_data_ptr());
    low.group_stride = low_b.stride(0), low.col_stride = low_b.stride(1),
    low.r_stride = low_b.stride(2);
  }
  constexpr auto kernel = mxfp4_fp8_gemm_kernel<Gemm>;
  launch.allow_shared_bytes<kernel>(shared_bytes<Gemm>());
  const int clusters = launch.multiprocessors() / kClusterSize;
  launch.run(kernel, clusters * kClusterSize, Gemm::kThreads, shared_bytes<Gemm>(), maps,
             gemm.offs.const_data_ptr<int32_t>(), low, scales, gemm.epilogue,
             tile_counts<Gemm>(shape), shape);
}

}  // namespace

void run_mxfp4_fp8(const Launch& launch, const GroupedGemm& in) {
  const GroupedGemm gemm = gather_before(launch, in);
  if (gemm.low.a)
    launch_mxfp4_fp8<true>(launch, gemm);
  else
    launch_mxfp4_fp8<false>(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm90
