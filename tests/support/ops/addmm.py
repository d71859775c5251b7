# SPDX-License-Identifier: Apache-2.0
"""addmm: c + a @ b in 16 bits."""

import torch

from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import BF16, FP32, lay_out
from support.tolerances import tolerance


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    dtype, K = BF16 if dtype == FP32 else dtype, options.pop("K", groups.K)
    shapes = {"c": (groups.T, groups.N), "a": (groups.T, K), "b": (K, groups.N)}
    return {name: lay_out(torch.randn(shape).to(dtype), layout) for name, shape in shapes.items()}


def expected(sample: Sample) -> Outputs:
    c, a, b = (sample[name].double() for name in "cab")
    y, magnitude = c + a @ b, c.abs() + a.abs() @ b.abs()
    dtype = sample["c"].dtype
    return [Output(y, tolerance(y, magnitude, a.size(1) + 1, dtype), dtype)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={"one": {"K": 1}, "unaligned": {"K": 60}, "long": {"K": 520}, **variants.STRIDES},
    too_large=(({"c": 0, "a": 0}, {}),),
    benchmark="bench_group_quantize",
)
