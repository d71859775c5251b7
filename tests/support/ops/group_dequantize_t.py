# SPDX-License-Identifier: Apache-2.0
"""group_dequantize_t: columnwise data to numbers."""

import torch

from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.tensors import lay_out, quantized_columns


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    q_t, scale_t = quantized_columns(groups, groups.K, options.pop("share_scales", False))
    arguments = {"q_t": lay_out(q_t, layout), "scale_t": scale_t, "offs": groups.offs()}
    return {**arguments, "num_rows": groups.T, "out_dtype": dtype}


def expected(sample: Sample) -> Outputs:
    inputs = (sample[name] for name in ("q_t", "scale_t", "offs", "num_rows"))
    return [Output(reference.dequantize_columnwise(*inputs).float().to(sample["out_dtype"]))]


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={**variants.SHARED, "transposed": {"layout": "transposed"}},
    too_large=(({"q_t": 0}, {}),),
)
