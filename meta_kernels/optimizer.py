"""Fake kernel of the op that steps a quantized weight.

E experts, K in_features, N out_features, B = 128.
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import ACTIVATIONS, BLOCK, E4M3, Rules, ceil_div


@torch.library.register_fake("grouped_linear::adam_weight_")
def adam_weight_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    master: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    stochastic_rounding: bool = True,
) -> None:
    """q [E, N, K], scale [E, ceil(N/B), ceil(K/B)], q_t [E, K, N]; all others as q, or numbers."""
    rules = Rules("adam_weight_")
    rules.dim("q", q, 3)
    rules.dtype("q", q.dtype, (E4M3,))
    E, N, K = q.shape
    rules.groups(E)
    rules.features("N", N)
    rules.features("K", K)
    rules.count("q", "rows in all", E * N)
    rules.contiguous("q", q)
    blocks = (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK))
    rules.written("scale", scale, torch.float32, blocks, "q", q)
    if q_t is not None:
        rules.written("q_t", q_t, E4M3, (E, K, N), "q", q)
    rules.dtype("grad", grad.dtype, ACTIVATIONS)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}
    for name, t in {"master": master, "grad": grad, **moments}.items():
        if t is not None:
            rules.written(name, t, grad.dtype, (E, N, K), "q", q)
    scalars = {"lr_tensor": lr_tensor, "grad_scale": grad_scale, "found_inf": found_inf}
    for name, t in {"step": step, **scalars}.items():
        if t is not None:
            rules.dim(name, t, 0)
            rules.dtype(name, t.dtype, (torch.float32,))
            rules.device(name, t, "q", q)
    rules.finite("lr", lr)
    rules.check(0 <= beta1 < 1, lambda: f"beta1 must be at least 0 and below 1, got {beta1:g}")
    rules.check(0 <= beta2 < 1, lambda: f"beta2 must be at least 0 and below 1, got {beta2:g}")
    rules.finite("weight_decay", weight_decay)
    rules.finite("eps", eps)
    rules.epsilon(amax_epsilon)
    rules.check(
        master is None or not stochastic_rounding,
        lambda: "stochastic_rounding must be False with a master",
    )
