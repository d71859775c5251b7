// SPDX-License-Identifier: Apache-2.0
// The rules of the grouped GEMMs, and of the layers made of them.

#include "checks.h"
#include "checks/rules.h"

namespace grouped_linear {
namespace {

void check_overwrite(const char* op, const std::optional<Tensor>& overwrite,
                     const Tensor& main_grad) {
  if (!overwrite) return;
  check_tensor(op, "overwrite", *overwrite, 0, ScalarType::Bool, "main_grad", main_grad);
}

// grad: main_grad [E, N, K], or the first of its grad_E experts [N, K].
void check_grad(const char* op, const Tensor& grad, int64_t grad_E, const Tensor& dy, int64_t E,
                int64_t N, int64_t K) {
  const ScalarType dtype = grad.scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, op,
        ": main_grad must be float32 or bfloat16, got ", name_of(dtype));
  check_device(op, "main_grad", grad, "dy", dy);
  check_same(op, "E", "main_grad", grad_E, "offs", E);
  check_same(op, "N", "main_grad", grad.size(grad.dim() - 2), "dy", N);
  check_same(op, "K", "main_grad", grad.size(grad.dim() - 1), "x", K);
}

void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& a, int64_t E,
                int64_t N, ScalarType out_dtype) {
  if (!bias) return;
  check_tensor(op, "bias", *bias, 2, out_dtype, "a", a);
  check_same(op, "E", "bias", bias->size(0), "offs", E);
  check_same(op, "N", "bias", bias->size(1), "b", N);
}

// low: of out [T, N], of rows of a. b is [E, N, r], as backends see it.
void check_low_rank(const char* op, const LowRank& low, const Tensor& a,
                    const std::optional<Tensor>& rows, int64_t E, int64_t N, ScalarType dtype) {
  check(low.a.has_value() == low.b.has_value(), op, ": give a_low and b_low, got ",
        low.a ? "a_low" : "b_low", " alone");
  if (!low.a) return;
  check_dim(op, "a_low", *low.a, 2);
  check_dim(op, "b_low", *low.b, 3);
  check_dtype(op, "a_low", *low.a, dtype);
  check_dtype(op, "b_low", *low.b, dtype);
  check_device(op, "a_low", *low.a, "a", a);
  check_device(op, "b_low", *low.b, "a", a);
  const int64_t r = low.a->size(1);
  check_same(op, "T", "a_low", low.a->size(0), rows ? "rows" : "a", (rows ? *rows : a).size(0));
  check_same(op, "r", "a_low", r, "b_low", low.b->size(2));
  check_features(op, "r", r);
  check(r <= kMaxRank, op, ": r must be at most ", kMaxRank, ", got ", r);
  check_same(op, "E", "b_low", low.b->size(0), "offs", E);
  check_same(op, "N", "b_low", low.b->size(1), "b", N);
}

// a [T, K] beside E weights of [N, K], and what the result needs.
void check_product(const char* op, const Tensor& a, int64_t E, int64_t N, int64_t K,
                   const Tensor& offs, const std::optional<Tensor>& bias, ScalarType out_dtype,
                   const std::optional<Tensor>& rows) {
  check_same(op, "K", "a", a.size(1), "b", K);
  check_features(op, "K", K);
  check_features(op, "N", N);
  check_offs(op, offs, "a", a);
  check_same(op, "E", "b", E, "offs", offs.size(0));
  check_activation(op, "out_dtype", out_dtype);
  check_bias(op, bias, a, E, N, out_dtype);
  if (rows) check_rows(op, *rows, 1, "a", a);
}

// K of a weight in MXFP4: whole blocks.
void check_mx_blocks(const char* op, int64_t K) {
  check(K > 0 && K % kMxBlock == 0, op, ": K must be a positive multiple of ", kMxBlock, ", got ",
        K);
  check(K <= kMaxMxfp4Features, op, ": K must be at most ", kMaxMxfp4Features, ", got ", K);
}

// q [E, N, K/2] with scale [E, N, K/32].
void check_mxfp4(const char* op, const char* name, const Tensor& q, const char* scale_name,
                 const Tensor& scale) {
  check_dim(op, name, q, 3);
  check_dtype(op, name, q, ScalarType::Byte);
  check_groups(op, q.size(0));
  check_features(op, "N", q.size(1));
  check_mx_blocks(op, 2 * q.size(2));
  check_count(op, name, "rows in all", q.size(0) * q.size(1));
  check_tensor(op, scale_name, scale, 3, ScalarType::Byte, name, q);
  check_same(op, "E", name, q.size(0), scale_name, scale.size(0));
  check_same(op, "N", name, q.size(1), scale_name, scale.size(1));
  check_same(op, "the number of K blocks", name, 2 * q.size(2) / kMxBlock, scale_name,
             scale.size(2));
}

}  // namespace

// Here and below, where b is one tensor it is [E, N, K], as the backends see it (gemm_ops.h).
void check_grouped_mm(const char* op, const Tensor& a, const Tensor& b, const Tensor& offs,
                      const std::optional<Tensor>& bias, ScalarType out_dtype,
                      const std::optional<Tensor>& rows, const LowRank& low) {
  check_dim(op, "a", a, 2);
  check_dim(op, "b", b, 3);
  check_activation(op, "a", a.scalar_type());
  check_dtype(op, "b", b, a.scalar_type());
  check_device(op, "b", b, "a", a);
  check_product(op, a, b.size(0), b.size(1), b.size(2), offs, bias, out_dtype, rows);
  check_low_rank(op, low, a, rows, b.size(0), b.size(1), a.scalar_type());
}

void check_grouped_mm_swiglu(const Tensor& a, const Tensor& b, const Tensor& offs,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& rows) {
  const char* op = "grouped_mm_swiglu";
  check_grouped_mm(op, a, b, offs, bias, dtype_of(a), rows);
  check_features(op, "N / 2", b.size(1) / 2);
}

void check_grouped_mm_swiglu_grad(const Tensor& a, const Tensor& b, const Tensor& gate_up,
                                  const Tensor& weight, const Tensor& offs,
                                  const std::optional<Tensor>& rows) {
  const char* op = "grouped_mm_swiglu_grad";
  check_grouped_mm(op, a, b, offs, std::nullopt, dtype_of(a), rows);
  const Tensor& of_rows = rows ? *rows : a;
  const char* name = rows ? "rows" : "a";
  check_tensor(op, "gate_up", gate_up, 2, a.scalar_type(), "a", a);
  check_same(op, "T", "gate_up", gate_up.size(0), name, of_rows.size(0));
  check_same(op, "2 * N", "gate_up", gate_up.size(1), "b", 2 * b.size(1));
  check_tensor(op, "weight", weight, 1, ScalarType::Float, "a", a);
  check_same(op, "T", "weight", weight.size(0), name, of_rows.size(0));
}

void check_grouped_mm_list(const Tensor& a, const std::vector<Tensor>& b, const Tensor& offs,
                           const std::optional<Tensor>& bias, ScalarType out_dtype,
                           bool transpose_b, const std::optional<Tensor>& rows) {
  const char* op = "grouped_mm_list";
  check_dim(op, "a", a, 2);
  check_activation(op, "a", a.scalar_type());
  check_experts(op, "b", b);
  check_dtype(op, "b", b[0], a.scalar_type());
  check_device(op, "b", b[0], "a", a);
  const int64_t K = b[0].size(transpose_b ? 1 : 0), N = b[0].size(transpose_b ? 0 : 1);
  check_product(op, a, static_cast<int64_t>(b.size()), N, K, offs, bias, out_dtype, rows);
}

void check_grouped_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a,
                             const Tensor& scale_b, const Tensor& offs,
                             const std::optional<Tensor>& bias, ScalarType out_dtype,
                             const std::optional<Tensor>& rows, const LowRank& low) {
  const char* op = "grouped_scaled_mm";
  const bool per_group = scale_a.dim() == 1;  // else per block
  if (per_group) {
    check_dim(op, "a", a, 2);
    check_fp8(op, "a", a.scalar_type());
    check_features(op, "K", a.size(1));
  } else {
    check_rowwise(op, "a", a, "scale_a", scale_a);
  }
  check_tensor(op, "b", b, 3, ScalarType::Float8_e4m3fn, "a", a);
  check_same(op, "K", "a", a.size(1), "b", b.size(2));
  check_features(op, "N", b.size(1));
  if (!per_group) {
    check_tensor(op, "scale_b", scale_b, 3, ScalarType::Float, "a", a);
    check_same(op, "E", "b", b.size(0), "scale_b", scale_b.size(0));
    check_same(op, "the number of N blocks", "b", ceil_div(b.size(1), kBlock), "scale_b",
               scale_b.size(1));
    check_same(op, "the number of K blocks", "b", ceil_div(b.size(2), kBlock), "scale_b",
               scale_b.size(2));
  }
  check_offs(op, offs, "a", a);
  check_same(op, "E", "b", b.size(0), "offs", offs.size(0));
  if (per_group) {
    check_group_scale(op, "scale_a", scale_a, "a", a, offs.size(0));
    check_group_scale(op, "scale_b", scale_b, "a", a, offs.size(0));
  }
  check_activation(op, "out_dtype", out_dtype);
  check_bias(op, bias, a, offs.size(0), b.size(1), out_dtype);
  check(!rows || !per_group, op, ": rows need block scales, got a scale a group");
  if (rows) check_rows(op, *rows, 1, "a", a);
  check_low_rank(op, low, a, rows, b.size(0), b.size(1), out_dtype);
}

void check_quantize_mxfp4(const Tensor& w) {
  const char* op = "quantize_mxfp4";
  check_weight(op, w);
  check_mx_blocks(op, w.size(2));
}

void check_dequantize_mxfp4(const Tensor& q, const Tensor& scale, ScalarType dtype) {
  const char* op = "dequantize_mxfp4";
  check_mxfp4(op, "q", q, "scale", scale);
  check_activation(op, "out_dtype", dtype);
}

ScalarType mxfp4_out_dtype(const Tensor& a, std::optional<ScalarType> requested) {
  const bool is_fp8 = dtype_of(a) == ScalarType::Float8_e4m3fn;
  return requested.value_or(is_fp8 ? ScalarType::BFloat16 : dtype_of(a));
}

void check_grouped_mm_mxfp4(const Tensor& a, const Tensor& b, const Tensor& scale_b,
                            const Tensor& offs, const std::optional<Tensor>& bias,
                            const std::optional<Tensor>& scale_a, ScalarType out_dtype,
                            bool transpose_b, const std::optional<Tensor>& rows,
                            const LowRank& low) {
  const char* op = "grouped_mm_mxfp4";
  if (scale_a) {
    check_rowwise(op, "a", a, "scale_a", *scale_a);
  } else {
    check_dim(op, "a", a, 2);
    check_activation(op, "a", a.scalar_type());
  }
  check_mxfp4(op, "b", b, "scale_b", scale_b);
  check_device(op, "b", b, "a", a);
  const int64_t N = b.size(1), K = 2 * b.size(2), cols = transpose_b ? N : K;
  check_same(op, transpose_b ? "K" : "N", "a", a.size(1), "b", transpose_b ? K : N);
  check_offs(op, offs, "a", a);
  check_same(op, "E", "b", b.size(0), "offs", offs.size(0));
  check_activation(op, "out_dtype", out_dtype);
  check_bias(op, bias, a, offs.size(0), cols, out_dtype);
  if (rows) check_rows(op, *rows, 1, "a", a);
  check_low_rank(op, low, a, rows, b.size(0), cols, scale_a ? out_dtype : a.scalar_type());
}

void check_addmm(const Tensor& c, const Tensor& a, const Tensor& b) {
  const char* op = "addmm";
  check_dim(op, "c", c, 2);
  const ScalarType dtype = c.scalar_type();
  check(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op,
        ": c must be bfloat16 or float16, got ", name_of(dtype));
  check_features(op, "N", c.size(1));
  check_count(op, "c", "rows", c.size(0));
  check_tensor(op, "a", a, 2, dtype, "c", c);
  check_same(op, "M", "a", a.size(0), "c", c.size(0));
  check(a.size(1) >= 1 && a.size(1) <= kMaxFeatures, op, ": K must be between 1 and ", kMaxFeatures,
        ", got ", a.size(1));
  check_tensor(op, "b", b, 2, dtype, "c", c);
  check_same(op, "K", "b", b.size(0), "a", a.size(1));
  check_same(op, "N", "b", b.size(1), "c", c.size(1));
}

void check_grouped_mm_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& offs,
                            ScalarType out_dtype, const std::optional<Tensor>& dy_rows,
                            const std::optional<Tensor>& x_rows) {
  check_dim(op, "dy", dy, 2);
  check_dim(op, "x", x, 2);
  check_activation(op, "dy", dy.scalar_type());
  check_dtype(op, "x", x, dy.scalar_type());
  check_device(op, "x", x, "dy", dy);
  check(!dy_rows || !x_rows, op, ": give dy_rows or x_rows, got both");
  if (dy_rows) check_rows(op, *dy_rows, 1, "dy", dy, "dy_rows");
  if (x_rows) check_rows(op, *x_rows, 1, "dy", dy, "x_rows");
  check_same(op, "T", dy_rows ? "dy_rows" : "dy", (dy_rows ? *dy_rows : dy).size(0),
             x_rows ? "x_rows" : "x", (x_rows ? *x_rows : x).size(0));
  check_count(op, "x", "rows", x.size(0));
  check_features(op, "N", dy.size(1));
  check_features(op, "K", x.size(1));
  check_offs(op, offs, "dy", dy);
  check_activation(op, "out_dtype", out_dtype);
}

void check_grouped_scaled_mm_wgrad(const char* op, const Tensor& dy_t, const Tensor& x_t,
                                   const Tensor& scale_dy_t, const Tensor& scale_x_t,
                                   const Tensor& offs, ScalarType out_dtype) {
  const bool per_group = scale_dy_t.dim() == 1;  // else per block
  if (per_group) {
    check_column_blocks(op, "dy_t", dy_t, "N");
    check_fp8(op, "dy_t", dy_t.scalar_type());
    check_column_blocks(op, "x_t", x_t, "K");
    check_dtype(op, "x_t", x_t, ScalarType::Float8_e4m3fn);
  } else {
    check_columnwise(op, "dy_t", dy_t, "scale_dy_t", scale_dy_t, "N");
    check_columnwise(op, "x_t", x_t, "scale_x_t", scale_x_t, "K");
  }
  check_device(op, "x_t", x_t, "dy_t", dy_t);
  check_same(op, "the number of blocks", "dy_t", dy_t.size(0), "x_t", x_t.size(0));
  check_offs(op, offs, "dy_t", dy_t);
  if (per_group) {
    check_group_scale(op, "scale_dy_t", scale_dy_t, "dy_t", dy_t, offs.size(0));
    check_group_scale(op, "scale_x_t", scale_x_t, "dy_t", dy_t, offs.size(0));
  }
  check_activation(op, "out_dtype", out_dtype);
}

void check_main_grad(const char* op, const Tensor& main_grad, const Tensor& dy, int64_t E,
                     int64_t N, int64_t K, const std::optional<Tensor>& overwrite) {
  check_dim(op, "main_grad", main_grad, 3);
  check_grad(op, main_grad, main_grad.size(0), dy, E, N, K);
  check(main_grad.is_contiguous(), op, ": main_grad must be contiguous, got strides ",
        main_grad.stride(0), ", ", main_grad.stride(1), ", ", main_grad.stride(2));
  check_overwrite(op, overwrite, main_grad);
}

void check_main_grad_list(const char* op, const std::vector<Tensor>& main_grad, const Tensor& dy,
                          int64_t E, int64_t N, int64_t K, const std::optional<Tensor>& overwrite) {
  check_experts(op, "main_grad", main_grad);
  check_grad(op, main_grad[0], static_cast<int64_t>(main_grad.size()), dy, E, N, K);
  for (const Tensor& expert : main_grad)
    check(expert.is_contiguous(), op, ": main_grad must be contiguous, got strides ",
          expert.stride(0), ", ", expert.stride(1));
  check_overwrite(op, overwrite, main_grad[0]);
}

// Checks what keeps tensors of another device from a kernel. The ops that this one calls check the
// rest, in their own names.
void check_block_scaled_linear(const Tensor& x, const Tensor& w, const Tensor& m_splits,
                               const std::optional<Tensor>& bias) {
  const char* op = "block_scaled_linear";
  check_dim(op, "x", x, 2);
  check_dim(op, "w", w, 3);
  check_dim(op, "m_splits", m_splits, 1);
  check_device(op, "w", w, "x", x);
  check_device(op, "m_splits", m_splits, "x", x);
  if (bias) check_device(op, "bias", *bias, "x", x);
}

void check_block_scaled_linear_grad(const Tensor& dy, const Tensor& offs,
                                    const std::optional<Tensor>& x_t,
                                    const std::optional<Tensor>& scale_x_t,
                                    const std::optional<Tensor>& w_t,
                                    const std::optional<Tensor>& scale_w) {
  const char* op = "block_scaled_linear_grad";
  check_dim(op, "dy", dy, 2);
  check_dim(op, "offs", offs, 1);
  check(!x_t || scale_x_t, op, ": x_t needs scale_x_t, got none");
  check(!w_t || scale_w, op, ": w_t needs scale_w, got none");
  check_device(op, "offs", offs, "dy", dy);
  if (x_t) check_device(op, "x_t", *x_t, "dy", dy);
  if (scale_x_t) check_device(op, "scale_x_t", *scale_x_t, "dy", dy);
  if (w_t) check_device(op, "w_t", *w_t, "dy", dy);
  if (scale_w) check_device(op, "scale_w", *scale_w, "dy", dy);
  if (scale_w) check_dim(op, "scale_w", *scale_w, 3);
}

}  // namespace grouped_linear
