# SPDX-License-Identifier: Apache-2.0
"""grouped_mm_wgrad_: grouped_mm_wgrad added to main_grad, or written over it."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import gathered_before, main_grad
from support.ops import grouped_mm_wgrad


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    operands = grouped_mm_wgrad.sample(groups, dtype, layout, options)
    return {"main_grad": main_grad(groups, options), **operands}


def expected(sample: Sample) -> Outputs:
    plain, grad = gathered_before(sample), sample["main_grad"]
    added_to = None if overwrites(sample) else grad
    return [must.wgrad(plain["dy"], plain["x"], plain["offs"], grad.dtype, added_to=added_to)]


def overwrites(sample: Sample) -> bool:
    flag = sample.get("overwrite")
    return flag is not None and bool(flag)


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={**variants.MAIN_GRAD, **variants.LAYOUTS, **variants.GATHERED_OPERANDS},
    every_tensor="overwrite",
    too_large=(({"x": 0}, {"gathers": "x_rows"}),),
    benchmark="bench_grouped_mm",
)
