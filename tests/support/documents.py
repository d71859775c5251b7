"""The project's documents and the examples in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
