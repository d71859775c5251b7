"""Every op, as its page in ``support/ops/`` has it: its results."""

from pathlib import Path

import pytest
import torch

from grouped_linear import ops
from support.cases import cases
from support.check import check
from support.groups import Groups
from support.ops import OPS, PAGES
from support.samples import variant_of


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


@pytest.mark.parametrize(("op", "groups", "variant", "dtype", "device"), cases(*OPS))
def test_results(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    check(variant_of(op, groups, variant, dtype), device)
