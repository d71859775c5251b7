"""Fake kernels of the ops that quantize, dequantize and reduce.

T rows, E groups, K features of x, N features of dy, B = 128, Tp = padded_rows(T, E).
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    E4M3,
    SCALE_ROW_MULTIPLE,
    Rules,
    ceil_div,
    padded_rows,
)


@torch.library.register_fake("grouped_linear::group_quantize")
def group_quantize(
    x: Tensor,
    offs: Tensor,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, K] -> q, scale, q_t, scale_t, bias_grad."""
    rules = Rules("group_quantize")
    rules.grouped_rows(x, offs, rowwise, columnwise)
    rules.epsilon(amax_epsilon)
    (T, K), E = x.shape, offs.size(0)
    scale_rows = SCALE_ROW_MULTIPLE * ceil_div(T, SCALE_ROW_MULTIPLE)
    blocks = padded_rows(T, E) // BLOCK

    def output(wanted: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return x.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        output(rowwise, (T, K), E4M3),
        output(rowwise, (ceil_div(K, BLOCK), scale_rows), torch.float32),
        output(columnwise, (blocks, K, BLOCK), E4M3),
        output(columnwise, (blocks, K), torch.float32),
        output(bias_grad, (E, K), torch.float32),
    )


@torch.library.register_fake("grouped_linear::group_dequantize")
def group_dequantize(q: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """q [T, K] -> x [T, K]."""
    rules = Rules("group_dequantize")
    rules.rowwise("q", q, "scale", scale)
    rules.offs(offs, "q", q)
    rules.dtype("dtype", dtype, ACTIVATIONS)
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.register_fake("grouped_linear::group_dequantize_t")
def group_dequantize_t(
    q_t: Tensor, scale_t: Tensor, offs: Tensor, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """q_t [Tp/B, K, B] -> x [T, K]."""
    rules = Rules("group_dequantize_t")
    rules.columnwise("q_t", q_t, "scale_t", scale_t, "K")
    rules.offs(offs, "q_t", q_t)
    rules.not_negative("num_rows", num_rows)
    blocks = padded_rows(num_rows, offs.size(0)) // BLOCK
    rules.same("the number of blocks", "q_t", q_t.size(0), "num_rows", blocks)
    rules.dtype("dtype", dtype, ACTIVATIONS)
    return q_t.new_empty((num_rows, q_t.size(1)), dtype=dtype)


@torch.library.register_fake("grouped_linear::grouped_bias_grad")
def grouped_bias_grad(dy: Tensor, offs: Tensor) -> Tensor:
    """dy [T, N] -> [E, N]."""
    rules = Rules("grouped_bias_grad")
    rules.dim("dy", dy, 2)
    rules.dtype("dy", dy.dtype, ACTIVATIONS)
    rules.features("N", dy.size(1))
    rules.offs(offs, "dy", dy)
    return dy.new_empty((offs.size(0), dy.size(1)), dtype=torch.float32)


@torch.library.register_fake("grouped_linear::quantize_weight")
def quantize_weight(
    w: Tensor,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q, scale, q_t."""
    rules = Rules("quantize_weight")
    rules.weight(w)
    rules.epsilon(amax_epsilon)
    E, N, K = w.shape
    return (
        w.new_empty((E, N, K), dtype=E4M3),
        w.new_empty((E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), dtype=torch.float32),
        w.new_empty((E, K, N) if columnwise else (0,), dtype=E4M3),
    )


@torch.library.register_fake("grouped_linear::quantize_weight_list")
def quantize_weight_list(
    w: list[Tensor],
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """E times w [N, K] -> q, scale, q_t."""
    rules = Rules("quantize_weight_list")
    rules.groups(len(w))
    first = w[0]
    rules.dim("w", first, 2)
    rules.dtype("w", first.dtype, ACTIVATIONS)
    rules.features("N", first.size(0))
    rules.features("K", first.size(1))
    for w_e in w:
        rules.dim("w", w_e, 2)
        rules.dtype("w", w_e.dtype, (first.dtype,))
        rules.device("w", w_e, "the first w", first)
        rules.same("N", "w", w_e.size(0), "the first w", first.size(0))
        rules.same("K", "w", w_e.size(1), "the first w", first.size(1))
    rules.epsilon(amax_epsilon)
    E, (N, K) = len(w), first.shape
    return (
        first.new_empty((E, N, K), dtype=E4M3),
        first.new_empty((E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), dtype=torch.float32),
        first.new_empty((E, K, N) if columnwise else (0,), dtype=E4M3),
    )


@torch.library.register_fake("grouped_linear::refresh_weight_")
def refresh_weight_(
    w: Tensor,
    refresh: Tensor | None,
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
) -> None:
    """q, scale and q_t as quantize_weight returns them, written in place."""
    rules = Rules("refresh_weight_")
    rules.weight(w)
    rules.epsilon(amax_epsilon)
    E, N, K = w.shape
    if refresh is not None:
        rules.dim("refresh", refresh, 0)
        rules.dtype("refresh", refresh.dtype, (torch.bool,))
        rules.device("refresh", refresh, "w", w)

    def written(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
        rules.dim(name, t, 3)
        rules.dtype(name, t.dtype, (dtype,))
        rules.device(name, t, "w", w)
        rules.check(
            all(size == own for size, own in zip(t.shape, shape, strict=True)),
            lambda: f"{name} must be {list(shape)}, got {list(t.shape)}",
        )
        rules.contiguous(name, t)

    written("q", q, E4M3, (E, N, K))
    written("scale", scale, torch.float32, (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)))
    if q_t is not None:
        written("q_t", q_t, E4M3, (E, K, N))
