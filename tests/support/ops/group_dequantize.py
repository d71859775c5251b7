"""group_dequantize: rowwise data to numbers.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import reference
from support.groups import Groups
from support.mistakes import BAD_OFFS, like
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out, quantized_rows


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q, scale = quantized_rows(groups, groups.K)
    return {"q": lay_out(q, layout), "scale": scale, "offs": groups.offs(), "out_dtype": dtype}


def expected(sample: Sample) -> Outputs:
    numbers = reference.dequantize_rowwise(sample["q"], sample["scale"], sample["offs"])
    # q * scale is rounded to float32 first, then to the dtype
    return [Output(numbers.float().to(sample["out_dtype"]))]


def mistakes(good: Sample) -> list[Arguments]:
    q, scale = good["q"], good["scale"]
    return [
        {"q": like(q, 12, 144).view(12, 12, 12)},
        {"q": torch.zeros(12, 144)},
        {"q": q.view(torch.float8_e5m2)},
        {"q": like(q, None, 72)},
        {"scale": torch.zeros(2)},
        {"scale": scale.double()},
        {"scale": like(scale, 1, None)},
        {"scale": like(scale, None, 8)},
        *BAD_OFFS,
        {"out_dtype": torch.float64},
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={"transposed": {"layout": "transposed"}},
    too_large=(({"q": 0, "scale": 1}, {}),),
)
