# SPDX-License-Identifier: Apache-2.0
"""Quantize weights, in the layouts that fprop and dgrad read.

E experts, K in_features, N out_features.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from grouped_linear.meta_kernels.rules import Rules
from grouped_linear.ops.gradients import OPS


class WeightQuantized(NamedTuple):
    """A quantized weight; None for a result that was not requested.

    q [E, N, K] e4m3 is for fprop; q_t [E, K, N], the bytes of q transposed, for dgrad. Both have
    one scale, float32: [E, ceil(N / 128), ceil(K / 128)], or [E], one an expert.
    """

    q: Tensor | None
    scale: Tensor
    q_t: Tensor | None


def quantize_weight(
    w: Tensor,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
    rowwise: bool = True,
    mxfp4_dim: int | None = None,
) -> WeightQuantized:
    """Quantize a packed weight to e4m3 in 128x128 blocks, both layouts in one pass.

    The formula is that of :func:`group_quantize`, with the amax of 128 out_features times 128
    in_features of one expert. Blocks at the edges are smaller.

    Args:
        w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16.
        amax_epsilon: the smallest amax that a block is scaled by.
        power_of_two_scales: make scales powers of two.
        columnwise: return q_t, which dgrad reads.
        rowwise: return q, which fprop reads. At least one layout must be requested.
        mxfp4_dim: quantize the numbers of :func:`quantize_mxfp4`, whose blocks of 32 run along this
            dimension of w: -1, or -2 of a weight that is stored as [E, K, N]. q and scale are then
            what :func:`grouped_mm_mxfp4` makes of its codes beside a in e4m3; ``amax_epsilon`` and
            ``power_of_two_scales`` have no effect. (Scales are at least 2^-126, which only weights
            below 2^-117 reach.)

    >>> import torch
    >>> quantized = quantize_weight(torch.randn(2, 32, 144))
    >>> quantized.scale.shape, quantized.q_t.shape
    (torch.Size([2, 1, 2]), torch.Size([2, 144, 32]))
    """
    options = amax_epsilon, power_of_two_scales, columnwise, rowwise, mxfp4_dim
    q, scale, q_t = OPS.quantize_weight(w, *options)
    return WeightQuantized(q if rowwise else None, scale, q_t if columnwise else None)


def transpose_weight(q: Tensor) -> Tensor:
    """Transpose each expert of a quantized weight, so that dgrad can read it.

    ``q.mT.contiguous()`` of q [E, N, K] e4m3, N and K multiples of 16; on a GPU at the speed of a
    copy.

    >>> import torch
    >>> q = torch.ones(2, 32, 144).to(torch.float8_e4m3fn)
    >>> transpose_weight(q).shape
    torch.Size([2, 144, 32])
    """
    return OPS.transpose_weight(q)


def quantize_weight_list(
    w: Sequence[Tensor],
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
) -> WeightQuantized:
    """:func:`quantize_weight` of ``torch.stack(w)``, without stacking: w is E tensors [N, K].

    >>> import torch
    >>> w = [torch.ones(32, 16), torch.full((32, 16), 2.0)]
    >>> quantize_weight_list(w).scale.flatten()
    tensor([0.0039, 0.0078])
    """
    if not w:  # torch finds an op's device by its tensors, and here it has none
        Rules("quantize_weight_list").groups(0)
    q, scale, q_t = OPS.quantize_weight_list(list(w), amax_epsilon, power_of_two_scales, columnwise)
    return WeightQuantized(q, scale, q_t if columnwise else None)


def quantize_weight_current(
    w: Tensor,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = False,
    columnwise: bool = True,
) -> WeightQuantized:
    """:func:`quantize_weight` with one scale an expert, as :func:`group_quantize_current` has.

    >>> import torch
    >>> quantize_weight_current(torch.full((2, 32, 16), 448.0)).scale
    tensor([1., 1.])
    """
    q, scale, q_t = OPS.quantize_weight_current(w, amax_epsilon, power_of_two_scales, columnwise)
    return WeightQuantized(q, scale, q_t if columnwise else None)


def quantize_weight_delayed(
    w: Tensor, scale: Tensor, amax: Tensor | None = None, *, columnwise: bool = True
) -> WeightQuantized:
    """:func:`quantize_weight_current` with given scales [E], as :func:`group_quantize_delayed` has.

    The result's scale is what q was scaled by. amax [E] float32, contiguous, is raised in place;
    None records nothing.

    >>> import torch
    >>> amax = torch.zeros(2)
    >>> quantize_weight_delayed(torch.ones(2, 32, 16), torch.ones(2), amax).q.float().mean(), amax
    (tensor(1.), tensor([1., 1.]))
    """
    q, used, q_t = OPS.quantize_weight_delayed(w, scale, amax, columnwise)
    return WeightQuantized(q, used, q_t if columnwise else None)
