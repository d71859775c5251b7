# SPDX-License-Identifier: Apache-2.0
"""Few rows of several lists' values, in place of all of them with each other.

A list is a dict of values by name, and a row a pytest.param with a value of each.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def in_turn(*factors: Mapping[str, Any]) -> list[Any]:
    """Each value once and more: through the longest list, and around the others."""
    length = max(map(len, factors))
    return [_row(factors, [i % len(factor) for factor in factors]) for i in range(length)]


def pairwise(*factors: Mapping[str, Any]) -> list[Any]:
    """All pairs of values of two lists, each in some row.

    Each row begins with a pair that is missing, and takes what adds the most missing pairs.
    """
    sizes = [range(len(factor)) for factor in factors]
    missing = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(factors)), 2)
        for a in sizes[i]
        for b in sizes[j]
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for i, size in enumerate(sizes):
            if i not in row:
                row[i] = max(size, key=lambda a: (len(missing & _pairs({**row, i: a})), -a))
        missing -= _pairs(row)
        rows.append([row[i] for i in range(len(factors))])
    return [_row(factors, row) for row in sorted(rows)]


def _pairs(row: dict[int, int]) -> set[Any]:
    return set(combinations(sorted(row.items()), 2))


def one_in_ci(cases: Sequence[Any]) -> list[Any]:
    """The first of them always, the others where pytest has --nightly."""
    first, *others = cases
    marked = (c if isinstance(c, tuple) else (c,) for c in others)
    return [first, *(pytest.param(*values, marks=pytest.mark.nightly) for values in marked)]


def _row(factors: tuple[Mapping[str, Any], ...], places: list[int]) -> Any:
    names = [list(factor)[place] for factor, place in zip(factors, places, strict=True)]
    values = [factor[name] for factor, name in zip(factors, names, strict=True)]
    return pytest.param(*values, id="-".join(names))
