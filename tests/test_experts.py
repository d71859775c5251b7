# SPDX-License-Identifier: Apache-2.0
"""Ops on a weight that is E tensors [N, K]: the bits of the ops on one tensor [E, N, K].

E groups, K in_features, N out_features.
"""

from typing import Any

import pytest
import torch

from support.cases import cases
from support.compare import assert_same_bits
from support.groups import GROUPS, Groups
from support.op_info import Sample
from support.samples import make, variant_of
from support.tensors import BF16, on


def with_one_tensor(sample: Sample) -> Sample:
    """The same call of the op that takes one tensor."""
    name = "b" if sample.op == "grouped_mm_list" else "main_grad"
    arguments = dict(sample.arguments)
    arguments[name] = torch.stack(arguments[name])
    if arguments.pop("transpose_b", False):
        arguments[name] = arguments[name].transpose(1, 2)
    return Sample(sample.op.replace("_list", ""), arguments)


LISTS = ("grouped_mm_list", "grouped_mm_wgrad_list_", "grouped_scaled_mm_wgrad_list_")


@pytest.mark.parametrize(("op", "groups", "variant", "dtype"), cases(*LISTS))
def test_lists(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    sample = variant_of(op, groups, variant, dtype).on(device)
    other = with_one_tensor(sample)
    actual, expected = sample(), other()
    if sample.written:
        actual, expected = torch.stack(sample["main_grad"]), other["main_grad"]
    valid = groups.valid if actual.dim() == 2 else None
    assert_same_bits(actual[:valid], expected[:valid])


def test_addresses_are_looked_at_in_every_call(device: str) -> None:
    """Memory that begins where the last tensor ends, in the wrong order, or with a gap."""
    groups = GROUPS["unaligned"]
    sample = make("grouped_mm_list", groups, BF16, experts="views").on(device)
    packed = torch.stack(sample["b"])
    room = on(device, torch.randn(groups.E + 2, groups.N, groups.K).to(BF16))
    arrangements: list[Any] = [room[1:4], room[[2, 0, 1]], room.flip(0)[:3], room[::2][:3]]
    for experts in arrangements:
        with torch.no_grad():
            experts.copy_(packed)
        assert_same_bits(sample.but(b=list(experts))(), sample.but(b=list(packed))())
    backwards = [room[3], room[1], room[2]]
    for slot, expert in zip(backwards, packed, strict=True):
        slot.copy_(expert)
    assert_same_bits(sample.but(b=backwards)(), sample.but(b=list(packed))())
