# SPDX-License-Identifier: Apache-2.0
"""Samples of every op, as its page makes them, and what is specified of their results.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from support import reference
from support.groups import Groups
from support.op_info import Sample
from support.ops import PAGES


def make(
    op: str, groups: Groups, dtype: torch.dtype, /, layout: str = "dense", **options: Any
) -> Sample:
    """A sample on the CPU.

    Options are the page's own, and further arguments by name. `overwrite=True` and `refresh=True`
    make a flag tensor, `requires_grad` names arguments.
    """
    requires_grad = options.pop("requires_grad", ())
    arguments = PAGES[op].sample(groups, dtype, layout, options) | options
    for flag in ("overwrite", "refresh"):
        if isinstance(arguments.get(flag), bool):
            arguments[flag] = torch.tensor(arguments[flag])
    for name in requires_grad:
        arguments[name].requires_grad_()
    return Sample(op, arguments)


def variant_of(op: str, groups: Groups, variant: str, dtype: torch.dtype) -> Sample:
    """A sample of one of the page's variants, or of "plain", on the CPU."""
    return make(op, groups, dtype, **dict(PAGES[op].variants.get(variant, {})))


def of_every_kind(op: str, groups: Groups, dtype: torch.dtype) -> list[Sample]:
    """A sample for each choice of tensors that are given, and of their dimensions."""
    first: dict[Any, Sample] = {}
    for variant in ("plain", *PAGES[op].variants):
        sample = variant_of(op, groups, variant, dtype)
        tensors = {n: v for n, v in sample.arguments.items() if isinstance(v, Tensor | list)}
        kind = tuple((n, v.dim() if isinstance(v, Tensor) else list) for n, v in tensors.items())
        detached = {n: v.detach() for n, v in tensors.items() if isinstance(v, Tensor)}
        first.setdefault(kind, sample.but(**detached))
    return list(first.values())


def with_every_tensor(op: str, groups: Groups, dtype: torch.dtype) -> Sample:
    return variant_of(op, groups, PAGES[op].every_tensor, dtype)


def specified_parts(sample: Sample, results: Sequence[Tensor]) -> list[Any]:
    """Of each result, an index of what the contract does not leave unspecified."""
    kinds = PAGES[sample.op].unspecified
    parts: list[Any] = [...] * len(results)
    if kinds:
        T = next(
            t.size(0)
            for n in ("rows", "x", "gate_up")
            if (t := sample.arguments.get(n)) is not None
        )
        splits = sample.arguments.get("m_splits")
        offs = sample["offs"] if splits is None else splits.cumsum(0)
        valid = slice(reference.groups(offs, T)[-1].stop)
        part_of = {"rows": (valid,), "columns": (..., valid), None: ...}
        part_of["blocks"] = (slice(len(reference.row_blocks(offs, T))),)
        parts[: len(kinds)] = [part_of[kind] for kind in kinds]
    return parts[: len(results)]


def specified_masks(sample: Sample, results: Sequence[Tensor]) -> list[Tensor]:
    masks = [torch.zeros(t.shape, dtype=torch.bool) for t in results]
    for mask, part in zip(masks, specified_parts(sample, results), strict=True):
        mask[part] = True
    return masks


def keep(results: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The results, with zeros where a mask is false. float8 becomes the numbers of its bytes."""
    numbers = [t.view(torch.uint8).float() if t.itemsize == 1 else t for t in results]
    return [torch.where(mask, t, 0) for mask, t in zip(masks, numbers, strict=True)]


def specified(sample: Sample, results: Sequence[Tensor]) -> list[Tensor]:
    """The results, with zeros in the bytes that the contract leaves unspecified."""
    return keep(results, specified_masks(sample, results))
