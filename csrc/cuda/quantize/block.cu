// SPDX-License-Identifier: Apache-2.0
// Block scaling of activations: rows, gathered or not.
#include <limits>

#include "checks.h"
#include "cuda/quantize/block.h"
#include "cuda/quantize/block_and_weight.cuh"
#include "cuda/routing/copy_rows.h"

namespace grouped_linear::cuda {

void quantize_rows(const Tensor& x_in, const Tensor& offs_in, double amax_epsilon,
                   bool power_of_two_scales, const Quantized& given) {
  const Launch launch("group_quantize", x_in);
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in);
  BlockResults results(given, x.size(0), x.size(1), offs.size(0));
  if (results.T == 0) return results.zero_bias_grad();

  for_element(x.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    quantize_tiles<Element>(launch, rows_of<Element>(x), offs,
                            {static_cast<float>(amax_epsilon), power_of_two_scales}, results);
  });
}

void quantize_rows_and_weight(const Tensor& x_in, const Tensor& offs_in, const Tensor& w_in,
                              double amax_epsilon, bool power_of_two_scales, const Quantized& of_x,
                              const QuantizedWeight& of_w) {
  if (x_in.size(0) == 0 || x_in.scalar_type() != w_in.scalar_type() ||
      !has_fused_sources(x_in.scalar_type())) {
    quantize_rows(x_in, offs_in, amax_epsilon, power_of_two_scales, of_x);
    return refresh_weight_(of_w.q, of_w.scale, of_w.q_t, {w_in}, std::nullopt, amax_epsilon,
                           power_of_two_scales, std::nullopt);
  }
  const Launch launch("block_scaled_linear", x_in);
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in), w = as_dense(w_in);
  const BlockResults results(of_x, x.size(0), x.size(1), offs.size(0));
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};

  const int64_t tiles = results.most_tiles(ceil_div(results.K, kBlock));
  const unsigned row_blocks = grid_of<Rows<FusedElement>>(launch, tiles, results.E);
  const PackedExperts<FusedElement> experts{data<FusedElement>(w), w.size(1) * w.size(2)};
  launch.run(quantize_rows_and_weight_kernel<FusedElement>,
             row_blocks + static_cast<unsigned>(of_w.scale.numel()), kTileThreads, 0,
             rows_of<FusedElement>(x), data<int32_t>(offs), static_cast<int>(results.E),
             static_cast<int>(results.T), static_cast<int>(results.K), results.outputs(),
             row_blocks, experts, is_aligned(w), outputs_of(of_w, w.size(1), w.size(2)), rule);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs_in, const std::optional<Tensor>& rows_in,
    double amax_epsilon, bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad,
    bool share_scales) {
  check_group_quantize(x_in, offs_in, rows_in, amax_epsilon, rowwise, columnwise);

  const int64_t T = (rows_in ? *rows_in : x_in).size(0);
  BlockResults results(x_in, T, x_in.size(1), offs_in.size(0), rowwise, columnwise, bias_grad,
                       share_scales);
  if (!rows_in) {
    quantize_rows(x_in, offs_in, amax_epsilon, power_of_two_scales, results);
    return results.all();
  }

  if (T == 0 || x_in.size(0) == 0) {  // no row to gather
    results.zero();
    return results.all();
  }
  const Launch launch("group_quantize", x_in);
  const Tensor rows = int32_numbers(launch, *rows_in, x_in);
  if (!has_fused_sources(x_in.scalar_type())) {
    quantize_rows(copy_rows(launch, x_in, rows), offs_in, amax_epsilon, power_of_two_scales,
                  results);
    return results.all();
  }
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in);
  constexpr int64_t most = std::numeric_limits<uint32_t>::max();
  const int64_t row_bytes = x.stride(0) * item_size(x);
  const bool vectorised = has_aligned_rows(x) && row_bytes <= most;
  const GatheredRows<FusedElement> gathered{data<FusedElement>(x), x.stride(0), vectorised,
                                            data<int32_t>(rows), x.size(0)};
  quantize_tiles<FusedElement>(launch, gathered, offs,
                               {static_cast<float>(amax_epsilon), power_of_two_scales}, results);
  return results.all();
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs_in) {
  check_grouped_bias_grad(dy_in, offs_in);

  const Launch launch("grouped_bias_grad", dy_in);
  const Tensor dy = with_dense_rows(dy_in), offs = as_dense(offs_in);
  BlockResults results(dy, dy.size(0), dy.size(1), offs.size(0), false, false, true);

  if (results.T == 0)
    results.zero_bias_grad();
  else
    for_element(dy.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
      quantize_tiles<Element>(launch, rows_of<Element>(dy), offs, ScaleRule{}, results);
    });
  return results.bias_grad;
}

}  // namespace grouped_linear::cuda
