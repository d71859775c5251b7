// SPDX-License-Identifier: Apache-2.0
// Block scaling of SwiGLU's output.
#include "checks.h"
#include "cuda/quantize/block.h"
#include "cuda/quantize/block_swiglu.cuh"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(
    const Tensor& gate_up_in, const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool keep_h, bool share_scales, double alpha, double beta,
    std::optional<double> limit, bool interleaved, double cubic) {
  check_group_quantize_swiglu(gate_up_in, offs_in, amax_epsilon, rowwise, columnwise);
  const SwigluForm given =
      checked_form("group_quantize_swiglu", alpha, beta, limit, interleaved, cubic);

  const int64_t T = gate_up_in.size(0), K = gate_up_in.size(1) / 2;
  const BlockResults results(gate_up_in, T, K, offs_in.size(0), rowwise, columnwise, false,
                             share_scales);
  const auto with_h = [&](const Tensor& h) {
    return std::make_tuple(results.q, results.scale, results.q_t, results.scale_t, h);
  };
  if (!has_fused_sources(gate_up_in.scalar_type())) {
    const Tensor h = swiglu(gate_up_in, offs_in, alpha, beta, limit, interleaved, cubic);
    quantize_rows(h, offs_in, amax_epsilon, power_of_two_scales, results);
    return with_h(keep_h ? h : new_tensor(h, {0}, h.scalar_type()));
  }

  const Launch launch("group_quantize_swiglu", gate_up_in);
  const Tensor gate_up = with_dense_rows(gate_up_in), offs = as_dense(offs_in);
  const Tensor h = new_tensor(gate_up, keep_h ? Shape{T, K} : Shape{0}, gate_up.scalar_type());
  if (T == 0) return with_h(h);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  auto* kept = mutable_data_or_null<FusedElement>(h);
  for_form(given, [&]<typename Form>(const Form& form) {
    const SwigluRows<FusedElement, Form> source{data<FusedElement>(gate_up),
                                                gate_up.stride(0),
                                                has_aligned_rows(gate_up),
                                                static_cast<int>(K),
                                                kept,
                                                form};
    quantize_tiles<FusedElement>(launch, source, offs, rule, results);
  });
  if (kept)
    launch.run(zero_tail_kernel<FusedElement>, launch.multiprocessors(), kSwigluThreads, 0,
               data<int32_t>(offs), static_cast<int>(offs.size(0)), T, static_cast<int>(K), kept);
  return with_h(h);
}

}  // namespace grouped_linear::cuda
