"""Cases of every op for parametrize: group sizes, variants and dtypes in pairs, on each device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.devices import devices
from support.groups import GROUPS, SHAPES
from support.ops import PAGES
from support.tensors import DTYPES


def pairs(op: str) -> Iterator[tuple[str, str, torch.dtype]]:
    """Names of groups and of variants, with dtypes: each dtype meets each of both.

    The longer list is gone through once a dtype, the other one around; for each dtype it begins
    elsewhere, so that other groups meet a variant.
    """
    page = PAGES[op]
    groups = SHAPES if page.shares_kernels else tuple(GROUPS)
    variants = ("plain", *page.variants)
    for d, dtype in enumerate(DTYPES):
        for i in range(max(len(groups), len(variants))):
            yield groups[i % len(groups)], variants[(i + 5 * d) % len(variants)], dtype


def cases(*ops: str) -> list[Any]:
    """Samples for parametrize(("op", "groups", "variant", "dtype", "device"), ...)."""
    return [
        pytest.param(
            *(op, GROUPS[groups], variant, dtype, device.values[0]),
            marks=device.marks,
            id=f"{op}-{groups}-{variant}-{str(dtype).removeprefix('torch.')}-{device.id}",
        )
        for op in ops
        for device in devices(op)
        for groups, variant, dtype in pairs(op)
    ]
