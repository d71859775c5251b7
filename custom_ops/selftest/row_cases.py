"""Calls of the ops of rows: routing, quantizers and SwiGLU.

T rows, E groups, K in_features, N out_features. Arguments are on the CPU. Operands hold NaN past
the last group's rows, and row numbers there are none.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from grouped_linear.selftest import expected as must
from grouped_linear.selftest import reference
from grouped_linear.selftest.case import (
    BF16,
    BOTH,
    FP16,
    FP32,
    POWERS,
    Arguments,
    Case,
    numbers,
)
from grouped_linear.selftest.expected import Output, Outputs
from grouped_linear.selftest.operands import (
    Groups,
    per_row,
    quantized_columns,
    quantized_rows,
    rows,
)
from grouped_linear.selftest.reference import E4M3, E5M2, Scaling

PLAIN: Arguments = {}
FORM = {"alpha": 1.702, "beta": 1.0, "limit": 1.5, "interleaved": True}
GELU_TANH = {"alpha": 1.5957691216057308, "cubic": 0.044715}
FORMS = {
    "": PLAIN,
    "with a limit, alpha and beta, interleaved": FORM,
    "GELU's tanh form": GELU_TANH,
}


def routing() -> Iterator[Case]:
    """Offsets, the sort by experts, and sums and products of gathered rows."""
    for sizes in ((0, 130, 3, 0, 257, 64), (500,), (1, 0) * 150):
        for alignment, stride, dtype in ((1, 1, None), (128, 144, torch.int64)):
            ends = reference.splits_to_offsets(sizes, 500, alignment, stride)
            offs = torch.tensor(ends, dtype=dtype or torch.int32)
            arguments: Arguments = {
                "m_splits": torch.tensor(sizes),
                "num_rows": 500,
                "out_dtype": dtype,
            }
            arguments |= {"alignment": alignment, "stride": stride}
            yield Case("splits_to_offsets", arguments, [Output(offs)])
    for T, E, k in ((300, 7, 7), (500, 256, 8), (40, 1000, 3)):
        for dtype in (BF16, FP16, FP32):
            scores = torch.randn(T, E).to(dtype)
            chosen = reference.topk_experts(scores, k)
            yield Case("topk_experts", {"scores": scores, "k": k}, [Output(chosen)], str(dtype))
    for T, C, E in ((500, 3, 7), (3000, 8, 256), (0, 8, 4)):
        experts = torch.randint(-2, E + 2, (T, C))
        outputs: Outputs = [Output(t) for t in reference.sort_by_expert(experts, E)]
        yield Case("sort_by_expert", {"experts": experts, "num_experts": E}, outputs)
        yield Case("sort_by_expert", {"experts": experts.int(), "num_experts": E}, outputs, "int32")
    for dtype in (BF16, FP16, FP32):
        a, y, index = (
            torch.randn(70, 144).to(dtype),
            torch.randn(90, 144).to(dtype),
            torch.randint(90, (70, 3)),
        )
        for factor in (None, torch.randn(70, 3)):
            total = Output(reference.gather_sum(y, index, factor))
            yield Case("gather_sum", {"y": y, "rows": index, "weight": factor}, [total], str(dtype))
        products = a.double()[:, None] * y.double()[index]
        # each of H products and H - 1 sums rounds by at most 2^-24
        allowed = 2 * 144 * 2.0**-24 * products.abs().sum(-1)
        arguments = {"a": a, "y": y, "rows": index.int()}
        yield Case("gather_dot", arguments, [Output(products.sum(-1), allowed)], str(dtype))
        places = torch.randperm(210).view(70, 3)
        arguments = {"x": a, "rows": places, "num_rows": 210}
        there = torch.empty(210, 144, dtype=dtype)
        there[places] = a[:, None].expand(-1, 3, -1)
        yield Case("scatter_rows", arguments, [Output(there)], str(dtype))


def quantizers(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """Rows to FP8 and back, and the gradient of a bias."""
    offs, K = groups.offs(), groups.K
    x = rows(groups, K, dtype)
    given: Arguments = {"x": x, "offs": offs}
    total = must.bias_grad(x, groups)
    yield Case("grouped_bias_grad", {"dy": x, "offs": offs}, [total])
    for scaling in (POWERS, Scaling(False, 0.5)):
        options = {
            "power_of_two_scales": scaling.power_of_two_scales,
            "amax_epsilon": scaling.amax_epsilon,
        }
        outputs = [*must.rowwise(x, groups, scaling), *must.columnwise(x, groups, scaling), total]
        yield Case("group_quantize", {**given, **options, **BOTH}, outputs)
    shared = must.columnwise(x, groups, POWERS, share_scales=True)
    options = {"rowwise": False, "columnwise": True, "share_scales": True}
    yield Case("group_quantize", {**given, **options}, [None, None, *shared, None], "shared scales")

    source, index = torch.randn(groups.valid + 3, K).to(dtype), numbers(groups)
    gathered = reference.gather(source, index, offs)
    outputs = [*must.rowwise(gathered, groups, POWERS), *must.columnwise(gathered, groups, POWERS)]
    arguments: Arguments = {"x": source, "offs": offs, "rows": index, **BOTH}
    yield Case(
        "group_quantize", arguments, [*outputs, must.bias_grad(gathered, groups)], "gathered"
    )

    for fp8 in (E4M3, E5M2):
        q, scale = reference.quantize_groups(x, offs, Scaling(False), fp8)
        of_rows, of_columns = must.per_group(q, groups)
        arguments = {**given, "out_dtype": fp8, **BOTH}
        yield Case("group_quantize_current", arguments, [of_rows, Output(scale), of_columns, total])
        scale, amax = 0.005 + 0.01 * torch.rand(groups.E), torch.rand(groups.E)
        of_rows, of_columns = must.per_group(
            reference.quantize_groups_with(x, offs, scale, fp8), groups
        )
        largest = Output(torch.maximum(amax, reference.amax_of_groups(x, offs)))
        arguments = {"amax": amax, **given, "scale": scale, "out_dtype": fp8, **BOTH}
        yield Case("group_quantize_delayed", arguments, [of_rows, of_columns, total, largest])
    yield from mx(x, groups, total)

    q, scale = quantized_rows(groups, K)
    back = Output(reference.dequantize_rowwise(q, scale, offs).float().to(dtype))
    arguments = {"q": q, "scale": scale, "offs": offs, "out_dtype": dtype}
    yield Case("group_dequantize", arguments, [back])
    q_t, scale_t = quantized_columns(groups, K)
    back = Output(reference.dequantize_columnwise(q_t, scale_t, offs, groups.T).float().to(dtype))
    arguments = {
        "q_t": q_t,
        "scale_t": scale_t,
        "offs": offs,
        "num_rows": groups.T,
        "out_dtype": dtype,
    }
    yield Case("group_dequantize_t", arguments, [back])


def mx(x_TK: Tensor, groups: Groups, bias_grad: Output) -> Iterator[Case]:
    """MXFP8: scales are the bytes of E8M0, exponents plus 127."""
    offs, valid = groups.offs(), must.first(groups.valid)
    q, scale = reference.quantize_mx_rowwise(x_TK[: groups.valid])
    q_t, scale_t = reference.quantize_mx_columnwise(x_TK, offs)
    blocks = must.first(len(q_t))
    outputs: Outputs = [
        Output(q, part=valid),
        Output(e8m0(scale), part=valid),
        Output(q_t, part=blocks),
        Output(e8m0(scale_t), part=blocks),
        bias_grad,
    ]
    arguments: Arguments = {"x": x_TK, "offs": offs, **BOTH}
    yield Case("group_quantize_mx", arguments, outputs)
    rowwise = reference.round_mx_rowwise(x_TK[: groups.valid])
    columnwise = reference.round_mx_columnwise(x_TK, offs)[: groups.valid]
    both = [Output(t.to(BF16), part=valid) for t in (rowwise, columnwise)]
    yield Case("group_round_mx", arguments, [*both, bias_grad])


def e8m0(scale: Tensor) -> Tensor:
    """The bytes of powers of two."""
    return (torch.frexp(scale).exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)


def activations(groups: Groups, dtype: torch.dtype) -> Iterator[Case]:
    """SwiGLU and its gradient, also quantized: the bytes of quantizing what the CPU computes."""
    gate_up, dh = rows(groups, 2 * groups.K, dtype), rows(groups, groups.K, dtype)
    weight_T, offs = per_row(groups), groups.offs()
    for what, form in FORMS.items():
        in_float32 = dict(form)  # as the kernels read it
        if form:
            in_float32["alpha"] = torch.tensor(form["alpha"]).item()
        forward = {"gate_up": gate_up, "offs": offs, **form}
        backward = {"dh": dh, "weight": weight_T, **forward}
        h = must.swiglu(gate_up, groups, in_float32)
        grads = must.swiglu_grad(dh, gate_up, weight_T, groups, in_float32)
        yield Case("swiglu", forward, [h], what)
        yield Case("swiglu_grad", backward, [*grads], what)
        h_TK = torch.ops.grouped_linear.swiglu(**forward)
        outputs = [*must.rowwise(h_TK, groups, POWERS), *must.columnwise(h_TK, groups, POWERS), h]
        arguments = {**forward, "columnwise": True, "keep_h": True}
        yield Case("group_quantize_swiglu", arguments, outputs, what)
        d_gate_up, weighted, _ = torch.ops.grouped_linear.swiglu_grad(**backward)
        d_gate_up[groups.valid :] = weighted[groups.valid :] = torch.nan
        outputs = [
            *must.rowwise(d_gate_up, groups, POWERS),
            *must.columnwise(d_gate_up, groups, POWERS),
            must.bias_grad(d_gate_up, groups),
            *must.columnwise(weighted, groups, POWERS),
            grads[2],
        ]
        arguments = {**backward, **BOTH, "h_columnwise": True}
        yield Case("group_quantize_swiglu_grad", arguments, outputs, what)


def every_gate() -> Iterator[Case]:
    """SwiGLU of every gate of 16 bits, and of gates where 1 + exp(-gate) is all ones.

    A GPU computes 1 / (1 + exp(-gate)) by a step of Newton's method from what its hardware
    approximates. PTX promises that rcp.approx.f32 is within one unit in the last place. From any
    such number the step is correctly rounded, but for one: if the divisor's mantissa is all ones
    and the approximation is the power of two below, half a unit is rounded away (all 2^23 mantissas
    were tried). Of the float32 gates, which were all tried too, those near 2^-23 and one other have
    such a divisor.
    """
    bits = torch.arange(2**16).to(torch.int16)
    halves = torch.cat([bits.view(dtype).float() for dtype in (BF16, FP16)])
    halves = halves[halves.abs() <= 2.0**100]  # up is 1: h is a float32
    near = torch.tensor([2.0**-23, float.fromhex("-0x1.b78ce4p+1")]).view(torch.int32)
    near = (near[:, None] + torch.arange(-64, 64, dtype=torch.int32)).flatten().view(FP32)
    gates = torch.cat([halves, near])
    gates = torch.cat([gates, gates.new_zeros(-len(gates) % 64)]).view(-1, 64)
    gate_up = torch.cat([gates, torch.ones_like(gates)], 1)
    groups = Groups((len(gates),), len(gates), K=64)
    arguments: Arguments = {"gate_up": gate_up, "offs": groups.offs()}
    h = must.swiglu(gate_up, groups, PLAIN)
    yield Case("swiglu", arguments, [h], "float32, every gate of 16 bits")
    h_TK = torch.ops.grouped_linear.swiglu(**arguments)
    outputs = [*must.rowwise(h_TK, groups, POWERS), None, None, None]
    yield Case("group_quantize_swiglu", arguments, outputs, "float32, every gate of 16 bits")
