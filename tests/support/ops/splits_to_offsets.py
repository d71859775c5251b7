# SPDX-License-Identifier: Apache-2.0
"""splits_to_offsets: the end of each group."""

import torch

from support import reference
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"m_splits": torch.tensor(groups.m_splits), "num_rows": groups.T}


def expected(sample: Sample) -> Outputs:
    dtype = sample.get("out_dtype") or torch.int32
    splits, options = sample["m_splits"].tolist(), (sample.get("alignment"), sample.get("stride"))
    ends = reference.splits_to_offsets(splits, sample["num_rows"], *options)
    return [Output(torch.tensor(ends, dtype=dtype))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=(
        {"m_splits": torch.zeros(3, dtype=torch.uint16)},
        {"num_rows": 2**31},
        {"num_rows": 2**30, "stride": 2},
        {"num_rows": 2**62, "stride": 2, "out_dtype": torch.int64},
    ),
    variants={"aligned": {"alignment": 128}, "scaled": {"stride": 144, "out_dtype": torch.int64}},
)
