"""Fake kernels of the ops that quantize a weight into existing tensors.

E groups, K in_features, N out_features, B = 128. w is one tensor [E, N, K] or E tensors [N, K].
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import BLOCK, E4M3, Rules, ceil_div


def _check_weight(rules: Rules, w: list[Tensor], refresh: Tensor | None) -> tuple[int, int, int]:
    if len(w) == 1 and w[0].dim() == 3:
        rules.weight(w[0])
        E, N, K = w[0].shape
    else:
        rules.weight_list(w)
        E, (N, K) = len(w), w[0].shape
    if refresh is not None:
        rules.dim("refresh", refresh, 0)
        rules.dtype("refresh", refresh.dtype, (torch.bool,))
        rules.device("refresh", refresh, "w", w[0])
    return E, N, K


@torch.library.register_fake("grouped_linear::refresh_weight_")
def refresh_weight_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    w: list[Tensor],
    refresh: Tensor | None,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
) -> None:
    """q [E, N, K], scale [E, ceil(N/B), ceil(K/B)] and q_t [E, K, N], written in place."""
    rules = Rules("refresh_weight_")
    E, N, K = _check_weight(rules, w, refresh)
    rules.epsilon(amax_epsilon)
    rules.written("q", q, E4M3, (E, N, K), "w", w[0])
    scales = (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK))
    rules.written("scale", scale, torch.float32, scales, "w", w[0])
    if q_t is not None:
        rules.written("q_t", q_t, E4M3, (E, K, N), "w", w[0])


@torch.library.register_fake("grouped_linear::refresh_weight_current_")
def refresh_weight_current_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    w: list[Tensor],
    refresh: Tensor | None,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = False,
) -> None:
    """q [E, N, K], scale [E] and q_t [E, K, N], written in place."""
    rules = Rules("refresh_weight_current_")
    E, N, K = _check_weight(rules, w, refresh)
    rules.epsilon(amax_epsilon)
    rules.written("q", q, E4M3, (E, N, K), "w", w[0])
    rules.written("scale", scale, torch.float32, (E,), "w", w[0])
    if q_t is not None:
        rules.written("q_t", q_t, E4M3, (E, K, N), "w", w[0])


@torch.library.register_fake("grouped_linear::refresh_weight_delayed_")
def refresh_weight_delayed_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    amax: Tensor | None,
    w: list[Tensor],
    state: Tensor,
    refresh: Tensor | None,
) -> None:
    """q [E, N, K], scale [E] (from state [E]) and q_t [E, K, N] written, amax [E] raised."""
    rules = Rules("refresh_weight_delayed_")
    E, N, K = _check_weight(rules, w, refresh)
    rules.group_scale("state", state, "w", w[0], E, "w")
    if amax is not None:
        rules.amax(amax, "w", w[0], E, "w")
    rules.written("q", q, E4M3, (E, N, K), "w", w[0])
    rules.written("scale", scale, torch.float32, (E,), "w", w[0])
    if q_t is not None:
        rules.written("q_t", q_t, E4M3, (E, K, N), "w", w[0])


@torch.library.register_fake("grouped_linear::refresh_weight_mx_")
def refresh_weight_mx_(
    w_rowwise: Tensor, w_columnwise: Tensor | None, w: list[Tensor], refresh: Tensor | None
) -> None:
    """w_rowwise and w_columnwise [E, N, K] bf16, written in place."""
    rules = Rules("refresh_weight_mx_")
    shape = _check_weight(rules, w, refresh)
    rules.written("w_rowwise", w_rowwise, torch.bfloat16, shape, "w", w[0])
    if w_columnwise is not None:
        rules.written("w_columnwise", w_columnwise, torch.bfloat16, shape, "w", w[0])
