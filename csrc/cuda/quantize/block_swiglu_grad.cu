// Block scaling of SwiGLU's gradient, and of the weighted h that is computed beside it.
#include "checks.h"
#include "cuda/quantize/block.h"
#include "cuda/quantize/block_sources.cuh"

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

  const Launch launch("group_quantize_swiglu_grad", dh_in);
  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const Tensor weight = as_dense(weight_in), offs = as_dense(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1), E = offs.size(0);
  BlockResults results(dh, T, 2 * K, E, rowwise, columnwise, bias_grad);
  const BlockResults of_h(dh, T, K, E, false, h_columnwise, false, share_h_scales);
  const Tensor d_weight = new_tensor(dh, {T}, ScalarType::Float);
  const auto all = [&] {
    return std::tuple_cat(results.all(), std::make_tuple(of_h.q_t, of_h.scale_t, d_weight));
  };

  if (T == 0) {
    results.zero_bias_grad();
    return all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const bool aligned = has_aligned_rows(dh) && has_aligned_rows(gate_up);
  const int64_t col_blocks = ceil_div(interleaved ? 2 * K : K, kBlock);
  const Tensor partial = new_tensor(dh, {ceil_div(2 * K, kBlock), T}, ScalarType::Float);
  const auto quantize_h = [&]<typename Element, typename Form>(const Form& form) {
    if (!h_columnwise) return;
    const SwigluRows<Element, Form, true> source{
        data<Element>(gate_up), gate_up.stride(0), has_aligned_rows(gate_up),
        static_cast<int>(K),    nullptr,           form,
        data<float>(weight)};
    quantize_tiles<Element>(launch, source, offs, rule, of_h);
  };
  for_element(dh.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    for_form(given, [&]<typename Form>(const Form& form) {
      // h is quantized in the same pass where registers suffice, else in one of its own.
      const auto run = [&]<int parts, bool with_h>() {
        const SwigluGradRows<Element, parts, Form, with_h> source{data<Element>(dh),
                                                                  dh.stride(0),
                                                                  data<Element>(gate_up),
                                                                  gate_up.stride(0),
                                                                  aligned,
                                                                  static_cast<int>(K),
                                                                  form,
                                                                  data<float>(weight),
                                                                  mutable_data<float>(partial),
                                                                  T,
                                                                  of_h.outputs()};
        quantize_tiles<Element>(launch, source, offs, rule, results);
      };
      if constexpr (sizeof(Element) == 2)
        if (aligned && K % kBlock == 0 && !interleaved) {
          constexpr bool plain = std::is_same_v<Form, PlainSwiglu>;
          if (plain && h_columnwise) return run.template operator()<2, plain>();
          run.template operator()<2, false>();
          return quantize_h.template operator()<Element>(form);
        }
      run.template operator()<1, false>();
      quantize_h.template operator()<Element>(form);
    });
  });
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>(ceil_div(T, kSwigluThreads), 8 * launch.multiprocessors()));
  launch.run(sum_partial_d_weight_kernel, blocks, kSwigluThreads, 0, data<float>(partial),
             static_cast<int>(col_blocks), data<int32_t>(offs), static_cast<int>(E), T,
             mutable_data<float>(d_weight));
  return all();
}

}  // namespace grouped_linear::cuda
