// Rows by number, for what has no kernel that gathers: the numbers in 32 bits, and copies of the
// rows.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/operands.h"

namespace grouped_linear::cuda {

// rows, dense, in int32: the kernels that gather from `source` read no other numbers. A number that
// does not fit becomes the nearest one that does. Numbers out of range are clamped in any case, so
// that is the same row.
Tensor int32_numbers(const Launch& launch, const Tensor& rows, const Tensor& source);

// source[rows[t]] for each t: [T, K], dense; zeros where the source has no rows. rows [T]: of
// int32_numbers.
Tensor copy_rows(const Launch& launch, const Tensor& source, const Tensor& rows);

}  // namespace grouped_linear::cuda
