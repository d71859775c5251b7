// SPDX-License-Identifier: Apache-2.0
// M-grouped GEMMs in BF16 of a weight in MXFP4.
#include "cuda/gemm/sm80/launch.h"

namespace grouped_linear::cuda::sm80 {
namespace {

template <GroupRows rows, Major b_major>
using Config = GemmConfig<__nv_bfloat16, __nv_bfloat16, Scaling::kNone, Grouping::kM, rows,
                          Major::kK, b_major, true>;

template <GroupRows rows>
void run(const Launch& launch, const Mxfp4Operands& operands, const GroupedGemm& gemm,
         Major b_major) {
  if (b_major == Major::kK)
    launch_gemm<Config<rows, Major::kK>>(launch, operands, gemm, gemm.epilogue);
  else
    launch_gemm<Config<rows, Major::kMN>>(launch, operands, gemm, gemm.epilogue);
}

}  // namespace

void run_mxfp4(const Launch& launch, const GroupedGemm& in, Major b_major) {
  const GroupedGemm gemm = gather_before(launch, in);
  const Tensor a = vector_readable(gemm.a, 1), codes = vector_readable(as_dense(gemm.b), 2);
  const Tensor scales = as_dense(*gemm.scale_b);
  const Mxfp4Operands operands{
      view_of(a, -1, 0),
      {static_cast<const uint4*>(codes.const_data_ptr()), scales.const_data_ptr<uint8_t>(),
       static_cast<int>(scales.size(1)), static_cast<int>(scales.size(2))}};
  if (has_few_rows(gemm)) return run<GroupRows::kFew>(launch, operands, gemm, b_major);
  run<GroupRows::kMany>(launch, operands, gemm, b_major);
}

}  // namespace grouped_linear::cuda::sm80
