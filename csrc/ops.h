// SPDX-License-Identifier: Apache-2.0
// The ops of each backend, in its own namespace: cpu/ and cuda/ define what ops.inc declares.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "swiglu_math.h"
#include "tensors.h"

namespace grouped_linear::cpu {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
#include "ops.inc"
}  // namespace grouped_linear::cpu

namespace grouped_linear::cuda {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
#include "ops.inc"
}  // namespace grouped_linear::cuda
