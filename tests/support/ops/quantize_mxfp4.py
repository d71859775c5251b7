# SPDX-License-Identifier: Apache-2.0
"""quantize_mxfp4: a weight as codes of 4 bits with a scale for each block of 32."""

import torch

from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import weight, whole_blocks


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    w = weight(whole_blocks(groups), dtype, layout)
    if options.pop("special", False):
        flat = w.view(-1)
        flat[:32], flat[40], flat[70] = 0, torch.inf, torch.nan
        flat[96:128] = torch.linspace(-1, 1, 32) * torch.finfo(dtype).smallest_normal
        flat[128:160] = torch.finfo(dtype).max
        # every tie, and what saturates: 6.5 beside 7 is 6, beside 7.5 the scale is 2
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
        flat[160:192] = torch.cat([ties, -ties, ties, torch.full((8,), 6.5)])
        flat[192:224] = torch.cat([ties, -ties, ties, torch.full((8,), 7.5)])
    return {"w": w}


def expected(sample: Sample) -> Outputs:
    return [Output(t) for t in reference.quantize_mxfp4(sample["w"])]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
        "special": {"special": True},
    },
    too_large=(({"w": 1}, {}),),
)
