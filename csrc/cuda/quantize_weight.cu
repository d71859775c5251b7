#include <type_traits>
#include <vector>

#include "../checks.h"
#include "../ops.h"
#include "kernels/quantize_weight.cuh"
#include "launch.h"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w_in, double amax_epsilon,
                                                   bool power_of_two_scales, bool columnwise) {
  check_quantize_weight("quantize_weight", w_in, amax_epsilon);

  const Launch launch("quantize_weight", w_in);
  const Tensor w = torch::stable::contiguous(w_in);
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);
  const int64_t row_blocks = ceil_div(N, kBlock), col_blocks = ceil_div(K, kBlock);
  using Shape = std::vector<int64_t>;
  Tensor q = torch::stable::new_empty(w, Shape{E, N, K}, ScalarType::Float8_e4m3fn);
  Tensor scale = torch::stable::new_empty(w, Shape{E, row_blocks, col_blocks}, ScalarType::Float);
  Tensor q_t = torch::stable::new_empty(w, columnwise ? Shape{E, K, N} : Shape{0},
                                        ScalarType::Float8_e4m3fn);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto run = [&](auto element) {
    using Element = typename decltype(element)::type;
    const auto* values = static_cast<const Element*>(w.const_data_ptr());
    // K is a multiple of 16, so every row is aligned when the first is.
    const bool vectorised = reinterpret_cast<uintptr_t>(values) % 16 == 0;
    quantize_weight_kernel<Element>
        <<<static_cast<unsigned>(E * row_blocks * col_blocks), kTileThreads, 0, launch.stream()>>>(
            values, vectorised, static_cast<int>(N), static_cast<int>(K), rule,
            static_cast<uint8_t*>(q.mutable_data_ptr()), scale.mutable_data_ptr<float>(),
            columnwise ? static_cast<uint8_t*>(q_t.mutable_data_ptr()) : nullptr);
  };
  switch (w.scalar_type()) {
    case ScalarType::BFloat16: run(std::type_identity<__nv_bfloat16>()); break;
    case ScalarType::Half: run(std::type_identity<__half>()); break;
    default: run(std::type_identity<float>());
  }
  launch.check_launched();
  return {q, scale, q_t};
}

}  // namespace grouped_linear::cuda
