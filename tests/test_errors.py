"""One sentence a mistake: the same from fake tensors, meta tensors, CPU and CUDA, held here.

Every rule of csrc/checks/ and meta_kernels/ has a line. Accept changed sentences with
EXPECTTEST_ACCEPT=1, after reading the diff.
"""

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from support.devices import devices
from support.errors import BAD_EPSILONS, BAD_OFFS, GROUPS_3, I32, like, offs, sentences
from support.samples import Sample, make
from support.tensors import BF16

BAD_FORMS = [
    *({name: x} for name in ("alpha", "beta") for x in (1e39, float("-inf"), float("nan"))),
    *({"limit": x} for x in (0.0, -1.5, float("nan"))),
    *({"cubic": x} for x in (-0.5, 1e39, float("nan"))),
]


def test_splits_to_offsets() -> None:
    good = make("splits_to_offsets", GROUPS_3, BF16)
    mistakes = [
        {"m_splits": torch.zeros(2, 2, dtype=I32)},
        {"m_splits": torch.zeros(3)},
        {"m_splits": torch.zeros(3, dtype=torch.uint16)},
        {"m_splits": offs(0)},
        {"m_splits": offs(1025)},
        {"out_dtype": torch.float32},
        {"num_rows": -1},
        {"alignment": 0},
        {"stride": 0},
        {"num_rows": 2**31},
        {"num_rows": 2**30, "stride": 2},
        {"num_rows": 2**62, "stride": 2, "out_dtype": torch.int64},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
splits_to_offsets: m_splits must be 1-D, got 2-D
splits_to_offsets: m_splits must be int32 or int64, got float32
splits_to_offsets: m_splits must be int32 or int64, got uint16
splits_to_offsets: E must be between 1 and 1024, got 0
splits_to_offsets: E must be between 1 and 1024, got 1025
splits_to_offsets: out_dtype must be int32 or int64, got float32
splits_to_offsets: num_rows must not be negative, got -1
splits_to_offsets: alignment must be positive, got 0
splits_to_offsets: stride must be positive, got 0
splits_to_offsets: num_rows * stride does not fit in int32, got 2147483648 * 1
splits_to_offsets: num_rows * stride does not fit in int32, got 1073741824 * 2
splits_to_offsets: num_rows * stride does not fit in int64, got 4611686018427387904 * 2""",
    )


def test_group_quantize() -> None:
    good = make("group_quantize", GROUPS_3, BF16)
    mistakes = [
        {"x": torch.zeros(12)},
        {"x": torch.zeros(12, 144, dtype=torch.float64)},
        {"x": torch.zeros(12, 144, dtype=torch.complex64)},
        {"x": torch.zeros(12, 0)},
        {"x": torch.zeros(12, 72)},
        *BAD_OFFS,
        {"rows": torch.zeros(12, 1, dtype=I32)},
        {"rows": torch.zeros(12)},
        *BAD_EPSILONS,
        {"rowwise": False},
        {"rowwise": False, "bias_grad": True},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_quantize: x must be 2-D, got 1-D
group_quantize: x must be bfloat16, float16 or float32, got float64
group_quantize: x must be bfloat16, float16 or float32, got complex64
group_quantize: K must be a positive multiple of 16, got 0
group_quantize: K must be a positive multiple of 16, got 72
group_quantize: offs must be 1-D, got 2-D
group_quantize: offs must be int32, got int64
group_quantize: E must be between 1 and 1024, got 0
group_quantize: E must be between 1 and 1024, got 1025
group_quantize: rows must be 1-D, got 2-D
group_quantize: rows must be int32 or int64, got float32
group_quantize: amax_epsilon must be finite and not negative, got -0.5
group_quantize: amax_epsilon must be finite and not negative, got inf
group_quantize: amax_epsilon must be finite and not negative, got nan
group_quantize: rowwise or columnwise must be true, got neither
group_quantize: rowwise or columnwise must be true, got neither""",
    )


def gathered_mistakes(good: Sample) -> list[dict[str, Any]]:
    y = good["y"]
    return [
        {"y": y[0]},
        {"y": y.double()},
        {"y": like(y, None, 24)},
        {"rows": good["rows"][0]},
        {"rows": good["rows"].short()},
    ]


def test_topk_experts() -> None:
    good = make("topk_experts", GROUPS_3, BF16)
    scores = good["scores"]
    mistakes = [
        {"scores": scores[0]},
        {"scores": scores.double()},
        {"scores": scores[:, :0]},
        {"scores": torch.zeros(2, 1025)},
        {"k": 0},
        {"k": 41},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
topk_experts: scores must be 2-D, got 1-D
topk_experts: scores must be bfloat16, float16 or float32, got float64
topk_experts: E must be between 1 and 1024, got 0
topk_experts: E must be between 1 and 1024, got 1025
topk_experts: k must be between 1 and E, which is 40, got 0
topk_experts: k must be between 1 and E, which is 40, got 41""",
    )


def test_sort_by_expert() -> None:
    good = make("sort_by_expert", GROUPS_3, BF16)
    experts = good["experts"]
    mistakes = [
        {"experts": experts[0]},
        {"experts": experts.short()},
        {"num_experts": 0},
        {"num_experts": 1025},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
sort_by_expert: experts must be 2-D, got 1-D
sort_by_expert: experts must be int32 or int64, got int16
sort_by_expert: E must be between 1 and 1024, got 0
sort_by_expert: E must be between 1 and 1024, got 1025""",
    )


@pytest.mark.parametrize("device", [*devices("sort_by_expert"), "meta"])
def test_sort_of_too_many_choices(device: str) -> None:
    experts = torch.zeros(1, dtype=torch.int64, device=device).expand(2**16, 2**15)
    with pytest.raises(RuntimeError) as error:
        torch.ops.grouped_linear.sort_by_expert(experts, 8)
    assert str(error.value) == (
        "sort_by_expert: experts must have at most 2147483519 choices, got 2147483648"
    )


def test_gather_sum() -> None:
    good = make("gather_sum", GROUPS_3, BF16)
    weight = good["weight"]
    mistakes = [
        *gathered_mistakes(good),
        {"weight": weight[0]},
        {"weight": weight.bfloat16()},
        {"weight": like(weight, 11, None)},
        {"weight": like(weight, None, 2)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
gather_sum: y must be 2-D, got 1-D
gather_sum: y must be bfloat16, float16 or float32, got float64
gather_sum: H must be a positive multiple of 16, got 24
gather_sum: rows must be 2-D, got 1-D
gather_sum: rows must be int32 or int64, got int16
gather_sum: weight must be 2-D, got 1-D
gather_sum: weight must be float32, got bfloat16
gather_sum: T differs: weight has 11, rows has 12
gather_sum: C differs: weight has 2, rows has 3""",
    )


def test_gather_dot() -> None:
    good = make("gather_dot", GROUPS_3, BF16)
    a = good["a"]
    mistakes = [
        *gathered_mistakes(good),
        {"a": a[0]},
        {"a": a.float()},
        {"a": like(a, 11, None)},
        {"a": like(a, None, 16)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
gather_dot: y must be 2-D, got 1-D
gather_dot: y must be bfloat16, float16 or float32, got float64
gather_dot: H must be a positive multiple of 16, got 24
gather_dot: rows must be 2-D, got 1-D
gather_dot: rows must be int32 or int64, got int16
gather_dot: a must be 2-D, got 1-D
gather_dot: a must be bfloat16, got float32
gather_dot: T differs: a has 11, rows has 12
gather_dot: H differs: a has 16, y has 144""",
    )


def test_grouped_mm_swiglu() -> None:
    good = make("grouped_mm_swiglu", GROUPS_3, BF16, bias=True)
    mistakes = [
        {"a": good["a"][0]},
        {"b": good["b"].float()},
        {"b": like(good["b"], None, None, 16), "bias": None},
        {"bias": good["bias"][:, :-16]},
        {"offs": good["offs"].long()},
        {"limit": 0.0},
        {"alpha": math.inf},
        {"cubic": -1.0},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_mm_swiglu: a must be 2-D, got 1-D
grouped_mm_swiglu: b must be bfloat16, got float32
grouped_mm_swiglu: N / 2 must be a positive multiple of 16, got 8
grouped_mm_swiglu: N differs: bias has 112, b has 128
grouped_mm_swiglu: offs must be int32, got int64
grouped_mm_swiglu: limit must be positive, got 0
grouped_mm_swiglu: alpha must be finite, got inf
grouped_mm_swiglu: cubic must be finite and not negative, got -1""",
    )


def test_grouped_mm_swiglu_grad() -> None:
    good = make("grouped_mm_swiglu_grad", GROUPS_3, BF16)
    gate_up, weight = good["gate_up"], good["weight"]
    mistakes = [
        {"b": good["b"][0]},
        {"gate_up": gate_up[0]},
        {"gate_up": gate_up.float()},
        {"gate_up": like(gate_up, 11, None)},
        {"gate_up": like(gate_up, None, 16)},
        {"weight": weight[:, None]},
        {"weight": weight.bfloat16()},
        {"weight": weight[1:]},
        {"limit": -1.0},
        {"cubic": math.inf},
        {"rows": torch.zeros(5, dtype=torch.int32)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_mm_swiglu_grad: b must be 3-D, got 2-D
grouped_mm_swiglu_grad: gate_up must be 2-D, got 1-D
grouped_mm_swiglu_grad: gate_up must be bfloat16, got float32
grouped_mm_swiglu_grad: T differs: gate_up has 11, a has 12
grouped_mm_swiglu_grad: 2 * N differs: gate_up has 16, b has 128
grouped_mm_swiglu_grad: weight must be 1-D, got 2-D
grouped_mm_swiglu_grad: weight must be float32, got bfloat16
grouped_mm_swiglu_grad: T differs: weight has 11, a has 12
grouped_mm_swiglu_grad: limit must be positive, got -1
grouped_mm_swiglu_grad: cubic must be finite and not negative, got inf
grouped_mm_swiglu_grad: T differs: gate_up has 12, rows has 5""",
    )


def test_scatter_rows() -> None:
    good = make("scatter_rows", GROUPS_3, BF16)
    x = good["x"]
    mistakes = [
        {"x": x[0]},
        {"x": x.double()},
        {"x": like(x, None, 24)},
        {"rows": good["rows"][0]},
        {"rows": good["rows"].short()},
        {"x": like(x, 11, None)},
        {"num_rows": -1},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
scatter_rows: x must be 2-D, got 1-D
scatter_rows: x must be bfloat16, float16 or float32, got float64
scatter_rows: H must be a positive multiple of 16, got 24
scatter_rows: rows must be 2-D, got 1-D
scatter_rows: rows must be int32 or int64, got int16
scatter_rows: T differs: rows has 12, x has 11
scatter_rows: num_rows must not be negative, got -1""",
    )


def swiglu_mistakes(good: Sample) -> list[dict[str, Any]]:
    gate_up = good["gate_up"]
    return [
        {"gate_up": torch.zeros(12)},
        {"gate_up": gate_up.double()},
        {"gate_up": like(gate_up, None, 33)},
        {"gate_up": like(gate_up, None, 48)},
        *BAD_OFFS,
        *BAD_FORMS,
    ]


def swiglu_grad_mistakes(good: Sample) -> list[dict[str, Any]]:
    dh, gate_up, weight = good["dh"], good["gate_up"], good["weight"]
    return [
        {"dh": torch.zeros(12)},
        {"gate_up": torch.zeros(12)},
        {"dh": dh.double()},
        {"gate_up": gate_up.float()},
        {"gate_up": like(gate_up, 11, None)},
        {"dh": like(dh, None, 24)},
        {"dh": like(dh, None, 128)},
        {"weight": weight[:, None]},
        {"weight": weight.to(BF16)},
        {"weight": like(weight, 11)},
        *BAD_OFFS,
        *BAD_FORMS,
    ]


def test_swiglu() -> None:
    good = make("swiglu", GROUPS_3, BF16)
    assert_expected_inline(
        sentences(good, swiglu_mistakes(good)),
        """\
swiglu: gate_up must be 2-D, got 1-D
swiglu: gate_up must be bfloat16, float16 or float32, got float64
swiglu: gate_up must have an even number of columns, got 33
swiglu: K must be a positive multiple of 16, got 24
swiglu: offs must be 1-D, got 2-D
swiglu: offs must be int32, got int64
swiglu: E must be between 1 and 1024, got 0
swiglu: E must be between 1 and 1024, got 1025
swiglu: alpha must be finite, got 1e+39
swiglu: alpha must be finite, got -inf
swiglu: alpha must be finite, got nan
swiglu: beta must be finite, got 1e+39
swiglu: beta must be finite, got -inf
swiglu: beta must be finite, got nan
swiglu: limit must be positive, got 0
swiglu: limit must be positive, got -1.5
swiglu: limit must be positive, got nan
swiglu: cubic must be finite and not negative, got -0.5
swiglu: cubic must be finite and not negative, got 1e+39
swiglu: cubic must be finite and not negative, got nan""",
    )


def test_swiglu_grad() -> None:
    good = make("swiglu_grad", GROUPS_3, BF16)
    assert_expected_inline(
        sentences(good, swiglu_grad_mistakes(good)),
        """\
swiglu_grad: dh must be 2-D, got 1-D
swiglu_grad: gate_up must be 2-D, got 1-D
swiglu_grad: dh must be bfloat16, float16 or float32, got float64
swiglu_grad: gate_up must be bfloat16, got float32
swiglu_grad: T differs: dh has 12, gate_up has 11
swiglu_grad: K must be a positive multiple of 16, got 24
swiglu_grad: 2 * K differs: dh has 256, gate_up has 288
swiglu_grad: weight must be 1-D, got 2-D
swiglu_grad: weight must be float32, got bfloat16
swiglu_grad: T differs: weight has 11, dh has 12
swiglu_grad: offs must be 1-D, got 2-D
swiglu_grad: offs must be int32, got int64
swiglu_grad: E must be between 1 and 1024, got 0
swiglu_grad: E must be between 1 and 1024, got 1025
swiglu_grad: alpha must be finite, got 1e+39
swiglu_grad: alpha must be finite, got -inf
swiglu_grad: alpha must be finite, got nan
swiglu_grad: beta must be finite, got 1e+39
swiglu_grad: beta must be finite, got -inf
swiglu_grad: beta must be finite, got nan
swiglu_grad: limit must be positive, got 0
swiglu_grad: limit must be positive, got -1.5
swiglu_grad: limit must be positive, got nan
swiglu_grad: cubic must be finite and not negative, got -0.5
swiglu_grad: cubic must be finite and not negative, got 1e+39
swiglu_grad: cubic must be finite and not negative, got nan""",
    )


def test_group_quantize_swiglu() -> None:
    good = make("group_quantize_swiglu", GROUPS_3, BF16)
    mistakes = [*swiglu_mistakes(good), *BAD_EPSILONS, {"rowwise": False}]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_quantize_swiglu: gate_up must be 2-D, got 1-D
group_quantize_swiglu: gate_up must be bfloat16, float16 or float32, got float64
group_quantize_swiglu: gate_up must have an even number of columns, got 33
group_quantize_swiglu: K must be a positive multiple of 16, got 24
group_quantize_swiglu: offs must be 1-D, got 2-D
group_quantize_swiglu: offs must be int32, got int64
group_quantize_swiglu: E must be between 1 and 1024, got 0
group_quantize_swiglu: E must be between 1 and 1024, got 1025
group_quantize_swiglu: alpha must be finite, got 1e+39
group_quantize_swiglu: alpha must be finite, got -inf
group_quantize_swiglu: alpha must be finite, got nan
group_quantize_swiglu: beta must be finite, got 1e+39
group_quantize_swiglu: beta must be finite, got -inf
group_quantize_swiglu: beta must be finite, got nan
group_quantize_swiglu: limit must be positive, got 0
group_quantize_swiglu: limit must be positive, got -1.5
group_quantize_swiglu: limit must be positive, got nan
group_quantize_swiglu: cubic must be finite and not negative, got -0.5
group_quantize_swiglu: cubic must be finite and not negative, got 1e+39
group_quantize_swiglu: cubic must be finite and not negative, got nan
group_quantize_swiglu: amax_epsilon must be finite and not negative, got -0.5
group_quantize_swiglu: amax_epsilon must be finite and not negative, got inf
group_quantize_swiglu: amax_epsilon must be finite and not negative, got nan
group_quantize_swiglu: rowwise or columnwise must be true, got neither""",
    )


def test_group_quantize_swiglu_grad() -> None:
    good = make("group_quantize_swiglu_grad", GROUPS_3, BF16)
    mistakes = [*swiglu_grad_mistakes(good), *BAD_EPSILONS, {"rowwise": False}]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_quantize_swiglu_grad: dh must be 2-D, got 1-D
group_quantize_swiglu_grad: gate_up must be 2-D, got 1-D
group_quantize_swiglu_grad: dh must be bfloat16, float16 or float32, got float64
group_quantize_swiglu_grad: gate_up must be bfloat16, got float32
group_quantize_swiglu_grad: T differs: dh has 12, gate_up has 11
group_quantize_swiglu_grad: K must be a positive multiple of 16, got 24
group_quantize_swiglu_grad: 2 * K differs: dh has 256, gate_up has 288
group_quantize_swiglu_grad: weight must be 1-D, got 2-D
group_quantize_swiglu_grad: weight must be float32, got bfloat16
group_quantize_swiglu_grad: T differs: weight has 11, dh has 12
group_quantize_swiglu_grad: offs must be 1-D, got 2-D
group_quantize_swiglu_grad: offs must be int32, got int64
group_quantize_swiglu_grad: E must be between 1 and 1024, got 0
group_quantize_swiglu_grad: E must be between 1 and 1024, got 1025
group_quantize_swiglu_grad: alpha must be finite, got 1e+39
group_quantize_swiglu_grad: alpha must be finite, got -inf
group_quantize_swiglu_grad: alpha must be finite, got nan
group_quantize_swiglu_grad: beta must be finite, got 1e+39
group_quantize_swiglu_grad: beta must be finite, got -inf
group_quantize_swiglu_grad: beta must be finite, got nan
group_quantize_swiglu_grad: limit must be positive, got 0
group_quantize_swiglu_grad: limit must be positive, got -1.5
group_quantize_swiglu_grad: limit must be positive, got nan
group_quantize_swiglu_grad: cubic must be finite and not negative, got -0.5
group_quantize_swiglu_grad: cubic must be finite and not negative, got 1e+39
group_quantize_swiglu_grad: cubic must be finite and not negative, got nan
group_quantize_swiglu_grad: amax_epsilon must be finite and not negative, got -0.5
group_quantize_swiglu_grad: amax_epsilon must be finite and not negative, got inf
group_quantize_swiglu_grad: amax_epsilon must be finite and not negative, got nan
group_quantize_swiglu_grad: rowwise or columnwise must be true, got neither""",
    )


def test_group_dequantize() -> None:
    good = make("group_dequantize", GROUPS_3, BF16)
    q, scale = good["q"], good["scale"]
    mistakes = [
        {"q": like(q, 12, 144).view(12, 12, 12)},
        {"q": torch.zeros(12, 144)},
        {"q": q.view(torch.float8_e5m2)},
        {"q": like(q, None, 72)},
        {"scale": torch.zeros(2)},
        {"scale": scale.double()},
        {"scale": like(scale, 1, None)},
        {"scale": like(scale, None, 8)},
        *BAD_OFFS,
        {"out_dtype": torch.float64},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_dequantize: q must be 2-D, got 3-D
group_dequantize: q must be float8_e4m3fn, got float32
group_dequantize: q must be float8_e4m3fn, got float8_e5m2
group_dequantize: K must be a positive multiple of 16, got 72
group_dequantize: scale must be 2-D, got 1-D
group_dequantize: scale must be float32, got float64
group_dequantize: the number of K blocks differs: q has 2, scale has 1
group_dequantize: the number of scale rows differs: q has 12, scale has 8
group_dequantize: offs must be 1-D, got 2-D
group_dequantize: offs must be int32, got int64
group_dequantize: E must be between 1 and 1024, got 0
group_dequantize: E must be between 1 and 1024, got 1025
group_dequantize: out_dtype must be bfloat16, float16 or float32, got float64""",
    )


def test_group_dequantize_t() -> None:
    good = make("group_dequantize_t", GROUPS_3, BF16)
    q_t, scale_t = good["q_t"], good["scale_t"]
    mistakes = [
        {"q_t": like(q_t, None, None, None).flatten(1)},
        {"q_t": q_t.view(torch.uint8)},
        {"q_t": like(q_t, None, None, 64)},
        {"q_t": like(q_t, None, 72, None)},
        {"scale_t": torch.zeros(3)},
        {"scale_t": scale_t.bfloat16()},
        {"scale_t": like(scale_t, 2, None)},
        {"scale_t": like(scale_t, None, 128)},
        *BAD_OFFS,
        {"num_rows": -1},
        {"num_rows": 512},
        {"out_dtype": torch.int32},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
group_dequantize_t: q_t must be 3-D, got 2-D
group_dequantize_t: q_t must be float8_e4m3fn, got uint8
group_dequantize_t: q_t must hold blocks of 128 rows, got 64
group_dequantize_t: K must be a positive multiple of 16, got 72
group_dequantize_t: scale_t must be 2-D, got 1-D
group_dequantize_t: scale_t must be float32, got bfloat16
group_dequantize_t: the number of blocks differs: q_t has 3, scale_t has 2
group_dequantize_t: K differs: q_t has 144, scale_t has 128
group_dequantize_t: offs must be 1-D, got 2-D
group_dequantize_t: offs must be int32, got int64
group_dequantize_t: E must be between 1 and 1024, got 0
group_dequantize_t: E must be between 1 and 1024, got 1025
group_dequantize_t: num_rows must not be negative, got -1
group_dequantize_t: the number of blocks differs: q_t has 3, num_rows has 6
group_dequantize_t: out_dtype must be bfloat16, float16 or float32, got int32""",
    )


def test_grouped_bias_grad() -> None:
    good = make("grouped_bias_grad", GROUPS_3, BF16)
    mistakes = [
        {"dy": torch.zeros(3, 2, 32)},
        {"dy": torch.zeros(12, 32, dtype=torch.int8)},
        {"dy": torch.zeros(12, 24)},
        *BAD_OFFS,
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_bias_grad: dy must be 2-D, got 3-D
grouped_bias_grad: dy must be bfloat16, float16 or float32, got int8
grouped_bias_grad: N must be a positive multiple of 16, got 24
grouped_bias_grad: offs must be 1-D, got 2-D
grouped_bias_grad: offs must be int32, got int64
grouped_bias_grad: E must be between 1 and 1024, got 0
grouped_bias_grad: E must be between 1 and 1024, got 1025""",
    )


def test_quantize_weight() -> None:
    good = make("quantize_weight", GROUPS_3, BF16)
    w = good["w"]
    mistakes = [
        {"w": torch.zeros(32, 144)},
        {"w": w.double()},
        {"w": like(w, 0, None, None)},
        {"w": like(w, 1025, 16, 16)},
        {"w": like(w, None, 24, None)},
        {"w": like(w, None, None, 8)},
        *BAD_EPSILONS,
        {"rowwise": False, "columnwise": False},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
quantize_weight: w must be 3-D, got 2-D
quantize_weight: w must be bfloat16, float16 or float32, got float64
quantize_weight: E must be between 1 and 1024, got 0
quantize_weight: E must be between 1 and 1024, got 1025
quantize_weight: N must be a positive multiple of 16, got 24
quantize_weight: K must be a positive multiple of 16, got 8
quantize_weight: amax_epsilon must be finite and not negative, got -0.5
quantize_weight: amax_epsilon must be finite and not negative, got inf
quantize_weight: amax_epsilon must be finite and not negative, got nan
quantize_weight: rowwise or columnwise must be true, got neither""",
    )


def bias_mistakes(dtype: torch.dtype) -> list[dict[str, Any]]:
    return [
        {"bias": torch.zeros(32, dtype=dtype)},
        {"bias": torch.zeros(3, 32, dtype=torch.float64)},
        {"bias": torch.zeros(2, 32, dtype=dtype)},
        {"bias": torch.zeros(3, 16, dtype=dtype)},
    ]


def test_grouped_mm() -> None:
    good = make("grouped_mm", GROUPS_3, BF16)
    a, b = good["a"], good["b"]
    mistakes = [
        {"a": torch.zeros(12)},
        {"b": torch.zeros(144, 32)},
        {"a": a.double()},
        {"b": b.float()},
        {"b": like(b, None, 128, None)},
        {"a": like(a, None, 24), "b": like(b, None, 24, None)},
        {"b": like(b, None, None, 40)},
        *BAD_OFFS,
        {"offs": offs(2)},
        {"out_dtype": torch.float64},
        {"bias": torch.zeros(3, 32), "out_dtype": BF16},
        *bias_mistakes(BF16),
        {"rows": torch.zeros(5)},
        {"rows": torch.zeros(5, 2, dtype=torch.int32)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_mm: a must be 2-D, got 1-D
grouped_mm: b must be 3-D, got 2-D
grouped_mm: a must be bfloat16, float16 or float32, got float64
grouped_mm: b must be bfloat16, got float32
grouped_mm: K differs: a has 144, b has 128
grouped_mm: K must be a positive multiple of 16, got 24
grouped_mm: N must be a positive multiple of 16, got 40
grouped_mm: offs must be 1-D, got 2-D
grouped_mm: offs must be int32, got int64
grouped_mm: E must be between 1 and 1024, got 0
grouped_mm: E must be between 1 and 1024, got 1025
grouped_mm: E differs: b has 3, offs has 2
grouped_mm: out_dtype must be bfloat16, float16 or float32, got float64
grouped_mm: bias must be bfloat16, got float32
grouped_mm: bias must be 2-D, got 1-D
grouped_mm: bias must be bfloat16, got float64
grouped_mm: E differs: bias has 2, offs has 3
grouped_mm: N differs: bias has 16, b has 32
grouped_mm: rows must be int32 or int64, got float32
grouped_mm: rows must be 1-D, got 2-D""",
    )


def test_grouped_scaled_mm() -> None:
    good = make("grouped_scaled_mm", GROUPS_3, BF16)
    a, b, scale_a, scale_b = (good[name] for name in ("a", "b", "scale_a", "scale_b"))
    mistakes = [
        {"a": like(a, None, None).view(-1)},
        {"a": a.view(torch.uint8)},
        {"a": like(a, None, 24)},
        {"scale_a": scale_a[0]},
        {"scale_a": scale_a.half()},
        {"scale_a": like(scale_a, 3, None)},
        {"scale_a": like(scale_a, None, 16)},
        {"b": b[0]},
        {"b": b.bfloat16()},
        {"b": like(b, None, 128, None)},
        {"b": like(b, None, None, 40)},
        {"scale_b": scale_b[0]},
        {"scale_b": scale_b.double()},
        {"scale_b": like(scale_b, 2, None, None)},
        {"scale_b": like(scale_b, None, None, 2)},
        {"scale_b": like(scale_b, None, 1, None)},
        *BAD_OFFS,
        {"offs": offs(4)},
        {"out_dtype": torch.float8_e4m3fn},
        *bias_mistakes(BF16),
        {"rows": torch.zeros(5)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_scaled_mm: a must be 2-D, got 1-D
grouped_scaled_mm: a must be float8_e4m3fn, got uint8
grouped_scaled_mm: K must be a positive multiple of 16, got 24
grouped_scaled_mm: E differs: scale_a has 12, offs has 3
grouped_scaled_mm: scale_a must be float32, got float16
grouped_scaled_mm: the number of K blocks differs: a has 2, scale_a has 3
grouped_scaled_mm: the number of scale rows differs: a has 12, scale_a has 16
grouped_scaled_mm: b must be 3-D, got 2-D
grouped_scaled_mm: b must be float8_e4m3fn, got bfloat16
grouped_scaled_mm: K differs: a has 144, b has 128
grouped_scaled_mm: N must be a positive multiple of 16, got 40
grouped_scaled_mm: scale_b must be 3-D, got 2-D
grouped_scaled_mm: scale_b must be float32, got float64
grouped_scaled_mm: E differs: b has 3, scale_b has 2
grouped_scaled_mm: the number of N blocks differs: b has 1, scale_b has 2
grouped_scaled_mm: the number of K blocks differs: b has 2, scale_b has 1
grouped_scaled_mm: offs must be 1-D, got 2-D
grouped_scaled_mm: offs must be int32, got int64
grouped_scaled_mm: E must be between 1 and 1024, got 0
grouped_scaled_mm: E must be between 1 and 1024, got 1025
grouped_scaled_mm: E differs: b has 3, offs has 4
grouped_scaled_mm: out_dtype must be bfloat16, float16 or float32, got float8_e4m3fn
grouped_scaled_mm: bias must be 2-D, got 1-D
grouped_scaled_mm: bias must be bfloat16, got float64
grouped_scaled_mm: E differs: bias has 2, offs has 3
grouped_scaled_mm: N differs: bias has 16, b has 32
grouped_scaled_mm: rows must be int32 or int64, got float32""",
    )


def wgrad_mistakes(good: Sample) -> list[dict[str, Any]]:
    dy, x = good["dy"], good["x"]
    return [
        {"dy": torch.zeros(12)},
        {"x": torch.zeros(2, 6, 144)},
        {"dy": dy.double()},
        {"x": x.float()},
        {"x": like(x, 11, None)},
        {"dy": like(dy, None, 24)},
        {"x": like(x, None, 24)},
        *BAD_OFFS,
        {"dy_rows": torch.zeros(5)},
        {"x_rows": torch.zeros(5, 2, dtype=torch.int32)},
        {"x_rows": torch.zeros(5, dtype=torch.int32)},
        {"dy_rows": torch.zeros(12, dtype=torch.int32), "x_rows": torch.zeros(12).int()},
    ]


def scaled_wgrad_mistakes(good: Sample) -> list[dict[str, Any]]:
    dy_t, x_t = good["dy_t"], good["x_t"]
    scale_dy_t, scale_x_t = good["scale_dy_t"], good["scale_x_t"]
    return [
        {"dy_t": dy_t[0]},
        {"dy_t": dy_t.float()},
        {"dy_t": like(dy_t, None, None, 64)},
        {"dy_t": like(dy_t, None, 24, None)},
        {"scale_dy_t": scale_dy_t[0]},
        {"scale_dy_t": scale_dy_t.double()},
        {"scale_dy_t": like(scale_dy_t, 1, None)},
        {"scale_dy_t": like(scale_dy_t, None, 16)},
        {"x_t": x_t[0]},
        {"x_t": x_t.float()},
        {"x_t": like(x_t, None, None, 256)},
        {"x_t": like(x_t, None, 40, None)},
        {"scale_x_t": scale_x_t[0]},
        {"scale_x_t": scale_x_t.double()},
        {"scale_x_t": like(scale_x_t, 1, None)},
        {"scale_x_t": like(scale_x_t, None, 16)},
        {"x_t": like(x_t, 2, None, None), "scale_x_t": like(scale_x_t, 2, None)},
        *BAD_OFFS,
    ]


def main_grad_mistakes(good: Sample) -> list[dict[str, Any]]:
    main_grad = good["main_grad"]
    return [
        {"main_grad": main_grad[0]},
        {"main_grad": main_grad.half()},
        {"main_grad": like(main_grad, 2, None, None)},
        {"main_grad": like(main_grad, None, 16, None)},
        {"main_grad": like(main_grad, None, None, 128)},
        {"main_grad": main_grad.transpose(1, 2).contiguous().transpose(1, 2)},
        {"overwrite": torch.tensor([True])},
        {"overwrite": torch.tensor(1)},
    ]


def test_grouped_mm_wgrad() -> None:
    good = make("grouped_mm_wgrad", GROUPS_3, BF16)
    mistakes = [*wgrad_mistakes(good), {"out_dtype": torch.float64}]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_mm_wgrad: dy must be 2-D, got 1-D
grouped_mm_wgrad: x must be 2-D, got 3-D
grouped_mm_wgrad: dy must be bfloat16, float16 or float32, got float64
grouped_mm_wgrad: x must be bfloat16, got float32
grouped_mm_wgrad: T differs: dy has 12, x has 11
grouped_mm_wgrad: N must be a positive multiple of 16, got 24
grouped_mm_wgrad: K must be a positive multiple of 16, got 24
grouped_mm_wgrad: offs must be 1-D, got 2-D
grouped_mm_wgrad: offs must be int32, got int64
grouped_mm_wgrad: E must be between 1 and 1024, got 0
grouped_mm_wgrad: E must be between 1 and 1024, got 1025
grouped_mm_wgrad: dy_rows must be int32 or int64, got float32
grouped_mm_wgrad: x_rows must be 1-D, got 2-D
grouped_mm_wgrad: T differs: dy has 12, x_rows has 5
grouped_mm_wgrad: give dy_rows or x_rows, got both
grouped_mm_wgrad: out_dtype must be bfloat16, float16 or float32, got float64""",
    )


def test_grouped_mm_wgrad_in_place() -> None:
    good = make("grouped_mm_wgrad_", GROUPS_3, BF16)
    mistakes = [*wgrad_mistakes(good), *main_grad_mistakes(good)]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_mm_wgrad_: dy must be 2-D, got 1-D
grouped_mm_wgrad_: x must be 2-D, got 3-D
grouped_mm_wgrad_: dy must be bfloat16, float16 or float32, got float64
grouped_mm_wgrad_: x must be bfloat16, got float32
grouped_mm_wgrad_: T differs: dy has 12, x has 11
grouped_mm_wgrad_: N must be a positive multiple of 16, got 24
grouped_mm_wgrad_: K must be a positive multiple of 16, got 24
grouped_mm_wgrad_: offs must be 1-D, got 2-D
grouped_mm_wgrad_: offs must be int32, got int64
grouped_mm_wgrad_: E must be between 1 and 1024, got 0
grouped_mm_wgrad_: E must be between 1 and 1024, got 1025
grouped_mm_wgrad_: dy_rows must be int32 or int64, got float32
grouped_mm_wgrad_: x_rows must be 1-D, got 2-D
grouped_mm_wgrad_: T differs: dy has 12, x_rows has 5
grouped_mm_wgrad_: give dy_rows or x_rows, got both
grouped_mm_wgrad_: main_grad must be 3-D, got 2-D
grouped_mm_wgrad_: main_grad must be float32 or bfloat16, got float16
grouped_mm_wgrad_: E differs: main_grad has 2, offs has 3
grouped_mm_wgrad_: N differs: main_grad has 16, dy has 32
grouped_mm_wgrad_: K differs: main_grad has 128, x has 144
grouped_mm_wgrad_: main_grad must be contiguous, got strides 4608, 1, 32
grouped_mm_wgrad_: overwrite must be 0-D, got 1-D
grouped_mm_wgrad_: overwrite must be bool, got int64""",
    )


def test_grouped_scaled_mm_wgrad() -> None:
    good = make("grouped_scaled_mm_wgrad", GROUPS_3, BF16)
    mistakes = [*scaled_wgrad_mistakes(good), {"out_dtype": torch.float64}]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_scaled_mm_wgrad: dy_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad: dy_t must be float8_e4m3fn, got float32
grouped_scaled_mm_wgrad: dy_t must hold blocks of 128 rows, got 64
grouped_scaled_mm_wgrad: N must be a positive multiple of 16, got 24
grouped_scaled_mm_wgrad: E differs: scale_dy_t has 32, offs has 3
grouped_scaled_mm_wgrad: scale_dy_t must be float32, got float64
grouped_scaled_mm_wgrad: the number of blocks differs: dy_t has 3, scale_dy_t has 1
grouped_scaled_mm_wgrad: N differs: dy_t has 32, scale_dy_t has 16
grouped_scaled_mm_wgrad: x_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad: x_t must be float8_e4m3fn, got float32
grouped_scaled_mm_wgrad: x_t must hold blocks of 128 rows, got 256
grouped_scaled_mm_wgrad: K must be a positive multiple of 16, got 40
grouped_scaled_mm_wgrad: scale_x_t must be 2-D, got 1-D
grouped_scaled_mm_wgrad: scale_x_t must be float32, got float64
grouped_scaled_mm_wgrad: the number of blocks differs: x_t has 3, scale_x_t has 1
grouped_scaled_mm_wgrad: K differs: x_t has 144, scale_x_t has 16
grouped_scaled_mm_wgrad: the number of blocks differs: dy_t has 3, x_t has 2
grouped_scaled_mm_wgrad: offs must be 1-D, got 2-D
grouped_scaled_mm_wgrad: offs must be int32, got int64
grouped_scaled_mm_wgrad: E must be between 1 and 1024, got 0
grouped_scaled_mm_wgrad: E must be between 1 and 1024, got 1025
grouped_scaled_mm_wgrad: out_dtype must be bfloat16, float16 or float32, got float64""",
    )


def test_grouped_scaled_mm_wgrad_in_place() -> None:
    good = make("grouped_scaled_mm_wgrad_", GROUPS_3, BF16)
    mistakes = [*scaled_wgrad_mistakes(good), *main_grad_mistakes(good)]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_scaled_mm_wgrad_: dy_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad_: dy_t must be float8_e4m3fn, got float32
grouped_scaled_mm_wgrad_: dy_t must hold blocks of 128 rows, got 64
grouped_scaled_mm_wgrad_: N must be a positive multiple of 16, got 24
grouped_scaled_mm_wgrad_: E differs: scale_dy_t has 32, offs has 3
grouped_scaled_mm_wgrad_: scale_dy_t must be float32, got float64
grouped_scaled_mm_wgrad_: the number of blocks differs: dy_t has 3, scale_dy_t has 1
grouped_scaled_mm_wgrad_: N differs: dy_t has 32, scale_dy_t has 16
grouped_scaled_mm_wgrad_: x_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad_: x_t must be float8_e4m3fn, got float32
grouped_scaled_mm_wgrad_: x_t must hold blocks of 128 rows, got 256
grouped_scaled_mm_wgrad_: K must be a positive multiple of 16, got 40
grouped_scaled_mm_wgrad_: scale_x_t must be 2-D, got 1-D
grouped_scaled_mm_wgrad_: scale_x_t must be float32, got float64
grouped_scaled_mm_wgrad_: the number of blocks differs: x_t has 3, scale_x_t has 1
grouped_scaled_mm_wgrad_: K differs: x_t has 144, scale_x_t has 16
grouped_scaled_mm_wgrad_: the number of blocks differs: dy_t has 3, x_t has 2
grouped_scaled_mm_wgrad_: offs must be 1-D, got 2-D
grouped_scaled_mm_wgrad_: offs must be int32, got int64
grouped_scaled_mm_wgrad_: E must be between 1 and 1024, got 0
grouped_scaled_mm_wgrad_: E must be between 1 and 1024, got 1025
grouped_scaled_mm_wgrad_: main_grad must be 3-D, got 2-D
grouped_scaled_mm_wgrad_: main_grad must be float32 or bfloat16, got float16
grouped_scaled_mm_wgrad_: E differs: main_grad has 2, offs has 3
grouped_scaled_mm_wgrad_: N differs: main_grad has 16, dy has 32
grouped_scaled_mm_wgrad_: K differs: main_grad has 128, x has 144
grouped_scaled_mm_wgrad_: main_grad must be contiguous, got strides 4608, 1, 32
grouped_scaled_mm_wgrad_: overwrite must be 0-D, got 1-D
grouped_scaled_mm_wgrad_: overwrite must be bool, got int64""",
    )


def test_block_scaled_linear() -> None:
    """Its own rules; those of the ops inside have their names."""
    good = make("block_scaled_linear", GROUPS_3, BF16)
    mistakes = [
        {"x": torch.zeros(144)},
        {"m_splits": torch.zeros(3)},
        {"x": good["x"].double()},
        {"w": good["w"][0]},
        {"w": good["w"][:2]},
        {"w": like(good["w"], None, None, 160)},
        {"bias": torch.zeros(3, 32)},
        BAD_EPSILONS[0],
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
block_scaled_linear: x must be 2-D, got 1-D
splits_to_offsets: m_splits must be int32 or int64, got float32
group_quantize: x must be bfloat16, float16 or float32, got float64
quantize_weight: w must be 3-D, got 2-D
grouped_scaled_mm: E differs: b has 2, offs has 3
grouped_scaled_mm: K differs: a has 144, b has 160
grouped_scaled_mm: bias must be bfloat16, got float32
group_quantize: amax_epsilon must be finite and not negative, got -0.5""",
    )


def test_block_scaled_linear_grad() -> None:
    """Its own rules; those of the ops inside have their names."""
    good = make("block_scaled_linear_grad", GROUPS_3, BF16)
    mistakes = [
        {"scale_x_t": None},
        {"scale_w": None},
        {"scale_w": good["scale_w"][0]},
        {"x_t": None, "w_t": None},
        {"dy": good["dy"].double()},
        {"offs": good["offs"].long()},
        {"w_t": like(good["w_t"], None, None, 48)},
        {"x_t": good["x_t"].float()},
        {"out_dtype": torch.float64},
        BAD_EPSILONS[0],
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
block_scaled_linear_grad: x_t needs scale_x_t, got none
block_scaled_linear_grad: w_t needs scale_w, got none
block_scaled_linear_grad: scale_w must be 3-D, got 2-D
group_quantize: rowwise or columnwise must be true, got neither
group_quantize: x must be bfloat16, float16 or float32, got float64
group_quantize: offs must be int32, got int64
grouped_scaled_mm: K differs: a has 32, b has 48
grouped_scaled_mm_wgrad: x_t must be float8_e4m3fn, got float32
grouped_scaled_mm_wgrad: out_dtype must be bfloat16, float16 or float32, got float64
group_quantize: amax_epsilon must be finite and not negative, got -0.5""",
    )
