// Block scaling of SwiGLU's output.
#include "checks.h"
#include "cuda/quantize/block.h"
#include "cuda/quantize/block_sources.cuh"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(
    const Tensor& gate_up_in, const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool keep_h, bool share_scales, double alpha, double beta,
    std::optional<double> limit, bool interleaved, double cubic) {
  check_group_quantize_swiglu(gate_up_in, offs_in, amax_epsilon, rowwise, columnwise);
  const SwigluForm given =
      checked_form("group_quantize_swiglu", alpha, beta, limit, interleaved, cubic);

  const Launch launch("group_quantize_swiglu", gate_up_in);
  const Tensor gate_up = with_dense_rows(gate_up_in), offs = as_dense(offs_in);
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  const BlockResults results(gate_up, T, K, offs.size(0), rowwise, columnwise, false, share_scales);
  const Tensor h = new_tensor(gate_up, keep_h ? Shape{T, K} : Shape{0}, gate_up.scalar_type());

  if (T > 0) {
    const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
    for_element(gate_up.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
      auto* kept = mutable_data_or_null<Element>(h);
      for_form(given, [&]<typename Form>(const Form& form) {
        const SwigluRows<Element, Form> source{data<Element>(gate_up),
                                               gate_up.stride(0),
                                               has_aligned_rows(gate_up),
                                               static_cast<int>(K),
                                               kept,
                                               form};
        quantize_tiles<Element>(launch, source, offs, rule, results);
      });
      if (!kept) return;
      launch.run(zero_tail_kernel<Element>, launch.multiprocessors(), kSwigluThreads, 0,
                 data<int32_t>(offs), static_cast<int>(offs.size(0)), T, static_cast<int>(K), kept);
    });
  }
  return {results.q, results.scale, results.q_t, results.scale_t, h};
}

}  // namespace grouped_linear::cuda
