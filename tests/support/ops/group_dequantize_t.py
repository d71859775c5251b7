"""group_dequantize_t: columnwise data to numbers.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import reference, variants
from support.groups import Groups
from support.mistakes import BAD_OFFS, like
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out, quantized_columns


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q_t, scale_t = quantized_columns(groups, groups.K, options.pop("share_scales", False))
    arguments = {"q_t": lay_out(q_t, layout), "scale_t": scale_t, "offs": groups.offs()}
    return {**arguments, "num_rows": groups.T, "out_dtype": dtype}


def expected(sample: Sample) -> Outputs:
    inputs = (sample[name] for name in ("q_t", "scale_t", "offs", "num_rows"))
    return [Output(reference.dequantize_columnwise(*inputs).float().to(sample["out_dtype"]))]


def mistakes(good: Sample) -> list[Arguments]:
    q_t, scale_t = good["q_t"], good["scale_t"]
    return [
        {"q_t": like(q_t, None, None, None).flatten(1)},
        {"q_t": q_t.view(torch.uint8)},
        {"q_t": like(q_t, None, None, 64)},
        {"q_t": like(q_t, None, 72, None)},
        {"scale_t": torch.zeros(3)},
        {"scale_t": scale_t.bfloat16()},
        {"scale_t": like(scale_t, 2, None)},
        {"scale_t": like(scale_t, None, 128)},
        *BAD_OFFS,
        {"num_rows": -1},
        {"num_rows": 512},
        {"out_dtype": torch.int32},
    ]


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants={**variants.SHARED, "transposed": {"layout": "transposed"}},
    too_large=(({"q_t": 0}, {}),),
)
