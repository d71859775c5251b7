# SPDX-License-Identifier: Apache-2.0
"""group_round_mx: the bf16 numbers of group_quantize_mx."""

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import BF16, rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"x": rows(groups, groups.K, dtype, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    x, offs = sample["x"], sample["offs"]
    valid = must.valid_rows(offs, len(x))
    rowwise = reference.round_mx_rowwise(x[:valid])
    columnwise = reference.round_mx_columnwise(x, offs)[:valid]
    of_rows, of_columns = (
        Output(t, torch.zeros_like(t), BF16, tuple(x.shape)) for t in (rowwise, columnwise)
    )
    return [
        *must.if_asked(sample.get("rowwise"), [of_rows]),
        *must.if_asked(sample.get("columnwise"), [of_columns]),
        *must.if_asked(sample.get("bias_grad"), [must.bias_grad(x, offs)]),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.ROWS,
    unspecified=("rows", "rows"),
    too_large=(({"x": 0}, {}),),
    benchmark="bench_group_quantize",
)
