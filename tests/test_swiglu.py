# SPDX-License-Identifier: Apache-2.0
"""SwiGLU against float64; fused with quantization, the bits of the ops one after the other.

T rows, E groups, K features of h.
"""

import math
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor
from torch.nn.functional import gelu

from grouped_linear import SwiGLU, ops
from grouped_linear.ops.activation import GELU_TANH
from support import reference
from support.check import check, check_output
from support.compare import assert_same_bits
from support.groups import GROUPS, Groups
from support.op_info import Sample
from support.ops import PAGES
from support.samples import make, specified
from support.tensors import BF16, DTYPES, FP16, FP32
from support.tolerances import ROUNDING
from support.variants import FORMS

UNFUSED = {"group_quantize_swiglu": "swiglu", "group_quantize_swiglu_grad": "swiglu_grad"}
# Of wide rows: d_weight is summed whatever else is asked for, and h may have a pass of its own.
WIDE_OUTPUTS: dict[str, list[dict[str, Any]]] = {
    "group_quantize_swiglu": [{"columnwise": True}],
    "group_quantize_swiglu_grad": [
        {},
        {"columnwise": True},
        {"h_columnwise": True},
        {"columnwise": True, "keep_h": True},
        {"columnwise": True, "bias_grad": True, "h_columnwise": True, "share_h_scales": True},
        {"rowwise": False, "columnwise": True, "h_columnwise": True},
    ],
}
EVERY_FORM: dict[str, dict[str, Any]] = {"plain": {}, **FORMS}
FORM = ("alpha", "beta", "limit", "interleaved", "cubic")
OPTIONS = (
    "amax_epsilon",
    "power_of_two_scales",
    "rowwise",
    "columnwise",
    "bias_grad",
    "share_scales",
)


def offs_of(T: int) -> Tensor:
    return torch.tensor([T], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_every_bf16_gate(dtype: torch.dtype, form: dict[str, Any], device: str) -> None:
    every = torch.arange(2**16).to(torch.int16).view(BF16)
    # Times alpha it must not overflow, but with a cubic term.
    overflows = "alpha" in form and "cubic" not in form
    largest = 2.0**127 if overflows else torch.finfo(BF16).max
    gate = torch.where(every.abs() <= largest, every, 1).view(-1, 64)
    ones = torch.ones_like(gate)
    gate_up = torch.cat([gate, ones], dim=1).to(dtype)
    if form.get("interleaved"):
        gate_up = torch.stack([gate, ones], dim=2).flatten(1).to(dtype)
    arguments = {"gate_up": gate_up, "offs": offs_of(len(gate)), **form}
    dh_and_weight = {"dh": ones.to(dtype), "weight": torch.randn(len(gate))}
    for sample in (
        Sample("swiglu", arguments),
        Sample("swiglu_grad", {**dh_and_weight, **arguments}),
    ):
        check(sample, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_with_tanh(dtype: torch.dtype, device: str) -> None:
    """Two constants make torch's GELU of it, with the gradient that autograd finds in float64."""
    gate = torch.cat([torch.linspace(-12, 12, 4000), 100 * torch.randn(96)]).view(-1, 64)
    gate_up = torch.cat([gate, torch.randn_like(gate)], dim=1).to(dtype)
    dh = torch.randn_like(gate).to(dtype)
    ones, offs = torch.ones(len(gate)), offs_of(len(gate))
    exact = gate_up.double().requires_grad_()
    g, u = exact.chunk(2, dim=1)
    h = gelu(g, approximate="tanh") * u
    (d_gate_up,) = torch.autograd.grad(h, exact, dh.double())
    inputs = (t.to(device) for t in (dh, gate_up, ones, offs))
    grads = ops.swiglu_grad(*inputs, SwiGLU(alpha=2 * math.sqrt(2 / math.pi), cubic=0.044715))
    assert_same_bits(grads.h, ops.swiglu(gate_up.to(device), offs.to(device), GELU_TANH))
    # Of a negative gate 1 + tanh loses what is small beside 1, in float64 too: 2^-52. A slope is a
    # sum of parts of up to 1.5, each with sigmoid's 2^-21.
    rtol, size = ROUNDING[dtype] + 2.0**-19, torch.finfo(dtype).smallest_normal
    near = {"rtol": rtol, "check_dtype": False}
    torch.testing.assert_close(grads.h.double().cpu(), h.detach(), atol=size + 1e-13, **near)
    torch.testing.assert_close(
        grads.d_gate_up.double().cpu(), d_gate_up, atol=size + 2.0**-18, **near
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
@pytest.mark.parametrize("cubic", [1e-45, 1e-30, 0.044715, 3e38])
def test_no_finite_gate_gives_nan(
    cubic: float, form: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    """A zero of dh or up times an infinity would be one, and an infinity times 1 - s."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.tiny, 1e-3, 1.0, 5.0, 9.0, 11.0, 90.0, 6e4, info.max**0.5, info.max / 3]
    gate = torch.tensor([*sizes, info.max / 2, info.max]).clamp(max=info.max)
    gate = torch.cat([gate, -gate, torch.zeros(6)]).view(1, 32).expand(3, 32)
    up, dh = (torch.tensor(x).view(3, 1).expand(3, 32) for x in ([1.0, 0, 1], [1.0, 1, 0]))
    gate_up = torch.cat([gate, up], dim=1)
    if form.get("interleaved"):
        gate_up = torch.stack([gate, up], dim=2).flatten(1)
    activation = SwiGLU(**form | {"cubic": cubic})
    offs, weight = offs_of(3).to(device), torch.ones(3, device=device)
    dh, gate_up = dh.to(device, dtype), gate_up.to(device, dtype)
    assert gate_up.isfinite().all()
    assert not ops.swiglu(gate_up, offs, activation).isnan().any()
    for t in ops.swiglu_grad(dh, gate_up, weight, offs, activation)[:2]:
        assert not t.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_that_are_not_finite_with_a_cubic_term(dtype: torch.dtype, device: str) -> None:
    """A slope is computed at a smaller gate, which must not hide them; a limit stops one."""
    gate_up = torch.ones(3, 32, dtype=dtype)
    gate_up[:, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    dh, weight, offs = torch.ones(3, 16, dtype=dtype), torch.ones(3), offs_of(3)
    inputs = [t.to(device) for t in (dh, gate_up, weight, offs)]
    grads = ops.swiglu_grad(*inputs, GELU_TANH)
    for t in (grads.h, grads.d_gate_up):
        assert not t[:, 0].isfinite().any()
        assert t[:, 1:16].isfinite().all()
    grads = ops.swiglu_grad(*inputs, SwiGLU(limit=2.0, cubic=0.5))
    assert grads.h[:, 0].isfinite().tolist() == [False, True, False]
    assert grads.d_gate_up[:, 0].isfinite().tolist() == [False, True, False]
    assert grads.d_gate_up[1, 0] == 0


def test_at_and_past_limits(device: str) -> None:
    """They stop infinities, and gradients past them but not at them; NaN stays."""
    inf, nan = torch.inf, torch.nan
    gate = torch.tensor([2, 2.125, inf, 1, 1, 1, 1, nan, 1] + [1] * 7)
    up = torch.tensor([1, 1, 1, 2, -2, -inf, 2.125, 1, nan] + [1] * 7)
    sample = Sample("swiglu_grad", {"dh": torch.ones(1, 16), "limit": 2.0, "offs": offs_of(1)})
    sample = sample.but(gate_up=torch.cat([gate, up])[None], weight=torch.tensor([-0.5]))
    expected = reference.swiglu_grad(*(sample[n] for n in ("dh", "gate_up", "weight")), limit=2.0)
    (h,) = Sample("swiglu", {n: sample[n] for n in ("gate_up", "offs", "limit")}).results(device)
    torch.testing.assert_close(-0.5 * h.double(), expected.h, rtol=1e-6, atol=0, equal_nan=True)
    assert h.isnan()[0, 7:9].all()
    results = sample.results(device)
    for actual, right in zip(results, expected, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=1e-6, atol=0, equal_nan=True)
    assert (results[0] == 0).nonzero()[:, 1].tolist() == [1, 2, 16 + 5, 16 + 6]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_finite_stays_so(dtype: torch.dtype, device: str) -> None:
    """And in float8 it is NaN, also where only an intermediate overflowed."""
    bad, huge = [torch.nan, torch.inf, -torch.inf], torch.finfo(dtype).max
    gate_up = torch.ones(8, 32, dtype=dtype)
    gate_up[:3, 0] = gate_up[3:6, 16] = torch.tensor(bad, dtype=dtype)
    gate_up[6, 0] = gate_up[6, 16] = huge
    gate_up = gate_up.to(device)
    offs = offs_of(8).to(device)
    h = ops.swiglu(gate_up, offs).cpu()
    assert not h[:7, 0].isfinite().any()
    assert h[:7, 1:].isfinite().all()
    q = ops.group_quantize_swiglu(gate_up, offs).q
    assert q is not None
    assert q[:7, 0].float().isnan().all()
    assert not q[:7, 1:].float().isnan().any()
    dh = torch.ones(8, 16, dtype=dtype, device=device)
    weight = torch.ones(8, device=device)
    weight[7] = torch.nan
    grads = ops.swiglu_grad(dh, gate_up, weight, offs)
    assert not grads.h[:7, 0].isfinite().any()
    assert grads.h[:7, 1:].isfinite().all()
    quantized = ops.group_quantize_swiglu_grad(dh, gate_up, weight, offs, h_columnwise=True)
    assert quantized.q is not None
    assert quantized.h_t is not None
    assert quantized.q[:6, 0].float().isnan().all()
    assert quantized.h_t[0, 0, :7].float().isnan().all()
    assert not quantized.h_t[0, 1:, :7].float().isnan().any()
    for d_weight in (grads.d_weight, quantized.d_weight):
        assert not d_weight[:6].isfinite().any()
    # Of a weight that is not finite, all of the row but the weight's own gradient.
    for of_row in (grads.d_gate_up[7], grads.h[7], quantized.q[7], quantized.h_t[0, :, 7]):
        assert of_row.float().isnan().all()
    for d_weight in (grads.d_weight, quantized.d_weight):
        assert d_weight[7].isfinite()


def test_every_gate_has_the_same_bits(device: str) -> None:
    """Of 16 bits, and gates where 1 + exp(-gate) is all ones.

    A GPU computes 1 / (1 + exp(-gate)) by a step of Newton's method from what its hardware
    approximates. PTX promises that rcp.approx.f32 is within one unit in the last place. From any
    such number the step is correctly rounded, but for one: if the divisor's mantissa is all ones
    and the approximation is the power of two below, half a unit is rounded away (all 2^23 mantissas
    were tried). Of the float32 gates, which were all tried too, those near 2^-23 and one other have
    such a divisor.
    """
    every = torch.arange(2**16).to(torch.int16)
    halves = torch.cat([every.view(dtype).float() for dtype in (BF16, FP16)])
    halves = halves[halves.abs() <= 2.0**100]  # up is 1: h is a float32
    near = torch.tensor([2.0**-23, float.fromhex("-0x1.b78ce4p+1")]).view(torch.int32)
    near = (near[:, None] + torch.arange(-64, 64, dtype=torch.int32)).flatten().view(FP32)
    gates = torch.cat([halves, near])
    gates = torch.cat([gates, gates.new_zeros(-len(gates) % 64)]).view(-1, 64)
    gate_up = torch.cat([gates, torch.ones_like(gates)], 1)
    for op in ("swiglu", "group_quantize_swiglu"):
        check(Sample(op, {"gate_up": gate_up, "offs": offs_of(len(gates))}), device)


def unfused(sample: Sample, device: str) -> list[Tensor]:
    """The results of the fused op, from two ops."""
    inputs = {n: v for n, v in sample.arguments.items() if isinstance(v, Tensor) or n in FORM}
    x, *of_weight = Sample(UNFUSED[sample.op], inputs).results(device)
    options: dict[str, Any] = {n: v for n, v in sample.arguments.items() if n in OPTIONS}
    quantize = Sample("group_quantize", {"x": x, "offs": sample["offs"], **options})
    results = quantize.results(device)
    if sample.op == "group_quantize_swiglu":
        results[4] = x if sample.get("keep_h") else x.new_empty(0)
        return results
    h, d_weight = of_weight
    columnwise = sample.get("h_columnwise")
    of_h = quantize.but(x=h, rowwise=not columnwise, columnwise=columnwise, bias_grad=False)
    of_h = of_h.but(share_scales=sample.get("share_h_scales"))
    kept_h = h if sample.get("keep_h") else h.new_empty(0)
    return [*results, *of_h.results(device)[2:4], kept_h, d_weight]


def check_fused(sample: Sample, device: str) -> None:
    actual = specified(sample, sample.results(device))
    right = specified(sample, unfused(sample, device))
    if sample.op == "group_quantize_swiglu_grad":  # a device may sum d_weight in its own order
        of_d_weight = PAGES[sample.op].expected(sample)[-1]
        assert of_d_weight is not None
        for d_weight in (actual.pop(), right.pop()):
            check_output(d_weight, of_d_weight, "d_weight")
    for result, expected in zip(actual, right, strict=True):
        if result.dtype.itemsize > 1:  # NaN in one encoding
            result, expected = (torch.where(t.isnan(), torch.nan, t) for t in (result, expected))
        assert_same_bits(result, expected)


@pytest.mark.parametrize("op", UNFUSED)
@pytest.mark.parametrize("form", EVERY_FORM)
def test_wide_rows(form: str, op: str, device: str) -> None:
    """Each form and outputs where the columns of up begin with a block, in one pass, or inside."""
    turn = list(EVERY_FORM).index(form)
    for outputs in WIDE_OUTPUTS[op]:
        turn += 1
        features, dtype = ((2880, FP32), (256, BF16), (2880, BF16))[turn % 3]
        groups = Groups((5, 0, 131), 140, K=features)
        check_fused(make(op, groups, dtype, **outputs, **EVERY_FORM[form]), device)


@pytest.mark.parametrize(("h_columnwise", "keep_h"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (True, True)])
def test_what_is_not_requested_is_none(
    rowwise: bool, columnwise: bool, bias_grad: bool, h_columnwise: bool, keep_h: bool, device: str
) -> None:
    sample = make("group_quantize_swiglu_grad", GROUPS["capacity"], BF16).on(device)
    results = ops.group_quantize_swiglu_grad(
        **sample.arguments,
        rowwise=rowwise,
        columnwise=columnwise,
        bias_grad=bias_grad,
        h_columnwise=h_columnwise,
        keep_h=keep_h,
    )
    requested = {
        **dict.fromkeys(("q", "scale"), rowwise),
        **dict.fromkeys(("q_t", "scale_t"), columnwise),
        "bias_grad": bias_grad,
        **dict.fromkeys(("h_t", "scale_h_t"), h_columnwise),
        "h": keep_h,
        "d_weight": True,
    }
    assert {name: t is not None for name, t in results._asdict().items()} == requested


@hypothesis.given(data=strategies.data())
def test_drawn_inputs(device: str, data: strategies.DataObject) -> None:
    m_splits = data.draw(strategies.lists(strategies.integers(0, 140), min_size=1, max_size=40))
    spare, features = data.draw(strategies.integers(0, 9)), data.draw(strategies.integers(1, 18))
    groups = Groups(tuple(m_splits), sum(m_splits) + spare, K=16 * features)
    spread = data.draw(strategies.sampled_from([1.0, 30.0, 1e4]))
    dtype = data.draw(strategies.sampled_from(DTYPES))
    torch.manual_seed(data.draw(strategies.integers(0, 99)))
    options = {
        "amax_epsilon": data.draw(strategies.sampled_from([0.0, 1e-12, 0.1])),
        "power_of_two_scales": data.draw(strategies.booleans()),
        "columnwise": True,
    }
    form = data.draw(strategies.sampled_from(list(EVERY_FORM.values())))
    outputs = {
        n: data.draw(strategies.booleans()) for n in ("h_columnwise", "keep_h", "share_h_scales")
    }
    for op in UNFUSED:
        sample = make(op, groups, dtype, **options, **form)
        sample = sample.but(gate_up=sample["gate_up"] * spread)
        if op == "group_quantize_swiglu_grad":
            sample = sample.but(bias_grad=True, **outputs)
        check_fused(sample, device)

    sample = make("group_quantize", groups, dtype, index=torch.int64, bias_grad=True, **options)
    sorted_x = reference.gather(sample["x"], sample["rows"], sample["offs"])
    plain = sample.but(x=sorted_x, rows=None)
    expected = specified(plain, plain.results(device))
    for result, right in zip(specified(sample, sample.results(device)), expected, strict=True):
        assert_same_bits(result, right)


def test_compiled(device: str) -> None:
    groups = GROUPS["capacity"]
    forward = make("group_quantize_swiglu", groups, BF16, columnwise=True).on(device)
    backward = make("group_quantize_swiglu_grad", groups, BF16).on(device)
    blocks = len(reference.row_blocks(groups.offs(), groups.T))

    def call(
        gate_up: Tensor, dh: Tensor, weight: Tensor, offs: Tensor
    ) -> tuple[Tensor | None, ...]:
        y = ops.group_quantize_swiglu(gate_up, offs)
        dy = ops.group_quantize_swiglu_grad(
            dh, gate_up, weight, offs, bias_grad=True, h_columnwise=True
        )
        assert dy.h_t is not None
        assert dy.scale_h_t is not None
        of_h = dy.h_t[:blocks], dy.scale_h_t[:blocks]
        grads = ops.swiglu_grad(dh, gate_up, weight, offs)
        return y.q, dy.q, dy.bias_grad, *of_h, dy.d_weight, *grads

    inputs = forward["gate_up"], backward["dh"], backward["weight"], forward["offs"]
    compiled = torch.compile(call, fullgraph=True)(*inputs)
    for actual, expected in zip(compiled, call(*inputs), strict=True):
        assert actual is not None
        assert expected is not None
        end = groups.valid if actual.size(0) == groups.T else actual.size(0)
        assert_same_bits(actual[:end], expected[:end])


def test_a_subclass_may_leave_out_the_checks() -> None:
    @dataclass(frozen=True)
    class Unchecked(SwiGLU):
        def __post_init__(self) -> None:
            pass

    gate_up, offs = torch.randn(4, 32), torch.tensor([4]).int()
    y = torch.compile(ops.swiglu, fullgraph=True)(gate_up, offs, Unchecked(limit=2.0))
    assert_same_bits(y, ops.swiglu(gate_up, offs, SwiGLU(limit=2.0)))
