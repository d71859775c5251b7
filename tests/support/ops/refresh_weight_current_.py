# SPDX-License-Identifier: Apache-2.0
"""refresh_weight_current_: quantize_weight_current into tensors that are kept."""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import kept_weight, scales
from support.tensors import listed


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    given = {"w": listed(groups, dtype, layout, options), "refresh": None}
    return {**given, **kept_weight(groups, options), "scale": scales(groups)}


def expected(sample: Sample) -> Outputs:
    w = must.one_weight(sample["w"])
    return must.refreshed(sample, must.weight_current(w, must.scaling_of(sample)))


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants=variants.refreshing(power_of_two_scales=True, amax_epsilon=5.0),
    every_tensor="yes",
    shares_kernels=True,
)
