# SPDX-License-Identifier: Apache-2.0
"""group_quantize_delayed: rows to FP8 with given scales, one a group; the amax is recorded."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import recorded_amax, scales
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    amax, fp8 = recorded_amax(groups, options), options.pop("fp8", reference.E4M3)
    arguments = {"amax": amax, "x": rows(groups, groups.K, dtype, layout), "offs": groups.offs()}
    return {**arguments, "scale": scales(groups, options), "out_dtype": fp8}


def expected(sample: Sample) -> Outputs:
    x, offs, before = sample["x"], sample["offs"], sample["amax"]
    q, used = reference.quantize_groups_with(x, offs, sample["scale"], sample["out_dtype"])
    of_q, of_q_t = must.per_group(q, sample)
    total = must.if_asked(sample.get("bias_grad"), [must.bias_grad(x, offs)])
    outputs = [of_q, Output(used), of_q_t, *total]
    if before is not None:
        outputs.append(Output(torch.maximum(before, reference.amax_of_groups(x, offs))))
    return outputs


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        **variants.ROWS,
        "e5m2": {"fp8": reference.E5M2, "columnwise": True, "bias_grad": True},
        "no_amax": {"amax": False, "columnwise": True},
        "first": {"first": True, "columnwise": True},
        "first_e5m2": {"first": True, "fp8": reference.E5M2, "columnwise": True},
    },
    unspecified=("rows", None, "blocks"),
    too_large=(({"x": 0}, {}),),
    benchmark="bench_group_quantize",
)
