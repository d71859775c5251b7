"""transpose_weight: the numbers of a quantized weight as [E, K, N].

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import expected as must
from support import reference
from support.groups import Groups
from support.mistakes import like
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import FP32, lay_out, weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q = weight(groups, FP32).clamp(-448, 448).to(reference.E4M3)
    return {"q": lay_out(q, layout)}


def expected(sample: Sample) -> Outputs:
    return [Output(must.transposed(sample["q"]))]


def mistakes(good: Sample) -> list[Arguments]:
    q = good["q"]
    return [
        {"q": q[0]},
        {"q": q.float()},
        {"q": q.view(torch.float8_e5m2)},
        {"q": like(q, 0, None, None)},
        {"q": like(q, 1025, 16, 16)},
        {"q": like(q, None, 24, None)},
        {"q": like(q, None, None, 8)},
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={"strided": {"layout": "strided"}},
    too_large=(({"q": 1}, {}),),
)
