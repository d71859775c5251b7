# SPDX-License-Identifier: Apache-2.0
"""grouped_mm_list: grouped_mm of a tensor an expert, transposed or not."""

import torch

from support import expected as must
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import bias, gathered_before, gathering
from support.tensors import FP32, listed, rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    b = listed(groups, dtype, layout, options)
    if not options.setdefault("transpose_b", True):
        b = [b_e.t().contiguous() for b_e in b]
    arguments = {"a": rows(groups, groups.K, dtype, layout), "b": b, "offs": groups.offs()}
    arguments |= gathering(arguments, groups, layout, options)
    return arguments | bias(groups, dtype, options)


def expected(sample: Sample) -> Outputs:
    plain = gathered_before(sample)
    b = torch.stack([b.t() if plain.get("transpose_b") else b for b in plain["b"]])
    dtype = sample.get("out_dtype") or plain["a"].dtype
    return [must.gemm(plain["a"], b, plain["offs"], dtype, plain.get("bias"))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "gathered": {"gathers": "rows"},
        "views": {"experts": "views", "bias": True},
        "as_multiplied": {"transpose_b": False, "out_dtype": FP32},
    },
    shares_kernels=True,
    too_large=(({"a": 0}, {"gathers": "rows"}),),
)
