"""Ops on a weight that is E tensors [N, K], and ops that quantize a weight into tensors kept.

Both are held to the ops on one tensor [E, N, K] bit for bit; test_quantize.py, test_per_group.py
and test_mm.py hold those to the reference. E groups, K in_features, N out_features.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_linear import ops
from support.cases import cases, variant_of
from support.compare import assert_same_bits
from support.devices import devices
from support.groups import GROUPS, Groups
from support.samples import Sample, make
from support.tensors import BF16, DTYPES, on

REFRESH = (
    "refresh_weight_",
    "refresh_weight_current_",
    "refresh_weight_delayed_",
    "refresh_weight_mx_",
)


def quantized_anew(sample: Sample) -> list[Tensor]:
    """What the op that allocates gives for the weight as one tensor, in the refresh's order."""
    w = sample["w"][0] if sample["w"][0].dim() == 3 else torch.stack(sample["w"])
    rule = {
        name: sample.get(name)
        for name in ("amax_epsilon", "power_of_two_scales")
        if name in {a.name for a in sample.schema.arguments}
    }
    match sample.op:
        case "refresh_weight_":
            return list(ops.quantize_weight(w, **rule))
        case "refresh_weight_current_":
            return list(ops.quantize_weight_current(w, **rule))
        case "refresh_weight_delayed_":
            amax = None if sample["amax"] is None else sample["amax"].clone()
            q, scale, q_t = ops.quantize_weight_delayed(w, sample["state"], amax)
            columnwise = [] if sample["q_t"] is None else [q_t]
            return [q, scale, *columnwise, *([] if amax is None else [amax])]
    E, N, K = w.shape
    ends = torch.arange(1, E + 1, dtype=torch.int32, device=w.device) * N
    rounded = ops.group_round_mx(w.reshape(E * N, K), ends, columnwise=True)
    return [t.view(E, N, K) for t in rounded[:2]]


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases(*REFRESH))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refresh(op: str, groups: Groups, variant: str, dtype: torch.dtype, device: str) -> None:
    sample = variant_of(op, groups, variant, dtype).on(device)
    before = [sample[name].clone() for name in sample.written]
    anew = quantized_anew(sample)
    sample()
    refreshed = sample["refresh"] is None or sample["refresh"].item()
    for name, old, new in zip(sample.written, before, anew, strict=False):
        assert_same_bits(sample[name], new if refreshed else old)


def with_one_tensor(sample: Sample) -> Sample:
    """The same call of the op that takes one tensor."""
    name = "b" if sample.op == "grouped_mm_list" else "main_grad"
    arguments = dict(sample.arguments)
    arguments[name] = torch.stack(arguments[name])
    if arguments.pop("transpose_b", False):
        arguments[name] = arguments[name].transpose(1, 2)
    return Sample(sample.op.replace("_list", ""), arguments)


LISTS = ("grouped_mm_list", "grouped_mm_wgrad_list_", "grouped_scaled_mm_wgrad_list_")


@pytest.mark.parametrize(("op", "groups", "variant", "device"), cases(*LISTS))
def test_lists(op: str, groups: Groups, variant: str, device: str) -> None:
    for dtype in DTYPES if variant == "plain" else (BF16,):
        sample = variant_of(op, groups, variant, dtype).on(device)
        other = with_one_tensor(sample)
        actual, expected = sample(), other()
        if sample.written:
            actual, expected = torch.stack(sample["main_grad"]), other["main_grad"]
        valid = groups.valid if actual.dim() == 2 else None
        assert_same_bits(actual[:valid], expected[:valid])


@pytest.mark.parametrize("device", devices(*LISTS))
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
