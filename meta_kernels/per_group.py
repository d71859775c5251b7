# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of current and delayed scaling: one scale a group.

T rows, E groups, K features of x, N features of dy, B = 128, Tp = padded_rows(T, E).
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    BLOCK,
    E4M3,
    FLOAT32_MAX,
    FP8,
    MAX_MARGIN,
    Rules,
    fake,
    output_if,
    padded_rows,
)

QuantizedRows = tuple[Tensor, Tensor, Tensor, Tensor]
QuantizedWeight = tuple[Tensor, Tensor, Tensor]


def _quantized_rows(c: Any) -> QuantizedRows:
    """q [T, K], scale [E], q_t [Tp/B, K, B], bias_grad [E, K]; empty where not requested."""
    (T, K), E = c.x.shape, c.offs.size(0)
    return (
        output_if(c.rowwise, c.x, (T, K), c.out_dtype),
        c.x.new_empty((E,), dtype=torch.float32),
        output_if(c.columnwise, c.x, (padded_rows(T, E) // BLOCK, K, BLOCK), c.out_dtype),
        output_if(c.bias_grad, c.x, (E, K), torch.float32),
    )


def _quantized_weight(c: Any) -> QuantizedWeight:
    """q [E, N, K], scale [E] and q_t [E, K, N]."""
    E, N, K = c.w.shape
    return (
        c.w.new_empty((E, N, K), dtype=E4M3),
        c.w.new_empty((E,), dtype=torch.float32),
        output_if(c.columnwise, c.w, (E, K, N), E4M3),
    )


@fake
def group_quantize_current(rules: Rules, c: Any) -> QuantizedRows:
    """x [T, K] -> q, scale [E], q_t, bias_grad."""
    rules.grouped_rows()
    rules.dtype("out_dtype", *FP8)
    rules.epsilon()
    return _quantized_rows(c)


@fake
def group_quantize_delayed(rules: Rules, c: Any) -> QuantizedRows:
    """x [T, K], scale [E] -> q, scale [E], q_t, bias_grad; amax [E] is raised in place."""
    rules.grouped_rows()
    rules.group_scale("scale", "x", c.offs.size(0))
    rules.amax("x", c.offs.size(0), "offs")
    rules.dtype("out_dtype", *FP8)
    return _quantized_rows(c)


@fake
def quantize_weight_current(rules: Rules, c: Any) -> QuantizedWeight:
    """w [E, N, K] -> q, scale [E], q_t."""
    rules.weight()
    rules.epsilon()
    return _quantized_weight(c)


@fake
def quantize_weight_delayed(rules: Rules, c: Any) -> QuantizedWeight:
    """w [E, N, K], scale [E] -> q, scale [E], q_t; amax [E] is raised in place."""
    E, _, _ = rules.weight()
    rules.group_scale("scale", "w", E, "w")
    rules.amax("w", E, "w")
    return _quantized_weight(c)


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
