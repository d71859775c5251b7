// BF16 and FP16 operands.
#include "cuda/gemm/sm90/launch.h"

namespace grouped_linear::cuda::sm90 {
namespace {

constexpr int kLine = kSwizzleBytes / 2;  // elements in a line of 128 bytes

template <typename T, Grouping grouping, Major a_major, Major b_major>
using Config =
    GemmConfig<T, T, kTile16Bit.n, kTile16Bit.stages, Scaling::kNone, grouping, a_major, b_major>;

// out = a @ b[e].T. b is dense along K (fprop) or along N (dgrad, whose b is a view of w).
template <typename T>
void run_m_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const bool n_dense = gemm.b.stride(1) == 1 && gemm.b.stride(2) != 1;
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, n_dense ? 1 : 2);
  const int64_t K = a.size(1), N = b.size(1), E = b.size(0);
  const auto launch_with = [&]<typename Gemm>(std::type_identity<Gemm>, const TensorMaps& maps) {
    if (gemm.a_rows)
      launch_gathering<Gemm, Operand::kA>(launch, maps, gemm, {},
                                          gathered_rows(launch.op(), gemm.a_rows, a));
    else
      launch_gemm<Gemm>(launch, maps, gemm, {}, gemm.epilogue);
  };
  const ScalarType dtype = a.scalar_type();
  const auto map_of = [&](const Tensor& t, std::initializer_list<int64_t> sizes,
                          std::initializer_list<int64_t> strides,
                          std::initializer_list<uint32_t> box) {
    return tensor_map(launch.op(), t.data_ptr(), dtype, 2, sizes, strides, box, true);
  };
  const CUtensorMap map_a = map_of(a, {K, a.size(0)}, {map_stride(a, 0, K)}, {kLine, kTileM / 2});
  const int64_t group_stride = map_stride(b, 0, N * K);
  if (b.stride(2) == 1) {  // always where tma_readable made a copy
    using Gemm = Config<T, Grouping::kM, Major::kK, Major::kK>;
    const auto map_of_b = [&](uint32_t cols) {
      return map_of(b, {K, N, E}, {map_stride(b, 1, K), group_stride}, {kLine, cols, 1});
    };
    const CUtensorMap map_b = map_of_b(Gemm::kTileN / Gemm::kBPieces);
    launch_with(std::type_identity<Gemm>(),
                {map_a, map_b, map_a, map_b, map_a, map_of_b(kNarrowTileN)});
  } else {
    const CUtensorMap map_b =
        map_of(b, {N, K, E}, {map_stride(b, 2, N), group_stride}, {kLine, kLine, 1});
    launch_with(std::type_identity<Config<T, Grouping::kM, Major::kK, Major::kMN>>(),
                {map_a, map_b, map_a, map_b, map_a, map_b});
  }
}

// out[e] = a.T @ b over each group's rows.
template <typename T>
void run_k_grouped(const Launch& launch, const GroupedGemm& gemm) {
  using Gemm = Config<T, Grouping::kK, Major::kMN, Major::kMN>;
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, 1);
  const auto map_of = [&](const Tensor& t) {
    return ragged_map(launch.op(), map_address(t, gemm.epilogue.out), t.scalar_type(), 2, t.size(1),
                      map_stride(t, 0, t.size(1)), Gemm::kTileK);
  };
  const CUtensorMap map_a = map_of(a), map_b = map_of(b);
  const TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_b};
  if (gemm.a_rows)
    launch_gathering<Gemm, Operand::kA>(launch, maps, gemm, {},
                                        gathered_rows(launch.op(), gemm.a_rows, a));
  else if (gemm.b_rows)
    launch_gathering<Gemm, Operand::kB>(launch, maps, gemm, {},
                                        gathered_rows(launch.op(), gemm.b_rows, b));
  else
    launch_gemm<Gemm>(launch, maps, gemm, {}, gemm.epilogue);
}

}  // namespace

void run_16bit(const Launch& launch, const GroupedGemm& gemm) {
  const bool bfloat16 = gemm.a.scalar_type() == ScalarType::BFloat16;
  if (gemm.grouping == Grouping::kM)
    return bfloat16 ? run_m_grouped<__nv_bfloat16>(launch, gemm)
                    : run_m_grouped<__half>(launch, gemm);
  return bfloat16 ? run_k_grouped<__nv_bfloat16>(launch, gemm)
                  : run_k_grouped<__half>(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm90
