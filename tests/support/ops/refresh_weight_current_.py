"""refresh_weight_current_: quantize_weight_current into tensors that are kept.

T rows, E groups, K in_features, N out_features.
"""

import torch

from support import expected as must
from support import variants
from support.groups import Groups
from support.mistakes import REFRESH_SENTENCES, refresh_mistakes
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.operands import kept_weight, scales
from support.tensors import listed


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    given = {"w": listed(groups, dtype, layout, options), "refresh": None}
    return {**given, **kept_weight(groups, options), "scale": scales(groups)}


def expected(sample: Sample) -> Outputs:
    w = must.one_weight(sample["w"])
    return must.refreshed(sample, must.weight_current(w, must.scaling_of(sample)))


def mistakes(good: Sample) -> list[Arguments]:
    return refresh_mistakes(good)


OP = OpInfo(
    sample=sample,
    expected=expected,
    mistakes=mistakes,
    variants=variants.refreshing(power_of_two_scales=True, amax_epsilon=5.0),
    every_tensor="yes",
    shares_kernels=True,
    sentences="""\
q must be [1, 32, 144], got [3, 32, 144]
"""
    + REFRESH_SENTENCES
    + """\
amax_epsilon must be finite and not negative, got -0.5
amax_epsilon must be finite and not negative, got inf
amax_epsilon must be finite and not negative, got nan
refresh must be 0-D, got 1-D
refresh must be bool, got int64
q must be 3-D, got 4-D
q must be float8_e4m3fn, got float64
q must be [3, 32, 144], got [2, 32, 144]
q must be contiguous
scale must be 1-D, got 2-D
scale must be float32, got float64
scale must be [3], got [2]
q_t must be 3-D, got 4-D
q_t must be float8_e4m3fn, got float64
q_t must be [3, 144, 32], got [2, 144, 32]
q_t must be contiguous""",
)
