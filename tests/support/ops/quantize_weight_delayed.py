# SPDX-License-Identifier: Apache-2.0
"""quantize_weight_delayed: a weight to FP8 with given scales, one an expert; it records amax."""

import torch

from support import expected as must
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import recorded_amax, scales
from support.tensors import weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    amax = recorded_amax(groups, options)
    return {"amax": amax, "w": weight(groups, dtype, layout), "scale": scales(groups, options)}


def expected(sample: Sample) -> Outputs:
    q, used, q_t = must.weight_delayed(sample["w"], sample["scale"])
    of_q_t = must.if_asked(sample.get("columnwise"), [Output(q_t)])
    return [Output(q), Output(used), *of_q_t, *must.weight_amax(sample["amax"], sample["w"])]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "rowwise": {"columnwise": False},
        "no_amax": {"amax": False},
        "first": {"first": True},
        "transposed": {"layout": "transposed"},
    },
    too_large=(({"w": 1}, {}),),
)
