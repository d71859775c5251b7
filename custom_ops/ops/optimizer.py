# SPDX-License-Identifier: Apache-2.0
"""Step a weight and its FP8 numbers.

E experts, K in_features, N out_features.
"""

from torch import Tensor

from grouped_linear.ops.gradients import OPS


def adam_weight_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
) -> None:
    """Take a step of AdamW or Adam over a weight and its FP8 numbers, in one pass.

    With w = master, g = grad, m = exp_avg and v = exp_avg_sq, in float32::

        w = w * (1 - lr * weight_decay)           # AdamW; Adam: g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

    On a GPU master, m and v become, bit for bit, what ``torch.optim.AdamW(fused=True)`` makes of
    them there, which calls this op for a ``GroupedTensorWithMaster``. q [E, N, K], scale and q_t
    become what :func:`quantize_weight` makes of the new master; q_t may be None.

    Args:
        q, scale, q_t: see :func:`refresh_weight_`.
        master, exp_avg, exp_avg_sq: [E, N, K] of grad's dtype, contiguous, written.
        grad: [E, N, K] bfloat16, float16 or float32, contiguous. Written if grad_scale is given.
        max_exp_avg_sq: AMSGrad's, as exp_avg_sq: it is raised to that, and takes its place in the
            formula. None without AMSGrad.
        step: a float32 tensor of no dimensions on q's device: 1 in the first step. Not written.
        lr_tensor, grad_scale, found_inf: None, or tensors such as step: the learning rate in place
            of lr; what grad is divided by first; where this is not 0, nothing is written.
        lr, beta1, beta2, weight_decay, eps: see the formula; 0 <= beta < 1.
        decoupled_weight_decay: AdamW's weight decay instead of Adam's.
        maximize: take -grad for g.
        amax_epsilon, power_of_two_scales: see :func:`quantize_weight`.

    >>> import torch
    >>> from grouped_linear.ops import quantize_weight
    >>> w, grad, m, v = (i * torch.ones(1, 128, 128) for i in (1, 1, 0, 0))
    >>> q, scale, q_t = quantize_weight(w)
    >>> options = {"lr": 0.25, "weight_decay": 0.0}
    >>> adam_weight_(q, scale, q_t, w, grad, m, v, None, torch.tensor(1.0), **options)
    >>> w.mean(), (q.float() * scale).mean(), m.mean()
    (tensor(0.7500), tensor(0.7500), tensor(0.1000))
    """
    weight, state = (q, scale, q_t, master), (exp_avg, exp_avg_sq, max_exp_avg_sq, step)
    numbers = lr, beta1, beta2, weight_decay, eps
    flags = decoupled_weight_decay, maximize
    scaling = amax_epsilon, power_of_two_scales
    OPS.adam_weight_(
        *weight, grad, *state, lr_tensor, grad_scale, found_inf, *numbers, *flags, *scaling
    )
