// SPDX-License-Identifier: Apache-2.0
// One scale for each 32 elements: MXFP8, and bf16 rounded through it.
#include <vector>

#include "checks.h"
#include "cuda/quantize/launch_tiles.h"
#include "cuda/quantize/mx.cuh"
#include "experts.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// One pass over the input for whatever `out` asks for.
template <bool rounded>
void quantize(const Launch& launch, const GroupedInput& input, const bool* refresh, MxOutputs out) {
  for_element(input.values.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    const int shared_bytes = out.q_t ? static_cast<int>(sizeof(TransposedTile)) : 0;
    launch_over_tiles<group_mx_kernel<Element, rounded>>(
        launch, input.grid(launch, kMxOccupancy<Element>), shared_bytes, kMxOccupancy<Element>,
        data<Element>(input.values), input.row_stride, input.vectorised(), input.groups, refresh,
        out);
  });
}

// The same for activations, with their bias gradient.
template <bool rounded>
void quantize(const Launch& launch, const GroupedInput& input, MxOutputs out,
              const Tensor& bias_grad) {
  const PartialBiasGrad sums(bias_grad, input.row_blocks);
  out.partial_bias_grad = sums.partial();
  quantize<rounded>(launch, input, nullptr, out);
  sums.sum(launch, input.groups.offs, input.groups.T);
}

Tensor new_output(const Tensor& like, bool wanted, const Shape& shape, ScalarType dtype) {
  return new_tensor(like, wanted ? shape : Shape{0}, dtype);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_mx(const Tensor& x,
                                                                     const Tensor& offs,
                                                                     bool rowwise, bool columnwise,
                                                                     bool bias_grad) {
  check_group_quantize_mx("group_quantize_mx", x, offs, rowwise, columnwise);

  const Launch launch("group_quantize_mx", x);
  const GroupedInput input(x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn, e8m0 = ScalarType::Float8_e8m0fnu;
  const Tensor q = new_output(x, rowwise, {T, K}, e4m3);
  const Tensor scale = new_output(x, rowwise, {T, ceil_div(K, kMxBlock)}, e8m0);
  const Tensor q_t = new_output(x, columnwise, {input.row_blocks, K, kBlock}, e4m3);
  const Tensor scale_t = new_output(x, columnwise, {input.row_blocks, K, kBlock / kMxBlock}, e8m0);
  const Tensor grad = new_output(x, bias_grad, {E, K}, ScalarType::Float);

  MxOutputs out{};
  out.q = mutable_data_or_null<uint8_t>(q);
  out.scale = mutable_data_or_null<uint8_t>(scale);
  out.q_t = mutable_data_or_null<uint8_t>(q_t);
  out.scale_t = mutable_data_or_null<uint8_t>(scale_t);
  quantize<false>(launch, input, out, grad);
  return {q, scale, q_t, scale_t, grad};
}

std::tuple<Tensor, Tensor, Tensor> group_round_mx(const Tensor& x, const Tensor& offs, bool rowwise,
                                                  bool columnwise, bool bias_grad) {
  check_group_quantize_mx("group_round_mx", x, offs, rowwise, columnwise);

  const Launch launch("group_round_mx", x);
  const GroupedInput input(x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const Tensor x_rowwise = new_output(x, rowwise, {T, K}, ScalarType::BFloat16);
  const Tensor x_columnwise = new_output(x, columnwise, {T, K}, ScalarType::BFloat16);
  const Tensor grad = new_output(x, bias_grad, {E, K}, ScalarType::Float);

  MxOutputs out{};
  out.rowwise = mutable_data_or_null<uint16_t>(x_rowwise);
  out.columnwise = mutable_data_or_null<uint16_t>(x_columnwise);
  quantize<true>(launch, input, out, grad);
  return {x_rowwise, x_columnwise, grad};
}

void refresh_weight_mx_(const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise,
                        const std::vector<Tensor>& w, const std::optional<Tensor>& refresh) {
  check_refresh_weight_mx(w, refresh, w_rowwise, w_columnwise);

  const Launch launch("refresh_weight_mx_", w[0]);
  AlignedOutput rowwise(w_rowwise), columnwise(w_columnwise);
  MxOutputs out{};
  out.rowwise = mutable_data_or_null<uint16_t>(rowwise.used());
  out.columnwise = mutable_data_or_null<uint16_t>(columnwise.used());
  quantize<true>(launch, GroupedInput(packed(w)), data_or_null<bool>(refresh), out);
  rowwise.copy_back(), columnwise.copy_back();
}

}  // namespace grouped_linear::cuda
