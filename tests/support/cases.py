"""Cases of every op for parametrize: group sizes and variants, on each device.

T rows, E groups, K in_features, N out_features.
"""

import math
from typing import Any

import pytest
import torch

from support import reference
from support.devices import devices
from support.groups import GROUPS, SHAPES, Groups
from support.samples import Sample, make
from support.tensors import BF16, FP32

# The forms of SwiGLU that models have. The samples hold numbers around 1, so the limits do as well.
FORMS: dict[str, dict[str, Any]] = {
    "limit": {"limit": 0.75},
    "alpha_beta": {"alpha": 1.702, "beta": 1.0},
    "interleaved": {"interleaved": True},
    "all_of_it": {"alpha": 1.702, "beta": 1.0, "limit": 1.5, "interleaved": True},
    "negative": {"alpha": -1.5, "beta": -0.5},
    "gelu_tanh": {"alpha": 2 * math.sqrt(2 / math.pi), "cubic": 0.044715},
    "cubic_of_it": {"alpha": 1.5, "beta": 0.5, "limit": 1.5, "interleaved": True, "cubic": 0.25},
}
_LAYOUTS: dict[str, Any] = {x: {"layout": x} for x in ("strided", "transposed", "expanded")}
_SWIGLU: dict[str, Any] = {
    **_LAYOUTS,
    **FORMS,
    "odd": {"layout": "odd"},
    "odd_limit": {"layout": "odd", "limit": 0.75},
    "odd_interleaved": {"layout": "odd", "interleaved": True},
}
_OF_PAIRS: dict[str, Any] = {**FORMS["all_of_it"], "transposed_b": True}
_OUT: dict[str, Any] = {
    f"out_{name}": {"out_dtype": d} for name, d in (("bf16", BF16), ("fp32", FP32))
}
_MAIN_GRAD: dict[str, Any] = {
    "overwrite": {"overwrite": True},
    "add": {"overwrite": False},
    "bf16": {"grad_dtype": BF16},
}
_PER_GROUP: dict[str, Any] = {
    "per_group": {"per_group": reference.E4M3},
    "per_group_e5m2": {"per_group": reference.E5M2},
}
_GATHERED: dict[str, dict[str, Any]] = {
    "gathered_dy": {"gathers": "dy_rows"},
    "gathered_x": {"gathers": "x_rows", "index": torch.int64},
    "gathered_strided": {"layout": "strided", "gathers": "x_rows"},
}
_SHARED: dict[str, Any] = {"shared": {"share_scales": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "splits_to_offsets": {
        "aligned": {"alignment": 128},
        "scaled": {"stride": 144, "out_dtype": torch.int64},
    },
    "group_quantize": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
        "shared": {"columnwise": True, "bias_grad": True, "share_scales": True},
        "gathered": {"columnwise": True, "bias_grad": True, "index": torch.int32},
        "gathered_strided": {
            "columnwise": True,
            "index": torch.int64,
            "layout": "strided",
            "share_scales": True,
        },
    },
    "topk_experts": {
        "one": {"E": 1, "k": 1},
        "all": {"E": 33, "k": 33},
        "many": {"E": 1024, "k": 100},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "sort_by_expert": {
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "transposed": {"layout": "transposed"},
    },
    "gather_sum": {
        "unweighted": {"weight": False},
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "gather_dot": {
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "scatter_rows": {
        "many": {"C": 11, "index": torch.int32},
        "none": {"C": 0},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "swiglu": _SWIGLU,
    "swiglu_grad": _SWIGLU,
    "group_quantize_swiglu": {
        "both": {"columnwise": True, "keep_h": True},
        "shared": {"columnwise": True, "share_scales": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "exact_scales": {"columnwise": True, "power_of_two_scales": False, "amax_epsilon": 0.5},
        **{name: {"columnwise": True, **v} for name, v in _SWIGLU.items()},
    },
    "group_quantize_swiglu_grad": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "all": {"columnwise": True, "bias_grad": True, "h_columnwise": True},
        "shared": {"columnwise": True, "h_columnwise": True, "share_h_scales": True},
        "rowwise_and_h": {"h_columnwise": True},
        "columnwise_and_h": {"rowwise": False, "columnwise": True, "h_columnwise": True},
        "exact_scales": {
            "columnwise": True,
            "h_columnwise": True,
            "power_of_two_scales": False,
            "amax_epsilon": 0.5,
        },
        **{name: {"columnwise": True, "h_columnwise": True, **v} for name, v in _SWIGLU.items()},
    },
    "group_quantize_current": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "e5m2": {"fp8": reference.E5M2, "columnwise": True, "bias_grad": True},
        "powers_of_two": {"columnwise": True, "power_of_two_scales": True, "amax_epsilon": 5.0},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
    },
    "group_quantize_delayed": {
        "both": {"columnwise": True, "bias_grad": True},
        "columnwise": {"rowwise": False, "columnwise": True},
        "e5m2": {"fp8": reference.E5M2, "columnwise": True, "bias_grad": True},
        "no_amax": {"amax": False, "columnwise": True},
        **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
    },
    **{
        op: {
            "both": {"columnwise": True, "bias_grad": True},
            "columnwise": {"rowwise": False, "columnwise": True},
            **{name: {"columnwise": True, **v} for name, v in _LAYOUTS.items()},
        }
        for op in ("group_quantize_mx", "group_round_mx")
    },
    "grouped_bias_grad": _LAYOUTS,
    "quantize_weight_list": {
        "rowwise": {"columnwise": False},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    **{
        op: {
            "yes": {"refresh": True, "experts": "views"},
            "no": {"refresh": False},
            "packed": {"experts": "packed", "refresh": True},
            "rowwise": {"columnwise": False, **options},
            "transposed": {"layout": "transposed", "experts": "packed"},
        }
        for op, options in (
            ("refresh_weight_", {"power_of_two_scales": False}),
            ("refresh_weight_current_", {"power_of_two_scales": True, "amax_epsilon": 5.0}),
            ("refresh_weight_delayed_", {"amax": False}),
            ("refresh_weight_mx_", {}),
        )
    },
    "quantize_weight_current": {
        "rowwise": {"columnwise": False},
        "powers_of_two": {"power_of_two_scales": True, "amax_epsilon": 5.0},
        "transposed": {"layout": "transposed"},
    },
    "quantize_weight_delayed": {
        "rowwise": {"columnwise": False},
        "no_amax": {"amax": False},
        "transposed": {"layout": "transposed"},
    },
    "update_scales_": {
        "most_recent": {"most_recent": True},
        "margin": {"margin": 3},
        "long": {"steps": (1024, 1500)},
    },
    "adam_weight_": {
        "rowwise": {"columnwise": False, "stochastic_rounding": False},
        "amsgrad": {"amsgrad": True, "maximize": True, "lr_tensor": 0.03},
        "adam": {"decoupled_weight_decay": False, "grad_scale": 3.0, "found_inf": 0.0},
        "skipped": {"grad_scale": 2.0, "found_inf": 1.0},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
    },
    "transpose_weight": {"strided": {"layout": "strided"}},
    "quantize_weight": {
        "rowwise": {"columnwise": False},
        "columnwise": {"rowwise": False},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
    },
    "grouped_mm": {
        "bias": {"bias": True},
        "grad": {"bias": True, "requires_grad": ("a", "b", "bias")},
        "grad_of_a": {"requires_grad": ("a",)},
        "grad_of_b": {"requires_grad": ("b",)},
        "strided": {"layout": "strided"},
        "transposed": {"layout": "transposed"},
        "bias_fp32": {"bias": True, "out_dtype": FP32},
        "gathered": {"bias": True, "gathers": "rows"},
        "gathered_strided": {"layout": "strided", "gathers": "rows", "index": torch.int64},
        "gathered_grad": {"gathers": "rows", "requires_grad": ("a", "b")},
        **_OUT,
    },
    "grouped_mm_list": {
        "gathered": {"gathers": "rows"},
        "views": {"experts": "views", "bias": True},
        "as_multiplied": {"transpose_b": False, "out_dtype": FP32},
    },
    "grouped_mm_swiglu": {
        "bias": {"bias": True, "F": 320},
        "h_alone": {"keep_gate_up": False, "bias": True},
        "gathered": {"gathers": "rows", "F": 128},
        "gathered_bias": {"gathers": "rows", "index": torch.int64, "bias": True, "limit": 0.75},
        "odd": {"F": 48},
        "of_pairs": {"F": 320, "bias": True, **_OF_PAIRS},
        "h_alone_of_pairs": {"keep_gate_up": False, **_OF_PAIRS},
        "gathered_of_pairs": {"gathers": "rows", **_OF_PAIRS},
        "strided": {"layout": "strided"},
        "all_of_it": FORMS["all_of_it"],
        "gelu_tanh": {"F": 128, "bias": True, **FORMS["gelu_tanh"]},
        "cubic_of_pairs": {"transposed_b": True, **FORMS["cubic_of_it"]},
    },
    "grouped_mm_swiglu_grad": {
        "wide": {"F": 320},
        "gathered": {"gathers": "rows", "F": 128},
        "gathered_limit": {"gathers": "rows", "index": torch.int64, "limit": 0.75},
        "odd": {"F": 48},
        "of_pairs": {"F": 320, **_OF_PAIRS},
        "narrow_of_pairs": _OF_PAIRS,
        "strided": {"layout": "strided"},
        "all_of_it": FORMS["all_of_it"],
        "gelu_tanh": {"F": 128, **FORMS["gelu_tanh"]},
        "cubic_of_pairs": {"transposed_b": True, **FORMS["cubic_of_it"]},
    },
    "grouped_scaled_mm": {
        "bias": {"bias": True},
        "gathered": {"bias": True, "gathers": "rows", "index": torch.int64},
        **_PER_GROUP,
    },
    "grouped_mm_wgrad": {**_LAYOUTS, **_OUT, **_GATHERED},
    "grouped_mm_wgrad_": {**_MAIN_GRAD, **_LAYOUTS, **_GATHERED},
    "grouped_mm_wgrad_list_": {**_MAIN_GRAD, **_GATHERED, "views": {"per_expert": False}},
    "grouped_scaled_mm_wgrad_list_": {
        **_MAIN_GRAD,
        "views": {"per_expert": False, "overwrite": True},
    },
    "group_dequantize_t": _SHARED,
    "grouped_scaled_mm_wgrad": {**_PER_GROUP, **_SHARED},
    "grouped_scaled_mm_wgrad_": {**_MAIN_GRAD, **_PER_GROUP, **_SHARED},
    "block_scaled_linear": {
        "bias": {"bias": True},
        "rowwise": {"columnwise_x": False, "columnwise_w": False},
        "exact_scales": {"power_of_two_scales": False, "amax_epsilon": 0.5},
        "strided": {"layout": "strided"},
        **_SHARED,
    },
    "block_scaled_linear_grad": {
        "bias": {"bias_grad": True, "out_dtype": FP32},
        "of_x": {"x_t": None, "scale_x_t": None},
        "of_w": {"w_t": None, "scale_w": None, "power_of_two_scales": False, "amax_epsilon": 0.5},
        "expanded": {"layout": "expanded"},
        **_SHARED,
    },
}


def variant_of(op: str, groups: Groups, variant: str, dtype: torch.dtype) -> Sample:
    """One of the samples that `cases` lists, on the CPU."""
    return make(op, groups, dtype, **VARIANTS.get(op, {}).get(variant, {}))


def cases(*ops: str) -> list[Any]:
    """Every sample of these ops, for parametrize(("op", "groups", "variant", "device"), ...)."""
    params = []
    for op in ops:
        # The kernels of these are those of other ops, which meet all group sizes.
        shared = "_list" in op or op.startswith(
            ("refresh_weight_", "block_scaled_linear", "adam_weight_", "grouped_mm_swiglu")
        )
        plans = [(name, "plain") for name in (SHAPES if shared else GROUPS)]
        plans += [(name, v) for v in VARIANTS.get(op, {}) for name in ("unaligned", "capacity")]
        for device in devices(op):
            for name, variant in plans:
                case = pytest.param(
                    op,
                    GROUPS[name],
                    variant,
                    device.values[0],
                    marks=device.marks,
                    id=f"{op}-{name}-{variant}-{device.id}",
                )
                params.append(case)
    return params
