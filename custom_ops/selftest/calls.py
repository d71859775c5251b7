# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels that layers run, small and uneven, and the same in plain torch.

Ops that differ in where they read or write a weight share a kernel, and this file calls one of
them; the tests call all. Blocks in FP8 are dequantized, so that no unspecified byte is compared.

T rows, E groups, K in_features, N out_features. Groups are unaligned and empty, and rows past the
last group hold NaN.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from grouped_linear import ops
from grouped_linear.contrib.fake_quantize import times_scales

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
T, K, N, TOKENS = 500, 144, 288, 700
SIZES = (0, 130, 3, 0, 257, 64)
E, VALID = len(SIZES), sum(SIZES)
TAIL = 0, 0, 0, T - VALID
ENDS = torch.tensor(SIZES).cumsum(0).tolist()
GROUPS = [slice(end - size, end) for end, size in zip(ENDS, SIZES, strict=True)]
_ops = torch.ops.grouped_linear


#: The tensors that calls take, on one device.
Inputs = SimpleNamespace


def inputs() -> Inputs:
    """Random numbers on the CPU."""

    def rows(features: int) -> Tensor:
        x = torch.randn(T, features).to(BF16)
        x[VALID:] = torch.nan
        return x

    return Inputs(
        m_splits=torch.tensor(SIZES),
        offs=torch.tensor(ENDS).int(),
        x=rows(K),
        dy=rows(N),  # also the input of SwiGLU
        w=torch.randn(E, N, K).to(BF16),
        bias=torch.randn(E, N).to(BF16),
        main_grad=torch.randn(E, N, K),
        low=rows(16),  # times up: an adapter
        up=torch.randn(E, 16, N).to(BF16),
        row_weight=rows(1)[:, 0].float(),
        scores=torch.randn(T, 64).to(BF16),
        chosen=torch.randint(-1, E + 1, (T, 3)),  # of E experts, and of others
        tokens=torch.randn(TOKENS, K).to(BF16),
        routed=torch.randint(TOKENS, (T, 3)),  # of tokens
        places=torch.randperm(3 * T).view(T, 3),  # each once
    )


#: The largest difference from plain torch: a share of the number, and a number.
Tolerance = tuple[float, float]
EXACT = 0.0, 0.0
#: The rounding of a result to 16 bits, and sums of a few products in float32.
ROUNDED = 2.0**-8, 2.0**-13
#: e4m3 has 3 bits of mantissa; scales are at most 2 / 448 of the largest magnitude, some 32 here.
QUANTIZED = 2.0**-4 + 2.0**-7, 2.0**-12
#: FP8 tensor cores lose up to 8 * 2^-13 of what they add: 288 products of magnitude 0.64.
SUM = 2.0**-7, 0.2

#: Of the inputs: a tensor, or several.
Results = Callable[[Inputs], Any]


class Call(NamedTuple):
    """Results of an op, and the same in plain torch."""

    op: str
    ours: Results  # on any device
    torchs: Results | None = None  # on the CPU; None where the tests alone compare
    tolerance: Tolerance = EXACT  # of the CPU's results beside torch's
    same_bits: bool = True  # whether a GPU's are the CPU's, and not within the tolerance of them


# --- in plain torch ------------------------------------------------------------------------------


def valid(t: Tensor) -> Tensor:
    """Float32, and zero past the last group."""
    return pad(t[:VALID].float(), TAIL)


def mm(a_TK: Tensor, b_EKN: Tensor) -> Tensor:
    """a[t] @ b[e] in float32."""
    parts = [a_TK[g].float() @ b.float() for g, b in zip(GROUPS, b_EKN, strict=True)]
    return pad(torch.cat(parts), TAIL)


def wgrad(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """dy.T @ x of each group in float32."""
    return torch.stack([dy_TN[g].float().t() @ x_TK[g].float() for g in GROUPS])


def of_each_row(t_E: Tensor) -> Tensor:
    """The number, or the row, of a row's group."""
    return pad(t_E.repeat_interleave(torch.tensor(SIZES, device=t_E.device), dim=0), TAIL)


def best(i: Inputs) -> Tensor:
    """The experts of the eight largest scores."""
    return i.scores.float().argsort(dim=1, descending=True, stable=True)[:, :8]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32."""
    gate, up = valid(gate_up).chunk(2, 1)
    return silu(gate) * up


# --- in FP8 --------------------------------------------------------------------------------------


def blocks(t: Tensor, i: Inputs) -> Any:
    """q, scale, q_t, scale_t of rows."""
    return _ops.group_quantize(t, i.offs, columnwise=True)[:4]


def dequantized(i: Inputs, q: Tensor, scale: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """Float32 rows of their blocks, or of a scale a group; then of pairs of columns and scales."""
    if scale.dim() == 1:
        return (valid(q) * of_each_row(scale[:, None]),)
    pairs = zip(columns[::2], columns[1::2], strict=True)
    of_columns = (ops.group_dequantize_t(*pair, i.offs, T, torch.float32) for pair in pairs)
    return ops.group_dequantize(q, scale, i.offs, torch.float32), *of_columns


def of_weight(q: Tensor, scale: Tensor, q_t: Tensor) -> tuple[Tensor, Tensor]:
    """A dequantized weight of blocks of 128 x 128, or of a scale an expert, by either layout."""
    return times_scales(q, scale), times_scales(q_t.mT, scale)


def quantized_gradients(i: Inputs) -> tuple[Tensor, ...]:
    """d_gate_up by rows and by columns, and h by columns."""
    given = i.x, i.dy, i.row_weight, i.offs
    made = _ops.group_quantize_swiglu_grad(*given, columnwise=True, h_columnwise=True)
    return dequantized(i, *made[:4], *made[5:7])


def scaled_mm(i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """fprop with bias and adapter, and dgrad, of blocks; fprop of a scale a group."""
    (x, scale_x, *_), (dy, scale_dy, *_) = blocks(i.x, i), blocks(i.dy, i)
    w, scale_w, w_t = _ops.quantize_weight(i.w)
    more = {"bias": i.bias, "a_low": i.low, "b_low": i.up}
    y = _ops.grouped_scaled_mm(x, w.mT, scale_x, scale_w.mT, i.offs, **more)
    dx = _ops.grouped_scaled_mm(dy, w_t.mT, scale_dy, scale_w, i.offs)
    x, scale_x, *_ = _ops.group_quantize_current(i.x, i.offs, E4M3)
    w, scale_w, _ = _ops.quantize_weight_current(i.w)
    return y, dx, _ops.grouped_scaled_mm(x, w.mT, scale_x, scale_w, i.offs)


def scaled_mm_in_torch(i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The same of dequantized numbers."""
    x, dy = (dequantized(i, *blocks(t, i))[0] for t in (i.x, i.dy))
    w, _ = of_weight(*_ops.quantize_weight(i.w))
    [x_of_group] = dequantized(i, *_ops.group_quantize_current(i.x, i.offs, E4M3)[:2])
    w_of_group, _ = of_weight(*_ops.quantize_weight_current(i.w))
    return with_bias(i, low_rank(i, x, w)), mm(dy, w), mm(x_of_group, w_of_group.mT)


def scaled_columns(i: Inputs) -> tuple[Tensor, ...]:
    """The operands of wgrad: dy_t, x_t, their scales, offs."""
    (*_, dy_t, scale_dy), (*_, x_t, scale_x) = blocks(i.dy, i), blocks(i.x, i)
    return dy_t, x_t, scale_dy, scale_x, i.offs


def wgrad_of_blocks(i: Inputs) -> Tensor:
    """wgrad of dequantized columns."""
    return wgrad(*(dequantized(i, *blocks(t, i))[1] for t in (i.dy, i.x)))


def accumulated(i: Inputs, op: Callable[..., object], *operands: Tensor) -> Tensor:
    """The sum of main_grad and what an op adds to it."""
    op(main_grad := i.main_grad.clone(), *operands)
    return main_grad


def low_rank(i: Inputs, x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T + low @ up."""
    return mm(torch.cat([x, i.low], 1), torch.cat([w.mT, i.up], 1))


def with_bias(i: Inputs, y: Tensor) -> Tensor:
    """y + bias of each group."""
    return y + of_each_row(i.bias)


def mm_16_bits(i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """fprop with bias and adapter, fprop of gathered rows, dgrad."""
    more = {"bias": i.bias, "a_low": i.low, "b_low": i.up}
    gathered = _ops.grouped_mm(i.tokens, i.w.mT, i.offs, rows=i.routed[:, 0])
    y = _ops.grouped_mm(i.x, i.w.mT, i.offs, **more)
    return y, gathered, ops.grouped_mm(i.dy, i.w, i.offs)


def mm_16_bits_in_torch(i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The same."""
    gathered = mm(i.tokens[i.routed[:, 0]], i.w.mT)
    return with_bias(i, low_rank(i, i.x, i.w)), gathered, mm(i.dy, i.w)


def summed(op: str, ours: Results, torchs: Results | None = None) -> Call:
    """Of sums, which a GPU adds up in another order."""
    return Call(op, ours, torchs, SUM, same_bits=False)


def quantized(op: str, ours: Results, torchs: Results) -> Call:
    """Of numbers in FP8, beside those before."""
    return Call(op, ours, torchs, QUANTIZED)


CALLS = (
    Call(
        "splits_to_offsets",
        lambda i: ops.splits_to_offsets(i.m_splits, T),
        lambda i: i.m_splits.cumsum(0),
    ),
    Call(
        "topk_experts",
        lambda i: ops.topk_experts(i.scores, 8, score_function="softmax", normalize=True),
        lambda i: (i.scores.float().gather(1, best(i)).softmax(1), best(i)),
        ROUNDED,
    ),
    Call(
        "topk_experts_grad",
        lambda i: ops.topk_experts_grad(i.tokens[:T, :8].float(), i.scores, best(i)),
        lambda i: torch.zeros_like(i.scores).scatter(1, best(i), i.tokens[:T, :8]),
    ),
    summed(
        "addmm",
        lambda i: ops.addmm(i.tokens[:T], i.scores, i.tokens[-64:]),
        lambda i: i.tokens[:T].float() + i.scores.float() @ i.tokens[-64:].float(),
    ),
    Call("sort_by_expert", lambda i: ops.sort_by_expert(i.chosen, E)),
    Call(
        "gather_sum",
        lambda i: ops.gather_sum(i.tokens, i.routed),
        lambda i: i.tokens.float()[i.routed].sum(1),
        ROUNDED,
    ),
    summed(
        "gather_dot",
        lambda i: ops.gather_dot(i.tokens[:T], i.tokens, i.routed),
        lambda i: (i.tokens[:T, None].float() * i.tokens.float()[i.routed]).sum(2),
    ),
    Call(
        "scatter_rows",
        lambda i: ops.scatter_rows(i.tokens[:T], i.places, 3 * T),
        lambda i: i.tokens[i.places.flatten().argsort() // 3],
    ),
    quantized(
        "group_quantize", lambda i: dequantized(i, *blocks(i.x, i)), lambda i: [valid(i.x)] * 2
    ),
    summed(
        "group_quantize",
        lambda i: _ops.group_quantize(i.x, i.offs, bias_grad=True)[4],
        lambda i: torch.stack([i.x[g].float().sum(0) for g in GROUPS]),
    ),
    quantized(
        "group_quantize_current",
        lambda i: dequantized(i, *_ops.group_quantize_current(i.x, i.offs, E4M3)[:2]),
        lambda i: valid(i.x),
    ),
    quantized(
        "group_round_mx",
        lambda i: [valid(t) for t in _ops.group_round_mx(i.x, i.offs, columnwise=True)[:2]],
        lambda i: [valid(i.x)] * 2,
    ),
    quantized(
        "quantize_weight", lambda i: of_weight(*_ops.quantize_weight(i.w)), lambda i: [i.w] * 2
    ),
    quantized(
        "quantize_weight_current",
        lambda i: of_weight(*_ops.quantize_weight_current(i.w)),
        lambda i: [i.w] * 2,
    ),
    Call("swiglu", lambda i: ops.swiglu(i.dy, i.offs), lambda i: swiglu(i.dy), ROUNDED),
    Call("swiglu_grad", lambda i: ops.swiglu_grad(i.x, i.dy, i.row_weight, i.offs)[:2]),
    summed("swiglu_grad", lambda i: ops.swiglu_grad(i.x, i.dy, i.row_weight, i.offs)[2][:VALID]),
    quantized(
        "group_quantize_swiglu",
        lambda i: dequantized(i, *_ops.group_quantize_swiglu(i.dy, i.offs, columnwise=True)[:4]),
        lambda i: [swiglu(i.dy)] * 2,
    ),
    Call("group_quantize_swiglu_grad", quantized_gradients),
    summed("grouped_mm", mm_16_bits, mm_16_bits_in_torch),
    summed(
        "grouped_mm_swiglu",
        lambda i: _ops.grouped_mm_swiglu(i.x, i.w.mT, i.offs),
        lambda i: (mm(i.x, i.w.mT), swiglu(mm(i.x, i.w.mT).to(BF16))),
    ),
    summed(
        "grouped_mm_wgrad",
        lambda i: ops.grouped_mm_wgrad(i.dy, i.x, i.offs),
        lambda i: wgrad(i.dy, i.x),
    ),
    summed(
        "grouped_mm_wgrad_",
        lambda i: accumulated(i, ops.grouped_mm_wgrad_, i.dy, i.x, i.offs),
        lambda i: i.main_grad + wgrad(i.dy, i.x),
    ),
    summed("grouped_scaled_mm", scaled_mm, scaled_mm_in_torch),
    summed(
        "grouped_scaled_mm_wgrad",
        lambda i: _ops.grouped_scaled_mm_wgrad(*scaled_columns(i)),
        wgrad_of_blocks,
    ),
    summed(
        "grouped_scaled_mm_wgrad_",
        lambda i: accumulated(i, ops.grouped_scaled_mm_wgrad_, *scaled_columns(i)),
        lambda i: i.main_grad + wgrad_of_blocks(i),
    ),
)
