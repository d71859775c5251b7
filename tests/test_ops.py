# SPDX-License-Identifier: Apache-2.0
"""Every op, as its page in ``support/ops/`` has it: its results."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

from grouped_linear import ops
from support.cases import cases
from support.check import check
from support.groups import Groups
from support.ops import OPS, PAGES
from support.samples import variant_of
from support.tensors import BF16, with_gaps


def registered() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.split("::")[1] for n in names if n.startswith("grouped_linear::"))


def test_every_op_has_a_page() -> None:
    folder = Path("tests/support/ops")
    for op in registered():
        assert op in PAGES, f"{op} is registered and has no page: write {folder / op}.py"
        assert op in ops.__all__, f"{op} is registered and custom_ops/ops/__init__.py lacks it"
    for op in OPS:
        assert op in registered(), f"{op} is not registered: remove its page {folder / op}.py"


@pytest.mark.parametrize("op", OPS)
def test_page_is_complete(op: str) -> None:
    page = PAGES[op]
    root = Path(__file__).parent.parent
    assert page.every_tensor in ("plain", *page.variants)
    if page.benchmark:
        program = root / "benchmarks" / f"{page.benchmark}.py"
        assert program.exists(), f"{op}: {program} does not exist"


@pytest.mark.parametrize(("op", "groups", "variant", "dtype"), cases(*OPS))
def test_results(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    check(variant_of(op, groups, variant, dtype), device)


@pytest.mark.parametrize("op", OPS)
def test_operands_with_gaps(op: str) -> None:
    """Of each operand that an op reads, and at once: in no dimension is it dense."""
    sample = variant_of(op, Groups((5, 0, 11), 20, K=128, N=64), PAGES[op].every_tensor, BF16)
    read = {n: given for n, given in sample.arguments.items() if n not in sample.written}
    check(sample.but(**tree_map_only(torch.Tensor, with_gaps, read)), "cpu")
