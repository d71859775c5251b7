// SPDX-License-Identifier: Apache-2.0
// Block scaling of SwiGLU's gradient, and of the weighted h that is computed beside it.
#include "checks.h"
#include "cuda/quantize/block.h"
#include "cuda/quantize/block_swiglu.cuh"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
group_quantize_swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& weight_in,
                           const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
                           bool rowwise, bool columnwise, bool bias_grad, bool h_columnwise,
                           bool keep_h, bool share_h_scales, double alpha, double beta,
                           std::optional<double> limit, bool interleaved, double cubic) {
  check_group_quantize_swiglu_grad(dh_in, gate_up_in, weight_in, offs_in, amax_epsilon, rowwise,
                                   columnwise);
  const SwigluForm given =
      checked_form("group_quantize_swiglu_grad", alpha, beta, limit, interleaved, cubic);

  const int64_t T = dh_in.size(0), K = dh_in.size(1), E = offs_in.size(0);
  BlockResults results(dh_in, T, 2 * K, E, rowwise, columnwise, bias_grad);
  const BlockResults of_h(dh_in, T, K, E, false, h_columnwise, false, share_h_scales);
  const auto all = [&](const Tensor& kept_h, const Tensor& d_weight) {
    return std::tuple_cat(results.all(), std::make_tuple(of_h.q_t, of_h.scale_t, kept_h, d_weight));
  };

  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const bool is_fused = has_fused_sources(dh.scalar_type()) && !interleaved && K % kBlock == 0 &&
                        has_aligned_rows(dh) && has_aligned_rows(gate_up) &&
                        !(keep_h && h_columnwise);
  if (!is_fused) {
    const auto [d_gate_up, h, d_weight] =
        swiglu_grad(dh, gate_up, weight_in, offs_in, alpha, beta, limit, interleaved, cubic);
    quantize_rows(d_gate_up, offs_in, amax_epsilon, power_of_two_scales, results);
    if (h_columnwise) quantize_rows(h, offs_in, amax_epsilon, power_of_two_scales, of_h);
    return all(keep_h ? h : new_tensor(dh, {0}, dh.scalar_type()), d_weight);
  }

  const Launch launch("group_quantize_swiglu_grad", dh);
  const Tensor weight = as_dense(weight_in), offs = as_dense(offs_in);
  const Tensor d_weight = new_tensor(dh, {T}, ScalarType::Float);
  const Tensor kept_h = new_tensor(dh, keep_h ? Shape{T, K} : Shape{0}, dh.scalar_type());
  if (T == 0) {
    results.zero_bias_grad();
    return all(kept_h, d_weight);
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const int64_t col_blocks = K / kBlock;
  const Tensor partial = new_tensor(dh, {col_blocks, T}, ScalarType::Float);
  for_form(given, [&]<typename Form>(const Form& form) {
    const auto run = [&]<WeightedH weighted_h>(std::integral_constant<WeightedH, weighted_h>) {
      const SwigluGradRows<FusedElement, Form, weighted_h> source{
          data<FusedElement>(dh),
          dh.stride(0),
          data<FusedElement>(gate_up),
          gate_up.stride(0),
          static_cast<int>(K),
          form,
          data<float>(weight),
          mutable_data<float>(partial),
          T,
          of_h.outputs(),
          mutable_data_or_null<FusedElement>(kept_h)};
      quantize_tiles<FusedElement>(launch, source, offs, rule, results);
    };
    if (keep_h) return run(std::integral_constant<WeightedH, WeightedH::kStored>());
    // h is quantized in the same pass where registers suffice, else in one of its own.
    if constexpr (std::is_same_v<Form, PlainSwiglu>)
      if (h_columnwise) return run(std::integral_constant<WeightedH, WeightedH::kQuantized>());
    run(std::integral_constant<WeightedH, WeightedH::kNone>());
    if constexpr (!std::is_same_v<Form, PlainSwiglu>) {
      if (!h_columnwise) return;
      const SwigluRows<FusedElement, Form, true> source{
          data<FusedElement>(gate_up), gate_up.stride(0), true, static_cast<int>(K), nullptr, form,
          data<float>(weight)};
      quantize_tiles<FusedElement>(launch, source, offs, rule, of_h);
    }
  });
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>(ceil_div(T, kSwigluThreads), 8 * launch.multiprocessors()));
  launch.run(sum_partial_d_weight_kernel, blocks, kSwigluThreads, 0, data<float>(partial),
             static_cast<int>(col_blocks), data<int32_t>(offs), static_cast<int>(E), T,
             mutable_data<float>(d_weight));
  return all(kept_h, d_weight);
}

}  // namespace grouped_linear::cuda
