# SPDX-License-Identifier: Apache-2.0
"""group_quantize_mx: rows to MXFP8."""

import torch
from torch import Tensor

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"x": rows(groups, groups.K, dtype, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    x, offs = sample["x"], sample["offs"]
    (T, K), blocks = x.shape, must.blocks_of(offs, len(x))
    q, scale = reference.quantize_mx_rowwise(x[: must.valid_rows(offs, T)])
    q_t, scale_t = reference.quantize_mx_columnwise(x, offs)
    of_rows = [Output(q, shape=(T, K)), Output(e8m0(scale), shape=(T, -(-K // 32)))]
    of_columns = [Output(q_t, shape=(blocks, K, 128)), Output(e8m0(scale_t), shape=(blocks, K, 4))]
    return [
        *must.if_asked(sample.get("rowwise"), [*of_rows]),
        *must.if_asked(sample.get("columnwise"), [*of_columns]),
        *must.if_asked(sample.get("bias_grad"), [must.bias_grad(x, offs)]),
    ]


def e8m0(scale: Tensor) -> Tensor:
    """The bytes of powers of two."""
    return (torch.frexp(scale).exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.ROWS,
    unspecified=("rows", "rows", "blocks", "blocks"),
    too_large=(({"x": 0}, {}),),
    benchmark="bench_group_quantize",
)
