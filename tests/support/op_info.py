# SPDX-License-Identifier: Apache-2.0
"""What tests know of an op: an OpInfo, which its page in ``support/ops/`` makes.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import grouped_linear  # noqa: F401  (registers the ops)
from support.groups import Groups
from support.tensors import on

Arguments = dict[str, Any]
Options = dict[str, Any]


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.grouped_linear, op).default


@dataclass(frozen=True)
class Sample:
    """One call of one op, its arguments by name."""

    op: str
    arguments: Arguments

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def overload(self) -> torch._ops.OpOverload:
        return overload(self.op)

    @property
    def schema(self) -> torch._C.FunctionSchema:
        return self.overload._schema

    def get(self, name: str) -> Any:
        """The argument, or its default in the schema."""
        default = {a.name: a.default_value for a in self.schema.arguments}[name]
        return self.arguments.get(name, default)

    def on(self, device: str) -> "Sample":
        return Sample(self.op, {name: on(device, v) for name, v in self.arguments.items()})

    def but(self, **changed: Any) -> "Sample":
        return Sample(self.op, {**self.arguments, **changed})

    @property
    def written(self) -> list[str]:
        """Names of the given arguments that the op writes, by its schema."""
        marked = [a.name for a in self.schema.arguments if a.alias_info and a.alias_info.is_write]
        return [name for name in marked if self.arguments.get(name) is not None]

    def __call__(self) -> Any:
        return self.overload(**self.arguments)

    def results(self, device: str) -> list[Tensor]:
        """The tensors that the call returns, then those that it writes. All on the CPU."""
        there = self.on(device)
        there = there.but(**{n: tree_map(torch.clone, there[n]) for n in self.written})
        results = tree_leaves([there(), [there[n] for n in self.written]])
        return [t.detach().cpu() for t in results if t is not None]


@dataclass(frozen=True)
class Output:
    """What is specified of a result.

    Args:
        expected: the reference's bytes, or float64 where a bound is given.
        allowed: how far a number may be from it; None: the bytes are those of the reference.
        dtype: of the result, where expected is float64.
        shape: of the whole result, where a part of it is specified.
        same_bits: whether a GPU's bytes are the CPU's. Those of the reference are anyway.
    """

    expected: Tensor
    allowed: Tensor | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    same_bits: bool = False


Outputs = list[Output | None]  # None: nothing was asked for, and the result is empty


@dataclass(frozen=True, kw_only=True)
class OpInfo:
    """An op.

    Args:
        sample: its arguments on the CPU for group sizes, a dtype, a layout of memory and options,
            of which it takes its own out. What is left are further arguments by name.
        expected: what a call must give: the returned tensors, then those that are written.
        variants: options of further samples, by name. "plain" is the sample without options.
        every_tensor: the variant in which every tensor argument is given.
        unspecified: of each returned tensor, what the contract leaves open: "rows" past the last
            group's, "columns" where a column is a row's, "blocks" past the last used one.
        shares_kernels: its kernels are those of other ops, which meet all group sizes.
        mistakes: changes of a sample that ``support/changes.py`` does not make of any op.
        too_large: for sizes past 32 bits: which argument is too large in which dimension, and the
            options of the sample.
        benchmark: the program in ``benchmarks/`` that times it.
    """

    sample: Callable[[Groups, torch.dtype, str, Options], Arguments]
    expected: Callable[[Sample], Outputs]
    variants: Mapping[str, Options] = field(default_factory=dict)
    every_tensor: str = "plain"
    unspecified: tuple[str | None, ...] = ()
    shares_kernels: bool = False
    mistakes: tuple[Arguments, ...] = ()
    too_large: tuple[tuple[dict[str, int], Options], ...] = ()
    benchmark: str | None = None
