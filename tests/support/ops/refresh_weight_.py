# SPDX-License-Identifier: Apache-2.0
"""refresh_weight_: quantize_weight into tensors that are kept."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import kept_weight
from support.tensors import listed, mxfp4_blocks


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    groups = mxfp4_blocks(groups, options)
    given = {"w": listed(groups, dtype, layout, options), "refresh": None}
    return {**given, **kept_weight(groups, options)}


def expected(sample: Sample) -> Outputs:
    w = must.one_weight(sample["w"])
    return must.refreshed(sample, must.weight(w, must.scaling_of(sample), sample.get("mxfp4_dim")))


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={
        **variants.refreshing(power_of_two_scales=False),
        "mxfp4": {"mxfp4_dim": -1, "experts": "packed"},
        "mxfp4_transposed": {"mxfp4_dim": -2, "experts": "packed", "refresh": True},
        "mxfp4_skipped": {"mxfp4_dim": -1, "experts": "packed", "refresh": False},
    },
    mistakes=({"mxfp4_dim": -2},),  # a list
    every_tensor="yes",
    shares_kernels=True,
)
