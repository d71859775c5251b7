# SPDX-License-Identifier: Apache-2.0
"""transpose_weight: the numbers of a quantized weight as [E, K, N]."""

import torch

from support import expected as must
from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import FP32, lay_out, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q = weight(groups, FP32).clamp(-448, 448).to(reference.E4M3)
    return {"q": lay_out(q, layout)}


def expected(sample: Sample) -> Outputs:
    return [Output(must.transposed(sample["q"]))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={"strided": {"layout": "strided"}},
    too_large=(({"q": 1}, {}),),
)
