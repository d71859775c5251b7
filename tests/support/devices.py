"""The ops, the devices that they run on, and what a test needs to run."""

from typing import Any

import pytest
import torch

OPS = (
    "splits_to_offsets",
    "group_quantize",
    "group_quantize_current",
    "group_quantize_delayed",
    "group_quantize_mx",
    "group_round_mx",
    "topk_experts",
    "sort_by_expert",
    "gather_sum",
    "gather_dot",
    "scatter_rows",
    "swiglu",
    "swiglu_grad",
    "group_quantize_swiglu",
    "group_quantize_swiglu_grad",
    "group_dequantize",
    "group_dequantize_t",
    "grouped_bias_grad",
    "quantize_weight",
    "transpose_weight",
    "quantize_weight_list",
    "quantize_weight_current",
    "quantize_weight_delayed",
    "refresh_weight_",
    "refresh_weight_current_",
    "refresh_weight_delayed_",
    "refresh_weight_mx_",
    "update_scales_",
    "adam_weight_",
    "grouped_mm",
    "grouped_mm_list",
    "grouped_mm_swiglu",
    "grouped_mm_swiglu_grad",
    "grouped_scaled_mm",
    "grouped_mm_wgrad",
    "grouped_scaled_mm_wgrad",
    "grouped_mm_wgrad_",
    "grouped_scaled_mm_wgrad_",
    "grouped_mm_wgrad_list_",
    "grouped_scaled_mm_wgrad_list_",
    "block_scaled_linear",
    "block_scaled_linear_grad",
)
HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
try:
    from grouped_linear._host import CUDA_VERSION  # None where no CUDA compiler was found
except ImportError:  # the module is optional
    CUDA_VERSION = torch.version.cuda
CUDA_OPS = set() if CUDA_VERSION is None else set(OPS)  # the ops that have a CUDA kernel
needs_gpu = pytest.mark.skipif(
    not (HAS_GPU and CUDA_OPS),
    reason="needs an NVIDIA GPU of compute capability 8.0 or more, and nvcc when it was built",
)


def devices(*ops: str) -> list[Any]:
    """The devices that all of these ops run on, for parametrize."""
    cpu, cuda = pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=needs_gpu)
    return [cpu, cuda] if CUDA_OPS.issuperset(ops) else [cpu]


def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.grouped_linear, op).default
