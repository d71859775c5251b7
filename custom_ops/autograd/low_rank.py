"""Adapters (LoRA): a product of low rank added to a projection's, and its gradients.

T rows, E groups, K in_features, N out_features, r the rank, padded to what GEMMs take.

    y[t]  = ... + scaling * (x[t] @ A[e].T) @ B[e].T
    dx[t] = ... + scaling * (dy[t] @ B[e]) @ A[e]
    dA[e] = scaling * (dy @ B[e]).T @ x        dB[e] = dy.T @ (scaling * x @ A[e].T)

Each is a product with h = scaling * x @ A.T or dh = scaling * dy @ B, which are [T, r].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from grouped_linear import ops
from grouped_linear.autograd.gemm import LowRankTerm, multiply
from grouped_linear.meta_kernels.rules import FEATURE_MULTIPLE
from grouped_linear.recipes import Operands

#: A, B and the scaling; each None without an adapter.
Adapter = tuple[Tensor | None, Tensor | None, float | None]


def padded_factors(a_ErK: Tensor, b_ENr: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A and B in the dtype and the rank that GEMMs multiply.

    They are made dense once: several GEMMs read them, and PEFT's B has its experts innermost.
    """
    a_ErK, b_ENr = a_ErK.to(dtype).contiguous(), b_ENr.to(dtype).contiguous()
    missing = -a_ErK.size(1) % FEATURE_MULTIPLE
    if missing:
        a_ErK, b_ENr = pad(a_ErK, (0, 0, 0, missing)), pad(b_ENr, (0, missing))
    return a_ErK, b_ENr


def forward_term(
    adapter: Adapter, x: Tensor, offs_E: Tensor, rows: Tensor | None = None
) -> LowRankTerm | None:
    """What fprop of the projection adds, h and B, of x or x[rows]; None without an adapter."""
    a_ErK, b_ENr, scaling = adapter
    if a_ErK is None or b_ENr is None or scaling is None:
        return None
    a_ErK, b_ENr = padded_factors(a_ErK, b_ENr, x.dtype)
    return _term(x, a_ErK.mT, b_ENr.mT, scaling, offs_E, rows)


def backward_term(
    adapter: Adapter, dy: Tensor, offs_E: Tensor, rows: Tensor | None = None
) -> LowRankTerm | None:
    """What dgrad of the projection adds, dh and A, of dy or dy[rows]; None without an adapter."""
    a_ErK, b_ENr, scaling = adapter
    if a_ErK is None or b_ENr is None or scaling is None:
        return None
    a_ErK, b_ENr = padded_factors(a_ErK, b_ENr, dy.dtype)
    return _term(dy, b_ENr, a_ErK, scaling, offs_E, rows)


def _term(
    t: Tensor, first: Tensor, second: Tensor, scaling: float, offs_E: Tensor, rows: Tensor | None
) -> LowRankTerm:
    w = Operands(None, columnwise=first)
    product_Tr = multiply(Operands(t), w, offs_E, None, t.dtype, rows=rows)
    return LowRankTerm(product_Tr if scaling == 1 else product_Tr * scaling, second)


def grad_of_a(
    a_ErK: Tensor, dh_Tr: Tensor, x: Tensor, offs_E: Tensor, x_rows: Tensor | None = None
) -> Tensor:
    """The gradient of A as it was given, of x or of x[x_rows]."""
    da = ops.grouped_mm_wgrad(dh_Tr, x, offs_E, a_ErK.dtype, x_rows=x_rows)
    return da[:, : a_ErK.size(1)]


def grad_of_b(
    b_ENr: Tensor, dy: Tensor, h_Tr: Tensor, offs_E: Tensor, dy_rows: Tensor | None = None
) -> Tensor:
    """The gradient of B as it was given, of dy or of dy[dy_rows]."""
    db = ops.grouped_mm_wgrad(dy, h_Tr, offs_E, b_ENr.dtype, dy_rows=dy_rows)
    return db[..., : b_ENr.size(2)]


def low_rank_grads(
    adapter: Adapter,
    dy_TN: Tensor,
    x: Tensor | None,
    h_Tr: Tensor | None,
    offs_E: Tensor,
    need_x: bool,
    x_rows: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, LowRankTerm | None]:
    """Compute the gradients of A and B, and what dgrad of the projection adds.

    A multiplied x or x[x_rows], which is None where A needs no gradient; as h_Tr is for B.
    """
    a_ErK, b_ENr, _ = adapter
    if a_ErK is None or b_ENr is None:
        return None, None, None
    da = db = term = None
    if h_Tr is not None:
        db = grad_of_b(b_ENr, dy_TN, h_Tr, offs_E)
    if x is not None or need_x:
        term = backward_term(adapter, dy_TN, offs_E)
    if x is not None and term is not None:
        da = grad_of_a(a_ErK, term.a_Tr, x, offs_E, x_rows)
    return da, db, term if need_x else None
