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
    rules.dim("x", x, 2)
    rules.dtype("x", x.dtype, ACTIVATIONS)
    T, K = x.shape
    rules.features("K", K)
    rules.offs(offs, "x", x)
    rules.epsilon(amax_epsilon)
    rules.check(
        rowwise or columnwise, lambda: "rowwise or columnwise must be asked for, got neither"
    )
    E = offs.size(0)
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
    rules.dim("w", w, 3)
    rules.dtype("w", w.dtype, ACTIVATIONS)
    E, N, K = w.shape
    rules.groups(E)
    rules.features("N", N)
    rules.features("K", K)
    rules.epsilon(amax_epsilon)
    return (
        w.new_empty((E, N, K), dtype=E4M3),
        w.new_empty((E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), dtype=torch.float32),
        w.new_empty((E, K, N) if columnwise else (0,), dtype=E4M3),
    )
