"""Fake kernels of current and delayed scaling: one scale a group.

T rows, E groups, K features of x, N features of dy, B = 128, Tp = padded_rows(T, E).
"""

import math

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    BLOCK,
    E4M3,
    FP8,
    MAX_MARGIN,
    Rules,
    output_if,
    padded_rows,
)


def _group_outputs(
    x: Tensor, E: int, dtype: torch.dtype, rowwise: bool, columnwise: bool, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, K], q_t [Tp/B, K, B] and bias_grad [E, K]; outputs that are not requested are empty."""
    T, K = x.shape
    return (
        output_if(rowwise, x, (T, K), dtype),
        output_if(columnwise, x, (padded_rows(T, E) // BLOCK, K, BLOCK), dtype),
        output_if(bias_grad, x, (E, K), torch.float32),
    )


@torch.library.register_fake("grouped_linear::group_quantize_current")
def group_quantize_current(
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = False,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, K] -> q, scale [E], q_t, bias_grad."""
    rules = Rules("group_quantize_current")
    rules.grouped_rows(x, offs, rowwise, columnwise)
    rules.dtype("out_dtype", out_dtype, FP8)
    rules.epsilon(amax_epsilon)
    E = offs.size(0)
    q, q_t, grad = _group_outputs(x, E, out_dtype, rowwise, columnwise, bias_grad)
    return q, x.new_empty((E,), dtype=torch.float32), q_t, grad


@torch.library.register_fake("grouped_linear::group_quantize_delayed")
def group_quantize_delayed(
    x: Tensor,
    offs: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    out_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, K], scale [E] -> q, scale [E], q_t, bias_grad; amax [E] is raised in place."""
    rules = Rules("group_quantize_delayed")
    rules.grouped_rows(x, offs, rowwise, columnwise)
    E = offs.size(0)
    rules.group_scale("scale", scale, "x", x, E)
    if amax is not None:
        rules.amax(amax, "x", x, E, "offs")
    rules.dtype("out_dtype", out_dtype, FP8)
    q, q_t, grad = _group_outputs(x, E, out_dtype, rowwise, columnwise, bias_grad)
    return q, x.new_empty((E,), dtype=torch.float32), q_t, grad


@torch.library.register_fake("grouped_linear::quantize_weight_current")
def quantize_weight_current(
    w: Tensor,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = False,
    columnwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q, scale [E], q_t."""
    rules = Rules("quantize_weight_current")
    rules.weight(w)
    rules.epsilon(amax_epsilon)
    E, N, K = w.shape
    return (
        w.new_empty((E, N, K), dtype=E4M3),
        w.new_empty((E,), dtype=torch.float32),
        output_if(columnwise, w, (E, K, N), E4M3),
    )


@torch.library.register_fake("grouped_linear::quantize_weight_delayed")
def quantize_weight_delayed(
    w: Tensor, scale: Tensor, amax: Tensor | None, columnwise: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """w [E, N, K], scale [E] -> q, scale [E], q_t; amax [E] is raised in place."""
    rules = Rules("quantize_weight_delayed")
    rules.weight(w)
    E, N, K = w.shape
    rules.group_scale("scale", scale, "w", w, E, "w")
    if amax is not None:
        rules.amax(amax, "w", w, E, "w")
    return (
        w.new_empty((E, N, K), dtype=E4M3),
        w.new_empty((E,), dtype=torch.float32),
        output_if(columnwise, w, (E, K, N), E4M3),
    )


@torch.library.register_fake("grouped_linear::update_scales_")
def update_scales_(
    scale: list[Tensor],
    amax: list[Tensor],
    amax_history: list[Tensor],
    fp8_max: list[float],
    margin: int = 0,
    most_recent: bool = False,
) -> None:
    """scale [E], amax [E], amax_history [H, E] of any number of operands, written in place."""
    rules = Rules("update_scales_")
    rules.check(len(scale) > 0, lambda: "scale must not be empty")
    for name, count in (
        ("amax", len(amax)),
        ("amax_history", len(amax_history)),
        ("fp8_max", len(fp8_max)),
    ):
        rules.same("the number of states", name, count, "scale", len(scale))
    rules.check(
        0 <= margin <= MAX_MARGIN,
        lambda: f"margin must be between 0 and {MAX_MARGIN}, got {margin}",
    )
    first = scale[0]
    for scale_E, amax_E, history_HE, largest in zip(
        scale, amax, amax_history, fp8_max, strict=True
    ):
        rules.dim("scale", scale_E, 1)
        rules.dtype("scale", scale_E.dtype, (torch.float32,))
        rules.device("scale", scale_E, "the first scale", first)
        rules.count("scale", "groups", scale_E.size(0))
        rules.contiguous("scale", scale_E)
        E = scale_E.size(0)
        rules.amax(amax_E, "the first scale", first, E, "scale")
        rules.dim("amax_history", history_HE, 2)
        rules.dtype("amax_history", history_HE.dtype, (torch.float32,))
        rules.device("amax_history", history_HE, "the first scale", first)
        rules.same("E", "amax_history", history_HE.size(1), "scale", E)
        rules.check(history_HE.size(0) > 0, lambda: "amax_history must have a row, got none")
        rules.count("amax_history", "rows", history_HE.size(0))
        rules.contiguous("amax_history", history_HE)
        _check_fp8_max(rules, largest)


def _check_fp8_max(rules: Rules, largest: float) -> None:
    rules.check(
        math.isfinite(largest) and largest > 0,
        lambda: f"fp8_max must be positive and finite, got {largest:g}",
    )
