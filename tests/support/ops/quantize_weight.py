"""quantize_weight: a weight to FP8 in blocks of 128 x 128.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.mistakes import BAD_EPSILONS, like
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {"w": weight(groups, dtype, layout)}


def expected(sample: Sample) -> Outputs:
    q, scale, q_t = must.weight(sample["w"], must.scaling_of(sample))
    return [
        *must.if_asked(sample.get("rowwise"), [Output(q)]),
        Output(scale),
        *must.if_asked(sample.get("columnwise"), [Output(q_t)]),
    ]


def mistakes(good: Sample) -> list[Arguments]:
    w = good["w"]
    return [
        {"w": torch.zeros(32, 144)},
        {"w": w.double()},
        {"w": like(w, 0, None, None)},
        {"w": like(w, 1025, 16, 16)},
        {"w": like(w, None, 24, None)},
        {"w": like(w, None, None, 8)},
        *BAD_EPSILONS,
        {"rowwise": False, "columnwise": False},
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={
        "rowwise": {"columnwise": False},
        "columnwise": {"rowwise": False},
        "exact_scales": variants.EXACT,
        **variants.STRIDES,
    },
    too_large=(({"w": 1}, {}),),
    benchmark="bench_group_quantize",
    sentences="""\
w must be 3-D, got 2-D
w must be bfloat16, float16 or float32, got float64
E must be between 1 and 1024, got 0
E must be between 1 and 1024, got 1025
N must be a positive multiple of 16, got 24
K must be a positive multiple of 16, got 8
amax_epsilon must be finite and not negative, got -0.5
amax_epsilon must be finite and not negative, got inf
amax_epsilon must be finite and not negative, got nan
rowwise or columnwise must be true, got neither""",
)
