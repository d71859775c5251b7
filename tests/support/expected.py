# SPDX-License-Identifier: Apache-2.0
"""What results must be: bytes of the reference, or numbers within a bound.

T rows, E groups, K in_features, N out_features, B = 128.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from support import reference
from support.op_info import Output, Outputs, Sample
from support.reference import Scaling
from support.tensors import FP32
from support.tolerances import ROUNDING, bias_grad_tolerance, rounded, scaled_tolerance, tolerance

FORM = ("alpha", "beta", "limit", "interleaved", "cubic")


def scaling_of(sample: Sample) -> Scaling:
    return Scaling(sample.get("power_of_two_scales"), sample.get("amax_epsilon"))


def form_of(sample: Sample) -> dict[str, Any]:
    """The form of SwiGLU, as kernels read it: alpha is a float32."""
    form = {name: sample.arguments[name] for name in FORM if name in sample.arguments}
    if "alpha" in form:
        form["alpha"] = torch.tensor(form["alpha"]).item()
    return form


def valid_rows(offs_E: Tensor, T: int) -> int:
    return reference.groups(offs_E, T)[-1].stop


def blocks_of(offs_E: Tensor, T: int) -> int:
    """What columnwise data is allocated for: Tp / B."""
    return (T + 127 * min(len(offs_E), T)) // 128


def if_asked(asked: bool, outputs: Outputs) -> Outputs:
    return outputs if asked else [None] * len(outputs)


# --- quantization --------------------------------------------------------------------------------


def rowwise(x_TK: Tensor, offs_E: Tensor, scaling: Scaling) -> Outputs:
    """Of q and scale."""
    T, K = x_TK.shape
    q, scale = reference.quantize_rowwise(x_TK[: valid_rows(offs_E, T)], scaling)
    return [Output(q, shape=(T, K)), Output(scale, shape=(-(-K // 128), -(-T // 4) * 4))]


def columnwise(x_TK: Tensor, offs_E: Tensor, scaling: Scaling, share: bool = False) -> Outputs:
    """Of q_t and scale_t."""
    T, K = x_TK.shape
    blocks = blocks_of(offs_E, T)
    q_t, scale_t = reference.quantize_columnwise(x_TK, offs_E, scaling, share)
    return [Output(q_t, shape=(blocks, K, 128)), Output(scale_t, shape=(blocks, K))]


def per_group(q_TK: Tensor, sample: Sample) -> Outputs:
    """Of q and q_t."""
    (T, K), offs_E = q_TK.shape, sample["offs"]
    q_t = reference.in_column_blocks(q_TK, offs_E)
    of_rows = Output(q_TK[: valid_rows(offs_E, T)], shape=(T, K))
    of_columns = Output(q_t, shape=(blocks_of(offs_E, T), K, 128))
    return [
        *if_asked(sample.get("rowwise"), [of_rows]),
        *if_asked(sample.get("columnwise"), [of_columns]),
    ]


def bias_grad(dy_TN: Tensor, offs_E: Tensor) -> Output:
    """The sums of each group's rows."""
    expected = reference.grouped_bias_grad(dy_TN, offs_E)
    return Output(expected, bias_grad_tolerance(dy_TN, offs_E), FP32)


def transposed(q_ENK: Tensor) -> Tensor:
    """The same bytes as [E, K, N]."""
    return q_ENK.view(torch.uint8).transpose(1, 2).contiguous().view(q_ENK.dtype)


def weight(w_ENK: Tensor, scaling: Scaling, mxfp4_dim: int | None = None) -> list[Tensor]:
    """q, scale and q_t under block scaling."""
    if mxfp4_dim is not None:
        return list(reference.quantize_weight_in_mxfp4(w_ENK, mxfp4_dim))
    return list(reference.quantize_weight(w_ENK, scaling))


def weight_current(w_ENK: Tensor, scaling: Scaling) -> list[Tensor]:
    """q, scale and q_t with one scale an expert."""
    q, scale = reference.quantize(w_ENK, (1, 2), scaling)
    return [q, scale.flatten(), transposed(q)]


def weight_delayed(w_ENK: Tensor, scale_E: Tensor) -> list[Tensor]:
    """q, scale and q_t with a given scale an expert, or its own where that is 0."""
    (E, N, K) = w_ENK.shape
    rows, ends = w_ENK.reshape(E * N, K), torch.arange(1, E + 1) * N
    q, used = reference.quantize_groups_with(rows, ends, scale_E, reference.E4M3)
    q = q.view(E, N, K)
    return [q, used, transposed(q)]


def weight_amax(amax_E: Tensor | None, w_ENK: Tensor) -> Outputs:
    """Of what delayed scaling records; nothing where nothing is recorded."""
    if amax_E is None:
        return []
    (E, N, K) = w_ENK.shape
    rows, ends = w_ENK.reshape(E * N, K), torch.arange(1, E + 1) * N
    return [Output(torch.maximum(amax_E, reference.amax_of_groups(rows, ends)))]


def refreshed(sample: Sample, anew: list[Tensor]) -> Outputs:
    """Of what a refresh writes: new, or as it was where the flag says so. Not amax."""
    kept = [sample[name] for name in sample.written if name != "amax"]
    if sample["refresh"] is None or sample["refresh"].item():
        kept = anew[: len(kept)]
    return [Output(t) for t in kept]


def one_weight(w: list[Tensor]) -> Tensor:
    """[E, N, K] of one tensor, or of one an expert."""
    return w[0] if w[0].dim() == 3 else torch.stack(w)


# --- GEMMs ---------------------------------------------------------------------------------------


def gemm(
    a_TK: Tensor,
    b_EKN: Tensor,
    offs_E: Tensor,
    dtype: torch.dtype,
    bias_EN: Tensor | None = None,
    scaled: bool = False,
    low: tuple[Tensor, Tensor] | None = None,
) -> Output:
    """a @ b + bias of each group. scaled: as FP8 tensor cores add. Rows past the sum are zero.

    low: the operands of a second product, which joins the sum in float32 and never as FP8.
    """
    expected = reference.grouped_mm(a_TK, b_EKN, offs_E, bias_EN)
    bias = None if bias_EN is None else bias_EN.abs()
    magnitude = reference.grouped_mm(a_TK.abs(), b_EKN.abs(), offs_E, bias)
    error = torch.zeros_like(expected)
    if low is not None:
        a_low, b_low = low
        # It is added to the first product's accumulators, or that product's sum is added to it.
        of_low = reference.grouped_mm(a_low.abs(), b_low.abs(), offs_E)
        expected = expected + reference.grouped_mm(a_low, b_low, offs_E)
        depth = a_TK.size(1) + a_low.size(1)
        error = tolerance(torch.zeros_like(expected), magnitude + of_low, depth, FP32)
    if scaled:
        allowed = scaled_tolerance(expected, magnitude, dtype)
    else:
        allowed = tolerance(expected, magnitude, a_TK.size(1), dtype)
    allowed = allowed + (1 + ROUNDING[dtype]) * error
    allowed[valid_rows(offs_E, len(a_TK)) :] = 0
    return Output(expected, allowed, dtype)


def low_rank(sample: Sample) -> tuple[Tensor, Tensor] | None:
    """a_low and b_low, where they are given."""
    if sample.get("a_low") is None:
        return None
    return sample["a_low"].detach(), sample["b_low"].detach()


def wgrad(
    dy_TN: Tensor,
    x_TK: Tensor,
    offs_E: Tensor,
    dtype: torch.dtype,
    scaled: bool = False,
    added_to: Tensor | None = None,
) -> Output:
    """dy.T @ x of each group, added to what is there. Exact where a group is empty."""
    expected = reference.grouped_mm_wgrad(dy_TN, x_TK, offs_E)
    magnitude = reference.grouped_mm_wgrad(dy_TN.abs(), x_TK.abs(), offs_E)
    before = torch.zeros_like(expected) if added_to is None else added_to.double()
    expected += before
    sizes = torch.tensor([g.stop - g.start for g in reference.groups(offs_E, len(x_TK))])
    if scaled:
        allowed = scaled_tolerance(expected, magnitude, dtype)
    else:
        allowed = tolerance(expected, magnitude, int(sizes.max()), dtype)
    # what is added to may be larger than the sum, which one more addition rounds
    allowed += 2.0**-24 * before.abs()
    expected[sizes == 0], allowed[sizes == 0] = before[sizes == 0], 0.0
    return Output(expected, allowed, dtype)


def of_each(one: Output | None) -> Outputs:
    """The same of a tensor an expert."""
    assert one is not None
    assert one.allowed is not None
    parts = zip(one.expected, one.allowed, strict=True)
    return [Output(expected, allowed, one.dtype) for expected, allowed in parts]


# --- SwiGLU --------------------------------------------------------------------------------------


def swiglu(
    gate_up: Tensor, offs_E: Tensor, form: dict[str, Any], *, approximate: bool = False
) -> Output:
    """Of h. Its bits are the same on every device; rows past the sum are zero.

    approximate: the sigmoid may be within 2^-17 instead, as in epilogues on Hopper.
    """
    T, dtype = len(gate_up), gate_up.dtype
    gate_up = gate_up[: valid_rows(offs_E, T)].double()
    h = reference.swiglu(gate_up, **form)
    gate, up, _, relative, _ = _parts(gate_up, form, approximate)
    # beyond 83 sigmoid stays what it is there, 2^-119
    lost = relative * h.abs() + 2.0**-118 * (gate * up).abs()
    return replace(_padded(h, rounded(h, lost, dtype), T, dtype), same_bits=not approximate)


def swiglu_grad(
    dh_TK: Tensor,
    gate_up: Tensor,
    weight_T: Tensor,
    offs_E: Tensor,
    form: dict[str, Any],
    *,
    approximate: bool = False,
) -> list[Output]:
    """Of d_gate_up, h and d_weight; the bits of the first two are the same on every device.

    approximate: as that of swiglu.
    """
    T, dtype = gate_up.size(0), gate_up.dtype
    valid = valid_rows(offs_E, T)
    dh, gate_up, weight_T = (t[:valid].double() for t in (dh_TK, gate_up, weight_T))
    expected = reference.swiglu_grad(dh, gate_up, weight_T, **form)
    gate, up, s, relative, of_slope = _parts(gate_up, form, approximate)
    d = (weight_T[:, None] * dh).abs()
    lost = torch.zeros_like(gate_up)
    of_gate, of_up = reference.gate_and_up(lost, form.get("interleaved", False))
    # 1 + x * (1 - s) is near zero for some gates, and then loses relative to its parts; 1 - s is
    # within 2^-23, and 0 where x without the slope's factor of up to 3 is above 18. A slope with a
    # cubic term stays what it is where that term is 83.
    if form.get("cubic"):
        of_slope = of_slope.abs().clamp(max=83 * 3 + (form.get("alpha", 1.0) * gate).abs())
    of_one_less = 2.0**-17 if approximate else 2.0**-23
    of_gate += of_one_less * d * (up * s).abs() * of_slope.abs().clamp(max=3 * 18)
    of_gate += relative * d * (up * s).abs() * (1 + of_slope.abs() * (1 - s))
    of_up += relative * d * (gate * s).abs()
    # beyond 83 sigmoid stays what it is there, 2^-119
    of_gate += 2.0**-118 * d * up.abs() * (1 + of_slope.abs())
    of_up += 2.0**-118 * d * gate.abs()
    h = reference.swiglu(gate_up, **form)
    of_h = relative * h.abs() + 2.0**-118 * (gate * up).abs()
    of_h = of_h.masked_fill(h.abs() > torch.finfo(FP32).max * (1 - 2.0**-20), torch.inf)
    of_weighted = weight_T.abs()[:, None] * of_h
    # however a device orders the sum, no product goes through more additions than these
    additions = dh.size(1) // 16 + 24
    of_sum = (dh.abs() * of_h + additions * 2.0**-24 * (dh * h).abs()).sum(1)
    d_gate_up, weighted, d_weight = expected
    of_both = (
        _padded(t, rounded(t, error, dtype), T, dtype)
        for t, error in ((d_gate_up, lost), (weighted, of_weighted))
    )
    of_weight = _padded(d_weight, rounded(d_weight, of_sum, FP32), T, FP32)
    return [*(replace(output, same_bits=not approximate) for output in of_both), of_weight]


def _parts(gate_up: Tensor, form: dict[str, Any], approximate: bool) -> tuple[Tensor, ...]:
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
    relative = 2.0**-17 if approximate else 2.0**-20
    relative = relative + (3 if cubic else 1) * 2.0**-22 * x.abs() * (1 - s)
    return gate, up, s, relative, of_slope


def _padded(expected: Tensor, allowed: Tensor, T: int, dtype: torch.dtype) -> Output:
    """Rows past the sum are zero."""
    zeros = expected.new_zeros(T - len(expected), *expected.shape[1:])
    return Output(torch.cat([expected, zeros]), torch.cat([allowed, zeros]), dtype)
