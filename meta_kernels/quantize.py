"""Fake kernels of the ops that quantize, dequantize and reduce.

T rows, E groups, K features of x, N features of dy, B = 128, Tp = padded_rows(T, E).
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    E4M3,
    FLOAT32_MAX,
    SCALE_ROW_MULTIPLE,
    Rules,
    ceil_div,
    output_if,
    padded_rows,
)

Quantized = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _quantized(
    x: Tensor, T: int, K: int, E: int, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, scale, q_t and scale_t of x [T, K]; outputs that are not requested are empty."""
    scale_rows = SCALE_ROW_MULTIPLE * ceil_div(T, SCALE_ROW_MULTIPLE)
    blocks = padded_rows(T, E) // BLOCK

    return (
        output_if(rowwise, x, (T, K), E4M3),
        output_if(rowwise, x, (ceil_div(K, BLOCK), scale_rows), torch.float32),
        output_if(columnwise, x, (blocks, K, BLOCK), E4M3),
        output_if(columnwise, x, (blocks, K), torch.float32),
    )


@torch.library.register_fake("grouped_linear::group_quantize")
def group_quantize(
    x: Tensor,
    offs: Tensor,
    rows: Tensor | None = None,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
    share_scales: bool = False,
) -> Quantized:
    """x [T, K], or [S, K] with rows [T] -> q, scale, q_t, scale_t, bias_grad."""
    rules = Rules("group_quantize")
    rules.dim("x", x, 2)
    rules.dtype("x", x.dtype, ACTIVATIONS)
    T, K = x.shape
    rules.features("K", K)
    rules.offs(offs, "x", x)
    if rows is not None:
        rules.rows(rows, 1, "x", x)
        T = rows.size(0)
    rules.epsilon(amax_epsilon)
    rules.layouts(rowwise, columnwise)
    E = offs.size(0)
    grad = output_if(bias_grad, x, (E, K), torch.float32)
    return (*_quantized(x, T, K, E, rowwise, columnwise), grad)


def _check_swiglu(rules: Rules, gate_up: Tensor, offs: Tensor) -> tuple[int, int]:
    rules.dim("gate_up", gate_up, 2)
    rules.dtype("gate_up", gate_up.dtype, ACTIVATIONS)
    T, columns = gate_up.shape
    rules.check(
        columns % 2 == 0, lambda: f"gate_up must have an even number of columns, got {columns}"
    )
    rules.features("K", columns // 2)
    rules.offs(offs, "gate_up", gate_up)
    return T, columns // 2


def _check_swiglu_grad(
    rules: Rules, dh: Tensor, gate_up: Tensor, weight: Tensor, offs: Tensor
) -> tuple[int, int]:
    rules.dim("dh", dh, 2)
    rules.dim("gate_up", gate_up, 2)
    rules.dtype("dh", dh.dtype, ACTIVATIONS)
    rules.dtype("gate_up", gate_up.dtype, (dh.dtype,))
    rules.device("gate_up", gate_up, "dh", dh)
    T, K = dh.shape
    rules.same("T", "dh", T, "gate_up", gate_up.size(0))
    rules.features("K", K)
    rules.same("2 * K", "dh", 2 * K, "gate_up", gate_up.size(1))
    rules.dim("weight", weight, 1)
    rules.dtype("weight", weight.dtype, (torch.float32,))
    rules.device("weight", weight, "dh", dh)
    rules.same("T", "weight", weight.size(0), "dh", T)
    rules.offs(offs, "dh", dh)
    return T, K


def check_form(rules: Rules, alpha: float, beta: float, limit: float | None, cubic: float) -> None:
    """The rules of a form of SwiGLU."""
    rules.finite("alpha", alpha)
    rules.finite("beta", beta)
    rules.check(limit is None or limit > 0, lambda: f"limit must be positive, got {limit:g}")
    rules.check(
        0 <= cubic <= FLOAT32_MAX,
        lambda: f"cubic must be finite and not negative, got {cubic:g}",
    )


@torch.library.register_fake("grouped_linear::swiglu")
def swiglu(
    gate_up: Tensor,
    offs: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> Tensor:
    """gate_up [T, 2 K] -> h [T, K]."""
    rules = Rules("swiglu")
    T, K = _check_swiglu(rules, gate_up, offs)
    check_form(rules, alpha, beta, limit, cubic)
    return gate_up.new_empty((T, K))


@torch.library.register_fake("grouped_linear::swiglu_grad")
def swiglu_grad(
    dh: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    offs: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh [T, K], weight [T] -> d_gate_up [T, 2 K], h [T, K], d_weight [T]."""
    rules = Rules("swiglu_grad")
    T, K = _check_swiglu_grad(rules, dh, gate_up, weight, offs)
    check_form(rules, alpha, beta, limit, cubic)
    return dh.new_empty((T, 2 * K)), dh.new_empty((T, K)), weight.new_empty((T,))


@torch.library.register_fake("grouped_linear::group_quantize_swiglu")
def group_quantize_swiglu(
    gate_up: Tensor,
    offs: Tensor,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    keep_h: bool = False,
    share_scales: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> Quantized:
    """gate_up [T, 2 K] -> q, scale, q_t, scale_t of h [T, K], and h."""
    rules = Rules("group_quantize_swiglu")
    T, K = _check_swiglu(rules, gate_up, offs)
    rules.epsilon(amax_epsilon)
    rules.layouts(rowwise, columnwise)
    check_form(rules, alpha, beta, limit, cubic)
    h = gate_up.new_empty((T, K) if keep_h else (0,))
    return (*_quantized(gate_up, T, K, offs.size(0), rowwise, columnwise), h)


@torch.library.register_fake("grouped_linear::group_quantize_swiglu_grad")
def group_quantize_swiglu_grad(
    dh: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    offs: Tensor,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
    h_columnwise: bool = False,
    share_h_scales: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> tuple[Tensor, ...]:
    """dh [T, K] -> q, scale, q_t, scale_t, bias_grad of d_gate_up; h_t, scale_h_t; d_weight."""
    rules = Rules("group_quantize_swiglu_grad")
    T, K = _check_swiglu_grad(rules, dh, gate_up, weight, offs)
    rules.epsilon(amax_epsilon)
    rules.layouts(rowwise, columnwise)
    check_form(rules, alpha, beta, limit, cubic)
    E = offs.size(0)
    grad = output_if(bias_grad, dh, (E, 2 * K), torch.float32)
    _, _, h_t, scale_h_t = _quantized(dh, T, K, E, False, h_columnwise)
    of_d = _quantized(dh, T, 2 * K, E, rowwise, columnwise)
    return (*of_d, grad, h_t, scale_h_t, weight.new_empty((T,)))


@torch.library.register_fake("grouped_linear::group_dequantize")
def group_dequantize(q: Tensor, scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """q [T, K] -> x [T, K]."""
    rules = Rules("group_dequantize")
    rules.rowwise("q", q, "scale", scale)
    rules.offs(offs, "q", q)
    rules.dtype("out_dtype", out_dtype, ACTIVATIONS)
    return q.new_empty(q.shape, dtype=out_dtype)


@torch.library.register_fake("grouped_linear::group_dequantize_t")
def group_dequantize_t(
    q_t: Tensor, scale_t: Tensor, offs: Tensor, num_rows: int, out_dtype: torch.dtype
) -> Tensor:
    """q_t [Tp/B, K, B] -> x [T, K]."""
    rules = Rules("group_dequantize_t")
    rules.columnwise("q_t", q_t, "scale_t", scale_t, "K")
    rules.offs(offs, "q_t", q_t)
    rules.not_negative("num_rows", num_rows)
    blocks = padded_rows(num_rows, offs.size(0)) // BLOCK
    rules.same("the number of blocks", "q_t", q_t.size(0), "num_rows", blocks)
    rules.dtype("out_dtype", out_dtype, ACTIVATIONS)
    return q_t.new_empty((num_rows, q_t.size(1)), dtype=out_dtype)


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
    rowwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q, scale, q_t."""
    rules = Rules("quantize_weight")
    rules.weight(w)
    rules.epsilon(amax_epsilon)
    rules.layouts(rowwise, columnwise)
    E, N, K = w.shape
    return (
        output_if(rowwise, w, (E, N, K), E4M3),
        w.new_empty((E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), dtype=torch.float32),
        output_if(columnwise, w, (E, K, N), E4M3),
    )


@torch.library.register_fake("grouped_linear::transpose_weight")
def transpose_weight(q: Tensor) -> Tensor:
    """q [E, N, K] -> q_t."""
    rules = Rules("transpose_weight")
    rules.dim("q", q, 3)
    rules.dtype("q", q.dtype, (E4M3,))
    E, N, K = q.shape
    rules.groups(E)
    rules.features("N", N)
    rules.features("K", K)
    rules.count("q", "rows in all", E * N)
    return q.new_empty((E, K, N))


@torch.library.register_fake("grouped_linear::quantize_weight_list")
def quantize_weight_list(
    w: list[Tensor],
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """E times w [N, K] -> q, scale, q_t."""
    rules = Rules("quantize_weight_list")
    rules.weight_list(w)
    rules.epsilon(amax_epsilon)
    first = w[0]
    E, (N, K) = len(w), first.shape
    return (
        first.new_empty((E, N, K), dtype=E4M3),
        first.new_empty((E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)), dtype=torch.float32),
        output_if(columnwise, first, (E, K, N), E4M3),
    )
