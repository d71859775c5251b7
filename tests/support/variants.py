# SPDX-License-Identifier: Apache-2.0
"""Options of samples that several ops have in common, by name."""

import math

import torch

from support.op_info import Options
from support.reference import E4M3, E5M2
from support.tensors import BF16, FP32

# The forms of SwiGLU that models have. The samples hold numbers around 1, so the limits do as well.
FORMS: dict[str, Options] = {
    "limit": {"limit": 0.75},
    "alpha_beta": {"alpha": 1.702, "beta": 1.0},
    "interleaved": {"interleaved": True},
    "all_of_it": {"alpha": 1.702, "beta": 1.0, "limit": 1.5, "interleaved": True},
    "negative": {"alpha": -1.5, "beta": -0.5},
    "gelu_tanh": {"alpha": 2 * math.sqrt(2 / math.pi), "cubic": 0.044715},
    "cubic_of_it": {"alpha": 1.5, "beta": 0.5, "limit": 1.5, "interleaved": True, "cubic": 0.25},
}
STRIDES: dict[str, Options] = {x: {"layout": x} for x in ("strided", "transposed")}
LAYOUTS: dict[str, Options] = {**STRIDES, "expanded": {"layout": "expanded"}}
SWIGLU: dict[str, Options] = {
    **LAYOUTS,
    **FORMS,
    "odd": {"layout": "odd"},
    "odd_limit": {"layout": "odd", "limit": 0.75},
    "odd_interleaved": {"layout": "odd", "interleaved": True},
}
OF_PAIRS: Options = {**FORMS["all_of_it"], "transposed_b": True}
OUT: dict[str, Options] = {"out_bf16": {"out_dtype": BF16}, "out_fp32": {"out_dtype": FP32}}
MAIN_GRAD: dict[str, Options] = {
    "overwrite": {"overwrite": True},
    "add": {"overwrite": False},
    "bf16": {"grad_dtype": BF16},
}
PER_GROUP: dict[str, Options] = {
    "per_group": {"per_group": E4M3},
    "per_group_e5m2": {"per_group": E5M2},
}
LOW_RANK: dict[str, Options] = {
    "low": {"r": 16, "bias": True},
    "low_strided": {"r": 64, "low_layout": "strided"},
    "low_transposed": {"r": 48, "low_layout": "transposed"},
    "low_odd": {"r": 80, "low_layout": "odd", "bias": True},
    "low_gathered": {"r": 32, "gathers": "rows"},
}
GATHERED_OPERANDS: dict[str, Options] = {
    "gathered_dy": {"gathers": "dy_rows"},
    "gathered_x": {"gathers": "x_rows", "index": torch.int64},
    "gathered_strided": {"layout": "strided", "gathers": "x_rows"},
}
SCORES: dict[str, Options] = {
    "normalized": {"normalize": True, "scaling_factor": -2.5},
    "softmax": {"score_function": "softmax", "scaling_factor": 2.5},
    "softmax_of_chosen": {"score_function": "softmax", "normalize": True, "E": 128, "k": 8},
    "sigmoid": {"score_function": "sigmoid", "E": 300},
    "sigmoid_of_chosen": {"score_function": "sigmoid", "normalize": True, "scaling_factor": 2.5},
}
# exp is within 2^-22, a sum over 1024 experts of 37 roundings, and a handful of operations follow.
SCORE_ERROR = 2.0**-18
SHARED: dict[str, Options] = {"shared": {"share_scales": True}}
EXACT: Options = {"power_of_two_scales": False, "amax_epsilon": 0.5}
MXFP4: dict[str, Options] = {
    "mxfp4": {"mxfp4_dim": -1},
    "mxfp4_transposed": {"mxfp4_dim": -2},
    "mxfp4_strided": {"mxfp4_dim": -1, "layout": "strided", "columnwise": False},
}
MANY_CHOICES: dict[str, Options] = {
    "many": {"C": 11, "index": torch.int32},
    "none": {"C": 0},
    **STRIDES,
}


def with_columns(variants: dict[str, Options]) -> dict[str, Options]:
    """The same with columnwise data."""
    return {name: {"columnwise": True, **options} for name, options in variants.items()}


ROWS: dict[str, Options] = {
    "both": {"columnwise": True, "bias_grad": True},
    "bias": {"bias_grad": True},
    "columnwise": {"rowwise": False, "columnwise": True},
    **with_columns(LAYOUTS),
}


def refreshing(**rowwise: object) -> dict[str, Options]:
    """Of a refresh; further options are of the variant that keeps no transposed weight."""
    return {
        "yes": {"refresh": True, "experts": "views"},
        "no": {"refresh": False},
        "packed": {"experts": "packed", "refresh": True},
        "rowwise": {"columnwise": False, **rowwise},
        "transposed": {"layout": "transposed", "experts": "packed"},
    }
