# SPDX-License-Identifier: Apache-2.0
"""gather_dot: products with gathered rows."""

import torch

from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import FP32, lay_out


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    R, C = groups.T + 3, options.pop("C", 3)
    a, y = (lay_out(torch.randn(n, groups.K).to(dtype), layout) for n in (groups.T, R))
    index = options.pop("index", torch.int64)
    return {"a": a, "y": y, "rows": torch.randint(R, (groups.T, C)).to(index)}


def expected(sample: Sample) -> Outputs:
    a_TH, y_TCH = sample["a"].double(), sample["y"].double()[sample["rows"].long()]
    products = a_TH[:, None] * y_TCH
    # each of H products and H - 1 sums rounds by at most 2^-24
    allowed = 2 * a_TH.size(1) * 2.0**-24 * products.abs().sum(-1)
    return [Output(products.sum(-1), allowed, FP32)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.MANY_CHOICES,
    too_large=(({"rows": 1}, {}),),
    benchmark="bench_group_quantize",
)
