"""grouped_mm_wgrad_: grouped_mm_wgrad added to main_grad, or written over it.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.mistakes import main_grad_mistakes, wgrad_mistakes
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import gathered_before, main_grad
from support.ops import grouped_mm_wgrad


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    operands = grouped_mm_wgrad.sample(groups, dtype, layout, options)
    return {"main_grad": main_grad(groups, options), **operands}


def expected(sample: Sample) -> Outputs:
    plain, grad = gathered_before(sample), sample["main_grad"]
    added_to = None if overwrites(sample) else grad
    return [must.wgrad(plain["dy"], plain["x"], plain["offs"], grad.dtype, added_to=added_to)]


def overwrites(sample: Sample) -> bool:
    flag = sample.get("overwrite")
    return flag is not None and bool(flag)


def mistakes(good: Sample) -> list[Arguments]:
    return [*wgrad_mistakes(good), *main_grad_mistakes(good)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={**variants.MAIN_GRAD, **variants.LAYOUTS, **variants.GATHERED_OPERANDS},
    every_tensor="overwrite",
    too_large=(({"x": 0}, {"gathers": "x_rows"}),),
    benchmark="bench_grouped_mm",
    sentences="""\
dy must be 2-D, got 1-D
x must be 2-D, got 3-D
dy must be bfloat16, float16 or float32, got float64
x must be bfloat16, got float32
T differs: dy has 12, x has 11
N must be a positive multiple of 16, got 24
K must be a positive multiple of 16, got 24
offs must be 1-D, got 2-D
offs must be int32, got int64
E must be between 1 and 1024, got 0
E must be between 1 and 1024, got 1025
dy_rows must be int32 or int64, got float32
x_rows must be 1-D, got 2-D
T differs: dy has 12, x_rows has 5
give dy_rows or x_rows, got both
main_grad must be 3-D, got 2-D
main_grad must be float32 or bfloat16, got float16
E differs: main_grad has 2, offs has 3
N differs: main_grad has 16, dy has 32
K differs: main_grad has 128, x has 144
main_grad must be contiguous, got strides 4608, 1, 32
overwrite must be 0-D, got 1-D
overwrite must be bool, got int64""",
)
