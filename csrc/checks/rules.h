// SPDX-License-Identifier: Apache-2.0
// The rules that the ops share. Each raises an error that names the op, the rule and the value.
#pragma once

#include <torch/csrc/stable/device.h>

#include "checks.h"
#include "tensors.h"

namespace grouped_linear {

// A literal: arguments of `check` are evaluated even if the rule holds, so they must cost nothing.
const char* name_of(ScalarType dtype);

// dtype is bfloat16, float16 or float32.
void check_activation(const char* op, const char* name, ScalarType dtype);
void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType expected);
void check_fp8(const char* op, const char* name, ScalarType dtype);
void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim);
void check_same(const char* op, const char* what, const char* a_name, int64_t a, const char* b_name,
                int64_t b);
void check_features(const char* op, const char* what, int64_t size);
// A count fits in 32 bits: a tensor's rows, its columns, or what `what` names.
void check_count(const char* op, const char* name, const char* what, int64_t count);
void check_groups(const char* op, int64_t E);
void check_device(const char* op, const char* name, const Tensor& t, const char* first_name,
                  const Tensor& first);
// The number of dimensions, the dtype, and the device of the first tensor.
void check_tensor(const char* op, const char* name, const Tensor& t, int64_t dim, ScalarType dtype,
                  const char* first_name, const Tensor& first);
// offs [E] of the op's first tensor, whose rows are counted in 32 bits.
void check_offs(const char* op, const Tensor& offs, const char* first_name, const Tensor& first);
void check_integer(const char* op, const char* name, ScalarType dtype);
// rows: row numbers, int32 or int64.
void check_rows(const char* op, const Tensor& rows, int64_t dim, const char* first_name,
                const Tensor& first, const char* name = "rows");
void check_epsilon(const char* op, double amax_epsilon);
// scale [E] float32: one scale a group.
void check_group_scale(const char* op, const char* name, const Tensor& scale,
                       const char* first_name, const Tensor& first, int64_t E,
                       const char* owner = "offs");
// amax [E], written in place.
void check_amax(const char* op, const Tensor& amax, const char* first_name, const Tensor& first,
                const char* owner, int64_t E);
// [E, N, K], of three dimensions.
void check_weight_shape(const char* op, const char* name, const Tensor& w);
// w [E, N, K], or E tensors w [N, K].
void check_weight(const char* op, const Tensor& w);
void check_weight_list(const char* op, const std::vector<Tensor>& w);
// E matrices of one shape, dtype and device.
void check_experts(const char* op, const char* name, const std::vector<Tensor>& experts);
// t, which the op writes in place, is dense and has this shape.
void check_written(const char* op, const char* name, const Tensor& t, ScalarType dtype,
                   const Shape& shape, const Tensor& first, const char* first_name = "w");
// q_t [blocks, features, 128].
void check_column_blocks(const char* op, const char* name, const Tensor& q_t, const char* features);
// q_t [blocks, features, 128] with scale_t [blocks, features].
void check_columnwise(const char* op, const char* name, const Tensor& q_t, const char* scale_name,
                      const Tensor& scale_t, const char* features);
// q [rows, K] with scale [ceil(K / 128), round_up(rows, 4)].
void check_rowwise(const char* op, const char* name, const Tensor& q, const char* scale_name,
                   const Tensor& scale);

}  // namespace grouped_linear
