# SPDX-License-Identifier: Apache-2.0
"""Update in place what a layer keeps between calls: quantized weights, scales of delayed scaling.

E experts, K in_features, N out_features.
"""

from collections.abc import Sequence

from torch import Tensor

from grouped_linear.meta_kernels.rules import Rules
from grouped_linear.ops.gradients import OPS


def refresh_weight_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    w: Tensor | Sequence[Tensor],
    refresh: Tensor | None = None,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    mxfp4_dim: int | None = None,
) -> None:
    """Quantize a weight into the tensors of an earlier :func:`quantize_weight`.

    Args:
        q: [E, N, K] e4m3, contiguous, written.
        scale: [E, ceil(N / 128), ceil(K / 128)] float32, contiguous, written.
        q_t: [E, K, N] e4m3, contiguous, written; or None.
        w: [E, N, K], see :func:`quantize_weight`, or E tensors [N, K].
        refresh: a bool tensor of no dimensions on w's device, which the kernel reads. If it is
            false, no byte changes. None always refreshes.
        amax_epsilon, power_of_two_scales: see :func:`quantize_weight`.
        mxfp4_dim: see :func:`quantize_weight`; w is then one tensor.

    >>> import torch
    >>> from grouped_linear.ops import quantize_weight
    >>> w = torch.ones(2, 32, 16)
    >>> q, scale, q_t = quantize_weight(w)
    >>> for refresh in (False, True):
    ...     refresh_weight_(q, scale, q_t, 8 * w, torch.tensor(refresh))
    ...     print(scale[0].item())
    0.00390625
    0.03125
    """
    scaling = amax_epsilon, power_of_two_scales, mxfp4_dim
    OPS.refresh_weight_(q, scale, q_t, _experts(w), refresh, *scaling)


def refresh_weight_current_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    w: Tensor | Sequence[Tensor],
    refresh: Tensor | None = None,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = False,
) -> None:
    """:func:`refresh_weight_` for :func:`quantize_weight_current`, with scale [E] float32.

    E tensors [N, K] that are not adjacent in memory are gathered first.

    >>> import torch
    >>> from grouped_linear.ops import quantize_weight_current
    >>> w = torch.ones(2, 32, 16)
    >>> q, scale, q_t = quantize_weight_current(w)
    >>> refresh_weight_current_(q, scale, q_t, 448 * w)
    >>> scale
    tensor([1., 1.])
    """
    OPS.refresh_weight_current_(
        q, scale, q_t, _experts(w), refresh, amax_epsilon, power_of_two_scales
    )


def refresh_weight_delayed_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    amax: Tensor | None,
    w: Tensor | Sequence[Tensor],
    state: Tensor,
    refresh: Tensor | None = None,
) -> None:
    """:func:`refresh_weight_current_` for :func:`quantize_weight_delayed`.

    state [E] float32 holds the scales to quantize with; where one is 0, an expert's own is taken.
    scale [E] becomes what q is scaled by, so that it keeps that when state is updated. A refresh
    raises amax [E] float32, contiguous, too; None records nothing.

    >>> import torch
    >>> from grouped_linear.ops import quantize_weight_delayed
    >>> w, amax, scale = torch.ones(2, 32, 16), torch.zeros(2), torch.zeros(2)
    >>> q, _, q_t = quantize_weight_delayed(w, torch.ones(2))
    >>> refresh_weight_delayed_(q, scale, q_t, amax, 3 * w, torch.ones(2))
    >>> q.float().mean(), scale, amax
    (tensor(3.), tensor([1., 1.]), tensor([3., 3.]))
    """
    OPS.refresh_weight_delayed_(q, scale, q_t, amax, _experts(w), state, refresh)


def refresh_weight_mx_(
    w_rowwise: Tensor,
    w_columnwise: Tensor | None,
    w: Tensor | Sequence[Tensor],
    refresh: Tensor | None = None,
) -> None:
    """Round a weight to MXFP8 numbers, into existing bf16 tensors [E, N, K], contiguous.

    As :func:`group_round_mx` with one group an expert: blocks run along K in w_rowwise, and along N
    inside each expert in w_columnwise, which may be None. w and refresh: see
    :func:`refresh_weight_current_`.

    >>> import torch
    >>> w_rowwise = torch.zeros(2, 32, 16, dtype=torch.bfloat16)
    >>> refresh_weight_mx_(w_rowwise, None, torch.full((2, 32, 16), 3.0))
    >>> w_rowwise.mean()
    tensor(3., dtype=torch.bfloat16)
    """
    OPS.refresh_weight_mx_(w_rowwise, w_columnwise, _experts(w), refresh)


def _experts(w: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [w] if isinstance(w, Tensor) else list(w)


def update_scales_(
    scale: Sequence[Tensor],
    amax: Sequence[Tensor],
    amax_history: Sequence[Tensor],
    fp8_max: Sequence[float],
    *,
    margin: int = 0,
    most_recent: bool = False,
) -> None:
    """Update the scales of delayed scaling, for any number of operands at once.

    For each operand and group: amax is pushed to the front of the history (0 if it is not finite),
    the oldest row is dropped, and amax becomes 0. The scale keeps its value if that amax was not
    finite, or if the amax to scale by is 0. Otherwise::

        amax = the history's largest, or with most_recent its first row
        scale = 1 / clamp(fp8_max / amax / 2 ** margin, 2 ** -126, 2 ** 126)

    Args:
        scale, amax: one tensor [E] float32 for each operand, written.
        amax_history: one tensor [H, E] float32 for each operand, written; the latest step first.
        fp8_max: for each operand the largest number of its dtype.
        margin: how many powers of two to stay below fp8_max.
        most_recent: scale by the latest amax, not by the history's largest.

    >>> import torch
    >>> scale, amax, history = torch.ones(2), torch.tensor([896.0, 0.0]), torch.zeros(4, 2)
    >>> update_scales_([scale], [amax], [history], [448.0])
    >>> scale, amax, history[0]
    (tensor([2., 1.]), tensor([0., 0.]), tensor([896.,   0.]))
    """
    if not scale:  # torch finds an op's device by its tensors, and here it may have none
        Rules("update_scales_").check(False, lambda: "scale must not be empty")
    OPS.update_scales_(
        list(scale), list(amax), list(amax_history), list(fp8_max), margin, most_recent
    )


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
    mxfp4_dim: int | None = None,
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
        amax_epsilon, power_of_two_scales, mxfp4_dim: see :func:`quantize_weight`.

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
    scaling = amax_epsilon, power_of_two_scales, mxfp4_dim
    OPS.adam_weight_(
        *weight, grad, *state, lr_tensor, grad_scale, found_inf, *numbers, *flags, *scaling
    )
