# SPDX-License-Identifier: Apache-2.0
"""grouped_bias_grad: the sums of each group's rows."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"dy": rows(groups, groups.N, dtype, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    return [must.bias_grad(sample["dy"], sample["offs"])]


OP = OpInfo(
    sample=sample, expected=expected, variants=variants.LAYOUTS, too_large=(({"dy": 0}, {}),)
)
