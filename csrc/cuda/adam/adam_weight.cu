// A step of Adam over a quantized weight.
#include "checks.h"
#include "cuda/adam/adam_weight.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// What the kernel reads and writes 16 bytes at a time, in bfloat16 or float32: FP16 by way of
// float32. The kernel's arithmetic is float32, so the copies change no bit.
class Operand {
 public:
  explicit Operand(const std::optional<Tensor>& t) : own_(t), used_(in_float(t)) {}

  template <typename Element>
  Element* data() const {
    return mutable_data_or_null<Element>(used_.used());
  }
  void copy_back() {
    used_.copy_back();
    if (is_half(own_)) torch::stable::copy_(*own_, *used_.used());
  }

 private:
  static bool is_half(const std::optional<Tensor>& t) {
    return t && t->scalar_type() == ScalarType::Half;
  }
  static std::optional<Tensor> in_float(const std::optional<Tensor>& t) {
    if (!is_half(t)) return t;
    Tensor copy = new_tensor(*t, Shape::of(*t), ScalarType::Float);
    torch::stable::copy_(copy, *t);
    return copy;
  }

  std::optional<Tensor> own_;
  AlignedOutput used_;
};

}  // namespace

void adam_weight_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                  const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                  const std::optional<Tensor>& max_exp_avg_sq, const Tensor& step,
                  const std::optional<Tensor>& lr_tensor, const std::optional<Tensor>& grad_scale,
                  const std::optional<Tensor>& found_inf, double lr, double beta1, double beta2,
                  double weight_decay, double eps, bool decoupled_weight_decay, bool maximize,
                  double amax_epsilon, bool power_of_two_scales, bool stochastic_rounding) {
  check_adam_weight(q, scale, q_t, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, lr_tensor,
                    grad_scale, found_inf, lr, beta1, beta2, weight_decay, eps, amax_epsilon);

  const Launch launch("adam_weight_", q);
  const AdamScalars scalars{data<float>(step), data_or_null<float>(lr_tensor),
                            data_or_null<float>(grad_scale), data_or_null<float>(found_inf)};
  const AdamOptions options{
      lr, beta1, beta2, weight_decay, eps, decoupled_weight_decay, maximize, stochastic_rounding};
  AlignedOutput rowwise(q), columnwise(q_t);
  Operand g(grad), m(exp_avg), v(exp_avg_sq), max_v(max_exp_avg_sq);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto run = [&]<typename Element>(std::type_identity<Element>) {
    const AdamTensors<Element> tensors{static_cast<int>(q.size(1)),
                                       static_cast<int>(q.size(2)),
                                       mutable_data_or_null<uint8_t>(rowwise.used()),
                                       mutable_data_or_null<uint8_t>(columnwise.used()),
                                       mutable_data<float>(scale),
                                       g.data<Element>(),
                                       m.data<Element>(),
                                       v.data<Element>(),
                                       max_v.data<Element>()};
    const auto kernel =
        max_exp_avg_sq ? adam_weight_kernel<Element, true> : adam_weight_kernel<Element, false>;
    launch.run(kernel, static_cast<unsigned>(scale.numel()), kTileThreads, 0, tensors, scalars,
               options, rule);
  };
  if (grad.scalar_type() == ScalarType::BFloat16)
    run(std::type_identity<__nv_bfloat16>());
  else
    run(std::type_identity<float>());
  for (AlignedOutput* t : {&rowwise, &columnwise}) t->copy_back();
  for (Operand* t : {&g, &m, &v, &max_v}) t->copy_back();
}

}  // namespace grouped_linear::cuda
