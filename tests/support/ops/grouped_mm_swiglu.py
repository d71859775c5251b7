# SPDX-License-Identifier: Apache-2.0
"""grouped_mm_swiglu: SwiGLU of a @ b + bias. All sums of samples are exact."""

from dataclasses import replace

import torch
from torch import Tensor

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import bias, gathered_before, gathering
from support.tensors import rows, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    wide = replace(groups, N=2 * options.pop("F", 64))
    a, b = (
        quarters(rows(groups, groups.K, dtype, layout)),
        4 * quarters(weight(wide, dtype, layout)).mT,
    )
    if options.pop("transposed_b", False):  # as GPT-OSS stores it
        b = b.contiguous()
    arguments = {"a": a, "b": b, "offs": groups.offs()}
    gathers = gathering(arguments, groups, layout, options)
    if gathers:
        gathers["a"] = quarters(gathers["a"])
    arguments |= gathers
    return arguments | {name: quarters(t) for name, t in bias(wide, dtype, options).items()}


def quarters(x: Tensor) -> Tensor:
    """-1/4, 0 or 1/4 in place of normal numbers, with their strides; NaN stays."""
    return x.copy_((x.float().clamp(-1, 1) * 1.4).round() / 4)


def expected(sample: Sample) -> Outputs:
    plain, form = gathered_before(sample), must.form_of(sample)
    offs, dtype = plain["offs"], plain["a"].dtype
    exact = must.gemm(plain["a"], plain["b"], offs, dtype, plain.get("bias")).expected.to(dtype)
    return [
        *must.if_asked(sample.get("keep_gate_up"), [Output(exact)]),
        must.swiglu(exact, offs, form, approximate=dtype == torch.bfloat16),
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "bias": {"bias": True, "F": 320},
        "h_alone": {"keep_gate_up": False, "bias": True},
        "gathered": {"gathers": "rows", "F": 128},
        "gathered_bias": {"gathers": "rows", "index": torch.int64, "bias": True, "limit": 0.75},
        "odd": {"F": 48},
        "of_pairs": {"F": 320, "bias": True, **variants.OF_PAIRS},
        "h_alone_of_pairs": {"keep_gate_up": False, **variants.OF_PAIRS},
        "gathered_of_pairs": {"gathers": "rows", **variants.OF_PAIRS},
        "strided": {"layout": "strided"},
        "all_of_it": variants.FORMS["all_of_it"],
        "gelu_tanh": {"F": 128, "bias": True, **variants.FORMS["gelu_tanh"]},
        "cubic_of_pairs": {"transposed_b": True, **variants.FORMS["cubic_of_it"]},
    },
    every_tensor="bias",
    shares_kernels=True,
    too_large=(({"a": 0}, {"gathers": "rows"}),),
    benchmark="bench_swiglu_gemm",
)
