# SPDX-License-Identifier: Apache-2.0
"""refresh_weight_delayed_: quantize_weight_delayed into kept tensors, with its scales."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import kept_weight, recorded_amax, scales
from support.tensors import listed


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    amax, w = recorded_amax(groups, options), listed(groups, dtype, layout, options)
    given = {"amax": amax, "w": w, "state": scales(groups, options), "refresh": None}
    return {**given, **kept_weight(groups, options), "scale": scales(groups)}


def expected(sample: Sample) -> Outputs:
    w = must.one_weight(sample["w"])
    q, used, q_t = must.weight_delayed(w, sample["state"])
    of_amax = must.weight_amax(sample["amax"], w)
    if sample["refresh"] is not None and not sample["refresh"]:
        of_amax = [Output(sample["amax"])]
    return [*must.refreshed(sample, [q, used, q_t]), *of_amax]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={**variants.refreshing(amax=False), "first": {"first": True}},
    every_tensor="yes",
    shares_kernels=True,
)
