"""The project's documents and the examples in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


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
