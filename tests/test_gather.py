# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert, and sums and products of gathered rows.

Bits of the reference, but products, which are within float32's rounding.
"""

import math

import pytest
import torch

from grouped_linear import ops
from support import reference
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import needs_gpu
from support.errors import sentence
from support.groups import Groups
from support.op_info import Sample
from support.samples import make
from support.tensors import BF16, DTYPES, FP16, FP32

GROUPS = Groups((3, 2), 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_of_equal_and_special_scores(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    scores = special[torch.randint(8, (200, 48))].to(dtype)
    expected = reference.topk_experts(scores, 48)
    weights, experts = ops.topk_experts(scores.to(device), 48)
    assert torch.equal(experts.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), scores.float().gather(1, expected), equal_nan=True)
    weights, experts = ops.topk_experts(scores.view(4, 50, 48).to(device), 48)
    assert torch.equal(experts.cpu(), expected.view(4, 50, 48))
    assert weights.shape == (4, 50, 48)


@pytest.mark.parametrize("num_experts", [1, 8, 255, 1024])
@pytest.mark.parametrize(("T", "C"), [(40011, 8), (3000, 1), (257, 2), (1, 8), (1, 1), (0, 8)])
def test_sort_many(T: int, C: int, num_experts: int, device: str) -> None:
    """One block, two and more than there may be; choices spread, in one expert and in none."""
    spread = torch.randint(-1, num_experts + 1, (T, C))
    skewed = (torch.rand(T, C) ** 8 * num_experts).long()
    for experts in (spread, skewed, torch.full_like(spread, num_experts - 1), ~spread.abs()):
        sample = Sample("sort_by_expert", {"experts": experts, "num_experts": num_experts})
        expected = reference.sort_by_expert(experts, num_experts)
        assert_all_same_bits(sample.results(device), expected)


def test_sort_numbers_far_outside(device: str) -> None:
    wide, narrow = (torch.iinfo(d) for d in (torch.int64, torch.int32))
    far = [wide.min, wide.max, narrow.min, narrow.max, narrow.max + 1, 2**32, 2**32 + 1, -1, 1, 0]
    experts = torch.tensor(far).view(5, 2)
    sample = Sample("sort_by_expert", {"experts": experts, "num_experts": 2})
    choice, *_ = sample.results(device)
    assert choice.tolist() == [9, 8, 0, 1, 2, 3, 4, 5, 6, 7]


def test_scattered_rows_are_gathered_tokens(device: str) -> None:
    """Of wide rows, from x whose rows lie apart, with choices of no expert."""
    x_TH = torch.randn(300, 2 * 7184, device=device, dtype=BF16)[:, :7184]
    experts_TC = torch.randint(-1, 9, (300, 8), device=device)
    routing = ops.sort_by_expert(experts_TC, 9)
    assert_same_bits(ops.scatter_rows(x_TH, routing.row, 2400), x_TH[routing.token])


@pytest.mark.parametrize(("bad", "clamped"), [(-1, 0), (36, 35), (2**40, 35)])
def test_places_outside(bad: int, clamped: int, device: str) -> None:
    sample = make("scatter_rows", GROUPS, BF16)
    rows = sample["rows"].clone()
    free = int(rows[1, 2])
    rows[1, 2] = bad
    call = sample.but(rows=rows)
    if device == "cpu":
        expected = f"scatter_rows: rows must index the {rows.numel()} rows of out, got {bad}"
        assert sentence(call) == expected
        return
    (actual,) = call.results(device)
    named = torch.ones(rows.numel(), dtype=torch.bool)
    named[[free, min(clamped, rows.numel() - 1)]] = False
    assert_same_bits(actual[named], sample.results(device)[0][named])


@pytest.mark.parametrize("op", ["gather_sum", "gather_dot"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_wide_rows(dtype: torch.dtype, op: str, device: str) -> None:
    """H past a GPU block's threads, and no multiple of what they read at once."""
    sample = make(op, Groups((5, 4), 9, K=7184), dtype, C=8)
    (actual,) = sample.results(device)
    y_TCH = sample["y"].double()[sample["rows"]]
    if op == "gather_sum":
        expected = reference.gather_sum(sample["y"], sample["rows"], sample["weight"])
        assert_same_bits(actual, expected)
    else:
        expected = torch.einsum("th,tch->tc", sample["a"].double(), y_TCH)
        torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_sums_round_to_infinity_as_in_torch(dtype: torch.dtype, device: str) -> None:
    """The largest number, and parts of its last unit to both sides of where it overflows."""
    largest = torch.finfo(dtype).max
    unit = 2.0 ** math.floor(math.log2(largest)) * torch.finfo(dtype).eps
    parts = unit * torch.tensor([0.25, 0.5, 0.75, 1.0, -0.25])
    y = torch.cat([torch.tensor([largest]), parts]).to(dtype)[:, None].expand(-1, 16)
    rows = torch.tensor([[0, 1 + i] for i in range(len(parts))])
    sums = ops.gather_sum(y.contiguous().to(device), rows.to(device)).cpu()
    assert_same_bits(sums, (y[:1].float() + y[1:].float()).to(dtype))
    assert sums[:, 0].isinf().any()
    assert sums[:, 0].isfinite().any()


def test_a_row_that_is_not_finite_spoils_its_tokens_alone(device: str) -> None:
    y = torch.ones(3, 16)
    y[1] = torch.inf
    rows = torch.tensor([[0, 2], [0, 1], [2, 2]])
    sample = Sample("gather_sum", {"y": y, "rows": rows, "weight": torch.tensor([[1.0, 2.0]] * 3)})
    assert sample.results(device)[0][:, 0].tolist() == [3, torch.inf, 3]


@pytest.mark.parametrize("op", ["gather_sum", "gather_dot"])
@pytest.mark.parametrize(("bad", "clamped"), [(-1, 0), (8, 7), (-(2**63), 0)])
def test_numbers_outside(bad: int, clamped: int, op: str, device: str) -> None:
    """On CPU they raise; a GPU clamps them, since to look at them the host would have to wait."""
    sample = make(op, GROUPS, BF16)
    rows = sample["rows"].clone()
    rows[1, 2] = bad
    if device == "cpu":
        call = sample.but(rows=rows)
        expected = f"{op}: rows must index the 8 rows of y, got {bad}"
        assert sentence(call) == expected
    else:
        (actual,) = sample.but(rows=rows).results(device)
        rows[1, 2] = clamped
        assert_same_bits(actual, sample.but(rows=rows).results(device)[0])


@needs_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_numbers_far_outside_are_clamped(dtype: torch.dtype) -> None:
    """int64 numbers become int32 on the way, where what does not fit stays past the same end."""
    wide, narrow = (torch.iinfo(d) for d in (torch.int64, torch.int32))
    far = [wide.min, -(2**32) + 2, narrow.min - 1, -1, 3, 5, 2**32 + 1, wide.max]
    rows_T = torch.tensor(far, device="cuda")
    near_T, offs_E = rows_T.clamp(0, 4), torch.tensor([5, 8], device="cuda", dtype=torch.int32)
    x_SK = torch.randn(5, 64, device="cuda").to(dtype)
    w_ENK = torch.randn(2, 32, 64, device="cuda").to(dtype)
    dy_TN = torch.randn(8, 32, device="cuda").to(dtype)
    assert_same_bits(ops.gather_sum(x_SK, rows_T.view(8, 1)), x_SK[near_T])
    gathered, expected = (ops.group_quantize(x_SK, offs_E, rows) for rows in (rows_T, near_T))
    assert_same_bits(gathered.q, expected.q)
    for rows in (rows_T, rows_T.clamp(narrow.min, narrow.max).int()):
        assert_same_bits(
            ops.grouped_mm(x_SK, w_ENK.mT, offs_E, rows=rows),
            ops.grouped_mm(x_SK[near_T], w_ENK.mT, offs_E),
        )
        assert_same_bits(
            ops.grouped_mm_wgrad(dy_TN, x_SK, offs_E, x_rows=rows),
            ops.grouped_mm_wgrad(dy_TN, x_SK[near_T], offs_E),
        )
