# SPDX-License-Identifier: Apache-2.0
"""swiglu_grad: the gradient of SwiGLU, and its weighted output."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import per_row, rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    arguments = {"dh": rows(groups, groups.K, dtype, layout)}
    arguments["gate_up"] = rows(groups, 2 * groups.K, dtype, layout)
    return {**arguments, "weight": per_row(groups, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    inputs = (sample[name] for name in ("dh", "gate_up", "weight", "offs"))
    return [*must.swiglu_grad(*inputs, must.form_of(sample))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.SWIGLU,
    too_large=(({"dh": 0, "gate_up": 0, "weight": 0}, {}),),
    benchmark="bench_group_quantize",
)
