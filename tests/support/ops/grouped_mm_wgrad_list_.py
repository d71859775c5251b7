"""grouped_mm_wgrad_list_: grouped_mm_wgrad_ of a tensor an expert.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import variants
from support.groups import Groups
from support.mistakes import main_grads_mistakes
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.operands import main_grads
from support.ops import grouped_mm_wgrad, grouped_mm_wgrad_


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    operands = grouped_mm_wgrad.sample(groups, dtype, layout, options)
    return {"main_grad": main_grads(groups, options), **operands}


def expected(sample: Sample) -> Outputs:
    outputs: Outputs = []
    (one,) = grouped_mm_wgrad_.expected(sample.but(main_grad=torch.stack(sample["main_grad"])))
    assert one is not None
    assert one.allowed is not None
    for expected, allowed in zip(one.expected, one.allowed, strict=True):
        outputs.append(Output(expected, allowed, one.dtype))
    return outputs


def mistakes(good: Sample) -> list[Arguments]:
    return main_grads_mistakes(good)


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={
        **variants.MAIN_GRAD,
        **variants.GATHERED_OPERANDS,
        "views": {"per_expert": False},
    },
    every_tensor="overwrite",
    shares_kernels=True,
    too_large=(({"dy": 0}, {"gathers": "dy_rows"}),),
    sentences="""\
E must be between 1 and 1024, got 0
E must be between 1 and 1024, got 1025
main_grad must be 2-D, got 1-D
main_grad must be float32, got float64
N differs: main_grad has 16, the first main_grad has 32
K differs: main_grad has 16, the first main_grad has 144
main_grad must be float32 or bfloat16, got float16
E differs: main_grad has 2, offs has 3
N differs: main_grad has 16, dy has 32
main_grad must be contiguous, got strides 1, 32
overwrite must be bool, got int64""",
)
