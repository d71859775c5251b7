# SPDX-License-Identifier: Apache-2.0
"""Quantize rows, activations or gradients, group by group; and dequantize them.

T rows, E groups, K features. Tp is the number of rows of the padded columnwise layout: every group
starts at a new block of 128 rows, so ``Tp = 128 * floor((T + 127 * min(E, T)) / 128)`` has room for
any group sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grouped_linear.ops.gradients import OPS


class GroupQuantized(NamedTuple):
    """Rows quantized in blocks; None for a result that was not requested.

    q [T, K] e4m3 with scale [ceil(K / 128), round_up(T, 4)] is for fprop and dgrad;
    q_t [Tp / 128, K, 128] e4m3 with scale_t [Tp / 128, K] is for wgrad.
    Scales are float32, of 1x128 blocks; :func:`group_quantize_mx` has others. bias_grad is [E, K]
    float32.
    """

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    bias_grad: Tensor | None


class PerGroupQuantized(NamedTuple):
    """Rows quantized with one scale a group; None for a result that was not requested.

    q [T, K] and q_t [Tp / 128, K, 128] are e4m3 or e5m2 and have one scale [E] float32; bias_grad
    is [E, K] float32.
    """

    q: Tensor | None
    scale: Tensor
    q_t: Tensor | None
    bias_grad: Tensor | None


class MxRounded(NamedTuple):
    """The results of :func:`group_round_mx`; None for one that was not requested.

    x_rowwise and x_columnwise are [T, K] bfloat16, bias_grad is [E, K] float32.
    """

    x_rowwise: Tensor | None
    x_columnwise: Tensor | None
    bias_grad: Tensor | None


def requested(
    outputs: Sequence[Tensor], rowwise: bool, columnwise: bool, fifth: bool
) -> tuple[Tensor | None, ...]:
    """The outputs of an op that quantizes in blocks, with None for those that were not requested.

    An op returns an empty tensor in their place. `fifth` is what follows q, scale, q_t and scale_t.
    """
    q, scale, q_t, scale_t, fifth_output = outputs
    of_rows = (q, scale) if rowwise else (None, None)
    of_columns = (q_t, scale_t) if columnwise else (None, None)
    return *of_rows, *of_columns, fifth_output if fifth else None


def group_quantize(
    x: Tensor,
    offs: Tensor,
    rows: Tensor | None = None,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
    share_scales: bool = False,
) -> GroupQuantized:
    """Quantize activations or gradients to e4m3 in 1x128 blocks; one pass over x for all outputs.

    A rowwise block is 128 features of one row; fprop and dgrad read these. A columnwise block is
    128 rows of one feature, counted from the group's first row; wgrad reads these. For each block,
    in float32::

        amax = max(largest finite |x|, amax_epsilon)
        factor = min(448 / amax, 2 ** 126)  # 1 if amax is 0; power_of_two_scales rounds it down
        q, scale = e4m3(x * factor), 1 / factor

    e4m3() rounds to nearest even. An infinity or NaN becomes NaN and changes no other element.

    Args:
        x: [T, K] bfloat16, float16 or float32, K a multiple of 16. Any row stride is read in place;
            an x with an inner stride other than 1 is copied first.
        offs: [E] int32 group ends.
        rows: [T] int32 or int64: quantize x[rows] of x [S, K], see :func:`grouped_mm`.
        amax_epsilon: the smallest amax that a block is scaled by.
        power_of_two_scales: make scales powers of two, so that scaling changes no mantissa.
        rowwise: return q and scale.
        columnwise: return q_t and scale_t.
        bias_grad: return the sum of x over each group's rows, added in a fixed order.
        share_scales: let 128 columnwise blocks of 128 neighbouring features, counted from the
            first, share the scale of their largest amax (before amax_epsilon). They share it only
            if each of their amaxes is 0 or at least 1/256 of the largest. wgrad reads blocks of x
            with a shared scale 1.2 to 1.8 times as fast. Only numbers below 2**-13 of the largest
            lose bits, at most 2**-9.8 of their own feature's amax.

    Returns:
        See :class:`GroupQuantized`. scale has a column for each row of x. With
        Tp = 128 * floor((T + 127 * min(E, T)) / 128) every group starts at a new block of q_t, and
        its last block is padded with zeros. Bytes that belong to no group are unspecified.

    >>> x, offs = torch.randn(10, 64), torch.tensor([3, 10], dtype=torch.int32)
    >>> quantized = group_quantize(x, offs, columnwise=True)
    >>> quantized.q.shape, quantized.scale.shape, quantized.q_t.shape
    (torch.Size([10, 64]), torch.Size([1, 12]), torch.Size([2, 64, 128]))
    """
    scaling = amax_epsilon, power_of_two_scales
    outputs = OPS.group_quantize(
        x, offs, rows, *scaling, rowwise, columnwise, bias_grad, share_scales
    )
    return GroupQuantized(*requested(outputs, rowwise, columnwise, bias_grad))


def group_quantize_current(
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = False,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> PerGroupQuantized:
    """:func:`group_quantize` to e4m3 or e5m2 with one scale a group, from the amax of all its rows.

    The dtype's largest number takes the place of 448. x is read twice, the first time for the amax.
    In e5m2 an infinity stays an infinity. An empty group's scale is 1.

    >>> x, offs = torch.tensor([[448.0] * 16, [7.0] * 16]), torch.tensor([1, 2], dtype=torch.int32)
    >>> quantized = group_quantize_current(x, offs)
    >>> quantized.scale, quantized.q[:, 0].float()
    (tensor([1.0000, 0.0156]), tensor([448., 448.]))
    """
    scaling, flags = (amax_epsilon, power_of_two_scales), (rowwise, columnwise, bias_grad)
    q, scale, q_t, grad = OPS.group_quantize_current(x, offs, out_dtype, *scaling, *flags)
    return PerGroupQuantized(
        q if rowwise else None, scale, q_t if columnwise else None, grad if bias_grad else None
    )


def group_quantize_delayed(
    x: Tensor,
    offs: Tensor,
    scale: Tensor,
    amax: Tensor | None = None,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> PerGroupQuantized:
    """:func:`group_quantize_current` with given scales, in one pass that records the amax.

    ``q = fp8(x * (1 / scale[e]))``; finite numbers saturate at the dtype's largest. ``amax[e]``
    becomes the maximum of itself and of the group's magnitudes; an infinity or NaN counts as
    infinity. Recording the same rows twice changes nothing.

    Args:
        x, offs, out_dtype, rowwise, columnwise, bias_grad: see :func:`group_quantize_current`.
        scale: [E] float32. Where it is 0, which no scale is, the group takes its own, by a second
            pass. The result has the scale that was taken.
        amax: [E] float32, contiguous, updated in place as batch_norm updates its running mean; None
            to record nothing.

    >>> amax, scale = torch.zeros(2), torch.tensor([1.0, 2.0])
    >>> x, offs = torch.full((2, 16), 6.0), torch.tensor([1, 2], dtype=torch.int32)
    >>> group_quantize_delayed(x, offs, scale, amax).q[:, 0].float(), amax
    (tensor([6., 3.]), tensor([6., 6.]))
    """
    q, used, q_t, grad = OPS.group_quantize_delayed(
        x, offs, scale, amax, out_dtype, rowwise, columnwise, bias_grad
    )
    return PerGroupQuantized(
        q if rowwise else None, used, q_t if columnwise else None, grad if bias_grad else None
    )


def group_quantize_mx(
    x: Tensor,
    offs: Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> GroupQuantized:
    """:func:`group_quantize` to MXFP8: e4m3 in blocks of 32 with E8M0 scales.

    Rowwise blocks are 32 features of one row, columnwise blocks 32 rows of one feature, counted
    from the group's first row. For each block::

        scale = 2 ** ceil(log2(largest finite |x| / 448)), between 2 ** -124 and 2 ** 119
        q = e4m3(x / scale)

    so that ``q * scale`` is always exactly a finite bfloat16 number. e4m3() saturates. Scales are
    e8m0: scale [T, ceil(K / 32)], scale_t [Tp / 128, K, 4].

    >>> x, offs = torch.full((2, 32), 3.0), torch.tensor([2], dtype=torch.int32)
    >>> quantized = group_quantize_mx(x, offs)
    >>> quantized.q[0, 0].float(), quantized.scale[0, 0].float()
    (tensor(384.), tensor(0.0078))
    """
    outputs = OPS.group_quantize_mx(x, offs, rowwise, columnwise, bias_grad)
    return GroupQuantized(*requested(outputs, rowwise, columnwise, bias_grad))


def group_round_mx(
    x: Tensor,
    offs: Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> MxRounded:
    """Round x [T, K] to numbers that MXFP8 holds: :func:`group_quantize_mx` and back, in one pass.

    ``rowwise`` returns x rounded in blocks of 32 features, ``columnwise`` in blocks of 32 rows. The
    results are exact in bfloat16, so a BF16 GEMM of them computes with the MXFP8 numbers. Rows that
    belong to no group are unspecified.

    >>> x, offs = torch.tensor([[100.0] + 31 * [3.3]]), torch.tensor([1], dtype=torch.int32)
    >>> group_round_mx(x, offs).x_rowwise[0, :2]
    tensor([96.0000,  3.2500], dtype=torch.bfloat16)
    """
    x_rowwise, x_columnwise, grad = OPS.group_round_mx(x, offs, rowwise, columnwise, bias_grad)
    x_rowwise, x_columnwise = x_rowwise if rowwise else None, x_columnwise if columnwise else None
    return MxRounded(x_rowwise, x_columnwise, grad if bias_grad else None)


def group_dequantize(q: Tensor, scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Dequantize rowwise data of :func:`group_quantize`.

    ``x[t, k] = q[t, k] * scale[k // 128, t]``, [T, K] bfloat16, float16 or float32; zero at and
    past offs[-1].

    >>> x, offs = torch.full((2, 16), 3.0), torch.tensor([1], dtype=torch.int32)
    >>> quantized = group_quantize(x, offs)
    >>> group_dequantize(quantized.q, quantized.scale, offs, torch.float32)[:, 0]
    tensor([3., 0.])
    """
    return OPS.group_dequantize(q, scale, offs, out_dtype)


def group_dequantize_t(
    q_t: Tensor, scale_t: Tensor, offs: Tensor, num_rows: int, out_dtype: torch.dtype
) -> Tensor:
    """Dequantize columnwise data of :func:`group_quantize`, back to row-major order.

    For row r of block b: ``x[t, k] = q_t[b, k, r] * scale_t[b, k]``. ``num_rows`` is T of the x
    that was quantized. The result is that of :func:`group_dequantize`.

    >>> x, offs = torch.full((2, 16), 3.0), torch.tensor([1], dtype=torch.int32)
    >>> quantized = group_quantize(x, offs, columnwise=True)
    >>> group_dequantize_t(quantized.q_t, quantized.scale_t, offs, 2, torch.float32)[:, 0]
    tensor([3., 0.])
    """
    return OPS.group_dequantize_t(q_t, scale_t, offs, num_rows, out_dtype)
