# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4, 4.25 bits an element: quantize, dequantize, and multiply by them.

T rows, E groups, K in_features, N out_features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from grouped_linear.ops.gradients import OPS


class Mxfp4Weight(NamedTuple):
    """A weight in MXFP4: the bytes of GPT-OSS's checkpoints.

    q [E, N, K / 2] uint8 has two codes a byte, the even element in the low nibble; scale
    [E, N, K / 32] uint8 is E8M0: a byte means 2^(byte - 127), and 255 NaN.
    """

    q: Tensor
    scale: Tensor


def quantize_mxfp4(w: Tensor) -> Mxfp4Weight:
    """Quantize a weight to MXFP4: E2M1 codes with a power of two for each 32 in_features.

    For a block, ``scale`` is the smallest power of two with ``amax <= 7 * scale``, and each code is
    the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives to ``w / scale``, ties to the even
    code. 6 is nearest to numbers between 6 and 7; of normally distributed weights the error is
    11.2% of their norm (11.5% with scales that let none saturate). A block with a NaN or an
    infinity is NaN. Numbers that :func:`dequantize_mxfp4` gives are kept.

    Args:
        w: [E, N, K] bfloat16, float16 or float32, N a multiple of 16, K of 32 and at most 2^22.

    Source: OCP Microscaling Formats (MX) Specification 1.0, with another choice of the scale.

    >>> w = quantize_mxfp4(torch.full((2, 16, 64), 3.0))
    >>> w.q.shape, w.scale[0, 0], hex(w.q[0, 0, 0])
    (torch.Size([2, 16, 32]), tensor([126, 126], dtype=torch.uint8), '0x77')
    """
    return Mxfp4Weight(*OPS.quantize_mxfp4(w))


def dequantize_mxfp4(q: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers [E, N, K] of a weight in MXFP4, see :class:`Mxfp4Weight`.

    ``w[e, n, k] = code(q[e, n, k / 2]) * 2^(scale[e, n, k / 32] - 127)``, exact in bfloat16 and
    float32 up to their largest numbers; float16 rounds to nearest even.

    >>> q, scale = quantize_mxfp4(torch.full((2, 16, 64), 3.0))
    >>> dequantize_mxfp4(q, scale)[0, 0, :2]
    tensor([3., 3.], dtype=torch.bfloat16)
    """
    return OPS.dequantize_mxfp4(q, scale, out_dtype)


def grouped_mm_mxfp4(
    a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    transpose_b: bool = True,
    rows: Tensor | None = None,
    a_low: Tensor | None = None,
    b_low: Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows by its own weight in MXFP4.

    For group e, its rows t and the weight w: ``y[t] = a[t] @ w[e].T + bias[e]``, or without
    ``transpose_b``, as dgrad, ``y[t] = a[t] @ w[e]``. Sums are float32 and rounded once. The weight
    is decoded as it is read:

    - beside a in bfloat16, float16 or float32 to that dtype, as :func:`dequantize_mxfp4` does;
    - beside a in e4m3 to e4m3, with a scale for each 128 x 128 block, which is 2^-6 of the largest
      of the block's scales. That is exact where no scale of a block is below 2^-14 of the largest;
      smaller numbers are rounded to nearest even.

    Args:
        a: [T, K], or [T, N] without ``transpose_b``, rows sorted by group: bfloat16, float16,
            float32, or e4m3 with ``scale_a``.
        b, scale_b: the weight [E, N, K], see :class:`Mxfp4Weight`.
        offs, rows: see :func:`grouped_mm`.
        bias: [E, N] of the result's dtype; [E, K] without ``transpose_b``.
        scale_a: the scales of a as :func:`group_quantize` returns them.
        out_dtype: the result's dtype; a's by default, or bfloat16 where that is e4m3.
        a_low, b_low: [T, r] and [E, r, N] of the result's dtype where a is e4m3, else of a's, see
            :func:`grouped_mm`.

    Returns: [T, N], or [T, K] without ``transpose_b``; zero at and past offs[-1].

    >>> w, offs = quantize_mxfp4(torch.ones(2, 16, 64)), torch.tensor([2, 5], dtype=torch.int32)
    >>> grouped_mm_mxfp4(torch.ones(5, 64), w.q, w.scale, offs)[0, 0]
    tensor(64.)
    >>> grouped_mm_mxfp4(torch.ones(5, 16), w.q, w.scale, offs, transpose_b=False).shape
    torch.Size([5, 64])
    """
    return OPS.grouped_mm_mxfp4(
        a, b, scale_b, offs, bias, scale_a, out_dtype, transpose_b, rows, a_low, b_low
    )
