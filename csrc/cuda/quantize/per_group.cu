// SPDX-License-Identifier: Apache-2.0
// Current and delayed scaling: one scale a group.
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cuda/quantize/launch_tiles.h"
#include "cuda/quantize/per_group.cuh"
#include "experts.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;

// The amax of every group, as the bits of a float32, in an int32 tensor [E].
// With scale_in only of groups whose scale is 0.
Tensor find_amax(const Launch& launch, const GroupedInput& input, const bool* refresh = nullptr,
                 const float* scale_in = nullptr) {
  Tensor amax = new_tensor(input.values, {input.groups.E}, ScalarType::Int);
  torch::stable::zero_(amax);
  for_element(input.values.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    constexpr int occupancy = kTileOccupancy<Element>;
    launch_over_tiles<group_amax_kernel<Element>>(
        launch, input.grid(launch, occupancy), 0, occupancy, data<Element>(input.values),
        input.row_stride, input.vectorised(), input.groups, refresh, scale_in,
        mutable_data<uint32_t>(amax));
  });
  return amax;
}

void quantize(const Launch& launch, const GroupedInput& input, ScalarType dtype,
              const GroupScale& scale, const PerGroupOutputs& out, const bool* refresh = nullptr) {
  const auto run = [&]<typename Element, bool e5m2>() {
    constexpr int occupancy = kTileOccupancy<Element>;
    const int shared_bytes = out.q_t ? static_cast<int>(sizeof(TransposedTile)) : 0;
    launch_over_tiles<quantize_per_group_kernel<Element, e5m2>>(
        launch, input.grid(launch, occupancy), shared_bytes, occupancy, data<Element>(input.values),
        input.row_stride, input.vectorised(), input.groups, scale, refresh, out);
  };
  for_element(input.values.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    if (dtype == ScalarType::Float8_e5m2)
      run.template operator()<Element, true>();
    else
      run.template operator()<Element, false>();
  });
}

GroupScale from_amax(const Tensor& amax, double amax_epsilon, bool power_of_two_scales,
                     const Tensor& scale_out) {
  return {data<uint32_t>(amax),
          {static_cast<float>(amax_epsilon), power_of_two_scales},
          mutable_data<float>(scale_out),
          nullptr};
}

// amax: of find_amax with scale_in.
GroupScale from_scale(const Tensor& scale_in, const Tensor& amax, const Tensor& scale_out) {
  return {data<uint32_t>(amax), {}, mutable_data<float>(scale_out), data<float>(scale_in)};
}

PerGroupOutputs outputs(const Tensor& q, const std::optional<Tensor>& q_t,
                        const std::optional<Tensor>& amax = std::nullopt) {
  return {mutable_data_or_null<uint8_t>(q), mutable_data_or_null<uint8_t>(q_t), nullptr,
          mutable_data_or_null<uint32_t>(amax)};
}

// Activations: what is quantized and what is returned of them.
struct Activations {
  Activations(const Tensor& x, const Tensor& offs, ScalarType dtype, bool rowwise, bool columnwise,
              bool bias_grad)
      : input(x, offs),
        q(new_tensor(x, rowwise ? Shape{x.size(0), x.size(1)} : Shape{0}, dtype)),
        q_t(new_tensor(x, columnwise ? Shape{input.row_blocks, x.size(1), kBlock} : Shape{0},
                       dtype)),
        grad(new_tensor(x, bias_grad ? Shape{offs.size(0), x.size(1)} : Shape{0},
                        ScalarType::Float)) {}

  void quantize_with(const Launch& launch, const GroupScale& scale,
                     const std::optional<Tensor>& amax = std::nullopt) const {
    const PartialBiasGrad sums(grad, input.row_blocks);
    PerGroupOutputs out = outputs(q, q_t, amax);
    out.partial_bias_grad = sums.partial();
    quantize(launch, input, q.scalar_type(), scale, out);
    sums.sum(launch, input.groups.offs, input.groups.T);
  }

  GroupedInput input;
  Tensor q, q_t, grad;
};

struct WeightTensors {
  WeightTensors(const Tensor& w, bool columnwise)
      : q(new_tensor(w, {w.size(0), w.size(1), w.size(2)}, kE4m3)),
        q_t(new_tensor(w, columnwise ? Shape{w.size(0), w.size(2), w.size(1)} : Shape{0}, kE4m3)) {}

  Tensor q, q_t;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_current(
    const Tensor& x, const Tensor& offs, ScalarType dtype, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize_current(x, offs, dtype, amax_epsilon, rowwise, columnwise);

  const Launch launch("group_quantize_current", x);
  const Activations out(x, offs, dtype, rowwise, columnwise, bias_grad);
  const Tensor scale = new_tensor(x, {offs.size(0)}, ScalarType::Float);

  const Tensor amax = find_amax(launch, out.input);
  out.quantize_with(launch, from_amax(amax, amax_epsilon, power_of_two_scales, scale));
  return {out.q, scale, out.q_t, out.grad};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_delayed(
    const Tensor& x, const Tensor& offs, const Tensor& scale_in, const std::optional<Tensor>& amax,
    ScalarType dtype, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize_delayed(amax, x, offs, scale_in, dtype, rowwise, columnwise);

  const Launch launch("group_quantize_delayed", x);
  const Tensor given = as_dense(scale_in);
  const Activations out(x, offs, dtype, rowwise, columnwise, bias_grad);
  const Tensor scale = new_tensor(x, {offs.size(0)}, ScalarType::Float);

  const Tensor own_amax = find_amax(launch, out.input, nullptr, data<float>(given));
  out.quantize_with(launch, from_scale(given, own_amax, scale), amax);
  return {out.q, scale, out.q_t, out.grad};
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_current(const Tensor& w, double amax_epsilon,
                                                           bool power_of_two_scales,
                                                           bool columnwise) {
  check_quantize_weight("quantize_weight_current", w, amax_epsilon);

  const Launch launch("quantize_weight_current", w);
  const GroupedInput input(w);
  const WeightTensors out(w, columnwise);
  const Tensor scale = new_tensor(w, {w.size(0)}, ScalarType::Float);

  const Tensor amax = find_amax(launch, input);
  quantize(launch, input, kE4m3, from_amax(amax, amax_epsilon, power_of_two_scales, scale),
           outputs(out.q, out.q_t));
  return {out.q, scale, out.q_t};
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_delayed(const Tensor& w, const Tensor& scale_in,
                                                           const std::optional<Tensor>& amax,
                                                           bool columnwise) {
  check_quantize_weight_delayed(amax, w, scale_in);

  const Launch launch("quantize_weight_delayed", w);
  const Tensor given = as_dense(scale_in);
  const GroupedInput input(w);
  const WeightTensors out(w, columnwise);
  const Tensor scale = new_tensor(w, {w.size(0)}, ScalarType::Float);

  const Tensor own_amax = find_amax(launch, input, nullptr, data<float>(given));
  quantize(launch, input, kE4m3, from_scale(given, own_amax, scale),
           outputs(out.q, out.q_t, amax));
  return {out.q, scale, out.q_t};
}

void refresh_weight_current_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             double amax_epsilon, bool power_of_two_scales) {
  check_refresh_weight_current(w, refresh, q, scale, q_t, amax_epsilon);

  const Launch launch("refresh_weight_current_", w[0]);
  const GroupedInput input(packed(w));
  const bool* flag = data_or_null<bool>(refresh);

  AlignedOutput rowwise(q), columnwise(q_t);
  const Tensor amax = find_amax(launch, input, flag);
  quantize(launch, input, kE4m3, from_amax(amax, amax_epsilon, power_of_two_scales, scale),
           outputs(*rowwise.used(), columnwise.used()), flag);
  rowwise.copy_back(), columnwise.copy_back();
}

void refresh_weight_delayed_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             const std::optional<Tensor>& amax, const std::vector<Tensor>& w,
                             const Tensor& state_in, const std::optional<Tensor>& refresh) {
  check_refresh_weight_delayed(amax, w, state_in, refresh, q, scale, q_t);

  const Launch launch("refresh_weight_delayed_", w[0]);
  const Tensor state = as_dense(state_in);
  const GroupedInput input(packed(w));
  const bool* flag = data_or_null<bool>(refresh);
  AlignedOutput rowwise(q), columnwise(q_t);

  const Tensor own_amax = find_amax(launch, input, flag, data<float>(state));
  quantize(launch, input, kE4m3, from_scale(state, own_amax, scale),
           outputs(*rowwise.used(), columnwise.used(), amax), flag);
  rowwise.copy_back(), columnwise.copy_back();
}

}  // namespace grouped_linear::cuda
