# SPDX-License-Identifier: Apache-2.0
"""sort_by_expert: tokens sorted by their experts."""

import torch

from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    E, shape = groups.E, (groups.T, options.pop("C", 3))
    experts = torch.randint(-2, E + 2, shape).to(options.pop("index", torch.int64))
    if layout == "transposed":
        experts = experts.t().contiguous().t()
    return {"experts": experts, "num_experts": E}


def expected(sample: Sample) -> Outputs:
    expected = reference.sort_by_expert(sample["experts"], sample["num_experts"])
    return [Output(t) for t in expected]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "transposed": {"layout": "transposed"},
    },
    too_large=(({"experts": 0}, {"C": 1}),),
    benchmark="bench_group_quantize",
)
