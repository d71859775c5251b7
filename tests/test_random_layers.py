# SPDX-License-Identifier: Apache-2.0
"""Layers of random options on a GPU have the CPU's numbers.

`python tests/random_layers.py --layers N --seed S` runs as many others as one likes.
"""

import pytest

from support.devices import needs_gpu
from support.random_layer import difference, drawn

AT_ONCE = 50


def compare(first: int, count: int) -> None:
    for seed in range(first, first + count):
        text, run, allowed = drawn(seed)
        off = difference(run("cuda"), run("cpu"))
        assert off <= allowed, text


@needs_gpu
@pytest.mark.parametrize("first", range(0, 2000, AT_ONCE))
def test_gpu_has_the_numbers_of_the_cpu(first: int, poisoned: None) -> None:
    compare(first, AT_ONCE)


@pytest.mark.nightly
@needs_gpu
@pytest.mark.parametrize("first", range(2000, 40000, 500))
def test_many_more(first: int, poisoned: None) -> None:
    compare(first, 500)


def test_a_seed_is_a_layer() -> None:
    """The CPU gives the same numbers again, and a planted fault is seen."""
    for seed in range(12):
        text, run, allowed = drawn(seed)
        first, again = run("cpu"), run("cpu")
        assert drawn(seed)[0] == text
        assert difference(first, again) == 0, text
        largest = max(first, key=lambda t: t.numel())
        if largest.numel() and largest.any():
            spoilt = [t.clone() for t in first]
            spoilt[[t is largest for t in first].index(True)].view(-1)[0] = float("nan")
            assert difference(spoilt, first) > allowed
