# SPDX-License-Identifier: Apache-2.0
"""The ops, one documented function each, over ``torch.ops.grouped_linear``.

==============  ====================================================================================
``routing``     group sizes to offsets; experts chosen; tokens sorted by them, gathered, summed back
``quantize``    activations and gradients to FP8, group by group, and back
``weight``      weights to FP8
``mxfp4``       weights to MXFP4 and back, and GEMMs of them
``activation``  SwiGLU and its gradient, alone or fused with quantization
``gemm``        grouped GEMMs, quantized or not, fused with SwiGLU or not; the bias gradient
``state``       what a layer keeps between calls: its quantized weight, also in a step of Adam, and
                scales of delayed scaling
``layer``       a whole forward or backward under block scaling, in one op
==============  ====================================================================================

T rows (tokens, or a fixed capacity), E groups (experts), K in_features, N out_features.

``offs`` [E] int32 holds the END of each group's rows, as for ``torch.nn.functional.grouped_mm``:
group e owns the rows [offs[e-1], offs[e]). Inputs at and past ``offs[-1]`` are ignored, and outputs
are zero there. ``scale`` multiplies to dequantize: ``x ~ q * scale``.

``grouped_mm`` and ``topk_experts`` are differentiable. The floating-point results of other ops
refuse a gradient: a backward raises RuntimeError with a sentence that says what to use instead.
Forward-mode autograd raises NotImplementedError.

Every op raises RuntimeError for a wrong shape, dtype, device, size or option, with one sentence
that names the op, the rule and the value. Fake tensors, CPU and CUDA give the same sentence. On
CPU, offsets that decrease or exceed the number of rows raise too. On a GPU they are clamped,
because to check them would wait for the device. A docstring names what else its op raises.
"""

import torch

from grouped_linear.ops.activation import (
    SwiGLU,
    SwigluGrad,
    SwigluGradQuantized,
    SwigluQuantized,
    group_quantize_swiglu,
    group_quantize_swiglu_grad,
    swiglu,
    swiglu_grad,
)
from grouped_linear.ops.gemm import (
    SwigluGemm,
    addmm,
    grouped_bias_grad,
    grouped_mm,
    grouped_mm_list,
    grouped_mm_swiglu,
    grouped_mm_swiglu_grad,
    grouped_mm_wgrad,
    grouped_mm_wgrad_,
    grouped_mm_wgrad_list_,
    grouped_scaled_mm,
    grouped_scaled_mm_wgrad,
    grouped_scaled_mm_wgrad_,
    grouped_scaled_mm_wgrad_list_,
)
from grouped_linear.ops.layer import (
    BlockScaledLinear,
    LinearGrad,
    block_scaled_linear,
    block_scaled_linear_grad,
)
from grouped_linear.ops.mxfp4 import Mxfp4Weight, dequantize_mxfp4, grouped_mm_mxfp4, quantize_mxfp4
from grouped_linear.ops.quantize import (
    GroupQuantized,
    MxRounded,
    PerGroupQuantized,
    group_dequantize,
    group_dequantize_t,
    group_quantize,
    group_quantize_current,
    group_quantize_delayed,
    group_quantize_mx,
    group_round_mx,
)
from grouped_linear.ops.routing import (
    SortedByExpert,
    gather_dot,
    gather_sum,
    scatter_rows,
    sort_by_expert,
    splits_to_offsets,
    topk_experts,
    topk_experts_grad,
)
from grouped_linear.ops.state import (
    adam_weight_,
    refresh_weight_,
    refresh_weight_current_,
    refresh_weight_delayed_,
    refresh_weight_mx_,
    update_scales_,
)
from grouped_linear.ops.weight import (
    WeightQuantized,
    quantize_weight,
    quantize_weight_current,
    quantize_weight_delayed,
    quantize_weight_list,
    transpose_weight,
)

#: The ops whose outputs are those of a forward's GEMMs, of which an eager layer calls one and a
#: compiled one another. A policy of selective activation checkpointing keeps them:
#: ``create_selective_checkpoint_contexts([*GEMMS])``.
#: It keeps both outputs of ``grouped_mm_swiglu``.
GEMMS: frozenset[torch._ops.OpOverload] = frozenset(
    getattr(torch.ops.grouped_linear, name).default
    for name in (
        "grouped_mm",
        "grouped_mm_list",
        "grouped_mm_mxfp4",
        "grouped_mm_swiglu",
        "grouped_scaled_mm",
        "block_scaled_linear",
    )
)

__all__ = [
    "GEMMS",
    "BlockScaledLinear",
    "GroupQuantized",
    "LinearGrad",
    "MxRounded",
    "Mxfp4Weight",
    "PerGroupQuantized",
    "SortedByExpert",
    "SwiGLU",
    "SwigluGemm",
    "SwigluGrad",
    "SwigluGradQuantized",
    "SwigluQuantized",
    "WeightQuantized",
    "adam_weight_",
    "addmm",
    "block_scaled_linear",
    "block_scaled_linear_grad",
    "dequantize_mxfp4",
    "gather_dot",
    "gather_sum",
    "group_dequantize",
    "group_dequantize_t",
    "group_quantize",
    "group_quantize_current",
    "group_quantize_delayed",
    "group_quantize_mx",
    "group_quantize_swiglu",
    "group_quantize_swiglu_grad",
    "group_round_mx",
    "grouped_bias_grad",
    "grouped_mm",
    "grouped_mm_list",
    "grouped_mm_mxfp4",
    "grouped_mm_swiglu",
    "grouped_mm_swiglu_grad",
    "grouped_mm_wgrad",
    "grouped_mm_wgrad_",
    "grouped_mm_wgrad_list_",
    "grouped_scaled_mm",
    "grouped_scaled_mm_wgrad",
    "grouped_scaled_mm_wgrad_",
    "grouped_scaled_mm_wgrad_list_",
    "quantize_mxfp4",
    "quantize_weight",
    "quantize_weight_current",
    "quantize_weight_delayed",
    "quantize_weight_list",
    "refresh_weight_",
    "refresh_weight_current_",
    "refresh_weight_delayed_",
    "refresh_weight_mx_",
    "scatter_rows",
    "sort_by_expert",
    "splits_to_offsets",
    "swiglu",
    "swiglu_grad",
    "topk_experts",
    "topk_experts_grad",
    "transpose_weight",
    "update_scales_",
]
