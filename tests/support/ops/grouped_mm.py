# SPDX-License-Identifier: Apache-2.0
"""grouped_mm: a @ b + a_low @ b_low + bias of each group."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import bias, gathered_before, gathering, low_rank
from support.tensors import FP32, rows, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    a, b = rows(groups, groups.K, dtype, layout), weight(groups, dtype, layout).mT
    arguments = {"a": a, "b": b, "offs": groups.offs()}
    arguments |= gathering(arguments, groups, layout, options)
    arguments |= low_rank(groups, dtype, options)
    return arguments | bias(groups, dtype, options)


def expected(sample: Sample) -> Outputs:
    plain = gathered_before(sample)
    b = plain["b"]
    dtype = sample.get("out_dtype") or plain["a"].dtype
    low = must.low_rank(plain)
    return [must.gemm(plain["a"], b, plain["offs"], dtype, plain.get("bias"), low=low)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "bias": {"bias": True},
        "grad": {"bias": True, "requires_grad": ("a", "b", "bias")},
        "grad_of_a": {"requires_grad": ("a",)},
        "grad_of_b": {"requires_grad": ("b",)},
        **variants.STRIDES,
        "bias_fp32": {"bias": True, "out_dtype": FP32},
        "gathered": {"bias": True, "gathers": "rows"},
        "gathered_strided": {"layout": "strided", "gathers": "rows", "index": torch.int64},
        "gathered_grad": {"gathers": "rows", "requires_grad": ("a", "b")},
        **variants.OUT,
        **variants.LOW_RANK,
        "low_grad": {"r": 48, "bias": True, "requires_grad": ("a", "b", "bias", "a_low", "b_low")},
        "low_grad_of_b_low": {"r": 16, "requires_grad": ("b_low",)},
        "low_out_fp32": {"r": 80, "bias": True, "out_dtype": FP32},
    },
    every_tensor="low",
    too_large=(({"a": 0}, {}), ({"a": 0}, {"gathers": "rows"}), ({"rows": 0}, {"gathers": "rows"})),
    benchmark="bench_grouped_mm",
)
