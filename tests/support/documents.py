# SPDX-License-Identifier: Apache-2.0
"""The project's documents and the examples in them."""

import re
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@cache
def example(name: str) -> Any:
    """A script of examples/ as a module."""
    spec = util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models() -> tuple[dict[str, str], dict[str, str]]:
    """docs/models.md: by model_type the last cell, of models that convert takes and of others."""
    tables: list[dict[str, str]] = []
    for line in (ROOT / "docs" / "models.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[1:2] == ["`model_type`"]:
            tables.append({})
        elif tables and line.startswith("| ") and cells[1] != "---":
            tables[-1] |= dict.fromkeys(re.findall(r"`(\w+)`", cells[1]), cells[2])
    taken, others = tables
    return taken, others
