"""Fake kernels of the grouped GEMMs that go on with SwiGLU or its gradient.

T rows, E groups, K features of a, F features of h.
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.matmul import check_grouped_mm
from grouped_linear.meta_kernels.quantize import check_form
from grouped_linear.meta_kernels.rules import Rules


@torch.library.register_fake("grouped_linear::grouped_mm_swiglu")
def grouped_mm_swiglu(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    keep_gate_up: bool = True,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """a [T, K], b [E, K, 2 F] -> gate_up [T, 2 F] or empty, h [T, F]."""
    rules = Rules("grouped_mm_swiglu")
    T, N = check_grouped_mm(rules, a, b, offs, bias, a.dtype, rows)
    rules.features("N / 2", N // 2)
    check_form(rules, alpha, beta, limit, cubic)
    return a.new_empty((T, N) if keep_gate_up else (0,)), a.new_empty((T, N // 2))


@torch.library.register_fake("grouped_linear::grouped_mm_swiglu_grad")
def grouped_mm_swiglu_grad(
    a: Tensor,
    b: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    offs: Tensor,
    rows: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """a [T, K], b [E, F, K], weight [T] -> d_gate_up [T, 2 F], h [T, F], d_weight [T]."""
    rules = Rules("grouped_mm_swiglu_grad")
    T, F = check_grouped_mm(rules, a, b, offs, None, a.dtype, rows)
    name = "a" if rows is None else "rows"
    rules.dim("gate_up", gate_up, 2)
    rules.dtype("gate_up", gate_up.dtype, (a.dtype,))
    rules.device("gate_up", gate_up, "a", a)
    rules.same("T", "gate_up", gate_up.size(0), name, T)
    rules.same("2 * N", "gate_up", gate_up.size(1), "b", 2 * F)
    rules.dim("weight", weight, 1)
    rules.dtype("weight", weight.dtype, (torch.float32,))
    rules.device("weight", weight, "a", a)
    rules.same("T", "weight", weight.size(0), name, T)
    check_form(rules, alpha, beta, limit, cubic)
    return a.new_empty((T, 2 * F)), a.new_empty((T, F)), weight.new_empty((T,))
