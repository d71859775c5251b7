# SPDX-License-Identifier: Apache-2.0
"""grouped_scaled_mm_wgrad_: grouped_scaled_mm_wgrad added to main_grad, or written over it."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import main_grad
from support.ops import grouped_scaled_mm_wgrad
from support.ops.grouped_mm_wgrad_ import overwrites


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    operands = grouped_scaled_mm_wgrad.operands(groups, options)
    return {"main_grad": main_grad(groups, options), **operands}


def expected(sample: Sample) -> Outputs:
    grad, (dy, x) = sample["main_grad"], grouped_scaled_mm_wgrad.numbers(sample)
    added_to = None if overwrites(sample) else grad
    return [must.wgrad(dy, x, sample["offs"], grad.dtype, True, added_to)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={**variants.MAIN_GRAD, **variants.PER_GROUP, **variants.SHARED},
    every_tensor="overwrite",
    benchmark="bench_grouped_mm",
)
