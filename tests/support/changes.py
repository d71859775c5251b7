# SPDX-License-Identifier: Apache-2.0
"""Changes of a call's arguments. An op refuses or takes each, and its fake kernel does the same."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from support.op_info import Arguments, Sample
from support.reference import E4M3, E5M2
from support.tensors import BF16, FP16, FP32

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.bool)
DTYPES = (torch.float64, FP32, FP16, E5M2, *INTEGERS)
INF, NAN = float("inf"), float("nan")
# By the type in a schema.
NUMBERS: dict[str, list[Any]] = {
    "float": [-0.5, 0.0, 1e39, INF, -INF, NAN],
    "int": [-1, 0, 1025],
    "SymInt": [-1, 0, 1025],
    "bool": [False, True],
    "str": ["tanh"],
    "ScalarType": [torch.float64, FP32, BF16, E4M3, E5M2, torch.float8_e4m3fnuz, torch.int8],
}


def zeros(like: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.zeros(sizes).to(like.dtype)


def of_other_sizes(t: Tensor) -> Iterator[Tensor]:
    for d, n in enumerate(t.shape):
        yield from (zeros(t, [*t.shape[:d], m, *t.shape[d + 1 :]]) for m in (0, n - 1, n + 16))


def other_tensors(t: Tensor) -> Iterator[Tensor]:
    """Of other sizes, dimensions, dtypes and strides."""
    yield from of_other_sizes(t)
    if t.dim():
        yield t[0]
    yield t[None]
    yield from (t.to(dtype) for dtype in DTYPES if dtype != t.dtype)
    if t.dim() == 1:
        yield torch.stack([t, t], dim=1)[:, 0]
    elif t.dim() > 1:
        yield t.mT.contiguous().mT


def others(value: Any) -> Iterator[Any]:
    """Other tensors, lists of other lengths, with another last one and with others alone."""
    if isinstance(value, Tensor):
        yield from other_tensors(value)
    elif isinstance(value, list):
        yield from (value[:-1], 1025 * value[:1])
        is_tensor = isinstance(value[-1], Tensor)
        for other in other_tensors(value[-1]) if is_tensor else NUMBERS["float"]:
            yield [*value[:-1], other]
            yield len(value) * [other]


def with_size(value: Any, size: int, new: int) -> Any:
    """Each dimension of a size with another one, and so lists of as many tensors."""
    if isinstance(value, list):
        changed = [with_size(t, size, new) for t in value]
        return (new * changed)[:new] if len(value) == size else changed
    if not isinstance(value, Tensor) or size not in value.shape:
        return value
    return zeros(value, [new if n == size else n for n in value.shape])


def changes(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Arguments]]:
    """Of calls of an op each argument, as other calls have it, or left out; each size; numbers.

    In all but the first call that has an argument with so many dimensions its sizes alone change.
    """
    types = {a.name: str(a.real_type) for a in samples[0].schema.arguments}
    for name, kind in types.items():
        numbers = NUMBERS.get(kind.removeprefix("Optional[").removesuffix("]"), [])
        yield from ((samples[-1], {name: number}) for number in numbers)
    yield samples[-1], {name: False for name, kind in types.items() if kind == "bool"}
    changed = set()
    for good in samples:
        given = {n: value for n, value in good.arguments.items() if value is not None}
        for name, value in given.items():
            kind = name, value.dim() if isinstance(value, Tensor) else None
            if kind not in changed:
                yield from ((good, {name: other}) for other in others(value))
            elif isinstance(value, Tensor):
                yield from ((good, {name: other}) for other in of_other_sizes(value))
            changed.add(kind)
        optional = [name for name in given if types[name].startswith("Optional")]
        left_out = [*combinations(optional, 1), *combinations(optional, 2)]
        yield from ((good, dict.fromkeys(names)) for names in left_out)
        elsewhere = {n: v for sample in samples for n, v in sample.arguments.items()}
        yield from ((good, {n: v}) for n, v in elsewhere.items() if n not in given)
        groups = [1025] if good is samples[0] else []  # many: their tensors take a while
        yield from ((good, resized) for resized in other_sizes(given, groups))


def other_sizes(given: Arguments, groups: list[int]) -> Iterator[Arguments]:
    """The tensors of each size, of another one: none, no multiple of 16, more, and too much."""
    sizes = {n for t in tree_leaves(given) if isinstance(t, Tensor) for n in t.shape if n > 2}
    more = {3: groups, 16: [512, 528]}  # past the most that there may be; the most, and past it
    for size in sorted(sizes):
        for new in (0, size - 8 if size > 8 else 2, size + 16, *more.get(size, ())):
            resized = {n: with_size(value, size, new) for n, value in given.items()}
            yield {n: value for n, value in resized.items() if value is not given[n]}
