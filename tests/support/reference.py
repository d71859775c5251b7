# SPDX-License-Identifier: Apache-2.0
"""What every op and the layer compute, in float64 and plain torch, to be read aloud.

The ops are in ``support.op_reference``, the layer is here. Nothing calls the library under test.

T rows, E groups, K in_features, N out_features. offs [E] are group ends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from support.op_reference import *  # noqa: F403
from support.op_reference import (
    E4M3,
    E5M2,
    Scaling,
    dequantize_columnwise,
    dequantize_rowwise,
    dequantize_weight,
    grouped_bias_grad,
    grouped_mm,
    grouped_mm_wgrad,
    quantize_columnwise,
    quantize_groups,
    quantize_groups_with,
    quantize_rowwise,
    quantize_weight,
    round_mx_columnwise,
    round_mx_rowwise,
    scale_groups,
    zero_outside_groups,
)


class Layer(NamedTuple):
    """Results of the layer's forward and backward."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor


class Operands(NamedTuple):
    """What the layer's three products read."""

    x_rowwise: Tensor
    x_columnwise: Tensor
    weight: Tensor
    dy_rowwise: Tensor
    dy_columnwise: Tensor
    weight_columnwise: Tensor


class Current(NamedTuple):
    """One scale a group, from its own amax."""

    scaling: Scaling
    gradient_dtype: torch.dtype = E4M3


class Delayed(NamedTuple):
    """One scale a group, given: [E] each. Gradients are e5m2."""

    x: Tensor
    weight: Tensor
    dy: Tensor


class Mx(NamedTuple):
    """Blocks of 32 with powers of two."""


Scheme = Scaling | Current | Delayed | Mx | None


def operands(
    x_TK: Tensor, w_ENK: Tensor, offs_E: Tensor, dy_TN: Tensor, scheme: Scheme
) -> Operands:
    """The numbers that the products see: dequantized where there is a scaling."""
    if scheme is None:
        return Operands(x_TK, x_TK, w_ENK, dy_TN, dy_TN, w_ENK)
    if isinstance(scheme, Scaling):
        return block_operands(x_TK, w_ENK, offs_E, dy_TN, scheme)

    E, N, K = w_ENK.shape
    rows_w, offs_w = w_ENK.reshape(E * N, K), torch.arange(1, E + 1) * N
    if isinstance(scheme, Mx):
        return Operands(
            zero_outside_groups(round_mx_rowwise(x_TK), offs_E),
            round_mx_columnwise(x_TK, offs_E),
            round_mx_rowwise(rows_w).view(E, N, K),
            zero_outside_groups(round_mx_rowwise(dy_TN), offs_E),
            round_mx_columnwise(dy_TN, offs_E),
            round_mx_columnwise(rows_w, offs_w).view(E, N, K),
        )
    if isinstance(scheme, Current):
        q_x, scale_x = quantize_groups(x_TK, offs_E, scheme.scaling, E4M3)
        q_w, scale_w = quantize_groups(rows_w, offs_w, scheme.scaling, E4M3)
        q_dy, scale_dy = quantize_groups(dy_TN, offs_E, scheme.scaling, scheme.gradient_dtype)
    else:
        q_x, scale_x = quantize_groups_with(x_TK, offs_E, scheme[0], E4M3)
        q_w, scale_w = quantize_groups_with(rows_w, offs_w, scheme[1], E4M3)
        q_dy, scale_dy = quantize_groups_with(dy_TN, offs_E, scheme[2], E5M2)
    x, dy = scale_groups(q_x, scale_x, offs_E), scale_groups(q_dy, scale_dy, offs_E)
    weight = scale_groups(q_w, scale_w, offs_w).view(E, N, K)
    return Operands(x, x, weight, dy, dy, weight)


def block_operands(
    x_TK: Tensor, w_ENK: Tensor, offs_E: Tensor, dy_TN: Tensor, scaling: Scaling
) -> Operands:
    """The numbers that the products see under block scaling."""

    def rowwise(x: Tensor) -> Tensor:
        return dequantize_rowwise(*quantize_rowwise(x, scaling), offs_E)

    def columnwise(x: Tensor, share_scales: bool = False) -> Tensor:
        if scaling.wgrad != E4M3:
            return x.to(scaling.wgrad)
        quantized = quantize_columnwise(x, offs_E, scaling, share_scales)
        return dequantize_columnwise(*quantized, offs_E, x.size(0))

    q_ENK, scale, _ = quantize_weight(w_ENK, scaling)
    weight = dequantize_weight(q_ENK, scale)
    x_columnwise = columnwise(x_TK, scaling.share_x_scales)
    return Operands(rowwise(x_TK), x_columnwise, weight, rowwise(dy_TN), columnwise(dy_TN), weight)


def layer(operand: Operands, bias_EN: Tensor | None, offs_E: Tensor, dy_TN: Tensor) -> Layer:
    """y = x @ w.T + b and its gradients, group by group."""
    return Layer(
        y=grouped_mm(operand.x_rowwise, operand.weight.mT, offs_E, bias_EN),
        dx=grouped_mm(operand.dy_rowwise, operand.weight_columnwise, offs_E),
        dw=grouped_mm_wgrad(operand.dy_columnwise, operand.x_columnwise, offs_E),
        db=grouped_bias_grad(dy_TN, offs_E),
    )
