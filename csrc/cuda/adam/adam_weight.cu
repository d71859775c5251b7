// A step of Adam over a quantized weight.
#include "checks.h"
#include "cuda/adam/adam_weight.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// What the kernel reads and writes 16 bytes at a time. Without a master it is in bfloat16 or
// float32: FP16 by way of float32. The kernel's arithmetic is float32, so the copies change no bit.
class Operand {
 public:
  Operand(const std::optional<Tensor>& t, bool takes_half)
      : own_(t), copied_(!takes_half && is_half(t)), used_(copied_ ? in_float(*t) : t) {}

  template <typename Element>
  Element* data() const {
    return mutable_data_or_null<Element>(used_.used());
  }
  void copy_back() {
    used_.copy_back();
    if (copied_) torch::stable::copy_(*own_, *used_.used());
  }

 private:
  static bool is_half(const std::optional<Tensor>& t) {
    return t && t->scalar_type() == ScalarType::Half;
  }
  static Tensor in_float(const Tensor& t) {
    Tensor copy = new_tensor(t, Shape::of(t), ScalarType::Float);
    torch::stable::copy_(copy, t);
    return copy;
  }

  std::optional<Tensor> own_;
  bool copied_;
  AlignedOutput used_;
};

}  // namespace

void adam_weight_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                  const std::optional<Tensor>& master, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq,
                  const Tensor& step, const std::optional<Tensor>& lr_tensor,
                  const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                  double lr, double beta1, double beta2, double weight_decay, double eps,
                  bool decoupled_weight_decay, bool maximize, double amax_epsilon,
                  bool power_of_two_scales, bool stochastic_rounding) {
  check_adam_weight(q, scale, q_t, master, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step,
                    lr_tensor, grad_scale, found_inf, lr, beta1, beta2, weight_decay, eps,
                    amax_epsilon, stochastic_rounding);

  const Launch launch("adam_weight_", q);
  const AdamScalars scalars{data<float>(step), data_or_null<float>(lr_tensor),
                            data_or_null<float>(grad_scale), data_or_null<float>(found_inf)};
  const AdamOptions options{
      lr, beta1, beta2, weight_decay, eps, decoupled_weight_decay, maximize, stochastic_rounding};
  AlignedOutput rowwise(q), columnwise(q_t);
  const bool takes_half = master.has_value();
  Operand w(master, takes_half), g(grad, takes_half), m(exp_avg, takes_half);
  Operand v(exp_avg_sq, takes_half), max_v(max_exp_avg_sq, takes_half);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto run = [&]<typename Element, typename Step>(std::type_identity<Element>,
                                                        std::type_identity<Step>) {
    const AdamTensors<Element> tensors{static_cast<int>(q.size(1)),
                                       static_cast<int>(q.size(2)),
                                       mutable_data_or_null<uint8_t>(rowwise.used()),
                                       mutable_data_or_null<uint8_t>(columnwise.used()),
                                       mutable_data<float>(scale),
                                       w.data<Element>(),
                                       g.data<Element>(),
                                       m.data<Element>(),
                                       v.data<Element>(),
                                       max_v.data<Element>()};
    const auto kernel = max_exp_avg_sq ? adam_weight_kernel<Element, true, Step>
                                       : adam_weight_kernel<Element, false, Step>;
    launch.run(kernel, static_cast<unsigned>(scale.numel()), kTileThreads, 0, tensors, scalars,
               options, rule);
  };
  const ScalarType dtype = grad.scalar_type();
  if (!master) {
    constexpr std::type_identity<AdamStep> of_q;
    if (dtype == ScalarType::BFloat16)
      run(std::type_identity<__nv_bfloat16>(), of_q);
    else
      run(std::type_identity<float>(), of_q);
  } else {
    for_element(dtype, [&](auto element) { run(element, std::type_identity<TorchAdamStep>()); });
  }
  for (AlignedOutput* t : {&rowwise, &columnwise}) t->copy_back();
  for (Operand* t : {&w, &g, &m, &v, &max_v}) t->copy_back();
}

}  // namespace grouped_linear::cuda
