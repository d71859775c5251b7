# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs that go on with SwiGLU or its gradient, beside the two ops that each replaces.

They have the bits of these but on Hopper, where the sigmoid in an epilogue is approximate.

T rows, E groups, K features of a, F features of h.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.cases import cases
from support.compare import assert_same_bits
from support.groups import SWAPPED, Groups
from support.op_info import Sample
from support.samples import make, variant_of
from support.tensors import BF16
from support.variants import FORMS

FORM = ("alpha", "beta", "limit", "interleaved", "cubic")


def one_after_the_other(sample: Sample, device: str) -> list[Tensor]:
    form = {name: sample.get(name) for name in FORM}
    a, b, offs, rows = (sample.get(name) for name in ("a", "b", "offs", "rows"))
    gemm = {"a": a, "b": b, "offs": offs, "rows": rows}
    if sample.op == "grouped_mm_swiglu":
        (gate_up,) = Sample("grouped_mm", gemm | {"bias": sample.get("bias")}).results(device)
        (h,) = Sample("swiglu", {"gate_up": gate_up, "offs": offs} | form).results(device)
        return [gate_up if sample.get("keep_gate_up") else gate_up.new_empty(0), h]
    (dh,) = Sample("grouped_mm", gemm).results(device)
    others = {"gate_up": sample["gate_up"], "weight": sample["weight"], "offs": offs}
    return Sample("swiglu_grad", {"dh": dh} | others | form).results(device)


def normal(sample: Sample) -> Sample:
    """With normal numbers as operands, whose sums are not exact; NaN stays."""
    for operand in (sample["a"], sample["b"]):
        drawn = torch.randn(operand.shape).to(operand.dtype)
        operand.copy_(torch.where(operand.isnan(), operand, drawn))
    return sample


def assert_neighbours(actual: Tensor, expected: Tensor) -> None:
    """Few numbers differ, and by one rounding.

    But for numbers near 0: a gradient's slope has more error there, and sigmoids below 2^-119 are
    0.
    """
    finite = expected[expected.isfinite()].float().abs()
    near_zero = 2**-16 * finite.max().item() if finite.numel() else 0
    rtol = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=near_zero, equal_nan=True)
    differs = (actual.float() - expected.float()).abs() > near_zero
    assert differs.sum() <= max(8, actual.numel() // 1000)


def check(sample: Sample, device: str) -> None:
    actual, expected = sample.results(device), one_after_the_other(sample, device)
    for t, e in zip(actual[:2], expected[:2], strict=True):
        if device == "cpu":
            assert_same_bits(t, e)
        else:
            assert_neighbours(t, e)
    if sample.op == "grouped_mm_swiglu_grad":
        # d_weight: F products of any order of additions, each rounded to float32.
        atol = 1e-5 * expected[2].abs().max().item() if expected[2].numel() else 0
        torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("op", "groups", "variant", "dtype"), cases("grouped_mm_swiglu", "grouped_mm_swiglu_grad")
)
def test_results_of_two_ops(
    op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str
) -> None:
    check(normal(variant_of(op, groups, variant, dtype)), device)


@pytest.mark.parametrize("op", ["grouped_mm_swiglu", "grouped_mm_swiglu_grad"])
@pytest.mark.parametrize(
    "options", [{}, {"gathers": "rows"}, {"transposed_b": True, **FORMS["all_of_it"]}]
)
def test_many_tiles(options: dict[str, Any], op: str, device: str) -> None:
    """Wide and narrow tiles, groups that end anywhere, pairs of tiles and odd ones, a tail."""
    many = (192, 768) if device == "cuda" else (64,)
    for m_splits, T in (((700, 0, 1, 300, 128, 64, 257, 0, 513), 2100), ((1, 0, 2), 4)):
        for F in many:
            sample = make(op, Groups(m_splits, T, K=272), BF16, F=F, **options)
            check(normal(sample), device)


@pytest.mark.parametrize("op", ["grouped_mm_swiglu", "grouped_mm_swiglu_grad"])
def test_swapped_operands(op: str, device: str) -> None:
    """On Hopper. The first group alone is computed without, to the same bits."""
    sample = normal(make(op, SWAPPED, BF16, F=1280))
    check(sample, device)
    if device == "cuda":
        count = SWAPPED.m_splits[0]
        first = {n: sample[n][:count] for n in ("a", "gate_up", "weight") if n in sample.arguments}
        alone = sample.but(offs=torch.full_like(sample["offs"], count), **first)
        for t, e in zip(alone.results(device), sample.results(device), strict=True):
            assert_same_bits(t, e[:count])


def test_a_row_does_not_depend_on_others(device: str) -> None:
    """Alone it is computed in narrow tiles, among many in wide ones."""
    many = normal(make("grouped_mm_swiglu_grad", Groups((900, 3000), 3900, K=64), BF16, F=320))
    offs = torch.tensor([1, 1]).int()
    first = {name: many[name][:1] for name in ("a", "gate_up", "weight")}
    for t, e in zip(
        many.but(offs=offs, **first).results(device), many.results(device), strict=True
    ):
        assert_same_bits(t, e[:1])
