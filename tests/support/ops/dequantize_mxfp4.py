"""dequantize_mxfp4: the numbers of a weight in MXFP4.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import reference
from support.groups import Groups
from support.mistakes import like
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out, mxfp4_weight


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q, scale = mxfp4_weight(groups)
    if options.pop("every_code", False):  # beside every scale but NaN, see test_mxfp4
        q = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(255, 16, 16)
        scale = torch.arange(255).to(torch.uint8).view(255, 1, 1).expand(255, 16, 1)
    q, scale = (lay_out(t.int(), layout).to(torch.uint8) for t in (q, scale))
    return {"q": q, "scale": scale, "out_dtype": dtype}


def expected(sample: Sample) -> Outputs:
    numbers = reference.dequantize_mxfp4(sample["q"], sample["scale"])
    # Conversions make 0x7fc0 of every NaN, as the op does.
    return [Output(numbers.float().to(sample["out_dtype"]))]


def mistakes(good: Sample) -> list[Arguments]:
    q, scale = good["q"], good["scale"]
    return [
        {"q": q[0]},
        {"q": q.char()},
        {"q": like(q, 0, None, None)},
        {"q": like(q, None, 24, None)},
        {"q": like(q, None, None, 72)},
        {"q": like(q, 1, 16, 2**21 + 16)},
        {"scale": scale[0]},
        {"scale": scale.float()},
        {"scale": like(scale, 2, None, None)},
        {"scale": like(scale, None, 16, None)},
        {"scale": like(scale, None, None, 4)},
        {"out_dtype": torch.float64},
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={"every_code": {"every_code": True}},
    too_large=(({"q": 1, "scale": 1}, {}),),
    sentences="""\
q must be 3-D, got 2-D
q must be uint8, got int8
E must be between 1 and 1024, got 0
N must be a positive multiple of 16, got 24
K must be a positive multiple of 32, got 144
K must be at most 4194304, got 4194336
scale must be 3-D, got 2-D
scale must be uint8, got float32
E differs: q has 3, scale has 2
N differs: q has 32, scale has 16
the number of K blocks differs: q has 5, scale has 4
out_dtype must be bfloat16, float16 or float32, got float64""",
)
