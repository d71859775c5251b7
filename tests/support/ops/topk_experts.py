"""topk_experts: the k experts of the largest scores.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    scores = torch.randn(groups.T, options.pop("E", 40)).to(dtype)
    return {"scores": lay_out(scores, layout), "k": options.pop("k", 3)}


def expected(sample: Sample) -> Outputs:
    return [Output(reference.topk_experts(sample["scores"], sample["k"]))]


def mistakes(good: Sample) -> list[Arguments]:
    scores = good["scores"]
    return [
        {"scores": scores[0]},
        {"scores": scores.double()},
        {"scores": scores[:, :0]},
        {"scores": torch.zeros(2, 1025)},
        {"k": 0},
        {"k": 41},
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={
        "one": {"E": 1, "k": 1},
        "all": {"E": 33, "k": 33},
        "most": {"E": 1024, "k": 100},
        **variants.STRIDES,
    },
    too_large=(({"scores": 0}, {}),),
    benchmark="bench_group_quantize",
    sentences="""\
scores must be 2-D, got 1-D
scores must be bfloat16, float16 or float32, got float64
E must be between 1 and 1024, got 0
E must be between 1 and 1024, got 1025
k must be between 1 and E, which is 40, got 0
k must be between 1 and E, which is 40, got 41""",
)
