// SPDX-License-Identifier: Apache-2.0
// The rules of the ops that quantize a weight, and of the state of delayed scaling.

#include <array>
#include <cmath>
#include <limits>

#include "checks.h"
#include "checks/rules.h"

namespace grouped_linear {
namespace {

// w: one tensor [E, N, K] or E tensors [N, K]. refresh: whether to quantize it. Returns E, N and K.
std::array<int64_t, 3> check_refreshed(const char* op, const std::vector<Tensor>& w,
                                       const std::optional<Tensor>& refresh) {
  std::array<int64_t, 3> shape;
  if (w.size() == 1 && w[0].dim() == 3) {
    check_weight(op, w[0]);
    shape = {w[0].size(0), w[0].size(1), w[0].size(2)};
  } else {
    check_weight_list(op, w);
    shape = {static_cast<int64_t>(w.size()), w[0].size(0), w[0].size(1)};
  }
  if (refresh) check_tensor(op, "refresh", *refresh, 0, ScalarType::Bool, "w", w[0]);
  return shape;
}

// A float32 number in a tensor, which a kernel reads.
void check_scalar(const char* op, const char* name, const std::optional<Tensor>& t,
                  const Tensor& q) {
  if (!t) return;
  check_tensor(op, name, *t, 0, ScalarType::Float, "q", q);
}

void check_finite(const char* op, const char* name, double number) {
  check(std::abs(number) <= std::numeric_limits<float>::max(), op, ": ", name,
        " must be finite, got ", number);
}

// Along which dimension blocks of MXFP4 run, if any.
void check_mxfp4_dim(const char* op, std::optional<int64_t> dim, int64_t N, int64_t K) {
  if (!dim) return;
  check(*dim == -1 || *dim == -2, op, ": mxfp4_dim must be None, -1 or -2, got ", *dim);
  const int64_t size = *dim == -1 ? K : N;
  check(size % kMxBlock == 0, op, ": ", *dim == -1 ? "K" : "N", " must be a multiple of ", kMxBlock,
        " with mxfp4_dim=", *dim, ", got ", size);
}

}  // namespace

void check_quantize_weight(const char* op, const Tensor& w, double amax_epsilon,
                           std::optional<int64_t> mxfp4_dim) {
  check_weight(op, w);
  check_epsilon(op, amax_epsilon);
  check_mxfp4_dim(op, mxfp4_dim, w.size(1), w.size(2));
}

void check_quantize_weight_list(const std::vector<Tensor>& w, double amax_epsilon) {
  const char* op = "quantize_weight_list";
  check_weight_list(op, w);
  check_epsilon(op, amax_epsilon);
}

void check_quantize_weight_delayed(const std::optional<Tensor>& amax, const Tensor& w,
                                   const Tensor& scale) {
  const char* op = "quantize_weight_delayed";
  check_weight(op, w);
  check_group_scale(op, "scale", scale, "w", w, w.size(0), "w");
  if (amax) check_amax(op, *amax, "w", w, "w", w.size(0));
}

void check_refresh_weight(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                          const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                          double amax_epsilon, std::optional<int64_t> mxfp4_dim) {
  const char* op = "refresh_weight_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_epsilon(op, amax_epsilon);
  check_mxfp4_dim(op, mxfp4_dim, N, K);
  check(!mxfp4_dim || w[0].dim() == 3, op, ": mxfp4_dim needs w as one tensor, got a list");
  check_written(op, "q", q, ScalarType::Float8_e4m3fn, {E, N, K}, w[0]);
  check_written(op, "scale", scale, ScalarType::Float,
                {E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, w[0]);
  if (q_t) check_written(op, "q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N}, w[0]);
}

void check_refresh_weight_current(const std::vector<Tensor>& w,
                                  const std::optional<Tensor>& refresh, const Tensor& q,
                                  const Tensor& scale, const std::optional<Tensor>& q_t,
                                  double amax_epsilon) {
  const char* op = "refresh_weight_current_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_epsilon(op, amax_epsilon);
  check_written(op, "q", q, ScalarType::Float8_e4m3fn, {E, N, K}, w[0]);
  check_written(op, "scale", scale, ScalarType::Float, {E}, w[0]);
  if (q_t) check_written(op, "q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N}, w[0]);
}

void check_refresh_weight_delayed(const std::optional<Tensor>& amax, const std::vector<Tensor>& w,
                                  const Tensor& state, const std::optional<Tensor>& refresh,
                                  const Tensor& q, const Tensor& scale,
                                  const std::optional<Tensor>& q_t) {
  const char* op = "refresh_weight_delayed_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_group_scale(op, "state", state, "w", w[0], E, "w");
  if (amax) check_amax(op, *amax, "w", w[0], "w", E);
  check_written(op, "q", q, ScalarType::Float8_e4m3fn, {E, N, K}, w[0]);
  check_written(op, "scale", scale, ScalarType::Float, {E}, w[0]);
  if (q_t) check_written(op, "q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N}, w[0]);
}

void check_refresh_weight_mx(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise) {
  const char* op = "refresh_weight_mx_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_written(op, "w_rowwise", w_rowwise, ScalarType::BFloat16, {E, N, K}, w[0]);
  if (w_columnwise)
    check_written(op, "w_columnwise", *w_columnwise, ScalarType::BFloat16, {E, N, K}, w[0]);
}

void check_transpose_weight(const Tensor& q) {
  const char* op = "transpose_weight";
  check_dim(op, "q", q, 3);
  check_dtype(op, "q", q, ScalarType::Float8_e4m3fn);
  check_weight_shape(op, "q", q);
}

void check_adam_weight(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                       const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
                       const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq,
                       const Tensor& step, const std::optional<Tensor>& lr_tensor,
                       const std::optional<Tensor>& grad_scale,
                       const std::optional<Tensor>& found_inf, double lr, double beta1,
                       double beta2, double weight_decay, double eps, double amax_epsilon,
                       std::optional<int64_t> mxfp4_dim) {
  const char* op = "adam_weight_";
  check_dim(op, "q", q, 3);
  check_dtype(op, "q", q, ScalarType::Float8_e4m3fn);
  check_weight_shape(op, "q", q);
  const int64_t E = q.size(0), N = q.size(1), K = q.size(2);
  check(q.is_contiguous(), op, ": q must be contiguous");
  const auto written = [&](const char* name, const Tensor& t, ScalarType dtype,
                           const Shape& shape) {
    check_written(op, name, t, dtype, shape, q, "q");
  };
  written("scale", scale, ScalarType::Float, {E, ceil_div(N, kBlock), ceil_div(K, kBlock)});
  if (q_t) written("q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N});
  check_dim(op, "grad", grad, 3);
  const ScalarType dtype = grad.scalar_type();
  check_activation(op, "grad", dtype);
  written("master", master, dtype, {E, N, K});
  written("grad", grad, dtype, {E, N, K});
  written("exp_avg", exp_avg, dtype, {E, N, K});
  written("exp_avg_sq", exp_avg_sq, dtype, {E, N, K});
  if (max_exp_avg_sq) written("max_exp_avg_sq", *max_exp_avg_sq, dtype, {E, N, K});
  check_scalar(op, "step", step, q);
  check_scalar(op, "lr_tensor", lr_tensor, q);
  check_scalar(op, "grad_scale", grad_scale, q);
  check_scalar(op, "found_inf", found_inf, q);
  check_finite(op, "lr", lr);
  check(beta1 >= 0 && beta1 < 1, op, ": beta1 must be at least 0 and below 1, got ", beta1);
  check(beta2 >= 0 && beta2 < 1, op, ": beta2 must be at least 0 and below 1, got ", beta2);
  check_finite(op, "weight_decay", weight_decay);
  check_finite(op, "eps", eps);
  check_epsilon(op, amax_epsilon);
  check_mxfp4_dim(op, mxfp4_dim, N, K);
}

void check_update_scales(const std::vector<Tensor>& scale, const std::vector<Tensor>& amax,
                         const std::vector<Tensor>& amax_history,
                         const std::vector<double>& fp8_max, int64_t margin) {
  const char* op = "update_scales_";
  const auto count = [op, &scale](const char* name, size_t size) {
    check_same(op, "the number of states", name, static_cast<int64_t>(size), "scale",
               static_cast<int64_t>(scale.size()));
  };
  check(!scale.empty(), op, ": scale must not be empty");
  count("amax", amax.size());
  count("amax_history", amax_history.size());
  count("fp8_max", fp8_max.size());
  check(margin >= 0 && margin <= kMaxMargin, op, ": margin must be between 0 and ", kMaxMargin,
        ", got ", margin);
  for (size_t i = 0; i < scale.size(); ++i) {
    check_tensor(op, "scale", scale[i], 1, ScalarType::Float, "the first scale", scale[0]);
    check_count(op, "scale", "groups", scale[i].size(0));
    check(scale[i].is_contiguous(), op, ": scale must be contiguous");
    check_amax(op, amax[i], "the first scale", scale[0], "scale", scale[i].size(0));
    check_tensor(op, "amax_history", amax_history[i], 2, ScalarType::Float, "the first scale",
                 scale[0]);
    check_same(op, "E", "amax_history", amax_history[i].size(1), "scale", scale[i].size(0));
    check(amax_history[i].size(0) > 0, op, ": amax_history must have a row, got none");
    check_count(op, "amax_history", "rows", amax_history[i].size(0));
    check(amax_history[i].is_contiguous(), op, ": amax_history must be contiguous");
    check(fp8_max[i] > 0 && fp8_max[i] <= std::numeric_limits<float>::max(), op,
          ": fp8_max must be positive and finite, got ", fp8_max[i]);
  }
}

}  // namespace grouped_linear
