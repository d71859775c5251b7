# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of a layer's forward and backward as one op each: they call those of the ops inside.

T rows, E groups, K in_features, N out_features, B = 128, Tp = padded_rows(T, E).
"""

from typing import Any

from torch import Tensor

from grouped_linear.meta_kernels.matmul import grouped_scaled_mm, grouped_scaled_mm_wgrad
from grouped_linear.meta_kernels.quantize import group_quantize, quantize_weight
from grouped_linear.meta_kernels.routing import splits_to_offsets
from grouped_linear.meta_kernels.rules import Rules, fake


@fake
def block_scaled_linear(rules: Rules, c: Any) -> tuple[Tensor, ...]:
    """x [T, K], w [E, N, K] -> y [T, N], offs [E], x_t, scale_x_t, w_t, scale_w."""
    rules.dim("x", 2)
    rules.dim("w", 3)
    rules.dim("m_splits", 1)
    for name in ("w", "m_splits", "bias"):
        rules.device(name, "x")
    offs = splits_to_offsets(c.m_splits, c.x.size(0))
    scaling = {"amax_epsilon": c.amax_epsilon, "power_of_two_scales": c.power_of_two_scales}
    q, scale, x_t, scale_x_t, _ = group_quantize(
        c.x, offs, columnwise=c.columnwise_x, share_scales=c.share_scales, **scaling
    )
    w_q, scale_w, w_t = quantize_weight(c.w, columnwise=c.columnwise_w, **scaling)
    y = grouped_scaled_mm(q, w_q.mT, scale, scale_w.mT, offs, c.bias, c.x.dtype)
    return y, offs, x_t, scale_x_t, w_t, scale_w


@fake
def block_scaled_linear_grad(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dy [T, N] -> dx [T, K] with w_t, dw [E, N, K] with x_t, db [E, N]."""
    rules.dim("dy", 2)
    rules.dim("offs", 1)
    has_x, has_w = c.x_t is not None, c.w_t is not None
    rules.check(not has_x or c.scale_x_t is not None, lambda: "x_t needs scale_x_t, got none")
    rules.check(not has_w or c.scale_w is not None, lambda: "w_t needs scale_w, got none")
    for name in ("offs", "x_t", "scale_x_t", "w_t", "scale_w"):
        rules.device(name, "dy")
    rules.dim("scale_w", 3)
    scaling = {"amax_epsilon": c.amax_epsilon, "power_of_two_scales": c.power_of_two_scales}
    q, scale, dy_t, scale_dy_t, db = group_quantize(
        c.dy, c.offs, rowwise=has_w, columnwise=has_x, bias_grad=c.bias_grad, **scaling
    )
    dtype = c.out_dtype or c.dy.dtype
    dx, dw = c.dy.new_empty(0), c.dy.new_empty(0, dtype=dtype)
    if has_w:
        dx = grouped_scaled_mm(q, c.w_t.mT, scale, c.scale_w, c.offs, out_dtype=c.dy.dtype)
    if has_x:
        dw = grouped_scaled_mm_wgrad(dy_t, c.x_t, scale_dy_t, c.scale_x_t, c.offs, dtype)
    return dx, dw, db
