# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the ops that quantize, dequantize and reduce.

T rows, E groups, K features of x, N features of dy, B = 128, Tp = padded_rows(T, E).
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    E4M3,
    FP8,
    MX_BLOCK,
    SCALE_ROW_MULTIPLE,
    Rules,
    block_scales,
    ceil_div,
    fake,
    output_if,
    padded_rows,
)

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
QuantizedWeight = tuple[Tensor, Tensor, Tensor]


def _quantized(x: Tensor, T: int, K: int, E: int, rowwise: bool, columnwise: bool) -> Quantized:
    """q, scale, q_t and scale_t of x [T, K]; outputs that are not requested are empty."""
    scale_rows = SCALE_ROW_MULTIPLE * ceil_div(T, SCALE_ROW_MULTIPLE)
    blocks = padded_rows(T, E) // BLOCK
    return (
        output_if(rowwise, x, (T, K), E4M3),
        output_if(rowwise, x, (ceil_div(K, BLOCK), scale_rows), torch.float32),
        output_if(columnwise, x, (blocks, K, BLOCK), E4M3),
        output_if(columnwise, x, (blocks, K), torch.float32),
    )


def _quantized_weight(
    like: Tensor, E: int, N: int, K: int, scale: tuple[int, ...], columnwise: bool, rowwise: bool
) -> QuantizedWeight:
    """q [E, N, K], scale of this shape and q_t [E, K, N]."""
    return (
        output_if(rowwise, like, (E, N, K), E4M3),
        like.new_empty(scale, dtype=torch.float32),
        output_if(columnwise, like, (E, K, N), E4M3),
    )


@fake
def group_quantize(rules: Rules, c: Any) -> tuple[Tensor, ...]:
    """x [T, K], or [S, K] with rows [T] -> q, scale, q_t, scale_t, bias_grad."""
    rules.dim("x", 2, *ACTIVATIONS)
    K = c.x.size(1)
    rules.features("K", K)
    rules.offs("x")
    rules.rows(1, "x")
    rules.finite("amax_epsilon", 0)
    rules.layouts()
    T, E = (c.x if c.rows is None else c.rows).size(0), c.offs.size(0)
    bias_grad = output_if(c.bias_grad, c.x, (E, K), torch.float32)
    return (*_quantized(c.x, T, K, E, c.rowwise, c.columnwise), bias_grad)


def _quantized_per_group(c: Any) -> Quantized:
    """q [T, K], scale [E], q_t [Tp/B, K, B], bias_grad [E, K]; empty where not requested."""
    (T, K), E = c.x.shape, c.offs.size(0)
    return (
        output_if(c.rowwise, c.x, (T, K), c.out_dtype),
        c.x.new_empty((E,), dtype=torch.float32),
        output_if(c.columnwise, c.x, (padded_rows(T, E) // BLOCK, K, BLOCK), c.out_dtype),
        output_if(c.bias_grad, c.x, (E, K), torch.float32),
    )


@fake
def group_quantize_current(rules: Rules, c: Any) -> Quantized:
    """x [T, K] -> q, scale [E], q_t, bias_grad."""
    rules.grouped_rows()
    rules.dtype("out_dtype", *FP8)
    rules.finite("amax_epsilon", 0)
    return _quantized_per_group(c)


@fake
def group_quantize_delayed(rules: Rules, c: Any) -> Quantized:
    """x [T, K], scale [E] -> q, scale [E], q_t, bias_grad; amax [E] is raised in place."""
    rules.grouped_rows()
    rules.group_scale("scale", "x", c.offs.size(0))
    rules.amax("x", c.offs.size(0), "offs")
    rules.dtype("out_dtype", *FP8)
    return _quantized_per_group(c)


@fake
def group_quantize_mx(rules: Rules, c: Any) -> tuple[Tensor, ...]:
    """x [T, K] -> q, scale [T, ceil(K/32)], q_t [Tp/B, K, B], scale_t [Tp/B, K, 4], bias_grad."""
    rules.grouped_rows()
    (T, K), E = c.x.shape, c.offs.size(0)
    blocks = padded_rows(T, E) // BLOCK
    return (
        output_if(c.rowwise, c.x, (T, K), E4M3),
        output_if(c.rowwise, c.x, (T, ceil_div(K, MX_BLOCK)), torch.float8_e8m0fnu),
        output_if(c.columnwise, c.x, (blocks, K, BLOCK), E4M3),
        output_if(c.columnwise, c.x, (blocks, K, BLOCK // MX_BLOCK), torch.float8_e8m0fnu),
        output_if(c.bias_grad, c.x, (E, K), torch.float32),
    )


@fake
def group_round_mx(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] -> x_rowwise [T, K], x_columnwise [T, K], bias_grad."""
    rules.grouped_rows()
    (T, K), E = c.x.shape, c.offs.size(0)
    return (
        output_if(c.rowwise, c.x, (T, K), torch.bfloat16),
        output_if(c.columnwise, c.x, (T, K), torch.bfloat16),
        output_if(c.bias_grad, c.x, (E, K), torch.float32),
    )


def _check_swiglu(rules: Rules, c: Any) -> tuple[int, int, int]:
    """gate_up [T, 2 K] with offs [E]; T, K and E."""
    rules.dim("gate_up", 2, *ACTIVATIONS)
    T, columns = c.gate_up.shape
    rules.check(
        columns % 2 == 0, lambda: f"gate_up must have an even number of columns, got {columns}"
    )
    rules.features("K", columns // 2)
    return T, columns // 2, rules.offs("gate_up")


def _check_swiglu_grad(rules: Rules, c: Any) -> tuple[int, int, int]:
    """dh [T, K], gate_up [T, 2 K] and weight [T] with offs [E]; T, K and E."""
    rules.dim("dh", 2)
    rules.dim("gate_up", 2)
    rules.dtype("dh", *ACTIVATIONS)
    rules.dtype("gate_up", c.dh.dtype)
    rules.device("gate_up", "dh")
    T, K = c.dh.shape
    rules.same("T", "dh", T, "gate_up", c.gate_up.size(0))
    rules.features("K", K)
    rules.same("2 * K", "dh", 2 * K, "gate_up", c.gate_up.size(1))
    rules.tensor("weight", 1, torch.float32, "dh")
    rules.same("T", "weight", c.weight.size(0), "dh", T)
    return T, K, rules.offs("dh")


@fake
def swiglu(rules: Rules, c: Any) -> Tensor:
    """gate_up [T, 2 K] -> h [T, K]."""
    T, K, _ = _check_swiglu(rules, c)
    rules.swiglu_form()
    return c.gate_up.new_empty((T, K))


@fake
def swiglu_grad(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dh [T, K], weight [T] -> d_gate_up [T, 2 K], h [T, K], d_weight [T]."""
    T, K, _ = _check_swiglu_grad(rules, c)
    rules.swiglu_form()
    return c.dh.new_empty((T, 2 * K)), c.dh.new_empty((T, K)), c.weight.new_empty((T,))


@fake
def group_quantize_swiglu(rules: Rules, c: Any) -> tuple[Tensor, ...]:
    """gate_up [T, 2 K] -> q, scale, q_t, scale_t of h [T, K], and h."""
    T, K, E = _check_swiglu(rules, c)
    rules.finite("amax_epsilon", 0)
    rules.layouts()
    rules.swiglu_form()
    h = c.gate_up.new_empty((T, K) if c.keep_h else (0,))
    return (*_quantized(c.gate_up, T, K, E, c.rowwise, c.columnwise), h)


@fake
def group_quantize_swiglu_grad(rules: Rules, c: Any) -> tuple[Tensor, ...]:
    """dh [T, K] -> q, scale, q_t, scale_t, bias_grad of d_gate_up; of h; d_weight."""
    T, K, E = _check_swiglu_grad(rules, c)
    rules.finite("amax_epsilon", 0)
    rules.layouts()
    rules.swiglu_form()
    d_gate_up = _quantized(c.dh, T, 2 * K, E, c.rowwise, c.columnwise)
    bias_grad = output_if(c.bias_grad, c.dh, (E, 2 * K), torch.float32)
    _, _, h_t, scale_h_t = _quantized(c.dh, T, K, E, False, c.h_columnwise)
    h = c.dh.new_empty((T, K) if c.keep_h else (0,))
    return (*d_gate_up, bias_grad, h_t, scale_h_t, h, c.weight.new_empty((T,)))


@fake
def group_dequantize(rules: Rules, c: Any) -> Tensor:
    """q [T, K] -> x [T, K]."""
    rules.rowwise("q", "scale")
    rules.offs("q")
    rules.dtype("out_dtype", *ACTIVATIONS)
    return c.q.new_empty(c.q.shape, dtype=c.out_dtype)


@fake
def group_dequantize_t(rules: Rules, c: Any) -> Tensor:
    """q_t [Tp/B, K, B] -> x [T, K]."""
    rules.columnwise("q_t", "scale_t", "K")
    E = rules.offs("q_t")
    rules.not_negative("num_rows")
    blocks = padded_rows(c.num_rows, E) // BLOCK
    rules.same("the number of blocks", "q_t", c.q_t.size(0), "num_rows", blocks)
    rules.dtype("out_dtype", *ACTIVATIONS)
    return c.q_t.new_empty((c.num_rows, c.q_t.size(1)), dtype=c.out_dtype)


@fake
def grouped_bias_grad(rules: Rules, c: Any) -> Tensor:
    """dy [T, N] -> [E, N]."""
    rules.dim("dy", 2, *ACTIVATIONS)
    rules.features("N", c.dy.size(1))
    return c.dy.new_empty((rules.offs("dy"), c.dy.size(1)), dtype=torch.float32)


@fake
def quantize_weight(rules: Rules, c: Any) -> QuantizedWeight:
    """w [E, N, K] -> q, scale, q_t."""
    E, N, K = rules.weight()
    rules.finite("amax_epsilon", 0)
    rules.mxfp4_dim(N, K)
    rules.layouts()
    return _quantized_weight(c.w, E, N, K, block_scales(E, N, K), c.columnwise, c.rowwise)


@fake
def transpose_weight(rules: Rules, c: Any) -> Tensor:
    """q [E, N, K] -> q_t."""
    E, N, K = rules.weight("q", E4M3)
    return c.q.new_empty((E, K, N))


@fake
def quantize_weight_list(rules: Rules, c: Any) -> QuantizedWeight:
    """E times w [N, K] -> q, scale, q_t."""
    E, N, K = rules.weight_list()
    rules.finite("amax_epsilon", 0)
    return _quantized_weight(c.w[0], E, N, K, block_scales(E, N, K), c.columnwise, True)


@fake
def quantize_weight_current(rules: Rules, c: Any) -> QuantizedWeight:
    """w [E, N, K] -> q, scale [E], q_t."""
    E, N, K = rules.weight()
    rules.finite("amax_epsilon", 0)
    return _quantized_weight(c.w, E, N, K, (E,), c.columnwise, True)


@fake
def quantize_weight_delayed(rules: Rules, c: Any) -> QuantizedWeight:
    """w [E, N, K], scale [E] -> q, scale [E], q_t; amax [E] is raised in place."""
    E, N, K = rules.weight()
    rules.group_scale("scale", "w", E, "w")
    rules.amax("w", E, "w")
    return _quantized_weight(c.w, E, N, K, (E,), c.columnwise, True)
