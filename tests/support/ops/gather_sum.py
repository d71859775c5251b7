# SPDX-License-Identifier: Apache-2.0
"""gather_sum: weighted sums of gathered rows."""

import torch

from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    R, C = groups.T + 3, options.pop("C", 3)
    arguments = {"y": lay_out(torch.randn(R, groups.K).to(dtype), layout)}
    arguments["rows"] = torch.randint(R, (groups.T, C)).to(options.pop("index", torch.int64))
    if options.pop("weight", True):
        arguments["weight"] = torch.randn(groups.T, C)
    if options.pop("offs", False):  # rows past the last group, and their weights, hold anything
        arguments["offs"] = torch.tensor([2, R // 2], dtype=torch.int32)
        arguments["y"][R // 2 :] = torch.nan
        arguments["weight"][arguments["rows"] >= R // 2] = torch.inf
    return arguments


def expected(sample: Sample) -> Outputs:
    given = sample["y"], sample["rows"], sample.get("weight"), sample.get("offs")
    return [Output(reference.gather_sum(*given))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "unweighted": {"weight": False},
        "to_the_last_group": {"offs": True},
        **variants.MANY_CHOICES,
    },
    too_large=(({"rows": 0, "weight": 0}, {}),),
    benchmark="bench_group_quantize",
)
