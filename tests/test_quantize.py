# SPDX-License-Identifier: Apache-2.0
"""Quantization: the bytes and scales of the reference, bit for bit."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from grouped_linear import ops
from support import reference
from support.check import check
from support.compare import assert_same_bits
from support.groups import GROUPS, WIDE, Groups
from support.op_info import Sample
from support.reference import Scaling
from support.samples import make, specified
from support.tensors import BF16, DTYPES, FP16, FP32, special_rows

SCALINGS = [
    pytest.param(Scaling(pow2, eps), id=f"{'power_of_two' if pow2 else 'exact'}-eps_{eps}")
    for pow2 in (True, False)
    for eps in (0.0, 0.25)
]


ROW_OPS = (
    "group_quantize_current",
    "group_quantize_delayed",
    "group_quantize_mx",
    "group_round_mx",
)
SUMMING = ("group_quantize", *ROW_OPS)


# --- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
def test_options_of_group_quantize(scaling: Scaling, device: str) -> None:
    """Every output has the same bits whatever else is asked for."""
    options = {"amax_epsilon": scaling.amax_epsilon}
    options["power_of_two_scales"] = scaling.power_of_two_scales
    sample = make("group_quantize", GROUPS["capacity"], BF16, **options)
    everything = sample.but(rowwise=True, columnwise=True, bias_grad=True)
    check(everything, device)
    expected = specified(everything, everything.results(device))
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        for bias_grad in (False, True):
            part = sample.but(rowwise=rowwise, columnwise=columnwise, bias_grad=bias_grad)
            wanted = (rowwise, rowwise, columnwise, columnwise, bias_grad)
            actual = specified(part, part.results(device))
            for result, full, asked in zip(actual, expected, wanted, strict=True):
                if asked:
                    assert_same_bits(result, full)
                else:
                    assert result.shape == (0,)


@pytest.mark.parametrize("groups", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("op", [*SUMMING, "shared"])
def test_wide_rows(op: str, dtype: torch.dtype, groups: Groups, device: str) -> None:
    options: dict[str, Any] = {"columnwise": True, "bias_grad": True}
    if op == "shared":
        op, options = "group_quantize", {"columnwise": True, "share_scales": True}
    check(make(op, groups, dtype, **options), device)


def squares_of_every_kind(T: int) -> torch.Tensor:
    """[T, 400]: squares of 128 features that share, do not, share in spite of some, and a part."""
    x = torch.randn(T, 400).clamp(-4, 4) + torch.randn(T, 400).sign()
    x[:, 130] *= 2.0**-10
    x[:, 300], x[:, 301], x[:, 302] = 0, torch.nan, torch.inf
    x[: T // 2, 390] *= 2.0**10
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["plain", "gathered", "swiglu"])
def test_squares_that_share_scales_or_not(form: str, dtype: torch.dtype, device: str) -> None:
    groups = Groups((100, 0, 300, 28), 430, K=400)
    options = {"columnwise": True, "share_scales": True}
    x_TK = squares_of_every_kind(groups.T).to(dtype)
    if form == "swiglu":
        gate_up = torch.cat([torch.full_like(x_TK, 2), x_TK], dim=1)
        sample = make("group_quantize_swiglu", groups, dtype, **options).but(gate_up=gate_up)
        *_, q_t, scale_t, _ = sample.results(device)
        h_TK = ops.swiglu(gate_up, sample["offs"])
        unfused = make("group_quantize", groups, dtype, **options).but(x=h_TK)
        *_, expected, expected_scale, _ = unfused.results("cpu")
        blocks = sum(-(-size // 128) for size in groups.m_splits)
        assert_same_bits(q_t[:blocks], expected[:blocks])
        assert_same_bits(scale_t[:blocks], expected_scale[:blocks])
    else:
        sample = make("group_quantize", groups, dtype, **options).but(x=x_TK)
        if form != "plain":
            sample = sample.but(rows=torch.randperm(groups.T))
        check(sample, device)
        scale_t = sample.results(device)[3]
    shares = [
        [bool((part == part[0]).all()) for part in scales.split(128)] for scales in scale_t[:5]
    ]
    assert [square[:3] for square in shares] == [[True, False, True]] * 5
    if form == "plain":
        assert {square[3] for square in shares} == {True, False}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_near_features_share_scales(dtype: torch.dtype, device: str) -> None:
    """A feature of 1/256 of the largest does, the next smaller number does not."""
    less = 1 - torch.finfo(dtype).eps / 2
    cases = [(256.0, 1.0, True), (256.0, less, False)]
    if dtype == FP32:
        cases += [(2.0**127, 2.0**119, True), (2.0**127, 2.0**118, False)]
        cases += [(2.0**127, 2.0**121, True), (2.0**-140, 2.0**-148, True)]
    for largest, smallest, shares in cases:
        x_TK = torch.zeros(5, 32, dtype=dtype)
        x_TK[3, 4], x_TK[0, 20] = largest, -smallest
        arguments = {"x": x_TK, "offs": torch.tensor([5], dtype=torch.int32)}
        sample = Sample("group_quantize", {**arguments, "columnwise": True, "share_scales": True})
        check(sample, device)
        scale_t = sample.results(device)[3][0]
        assert bool(scale_t[4] == scale_t[20]) == shares


@pytest.mark.parametrize("op", SUMMING)
@pytest.mark.parametrize("name", ["one_takes_all", "capacity", "200_groups"])
def test_bias_grads_have_the_bits_of_the_op_alone(name: str, op: str, device: str) -> None:
    sample = make(op, GROUPS[name], BF16, columnwise=True, bias_grad=True)
    index = len(sample.schema.returns) - 1
    alone = Sample("grouped_bias_grad", {"dy": sample["x"], "offs": sample["offs"]})
    assert_same_bits(sample.results(device)[index], alone.results(device)[0])


# --- special values ------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 2.0**-130, 1e-6, 3e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pow2", [True, False], ids=["power_of_two", "exact"])
@pytest.mark.parametrize("across", ["rows", "columns"])
def test_special_values(
    across: str, pow2: bool, dtype: torch.dtype, epsilon: float, device: str
) -> None:
    x_TK = special_rows(dtype)
    if across == "columns":
        x_TK = x_TK.t().contiguous()
    T = x_TK.size(0)
    x_TK = torch.nn.functional.pad(x_TK, (0, -x_TK.size(1) % 16))
    arguments = {"x": x_TK, "offs": torch.tensor([2, T], dtype=torch.int32)}
    options = {"amax_epsilon": epsilon, "power_of_two_scales": pow2, "columnwise": True}
    sample = Sample("group_quantize", arguments | options)
    check(sample, device)
    check(sample.but(share_scales=True), device)
    scale = sample.results(device)[1][:, :T]
    assert (scale >= torch.finfo(FP32).smallest_normal).all()  # also no NaN
    assert scale.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pow2", [True, False], ids=["power_of_two", "exact"])
def test_special_values_of_weights(pow2: bool, dtype: torch.dtype, device: str) -> None:
    kinds = special_rows(dtype)[:, :16]  # an expert of each kind
    w_ENK = kinds[:, None].expand(-1, 16, -1)
    sample = Sample("quantize_weight", {"w": w_ENK, "power_of_two_scales": pow2})
    check(sample, device)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_16_bit_number(dtype: torch.dtype, device: str) -> None:
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    unscaled = torch.where(every.abs() > 448, every.sign().to(dtype), every)  # NaN compares false
    for x, epsilon in ((every, 0.0), (unscaled, 448.0)):  # neighbours share a scale; no scale
        for pow2 in (True, False):
            arguments = {"x": x.view(512, 128), "offs": torch.tensor([512], dtype=torch.int32)}
            options = {"amax_epsilon": epsilon, "power_of_two_scales": pow2, "columnwise": True}
            check(Sample("group_quantize", arguments | options), device)


def rows_of_every_factor() -> Tensor:
    """Rows of 128 bf16 numbers: every power of two that can be a factor, with all that it keeps.

    A row's last number is its amax, 448 / factor. The others, over all rows of a factor, are the
    numbers of either sign down to 2^-22 of that, where e4m3 has had nothing but zero for long.
    """
    largest = 0x43E0 - 128 * torch.arange(-119, 127)  # the bits of 448 * 2^-exponent
    below = (largest[:, None] - torch.arange(22 * 128)).clamp(min=0)
    both_signs = torch.cat([below, below | 0x8000], 1)
    rows = torch.nn.functional.pad(both_signs, (0, -both_signs.size(1) % 127)).view(246, -1, 127)
    rows = torch.cat([rows, largest[:, None, None].expand(-1, rows.size(1), 1)], 2)
    return rows.reshape(-1, 128).to(torch.uint16).view(BF16)


def test_every_number_of_every_factor(device: str) -> None:
    x = rows_of_every_factor()
    for x_TK in (x, x[: x.size(0) // 16 * 16].t().contiguous()):
        arguments = {"x": x_TK, "offs": torch.tensor([x_TK.size(0)], dtype=torch.int32)}
        sample = Sample("group_quantize", arguments | {"columnwise": True})
        check(sample, device)
        check(sample.but(rowwise=False), device)
        check(sample.but(columnwise=False), device)
        check(sample.but(x=x_TK.float()), device)


@pytest.mark.parametrize("K", [256, 240])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_do_not_depend_on_size(K: int, dtype: torch.dtype, device: str) -> None:
    """A CPU stores in two ways: near its L2 cache, and whole cache lines of more than that."""
    E, T = 5, 1100
    x_TK = rows_of_every_factor().flatten()[: E * T * K].view(E * T, K).to(dtype)
    x_TK[7, 3] = torch.inf
    offs_E = T * torch.arange(1, E + 1, dtype=torch.int32)
    sample = Sample("group_quantize", {"x": x_TK, "offs": offs_E, "columnwise": True})
    q, scale, q_t, scale_t, _ = sample.results(device)
    for e in range(E):
        own, blocks = slice(e * T, (e + 1) * T), slice(e * -(-T // 128), (e + 1) * -(-T // 128))
        near = sample.but(x=x_TK[own], offs=offs_E[:1]).results(device)
        assert_same_bits(q[own], near[0])
        assert_same_bits(scale.t()[own], near[1].t()[:T])
        assert_same_bits(q_t[blocks], near[2][: -(-T // 128)])
        assert_same_bits(scale_t[blocks], near[3][: -(-T // 128)])


@hypothesis.given(data=strategies.data())
def test_drawn_inputs(device: str, data: strategies.DataObject) -> None:
    m_splits = data.draw(strategies.lists(strategies.integers(0, 140), min_size=1, max_size=5))
    spare, features = data.draw(strategies.integers(0, 9)), data.draw(strategies.integers(1, 18))
    groups = Groups(tuple(m_splits), sum(m_splits) + spare, K=16 * features, N=32)
    exponents = data.draw(strategies.sampled_from([1, 10, 30]))
    seed, pow2 = data.draw(strategies.integers(0, 99)), data.draw(strategies.booleans())
    epsilon = data.draw(strategies.sampled_from([0.0, 1e-12, 0.1, 1000.0]))
    share_scales = data.draw(strategies.booleans())
    dtype = data.draw(strategies.sampled_from(DTYPES))
    fp8 = data.draw(strategies.sampled_from([reference.E4M3, reference.E5M2]))

    torch.manual_seed(seed)
    options = {"amax_epsilon": epsilon, "power_of_two_scales": pow2}
    rows = {"columnwise": True, "bias_grad": True}
    sample = make("group_quantize", groups, dtype, **rows, **options)
    x_TK = sample["x"]
    if dtype != FP16:
        x_TK = x_TK * torch.randn_like(x_TK).mul(exponents).clamp(max=100).exp2()
    check(sample.but(x=x_TK, share_scales=share_scales), device)
    for op, more in (
        ("group_quantize_current", {"fp8": fp8, **options}),
        ("group_quantize_delayed", {"fp8": fp8}),
        ("group_quantize_mx", {}),
        ("group_round_mx", {}),
    ):
        check(make(op, groups, dtype, **rows, **more).but(x=x_TK), device)
    for op in ("quantize_weight", "quantize_weight_current"):
        check(make(op, groups, dtype, **options), device)
