// Block scaling of SwiGLU's gradient, and of the weighted h that is computed beside it.
#include "checks.h"
#include "cuda/quantize/block.h"
#include "cuda/quantize/block_swiglu.cuh"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
group_quantize_swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& weight_in,
                           const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
                           bool rowwise, bool columnwise, bool bias_grad, bool h_columnwise,
                           bool share_h_scales, double alpha, double beta,
                           std::optional<double> limit, bool interleaved, double cubic) {
  check_group_quantize_swiglu_grad(dh_in, gate_up_in, weight_in, offs_in, amax_epsilon, rowwise,
                                   columnwise);
  const SwigluForm given =
      checked_form("group_quantize_swiglu_grad", alpha, beta, limit, interleaved, cubic);

  const int64_t T = dh_in.size(0), K = dh_in.size(1), E = offs_in.size(0);
  BlockResults results(dh_in, T, 2 * K, E, rowwise, columnwise, bias_grad);
  const BlockResults of_h(dh_in, T, K, E, false, h_columnwise, false, share_h_scales);
  const auto all = [&](const Tensor& d_weight) {
    return std::tuple_cat(results.all(), std::make_tuple(of_h.q_t, of_h.scale_t, d_weight));
  };

  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const bool is_fused = has_fused_sources(dh.scalar_type()) && !interleaved && K % kBlock == 0 &&
                        has_aligned_rows(dh) && has_aligned_rows(gate_up);
  if (!is_fused) {
    const auto [d_gate_up, h, d_weight] =
        swiglu_grad(dh, gate_up, weight_in, offs_in, alpha, beta, limit, interleaved, cubic);
    quantize_rows(d_gate_up, offs_in, amax_epsilon, power_of_two_scales, results);
    if (h_columnwise) quantize_rows(h, offs_in, amax_epsilon, power_of_two_scales, of_h);
    return all(d_weight);
  }

  const Launch launch("group_quantize_swiglu_grad", dh);
  const Tensor weight = as_dense(weight_in), offs = as_dense(offs_in);
  const Tensor d_weight = new_tensor(dh, {T}, ScalarType::Float);
  if (T == 0) {
    results.zero_bias_grad();
    return all(d_weight);
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const int64_t col_blocks = K / kBlock;
  const Tensor partial = new_tensor(dh, {col_blocks, T}, ScalarType::Float);
  for_form(given, [&]<typename Form>(const Form& form) {
    const auto run = [&]<bool with_h>(std::bool_constant<with_h>) {
      const SwigluGradRows<FusedElement, Form, with_h> source{data<FusedElement>(dh),
                                                              dh.stride(0),
                                                              data<FusedElement>(gate_up),
                                                              gate_up.stride(0),
                                                              static_cast<int>(K),
                                                              form,
                                                              data<float>(weight),
                                                              mutable_data<float>(partial),
                                                              T,
                                                              of_h.outputs()};
      quantize_tiles<FusedElement>(launch, source, offs, rule, results);
    };
    // h is quantized in the same pass where registers suffice, else in one of its own.
    if constexpr (std::is_same_v<Form, PlainSwiglu>) {
      if (h_columnwise) return run(std::true_type());
      run(std::false_type());
    } else {
      run(std::false_type());
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
  return all(d_weight);
}

}  // namespace grouped_linear::cuda
