# SPDX-License-Identifier: Apache-2.0
"""grouped_scaled_mm: a @ b + bias of each group in FP8, with scales of blocks or of groups.

And a_low @ b_low, which is not quantized.
"""

import torch
from torch import Tensor

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import bias, gathered_before, gathering, low_rank
from support.tensors import BF16, FP32, per_group_rows, per_group_weight, quantized_rows, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    fp8 = options.pop("per_group", None)
    if fp8 is None:
        a, scale_a = quantized_rows(groups, groups.K)
        w = weight(groups, FP32)
        b, scale_b, _ = reference.quantize_weight(w, reference.Scaling(False))
        scale_b = scale_b.mT
    else:
        a, _, scale_a = per_group_rows(groups, groups.K, fp8)
        b, scale_b = per_group_weight(groups)
    arguments = {"a": a, "b": b.mT, "scale_a": scale_a, "scale_b": scale_b, "offs": groups.offs()}
    arguments |= {"out_dtype": dtype} | gathering(arguments, groups, layout, options)
    arguments |= low_rank(groups, dtype, options)
    return arguments | bias(groups, dtype, options)


def expected(sample: Sample) -> Outputs:
    offs, dtype = sample["offs"], sample.get("out_dtype") or BF16
    a, b = numbers(gathered_before(sample))
    low = must.low_rank(sample)
    return [must.gemm(a, b, offs, dtype, sample.get("bias"), scaled=True, low=low)]


def numbers(sample: Sample) -> tuple[Tensor, Tensor]:
    """The operands, dequantized."""
    offs, scale_a, scale_b = sample["offs"], sample["scale_a"], sample["scale_b"]
    if scale_a.dim() == 1:
        a = reference.scale_groups(sample["a"], scale_a, offs)
        return a, sample["b"].double() * scale_b.double().view(-1, 1, 1)
    a = reference.dequantize_rowwise(sample["a"], scale_a, offs)
    return a, reference.dequantize_weight(sample["b"], scale_b)


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        "default_dtype": {"out_dtype": None},
        "bias": {"bias": True},
        "gathered": {"bias": True, "gathers": "rows", "index": torch.int64},
        **variants.PER_GROUP,
        **variants.LOW_RANK,
        **{f"low_{name}": {"r": 80, **options} for name, options in variants.PER_GROUP.items()},
    },
    every_tensor="low",
    too_large=(({"a": 0, "scale_a": 1}, {"gathers": "rows"}),),
    benchmark="bench_grouped_mm",
)
