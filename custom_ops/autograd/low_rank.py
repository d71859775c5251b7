# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA): a product of low rank added to a projection's, and its gradients.

T rows, E groups, K in_features, N out_features, r the rank, padded to what GEMMs take.

    y[t]  = ... + scaling * (x[t] @ A[e].T) @ B[e].T
    dx[t] = ... + scaling * (dy[t] @ B[e]) @ A[e]
    dA[e] = scaling * (dy @ B[e]).T @ x        dB[e] = dy.T @ (scaling * x @ A[e].T)

Each is a product with h = scaling * x @ A.T or dh = scaling * dy @ B, which are [T, r].
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grouped_linear import ops
from grouped_linear.autograd.gemm import Gemm, LowRankTerm
from grouped_linear.meta_kernels.rules import FEATURE_MULTIPLE
from grouped_linear.recipes import Operands


def padded_factors(a_ErK: Tensor, b_ENr: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A and B in the dtype and the rank that GEMMs multiply.

    They are made dense once: several GEMMs read them, and PEFT's B has its experts innermost.
    """
    a_ErK, b_ENr = a_ErK.to(dtype).contiguous(), b_ENr.to(dtype).contiguous()
    missing = -a_ErK.size(1) % FEATURE_MULTIPLE
    if missing:
        a_ErK, b_ENr = pad(a_ErK, (0, 0, 0, missing)), pad(b_ENr, (0, missing))
    return a_ErK, b_ENr


class Adapter(NamedTuple):
    """The adapter of a projection in one call."""

    a_ErK: Tensor
    b_ENr: Tensor
    scaling: float
    mask: Tensor | None  # dropout's factors of the adapter's input; None without dropout
    dropout: float  # the probability by which a call draws the mask

    def input(self, x: Tensor) -> Tensor:
        """x after dropout, which A multiplies."""
        return x if self.mask is None else x * self.mask

    def forward_term(self, x: Tensor, offs_E: Tensor, rows: Tensor | None = None) -> LowRankTerm:
        """h and B, whose product fprop adds, of the input x or x[rows]."""
        a_ErK, b_ENr = padded_factors(self.a_ErK, self.b_ENr, x.dtype)
        return self._term(x, a_ErK.mT, b_ENr.mT, offs_E, rows)

    def backward_term(self, dy: Tensor, offs_E: Tensor, rows: Tensor | None = None) -> LowRankTerm:
        """dh and A, whose product dgrad adds, of dy or dy[rows]."""
        a_ErK, b_ENr = padded_factors(self.a_ErK, self.b_ENr, dy.dtype)
        return self._term(dy, b_ENr, a_ErK, offs_E, rows)

    def _term(
        self, t: Tensor, first: Tensor, second: Tensor, offs_E: Tensor, rows: Tensor | None
    ) -> LowRankTerm:
        w = Operands(None, None, first)
        product_Tr = Gemm(Operands(t, rows=rows), w, offs_E, t.dtype).compute()
        if self.scaling != 1:  # not in place: selective checkpointing may keep a GEMM's output
            product_Tr = product_Tr * self.scaling
        return LowRankTerm(product_Tr, second)

    def grads(
        self,
        dy_TN: Tensor,
        x: Tensor | None,
        h_Tr: Tensor | None,
        offs_E: Tensor,
        dgrad: bool,
        x_rows: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, LowRankTerm | None]:
        """Compute the gradients of A and B, and with ``dgrad`` what dgrad of the projection adds.

        x, or x[x_rows], is the projection's input before dropout, None where A needs no gradient;
        h_Tr is A's product, None where B needs none.
        """
        da = db = term = None
        if h_Tr is not None:
            db = self.grad_of_b(dy_TN, h_Tr, offs_E)
        if x is not None or dgrad:
            term = self.backward_term(dy_TN, offs_E)
        if x is not None and term is not None:
            da = self.grad_of_a(term.a_Tr, self.input(x), offs_E, x_rows)
        return da, db, term if dgrad else None

    def grad_of_a(
        self, dh_Tr: Tensor, x: Tensor, offs_E: Tensor, x_rows: Tensor | None = None
    ) -> Tensor:
        """The gradient of A as it was given, of the input x or x[x_rows]."""
        da = ops.grouped_mm_wgrad(dh_Tr, x, offs_E, self.a_ErK.dtype, x_rows=x_rows)
        return da if da.shape == self.a_ErK.shape else da[:, : self.a_ErK.size(1)]

    def grad_of_b(
        self, dy: Tensor, h_Tr: Tensor, offs_E: Tensor, dy_rows: Tensor | None = None
    ) -> Tensor:
        """The gradient of B as it was given, of dy or dy[dy_rows]."""
        db = ops.grouped_mm_wgrad(dy, h_Tr, offs_E, self.b_ENr.dtype, dy_rows=dy_rows)
        return db if db.shape == self.b_ENr.shape else db[..., : self.b_ENr.size(2)]
