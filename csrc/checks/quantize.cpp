// SPDX-License-Identifier: Apache-2.0
// The rules of the ops that quantize, dequantize and sum rows, and of SwiGLU.

#include <cmath>
#include <limits>

#include "checks.h"
#include "checks/rules.h"

namespace grouped_linear {

void check_layouts(const char* op, bool rowwise, bool columnwise) {
  check(rowwise || columnwise, op, ": rowwise or columnwise must be true, got neither");
}

namespace {

// x [T, features] with offs.
void check_grouped_rows(const char* op, const char* name, const Tensor& x, const Tensor& offs,
                        const char* features = "K") {
  check_dim(op, name, x, 2);
  check_activation(op, name, x.scalar_type());
  check_features(op, features, x.size(1));
  check_offs(op, offs, name, x);
}

}  // namespace

void check_group_quantize(const Tensor& x, const Tensor& offs, const std::optional<Tensor>& rows,
                          double amax_epsilon, bool rowwise, bool columnwise) {
  const char* op = "group_quantize";
  check_grouped_rows(op, "x", x, offs);
  if (rows) check_rows(op, *rows, 1, "x", x);
  check_epsilon(op, amax_epsilon);
  check_layouts(op, rowwise, columnwise);
}

void check_group_quantize_current(const Tensor& x, const Tensor& offs, ScalarType dtype,
                                  double amax_epsilon, bool rowwise, bool columnwise) {
  const char* op = "group_quantize_current";
  check_grouped_rows(op, "x", x, offs);
  check_layouts(op, rowwise, columnwise);
  check_fp8(op, "out_dtype", dtype);
  check_epsilon(op, amax_epsilon);
}

void check_group_quantize_delayed(const std::optional<Tensor>& amax, const Tensor& x,
                                  const Tensor& offs, const Tensor& scale, ScalarType dtype,
                                  bool rowwise, bool columnwise) {
  const char* op = "group_quantize_delayed";
  check_grouped_rows(op, "x", x, offs);
  check_layouts(op, rowwise, columnwise);
  check_group_scale(op, "scale", scale, "x", x, offs.size(0));
  if (amax) check_amax(op, *amax, "x", x, "offs", offs.size(0));
  check_fp8(op, "out_dtype", dtype);
}

void check_group_quantize_mx(const char* op, const Tensor& x, const Tensor& offs, bool rowwise,
                             bool columnwise) {
  check_grouped_rows(op, "x", x, offs);
  check_layouts(op, rowwise, columnwise);
}

void check_swiglu(const char* op, const Tensor& gate_up, const Tensor& offs) {
  check_dim(op, "gate_up", gate_up, 2);
  check_activation(op, "gate_up", gate_up.scalar_type());
  check(gate_up.size(1) % 2 == 0, op, ": gate_up must have an even number of columns, got ",
        gate_up.size(1));
  check_features(op, "K", gate_up.size(1) / 2);
  check_offs(op, offs, "gate_up", gate_up);
}

void check_swiglu_grad(const char* op, const Tensor& dh, const Tensor& gate_up,
                       const Tensor& weight, const Tensor& offs) {
  check_dim(op, "dh", dh, 2);
  check_dim(op, "gate_up", gate_up, 2);
  check_activation(op, "dh", dh.scalar_type());
  check_dtype(op, "gate_up", gate_up, dh.scalar_type());
  check_device(op, "gate_up", gate_up, "dh", dh);
  check_same(op, "T", "dh", dh.size(0), "gate_up", gate_up.size(0));
  check_features(op, "K", dh.size(1));
  check_same(op, "2 * K", "dh", 2 * dh.size(1), "gate_up", gate_up.size(1));
  check_tensor(op, "weight", weight, 1, ScalarType::Float, "dh", dh);
  check_same(op, "T", "weight", weight.size(0), "dh", dh.size(0));
  check_offs(op, offs, "dh", dh);
}

SwigluForm checked_form(const char* op, double alpha, double beta, std::optional<double> limit,
                        bool interleaved, double cubic) {
  constexpr double most = std::numeric_limits<float>::max();
  check(std::abs(alpha) <= most, op, ": alpha must be finite, got ", alpha);
  check(std::abs(beta) <= most, op, ": beta must be finite, got ", beta);
  check(!limit || *limit > 0, op, ": limit must be positive, got ", limit.value_or(0));
  check(cubic >= 0 && cubic <= most, op, ": cubic must be finite and not negative, got ", cubic);
  const float no_limit = std::numeric_limits<float>::infinity();
  return swiglu_form(alpha, beta, limit && *limit <= most ? static_cast<float>(*limit) : no_limit,
                     interleaved, cubic);
}

void check_group_quantize_swiglu(const Tensor& gate_up, const Tensor& offs, double amax_epsilon,
                                 bool rowwise, bool columnwise) {
  const char* op = "group_quantize_swiglu";
  check_swiglu(op, gate_up, offs);
  check_epsilon(op, amax_epsilon);
  check_layouts(op, rowwise, columnwise);
}

void check_group_quantize_swiglu_grad(const Tensor& dh, const Tensor& gate_up, const Tensor& weight,
                                      const Tensor& offs, double amax_epsilon, bool rowwise,
                                      bool columnwise) {
  const char* op = "group_quantize_swiglu_grad";
  check_swiglu_grad(op, dh, gate_up, weight, offs);
  check_epsilon(op, amax_epsilon);
  check_layouts(op, rowwise, columnwise);
}

void check_group_dequantize(const Tensor& q, const Tensor& scale, const Tensor& offs,
                            ScalarType dtype) {
  const char* op = "group_dequantize";
  check_rowwise(op, "q", q, "scale", scale);
  check_offs(op, offs, "q", q);
  check_activation(op, "out_dtype", dtype);
}

void check_group_dequantize_t(const Tensor& q_t, const Tensor& scale_t, const Tensor& offs,
                              int64_t num_rows, ScalarType dtype) {
  const char* op = "group_dequantize_t";
  check_columnwise(op, "q_t", q_t, "scale_t", scale_t, "K");
  check_offs(op, offs, "q_t", q_t);
  check(num_rows >= 0, op, ": num_rows must not be negative, got ", num_rows);
  check_same(op, "the number of blocks", "q_t", q_t.size(0), "num_rows",
             padded_rows(num_rows, offs.size(0)) / kBlock);
  check_activation(op, "out_dtype", dtype);
}

void check_grouped_bias_grad(const Tensor& dy, const Tensor& offs) {
  const char* op = "grouped_bias_grad";
  check_grouped_rows(op, "dy", dy, offs, "N");
}

}  // namespace grouped_linear
