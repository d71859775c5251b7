"""The three GEMMs of a layer, fprop, dgrad and wgrad, for every kind of operand.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.recipes import Operands, Values, is_transposed


class LowRankTerm(NamedTuple):
    """A second product that a GEMM adds, ``a[t] @ b[e]``, over few features r."""

    a_Tr: Tensor
    b_ErN: Tensor


def _below_autograd() -> AbstractContextManager[None]:
    """Call an op inside a Function, which has the gradient, without the op's own autograd.

    Autograd of an op that is registered in Python takes an eager grouped_mm 3.5 us of 10, and a
    forward and backward 9 us of 71.
    """
    if torch.compiler.is_compiling():  # Dynamo does not trace the guard, and a graph needs none
        return nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def multiply(
    a_operands: Operands,
    w_operands: Operands,
    offs_E: Tensor,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
    transpose_b: bool = False,
    rows: Tensor | None = None,
    low_rank: LowRankTerm | None = None,
) -> Tensor:
    """Compute fprop, ``a[t] @ w[e].T + bias[e]``, with ``transpose_b``, or dgrad, ``a[t] @ w[e]``.

    It reads the rowwise fields of a, or of a[rows[t]], and of w the rowwise ones for fprop, the
    columnwise ones [E, N, K] for dgrad. ``low_rank`` is added.
    """
    a, scale_a = a_operands[:2]
    b, scale_b = w_operands[:2] if transpose_b else w_operands[2:4]
    assert isinstance(a, Tensor)
    assert b is not None
    if isinstance(b, tuple):
        assert low_rank is None
        return ops.grouped_mm_list(a, b, offs_E, bias_EN, dtype, transpose_b=transpose_b, rows=rows)
    if transpose_b:
        b = b.mT
        scale_b = scale_b.mT if scale_b is not None and scale_b.dim() == 3 else scale_b
    low: Sequence[Tensor] = () if low_rank is None else low_rank
    if scale_a is None or scale_b is None:
        low = [t.to(a.dtype) for t in low]  # MXFP8 multiplies in bf16, whatever x is
        with _below_autograd():
            return ops.grouped_mm(a, b, offs_E, bias_EN, dtype, rows, *low)
    return ops.grouped_scaled_mm(a, b, scale_a, scale_b, offs_E, bias_EN, dtype, rows, *low)


def takes_swiglu(a: Operands, b: Values | None, b_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether one kernel multiplies these and computes SwiGLU, or its gradient, of the product."""
    if not isinstance(a.rowwise, Tensor) or not isinstance(b, Tensor):
        return False
    return a.rowwise_scale is None and b_scale is None and a.rowwise.dtype == dtype


def weight_grad(
    w_ENK: Tensor,
    dtype: torch.dtype,
    dy: Tensor,
    x: Tensor,
    dy_scale: Tensor | None,
    x_scale: Tensor | None,
    offs_E: Tensor,
    dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None,
) -> Tensor:
    """Compute ``dy.T @ x`` over each group's rows: wgrad, in the weight's memory layout.

    Autograd copies a gradient whose layout differs from its parameter's. For a weight that is
    stored as [E, K, N] the GEMM is therefore ``x.T @ dy``, except where dy is e5m2, which the
    kernel reads as the left operand only.
    """
    swapped = is_transposed(w_ENK) and dy.dtype == x.dtype
    if swapped:
        dy, x, dy_scale, x_scale = x, dy, x_scale, dy_scale
        dy_rows, x_rows = x_rows, dy_rows
    if dy_scale is None or x_scale is None:
        dw = ops.grouped_mm_wgrad(dy, x, offs_E, dtype, dy_rows, x_rows)
    else:
        dw = ops.grouped_scaled_mm_wgrad(dy, x, dy_scale, x_scale, offs_E, dtype)
    return dw.mT if swapped else dw
