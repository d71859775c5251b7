// SPDX-License-Identifier: Apache-2.0
// The schema of every op of the namespace grouped_linear, and the kernels behind it.
//
// T rows, E groups, K in_features, N out_features, B = 128, Tp = padded_rows(T, E).
// offs [E] int32: the end of each group's rows, torch's grouped_mm convention.
// scale multiplies to dequantize: x ~ q * scale.
//
// A dtype's only default is None: AOTInductor stores another default as an integer, which it cannot
// read as a dtype (torch 2.13).

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "backends.h"
#include "checks.h"

STABLE_TORCH_LIBRARY(grouped_linear, m) {
  // m_splits [E] -> offs [E]:
  // stride * min(num_rows, running sum of m_splits rounded up to alignment), int32 by default
  m.def(
      "splits_to_offsets(Tensor m_splits, SymInt num_rows, int alignment=1, SymInt stride=1, "
      "ScalarType? out_dtype=None) -> Tensor");

  // x [T, K] -> q [T, K], scale [ceil(K/B), round_up(T, 4)], q_t [Tp/B, K, B], scale_t [Tp/B, K],
  //             bias_grad [E, K] float32; outputs that are not requested are empty
  // share_scales: B columns of q_t share a scale if their amaxes are within a factor of 256
  // rows [T]: of x [S, K], quantize x[rows]
  m.def(
      "group_quantize(Tensor x, Tensor offs, Tensor? rows=None, float amax_epsilon=0.0, "
      "bool power_of_two_scales=True, bool rowwise=True, bool columnwise=False, "
      "bool bias_grad=False, bool share_scales=False) "
      "-> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor bias_grad)");
  // Current scaling: one scale [E] a group from its amax; out_dtype: e4m3 or e5m2
  // Delayed scaling: scale [E] of earlier steps; amax [E] = max(amax, magnitudes of the group)
  // MX: blocks of 32 with E8M0 scales, scale [T, ceil(K/32)] and scale_t [Tp/B, K, 4]
  m.def(
      "group_quantize_current(Tensor x, Tensor offs, ScalarType out_dtype, float amax_epsilon=0.0, "
      "bool power_of_two_scales=False, bool rowwise=True, bool columnwise=False, "
      "bool bias_grad=False) -> (Tensor q, Tensor scale, Tensor q_t, Tensor bias_grad)");
  m.def(
      "group_quantize_delayed(Tensor x, Tensor offs, Tensor scale, Tensor(a!)? amax, "
      "ScalarType out_dtype, bool rowwise=True, bool columnwise=False, bool bias_grad=False) "
      "-> (Tensor q, Tensor scale, Tensor q_t, Tensor bias_grad)");
  m.def(
      "group_quantize_mx(Tensor x, Tensor offs, bool rowwise=True, bool columnwise=False, "
      "bool bias_grad=False) "
      "-> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor bias_grad)");
  // group_quantize_mx, dequantized to bf16: x_rowwise and x_columnwise [T, K]
  m.def(
      "group_round_mx(Tensor x, Tensor offs, bool rowwise=True, bool columnwise=False, "
      "bool bias_grad=False) -> (Tensor x_rowwise, Tensor x_columnwise, Tensor bias_grad)");

  // logits [T, E] -> weights [T, k] float32, experts [T, k] int64: those with the largest scores, the
  //                  largest first; score_function: "none", "softmax" or "sigmoid"
  m.def(
      "topk_experts(Tensor logits, int k, Tensor? expert_bias=None, str score_function='none', "
      "bool normalize=False, float scaling_factor=1.0) -> (Tensor weights, Tensor experts)");
  m.def(
      "topk_experts_grad(Tensor d_weights, Tensor logits, Tensor experts, "
      "str score_function='none', bool normalize=False, float scaling_factor=1.0) -> Tensor");

  // experts [T, C] -> rows sorted by expert: choice, token [T * C], where they come from;
  //                   row [T, C], where each choice goes; offs [num_experts]
  m.def(
      "sort_by_expert(Tensor experts, int num_experts) "
      "-> (Tensor choice, Tensor token, Tensor row, Tensor offs)");
  // y [R, H], rows [T, C] -> out [T, H] = the sum over c of weight[t, c] * y[rows[t, c]], where
  //                         rows from offs[-1] on add nothing, and
  // a [T, H] -> out [T, C] = a[t] . y[rows[t, c]], float32
  m.def("gather_sum(Tensor y, Tensor rows, Tensor? weight=None, Tensor? offs=None) -> Tensor");
  m.def("gather_dot(Tensor a, Tensor y, Tensor rows) -> Tensor");

  // x [T, H], rows [T, C] -> out [num_rows, H] with out[rows[t, c]] = x[t]
  m.def("scatter_rows(Tensor x, Tensor rows, SymInt num_rows) -> Tensor");

  // gate_up [T, 2 K] -> h [T, K] = g * sigmoid(alpha * (g + cubic * g^3)) * (u + beta)
  //                     with g = min(gate, limit) and u = clamp(up, -limit, limit)
  // interleaved: gate and up are columns 2 c and 2 c + 1, else two halves
  m.def(
      "swiglu(Tensor gate_up, Tensor offs, float alpha=1.0, float beta=0.0, float? limit=None, "
      "bool interleaved=False, float cubic=0.0) -> Tensor");
  // The backward of an expert: dh [T, K] is the gradient by h before row t's output is weighted by
  // weight[t]. d_gate_up [T, 2 K] is of weight * dh, h of weight * h, d_weight [T] of dh . h
  m.def(
      "swiglu_grad(Tensor dh, Tensor gate_up, Tensor weight, Tensor offs, float alpha=1.0, "
      "float beta=0.0, float? limit=None, bool interleaved=False, float cubic=0.0) "
      "-> (Tensor d_gate_up, Tensor h, Tensor d_weight)");

  // group_quantize of h or of d_gate_up, which is not stored
  m.def(
      "group_quantize_swiglu(Tensor gate_up, Tensor offs, float amax_epsilon=0.0, "
      "bool power_of_two_scales=True, bool rowwise=True, bool columnwise=False, "
      "bool keep_h=False, bool share_scales=False, float alpha=1.0, float beta=0.0, "
      "float? limit=None, bool interleaved=False, float cubic=0.0) "
      "-> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor h)");
  m.def(
      "group_quantize_swiglu_grad(Tensor dh, Tensor gate_up, Tensor weight, Tensor offs, "
      "float amax_epsilon=0.0, bool power_of_two_scales=True, bool rowwise=True, "
      "bool columnwise=False, bool bias_grad=False, bool h_columnwise=False, "
      "bool keep_h=False, bool share_h_scales=False, float alpha=1.0, float beta=0.0, "
      "float? limit=None, bool interleaved=False, float cubic=0.0) -> (Tensor q, Tensor scale, "
      "Tensor q_t, Tensor scale_t, Tensor bias_grad, Tensor h_t, Tensor scale_h_t, Tensor h, "
      "Tensor d_weight)");
  m.def("group_dequantize(Tensor q, Tensor scale, Tensor offs, ScalarType out_dtype) -> Tensor");
  m.def(
      "group_dequantize_t(Tensor q_t, Tensor scale_t, Tensor offs, SymInt num_rows, "
      "ScalarType out_dtype) -> Tensor");

  // dy [T, N] -> [E, N] float32
  m.def("grouped_bias_grad(Tensor dy, Tensor offs) -> Tensor");

  // w [E, N, K] -> q [E, N, K], scale [E, ceil(N/B), ceil(K/B)], q_t [E, K, N]
  // mxfp4_dim, here and below: the numbers of quantize_mxfp4, whose blocks run along this dimension
  // of w, -1 or -2
  m.def(
      "quantize_weight(Tensor w, float amax_epsilon=0.0, bool power_of_two_scales=True, "
      "bool columnwise=True, bool rowwise=True, int? mxfp4_dim=None) "
      "-> (Tensor q, Tensor scale, Tensor q_t)");

  // q [E, N, K] -> q_t [E, K, N]
  m.def("transpose_weight(Tensor q) -> Tensor");

  // w: E tensors [N, K]
  m.def(
      "quantize_weight_list(Tensor[] w, float amax_epsilon=0.0, bool power_of_two_scales=True, "
      "bool columnwise=True) -> (Tensor q, Tensor scale, Tensor q_t)");
  // With one scale an expert: scale [E]
  m.def(
      "quantize_weight_current(Tensor w, float amax_epsilon=0.0, bool power_of_two_scales=False, "
      "bool columnwise=True) -> (Tensor q, Tensor scale, Tensor q_t)");
  m.def(
      "quantize_weight_delayed(Tensor w, Tensor scale, Tensor(a!)? amax, bool columnwise=True) "
      "-> (Tensor q, Tensor scale, Tensor q_t)");

  // Quantize a weight into existing tensors, unless the 0-d bool `refresh` is false. w: one tensor
  // [E, N, K], or E tensors [N, K]. Delayed scaling writes to `scale` what it quantized with:
  // `state`, or where that is 0 an expert's own. MX writes bf16.
  m.def(
      "refresh_weight_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor[] w, "
      "Tensor? refresh, float amax_epsilon=0.0, bool power_of_two_scales=True, "
      "int? mxfp4_dim=None) -> ()");
  m.def(
      "refresh_weight_current_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor[] w, "
      "Tensor? refresh, float amax_epsilon=0.0, bool power_of_two_scales=False) -> ()");
  m.def(
      "refresh_weight_delayed_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor(d!)? amax, "
      "Tensor[] w, Tensor state, Tensor? refresh) -> ()");
  m.def(
      "refresh_weight_mx_(Tensor(a!) w_rowwise, Tensor(b!)? w_columnwise, Tensor[] w, "
      "Tensor? refresh) -> ()");

  // scale [E], amax [E] and amax_history [H, E] of any number of operands: moves amax into the
  // history, computes scales from the history, sets amax to zero
  m.def(
      "update_scales_(Tensor(a!)[] scale, Tensor(b!)[] amax, Tensor(c!)[] amax_history, "
      "float[] fp8_max, int margin=0, bool most_recent=False) -> ()");

  // A step of Adam over master [E, N, K], as torch steps a parameter, and over the FP8 numbers of it.
  // master, grad, exp_avg, exp_avg_sq, max_exp_avg_sq [E, N, K] of one dtype; step, lr_tensor (in place of lr), grad_scale, found_inf: 0-d float32. grad is
  // written if grad_scale is given, and nothing is if found_inf is not 0
  m.def(
      "adam_weight_(Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? q_t, Tensor(d!) master, "
      "Tensor(e!) grad, Tensor(f!) exp_avg, Tensor(g!) exp_avg_sq, Tensor(h!)? max_exp_avg_sq, "
      "Tensor step, "
      "Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf, float lr, float beta1, "
      "float beta2, float weight_decay, float eps, bool decoupled_weight_decay=True, "
      "bool maximize=False, float amax_epsilon=0.0, bool power_of_two_scales=True, "
      "int? mxfp4_dim=None) -> ()");

  // c [M, N], a [M, K], b [K, N] in 16 bits -> c + a @ b, rounded once
  m.def("addmm(Tensor c, Tensor a, Tensor b) -> Tensor");

  // a [T, K], b [E, K, N] as in torch, bias [E, N] -> a[t] @ b[e] + bias[e]: [T, N]. With rows [T],
  // here and below, an operand has any number of rows, and rows[t] says which of them is row t.
  // With a_low [T, r] and b_low [E, r, N]: + a_low[t] @ b_low[e], before the one rounding
  m.def(
      "grouped_mm(Tensor a, Tensor b, Tensor offs, Tensor? bias=None, ScalarType? out_dtype=None, "
      "Tensor? rows=None, Tensor? a_low=None, Tensor? b_low=None) -> Tensor");
  // b: E tensors [K, N]; transpose_b: [N, K], a[t] @ b[e].T, for fprop
  m.def(
      "grouped_mm_list(Tensor a, Tensor[] b, Tensor offs, Tensor? bias=None, "
      "ScalarType? out_dtype=None, bool transpose_b=False, Tensor? rows=None) -> Tensor");
  // swiglu of grouped_mm's result, which is gate_up. b [E, K, 2 F] -> [T, 2 F] or empty, h [T, F]
  m.def(
      "grouped_mm_swiglu(Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? rows=None, "
      "bool keep_gate_up=True, float alpha=1.0, float beta=0.0, float? limit=None, "
      "bool interleaved=False, float cubic=0.0) -> (Tensor gate_up, Tensor h)");
  // swiglu_grad of grouped_mm's result, which is dh. b [E, K, F], gate_up [T, 2 F]
  m.def(
      "grouped_mm_swiglu_grad(Tensor a, Tensor b, Tensor gate_up, Tensor weight, Tensor offs, "
      "Tensor? rows=None, float alpha=1.0, float beta=0.0, float? limit=None, "
      "bool interleaved=False, float cubic=0.0) -> (Tensor d_gate_up, Tensor h, Tensor d_weight)");
  // FP8 operands with block scales, scale_a as above and scale_b [E, ceil(K/B), ceil(N/B)], or with
  // a scale a group: scale_a [E] and scale_b [E]. out_dtype: bfloat16 by default; a_low's and
  // b_low's too
  m.def(
      "grouped_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, "
      "Tensor? bias=None, ScalarType? out_dtype=None, Tensor? rows=None, Tensor? a_low=None, "
      "Tensor? b_low=None) -> Tensor");

  // MXFP4: w [E, N, K] -> q [E, N, K/2], two codes a byte, scale [E, N, K/32] E8M0, both uint8
  m.def("quantize_mxfp4(Tensor w) -> (Tensor q, Tensor scale)");
  m.def("dequantize_mxfp4(Tensor q, Tensor scale, ScalarType out_dtype) -> Tensor");
  // grouped_mm of a weight w [E, N, K] in MXFP4, which is b and scale_b: a[t] @ w[e].T, [T, N], or
  // without transpose_b a[t] @ w[e], [T, K]. a: of 16 bits or float32, then w is decoded to it, or
  // e4m3 with scale_a, then w is e4m3 with a scale for each 128 x 128 block
  m.def(
      "grouped_mm_mxfp4(Tensor a, Tensor b, Tensor scale_b, Tensor offs, Tensor? bias=None, "
      "Tensor? scale_a=None, ScalarType? out_dtype=None, bool transpose_b=True, "
      "Tensor? rows=None, Tensor? a_low=None, Tensor? b_low=None) -> Tensor");

  // dy [T, N], x [T, K] -> dy[group e].T @ x[group e]: [E, N, K]. At most one has rows
  m.def(
      "grouped_mm_wgrad(Tensor dy, Tensor x, Tensor offs, ScalarType? out_dtype=None, "
      "Tensor? dy_rows=None, Tensor? x_rows=None) -> Tensor");
  m.def(
      "grouped_scaled_mm_wgrad(Tensor dy_t, Tensor x_t, Tensor scale_dy_t, Tensor scale_x_t, "
      "Tensor offs, ScalarType? out_dtype=None) -> Tensor");

  // A block-scaled layer's forward: splits_to_offsets, group_quantize, quantize_weight and
  // grouped_scaled_mm. Its backward: group_quantize, grouped_scaled_mm (with w_t) and
  // grouped_scaled_mm_wgrad (with x_t). Outputs that are not requested are empty. out_dtype: of dw,
  // dy's by default
  m.def(
      "block_scaled_linear(Tensor x, Tensor w, Tensor m_splits, Tensor? bias=None, "
      "float amax_epsilon=0.0, bool power_of_two_scales=True, bool share_scales=False, "
      "bool columnwise_x=True, bool columnwise_w=True) "
      "-> (Tensor y, Tensor offs, Tensor x_t, Tensor scale_x_t, Tensor w_t, Tensor scale_w)");
  m.def(
      "block_scaled_linear_grad(Tensor dy, Tensor offs, Tensor? x_t, Tensor? scale_x_t, "
      "Tensor? w_t, Tensor? scale_w, float amax_epsilon=0.0, bool power_of_two_scales=True, "
      "bool bias_grad=False, ScalarType? out_dtype=None) -> (Tensor dx, Tensor dw, Tensor db)");

  // wgrad added to main_grad, or written over it if the 0-d bool `overwrite` is true
  m.def(
      "grouped_mm_wgrad_(Tensor(a!) main_grad, Tensor dy, Tensor x, Tensor offs, "
      "Tensor? overwrite=None, Tensor? dy_rows=None, Tensor? x_rows=None) -> ()");
  m.def(
      "grouped_scaled_mm_wgrad_(Tensor(a!) main_grad, Tensor dy_t, Tensor x_t, Tensor scale_dy_t, "
      "Tensor scale_x_t, Tensor offs, Tensor? overwrite=None) -> ()");
  // main_grad: E tensors [N, K]
  m.def(
      "grouped_mm_wgrad_list_(Tensor(a!)[] main_grad, Tensor dy, Tensor x, Tensor offs, "
      "Tensor? overwrite=None, Tensor? dy_rows=None, Tensor? x_rows=None) -> ()");
  m.def(
      "grouped_scaled_mm_wgrad_list_(Tensor(a!)[] main_grad, Tensor dy_t, Tensor x_t, "
      "Tensor scale_dy_t, Tensor scale_x_t, Tensor offs, Tensor? overwrite=None) -> ()");
}

// The kernels of op are cpu::op and, in a build with CUDA, cuda::op.
#define GROUPED_LINEAR_OPS(OP)   \
  OP(splits_to_offsets)          \
  OP(group_quantize)             \
  OP(group_quantize_current)     \
  OP(group_quantize_delayed)     \
  OP(group_quantize_mx)          \
  OP(group_round_mx)             \
  OP(topk_experts)               \
  OP(topk_experts_grad)          \
  OP(sort_by_expert)             \
  OP(gather_sum)                 \
  OP(gather_dot)                 \
  OP(scatter_rows)               \
  OP(swiglu)                     \
  OP(swiglu_grad)                \
  OP(group_quantize_swiglu)      \
  OP(group_quantize_swiglu_grad) \
  OP(group_dequantize)           \
  OP(group_dequantize_t)         \
  OP(grouped_bias_grad)          \
  OP(quantize_weight)            \
  OP(transpose_weight)           \
  OP(quantize_weight_list)       \
  OP(quantize_weight_current)    \
  OP(quantize_weight_delayed)    \
  OP(refresh_weight_)            \
  OP(refresh_weight_current_)    \
  OP(refresh_weight_delayed_)    \
  OP(refresh_weight_mx_)         \
  OP(update_scales_)             \
  OP(adam_weight_)               \
  OP(addmm)                      \
  OP(grouped_mm)                 \
  OP(grouped_mm_list)            \
  OP(grouped_mm_swiglu)          \
  OP(grouped_mm_swiglu_grad)     \
  OP(grouped_scaled_mm)          \
  OP(quantize_mxfp4)             \
  OP(dequantize_mxfp4)           \
  OP(grouped_mm_mxfp4)           \
  OP(grouped_mm_wgrad)           \
  OP(grouped_scaled_mm_wgrad)    \
  OP(block_scaled_linear)        \
  OP(block_scaled_linear_grad)   \
  OP(grouped_mm_wgrad_)          \
  OP(grouped_scaled_mm_wgrad_)   \
  OP(grouped_mm_wgrad_list_)     \
  OP(grouped_scaled_mm_wgrad_list_)

#define GROUPED_LINEAR_CPU(op) m.impl(#op, TORCH_BOX(&grouped_linear::cpu::op));

STABLE_TORCH_LIBRARY_IMPL(grouped_linear, CPU, m) { GROUPED_LINEAR_OPS(GROUPED_LINEAR_CPU); }

#ifdef GROUPED_LINEAR_CUDA
#define GROUPED_LINEAR_CUDA_OR_ERROR(op) m.impl(#op, TORCH_BOX(&grouped_linear::cuda::op));
#else
#define GROUPED_LINEAR_CUDA_OR_ERROR(op) \
  m.impl(#op, TORCH_BOX(&NoCuda<decltype(&grouped_linear::cpu::op)>::kernel<#op>));

namespace {

// The name of an op as a template argument.
template <size_t size>
struct OpName {
  char text[size];
  constexpr OpName(const char (&name)[size]) { std::copy_n(name, size, text); }
};

// A kernel with the arguments of the CPU kernel that only raises an error.
template <typename CpuKernel>
struct NoCuda;
template <typename Return, typename... Arguments>
struct NoCuda<Return (*)(Arguments...)> {
  template <OpName op>
  static Return kernel(Arguments...) {
    grouped_linear::fail(op.text,
                         ": no CUDA kernel in this build, only CPU: build it again with nvcc");
  }
};

}  // namespace
#endif

STABLE_TORCH_LIBRARY_IMPL(grouped_linear, CUDA, m) {
  GROUPED_LINEAR_OPS(GROUPED_LINEAR_CUDA_OR_ERROR);
}
