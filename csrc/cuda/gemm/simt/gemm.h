// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs without tensor cores, on any architecture.
#pragma once

#include "cuda/gemm/gemm.h"

namespace grouped_linear::cuda::simt {

// float32 operands.
void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm);

}  // namespace grouped_linear::cuda::simt
