# SPDX-License-Identifier: Apache-2.0
"""swiglu: SwiGLU."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"gate_up": rows(groups, 2 * groups.K, dtype, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    return [must.swiglu(sample["gate_up"], sample["offs"], must.form_of(sample))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.SWIGLU,
    too_large=(({"gate_up": 0}, {}),),
    benchmark="bench_group_quantize",
)
