# SPDX-License-Identifier: Apache-2.0
"""Grouped products and weight gradients against float64 products of the very operands they read.

T rows, E groups, K in_features, N out_features.
"""

import mmap
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_linear import ops
from support import reference
from support.check import check
from support.compare import assert_same_bits, tail_is_zero, within
from support.devices import HERE, needs_gpu
from support.groups import GROUPS, SWAPPED, WIDE, Groups
from support.op_info import Sample
from support.ops import grouped_scaled_mm, grouped_scaled_mm_wgrad
from support.pairs import pairwise
from support.samples import make, variant_of
from support.tensors import BF16, DTYPES, FP32, lay_out, on, rows, weight
from support.tolerances import ROUNDING, C, scaled_tolerance, tolerance

EVERY_DTYPE = {str(dtype): dtype for dtype in DTYPES}


def magnitude_of(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    return reference.grouped_mm(a.abs(), b.abs(), offs, None if bias is None else bias.abs())


def dequantized(sample: Sample) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The operands of grouped_scaled_mm as numbers."""
    return *grouped_scaled_mm.numbers(sample), sample["offs"], sample.get("bias")


def wgrad_operands(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and offs as numbers, whichever form they are in."""
    if "dy" in sample.arguments:
        return sample["dy"], sample["x"], sample["offs"]
    dy, x = grouped_scaled_mm_wgrad.numbers(sample)
    return dy, x, sample["offs"]


# --- fprop and dgrad -----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", WIDE.values(), ids=WIDE)
def test_wide_products(groups: Groups, device: str) -> None:
    check(make("grouped_mm", groups, BF16, bias=True), device)
    check(make("grouped_scaled_mm", groups, BF16, bias=True), device)


# On CUDA more tiles than a GPU takes at once, so they are wide; those of a group alone are narrow.
LARGE = Groups((130, 0, 257, 1, 300), 700, K=272, N=2064)


def assert_groups_alone_have_these_bits(sample: Sample, device: str) -> None:
    (y,) = sample.results(device)
    for e, (end, count) in enumerate(zip(LARGE.offs().tolist(), LARGE.m_splits, strict=True)):
        group = slice(end - count, end)
        parts = {"offs": torch.tensor([count]).int()}
        for name in ("b", "bias", "b_low", "scale_b"):
            if name in sample.arguments:
                parts[name] = sample[name][e : e + 1]
        for name in ("a", "a_low"):
            if name in sample.arguments:
                parts[name] = sample[name][group]
        scale_a = sample.arguments.get("scale_a")
        if scale_a is not None and scale_a.dim() == 1:  # of groups
            parts["scale_a"] = scale_a[e : e + 1]
        elif scale_a is not None:
            parts["scale_a"] = F.pad(scale_a[:, group], (0, -count % 4))
        (alone,) = sample.but(**parts).results(device)
        assert_same_bits(alone, y[group])


@pytest.mark.parametrize(
    ("op", "row_major", "dtype"),
    pairwise(
        {op: op for op in ("grouped_mm", "grouped_scaled_mm")},
        {"column_major": False, "row_major": True},
        EVERY_DTYPE,
    ),
)
def test_tiles_of_either_width(op: str, row_major: bool, dtype: torch.dtype, device: str) -> None:
    """Row-major as in dgrad, of the scales of quantize_weight as they are; fprop's are a view."""
    sample = make(op, LARGE, dtype, bias=True)
    if row_major:
        stored = {n: sample[n].contiguous() for n in {"b", "scale_b"} & set(sample.arguments)}
        sample = sample.but(**stored)
    check(sample, device)
    assert_groups_alone_have_these_bits(sample, device)


@pytest.mark.parametrize("pass_", ["fprop", "dgrad"])
def test_swapped_operands(pass_: str, device: str) -> None:
    """In bfloat16 on Hopper. A float32 output is computed without, to the same bits."""
    sample = make("grouped_mm", SWAPPED, BF16)
    if pass_ == "dgrad":
        sample = sample.but(b=sample["b"].contiguous())
    check(sample, device)
    if device == "cuda":
        (y,), (sums,) = sample.results(device), sample.but(out_dtype=FP32).results(device)
        assert_same_bits(y, sums.to(BF16))


# Low-rank factors: an output, or a side of wgrad, of at most half of a wide tile. Groups of one row
# tile, of two and of three.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize("N", [16, 64, 80, 128])
def test_narrow_products(N: int, row_major: bool, dtype: torch.dtype, device: str) -> None:
    groups = Groups(LARGE.m_splits, LARGE.T, K=LARGE.K, N=N)
    for options in ({}, {"gathers": "rows"}, {"out_dtype": FP32}):
        sample = make("grouped_mm", groups, dtype, bias=True, **options)
        if row_major:
            sample = sample.but(b=sample["b"].contiguous())
        check(sample, device)


def leave_in_free_memory(words: list[int]) -> None:
    """Fill what the caching allocator gives next, small or large, with these 32-bit words."""
    torch.cuda.empty_cache()
    blocks = [
        torch.empty(2**size // 4, dtype=torch.int32, device="cuda") for size in (19,) * 8 + (28,)
    ]
    for block in blocks:
        block.view(-1, len(words)).copy_(torch.tensor(words, dtype=torch.int32))


@needs_gpu
@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad_", "grouped_scaled_mm"])
@pytest.mark.parametrize("words", [[3, 0x5E1FC3A7], [0, 0], [-1, -1], [1, 0, 1, 0]], ids=str)
def test_tickets_start_in_any_memory(op: str, words: list[int]) -> None:
    """What memory held before is not taken for a counter that this launch has set.

    A tile would be computed twice then, which shows where it is added.
    """
    side = 256 if op == "grouped_mm_wgrad_" else 768  # with which either kernel draws tickets
    groups = Groups((64,) * 200, 200 * 64, K=side, N=side)
    options = {"grad_dtype": FP32} if op == "grouped_mm_wgrad_" else {}
    sample = make(op, groups, BF16, **options).on("cuda")
    expected = sample.results("cuda")
    for _ in range(20):
        leave_in_free_memory(words)
        for actual, wanted in zip(sample.results("cuda"), expected, strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("gathers", [None, "dy_rows", "x_rows"])
@pytest.mark.parametrize(("N", "K"), [(272, 16), (272, 80), (272, 128), (16, 272), (16, 80)])
def test_narrow_wgrads(N: int, K: int, gathers: str | None, device: str) -> None:
    """The tiles of three equal groups are split along K."""
    for m_splits, T in ((LARGE.m_splits, LARGE.T), ((2048,) * 3, 6150)):
        groups = Groups(m_splits, T, K=K, N=N)
        options = {"gathers": gathers} if gathers else {}
        for out_dtype in (BF16, FP32):
            check(make("grouped_mm_wgrad", groups, BF16, out_dtype=out_dtype, **options), device)
        check(make("grouped_mm_wgrad_", groups, BF16, grad_dtype=FP32, **options), device)


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**-120], ids=["", "small", "tiny"])
@pytest.mark.parametrize("name", ["unaligned", "capacity", "17_groups"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_power_of_two_scales(name: str, scale: float, dtype: torch.dtype, device: str) -> None:
    """Operands scaled without rounding, but tiny ones are no normal bf16 numbers."""
    groups = GROUPS[name]
    options = {"power_of_two_scales": True, "columnwise": True}
    sample = make("grouped_scaled_mm", groups, dtype, bias=True)
    x = make("group_quantize", groups, FP32, **options)
    q, scale_a, q_t, scale_t, _ = x.but(x=x["x"] * scale).results("cpu")
    b, scale_b, _ = reference.quantize_weight(
        torch.randn(groups.E, groups.N, groups.K) / scale, reference.Scaling(True)
    )
    exact = sample.but(a=q, scale_a=scale_a, b=b.mT, scale_b=scale_b.mT)
    check(exact, device)

    dy_TN = rows(groups, groups.N, FP32) / scale
    dy = make("group_quantize", groups, FP32, **options).but(x=dy_TN)
    dy_t, scale_dy_t = dy.results("cpu")[2:4]
    wgrad = make("grouped_scaled_mm_wgrad", groups, dtype)
    wgrad = wgrad.but(dy_t=dy_t, x_t=q_t, scale_dy_t=scale_dy_t, scale_x_t=scale_t)
    check(wgrad, device)


@pytest.mark.parametrize("K", [48, 64], ids=["K", "K is N"])
@pytest.mark.parametrize("column_major", [True, False])
def test_torch_computes_the_same_of_the_same_arguments(
    column_major: bool, K: int, device: str
) -> None:
    """b [E, K, N] in both layouts. Where K is N, no shape would tell b from its transpose."""
    groups = Groups((40, 0, 25), 65, K=K, N=64)
    a, b = rows(groups, K, BF16).to(device), weight(groups, BF16).mT.to(device)
    b = b.mT.contiguous().mT if column_major else b.contiguous()
    offs = groups.offs().to(device)
    ours, theirs = (f(a, b, offs=offs) for f in (ops.grouped_mm, F.grouped_mm))
    assert ours.dtype == theirs.dtype == BF16
    # two sums in float32 of at most 64 products each, rounded once
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)
    wrong = ops.grouped_mm(a, b.mT, offs) if K == 64 else torch.full_like(ours, torch.inf)
    assert (wrong - theirs).abs().max() > 1


@pytest.mark.parametrize("K", [48, 64], ids=["K", "K is N"])
def test_torch_computes_the_same_of_scales_of_groups(K: int) -> None:
    """torch takes a scale a row and a scale a column: those of a group, repeated."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch._scaled_grouped_mm needs a GPU of compute capability 9.0")
    groups = Groups((40, 0, 25), 65, K=K, N=64)
    sample = make("grouped_scaled_mm", groups, BF16, per_group=reference.E4M3).on("cuda")
    a, b, scale_a, scale_b, offs = (sample[n] for n in ("a", "b", "scale_a", "scale_b", "offs"))
    ours = ops.grouped_scaled_mm(a, b, scale_a, scale_b, offs)
    of_rows = scale_a.repeat_interleave(torch.tensor(groups.m_splits, device="cuda"))
    of_columns = scale_b[:, None].expand(groups.E, groups.N).contiguous()
    theirs = torch._scaled_grouped_mm(a, b, of_rows, of_columns, offs, out_dtype=BF16)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


def test_huge_row_strides(device: str) -> None:
    """Offsets of elements do not fit in 32 bits: rows 2^30 elements apart."""
    groups = Groups((2, 0, 1), 3, K=16, N=16)
    sample = make("grouped_mm", groups, BF16)
    numbers = 2 * 2**30 + 16
    try:
        # On a CPU of pages that are there once they are written: malloc would fill 4 GiB here.
        if device == "cpu":
            far = torch.frombuffer(mmap.mmap(-1, 2 * numbers), dtype=BF16)
        else:
            far = torch.empty(numbers, dtype=BF16, device=device)
    except (OSError, RuntimeError):
        pytest.skip("needs 4 GiB of memory")
    far = far.as_strided((3, 16), (2**30, 1))
    far.copy_(sample["a"])
    y = sample.on(device).but(a=far)()
    assert_same_bits(y.cpu(), sample.results(device)[0])


# --- a low-rank second product -------------------------------------------------------------------

RANKS = (16, 32, 48, 64, 80, 128, 256)
OPERANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "16_bits": ("grouped_mm", {}),
    "block": ("grouped_scaled_mm", {}),
    "per_group": ("grouped_scaled_mm", {"per_group": reference.E4M3}),
    "per_group_e5m2": ("grouped_scaled_mm", {"per_group": reference.E5M2}),
}
LAYOUTS = ("dense", "transposed", "strided", "odd")


@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("operands", OPERANDS)
def test_low_rank(operands: str, r: int, device: str) -> None:
    """Each pair of a rank and a list of groups, of operands and either of these; in turn the rest.

    That is every dtype and layout of b_low.
    """
    op, options = OPERANDS[operands]
    first = RANKS.index(r) + list(OPERANDS).index(operands)
    for i, groups in list(enumerate([*GROUPS.values(), *WIDE.values()]))[first % 2 :: 2]:
        turn = i + RANKS.index(r) + i // 2
        more = dict(options, r=r, low_layout=LAYOUTS[turn % 4], bias=turn % 2 == 0)
        if "per_group" not in options and turn % 5 in (1, 3):
            more |= {"gathers": "rows", "index": (torch.int32, torch.int64)[turn % 2]}
        check(make(op, groups, DTYPES[turn % 3], **more), device)


@pytest.mark.parametrize(
    ("operands", "low", "dtype"),
    pairwise(
        {name: name for name in OPERANDS},
        {"16": (16, "transposed"), "80": (80, "dense"), "512": (512, "transposed")},
        EVERY_DTYPE,
    ),
)
def test_low_rank_in_tiles_of_either_width(
    operands: str, low: tuple[int, str], dtype: torch.dtype, device: str
) -> None:
    (op, options), (r, layout) = OPERANDS[operands], low
    for row_major in (False, True) if op == "grouped_mm" else (False,):
        sample = make(op, LARGE, dtype, bias=True, r=r, low_layout=layout, **options)
        if row_major:
            sample = sample.but(b=sample["b"].contiguous())
        check(sample, device)
        if op != "grouped_mm" or device != "cpu":  # torch multiplies
            assert_groups_alone_have_these_bits(sample, device)


def numbers_without_rounding(op: str, options: dict[str, Any], dtype: torch.dtype) -> Sample:
    """Integers. Most of the first product is what the second one takes away again."""
    groups = Groups((130, 0, 37), 170, K=144, N=272)
    sample = make(op, groups, dtype, r=128, **options)
    a = torch.randint(-8, 9, (groups.T, groups.K)).float()
    b = torch.randint(-8, 9, (groups.E, groups.K, groups.N)).float()
    a[:, 128:].clamp_(-2, 2)
    b[:, 128:].clamp_(-2, 2)
    a_low, b_low = a[:, :128].to(dtype), -b[:, :128].to(dtype)
    changed = {"a": a.to(sample["a"].dtype), "b": lay_out(b.to(sample["b"].dtype), "transposed")}
    for name in {"scale_a", "scale_b"} & set(sample.arguments):
        changed[name] = torch.ones_like(sample[name])
    return sample.but(**changed, a_low=a_low, b_low=b_low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
def test_both_products_are_one_sum(operands: str, dtype: torch.dtype, device: str) -> None:
    """The result is exact. The first product alone has more bits than a bf16 number."""
    op, options = OPERANDS[operands]
    sample = numbers_without_rounding(op, options, dtype)
    (y,) = sample.results(device)
    a, b, offs = sample["a"].double(), sample["b"].double(), sample["offs"]
    exact = reference.grouped_mm(a[:, 128:], b[:, 128:], offs)
    assert exact.abs().max() < 2**8
    assert torch.equal(y.double(), exact)
    if dtype == BF16:
        first = reference.grouped_mm(a, b, offs).to(dtype).double()
        assert not torch.equal(first + reference.grouped_mm(-a[:, :128], b[:, :128], offs), exact)


@pytest.mark.parametrize("operands", OPERANDS)
def test_a_row_of_the_second_product_spoils_its_own_alone(operands: str, device: str) -> None:
    op, options = OPERANDS[operands]
    sample = make(op, GROUPS["unaligned"], BF16, r=48, **options)
    (y,) = sample.results(device)
    a_low = sample["a_low"].clone()
    a_low[50, 3] = torch.nan
    (spoiled,) = sample.but(a_low=a_low).results(device)
    assert spoiled[50].isnan().all()
    spoiled[50] = y[50]
    assert_same_bits(spoiled, y)


# --- wgrad ---------------------------------------------------------------------------------------


def wgrad_sums(sample: Sample) -> tuple[Tensor, Tensor]:
    """What wgrad is, and the sums of |dy * x|."""
    dy, x, offs = wgrad_operands(sample)
    magnitude = reference.grouped_mm_wgrad(dy.abs(), x.abs(), offs)
    return reference.grouped_mm_wgrad(dy, x, offs), magnitude


def scaled_wgrad(
    dy: Sequence[Tensor], x: Sequence[Tensor], groups: Groups, out_dtype: torch.dtype
) -> Sample:
    """A call for q_t and scale_t of dy and of x."""
    operands = {"dy_t": dy[0], "x_t": x[0], "scale_dy_t": dy[1], "scale_x_t": x[1]}
    arguments = {**operands, "offs": groups.offs(), "out_dtype": out_dtype}
    return Sample("grouped_scaled_mm_wgrad", arguments)


IN_PLACE = ("grouped_mm_wgrad_", "grouped_scaled_mm_wgrad_")


@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("grad_dtype", [FP32, BF16], ids=str)
def test_wgrad_in_place_rounds_once(op: str, device: str, grad_dtype: torch.dtype) -> None:
    """Adding is one float32 addition an element, then at most one rounding to bf16."""
    groups = GROUPS["unaligned"]
    sample = make(op, groups, BF16, grad_dtype=grad_dtype)
    functional = {n: v for n, v in sample.arguments.items() if n != "main_grad"}

    def dw(dtype: torch.dtype) -> Tensor:
        return Sample(op.removesuffix("_"), functional | {"out_dtype": dtype}).results(device)[0]

    added = (sample["main_grad"].float() + dw(FP32)).to(grad_dtype)
    assert_same_bits(sample.results(device)[0], added)
    overwritten = sample.but(overwrite=torch.tensor(True))
    assert_same_bits(overwritten.results(device)[0], dw(grad_dtype))


@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("overwrite", [None, True, False])
def test_zero_tokens_into_a_slice_at_any_address(
    op: str, device: str, overwrite: bool | None
) -> None:
    groups = Groups((0, 0), 0, K=16, N=16)
    options = {} if overwrite is None else {"overwrite": overwrite}
    sample = make(op, groups, BF16, grad_dtype=FP32, **options)
    main_grad = torch.ones(1 + groups.E * groups.N * groups.K, device=device)[1:]
    sample.on(device).but(main_grad=main_grad.view(groups.E, groups.N, groups.K))()
    assert (main_grad == (0 if overwrite else 1)).all()


@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("grad_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("overwrite", [True, False])
def test_matrices_of_empty_groups(
    op: str, device: str, grad_dtype: torch.dtype, overwrite: bool
) -> None:
    """A GPU zeroes them beside the products, a piece at a time; these are of many pieces."""
    groups = Groups((0,) * 5 + (5, 0, 0, 0, 130, 0, 9, 0), 150, K=528, N=384)
    sample = make(op, groups, BF16, grad_dtype=grad_dtype, overwrite=overwrite)
    if overwrite:
        sample = sample.but(main_grad=torch.full_like(sample["main_grad"], torch.nan))
    check(sample, device)


# --- hard operands -------------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor]


def one_huge_value_a_block(a: Tensor, b: Tensor) -> Pair:
    """At other places in a than in b; all else in its block keeps few bits, or none."""
    a, b = a.clone(), b.clone()
    a[..., 37::128] *= 2.0**12
    b[..., 101::128] *= -(2.0**12)
    return a, b


def tiny_and_huge_scales(a: Tensor, b: Tensor) -> Pair:
    """Products are near 1, and every third block of a is small beside its neighbours."""
    block = torch.arange(a.size(-1)) // 128
    return a * 2.0**-100 * 2.0 ** (-6.0 * (block % 3)), b * 2.0**100


def alternating_signs(a: Tensor, b: Tensor) -> Pair:
    """Sums of tens of thousands of addends that nearly cancel."""
    return a.abs(), b.abs() * (1 - 2 * (torch.arange(b.size(-1)) % 2))


# What becomes of two operands of normal numbers; the sums go over the last dimension of both.
HARD: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "random": lambda a, b: (a, b),
    "huge": one_huge_value_a_block,
    "tiny": tiny_and_huge_scales,
    "alternating": alternating_signs,
    "growing": lambda a, b: (a.abs(), b.abs()),
}
LONG = 14336
FEW_ROWS = Groups((3, 0, 17, 1), 24, K=LONG, N=32)
MANY_ROWS = Groups((LONG, 0, 300, 5), LONG + 310, K=32, N=48)


def assert_within_bound(y: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """The bound as it is written above, with nothing added to it."""
    assert y.dtype == BF16
    assert within(y, expected, 2.0**-8 * expected.abs() + C * 2.0**-13 * magnitude)


def quantized(
    x_TK: Tensor, groups: Groups, share_scales: bool = False, device: str = "cpu"
) -> list[Tensor]:
    """q, scale, q_t and scale_t by the op, which has tests of its own."""
    sample = make("group_quantize", groups, FP32, columnwise=True, share_scales=share_scales)
    return sample.but(x=x_TK).results(device)[:4]


@pytest.mark.parametrize("hard", HARD.values(), ids=HARD)
@pytest.mark.parametrize("pass_", ["fprop", "dgrad"])
def test_long_sums_of_hard_operands(
    pass_: str, hard: Callable[[Tensor, Tensor], Pair], device: str
) -> None:
    """b is a transposed view, of q in FP8; in dgrad it is stored [E, LONG, N], in FP8 as q_t."""
    groups, offs = FEW_ROWS, FEW_ROWS.offs()
    a, b = hard(rows(groups, LONG, FP32), weight(groups, FP32))
    stored = b.mT.contiguous() if pass_ == "dgrad" else b.mT
    exact = Sample("grouped_mm", {"a": a.to(BF16), "b": stored.to(BF16), "offs": offs})
    operands = exact["a"], exact["b"], offs
    (y,) = exact.results(device)
    assert_within_bound(y, reference.grouped_mm(*operands), magnitude_of(*operands))

    q, scale, *_ = quantized(a, groups)
    w_q, w_scale, w_q_t = reference.quantize_weight(
        b.mT if pass_ == "dgrad" else b, reference.Scaling()
    )
    if pass_ == "dgrad":
        w_q, w_scale = w_q_t, w_scale.mT
    arguments = {"a": q, "b": w_q.mT, "scale_a": scale, "scale_b": w_scale.mT, "offs": offs}
    scaled = Sample("grouped_scaled_mm", {**arguments, "out_dtype": BF16})
    numbers = dequantized(scaled)
    (y,) = scaled.results(device)
    assert_within_bound(y, reference.grouped_mm(*numbers), magnitude_of(*numbers))


@pytest.mark.parametrize("hard", HARD.values(), ids=HARD)
def test_wgrad_of_hard_operands(hard: Callable[[Tensor, Tensor], Pair], device: str) -> None:
    groups, offs = MANY_ROWS, MANY_ROWS.offs()
    dy_NT, x_KT = hard(rows(groups, groups.N, FP32).t(), rows(groups, groups.K, FP32).t())
    dy_TN, x_TK = dy_NT.t().contiguous(), x_KT.t().contiguous()
    exact = Sample("grouped_mm_wgrad", {"dy": dy_TN.to(BF16), "x": x_TK.to(BF16), "offs": offs})
    dy, own, shared = (
        quantized(t, groups, share_scales)[2:]
        for t, share_scales in ((dy_TN, False), (x_TK, False), (x_TK, True))
    )
    for sample in (exact, *(scaled_wgrad(dy, x, groups, BF16) for x in (own, shared))):
        (dw,) = sample.results(device)
        assert_within_bound(dw, *wgrad_sums(sample))


def shared_parts(scale_t: Tensor) -> Tensor:
    """[blocks, ceil(K / 128)]: whether 128 features share a scale."""
    return torch.stack([s.min(1).values == s.max(1).values for s in scale_t.split(128, 1)], dim=1)


@pytest.mark.parametrize("kind", ["normal", "products", "outliers"])
def test_shared_scales_cost_next_to_nothing(kind: str, device: str) -> None:
    """In feature 300's block it has up to 256 times the others, in feature 7's more than that."""
    groups = Groups((300, 0, 724), 1024, K=400, N=64)
    offs, dy = groups.offs(), torch.randn(groups.T, groups.N)
    x = torch.randn(groups.T, groups.K)
    if kind == "products":
        x *= torch.randn_like(x) * torch.randn_like(x)
    elif kind == "outliers":
        x[::100] *= 30
    x[:, 7] *= 3000
    x[:, 300] *= 60
    x[:, 390] = 0
    expected = reference.grouped_mm_wgrad(dy.double(), x.double(), offs)
    errors = []
    for share_scales in (False, True):
        of_x = quantized(x, groups, share_scales, device)[2:]
        of_dy = quantized(dy, groups, device=device)[2:]
        (dw,) = scaled_wgrad(of_dy, of_x, groups, FP32).results(device)
        errors.append((dw - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30))
    own, shared = errors
    blocks = -(-300 // 128) + -(-724 // 128)
    parts = shared_parts(of_x[1][:blocks])
    assert not parts[:, 0].any()
    if kind == "normal":
        assert parts[:, 1:].all()
    assert parts[:, 1].float().mean() > 0.8
    assert own.max() < 0.1
    assert (shared <= 1.02 * own).all()


@pytest.mark.parametrize("power_of_two_scales", [True, False])
def test_columns_may_share_scales_anywhere(power_of_two_scales: bool, device: str) -> None:
    """Which of the columns of 128 share a scale in which steps changes nothing but rounding."""
    groups = Groups((900, 0, 128, 1, 700), 1800, K=464, N=144)
    x, dy = rows(groups, groups.K, FP32), rows(groups, groups.N, FP32)
    options = {"columnwise": True, "power_of_two_scales": power_of_two_scales}
    sample = make("group_quantize", groups, FP32, **options)
    *_, dy_t, scale_dy_t, _ = sample.but(x=dy).results("cpu")
    *_, x_t, scale_x_t, _ = sample.but(x=x).results("cpu")
    common = scale_x_t[:, ::128].repeat_interleave(128, dim=1)[:, : groups.K]
    steps, parts = torch.arange(len(x_t))[:, None], torch.arange(groups.K)[None, :] // 64
    outlier = torch.arange(groups.K)[None, :] == 463
    mixed = (steps + parts) % 7 == 3
    own_scales = [
        torch.where(own, scale_x_t, common)
        for own in (parts < 0, steps % 5 == 2, outlier, parts >= 0, mixed)
    ]
    zeros = common * ((steps + parts) % 3 != 1)
    for scales in (*own_scales, zeros):
        sample = scaled_wgrad((dy_t, scale_dy_t), (x_t, scales), groups, FP32)
        (dw,) = sample.results(device)
        expected, magnitude = wgrad_sums(sample)
        assert within(dw, expected, 2.0**-20 * expected.abs() + C * 2.0**-13 * magnitude)


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
def test_many_tiles_whose_columns_share_or_not(out_dtype: torch.dtype, device: str) -> None:
    """Each block of a GPU takes a dozen tiles, of 1 to 3 steps or none."""
    N = 1024 if device == "cuda" else 144
    groups = Groups(tuple(e * 61 % 300 * (e % 5 != 3) for e in range(24)), 3400, K=1536, N=N)
    x, dy = rows(groups, groups.K, FP32), rows(groups, groups.N, FP32)
    x[:, 300:700] *= 2.0 ** torch.randint(-9, 9, (groups.T, 1)).repeat_interleave(400, dim=1)
    x[:, 1000] *= 1000
    of_x = quantized(x, groups, share_scales=True)[2:]
    sample = scaled_wgrad(quantized(dy, groups)[2:], of_x, groups, out_dtype)
    (dw,) = sample.results(device)
    expected, magnitude = wgrad_sums(sample)
    rounding = 2.0**-8 if out_dtype == BF16 else 2.0**-20
    assert within(dw, expected, rounding * expected.abs() + C * 2.0**-13 * magnitude)


# Groups of as many rows each, whose last tiles an H200 cuts along the sum: so few tiles that many
# clusters share each; so many that some take the beginnings of several; what is left after whole
# rounds of tiles; and tiles of several groups, most of which do not begin where the rows do. And
# groups of different sizes, of whose 300 pairs of tiles an H200 hands most out one by one.
UNEVEN = tuple(1 + 37 * i * i % 211 if i % 5 else 0 for i in range(63))
LONG_SUMS = {
    "few": Groups((0, 12100, 0), 12200, K=528, N=400),
    "helped": Groups((12100, 0), 12100, K=2048, N=1280),
    "rounds": Groups((12100,), 12100, K=3072, N=2560),
    "equal": Groups((8100, 0, 8100, 8100), 24400, K=528, N=400),
    "uneven": Groups((1500, *UNEVEN), sum(UNEVEN) + 1600, K=528, N=400),
}
# A CPU cuts no sum: one group, several and many, each with partial tiles.
SUMS_OF_A_CPU = {
    "few": Groups((0, 1210, 0), 1220, K=272, N=144),
    "equal": Groups((310, 0, 310, 310), 940, K=272, N=144),
    "uneven": Groups((300, *UNEVEN[:16]), sum(UNEVEN[:16]) + 400, K=144, N=80),
}


def long_sums() -> list[Any]:
    """Shapes, ops and their variants; of matrices that fill a GPU a few."""
    variants = {
        "grouped_mm_wgrad": ("plain",),
        "grouped_scaled_mm_wgrad": ("shared", "plain", "per_group", "per_group_e5m2"),
        "grouped_mm_wgrad_": ("plain", "bf16", "overwrite"),
        "grouped_scaled_mm_wgrad_": ("plain", "bf16"),
    }
    large = {"grouped_mm_wgrad": ("plain",), "grouped_scaled_mm_wgrad": ("shared",)}
    return [
        pytest.param(groups, op, variant, device, id="-".join((name, op, variant, device)))
        for device in HERE
        for name, groups in (LONG_SUMS if device == "cuda" else SUMS_OF_A_CPU).items()
        for op, of_op in (large if groups.N > 1000 else variants).items()
        for variant in of_op
    ]


@pytest.mark.parametrize(("groups", "op", "variant", "device"), long_sums())
def test_wgrad_of_long_sums_and_of_uneven_groups(
    groups: Groups, op: str, variant: str, device: str
) -> None:
    small = groups.N < 1000
    for dtype in (BF16, FP32) if op == "grouped_scaled_mm_wgrad" and small else (BF16,):
        sample = variant_of(op, groups, variant, dtype)
        (dw,) = sample.results(device)
        dy, x, offs = (on(device, operand) for operand in wgrad_operands(sample))
        expected = reference.grouped_mm_wgrad(dy, x, offs).cpu()
        magnitude = reference.grouped_mm_wgrad(dy.abs(), x.abs(), offs).cpu()
        if "dy" in sample.arguments:
            allowed = tolerance(expected, magnitude, max(groups.m_splits), dw.dtype)
        else:
            allowed = scaled_tolerance(expected, magnitude, dw.dtype)
        if variant != "overwrite" and "main_grad" in sample.arguments:
            expected += sample["main_grad"].double()
            allowed += (2.0**-24 + ROUNDING[dw.dtype]) * expected.abs()
        assert within(dw, expected, allowed)
        for _ in range(3):
            assert_same_bits(sample.results(device)[0], dw)


# --- the tolerances are tight --------------------------------------------------------------------


def in_steps(a: Tensor, b: Tensor, step: int, narrow: Any, promote_every: int = 0) -> Tensor:
    """a @ b.T, the running sum narrowed after every `step` elements of K."""
    total, running = (torch.zeros(a.size(0), b.size(0), dtype=torch.float64) for _ in range(2))
    for k in range(0, a.size(1), step):
        if promote_every and k % promote_every == 0:
            total, running = total + running, torch.zeros_like(running)
        running = narrow(running + a[:, k : k + step].double() @ b[:, k : k + step].double().t())
    return total + running


def keep_13_bits(x: Tensor) -> Tensor:
    """Truncate to 13 bits below the leading one, as an FP8 tensor core's accumulator does."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**14).trunc(), exponent - 14)


def wide_positive_sample() -> tuple[Sample, Groups]:
    """Sums that only grow: the worst case for an accumulator."""
    groups = Groups((16,), 16, K=4096, N=32)
    sample = make("grouped_scaled_mm", groups, FP32)
    positive = {n: sample[n].float().abs().to(reference.E4M3) for n in ("a", "b")}
    return sample.but(**positive), groups


def test_sums_are_promoted_every_128(device: str) -> None:
    sample, _ = wide_positive_sample()
    check(sample, device)


def test_the_tolerance_catches_a_missing_promotion() -> None:
    sample, _ = wide_positive_sample()
    a, b, *_ = dequantized(sample)
    expected, magnitude = a @ b[0], a.abs() @ b[0].abs()
    allowed = scaled_tolerance(expected, magnitude, FP32)
    assert within(in_steps(a, b[0].t(), 32, keep_13_bits, promote_every=128), expected, allowed)
    assert not within(in_steps(a, b[0].t(), 32, keep_13_bits), expected, allowed)
    narrow = in_steps(a, b[0].t(), 128, lambda x: x.bfloat16().double())
    assert not within(narrow, expected, allowed)


@pytest.mark.parametrize("scale", ["scale_a", "scale_b"])
def test_the_tolerance_catches_a_wrong_scale(scale: str) -> None:
    sample = make("grouped_scaled_mm", GROUPS["unaligned"], BF16)
    y = sample.results("cpu")[0]
    wrong = sample[scale].clone()
    wrong[0] *= 2  # K's first block of every row; every block of the first expert
    wrong_sample = sample.but(**{scale: wrong})
    expected, magnitude = (
        f(*dequantized(wrong_sample)) for f in (reference.grouped_mm, magnitude_of)
    )
    assert not within(y, expected, scaled_tolerance(expected, magnitude, BF16))


def test_the_tolerance_catches_narrow_sums_and_narrow_operands() -> None:
    a, b = torch.randn(16, 512), torch.randn(32, 512)
    expected, magnitude = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    allowed = tolerance(expected, magnitude, 512, FP32)
    assert within(a @ b.t(), expected, allowed)
    assert not within(in_steps(a, b, 128, lambda x: x.bfloat16().double()), expected, allowed)
    tf32 = [torch.ldexp(m.mul(2**11).round(), e - 11) for m, e in map(torch.frexp, (a, b))]
    assert not within(tf32[0] @ tf32[1].t(), expected, allowed)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [{}, {"r": 32}], ids=["", "low_rank"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_gradients_of_grouped_mm(groups: Groups, low: dict[str, int], device: str) -> None:
    products = (("a", "b"), ("a_low", "b_low"))[: 1 + len(low)]
    names = ("bias", *chain(*products))
    sample = make("grouped_mm", groups, BF16, bias=True, requires_grad=names, **low)
    offs, dy = sample["offs"], torch.randn(groups.T, groups.N).to(BF16)
    dy[groups.valid :] = torch.nan
    there = sample.on(device)
    found = torch.autograd.grad(there(), [there[n] for n in names], dy.to(device))
    grads = dict(zip(names, found, strict=True))
    for of_rows, of_groups in products:
        a, b_t = sample[of_rows].detach(), sample[of_groups].detach().mT
        expected = reference.grouped_mm(dy, b_t, offs)
        allowed = tolerance(expected, magnitude_of(dy, b_t, offs), groups.N, BF16)
        assert within(grads[of_rows].cpu(), expected, allowed)
        assert tail_is_zero(grads[of_rows], groups)
        expected = reference.grouped_mm_wgrad(dy, a, offs)
        magnitude = reference.grouped_mm_wgrad(dy.abs(), a.abs(), offs)
        allowed = tolerance(expected, magnitude, max(groups.m_splits), BF16)
        assert within(grads[of_groups].mT.cpu(), expected, allowed)
    expected = reference.grouped_bias_grad(dy, offs)
    magnitude = reference.grouped_bias_grad(dy.abs(), offs)
    allowed = tolerance(expected, magnitude, max(groups.m_splits), BF16)
    assert within(grads["bias"].cpu(), expected, allowed)


def test_gradients_of_gathered_rows(device: str) -> None:
    """A row that is gathered 400 times: its sum is one of float32, where BF16 stops at 256.

    Where out_dtype is float32 the gradient is, too, and GEMMs take it in a's dtype.
    """
    groups = Groups((500, 0, 700), 1205, K=16, N=32)
    a, b = torch.randn(3, 16).to(BF16), torch.rand(3, 16, 32).to(BF16)
    rows_T, dy = torch.arange(groups.T) % 3, torch.rand(groups.T, 32).to(BF16)
    dy[groups.valid :] = torch.nan
    given_T = rows_T.clone()
    given_T[groups.valid :] = torch.iinfo(torch.int64).min
    leaves = [t.to(device).requires_grad_() for t in (a, b)]
    offs, rows_there = groups.offs().to(device), given_T.to(device)
    y = ops.grouped_mm(*leaves, offs, out_dtype=FP32, rows=rows_there)
    da, db = (t.cpu() for t in torch.autograd.grad(y, leaves, dy.float().to(device)))
    products = reference.grouped_mm(dy, b.mT, groups.offs())[: groups.valid]
    expected = torch.zeros(3, 16).double().index_add(0, rows_T[: groups.valid], products)
    # positive numbers: each product is rounded to 2^-9 of it, and their sum is
    assert within(da, expected, 2.0**-8 * expected)
    expected = reference.grouped_mm_wgrad(dy, a[rows_T], groups.offs()).mT
    magnitude = reference.grouped_mm_wgrad(dy, a[rows_T].abs(), groups.offs()).mT
    assert within(db, expected, tolerance(expected, magnitude, max(groups.m_splits), BF16))


def test_no_second_derivatives_of_grouped_mm() -> None:
    """wgrad has no formula of its own: better an error than a derivative without its share."""
    a, b = torch.randn(5, 16, requires_grad=True), torch.randn(2, 16, 32, requires_grad=True)
    y = ops.grouped_mm(a, b, torch.tensor([2, 5], dtype=torch.int32))
    for loss in (y.square().sum(), y.sum()):  # of the second, the incoming gradient is a constant
        (da,) = torch.autograd.grad(loss, a, create_graph=True)
        with pytest.raises(RuntimeError, match="grouped_linear: there is no second derivative"):
            da.sum().backward(retain_graph=True)


def test_no_forward_mode_of_grouped_mm() -> None:
    """Which torch takes for zero in a custom op."""
    a, b, offs = torch.randn(5, 16), torch.randn(2, 16, 32), torch.tensor([2, 5], dtype=torch.int32)
    refused = pytest.raises(NotImplementedError, match=r"^grouped_mm: forward-mode")
    with refused:
        torch.func.jvp(lambda a: ops.grouped_mm(a, b, offs), (a,), (a,))
    with torch.autograd.forward_ad.dual_level():
        assert ops.grouped_mm(a, b, offs).shape == (5, 32)
        with refused:
            ops.grouped_mm(a, torch.autograd.forward_ad.make_dual(b, b), offs)
