"""What the README and docs/ show runs, and the README's table of ops is what is registered."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from grouped_linear import GroupedLinear
from grouped_linear.nn.options import OUT_OF_SCOPE
from support.documents import ROOT, examples
from support.versions import AOTI_READS_DTYPES, skipping_for_old_transformers

README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
KEYS = {"fake": "Meta", "CPU": "CPU", "gradient": "Autograd"}


def test_python_examples_run() -> None:
    assert len(examples(README)) == 3
    names: dict[str, Any] = {}
    for example in examples(README):
        exec(compile(example, "README.md", "exec"), names)
        if "m_splits" in example:
            tail_rows = names["y"][int(names["m_splits"].sum()) :]
            assert len(tail_rows) == 50
            assert not tail_rows.any()
            assert names["x"].grad is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_pages_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in one module, as a reader would run them."""
    text = page.read_text()
    assert examples(text)
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo imports what it inlines from
    for example in examples(text):
        if "aoti_load_package" in example and not AOTI_READS_DTYPES:
            pytest.skip("AOTInductor of torch 2.11 takes the dtype that an op is given for another")
        line = text[: text.index(example)].count("\n")
        with skipping_for_old_transformers():
            exec(compile("\n" * line + example, str(page), "exec"), vars(module))


def test_every_argument_is_compared_with_transformer_engine() -> None:
    page = (ROOT / "docs" / "from_transformer_engine.md").read_text()
    signatures = map(inspect.signature, (GroupedLinear.__init__, GroupedLinear.forward))
    arguments = {name for signature in signatures for name in signature.parameters}
    arguments = arguments - {"self", "out_of_scope"} | set(OUT_OF_SCOPE)
    assert not {name for name in arguments if not re.search(rf"`{name}\b", page)}


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "docs" / "notes").glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (page.parent / link).exists(), link


def _table() -> dict[str, dict[str, bool]]:
    """Op -> column -> yes, as the README has it."""
    lines = iter(README.splitlines())
    head = next(line for line in lines if line.startswith("| op |"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    next(lines)
    table = {}
    for line in lines:
        if not line.startswith("|"):
            break
        op, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert set(cells) <= {"yes", "-"}
        table[op.strip("`")] = {
            column: cell == "yes" for column, cell in zip(columns[1:], cells, strict=True)
        }
    return table


def _has_cuda_kernel() -> set[str]:
    """The ops that csrc/library.cpp gives a kernel of each backend.

    The dispatcher cannot tell: a build without CUDA registers kernels that raise an error.
    """
    registered = (ROOT / "csrc" / "library.cpp").read_text()
    return set(re.findall(r"^  OP\((\w+)\)", registered, re.MULTILINE))


def test_table_lists_every_op() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ops = {name.removeprefix("grouped_linear::") for name in names if "grouped_linear::" in name}
    assert set(_table()) == ops


@pytest.mark.parametrize("column", KEYS)
def test_table_is_what_is_registered(column: str) -> None:
    stated = {op for op, cells in _table().items() if cells[column]}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert stated == {op for op in _table() if has_kernel(f"grouped_linear::{op}", KEYS[column])}


def test_table_is_what_has_a_cuda_kernel() -> None:
    assert {op for op, cells in _table().items() if cells["CUDA"]} == _has_cuda_kernel()


def test_files_to_read_first_exist() -> None:
    files = re.findall(r"^\d\. `([^`]+)`", README, re.MULTILINE)
    assert len(files) == 5
    assert all((ROOT / file).is_file() for file in files)
