# SPDX-License-Identifier: Apache-2.0
"""dequantize_mxfp4: the numbers of a weight in MXFP4."""

import torch

from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out, mxfp4_weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q, scale = mxfp4_weight(groups)
    if options.pop("every_code", False):  # beside every scale but NaN, see test_mxfp4
        q = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(255, 16, 16)
        scale = torch.arange(255).to(torch.uint8).view(255, 1, 1).expand(255, 16, 1)
    q, scale = (lay_out(t.int(), layout).to(torch.uint8) for t in (q, scale))
    return {"q": q, "scale": scale, "out_dtype": dtype}


def expected(sample: Sample) -> Outputs:
    numbers = reference.dequantize_mxfp4(sample["q"], sample["scale"])
    # Conversions make 0x7fc0 of every NaN, as the op does.
    return [Output(numbers.float().to(sample["out_dtype"]))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=({"q": torch.zeros(1, 16, 1, dtype=torch.uint8).expand(-1, -1, 2**21 + 16)},),
    variants={"every_code": {"every_code": True}},
    too_large=(({"q": 1, "scale": 1}, {}),),
)
