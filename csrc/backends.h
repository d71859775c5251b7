// SPDX-License-Identifier: Apache-2.0
// The ops that are made of other ops, for each backend.
#pragma once

#include "cpu/rows.h"
#include "expert_list_ops.h"
#include "gemm_ops.h"
#include "layer_ops.h"
#include "ops.h"
#include "tensors.h"

namespace grouped_linear::cpu {
namespace own = cpu;
#include "backend.inc"
}  // namespace grouped_linear::cpu

#ifdef GROUPED_LINEAR_CUDA
namespace grouped_linear::cuda {
namespace own = cuda;
inline constexpr auto& new_output = new_tensor;
#include "backend.inc"
}  // namespace grouped_linear::cuda
#endif
