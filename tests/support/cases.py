# SPDX-License-Identifier: Apache-2.0
"""Cases of every op for parametrize: group sizes, variants and dtypes in pairs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.groups import GROUPS, SHAPES
from support.ops import PAGES
from support.tensors import BF16, FP16, FP32

# Options that change no flag and no argument's presence or dtype: the dispatcher sees the same.
FORM = {"limit", "alpha", "beta", "cubic", "interleaved"}
NUMBERS = {*FORM, "amax_epsilon", "power_of_two_scales"}
LAYOUTS = {"layout", "low_layout"}


def pairs(op: str) -> Iterator[tuple[str, str, torch.dtype]]:
    """Names of groups and of variants, with dtypes.

    BF16 meets all of both, and so do the other two dtypes together. They begin elsewhere in one
    list, so that other groups meet a variant.
    """
    page = PAGES[op]
    groups = SHAPES if page.shares_kernels else tuple(GROUPS)
    variants = ("plain", *page.variants)
    for i in range(max(len(groups), len(variants))):
        group = groups[i % len(groups)]
        yield group, variants[i % len(variants)], BF16
        yield group, variants[(i + 5) % len(variants)], (FP16, FP32)[i % 2]


def distinct_variants(op: str, *, each_layout: bool = False) -> list[str]:
    """Of the op's variants the first one of those that are traced alike.

    They differ in more than numbers. All layouts of memory but a dense one are alike, if not each
    is asked for.
    """
    first: dict[str, str] = {}
    for variant, options in {"plain": {}, **PAGES[op].variants}.items():
        key = {
            name: value if each_layout or name not in LAYOUTS else "not dense"
            for name, value in options.items()
            if name not in NUMBERS
        }
        first.setdefault(repr(sorted(key.items())), variant)
    return list(first.values())


def cases(*ops: str) -> list[Any]:
    """Samples for parametrize(("op", "groups", "variant", "dtype"), ...)."""
    return [
        pytest.param(
            *(op, GROUPS[groups], variant, dtype),
            id=f"{op}-{groups}-{variant}-{str(dtype).removeprefix('torch.')}",
        )
        for op in ops
        for groups, variant, dtype in pairs(op)
    ]
