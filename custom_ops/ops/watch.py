# SPDX-License-Identifier: Apache-2.0
"""Count, on the device, what quantization does to an operand of a GEMM.

T rows, E groups, K in_features, N out_features, F features of h.
"""

from torch import Tensor

from grouped_linear.ops.activation import PLAIN, SwiGLU
from grouped_linear.ops.gradients import OPS


def watch_operand_(
    stats: Tensor,
    turn: Tensor,
    operand: int,
    x: Tensor | None,
    q: Tensor | None = None,
    scale: Tensor | None = None,
    offs: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    q_rows: Tensor | None = None,
    gate_up: Tensor | None = None,
    weight: Tensor | None = None,
    scale_t: Tensor | None = None,
    routed: Tensor | None = None,
    most: int = 4,
    activation: SwiGLU = PLAIN,
) -> None:
    """Add what quantization does to some rows of each group to the group's numbers.

    The numbers are ``stats[operand, :, e]``, in parts that thread blocks add to: the whole
    is their sum, of numbers 4 and 5 their maximum::

        0  calls                                 7  numbers beyond the largest of q's dtype
        1  rows of the group                     8  numbers that are not finite
        2  numbers that were read                9  the sum of (q * scale - x)**2
        3  of them compared with q, and finite  10  the sum of x**2
        4  the largest magnitude read           11  blocks of 128 rows and features in scale_t
        5  the largest scale of a block with    12  of them those with one scale
           a number, as a magnitude
        6  numbers that became zero             13  rows of the group that were dropped

    Of each group ``most`` rows are read, one of each of so many equal spaces, 128 times as many
    rows of scales, and ``most`` blocks of scale_t; all where there are fewer. So the time does not
    depend on the groups' sizes. Which row of its space is read, the turn says: another in each
    turn. Sums have a fixed order.

    Args:
        stats: [operands, parts, E, 14] float64, contiguous, written; at most 64 parts.
        turn: an int32 of no dimensions on the device, which the kernel reads; if it is 0, no byte
            changes.
        operand: which operand of stats.
        x: the numbers before quantization: rows [T, K], or a weight [E, N, K]; None for those of
            gate_up, or for what q alone tells.
        q: what a GEMM multiplies, rows [T, K] or a weight [E, N, K], in FP8 or another dtype.
        scale: of q in FP8: [E], or of blocks as in :func:`group_quantize` or
            :func:`quantize_weight`.
        offs: [E] int32 group ends; None for a weight.
        rows: [T] int32 or int64, with x[rows[t]] in place of x[t].
        q_rows: the same for q.
        gate_up: [T, 2 F]: the numbers are ``swiglu(gate_up)``; with x [T, F] and weight the
            gradient that :func:`swiglu_grad` returns, x being dh.
        weight: [T] float32, see :func:`swiglu_grad`.
        scale_t: [blocks, features] float32, of columnwise data of the same rows, as
            :func:`group_quantize` returns it.
        routed: [E] int32: group ends before rows were dropped.
        most: how many rows of each group are read.
        activation: the form of SwiGLU.

    >>> import torch
    >>> from grouped_linear.ops import group_quantize
    >>> x, offs = torch.ones(5, 128), torch.tensor([2, 5], dtype=torch.int32)
    >>> x[3, 0] = 2.0**20  # beside which 1 is nothing
    >>> quantized, stats = group_quantize(x, offs), torch.zeros(1, 1, 2, 14).double()
    >>> watch_operand_(stats, torch.tensor(1).int(), 0, x, quantized.q, quantized.scale, offs)
    >>> stats[0, 0, :, 6]
    tensor([  0., 127.], dtype=torch.float64)
    """
    of_rows = offs, rows, q_rows, gate_up, weight, scale_t, routed
    OPS.watch_operand_(stats, turn, operand, x, q, scale, *of_rows, most, *activation.arguments)
