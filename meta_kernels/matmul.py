"""Fake kernels of the grouped GEMMs.

T rows, E groups, K in_features, N out_features.
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import ACTIVATIONS, BLOCK, E4M3, FP8, Rules, ceil_div


def _row_count(rules: Rules, a: Tensor, rows: Tensor | None) -> int:
    """The rows of a GEMM whose operand a is gathered or not."""
    if rows is None:
        return a.size(0)
    rules.rows(rows, 1, "a", a)
    return rows.size(0)


def check_grouped_mm(
    rules: Rules,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: Tensor | None,
) -> tuple[int, int]:
    """The rules of ``grouped_mm``; T and N."""
    rules.dim("a", a, 2)
    rules.dim("b", b, 3)
    rules.dtype("a", a.dtype, ACTIVATIONS)
    rules.dtype("b", b.dtype, (a.dtype,))
    rules.device("b", b, "a", a)
    rules.same("K", "a", a.size(1), "b", b.size(1))
    rules.features("K", a.size(1))
    rules.features("N", b.size(2))
    rules.offs(offs, "a", a)
    rules.same("E", "b", b.size(0), "offs", offs.size(0))
    rules.dtype("out_dtype", dtype, ACTIVATIONS)
    rules.bias(bias, a, offs.size(0), b.size(2), dtype)
    return _row_count(rules, a, rows), b.size(2)


@torch.library.register_fake("grouped_linear::grouped_mm")
def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    a_low: Tensor | None = None,
    b_low: Tensor | None = None,
) -> Tensor:
    """a [T, K], b [E, K, N] -> [T, N]; with rows [T], a has any number of rows."""
    dtype = a.dtype if out_dtype is None else out_dtype
    rules = Rules("grouped_mm")
    shape = check_grouped_mm(rules, a, b, offs, bias, dtype, rows)
    rules.low_rank(a_low, b_low, a, rows, offs.size(0), b.size(2), a.dtype)
    return a.new_empty(shape, dtype=dtype)


@torch.library.register_fake("grouped_linear::grouped_mm_list")
def grouped_mm_list(
    a: Tensor,
    b: list[Tensor],
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_b: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """a [T, K], E times b [K, N] ([N, K] where it is transposed) -> [T, N]."""
    dtype = a.dtype if out_dtype is None else out_dtype
    rules = Rules("grouped_mm_list")
    rules.dim("a", a, 2)
    rules.dtype("a", a.dtype, ACTIVATIONS)
    rules.experts("b", b)
    rules.dtype("b", b[0].dtype, (a.dtype,))
    rules.device("b", b[0], "a", a)
    K, N = reversed(b[0].shape) if transpose_b else b[0].shape
    rules.same("K", "a", a.size(1), "b", K)
    rules.features("K", K)
    rules.features("N", N)
    rules.offs(offs, "a", a)
    rules.same("E", "b", len(b), "offs", offs.size(0))
    rules.dtype("out_dtype", dtype, ACTIVATIONS)
    rules.bias(bias, a, offs.size(0), N, dtype)
    return a.new_empty((_row_count(rules, a, rows), N), dtype=dtype)


@torch.library.register_fake("grouped_linear::grouped_scaled_mm")
def grouped_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    a_low: Tensor | None = None,
    b_low: Tensor | None = None,
) -> Tensor:
    """a [T, K] and b [E, K, N] in FP8 -> [T, N]; with rows [T], a has any number of rows."""
    out_dtype = out_dtype or torch.bfloat16
    rules = Rules("grouped_scaled_mm")
    per_group = scale_a.dim() == 1  # else per block
    if per_group:
        rules.dim("a", a, 2)
        rules.dtype("a", a.dtype, FP8)
        rules.features("K", a.size(1))
    else:
        rules.rowwise("a", a, "scale_a", scale_a)
    rules.dim("b", b, 3)
    rules.dtype("b", b.dtype, (E4M3,))
    rules.device("b", b, "a", a)
    rules.same("K", "a", a.size(1), "b", b.size(1))
    rules.features("N", b.size(2))
    if not per_group:
        rules.dim("scale_b", scale_b, 3)
        rules.dtype("scale_b", scale_b.dtype, (torch.float32,))
        rules.device("scale_b", scale_b, "a", a)
        rules.same("E", "b", b.size(0), "scale_b", scale_b.size(0))
        k_blocks, n_blocks = ceil_div(b.size(1), BLOCK), ceil_div(b.size(2), BLOCK)
        rules.same("the number of N blocks", "b", n_blocks, "scale_b", scale_b.size(2))
        rules.same("the number of K blocks", "b", k_blocks, "scale_b", scale_b.size(1))
    rules.offs(offs, "a", a)
    rules.same("E", "b", b.size(0), "offs", offs.size(0))
    if per_group:
        rules.group_scale("scale_a", scale_a, "a", a, offs.size(0))
        rules.group_scale("scale_b", scale_b, "a", a, offs.size(0))
    rules.dtype("out_dtype", out_dtype, ACTIVATIONS)
    rules.bias(bias, a, offs.size(0), b.size(2), out_dtype)
    rules.check(
        rows is None or not per_group, lambda: "rows need block scales, got a scale a group"
    )
    shape = _row_count(rules, a, rows), b.size(2)
    rules.low_rank(a_low, b_low, a, rows, offs.size(0), b.size(2), out_dtype)
    return a.new_empty(shape, dtype=out_dtype)


def _check_wgrad(
    rules: Rules,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    dy_rows: Tensor | None,
    x_rows: Tensor | None,
) -> tuple[int, int, int]:
    rules.dim("dy", dy, 2)
    rules.dim("x", x, 2)
    rules.dtype("dy", dy.dtype, ACTIVATIONS)
    rules.dtype("x", x.dtype, (dy.dtype,))
    rules.device("x", x, "dy", dy)
    rules.check(dy_rows is None or x_rows is None, lambda: "give dy_rows or x_rows, got both")
    if dy_rows is not None:
        rules.rows(dy_rows, 1, "dy", dy, "dy_rows")
    if x_rows is not None:
        rules.rows(x_rows, 1, "dy", dy, "x_rows")
    dy_name, of_dy = ("dy", dy) if dy_rows is None else ("dy_rows", dy_rows)
    x_name, of_x = ("x", x) if x_rows is None else ("x_rows", x_rows)
    rules.same("T", dy_name, of_dy.size(0), x_name, of_x.size(0))
    rules.count("x", "rows", x.size(0))
    rules.features("N", dy.size(1))
    rules.features("K", x.size(1))
    rules.offs(offs, "dy", dy)
    rules.dtype("out_dtype", out_dtype, ACTIVATIONS)
    return offs.size(0), dy.size(1), x.size(1)


def _check_scaled_wgrad(
    rules: Rules,
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> tuple[int, int, int]:
    per_group = scale_dy_t.dim() == 1  # else per block
    if per_group:
        rules.column_blocks("dy_t", dy_t, "N")
        rules.dtype("dy_t", dy_t.dtype, FP8)
        rules.column_blocks("x_t", x_t, "K")
        rules.dtype("x_t", x_t.dtype, (E4M3,))
    else:
        rules.columnwise("dy_t", dy_t, "scale_dy_t", scale_dy_t, "N")
        rules.columnwise("x_t", x_t, "scale_x_t", scale_x_t, "K")
    rules.device("x_t", x_t, "dy_t", dy_t)
    rules.same("the number of blocks", "dy_t", dy_t.size(0), "x_t", x_t.size(0))
    rules.offs(offs, "dy_t", dy_t)
    if per_group:
        rules.group_scale("scale_dy_t", scale_dy_t, "dy_t", dy_t, offs.size(0))
        rules.group_scale("scale_x_t", scale_x_t, "dy_t", dy_t, offs.size(0))
    rules.dtype("out_dtype", out_dtype, ACTIVATIONS)
    return offs.size(0), dy_t.size(1), x_t.size(1)


def _check_main_grad(
    rules: Rules,
    main_grad: Tensor,
    dy: Tensor,
    shape: tuple[int, int, int],
    overwrite: Tensor | None,
) -> None:
    rules.dim("main_grad", main_grad, 3)
    _check_grad(rules, main_grad, main_grad.shape, dy, shape)
    _check_grad_strides(rules, main_grad)
    _check_overwrite(rules, overwrite, main_grad)


def _check_main_grad_list(
    rules: Rules,
    main_grad: list[Tensor],
    dy: Tensor,
    shape: tuple[int, int, int],
    overwrite: Tensor | None,
) -> None:
    rules.experts("main_grad", main_grad)
    _check_grad(rules, main_grad[0], (len(main_grad), *main_grad[0].shape), dy, shape)
    for expert in main_grad:
        _check_grad_strides(rules, expert)
    _check_overwrite(rules, overwrite, main_grad[0])


def _check_grad(
    rules: Rules,
    main_grad: Tensor,
    grad_shape: tuple[int, ...],
    dy: Tensor,
    shape: tuple[int, int, int],
) -> None:
    rules.dtype("main_grad", main_grad.dtype, (torch.float32, torch.bfloat16))
    rules.device("main_grad", main_grad, "dy", dy)
    for size, grad_size, what, owner in zip(
        shape, grad_shape, ("E", "N", "K"), ("offs", "dy", "x"), strict=True
    ):
        rules.same(what, "main_grad", grad_size, owner, size)


def _check_grad_strides(rules: Rules, main_grad: Tensor) -> None:
    rules.check(
        main_grad.is_contiguous(),
        lambda: f"main_grad must be contiguous, got strides {str(main_grad.stride())[1:-1]}",
    )


def _check_overwrite(rules: Rules, overwrite: Tensor | None, main_grad: Tensor) -> None:
    if overwrite is not None:
        rules.dim("overwrite", overwrite, 0)
        rules.dtype("overwrite", overwrite.dtype, (torch.bool,))
        rules.device("overwrite", overwrite, "main_grad", main_grad)


@torch.library.register_fake("grouped_linear::grouped_mm_wgrad")
def grouped_mm_wgrad(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = None,
    dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None,
) -> Tensor:
    """dy [T, N], x [T, K] -> [E, N, K]; of what has rows [T], any number of rows."""
    dtype = dy.dtype if out_dtype is None else out_dtype
    shape = _check_wgrad(Rules("grouped_mm_wgrad"), dy, x, offs, dtype, dy_rows, x_rows)
    return x.new_empty(shape, dtype=dtype)


@torch.library.register_fake("grouped_linear::grouped_scaled_mm_wgrad")
def grouped_scaled_mm_wgrad(
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """dy_t [Tp/B, N, B], x_t [Tp/B, K, B] -> [E, N, K]."""
    out_dtype = out_dtype or torch.bfloat16
    rules = Rules("grouped_scaled_mm_wgrad")
    shape = _check_scaled_wgrad(rules, dy_t, x_t, scale_dy_t, scale_x_t, offs, out_dtype)
    return x_t.new_empty(shape, dtype=out_dtype)


@torch.library.register_fake("grouped_linear::grouped_mm_wgrad_")
def grouped_mm_wgrad_(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
    dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None,
) -> None:
    """main_grad [E, N, K], written in place."""
    rules = Rules("grouped_mm_wgrad_")
    shape = _check_wgrad(rules, dy, x, offs, torch.float32, dy_rows, x_rows)
    _check_main_grad(rules, main_grad, dy, shape, overwrite)


@torch.library.register_fake("grouped_linear::grouped_scaled_mm_wgrad_")
def grouped_scaled_mm_wgrad_(
    main_grad: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
) -> None:
    """main_grad [E, N, K], written in place."""
    rules = Rules("grouped_scaled_mm_wgrad_")
    shape = _check_scaled_wgrad(rules, dy_t, x_t, scale_dy_t, scale_x_t, offs, torch.float32)
    _check_main_grad(rules, main_grad, dy_t, shape, overwrite)


@torch.library.register_fake("grouped_linear::grouped_mm_wgrad_list_")
def grouped_mm_wgrad_list_(
    main_grad: list[Tensor],
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
    dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None,
) -> None:
    """E times main_grad [N, K], written in place."""
    rules = Rules("grouped_mm_wgrad_list_")
    shape = _check_wgrad(rules, dy, x, offs, torch.float32, dy_rows, x_rows)
    _check_main_grad_list(rules, main_grad, dy, shape, overwrite)


@torch.library.register_fake("grouped_linear::grouped_scaled_mm_wgrad_list_")
def grouped_scaled_mm_wgrad_list_(
    main_grad: list[Tensor],
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
) -> None:
    """E times main_grad [N, K], written in place."""
    rules = Rules("grouped_scaled_mm_wgrad_list_")
    shape = _check_scaled_wgrad(rules, dy_t, x_t, scale_dy_t, scale_x_t, offs, torch.float32)
    _check_main_grad_list(rules, main_grad, dy_t, shape, overwrite)
