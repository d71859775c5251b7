# SPDX-License-Identifier: Apache-2.0
"""grouped_mm_swiglu_grad: swiglu_grad for dh = a @ b. All sums of samples are exact."""

from dataclasses import replace

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import gathered_before, gathering
from support.ops.grouped_mm_swiglu import quarters
from support.tensors import per_row, rows, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    features = options.pop("F", 64)
    b = 4 * quarters(weight(replace(groups, K=features, N=groups.K), dtype, layout))
    if options.pop("transposed_b", False):
        b = b.mT.contiguous().mT
    arguments = {"a": quarters(rows(groups, groups.K, dtype, layout)), "b": b}
    arguments["gate_up"] = rows(groups, 2 * features, dtype, layout)
    arguments |= {"weight": per_row(groups, layout), "offs": groups.offs()}
    gathers = gathering(arguments, groups, layout, options)
    if gathers:
        gathers["a"] = quarters(gathers["a"])
    return arguments | gathers


def expected(sample: Sample) -> Outputs:
    plain, form = gathered_before(sample), must.form_of(sample)
    dtype = plain["a"].dtype
    dh = must.gemm(plain["a"], plain["b"], plain["offs"], dtype).expected.to(dtype)
    others = (plain[name] for name in ("gate_up", "weight", "offs"))
    return [*must.swiglu_grad(dh, *others, form, approximate=dtype == torch.bfloat16)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "wide": {"F": 320},
        "gathered": {"gathers": "rows", "F": 128},
        "gathered_limit": {"gathers": "rows", "index": torch.int64, "limit": 0.75},
        "odd": {"F": 48},
        "of_pairs": {"F": 320, **variants.OF_PAIRS},
        "narrow_of_pairs": variants.OF_PAIRS,
        "strided": {"layout": "strided"},
        "all_of_it": variants.FORMS["all_of_it"],
        "gelu_tanh": {"F": 128, **variants.FORMS["gelu_tanh"]},
        "cubic_of_pairs": {"transposed_b": True, **variants.FORMS["cubic_of_it"]},
    },
    shares_kernels=True,
    too_large=(({"a": 0}, {"gathers": "rows"}),),
    benchmark="bench_swiglu_gemm",
)
