# SPDX-License-Identifier: Apache-2.0
"""Group sizes to group ends, and what ops make of ends that lie."""

from typing import Any

import pytest
import torch

from grouped_linear import ops
from support import reference
from support.compare import assert_same_bits
from support.devices import needs_gpu
from support.groups import GROUPS
from support.ops import OPS
from support.samples import make, specified
from support.tensors import BF16

SIZES = (1, 2, 17, 32, 33, 200, 257, 513, 1024)  # one warp, several, and a group more or less
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


@pytest.mark.parametrize("split_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_groups", SIZES)
@pytest.mark.parametrize(
    ("alignment", "stride", "dtype"),
    [(1, 1, torch.int32), (128, 1, torch.int32), (48, 2**32, torch.int64)],
)
@pytest.mark.parametrize("spare", [0, 1000])
def test_splits_to_offsets(
    spare: int,
    alignment: int,
    stride: int,
    dtype: torch.dtype,
    num_groups: int,
    split_dtype: torch.dtype,
    device: str,
) -> None:
    m_splits = torch.randint(0, 300, (num_groups,)) * torch.randint(0, 2, (num_groups,))
    splits_E, num_rows = m_splits.to(device, split_dtype), int(m_splits.sum()) + spare
    offs_E = ops.splits_to_offsets(
        splits_E, num_rows, alignment=alignment, stride=stride, out_dtype=dtype
    )
    expected = reference.splits_to_offsets(m_splits.tolist(), num_rows, alignment, stride)
    assert offs_E.dtype == dtype
    assert offs_E.tolist() == expected


@pytest.mark.parametrize(
    ("m_splits", "num_rows"),
    [([0, 5, 0, 2, 9], 20), ([0, 5, 0, 2, 9], INT64_MAX), ([INT64_MAX], INT64_MAX)],
)
@pytest.mark.parametrize("alignment", [2**40, INT64_MAX - 1, INT64_MAX])
def test_rounding_up_does_not_overflow(
    alignment: int, m_splits: list[int], num_rows: int, device: str
) -> None:
    offs_E = ops.splits_to_offsets(
        torch.tensor(m_splits, device=device), num_rows, alignment=alignment, out_dtype=torch.int64
    )
    assert offs_E.tolist() == reference.splits_to_offsets(m_splits, num_rows, alignment)


@needs_gpu
@pytest.mark.parametrize("num_groups", SIZES)
def test_negative_and_overflowing_splits_are_clamped_on_cuda(num_groups: int) -> None:
    # on CPU they raise: test_errors.py
    splits_E = torch.randint(-300, 300, (num_groups,), dtype=torch.int64)
    for huge in (None, INT32_MAX, INT64_MAX, -INT64_MAX):
        if huge is not None:
            splits_E[num_groups // 2] = huge
        for alignment in (1, 128, 2**40):
            offs_E = ops.splits_to_offsets(splits_E.cuda(), 500, alignment=alignment)
            assert offs_E.tolist() == reference.splits_to_offsets(splits_E.tolist(), 500, alignment)


LIES = {
    "past_the_rows": [10, 300, 173],
    "decreasing": [130, 3, 173],
    "negative": [-5, 40, -1],
    "overlapping": [173, 0, 173],
    "extreme": [INT32_MAX, -INT32_MAX - 1, INT32_MAX],
}


LIED_TO: dict[str, dict[str, Any]] = {
    **{op: {} for op in OPS if "offs" in make(op, GROUPS["unaligned"], BF16).arguments},
    "group_quantize": {"columnwise": True, "bias_grad": True},
    "block_scaled_linear_grad": {"x_t": None, "scale_x_t": None},  # wgrad clamps elsewhere
}


@needs_gpu
@pytest.mark.parametrize("op", LIED_TO)
@pytest.mark.parametrize("offs", LIES.values(), ids=LIES)
def test_lying_offsets_are_clamped_on_cuda(op: str, offs: list[int]) -> None:
    """Ends count as their running maximum, within the rows there are."""
    sample = make(op, GROUPS["unaligned"], BF16, **LIED_TO[op])
    # wgrad from columnwise data knows the rows of its blocks only
    num_rows = 128 * len(sample["dy_t"]) if "dy_t" in sample.arguments else 173
    clamped = [rows.stop for rows in reference.groups(torch.tensor(offs), num_rows)]
    lie, truth = (sample.but(offs=torch.tensor(o, dtype=torch.int32)) for o in (offs, clamped))
    for actual, expected in zip(
        specified(truth, lie.results("cuda")), specified(truth, truth.results("cuda")), strict=True
    ):
        assert_same_bits(actual, expected)
