// SPDX-License-Identifier: Apache-2.0
// M-grouped GEMMs in BF16 and FP8 whose groups have few rows.
#include "cuda/gemm/sm90/kernel_few_rows.cuh"
#include "cuda/gemm/sm90/operands_fp8.h"

namespace grouped_linear::cuda::sm90 {
namespace {

// a, and what numbers its rows.
few_rows::Operands operands_of(const GroupedGemm& gemm, const Tensor& a) {
  few_rows::Operands in{};
  in.a = a.const_data_ptr();
  in.a_stride = map_stride(a, 0, a.size(1));
  in.rows = row_numbers(gemm.a_rows, a);
  return in;
}

// 64 columns of out in a box.
CUtensorMap columns_map(const Launch& launch, const Tensor& b) {
  const int64_t N = b.size(1), K = b.size(2);
  const uint32_t line = kSwizzleBytes / static_cast<uint32_t>(item_size(b));
  return tensor_map(launch.op(), b.data_ptr(), b.scalar_type(), item_size(b), {K, N, b.size(0)},
                    {map_stride(b, 1, K), map_stride(b, 0, N * K)}, {line, few_rows::kTileCols, 1},
                    true);
}

// Eight of gate, the same of up, and so on.
CUtensorMap gated_columns_map(const Launch& launch, const Tensor& b) {
  const int64_t F = b.size(1) / 2, K = b.size(2), stride = map_stride(b, 1, K);
  const uint32_t line = kSwizzleBytes / static_cast<uint32_t>(item_size(b));
  return tensor_map(launch.op(), b.data_ptr(), b.scalar_type(), item_size(b),
                    {K, 8, 2, F / 8, b.size(0)},
                    {stride, F * stride, 8 * stride, map_stride(b, 0, 2 * F * K)},
                    {line, 8, 2, few_rows::kTileCols / 16, 1}, true);
}

template <typename T, typename Work>
void launch_few_rows(const Launch& launch, const GroupedGemm& gemm, const few_rows::Operands& in,
                     const Work& work) {
  constexpr auto kernel = few_rows::few_rows_kernel<T, Work>;
  constexpr int bytes = sizeof(few_rows::SharedStorage);
  launch.allow_shared_bytes<kernel, few_rows::kBlocks != 1>(bytes);
  launch.run(kernel, static_cast<unsigned>(few_rows::kBlocks * launch.multiprocessors()),
             few_rows::kThreads, bytes, in, gemm.offs.const_data_ptr<int32_t>(), work,
             gemm.epilogue, gemm.shape);
}

}  // namespace

bool takes_few_rows(const GroupedGemm& gemm) {
  if (gemm.grouping != Grouping::kM || gemm.low.a || gemm.shape.T > 16 * gemm.shape.E) return false;
  if (gemm.scale_a && is_per_group(*gemm.scale_a)) return false;
  const ScalarType dtype = gemm.a.scalar_type();
  return (dtype == ScalarType::BFloat16 || dtype == ScalarType::Float8_e4m3fn) &&
         is_vector_readable(gemm.b, 2);
}

void run_few_rows(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor a = tma_readable(gemm.a, 1);
  few_rows::Operands in = operands_of(gemm, a);
  in.b = columns_map(launch, gemm.b);
  if (!gemm.scale_a) return launch_few_rows<__nv_bfloat16>(launch, gemm, in, few_rows::Linear{});
  const Tensor scale_a = readable_scale(*gemm.scale_a);
  const Tensor& scale_b = *gemm.scale_b;
  in.scale_a = scale_a.const_data_ptr<float>();
  in.scale_a_stride = map_stride(scale_a, 0, scale_a.size(1));
  in.scale_b = {scale_b.const_data_ptr<float>(), scale_b.stride(0), scale_b.stride(1),
                scale_b.stride(2)};
  launch_few_rows<__nv_fp8_e4m3>(launch, gemm, in, few_rows::Linear{});
}

void run_few_rows_swiglu(const Launch& launch, const GroupedGemm& gemm,
                         const SwigluOutput& swiglu) {
  const Tensor a = tma_readable(gemm.a, 1);
  few_rows::Operands in = operands_of(gemm, a);
  in.b = gated_columns_map(launch, gemm.b);
  for_form(swiglu.form, [&]<typename Form>(const Form& form) {
    const few_rows::Gated<Form> work{swiglu.h.data_ptr(), swiglu.keep_gate_up, form};
    launch_few_rows<__nv_bfloat16>(launch, gemm, in, work);
  });
}

}  // namespace grouped_linear::cuda::sm90
