# SPDX-License-Identifier: Apache-2.0
"""A layer's forward or backward under block scaling as one op each.

An eager op costs the host some ten microseconds, so small layers gain from fewer of them.

T rows, E groups, K in_features, N out_features, Tp rows of the padded columnwise layout (see
ops/quantize.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from grouped_linear.ops.gradients import OPS


class BlockScaledLinear(NamedTuple):
    """The results of :func:`block_scaled_linear`; None for one that was not requested.

    y [T, N] of x's dtype; offs [E] int32; x_t [Tp / 128, K, 128] e4m3 and scale_x_t [Tp / 128, K],
    x for wgrad; w_t [E, K, N] e4m3 and scale_w [E, ceil(N / 128), ceil(K / 128)], the weight for
    dgrad. Scales are float32.
    """

    y: Tensor
    offs: Tensor
    x_t: Tensor | None
    scale_x_t: Tensor | None
    w_t: Tensor | None
    scale_w: Tensor


class LinearGrad(NamedTuple):
    """The results of :func:`block_scaled_linear_grad`; None for one that was not computed.

    dx [T, K] has dy's dtype, dw [E, N, K] has out_dtype, db [E, N] is float32.
    """

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


def block_scaled_linear(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    bias: Tensor | None = None,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    share_scales: bool = False,
    columnwise_x: bool = True,
    columnwise_w: bool = True,
) -> BlockScaledLinear:
    """A layer's forward under block scaling as one op: ``y[t] = x[t] @ w[e].T + bias[e]``.

    It does what :func:`splits_to_offsets`, :func:`group_quantize` of x [T, K],
    :func:`quantize_weight` of w [E, N, K] and :func:`grouped_scaled_mm` do, with the same bits, and
    raises what they raise, in their names. bias is [E, N] of x's dtype. ``columnwise_x`` returns
    x_t and scale_x_t, which wgrad reads, and ``columnwise_w`` w_t, which dgrad reads.

    >>> x, w = torch.randn(5, 16), torch.randn(2, 32, 16)
    >>> y, offs, *operands = block_scaled_linear(x, w, torch.tensor([2, 3]))
    >>> y.shape, offs.tolist()
    (torch.Size([5, 32]), [2, 5])
    """
    scaling = amax_epsilon, power_of_two_scales, share_scales
    y, offs, x_t, scale_x_t, w_t, scale_w = OPS.block_scaled_linear(
        x, w, m_splits, bias, *scaling, columnwise_x, columnwise_w
    )
    x_t, scale_x_t = (x_t, scale_x_t) if columnwise_x else (None, None)
    return BlockScaledLinear(y, offs, x_t, scale_x_t, w_t if columnwise_w else None, scale_w)


def block_scaled_linear_grad(
    dy: Tensor,
    offs: Tensor,
    x_t: Tensor | None,
    scale_x_t: Tensor | None,
    w_t: Tensor | None,
    scale_w: Tensor | None,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
) -> LinearGrad:
    """The gradients of :func:`block_scaled_linear`, of its results and dy [T, N], as one op.

    It does what :func:`group_quantize` of dy, :func:`grouped_scaled_mm` and
    :func:`grouped_scaled_mm_wgrad` do, with the same bits, and raises what they raise, in their
    names; and if neither x_t nor w_t is given. For the rows t of group e::

        dx[t] = dy[t] @ w[e]    dw[e] = dy[group e].T @ x[group e]    db[e] = sum of dy[t]

    x_t None computes no dw, w_t None no dx. dw has dy's dtype unless out_dtype is given.

    >>> x, w = torch.ones(5, 16), torch.ones(2, 32, 16)
    >>> y, offs, *operands = block_scaled_linear(x, w, torch.tensor([2, 3]))
    >>> dx, dw, db = block_scaled_linear_grad(torch.ones_like(y), offs, *operands, bias_grad=True)
    >>> dx[0, 0].item(), dw[:, 0, 0].tolist(), db[:, 0].tolist()
    (32.0, [2.0, 3.0], [2.0, 3.0])
    """
    operands, scaling = (x_t, scale_x_t, w_t, scale_w), (amax_epsilon, power_of_two_scales)
    dx, dw, db = OPS.block_scaled_linear_grad(dy, offs, *operands, *scaling, bias_grad, out_dtype)
    return LinearGrad(
        None if w_t is None else dx, None if x_t is None else dw, db if bias_grad else None
    )
