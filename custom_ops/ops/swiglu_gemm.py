# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs that go on with an expert's activation: fprop of gate and up, dgrad of down.

T rows, E groups, K features of a, F features of h.
"""

from typing import NamedTuple

from torch import Tensor

from grouped_linear.ops.activation import PLAIN, SwiGLU, SwigluGrad
from grouped_linear.ops.gradients import OPS


class SwigluGemm(NamedTuple):
    """The results of :func:`grouped_mm_swiglu`, of a's dtype.

    gate_up is [T, 2 F], or None where it was not requested; h is [T, F].
    """

    gate_up: Tensor | None
    h: Tensor


def grouped_mm_swiglu(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    keep_gate_up: bool = True,
    activation: SwiGLU = PLAIN,
) -> SwigluGemm:
    """Multiply each group of rows by its own matrix, and compute SwiGLU of the result.

    ``gate_up = grouped_mm(a, b, offs, bias, rows=rows); h = swiglu(gate_up, offs, activation)``.
    a is [T, K]; b [E, K, 2 F], ``gate_up_proj.mT`` for a weight [E, 2 F, K], F a multiple of 16;
    bias [E, 2 F]. ``keep_gate_up`` returns gate_up too, which a backward needs.

    On Hopper GPUs it is one kernel, if a is bfloat16, F is a multiple of 64 and b is the transposed
    view of a weight [E, 2 F, K]; or, with interleaved gate and up, of one stored as [E, K, 2 F] as
    in GPT-OSS, without `rows`. Its sigmoid is approximate, within 2^-17: about one number of h in
    100,000 is another neighbour in bfloat16. Elsewhere h has the bits of the two ops.

    >>> import torch
    >>> a, b, offs = torch.randn(5, 16), torch.randn(2, 16, 64), torch.tensor([2, 5]).int()
    >>> gate_up, h = grouped_mm_swiglu(a, b, offs)
    >>> gate_up.shape, h.shape
    (torch.Size([5, 64]), torch.Size([5, 32]))
    """
    gate_up, h = OPS.grouped_mm_swiglu(a, b, offs, bias, rows, keep_gate_up, *activation.arguments)
    return SwigluGemm(gate_up if keep_gate_up else None, h)


def grouped_mm_swiglu_grad(
    a: Tensor,
    b: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    offs: Tensor,
    rows: Tensor | None = None,
    *,
    activation: SwiGLU = PLAIN,
) -> SwigluGrad:
    """Multiply each group of rows by its own matrix, and go on with SwiGLU's gradient.

    ``swiglu_grad(grouped_mm(a, b, offs, rows=rows), gate_up, weight, offs, activation)``, but
    d_weight is summed in another fixed order. a is [T, K], the gradient of experts' outputs;
    b [E, K, F] is down_proj; gate_up is [T, 2 F] of a's dtype.

    On Hopper GPUs it is one kernel, if a is bfloat16, F is a multiple of 64 and b is stored as
    [E, K, F]; or, with interleaved gate and up, is the transposed view of one stored as [E, F, K].
    With `rows` it is one for plain SwiGLU alone. Its sigmoid is approximate, as that of
    :func:`grouped_mm_swiglu`.

    >>> import torch
    >>> dy, down_proj, offs = torch.randn(5, 16), torch.randn(2, 16, 32), torch.tensor([2, 5]).int()
    >>> grads = grouped_mm_swiglu_grad(dy, down_proj, torch.randn(5, 64), torch.rand(5), offs)
    >>> grads.d_gate_up.shape, grads.h.shape, grads.d_weight.shape
    (torch.Size([5, 64]), torch.Size([5, 32]), torch.Size([5]))
    """
    return SwigluGrad(
        *OPS.grouped_mm_swiglu_grad(a, b, gate_up, weight, offs, rows, *activation.arguments)
    )
