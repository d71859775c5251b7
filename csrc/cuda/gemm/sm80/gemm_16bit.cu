// SPDX-License-Identifier: Apache-2.0
// BF16 and FP16 operands.
#include "cuda/gemm/sm80/launch.h"

namespace grouped_linear::cuda::sm80 {
namespace {

template <typename T, Grouping grouping, GroupRows rows, Major a_major, Major b_major>
using Config = GemmConfig<T, T, Scaling::kNone, grouping, rows, a_major, b_major>;

// out = a @ b[e].T. b is dense along K (fprop) or along N (dgrad, whose b is a view of w).
template <typename T, GroupRows rows>
void run_m_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const bool n_dense = gemm.b.stride(1) == 1 && gemm.b.stride(2) != 1;
  const Tensor a = vector_readable(gemm.a, 1), b = vector_readable(gemm.b, n_dense ? 1 : 2);
  if (b.stride(2) == 1)  // always where vector_readable made a copy
    launch_gemm<Config<T, Grouping::kM, rows, Major::kK, Major::kK>>(
        launch, {view_of(a, -1, 0), view_of(b, 0, 1)}, gemm, gemm.epilogue);
  else
    launch_gemm<Config<T, Grouping::kM, rows, Major::kK, Major::kMN>>(
        launch, {view_of(a, -1, 0), view_of(b, 0, 2)}, gemm, gemm.epilogue);
}

// out[e] = a.T @ b over each group's rows.
template <typename T>
void run_k_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor a = vector_readable(gemm.a, 1), b = vector_readable(gemm.b, 1);
  launch_gemm<Config<T, Grouping::kK, GroupRows::kMany, Major::kMN, Major::kMN>>(
      launch, {view_of(a, -1, 0), view_of(b, -1, 0)}, gemm, gemm.epilogue);
}

template <typename T>
void run(const Launch& launch, const GroupedGemm& gemm) {
  if (gemm.grouping == Grouping::kK) return run_k_grouped<T>(launch, gemm);
  if (has_few_rows(gemm)) return run_m_grouped<T, GroupRows::kFew>(launch, gemm);
  run_m_grouped<T, GroupRows::kMany>(launch, gemm);
}

}  // namespace

void run_16bit(const Launch& launch, const GroupedGemm& gemm) {
  if (gemm.a.scalar_type() == ScalarType::BFloat16) return run<__nv_bfloat16>(launch, gemm);
  run<__half>(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm80
