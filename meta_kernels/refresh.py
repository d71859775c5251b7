# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the ops that quantize a weight into existing tensors.

E groups, K in_features, N out_features, B = 128. w is one tensor [E, N, K] or E tensors [N, K].
"""

from typing import Any

import torch

from grouped_linear.meta_kernels.rules import BLOCK, E4M3, Rules, ceil_div, fake


def _check_weight(rules: Rules, c: Any) -> tuple[int, int, int]:
    is_whole = len(c.w) == 1 and c.w[0].dim() == 3
    shape = rules.weight() if is_whole else rules.weight_list()
    rules.tensor("refresh", 0, torch.bool, "w")
    return shape


@fake
def refresh_weight_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E, ceil(N/B), ceil(K/B)] and q_t [E, K, N], written in place."""
    E, N, K = _check_weight(rules, c)
    rules.epsilon()
    rules.written("q", E4M3, (E, N, K), "w")
    rules.written("scale", torch.float32, (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), "w")
    rules.written("q_t", E4M3, (E, K, N), "w")


@fake
def refresh_weight_current_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E] and q_t [E, K, N], written in place."""
    E, N, K = _check_weight(rules, c)
    rules.epsilon()
    rules.written("q", E4M3, (E, N, K), "w")
    rules.written("scale", torch.float32, (E,), "w")
    rules.written("q_t", E4M3, (E, K, N), "w")


@fake
def refresh_weight_delayed_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E] (from state [E]) and q_t [E, K, N] written, amax [E] raised."""
    E, N, K = _check_weight(rules, c)
    rules.group_scale("state", "w", E, "w")
    rules.amax("w", E, "w")
    rules.written("q", E4M3, (E, N, K), "w")
    rules.written("scale", torch.float32, (E,), "w")
    rules.written("q_t", E4M3, (E, K, N), "w")


@fake
def refresh_weight_mx_(rules: Rules, c: Any) -> None:
    """w_rowwise and w_columnwise [E, N, K] bf16, written in place."""
    shape = _check_weight(rules, c)
    rules.written("w_rowwise", torch.bfloat16, shape, "w")
    rules.written("w_columnwise", torch.bfloat16, shape, "w")
