"""grouped_scaled_mm_wgrad_: grouped_scaled_mm_wgrad added to main_grad, or written over it.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.mistakes import main_grad_mistakes, scaled_wgrad_mistakes
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import main_grad
from support.ops import grouped_scaled_mm_wgrad
from support.ops.grouped_mm_wgrad_ import overwrites


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    operands = grouped_scaled_mm_wgrad.operands(groups, options)
    return {"main_grad": main_grad(groups, options), **operands}


def expected(sample: Sample) -> Outputs:
    grad, (dy, x) = sample["main_grad"], grouped_scaled_mm_wgrad.numbers(sample)
    added_to = None if overwrites(sample) else grad
    return [must.wgrad(dy, x, sample["offs"], grad.dtype, True, added_to)]


def mistakes(good: Sample) -> list[Arguments]:
    return [*scaled_wgrad_mistakes(good), *main_grad_mistakes(good)]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={**variants.MAIN_GRAD, **variants.PER_GROUP, **variants.SHARED},
    every_tensor="overwrite",
    benchmark="bench_grouped_mm",
    sentences="""\
dy_t must be 3-D, got 2-D
dy_t must be float8_e4m3fn, got float32
dy_t must hold blocks of 128 rows, got 64
N must be a positive multiple of 16, got 24
E differs: scale_dy_t has 32, offs has 3
scale_dy_t must be float32, got float64
the number of blocks differs: dy_t has 3, scale_dy_t has 1
N differs: dy_t has 32, scale_dy_t has 16
x_t must be 3-D, got 2-D
x_t must be float8_e4m3fn, got float32
x_t must hold blocks of 128 rows, got 256
K must be a positive multiple of 16, got 40
scale_x_t must be 2-D, got 1-D
scale_x_t must be float32, got float64
the number of blocks differs: x_t has 3, scale_x_t has 1
K differs: x_t has 144, scale_x_t has 16
the number of blocks differs: dy_t has 3, x_t has 2
offs must be 1-D, got 2-D
offs must be int32, got int64
E must be between 1 and 1024, got 0
E must be between 1 and 1024, got 1025
main_grad must be 3-D, got 2-D
main_grad must be float32 or bfloat16, got float16
E differs: main_grad has 2, offs has 3
N differs: main_grad has 16, dy has 32
K differs: main_grad has 128, x has 144
main_grad must be contiguous, got strides 4608, 1, 32
overwrite must be 0-D, got 1-D
overwrite must be bool, got int64""",
)
