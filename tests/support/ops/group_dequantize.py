# SPDX-License-Identifier: Apache-2.0
"""group_dequantize: rowwise data to numbers."""

import torch

from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out, quantized_rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q, scale = quantized_rows(groups, groups.K)
    return {"q": lay_out(q, layout), "scale": scale, "offs": groups.offs(), "out_dtype": dtype}


def expected(sample: Sample) -> Outputs:
    numbers = reference.dequantize_rowwise(sample["q"], sample["scale"], sample["offs"])
    # q * scale is rounded to float32 first, then to the dtype
    return [Output(numbers.float().to(sample["out_dtype"]))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={"transposed": {"layout": "transposed"}},
    too_large=(({"q": 0, "scale": 1}, {}),),
)
