# SPDX-License-Identifier: Apache-2.0
"""grouped_scaled_mm_wgrad_list_: grouped_scaled_mm_wgrad_ of a tensor an expert."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import main_grads
from support.ops import grouped_scaled_mm_wgrad, grouped_scaled_mm_wgrad_


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    operands = grouped_scaled_mm_wgrad.operands(groups, options)
    return {"main_grad": main_grads(groups, options), **operands}


def expected(sample: Sample) -> Outputs:
    whole = sample.but(main_grad=torch.stack(sample["main_grad"]))
    return must.of_each(*grouped_scaled_mm_wgrad_.expected(whole))


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={**variants.MAIN_GRAD, "views": {"per_expert": False, "overwrite": True}},
    every_tensor="overwrite",
    shares_kernels=True,
)
