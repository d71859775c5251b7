# SPDX-License-Identifier: Apache-2.0
"""group_quantize_current: rows to FP8 with one scale a group, from its own amax."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    fp8 = options.pop("fp8", reference.E4M3)
    return {"x": rows(groups, groups.K, dtype, layout), "offs": groups.offs(), "out_dtype": fp8}


def expected(sample: Sample) -> Outputs:
    x, offs, scaling = sample["x"], sample["offs"], must.scaling_of(sample)
    q, scale = reference.quantize_groups(x, offs, scaling, sample["out_dtype"])
    of_q, of_q_t = must.per_group(q, sample)
    total = must.if_asked(sample.get("bias_grad"), [must.bias_grad(x, offs)])
    return [of_q, Output(scale), of_q_t, *total]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        **variants.ROWS,
        "e5m2": {"fp8": reference.E5M2, "columnwise": True, "bias_grad": True},
        "powers_of_two": {"columnwise": True, "power_of_two_scales": True, "amax_epsilon": 5.0},
    },
    unspecified=("rows", None, "blocks"),
    too_large=(({"x": 0}, {}),),
    benchmark="bench_group_quantize",
)
