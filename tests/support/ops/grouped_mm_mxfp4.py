# SPDX-License-Identifier: Apache-2.0
"""grouped_mm_mxfp4: a @ w.T + a_low @ b_low + bias of each group, or a @ w, of w in MXFP4."""

from dataclasses import replace

import torch

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import bias, gathered_before, gathering, low_rank
from support.tensors import BF16, mxfp4_weight, quantized_rows, rows, whole_blocks


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    groups = whole_blocks(groups)
    transpose_b = options.pop("transpose_b", True)
    b, scale_b = mxfp4_weight(groups, options.pop("spread", 3))
    # The GEMM's own sizes: dgrad reduces over N and gives K columns.
    sizes = groups if transpose_b else replace(groups, K=groups.N, N=groups.K)
    arguments = {"b": b, "scale_b": scale_b, "offs": groups.offs(), "transpose_b": transpose_b}
    if options.pop("fp8", False):
        a, scale_a = quantized_rows(sizes, sizes.K)
        arguments |= {"a": a, "scale_a": scale_a, "out_dtype": dtype}
    else:
        arguments["a"] = rows(sizes, sizes.K, dtype, layout)
    arguments |= gathering(arguments, sizes, layout, options)
    arguments |= low_rank(sizes, dtype, options)
    return arguments | bias(sizes, dtype, options)


def expected(sample: Sample) -> Outputs:
    plain = gathered_before(sample)
    a, offs = plain["a"], plain["offs"]
    is_fp8 = plain.get("scale_a") is not None
    dtype = plain.get("out_dtype") or (BF16 if is_fp8 else a.dtype)
    if is_fp8:
        a = reference.dequantize_rowwise(a, plain["scale_a"], offs)
        w = reference.mxfp4_in_e4m3(plain["b"], plain["scale_b"])
    else:
        w = reference.dequantize_mxfp4(plain["b"], plain["scale_b"]).to(a.dtype)
    b = w.mT if plain.get("transpose_b") else w
    low = must.low_rank(sample)
    return [must.gemm(a, b, offs, dtype, plain.get("bias"), scaled=is_fp8, low=low)]


DGRAD: Options = {"transpose_b": False}
FP8: Options = {"fp8": True}
OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "bias": {"bias": True},
        "strided": {"layout": "strided"},
        "dgrad": DGRAD,
        "fp8": FP8,
        "fp8_dgrad": {**FP8, **DGRAD},
        "fp8_rounded": {**FP8, "spread": 20},
        "fp8_dgrad_rounded": {**FP8, **DGRAD, "spread": 20},
        "gathered": {"bias": True, "gathers": "rows"},
        "fp8_gathered": {**FP8, "gathers": "rows", "index": torch.int64},
        **variants.OUT,
        **variants.LOW_RANK,
        "low_dgrad": {"r": 48, **DGRAD},
        "fp8_low": {"r": 80, "bias": True, **FP8},
        "fp8_low_dgrad": {"r": 16, **FP8, **DGRAD},
    },
    every_tensor="fp8_low",
    too_large=(({"a": 0}, {}),),
)
