# SPDX-License-Identifier: Apache-2.0
"""Text to learn from that is the same on every machine: programs of random words, by a seed."""

import random
from pathlib import Path

SYLLABLES = ("ba", "co", "de", "fi", "gra", "ker", "lo", "mat", "nor", "pu", "ra", "sto")
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]
OFTEN = [1 / (place + 1) for place in range(len(WORDS))]  # as words of a language are distributed
LINES = (
    "def {}({}, {}):\n    {} = {}.{}({})\n    return {}\n",
    "    for {} in {}:\n        {} += {} * {}\n",
    "    if {} < {}:\n        raise ValueError(f'{} of {}')\n",
    "from {} import {}, {}\n",
    "    {}[{}] = {}\n",
    "class {}({}):\n    {}: {} = {}\n",
)


def program(seed: int, characters: int = 20_000) -> str:
    """So many characters, cut at the end of a line."""
    # Only random() has the same numbers in every version of Python; choices() follows from it.
    chance = random.Random(seed)
    text = ""
    while len(text) < characters:
        (line,) = chance.choices(LINES)
        text += line.format(*chance.choices(WORDS, OFTEN, k=line.count("{}")))
    return text


def write_programs(folder: Path, files: int = 60) -> list[Path]:
    """Programs in folders of two files each."""
    paths = [folder / f"part{i // 2}" / f"{i}.py" for i in range(files)]
    for seed, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_text(program(seed), "utf-8")
    return paths
