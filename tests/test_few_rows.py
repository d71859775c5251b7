# SPDX-License-Identifier: Apache-2.0
"""Hopper's GEMMs of groups with few rows have the bits of those of many rows.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_linear import SwiGLU, ops
from support.check import poison_freed_memory
from support.compare import assert_same_bits
from support.devices import needs_gpu
from support.tensors import BF16, FP32
from support.tolerances import tolerance

pytestmark = needs_gpu

#: Rows of each group, N, K, and rows past the last group. Tiles have 32 rows and 64 columns, of
#: MXFP4 64 and 128 in dgrad. A group with more rows has several. K of 208, N of 272 fill no tile.
#: Products in BF16 and FP8 compute "halves" of tiles where there are few, as in most of these.
SHAPES = {
    "one_token": ([1] * 8, 256, 512, 0),
    "some": ([0, 1, 3, 0, 8, 17, 33, 2], 1536, 2048, 5),
    "all_in_one": ([0] * 15 + [200], 256, 768, 0),
    "many_groups": ([i % 7 if i % 3 else 0 for i in range(128)], 384, 768, 9),
    "halves": ([2, 0, 35, 0, 0, 1], 80, 256, 3),
    "odd": ([5] * 32, 272, 208, 1),
    "two_blocks": ([16, 32, 1, 0, 0, 31, 15, 4], 2880, 2880, 2),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
Products = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]


def check(shape: str, products: Products, *, dtype: torch.dtype = BF16) -> None:
    """Compare products of few rows, in order and gathered, with those beside rows of no group.

    ``products(a, rows)`` are of the rows of a, or of a[rows].
    """
    sizes, _, K, tail = SHAPES[shape]
    T = sum(sizes) + tail
    source_SK = torch.randn(23, K, device="cuda").to(dtype)
    rows_T = torch.randint(23, (32 * len(sizes) + T,), device="cuda", dtype=torch.int32)
    many = products(source_SK[rows_T.long()], None)
    poison_freed_memory("cuda")
    few = products(source_SK[rows_T[:T].long()], None)
    poison_freed_memory("cuda")
    gathered = products(source_SK, rows_T[:T])
    for of_many, of_few, of_gathered in zip(many, few, gathered, strict=True):
        assert_same_bits(of_few, of_many[:T])
        assert_same_bits(of_gathered, of_few)
        assert not of_few[sum(sizes) :].any()


def operands(shape: str) -> tuple[Tensor, Tensor, Tensor]:
    """The weight, a bias and the group ends."""
    sizes, N, K, _ = SHAPES[shape]
    w_ENK = torch.randn(len(sizes), N, K, device="cuda", dtype=BF16).mul_(K**-0.5)
    bias_EN = torch.randn(len(sizes), N, device="cuda", dtype=BF16)
    return w_ENK, bias_EN, torch.tensor(sizes, device="cuda").cumsum(0).int()


@EVERY_SHAPE
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
def test_grouped_mm(shape: str, has_bias: bool, out_dtype: torch.dtype) -> None:
    w_ENK, bias_EN, offs_E = operands(shape)
    bias = bias_EN.to(out_dtype) if has_bias else None

    def products(a: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        return (ops.grouped_mm(a, w_ENK.mT, offs_E, bias, out_dtype, rows),)

    check(shape, products)


@pytest.mark.parametrize("shape", [name for name, (_, N, *_) in SHAPES.items() if N % 128 == 0])
@pytest.mark.parametrize("keep_gate_up", [False, True])
@pytest.mark.parametrize(
    "form", [SwiGLU(), SwiGLU(alpha=1.702, beta=1.0, limit=7.0), SwiGLU(cubic=0.044715)], ids=str
)
def test_grouped_mm_swiglu(shape: str, keep_gate_up: bool, form: SwiGLU) -> None:
    w_ENK, bias_EN, offs_E = operands(shape)

    def products(a: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        options: Any = {"keep_gate_up": keep_gate_up, "activation": form}
        for bias in (None, bias_EN):
            gate_up, h = ops.grouped_mm_swiglu(a, w_ENK.mT, offs_E, bias, rows, **options)
            results += [h, gate_up] if keep_gate_up else [h]
        return tuple(results)

    check(shape, products)


@EVERY_SHAPE
@pytest.mark.parametrize("power_of_two_scales", [True, False])
def test_grouped_scaled_mm(shape: str, power_of_two_scales: bool) -> None:
    w_ENK, bias_EN, offs_E = operands(shape)
    w = ops.quantize_weight(w_ENK, power_of_two_scales=power_of_two_scales)

    def products(a: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        # Scales are of single rows: groups do not matter.
        ends = torch.tensor([len(a)], device="cuda", dtype=torch.int32)
        x = ops.group_quantize(a, ends, power_of_two_scales=power_of_two_scales)
        given = x.q, w.q.mT, x.scale, w.scale.mT, offs_E
        return tuple(
            ops.grouped_scaled_mm(*given, bias, out_dtype, rows)
            for bias, out_dtype in ((None, BF16), (bias_EN, BF16), (bias_EN.float(), FP32))
        )

    check(shape, products)


IN_32S = {
    transpose_b: [
        name for name, sizes in SHAPES.items() if sizes[2 if transpose_b else 1] % 32 == 0
    ]
    for transpose_b in (True, False)
}


@pytest.mark.parametrize(
    ("shape", "transpose_b"), [(shape, to) for to, shapes in IN_32S.items() for shape in shapes]
)
def test_grouped_mm_mxfp4(shape: str, transpose_b: bool) -> None:
    w_ENK, bias_EN, offs_E = operands(shape)
    w = ops.quantize_mxfp4(w_ENK if transpose_b else w_ENK.mT.contiguous())
    a_low_TR = torch.randn(10**4, 16, device="cuda", dtype=BF16)
    b_low_ERN = torch.randn(len(offs_E), 16, w_ENK.size(1), device="cuda", dtype=BF16)

    def products(a: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        low = {"a_low": a_low_TR[: len(a if rows is None else rows)], "b_low": b_low_ERN}
        given: Any = {"rows": rows, "transpose_b": transpose_b}
        return tuple(
            ops.grouped_mm_mxfp4(a, w.q, w.scale, offs_E, bias, None, out_dtype, **given, **second)
            for bias, out_dtype, second in ((None, BF16, {}), (bias_EN, BF16, low))
        )

    check(shape, products)


@EVERY_SHAPE
def test_products_are_right(shape: str) -> None:
    w_ENK, bias_EN, offs_E = operands(shape)
    K = w_ENK.size(2)
    a_TK = torch.randn(int(offs_E[-1]), K, device="cuda", dtype=BF16)
    y_TN = ops.grouped_mm(a_TK, w_ENK.mT, offs_E, bias_EN.float(), FP32)
    begin = 0
    for e, end in enumerate(offs_E.tolist()):
        a, w, bias = a_TK[begin:end].double(), w_ENK[e].double().T, bias_EN[e].double()
        allowed = tolerance(a @ w + bias, a.abs() @ w.abs() + bias.abs(), K, FP32)
        assert ((y_TN[begin:end] - (a @ w + bias)).abs() <= allowed).all()
        begin = end
