# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the ops that write what a layer keeps: weights in FP8, scales of delayed scaling.

E groups, K in_features, N out_features, B = 128. w is one tensor [E, N, K] or E tensors [N, K].
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    E4M3,
    FLOAT32_MAX,
    MAX_MARGIN,
    Rules,
    block_scales,
    fake,
)


def _check_weight(rules: Rules, c: Any) -> tuple[int, int, int]:
    is_whole = len(c.w) == 1 and c.w[0].dim() == 3
    shape = rules.weight() if is_whole else rules.weight_list()
    rules.tensor("refresh", 0, torch.bool, "w")
    return shape


def _check_written(rules: Rules, E: int, N: int, K: int, scale: tuple[int, ...]) -> None:
    """q [E, N, K], scale of this shape and q_t [E, K, N]."""
    rules.written("q", E4M3, (E, N, K), "w")
    rules.written("scale", torch.float32, scale, "w")
    rules.written("q_t", E4M3, (E, K, N), "w")


@fake
def refresh_weight_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E, ceil(N/B), ceil(K/B)] and q_t [E, K, N], written in place."""
    E, N, K = _check_weight(rules, c)
    rules.finite("amax_epsilon", 0)
    rules.mxfp4_dim(N, K)
    is_list = c.w[0].dim() == 2
    rules.check(
        c.mxfp4_dim is None or not is_list,
        lambda: "mxfp4_dim needs w as one tensor, got a list",
    )
    _check_written(rules, E, N, K, block_scales(E, N, K))


@fake
def refresh_weight_current_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E] and q_t [E, K, N], written in place."""
    E, N, K = _check_weight(rules, c)
    rules.finite("amax_epsilon", 0)
    _check_written(rules, E, N, K, (E,))


@fake
def refresh_weight_delayed_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E] (from state [E]) and q_t [E, K, N] written, amax [E] raised."""
    E, N, K = _check_weight(rules, c)
    rules.group_scale("state", "w", E, "w")
    rules.amax("w", E, "w")
    _check_written(rules, E, N, K, (E,))


@fake
def refresh_weight_mx_(rules: Rules, c: Any) -> None:
    """w_rowwise and w_columnwise [E, N, K] bf16, written in place."""
    shape = _check_weight(rules, c)
    rules.written("w_rowwise", torch.bfloat16, shape, "w")
    rules.written("w_columnwise", torch.bfloat16, shape, "w")


@fake
def update_scales_(rules: Rules, c: Any) -> None:
    """scale [E], amax [E], amax_history [H, E] of any number of operands, written in place."""
    rules.check(len(c.scale) > 0, lambda: "scale must not be empty")
    for name in ("amax", "amax_history", "fp8_max"):
        count = len(getattr(c, name))
        rules.same("the number of states", name, count, "scale", len(c.scale))
    rules.check(
        0 <= c.margin <= MAX_MARGIN,
        lambda: f"margin must be between 0 and {MAX_MARGIN}, got {c.margin}",
    )
    first = {"the first scale": c.scale[0]}
    for scale, amax, history, largest in zip(
        c.scale, c.amax, c.amax_history, c.fp8_max, strict=True
    ):
        state = Rules(rules.op, scale=scale, amax=amax, amax_history=history, **first)
        _check_state(state, scale, history, largest)


def _check_state(rules: Rules, scale: Tensor, history: Tensor, largest: float) -> None:
    """scale [E], amax [E] and amax_history [H, E] of one operand."""
    first_name = "the first scale"
    rules.tensor("scale", 1, torch.float32, first_name)
    E = scale.size(0)
    rules.count("scale", "groups", E)
    rules.contiguous("scale")
    rules.amax(first_name, E, "scale")
    rules.tensor("amax_history", 2, torch.float32, first_name)
    rules.same("E", "amax_history", history.size(1), "scale", E)
    rules.check(history.size(0) > 0, lambda: "amax_history must have a row, got none")
    rules.count("amax_history", "rows", history.size(0))
    rules.contiguous("amax_history")
    rules.check(
        0 < largest <= FLOAT32_MAX, lambda: f"fp8_max must be positive and finite, got {largest:g}"
    )


@fake
def adam_weight_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E, ceil(N/B), ceil(K/B)], q_t [E, K, N]; all others as q, or numbers."""
    E, N, K = rules.weight("q", E4M3)
    rules.contiguous("q")
    rules.written("scale", torch.float32, block_scales(E, N, K), "q")
    rules.written("q_t", E4M3, (E, K, N), "q")
    rules.dim("grad", 3, *ACTIVATIONS)
    for name in ("master", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        rules.written(name, c.grad.dtype, (E, N, K), "q")
    for name in ("step", "lr_tensor", "grad_scale", "found_inf"):
        rules.tensor(name, 0, torch.float32, "q")
    rules.finite("lr")
    _check_beta(rules, "beta1", c.beta1)
    _check_beta(rules, "beta2", c.beta2)
    rules.finite("weight_decay")
    rules.finite("eps")
    rules.finite("amax_epsilon", 0)
    rules.mxfp4_dim(N, K)


def _check_beta(rules: Rules, name: str, beta: float) -> None:
    rules.check(0 <= beta < 1, lambda: f"{name} must be at least 0 and below 1, got {beta:g}")
