"""What each output of an op must be: bytes of the reference, or numbers within a bound.

T rows, E groups, K in_features, N out_features.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grouped_linear.selftest import reference
from grouped_linear.selftest.operands import Groups
from grouped_linear.selftest.tolerances import (
    ROUNDING,
    bias_grad_tolerance,
    rounded,
    scaled_tolerance,
    tolerance,
)

EVERYTHING = (...,)


@dataclass(frozen=True)
class Output:
    """What an output must be in the part of it that is specified.

    Args:
        expected: the reference, float64 where a bound is given.
        allowed: how far a number may be from it; None: the bytes are those of the reference.
        part: an index of what is specified.
        same_bits: whether a GPU's bytes are the CPU's. Those of the reference are anyway.
    """

    expected: Tensor
    allowed: Tensor | None = None
    part: tuple[Any, ...] = EVERYTHING
    same_bits: bool = False


Outputs = list[Output | None]  # None: not asked for


def with_the_same_bits(output: Output) -> Output:
    """The same, and a GPU's bytes are the CPU's."""
    return replace(output, same_bits=True)


def first(count: int) -> tuple[Any, ...]:
    """The first rows or blocks: the others are unspecified."""
    return (slice(None, count),)


# --- quantization --------------------------------------------------------------------------------


def rowwise(x_TK: Tensor, groups: Groups, scaling: reference.Scaling) -> Outputs:
    """Of q and scale."""
    q, scale = reference.quantize_rowwise(x_TK[: groups.valid], scaling)
    return [
        Output(q, part=first(groups.valid)),
        Output(scale, part=(slice(None), slice(None, groups.valid))),
    ]


def columnwise(
    x_TK: Tensor, groups: Groups, scaling: reference.Scaling, share_scales: bool = False
) -> Outputs:
    """Of q_t and scale_t."""
    q_t, scale_t = reference.quantize_columnwise(x_TK, groups.offs(), scaling, share_scales)
    return [Output(t, part=first(len(q_t))) for t in (q_t, scale_t)]


def per_group(q_TK: Tensor, groups: Groups) -> tuple[Output, Output]:
    """Of q and q_t."""
    q_t = reference.in_column_blocks(q_TK, groups.offs())
    valid = first(groups.valid)
    return Output(q_TK[: groups.valid], part=valid), Output(q_t, part=first(len(q_t)))


def bias_grad(dy_TN: Tensor, groups: Groups) -> Output:
    """The sums of each group's rows."""
    offs = groups.offs()
    return Output(reference.grouped_bias_grad(dy_TN, offs), bias_grad_tolerance(dy_TN, offs))


def transposed(q_ENK: Tensor) -> Tensor:
    """The same bytes as [E, K, N]."""
    return q_ENK.view(torch.uint8).transpose(1, 2).contiguous().view(q_ENK.dtype)


def weight(w_ENK: Tensor, scaling: reference.Scaling) -> Outputs:
    """Of q, scale and q_t under block scaling."""
    return [Output(t) for t in reference.quantize_weight(w_ENK, scaling)]


def current_weight(w_ENK: Tensor) -> Outputs:
    """Of q, scale and q_t with one scale an expert."""
    q, scale = reference.quantize(w_ENK, (1, 2), reference.Scaling(False))
    return [Output(q), Output(scale.flatten()), Output(transposed(q))]


# --- GEMMs ---------------------------------------------------------------------------------------


def gemm(
    a_TK: Tensor,
    b_EKN: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    bias_EN: Tensor | None = None,
    scaled: bool = False,
) -> Output:
    """a @ b + bias of each group. scaled: as FP8 tensor cores add. Rows past the sum are zero."""
    offs = groups.offs()
    expected = reference.grouped_mm(a_TK, b_EKN, offs, bias_EN)
    bias = None if bias_EN is None else bias_EN.abs()
    magnitude = reference.grouped_mm(a_TK.abs(), b_EKN.abs(), offs, bias)
    if scaled:
        return Output(expected, scaled_tolerance(expected, magnitude, dtype))
    return Output(expected, tolerance(expected, magnitude, a_TK.size(1), dtype))


def wgrad(
    dy_TN: Tensor,
    x_TK: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    scaled: bool = False,
    added_to: Tensor | None = None,
) -> Output:
    """dy.T @ x of each group, added to what is there."""
    offs = groups.offs()
    expected = reference.grouped_mm_wgrad(dy_TN, x_TK, offs)
    magnitude = reference.grouped_mm_wgrad(dy_TN.abs(), x_TK.abs(), offs)
    before = torch.zeros_like(expected) if added_to is None else added_to.double()
    expected += before
    if scaled:
        allowed = scaled_tolerance(expected, magnitude, dtype)
    else:
        allowed = tolerance(expected, magnitude, max(groups.m_splits), dtype)
    # what is added to may be larger than the sum, which one more addition rounds
    return Output(expected, allowed + 2.0**-24 * before.abs())


# --- SwiGLU --------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor, groups: Groups, form: dict[str, Any]) -> Output:
    """Of h. Its bits are the same on every device; rows past the sum are zero."""
    dtype, gate_up = gate_up.dtype, gate_up[: groups.valid].double()
    h = reference.swiglu(gate_up, **form)
    gate, up, _, relative, _ = _parts(gate_up, form)
    # beyond 83 sigmoid stays what it is there, 2^-119
    lost = relative * h.abs() + 2.0**-118 * (gate * up).abs()
    return with_the_same_bits(_padded(h, rounded(h, lost, dtype), groups.T))


def swiglu_grad(
    dh_TK: Tensor, gate_up: Tensor, weight_T: Tensor, groups: Groups, form: dict[str, Any]
) -> tuple[Output, Output, Output]:
    """Of d_gate_up, h and d_weight; the bits of the first two are the same on every device."""
    dtype = gate_up.dtype
    dh, gate_up, weight_T = (t[: groups.valid].double() for t in (dh_TK, gate_up, weight_T))
    expected = reference.swiglu_grad(dh, gate_up, weight_T, **form)
    gate, up, s, relative, of_slope = _parts(gate_up, form)
    d = (weight_T[:, None] * dh).abs()
    lost = torch.zeros_like(gate_up)
    of_gate, of_up = reference.gate_and_up(lost, form.get("interleaved", False))
    # 1 + x * (1 - s) is near zero for some gates, and then loses relative to its parts; 1 - s is
    # within 2^-23, and 0 where x without the slope's factor of up to 3 is above 18
    of_gate += 2.0**-23 * d * (up * s).abs() * of_slope.abs().clamp(max=3 * 18)
    of_gate += relative * d * (up * s).abs() * (1 + of_slope.abs() * (1 - s))
    of_up += relative * d * (gate * s).abs()
    # beyond 83 sigmoid stays what it is there, 2^-119
    of_gate += 2.0**-118 * d * up.abs() * (1 + of_slope.abs())
    of_up += 2.0**-118 * d * gate.abs()
    h = reference.swiglu(gate_up, **form)
    of_h = relative * h.abs() + 2.0**-118 * (gate * up).abs()
    of_weighted = weight_T.abs()[:, None] * of_h
    # however a device orders the sum, no product goes through more additions than these
    additions = dh.size(1) // 16 + 24
    of_sum = (dh.abs() * of_h + additions * 2.0**-24 * (dh * h).abs()).sum(1)
    d_gate_up, weighted, d_weight = expected
    return (
        with_the_same_bits(_padded(d_gate_up, rounded(d_gate_up, lost, dtype), groups.T)),
        with_the_same_bits(_padded(weighted, rounded(weighted, of_weighted, dtype), groups.T)),
        _padded(d_weight, of_sum + 2.0**-24 * d_weight.abs(), groups.T),
    )


def _parts(gate_up: Tensor, form: dict[str, Any]) -> tuple[Tensor, ...]:
    """The gate and up that are multiplied, sigmoid(x), its relative error, and x of the slope.

    1 / (1 + exp(-x)) is within 2^-21, x within 2^-24 or, with a cubic term, 5 * 2^-24, and the
    operations after it round by 2^-24 each.
    """
    gate, up = reference.gate_and_up(gate_up, form.get("interleaved", False))
    limit = form.get("limit") or torch.inf
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + form.get("beta", 0.0)
    alpha, cubic = form.get("alpha", 1.0), form.get("cubic", 0.0)
    x, of_slope = (reference.scaled_gate(gate, alpha, n * cubic) for n in (1, 3))
    s = torch.sigmoid(x)
    relative = 2.0**-20 + (3 if cubic else 1) * 2.0**-22 * x.abs() * (1 - s)
    return gate, up, s, relative, of_slope


def _padded(expected: Tensor, allowed: Tensor, T: int) -> Output:
    """Rows past the sum are zero."""
    more = (T - len(expected), *expected.shape[1:])
    zeros = expected.new_zeros(more)
    return Output(torch.cat([expected, zeros]), torch.cat([allowed, zeros]))


# --- Adam ----------------------------------------------------------------------------------------


def adam(arguments: dict[str, Any]) -> Outputs:
    """Of q, scale, q_t, grad, exp_avg, exp_avg_sq and max_exp_avg_sq, as they are written."""
    q, scale, dtype = arguments["q"], arguments["scale"], arguments["grad"].dtype
    names = ("lr", "beta1", "beta2", "weight_decay", "eps")
    options = {name: arguments[name] for name in names}
    options |= {"decoupled_weight_decay": True, "maximize": False, "grad_scale": 1.0}
    moments = [arguments[name] for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    w, *after = reference.adam(
        reference.dequantize_weight(q, scale),
        arguments["grad"],
        moments[0],
        moments[1],
        moments[2],
        int(arguments["step"]),
        **options,
    )
    _, new_scale, _ = reference.quantize_weight(w.float(), reference.Scaling())
    blocks = new_scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    blocks = blocks[:, : w.size(1), : w.size(2)]
    exact = w / blocks
    # one of the two e4m3 numbers beside it: 3 bits of mantissa; float32 rounds w by some 2^-24
    step = 2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    beside = step + 2.0**-18 * exact.abs() + 1e-6 / blocks
    outputs: Outputs = [
        Output(exact, beside, same_bits=True),
        Output(new_scale.double(), 2.0**-18 * new_scale.double(), same_bits=True),
    ]
    if arguments["q_t"] is not None:
        turned = Output(exact.transpose(1, 2), beside.transpose(1, 2), same_bits=True)
        outputs.append(turned)
    outputs.append(Output(arguments["grad"]))
    for before, expected in zip(moments, after, strict=True):
        if expected is not None:
            lost = (ROUNDING[dtype] + 2.0**-20) * expected.abs()
            lost += 2.0**-20 * (before.double().abs() + arguments["grad"].double().abs())
            lost += 2.0**-25 * (dtype == torch.float16)
            outputs.append(Output(expected, lost, same_bits=True))
    return outputs
