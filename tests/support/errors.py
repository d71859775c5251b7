# SPDX-License-Identifier: Apache-2.0
"""Error sentences: the same from fake tensors, meta tensors, CPU and CUDA."""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from support.compare import assert_all_same_bits
from support.devices import GPUS
from support.groups import Groups
from support.op_info import Sample
from support.ops import PAGES
from support.samples import specified


def sentence(
    call: Callable[[], Any], kinds: tuple[type[Exception], ...] = (RuntimeError, ValueError)
) -> str:
    """The message of the error that the call raises, which must be of one of these kinds."""
    try:
        call()
    except kinds as error:
        return str(error)
    return "no error"


def said(calls: Iterable[Callable[[], Any]]) -> str:
    """A line for each call: the kind of its error, and its message."""
    lines = []
    for call in calls:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
            call()
        lines.append(f"{type(error.value).__name__}: {error.value}")
    return "\n".join(lines)


GROUPS_3 = Groups((3, 0, 7), 12, K=144, N=32)


def fake_sentence(sample: Sample, mode: FakeTensorMode | None = None) -> str:
    mode = FakeTensorMode() if mode is None else mode
    arguments = tree_map_only(Tensor, mode.from_tensor, sample.arguments)
    with mode:
        return sentence(Sample(sample.op, arguments), (Exception,))


# Sentences of a CPU about data, which a fake kernel does not see and a GPU clamps.
OF_DATA = re.compile("must (sum to|not exceed|not decrease|index)")
ANY = (Exception,)


def with_copies(sample: Sample) -> Sample:
    """The same call, which writes to other memory of the same strides."""
    return sample.but(**{name: copy.deepcopy(sample[name]) for name in sample.written})


def assert_alike(calls: Iterable[tuple[Sample, dict[str, Any]]]) -> set[str]:
    """What each change of a call says is the same for fake, meta, CPU and CUDA tensors.

    An op's rules are written twice, in Python and in C++: they refuse the same calls, in the same
    words, and after them a correct call still works. Returns the rules that were broken.
    """
    rules, mode = set(), FakeTensorMode()
    results: dict[int, tuple[Sample, list[Tensor]]] = {}
    for good, change in calls:
        if id(good) not in results:
            results[id(good)] = good, specified(good, good.results("cpu"))
        bad = good.but(**change)
        said = fake_sentence(bad, mode)
        assert sentence(bad.on("meta"), ANY) == said, change
        on_cpu = sentence(with_copies(bad), ANY)
        assert on_cpu == said or OF_DATA.search(on_cpu), (change, said)
        if said != "no error":
            rules.add(re.sub(r"\d+", "", said.partition(", got")[0]))
            assert said.partition(": ")[0] in PAGES, said  # another op is one that it calls
            if GPUS:
                assert sentence(bad.on("cuda"), ANY) == said, change
    assert rules
    for good, before in results.values():
        assert_all_same_bits(specified(good, good.results("cpu")), before)
    return rules
