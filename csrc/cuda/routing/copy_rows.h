// SPDX-License-Identifier: Apache-2.0
// For ops without a gathering kernel: row numbers in 32 bits, and copies of the numbered rows.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/operands.h"

namespace grouped_linear::cuda {

// `rows` as a dense int32 tensor, which the kernels that gather from `source` read. A number that
// does not fit into int32 becomes the nearest number that does: kernels clamp numbers into the
// source, so both name the same row.
Tensor int32_numbers(const Launch& launch, const Tensor& rows, const Tensor& source);

// source[rows[t]] for each t: [T, K], dense; zeros where the source has no rows. rows [T] is the
// result of int32_numbers.
Tensor copy_rows(const Launch& launch, const Tensor& source, const Tensor& rows);

}  // namespace grouped_linear::cuda
