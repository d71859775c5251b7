"""swiglu: SwiGLU.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.mistakes import swiglu_mistakes
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"gate_up": rows(groups, 2 * groups.K, dtype, layout), "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    return [must.swiglu(sample["gate_up"], sample["offs"], must.form_of(sample))]


def mistakes(good: Sample) -> list[Arguments]:
    return swiglu_mistakes(good)


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants=variants.SWIGLU,
    too_large=(({"gate_up": 0}, {}),),
    benchmark="bench_group_quantize",
    sentences="""\
gate_up must be 2-D, got 1-D
gate_up must be bfloat16, float16 or float32, got float64
gate_up must have an even number of columns, got 33
K must be a positive multiple of 16, got 24
offs must be 1-D, got 2-D
offs must be int32, got int64
E must be between 1 and 1024, got 0
E must be between 1 and 1024, got 1025
alpha must be finite, got 1e+39
alpha must be finite, got -inf
alpha must be finite, got nan
beta must be finite, got 1e+39
beta must be finite, got -inf
beta must be finite, got nan
limit must be positive, got 0
limit must be positive, got -1.5
limit must be positive, got nan
cubic must be finite and not negative, got -0.5
cubic must be finite and not negative, got 1e+39
cubic must be finite and not negative, got nan""",
)
