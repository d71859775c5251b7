# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck over every op, variant, dtype and device."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests.aot_autograd import aot_autograd_check
from torch.utils._pytree import tree_leaves

from support.cases import LAYOUTS, distinct_variants
from support.compare import bits
from support.groups import GROUPS, Groups
from support.op_info import Sample
from support.ops import OPS, PAGES
from support.reference import E4M3, E5M2
from support.samples import keep, make, specified_masks, variant_of
from support.tensors import BF16, DTYPES, on

EVERY_UTIL = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def check_schema(sample: Sample) -> None:
    """Only what the schema marks is written, and no output shares memory with an input.

    What opcheck's test_schema checks; that one multiplies every input, which torch has no CPU
    kernel for in float8.
    """
    written = [a.name for a in sample.schema.arguments if a.alias_info and a.alias_info.is_write]
    inputs = {
        name: [t for t in tree_leaves(v) if isinstance(t, Tensor)]
        for name, v in sample.arguments.items()
    }
    before = {name: [bits(t).clone() for t in ts] for name, ts in inputs.items()}
    outputs = tree_leaves(sample())
    for name, ts in inputs.items():
        if name not in written:
            for t, old in zip(ts, before[name], strict=True):
                assert torch.equal(bits(t), old), f"{name} was written"
    storages = {t.untyped_storage().data_ptr() for t in tree_leaves(inputs) if t.numel()}
    for output in outputs:
        if output is not None and output.numel():
            assert output.untyped_storage().data_ptr() not in storages


def aot_check_of_specified(sample: Sample, device: str) -> None:
    """opcheck's test_aot_dispatch_dynamic on what is specified of the outputs."""
    results = sample.results("cpu")
    masks = [on(device, mask) for mask in specified_masks(sample, results)]

    def same(compiled: Sequence[Tensor], eager: Sequence[Tensor], msg: str) -> None:
        parts = [keep(outputs, masks[: len(outputs)]) for outputs in (compiled, eager)]
        torch.testing.assert_close(*parts, msg=msg)

    arguments = sample.on(device).arguments
    options = {"dynamic": True, "check_gradients": "auto", "assert_equals_fn": same}
    aot_autograd_check(sample.overload, (), arguments, **options)


SIZES_OF_ARGUMENTS = [
    (op, a.name)
    for op in OPS
    for a in make(op, GROUPS["capacity"], BF16).schema.arguments
    if isinstance(a.real_type, torch.SymIntType)
]


@pytest.mark.parametrize(("op", "name"), SIZES_OF_ARGUMENTS)
def test_a_size_among_arguments_stays_open(op: str, name: str) -> None:
    """opcheck opens those of tensors alone. Dynamo raises for one that a fake makes constant."""
    sample = make(op, GROUPS["capacity"], BF16)
    sample = sample.but(**{name: max(2, sample.get(name))})  # torch makes 1 a constant
    like = torch.empty(sample[name])
    torch._dynamo.mark_dynamic(like, 0)
    # Dynamo of torch 2.11 does not make a frozen dataclass.
    op, arguments = sample.overload, sample.arguments
    call = torch.compile(
        lambda like: op(**{**arguments, name: like.size(0)}), fullgraph=True, backend="eager"
    )
    for actual, expected in zip(tree_leaves(call(like)), sample.results("cpu"), strict=True):
        assert actual.shape == expected.shape


# The dispatcher sees how many rows and groups there are, not which groups are empty.
SIZES = ("capacity", "no_rows", "one_group")


def differing(*ops: str) -> list[Any]:
    """A sample of these ops for each way in which they are traced."""
    return [
        pytest.param(op, GROUPS[name], variant, id=f"{op}-{name}-{variant}")
        for op in ops
        for variant in distinct_variants(op)
        for name in (SIZES if variant == "plain" else SIZES[:1])
    ]


@pytest.mark.parametrize(("op", "groups", "variant"), differing(*OPS))
def test_opcheck(op: str, groups: Groups, variant: str, device: str) -> None:
    # float16 and float32 take the same paths through the dispatcher: one group size for them. A
    # graph of no rows or one group has constants for these sizes, as fake tensors have.
    open_sizes = groups == GROUPS["capacity"]
    traced = open_sizes and LAYOUTS.isdisjoint(PAGES[op].variants.get(variant, {}))
    for dtype in DTYPES if open_sizes and variant == "plain" else (BF16,):
        sample = variant_of(op, groups, variant, dtype)
        utils = list(EVERY_UTIL)
        if not traced or dtype != BF16:
            utils.remove("test_aot_dispatch_dynamic")
        elif PAGES[op].unspecified:
            aot_check_of_specified(sample, device)
            utils.remove("test_aot_dispatch_dynamic")
        sample = sample.on(device)
        check_schema(sample)
        tensors = [a for a in sample.arguments.values() if isinstance(a, Tensor)]
        if any(t.dtype in (E4M3, E5M2) for t in tensors):
            utils.remove("test_schema")
        torch.library.opcheck(sample.overload, (), sample.arguments, test_utils=utils)
