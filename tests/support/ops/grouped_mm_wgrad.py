# SPDX-License-Identifier: Apache-2.0
"""grouped_mm_wgrad: dy.T @ x of each group."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import gathered_before, gathering
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    dy, x = rows(groups, groups.N, dtype, layout), rows(groups, groups.K, dtype, layout)
    arguments = {"dy": dy, "x": x, "offs": groups.offs()}
    return arguments | gathering(arguments, groups, layout, options)


def expected(sample: Sample) -> Outputs:
    plain = gathered_before(sample)
    dtype = sample.get("out_dtype") or plain["dy"].dtype
    return [must.wgrad(plain["dy"], plain["x"], plain["offs"], dtype)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={**variants.LAYOUTS, **variants.OUT, **variants.GATHERED_OPERANDS},
    too_large=(({"x": 0}, {"gathers": "x_rows"}), ({"dy": 0}, {"gathers": "dy_rows"})),
    benchmark="bench_grouped_mm",
)
