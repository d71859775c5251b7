# SPDX-License-Identifier: Apache-2.0
"""group_quantize: rows to FP8 under block scaling."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import gathered, rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    arguments = {"x": rows(groups, groups.K, dtype, layout), "offs": groups.offs()}
    if index := options.pop("index", None):
        arguments |= gathered(groups, groups.K, dtype, layout, index)
    return arguments


def expected(sample: Sample) -> Outputs:
    offs, scaling = sample["offs"], must.scaling_of(sample)
    x_TK = reference.gather(sample["x"], sample.get("rows"), offs)
    share = sample.get("share_scales")
    return [
        *must.if_asked(sample.get("rowwise"), must.rowwise(x_TK, offs, scaling)),
        *must.if_asked(sample.get("columnwise"), must.columnwise(x_TK, offs, scaling, share)),
        *must.if_asked(sample.get("bias_grad"), [must.bias_grad(x_TK, offs)]),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        **variants.ROWS,
        "exact_scales": {"columnwise": True, **variants.EXACT},
        "shared": {"columnwise": True, "bias_grad": True, "share_scales": True},
        "gathered": {"columnwise": True, "bias_grad": True, "index": torch.int32},
        "gathered_bias": {"bias_grad": True, "index": torch.int64},
        "gathered_strided": {
            "columnwise": True,
            "index": torch.int64,
            "layout": "strided",
            "share_scales": True,
        },
    },
    every_tensor="gathered",
    unspecified=("rows", "columns", "blocks", "blocks"),
    too_large=(({"x": 0}, {}), ({"rows": 0}, {"index": torch.int32})),
    benchmark="bench_group_quantize",
)
