# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of MXFP4: weights as codes of 4 bits with a scale for each block of 32.

T rows, E groups, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.matmul import product
from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    E4M3,
    MAX_MXFP4_FEATURES,
    MX_BLOCK,
    Rules,
    at_most,
    fake,
)


def _check_blocks(rules: Rules, K: int) -> None:
    rules.check(
        K > 0 and K % MX_BLOCK == 0, lambda: f"K must be a positive multiple of {MX_BLOCK}, got {K}"
    )
    rules.check(
        at_most(K, MAX_MXFP4_FEATURES), lambda: f"K must be at most {MAX_MXFP4_FEATURES}, got {K}"
    )


def _check_mxfp4(rules: Rules, name: str, scale_name: str) -> None:
    """The rules of q [E, N, K/2] with scale [E, N, K/32]."""
    q, scale = rules.arguments[name], rules.arguments[scale_name]
    rules.dim(name, 3, torch.uint8)
    rules.groups(q.size(0))
    rules.features("N", q.size(1))
    _check_blocks(rules, 2 * q.size(2))
    rules.count(name, "rows in all", q.size(0) * q.size(1))
    rules.tensor(scale_name, 3, torch.uint8, name)
    rules.same("E", name, q.size(0), scale_name, scale.size(0))
    rules.same("N", name, q.size(1), scale_name, scale.size(1))
    k_blocks = 2 * q.size(2) // MX_BLOCK
    rules.same("the number of K blocks", name, k_blocks, scale_name, scale.size(2))


@fake
def quantize_mxfp4(rules: Rules, c: Any) -> tuple[Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K/2], scale [E, N, K/32]."""
    E, N, K = rules.weight()
    _check_blocks(rules, K)
    q = c.w.new_empty((E, N, K // 2), dtype=torch.uint8)
    return q, c.w.new_empty((E, N, K // MX_BLOCK), dtype=torch.uint8)


@fake
def dequantize_mxfp4(rules: Rules, c: Any) -> Tensor:
    """q [E, N, K/2], scale [E, N, K/32] -> w [E, N, K]."""
    _check_mxfp4(rules, "q", "scale")
    rules.dtype("out_dtype", *ACTIVATIONS)
    w: Tensor = c.q.new_empty((*c.q.shape[:2], 2 * c.q.size(2)), dtype=c.out_dtype)
    return w


@fake
def grouped_mm_mxfp4(rules: Rules, c: Any) -> Tensor:
    """a [T, K] and a weight [E, N, K] -> [T, N]; without transpose_b a [T, N] -> [T, K]."""
    if c.scale_a is not None:
        rules.rowwise("a", "scale_a")
    else:
        rules.dim("a", 2, *ACTIVATIONS)
    _check_mxfp4(rules, "b", "scale_b")
    rules.device("b", "a")
    E, N, K = c.b.size(0), c.b.size(1), 2 * c.b.size(2)
    reduced, cols = (K, N) if c.transpose_b else (N, K)
    rules.same("K" if c.transpose_b else "N", "a", c.a.size(1), "b", reduced)
    rules.offs("a", b=E)
    return product(rules, c, cols, torch.bfloat16 if c.a.dtype == E4M3 else c.a.dtype)
