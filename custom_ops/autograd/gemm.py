# SPDX-License-Identifier: Apache-2.0
"""The GEMMs that read rows and a weight, fprop and dgrad, for every kind of operand.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.recipes import Operands


class LowRankTerm(NamedTuple):
    """A second product that a GEMM adds, ``a[t] @ b[e]``, over few features r."""

    a_Tr: Tensor
    b_ErN: Tensor

    def product(self, offs_E: Tensor) -> Tensor:
        """The product alone, [T, N]."""
        return ops.grouped_mm(self.a_Tr, self.b_ErN, offs_E)


def _below_autograd() -> AbstractContextManager[None]:
    """Call an op inside a Function, which has the gradient, without the autograd of the op.

    Autograd of an op that is registered in Python takes an eager grouped_mm 3.5 us of 10, and a
    forward and backward 9 us of 71.
    """
    if torch.compiler.is_compiling():  # Dynamo does not trace the guard, and a graph needs none
        return nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


class Gemm(NamedTuple):
    """fprop or dgrad, not computed yet: a fused kernel may compute it with what follows."""

    operands: Operands  # the left operand a, rowwise; the GEMM may gather its rows
    weight: Operands  # the right operand w, [E, N, K]: rowwise for fprop, columnwise for dgrad
    offs_E: Tensor
    dtype: torch.dtype
    bias_EN: Tensor | None = None
    is_fprop: bool = False  # whether it is ``a[t] @ w[e].T + bias[e]``; dgrad is ``a[t] @ w[e]``
    low_rank: LowRankTerm | None = None  # a product that is added

    @property
    def b(self) -> Any:
        """The weight's numbers as they are stored, [E, N, K]."""
        return self.weight.rowwise if self.is_fprop else self.weight.columnwise

    @property
    def has_swiglu_kernel(self) -> bool:
        """Whether one kernel computes it and SwiGLU, or SwiGLU's gradient, of the product."""
        a, w = self.operands.rowwise, self.weight
        scale_b = w.rowwise_scale if self.is_fprop else w.columnwise_scale
        if self.low_rank is not None or self.operands.rowwise_scale is not None:
            return False
        is_plain = isinstance(a, Tensor) and isinstance(self.b, Tensor) and scale_b is None
        return is_plain and a.dtype == self.dtype  # type: ignore[union-attr]

    def compute(self) -> Tensor:
        """The product [T, N], or [T, K] of dgrad. The op follows from the operands."""
        operands, w, offs_E, dtype, bias_EN, is_fprop, low_rank = self
        a, scale_a, rows = operands.rowwise, operands.rowwise_scale, operands.rows
        b, scale_b = w.rowwise, w.rowwise_scale
        if not is_fprop:
            b, scale_b = w.columnwise, w.columnwise_scale
        assert isinstance(a, Tensor)
        assert b is not None
        if isinstance(b, tuple):
            assert low_rank is None
            return ops.grouped_mm_list(
                a, b, offs_E, bias_EN, dtype, transpose_b=is_fprop, rows=rows
            )
        low: Sequence[Tensor] = () if low_rank is None else low_rank
        if b.dtype == torch.uint8:
            assert scale_b is not None
            low_dtype = a.dtype if scale_a is None else dtype
            a_low, b_low = (t.to(low_dtype) for t in low) if low else (None, None)
            options: Any = {"transpose_b": is_fprop, "rows": rows, "a_low": a_low, "b_low": b_low}
            return ops.grouped_mm_mxfp4(a, b, scale_b, offs_E, bias_EN, scale_a, dtype, **options)
        if is_fprop:
            b = b.transpose(1, 2)
            scale_b = (
                scale_b.transpose(1, 2) if scale_b is not None and scale_b.dim() == 3 else scale_b
            )
        if scale_a is None or scale_b is None:
            low = [t.to(a.dtype) for t in low]  # MXFP8 multiplies in bf16, whatever x is
            with _below_autograd():
                return ops.grouped_mm(a, b, offs_E, bias_EN, dtype, rows, *low)
        return ops.grouped_scaled_mm(a, b, scale_a, scale_b, offs_E, bias_EN, dtype, rows, *low)
