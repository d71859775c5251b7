// SPDX-License-Identifier: Apache-2.0
// M-grouped GEMMs of a weight in MXFP4 whose groups have few rows.
#include "cuda/gemm/sm90/gemm.h"
#include "cuda/gemm/sm90/kernel_mxfp4_few_rows.cuh"

namespace grouped_linear::cuda::sm90 {

void run_mxfp4_few_rows(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor a = vector_readable(gemm.a, 1), codes = vector_readable(gemm.b, 2);
  const Tensor dense = as_dense(*gemm.scale_b);
  const Tensor scales = is_aligned(dense) ? dense : dense_copy(dense);
  mxfp4_few_rows::Operands in{};
  in.a = static_cast<const uint16_t*>(a.const_data_ptr());
  in.a_stride = a.stride(0);
  in.rows = row_numbers(gemm.a_rows, a);
  in.codes = codes.const_data_ptr<uint8_t>();
  in.group_stride = codes.stride(0), in.row_stride = codes.stride(1);
  in.scales = scales.const_data_ptr<uint8_t>();
  std::optional<Tensor> low_a;
  if (gemm.low.a) {
    low_a = vector_readable(*gemm.low.a, 1);
    const Tensor& low_b = *gemm.low.b;
    in.a_low = static_cast<const uint16_t*>(low_a->const_data_ptr());
    in.a_low_stride = low_a->stride(0);
    in.b_low = static_cast<const uint16_t*>(low_b.const_data_ptr());
    in.b_low_group_stride = low_b.stride(0), in.b_low_col_stride = low_b.stride(1),
    in.b_low_r_stride = low_b.stride(2);
    in.r = static_cast<int>(low_a->size(1));
  }
  constexpr auto kernel = mxfp4_few_rows::mxfp4_few_rows_kernel;
  launch.allow_shared_bytes<kernel>(sizeof(mxfp4_few_rows::SharedStorage));
  launch.run(kernel, static_cast<unsigned>(launch.multiprocessors()), mxfp4_few_rows::kThreads,
             static_cast<int>(sizeof(mxfp4_few_rows::SharedStorage)), in,
             gemm.offs.const_data_ptr<int32_t>(), gemm.epilogue, gemm.shape);
}

}  // namespace grouped_linear::cuda::sm90
