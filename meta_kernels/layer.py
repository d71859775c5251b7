"""Fake kernels of a layer's forward and backward as one op each: they call those of the ops inside.

T rows, E groups, K in_features, N out_features, B = 128, Tp = padded_rows(T, E).
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.matmul import grouped_scaled_mm, grouped_scaled_mm_wgrad
from grouped_linear.meta_kernels.offsets import splits_to_offsets
from grouped_linear.meta_kernels.quantize import group_quantize, quantize_weight
from grouped_linear.meta_kernels.rules import Rules


@torch.library.register_fake("grouped_linear::block_scaled_linear")
def block_scaled_linear(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    bias: Tensor | None = None,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    share_scales: bool = False,
    columnwise_x: bool = True,
    columnwise_w: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, K], w [E, N, K] -> y [T, N], offs [E], x_t, scale_x_t, w_t, scale_w."""
    rules = Rules("block_scaled_linear")
    rules.dim("x", x, 2)
    for name, t in (("w", w), ("m_splits", m_splits), ("bias", bias)):
        if t is not None:
            rules.device(name, t, "x", x)
    offs = splits_to_offsets(m_splits, x.size(0))
    scaling = amax_epsilon, power_of_two_scales
    q, scale, x_t, scale_x_t, _ = group_quantize(
        x, offs, None, *scaling, columnwise=columnwise_x, share_scales=share_scales
    )
    w_q, scale_w, w_t = quantize_weight(w, *scaling, columnwise_w)
    y = grouped_scaled_mm(q, w_q.mT, scale, scale_w.mT, offs, bias, x.dtype)
    return y, offs, x_t, scale_x_t, w_t, scale_w


@torch.library.register_fake("grouped_linear::block_scaled_linear_grad")
def block_scaled_linear_grad(
    dy: Tensor,
    offs: Tensor,
    x_t: Tensor | None,
    scale_x_t: Tensor | None,
    w_t: Tensor | None,
    scale_w: Tensor | None,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dy [T, N] -> dx [T, K] with w_t, dw [E, N, K] with x_t, db [E, N]."""
    rules = Rules("block_scaled_linear_grad")
    rules.check(x_t is None or scale_x_t is not None, lambda: "x_t needs scale_x_t, got none")
    rules.check(w_t is None or scale_w is not None, lambda: "w_t needs scale_w, got none")
    operands = {"x_t": x_t, "scale_x_t": scale_x_t, "w_t": w_t, "scale_w": scale_w}
    for name, t in {"offs": offs, **operands}.items():
        if t is not None:
            rules.device(name, t, "dy", dy)
    if scale_w is not None:
        rules.dim("scale_w", scale_w, 3)
    scaling = amax_epsilon, power_of_two_scales
    layouts = w_t is not None, x_t is not None
    q, scale, dy_t, scale_dy_t, db = group_quantize(dy, offs, None, *scaling, *layouts, bias_grad)
    dtype = dy.dtype if out_dtype is None else out_dtype
    dx, dw = dy.new_empty(0), dy.new_empty(0, dtype=dtype)
    if w_t is not None and scale_w is not None:
        dx = grouped_scaled_mm(q, w_t.mT, scale, scale_w, offs, None, dy.dtype)
    if x_t is not None and scale_x_t is not None:
        dw = grouped_scaled_mm_wgrad(dy_t, x_t, scale_dy_t, scale_x_t, offs, dtype)
    return dx, dw, db
