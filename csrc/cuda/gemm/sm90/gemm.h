// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs on Hopper (compute capability 9.0).
#pragma once

#include "cuda/gemm/gemm.h"

namespace grouped_linear::cuda::sm90 {

void run_16bit(const Launch& launch, const GroupedGemm& gemm);  // gemm_16bit.cu
void run_fp8(const Launch& launch, const GroupedGemm& gemm);    // gemm_fp8.cu

// M-grouped ones whose groups have few rows, where they have a kernel of their own: of a b that is
// dense along K. With SwiGLU where has_swiglu says so, not interleaved. gemm_few_rows.cu
bool takes_few_rows(const GroupedGemm& gemm);
void run_few_rows(const Launch& launch, const GroupedGemm& gemm);
void run_few_rows_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluOutput& swiglu);

// M-grouped GEMMs with a second product. gemm_low_rank.cu
void run_low_rank(const Launch& launch, const GroupedGemm& gemm);

// M-grouped GEMMs in BF16 whose b is a weight w [E, N, K] in MXFP4, codes and scale_b as they are
// stored. The output's columns are w's rows (kK, fprop) or its columns (kMN, dgrad). gemm_mxfp4.cu
void run_mxfp4(const Launch& launch, const GroupedGemm& gemm, Major b_major);

// fprop in BF16 of such a weight whose groups have few rows. gemm_mxfp4_few_rows.cu
void run_mxfp4_few_rows(const Launch& launch, const GroupedGemm& gemm);

// With SwiGLU or its gradient in the epilogue, where there is such a kernel. gemm_swiglu.cu
bool has_swiglu(const GroupedGemm& gemm, const SwigluForm& form);
bool has_swiglu_grad(const GroupedGemm& gemm, const SwigluForm& form);
void run_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluOutput& swiglu);
void run_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluGradOutput& grad);

// BF16, FP16 and FP8 operands. No FP16 kernel gathers, nor one with a second product: they would be
// compiled four times more.
inline void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  if (gemm.low.a) return run_low_rank(launch, gather_before(launch, gemm));
  if ((gemm.a_rows || gemm.b_rows) && gemm.a.scalar_type() == ScalarType::Half)
    return sm90::run_grouped_gemm(launch, gather_before(launch, gemm));
  if (takes_few_rows(gemm)) return run_few_rows(launch, gemm);
  return gemm.scale_a ? run_fp8(launch, gemm) : run_16bit(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm90
