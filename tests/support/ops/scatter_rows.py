# SPDX-License-Identifier: Apache-2.0
"""scatter_rows: rows written to many places."""

import torch

from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    C, index = options.pop("C", 3), options.pop("index", torch.int64)
    places = torch.randperm(groups.T * C).view(groups.T, C).to(index)
    x = lay_out(torch.randn(groups.T, groups.K).to(dtype), layout)
    return {"x": x, "rows": places, "num_rows": groups.T * C}


def expected(sample: Sample) -> Outputs:
    x_TH, rows_TC = sample["x"], sample["rows"].long()
    expected = torch.empty(rows_TC.numel(), x_TH.size(1), dtype=x_TH.dtype)
    expected[rows_TC] = x_TH[:, None].expand(-1, rows_TC.size(1), -1)
    return [Output(expected)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.MANY_CHOICES,
    too_large=(({"x": 0, "rows": 0}, {}),),
)
