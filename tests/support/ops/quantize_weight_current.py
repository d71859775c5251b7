# SPDX-License-Identifier: Apache-2.0
"""quantize_weight_current: a weight to FP8 with one scale an expert, from its own amax."""

import torch

from support import expected as must
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"w": weight(groups, dtype, layout)}


def expected(sample: Sample) -> Outputs:
    q, scale, q_t = must.weight_current(sample["w"], must.scaling_of(sample))
    return [Output(q), Output(scale), *must.if_asked(sample.get("columnwise"), [Output(q_t)])]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "rowwise": {"columnwise": False},
        "powers_of_two": {"power_of_two_scales": True, "amax_epsilon": 5.0},
        "transposed": {"layout": "transposed"},
    },
    too_large=(({"w": 1}, {}),),
    benchmark="bench_group_quantize",
)
