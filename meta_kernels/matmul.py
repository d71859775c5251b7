# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the grouped GEMMs.

T rows, E groups, K in_features, N out_features, F features of h.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    E4M3,
    FP8,
    MAX_FEATURES,
    Rules,
    ceil_div,
    fake,
)

Shape3 = tuple[int, int, int]


def check_operands(rules: Rules, c: Any) -> tuple[int, int]:
    """The rules of a [T, K], b [E, K, N] and offs [E] in 16 or 32 bits; E and N."""
    rules.dim("a", 2)
    rules.dim("b", 3)
    rules.dtype("a", *ACTIVATIONS)
    rules.dtype("b", c.a.dtype)
    rules.device("b", "a")
    rules.same("K", "a", c.a.size(1), "b", c.b.size(1))
    rules.features("K", c.a.size(1))
    rules.features("N", c.b.size(2))
    return rules.offs("a", b=c.b.size(0)), c.b.size(2)


def row_count(rules: Rules, c: Any) -> int:
    """The rows of a GEMM whose operand a is gathered or not."""
    rules.rows(1, "a")
    operand: Tensor = c.a if c.rows is None else c.rows
    return operand.size(0)


def product(rules: Rules, c: Any, N: int, default: torch.dtype, gathers: bool = True) -> Tensor:
    """y [T, N]: the rules of its dtype and bias, of gathered rows and of a second product."""
    E, dtype = c.offs.size(0), c.out_dtype or default
    rules.dtype("out_dtype", *ACTIVATIONS)
    rules.bias(E, N, dtype)
    rules.check(gathers or c.rows is None, lambda: "rows need block scales, got a scale a group")
    T = row_count(rules, c)
    rules.low_rank(E, N, c.a.dtype if c.a.dtype in ACTIVATIONS else dtype)
    return c.a.new_empty((T, N), dtype=dtype)


@fake
def addmm(rules: Rules, c: Any) -> Tensor:
    """c [M, N], a [M, K], b [K, N] -> [M, N]."""
    rules.dim("c", 2, torch.bfloat16, torch.float16)
    M, N = c.c.shape
    rules.features("N", N)
    rules.count("c", "rows", M)
    rules.tensor("a", 2, c.c.dtype, "c")
    rules.same("M", "a", c.a.size(0), "c", M)
    K = c.a.size(1)
    rules.check(1 <= K <= MAX_FEATURES, lambda: f"K must be between 1 and {MAX_FEATURES}, got {K}")
    rules.tensor("b", 2, c.c.dtype, "c")
    rules.same("K", "b", c.b.size(0), "a", K)
    rules.same("N", "b", c.b.size(1), "c", N)
    return c.c.new_empty((M, N))


@fake
def grouped_mm(rules: Rules, c: Any) -> Tensor:
    """a [T, K], b [E, K, N] -> [T, N]; with rows [T], a has any number of rows."""
    _, N = check_operands(rules, c)
    return product(rules, c, N, c.a.dtype)


@fake
def grouped_mm_list(rules: Rules, c: Any) -> Tensor:
    """a [T, K], E times b [K, N] ([N, K] where it is transposed) -> [T, N]."""
    rules.dim("a", 2, *ACTIVATIONS)
    rules.experts("b")
    rules.dtype("b", c.a.dtype)
    rules.device("b", "a")
    K, N = reversed(c.b[0].shape) if c.transpose_b else c.b[0].shape
    rules.same("K", "a", c.a.size(1), "b", K)
    rules.features("K", K)
    rules.features("N", N)
    rules.offs("a", b=len(c.b))
    return product(rules, c, N, c.a.dtype)


@fake
def grouped_scaled_mm(rules: Rules, c: Any) -> Tensor:
    """a [T, K] and b [E, K, N] in FP8 -> [T, N]; with rows [T], a has any number of rows."""
    per_group = c.scale_a.dim() == 1  # else per block
    if per_group:
        rules.dim("a", 2, *FP8)
        rules.features("K", c.a.size(1))
    else:
        rules.rowwise("a", "scale_a")
    rules.tensor("b", 3, E4M3, "a")
    rules.same("K", "a", c.a.size(1), "b", c.b.size(1))
    E, K, N = c.b.shape
    rules.features("N", N)
    if not per_group:
        rules.tensor("scale_b", 3, torch.float32, "a")
        rules.same("E", "b", E, "scale_b", c.scale_b.size(0))
        rules.same("the number of N blocks", "b", ceil_div(N, BLOCK), "scale_b", c.scale_b.size(2))
        rules.same("the number of K blocks", "b", ceil_div(K, BLOCK), "scale_b", c.scale_b.size(1))
    rules.offs("a", b=E)
    if per_group:
        rules.group_scale("scale_a", "a", E)
        rules.group_scale("scale_b", "a", E)
    return product(rules, c, N, torch.bfloat16, gathers=not per_group)


@fake
def grouped_mm_swiglu(rules: Rules, c: Any) -> tuple[Tensor, Tensor]:
    """a [T, K], b [E, K, 2 F] -> gate_up [T, 2 F] or empty, h [T, F]."""
    E, N = check_operands(rules, c)
    rules.bias(E, N, c.a.dtype)
    T = row_count(rules, c)
    rules.features("N / 2", N // 2)
    rules.swiglu_form()
    return c.a.new_empty((T, N) if c.keep_gate_up else (0,)), c.a.new_empty((T, N // 2))


@fake
def grouped_mm_swiglu_grad(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """a [T, K], b [E, F, K], weight [T] -> d_gate_up [T, 2 F], h [T, F], d_weight [T]."""
    _, F = check_operands(rules, c)
    T, name = row_count(rules, c), "a" if c.rows is None else "rows"
    rules.tensor("gate_up", 2, c.a.dtype, "a")
    rules.same("T", "gate_up", c.gate_up.size(0), name, T)
    rules.same("2 * N", "gate_up", c.gate_up.size(1), "b", 2 * F)
    rules.tensor("weight", 1, torch.float32, "a")
    rules.same("T", "weight", c.weight.size(0), name, T)
    rules.swiglu_form()
    return c.a.new_empty((T, 2 * F)), c.a.new_empty((T, F)), c.weight.new_empty((T,))


def _check_wgrad(rules: Rules, c: Any) -> Shape3:
    """dy [T, N], x [T, K] and offs [E]; with dy_rows or x_rows, one has any number of rows."""
    rules.dim("dy", 2)
    rules.dim("x", 2)
    rules.dtype("dy", *ACTIVATIONS)
    rules.dtype("x", c.dy.dtype)
    rules.device("x", "dy")
    rules.check(c.dy_rows is None or c.x_rows is None, lambda: "give dy_rows or x_rows, got both")
    rules.rows(1, "dy", "dy_rows")
    rules.rows(1, "dy", "x_rows")
    dy_name, of_dy = ("dy", c.dy) if c.dy_rows is None else ("dy_rows", c.dy_rows)
    x_name, of_x = ("x", c.x) if c.x_rows is None else ("x_rows", c.x_rows)
    rules.same("T", dy_name, of_dy.size(0), x_name, of_x.size(0))
    rules.count("x", "rows", c.x.size(0))
    rules.features("N", c.dy.size(1))
    rules.features("K", c.x.size(1))
    return rules.offs("dy"), c.dy.size(1), c.x.size(1)


def _check_scaled_wgrad(rules: Rules, c: Any) -> Shape3:
    """dy_t [Tp/B, N, B], x_t [Tp/B, K, B] and offs [E]."""
    per_group = c.scale_dy_t.dim() == 1  # else per block
    if per_group:
        rules.column_blocks("dy_t", "N")
        rules.dtype("dy_t", *FP8)
        rules.column_blocks("x_t", "K")
        rules.dtype("x_t", E4M3)
    else:
        rules.columnwise("dy_t", "scale_dy_t", "N")
        rules.columnwise("x_t", "scale_x_t", "K")
    rules.device("x_t", "dy_t")
    rules.same("the number of blocks", "dy_t", c.dy_t.size(0), "x_t", c.x_t.size(0))
    E = rules.offs("dy_t")
    if per_group:
        rules.group_scale("scale_dy_t", "dy_t", E)
        rules.group_scale("scale_x_t", "dy_t", E)
    return E, c.dy_t.size(1), c.x_t.size(1)


def _check_main_grad(rules: Rules, c: Any, dy: Tensor, shape: Shape3) -> None:
    """main_grad [E, N, K], or E tensors [N, K], and the flag ``overwrite``."""
    # Sentences name it dy, quantized or not.
    rules = Rules(rules.op, main_grad=c.main_grad, dy=dy, overwrite=c.overwrite)
    if isinstance(c.main_grad, list):
        rules.experts("main_grad")
        experts, grad_shape = c.main_grad, (len(c.main_grad), *c.main_grad[0].shape)
    else:
        rules.dim("main_grad", 3)
        experts, grad_shape = [c.main_grad], c.main_grad.shape
    rules.dtype("main_grad", torch.float32, torch.bfloat16)
    rules.device("main_grad", "dy")
    for d, (letter, owner) in enumerate(zip("ENK", ("offs", "dy", "x"), strict=True)):
        rules.same(letter, "main_grad", grad_shape[d], owner, shape[d])
    for expert in experts:
        _check_strides(rules, expert)
    rules.tensor("overwrite", 0, torch.bool, "main_grad")


def _check_strides(rules: Rules, main_grad: Tensor) -> None:
    rules.check(
        main_grad.is_contiguous(),
        lambda: f"main_grad must be contiguous, got strides {str(main_grad.stride())[1:-1]}",
    )


@fake
def grouped_mm_wgrad(rules: Rules, c: Any) -> Tensor:
    """dy [T, N], x [T, K] -> [E, N, K]; of what has rows [T], any number of rows."""
    shape = _check_wgrad(rules, c)
    rules.dtype("out_dtype", *ACTIVATIONS)
    return c.x.new_empty(shape, dtype=c.out_dtype or c.dy.dtype)


@fake
def grouped_scaled_mm_wgrad(rules: Rules, c: Any) -> Tensor:
    """dy_t [Tp/B, N, B], x_t [Tp/B, K, B] -> [E, N, K]."""
    shape = _check_scaled_wgrad(rules, c)
    rules.dtype("out_dtype", *ACTIVATIONS)
    return c.x_t.new_empty(shape, dtype=c.out_dtype or torch.bfloat16)


@fake
def grouped_mm_wgrad_(rules: Rules, c: Any) -> None:
    """main_grad [E, N, K], written in place."""
    _check_main_grad(rules, c, c.dy, _check_wgrad(rules, c))


@fake
def grouped_scaled_mm_wgrad_(rules: Rules, c: Any) -> None:
    """main_grad [E, N, K], written in place."""
    _check_main_grad(rules, c, c.dy_t, _check_scaled_wgrad(rules, c))


@fake
def grouped_mm_wgrad_list_(rules: Rules, c: Any) -> None:
    """E times main_grad [N, K], written in place."""
    _check_main_grad(rules, c, c.dy, _check_wgrad(rules, c))


@fake
def grouped_scaled_mm_wgrad_list_(rules: Rules, c: Any) -> None:
    """E times main_grad [N, K], written in place."""
    _check_main_grad(rules, c, c.dy_t, _check_scaled_wgrad(rules, c))
