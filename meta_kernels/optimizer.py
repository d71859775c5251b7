# SPDX-License-Identifier: Apache-2.0
"""Fake kernel of the op that steps a weight and its FP8 numbers.

E experts, K in_features, N out_features, B = 128.
"""

from typing import Any

import torch

from grouped_linear.meta_kernels.rules import ACTIVATIONS, BLOCK, E4M3, Rules, ceil_div, fake


@fake
def adam_weight_(rules: Rules, c: Any) -> None:
    """q [E, N, K], scale [E, ceil(N/B), ceil(K/B)], q_t [E, K, N]; all others as q, or numbers."""
    E, N, K = rules.weight("q", E4M3)
    rules.contiguous("q")
    rules.written("scale", torch.float32, (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), "q")
    rules.written("q_t", E4M3, (E, K, N), "q")
    rules.dim("grad", 3)
    rules.dtype("grad", *ACTIVATIONS)
    for name in ("master", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        rules.written(name, c.grad.dtype, (E, N, K), "q")
    for name in ("step", "lr_tensor", "grad_scale", "found_inf"):
        rules.tensor(name, 0, torch.float32, "q")
    rules.finite("lr")
    _check_beta(rules, "beta1", c.beta1)
    _check_beta(rules, "beta2", c.beta2)
    rules.finite("weight_decay")
    rules.finite("eps")
    rules.epsilon()


def _check_beta(rules: Rules, name: str, beta: float) -> None:
    rules.check(0 <= beta < 1, lambda: f"{name} must be at least 0 and below 1, got {beta:g}")
