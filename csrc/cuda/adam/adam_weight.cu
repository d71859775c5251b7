// SPDX-License-Identifier: Apache-2.0
// A step of Adam over a master weight and its FP8 numbers.
#include "checks.h"
#include "cuda/adam/adam_weight.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "ops.h"

namespace grouped_linear::cuda {

void adam_weight_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                  const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq,
                  const Tensor& step, const std::optional<Tensor>& lr_tensor,
                  const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                  double lr, double beta1, double beta2, double weight_decay, double eps,
                  bool decoupled_weight_decay, bool maximize, double amax_epsilon,
                  bool power_of_two_scales, std::optional<int64_t> mxfp4_dim) {
  check_adam_weight(q, scale, q_t, master, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step,
                    lr_tensor, grad_scale, found_inf, lr, beta1, beta2, weight_decay, eps,
                    amax_epsilon, mxfp4_dim);

  const Launch launch("adam_weight_", q);
  const AdamScalars scalars{data<float>(step), data_or_null<float>(lr_tensor),
                            data_or_null<float>(grad_scale), data_or_null<float>(found_inf)};
  const AdamOptions options{lr, beta1, beta2, weight_decay, eps, decoupled_weight_decay, maximize};
  // The kernel reads and writes these 16 bytes at a time.
  AlignedOutput rowwise(q), columnwise(q_t), w(master), g(grad), m(exp_avg), v(exp_avg_sq);
  AlignedOutput max_v(max_exp_avg_sq);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_element(grad.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    const AdamTensors<Element> tensors{static_cast<int>(q.size(1)),
                                       static_cast<int>(q.size(2)),
                                       mutable_data_or_null<uint8_t>(rowwise.used()),
                                       mutable_data_or_null<uint8_t>(columnwise.used()),
                                       mutable_data<float>(scale),
                                       mutable_data_or_null<Element>(w.used()),
                                       mutable_data_or_null<Element>(g.used()),
                                       mutable_data_or_null<Element>(m.used()),
                                       mutable_data_or_null<Element>(v.used()),
                                       mutable_data_or_null<Element>(max_v.used())};
    for_mxfp4_blocks(mxfp4_dim, [&](const auto blocks) {
      constexpr Mxfp4 kBlocks = decltype(blocks)::value;
      const auto kernel = max_exp_avg_sq ? adam_weight_kernel<Element, true, kBlocks>
                                         : adam_weight_kernel<Element, false, kBlocks>;
      launch.run(kernel, static_cast<unsigned>(scale.numel()), kTileThreads, 0, tensors, scalars,
                 options, rule);
    });
  });
  for (AlignedOutput* t : {&rowwise, &columnwise, &w, &g, &m, &v, &max_v}) t->copy_back();
}

}  // namespace grouped_linear::cuda
