# SPDX-License-Identifier: Apache-2.0
"""quantize_weight: a weight to FP8 in blocks of 128 x 128."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import mxfp4_blocks, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"w": weight(mxfp4_blocks(groups, options), dtype, layout)}


def expected(sample: Sample) -> Outputs:
    q, scale, q_t = must.weight(sample["w"], must.scaling_of(sample), sample.get("mxfp4_dim"))
    return [
        *must.if_asked(sample.get("rowwise"), [Output(q)]),
        Output(scale),
        *must.if_asked(sample.get("columnwise"), [Output(q_t)]),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "rowwise": {"columnwise": False},
        "columnwise": {"rowwise": False},
        "exact_scales": variants.EXACT,
        **variants.MXFP4,
        **variants.STRIDES,
    },
    too_large=(({"w": 1}, {}),),
    benchmark="bench_group_quantize",
)
