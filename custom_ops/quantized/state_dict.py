# SPDX-License-Identifier: Apache-2.0
"""What state dicts have of weights that are kept in FP8: plain tensors.

A weight with its master is there in high precision. One that is frozen, ``name``, is there as the
bytes of its numbers, and as ``name_scale_inv``, those of its scales.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.quantized.weight import distributed_like, local_part
from grouped_linear.quantized.with_master import GroupedTensorWithMaster

SCALE = "_scale_inv"


def for_state_dict(w: Any) -> Any:
    """A tensor of a state dict; a weight with its master as one that can be saved anywhere."""
    local = local_part(w)
    if isinstance(w, nn.Parameter) or not isinstance(local, GroupedTensorWithMaster):
        return w
    return distributed_like(w, local.for_state_dict())


def as_master(own: Any, w: Tensor) -> Tensor:
    """What ``assign=True`` puts in a parameter's place: for a master, a copy kept as that is.

    A write through the loaded tensor itself would not show.
    """
    master, local = local_part(own), local_part(w)
    if not isinstance(master, GroupedTensorWithMaster) or local.shape != master.shape:
        return w
    local = local.dequantize() if isinstance(local, GroupedTensorWithMaster) else local
    dtype = local.dtype if local.dtype in ACTIVATIONS else master.dtype
    kept = master.of(local.to(dtype, copy=True, memory_format=torch.contiguous_format))
    return distributed_like(w, kept)
