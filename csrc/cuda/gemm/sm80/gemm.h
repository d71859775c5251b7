// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs on any NVIDIA GPU of compute capability 8.0 and up.
#pragma once

#include "cuda/gemm/gemm.h"

namespace grouped_linear::cuda::sm80 {

void run_16bit(const Launch& launch, const GroupedGemm& gemm);  // gemm_16bit.cu
void run_fp8(const Launch& launch, const GroupedGemm& gemm);    // gemm_fp8.cu

// M-grouped GEMMs in BF16 whose b is a weight w [E, N, K] in MXFP4, codes and scale_b as they are
// stored. The output's columns are w's rows (kK, fprop) or its columns (kMN, dgrad). gemm_mxfp4.cu
void run_mxfp4(const Launch& launch, const GroupedGemm& gemm, Major b_major);

// BF16, FP16 and FP8 operands. No kernel here gathers.
inline void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  if (gemm.a_rows || gemm.b_rows)
    return sm80::run_grouped_gemm(launch, gather_before(launch, gemm));
  return gemm.scale_a ? run_fp8(launch, gemm) : run_16bit(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm80
