// A step of Adam over a quantized weight.
#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/adam_weight.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// A tensor that the kernel reads and writes 16 bytes at a time. A gradient may be a view that
// begins anywhere in a larger buffer: then a copy is updated and copied back.
class Aligned {
 public:
  explicit Aligned(const Tensor& t) : own_(t), used_(is_aligned(t) ? t : dense_copy(t)) {}

  template <typename Element>
  Element* data() const {
    return mutable_data<Element>(used_);
  }
  void copy_back() {
    if (!is_aligned(own_)) torch::stable::copy_(own_, used_);
  }

 private:
  Tensor own_, used_;
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
  Aligned g(grad), m(exp_avg), v(exp_avg_sq);
  std::optional<Aligned> max_v;
  if (max_exp_avg_sq) max_v.emplace(*max_exp_avg_sq);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_element(grad.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    const AdamTensors<Element> tensors{static_cast<int>(q.size(1)),
                                       static_cast<int>(q.size(2)),
                                       mutable_data<uint8_t>(q),
                                       mutable_data_or_null<uint8_t>(q_t),
                                       mutable_data<float>(scale),
                                       g.data<Element>(),
                                       m.data<Element>(),
                                       v.data<Element>(),
                                       max_v ? max_v->data<Element>() : nullptr};
    const auto kernel =
        max_exp_avg_sq ? adam_weight_kernel<Element, true> : adam_weight_kernel<Element, false>;
    launch.run(kernel, static_cast<unsigned>(scale.numel()), kTileThreads, 0, tensors, scalars,
               options, rule);
  });
  g.copy_back(), m.copy_back(), v.copy_back();
  if (max_v) max_v->copy_back();
}

}  // namespace grouped_linear::cuda
