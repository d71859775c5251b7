"""SwiGLU against float64; fused with quantization, the bits of the ops one after the other.

T rows, E groups, K features of h.
"""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from grouped_linear import ops
from support import reference
from support.cases import FORMS, cases, variant_of
from support.compare import assert_same_bits, bits
from support.devices import devices, needs_hopper
from support.groups import GROUPS, Groups
from support.samples import Sample, make, specified
from support.tensors import BF16, DTYPES, FP16, FP32

# Half a unit in the last place, relative.
ROUNDING = {BF16: 2.0**-9, FP16: 2.0**-12, FP32: 2.0**-25}
UNFUSED = {"group_quantize_swiglu": "swiglu", "group_quantize_swiglu_grad": "swiglu_grad"}
EVERY_FORM: dict[str, dict[str, Any]] = {"plain": {}, **FORMS}
FORM = ("alpha", "beta", "limit", "interleaved")
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


def form_of(sample: Sample) -> dict[str, Any]:
    form = {name: sample.arguments[name] for name in FORM if name in sample.arguments}
    if "alpha" in form:
        form["alpha"] = torch.tensor(form["alpha"]).item()  # a float32
    return form


def truth(sample: Sample) -> tuple[Tensor, Tensor]:
    """The result in float64, and what its float32 computation may lose.

    sigmoid is within 2^-21, what it is of within 2^-24, and the few operations after it round by
    2^-24 each. Beyond 83 sigmoid stays what it is there, 2^-119. 1 + x * (1 - s) is near zero for
    some gates, and then loses relative to its parts.
    """
    form = form_of(sample)
    gate_up = sample["gate_up"].double().requires_grad_()
    h = reference.swiglu(gate_up, **form)
    with torch.no_grad():
        gate, up = reference.gate_and_up(gate_up, form.get("interleaved", False))
        limit = form.get("limit") or torch.inf
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + form.get("beta", 0.0)
        x = form.get("alpha", 1.0) * gate
        s = torch.sigmoid(x)
        of_x = 2.0**-20 + (2.0**-22 * x.abs() * (1 - s) if "alpha" in form else 0)
        if "dh" not in sample.arguments:
            return h, of_x * h.abs() + 2.0**-118 * (gate * up).abs()
    dh = sample["dh"].double()
    (expected,) = torch.autograd.grad(h, gate_up, dh)
    lost = torch.zeros_like(gate_up)
    of_gate, of_up = reference.gate_and_up(lost, form.get("interleaved", False))
    of_gate += of_x * (dh * up * s).abs() * (1 + x.abs() * (1 - s))
    of_gate += 2.0**-118 * (dh * up).abs() * (1 + x.abs())
    of_up += of_x * (dh * gate * s).abs() + 2.0**-118 * (dh * gate).abs()
    return expected, lost


def assert_close(actual: Tensor, sample: Sample, valid: int) -> None:
    expected, lost = (t[:valid] for t in truth(sample))
    dtype = sample["gate_up"].dtype
    info = torch.finfo(dtype)
    allowed = lost + 2 * ROUNDING[dtype] * (expected.abs() + lost) + info.tiny * info.eps
    overflows = expected.abs() > info.max * (1 - 2.0**-20)
    close = (actual[:valid].double() - expected).abs() <= allowed
    assert (close | overflows).all()
    assert not bits(actual[valid:]).any()


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases("swiglu", "swiglu_grad"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    sample = variant_of(op, groups, variant, dtype)
    (actual,) = sample.results(device)
    assert actual.dtype == dtype
    assert_close(actual, sample, groups.valid)


@pytest.mark.parametrize("device", devices("swiglu", "swiglu_grad"))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_every_bf16_gate(dtype: torch.dtype, form: dict[str, Any], device: str) -> None:
    every = torch.arange(2**16).to(torch.int16).view(BF16)
    # Times alpha it must not overflow.
    largest = 2.0**127 if "alpha" in form else torch.finfo(BF16).max
    gate = torch.where(every.abs() <= largest, every, 1).view(-1, 64)
    ones = torch.ones_like(gate)
    gate_up = torch.cat([gate, ones], dim=1).to(dtype)
    if form.get("interleaved"):
        gate_up = torch.stack([gate, ones], dim=2).flatten(1).to(dtype)
    arguments = {"gate_up": gate_up, "offs": offs_of(len(gate)), **form}
    for sample in (
        Sample("swiglu", arguments),
        Sample("swiglu_grad", {"dh": ones.to(dtype), **arguments}),
    ):
        assert_close(sample.results(device)[0], sample, len(gate))


@pytest.mark.parametrize("device", devices("swiglu", "swiglu_grad"))
def test_at_and_past_limits(device: str) -> None:
    """They stop infinities, and gradients past them but not at them; NaN stays."""
    inf, nan = torch.inf, torch.nan
    gate = torch.tensor([2, 2.125, inf, 1, 1, 1, 1, nan, 1] + [1] * 7)
    up = torch.tensor([1, 1, 1, 2, -2, -inf, 2.125, 1, nan] + [1] * 7)
    sample = Sample("swiglu_grad", {"dh": torch.ones(1, 16), "limit": 2.0, "offs": offs_of(1)})
    sample = sample.but(gate_up=torch.cat([gate, up])[None])
    exact = sample["gate_up"].double().requires_grad_()
    expected = reference.swiglu(exact, limit=2.0)
    expected.backward(torch.ones_like(expected))
    (h,) = Sample("swiglu", {n: sample[n] for n in ("gate_up", "offs", "limit")}).results(device)
    torch.testing.assert_close(h.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
    assert h.isnan()[0, 7:9].all()
    (actual,) = sample.results(device)
    torch.testing.assert_close(actual.double(), exact.grad, rtol=1e-6, atol=0, equal_nan=True)
    assert (actual == 0).nonzero()[:, 1].tolist() == [1, 2, 16 + 5, 16 + 6]


@pytest.mark.parametrize("device", devices("swiglu", "swiglu_grad"))
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
    grad = ops.group_quantize_swiglu_grad(dh, gate_up, offs).q
    assert grad is not None
    assert grad[:6, 0].float().isnan().all()


def unfused(sample: Sample, device: str) -> list[Tensor]:
    """The results of the fused op, from two ops."""
    inputs = {n: v for n, v in sample.arguments.items() if isinstance(v, Tensor) or n in FORM}
    (x,) = Sample(UNFUSED[sample.op], inputs).results(device)
    options: dict[str, Any] = {n: v for n, v in sample.arguments.items() if n in OPTIONS}
    quantize = Sample("group_quantize", {"x": x, "offs": sample["offs"], **options})
    results = quantize.results(device)
    if sample.op == "group_quantize_swiglu":
        results[4] = x if sample.get("keep_h") else x.new_empty(0)
    return results


def check_fused(sample: Sample, device: str) -> None:
    actual = specified(sample, sample.results(device))
    for result, expected in zip(actual, specified(sample, unfused(sample, device)), strict=True):
        if result.dtype.itemsize > 1:  # NaN in one encoding
            result, expected = (torch.where(t.isnan(), torch.nan, t) for t in (result, expected))
        assert_same_bits(result, expected)


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases(*UNFUSED))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_is_unfused(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    check_fused(variant_of(op, groups, variant, dtype), device)


@pytest.mark.parametrize("device", devices(*UNFUSED))
@pytest.mark.parametrize("op", UNFUSED)
@pytest.mark.parametrize("form", EVERY_FORM)
def test_wide_rows(form: str, op: str, device: str) -> None:
    for features in (2880, 256):  # the columns of up begin inside a block, and with one
        groups = Groups((5, 0, 131), 140, K=features)
        for dtype in (BF16, FP32):
            check_fused(make(op, groups, dtype, columnwise=True, **EVERY_FORM[form]), device)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=strategies.data())
@pytest.mark.parametrize("device", devices("group_quantize", *UNFUSED))
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
    for op in UNFUSED:
        sample = make(op, groups, dtype, **options, **form)
        sample = sample.but(gate_up=sample["gate_up"] * spread)
        check_fused(sample if op == "group_quantize_swiglu" else sample.but(bias_grad=True), device)

    sample = make("group_quantize", groups, dtype, index=torch.int64, bias_grad=True, **options)
    sorted_x = reference.gather(sample["x"], sample["rows"], sample["offs"])
    plain = sample.but(x=sorted_x, rows=None)
    expected = specified(plain, plain.results(device))
    for result, right in zip(specified(sample, sample.results(device)), expected, strict=True):
        assert_same_bits(result, right)


@needs_hopper
@pytest.mark.parametrize(("op", "groups", "variant"), [c.values[:3] for c in cases(*UNFUSED)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_and_cuda_give_the_same_bits(
    dtype: torch.dtype, op: str, groups: Groups, variant: str
) -> None:
    sample = variant_of(op, groups, variant, dtype)
    for kind in (
        sample,
        Sample(
            UNFUSED[op],
            {n: sample[n] for n in sample.arguments if n in ("dh", "gate_up", "offs", *FORM)},
        ),
    ):
        cpu, cuda = (specified(kind, kind.results(d)) for d in ("cpu", "cuda"))
        for a, b in zip(cpu, cuda, strict=True):
            assert_same_bits(a, b)


@needs_hopper
def test_rows_out_of_range_are_clamped_on_cuda() -> None:
    x, offs = torch.randn(4, 16, device="cuda"), offs_of(3).cuda()
    wrong = torch.tensor([-(2**62), 2, 2**62], device="cuda")
    clamped, right = (ops.group_quantize(x, offs, r) for r in (wrong, wrong.clamp(0, 3)))
    assert clamped.q is not None
    assert right.q is not None
    assert torch.equal(clamped.q.view(torch.uint8), right.q.view(torch.uint8))


@pytest.mark.parametrize("device", devices(*UNFUSED))
def test_compiled(device: str) -> None:
    groups = GROUPS["capacity"]
    forward = make("group_quantize_swiglu", groups, BF16, columnwise=True).on(device)
    backward = make("group_quantize_swiglu_grad", groups, BF16, bias_grad=True).on(device)

    def call(gate_up: Tensor, dh: Tensor, offs: Tensor) -> tuple[Tensor | None, ...]:
        y = ops.group_quantize_swiglu(gate_up, offs)
        dy = ops.group_quantize_swiglu_grad(dh, gate_up, offs, bias_grad=True)
        return y.q, dy.q, dy.bias_grad

    inputs = forward["gate_up"], backward["dh"], forward["offs"]
    compiled = torch.compile(call, fullgraph=True)(*inputs)
    for actual, expected in zip(compiled, call(*inputs), strict=True):
        assert actual is not None
        assert expected is not None
        end = groups.valid if actual.size(0) == groups.T else actual.size(0)
        assert_same_bits(actual[:end], expected[:end])
