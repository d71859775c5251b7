# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a function to the projections of one call.

T rows, E groups (experts), K in_features, N out_features.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout

from grouped_linear.autograd.low_rank import Adapter
from grouped_linear.autograd.projection import Projection
from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.quantized.weight import KEPT, local_part, stored_weight
from grouped_linear.recipes.format import WeightList


def local(given: Projection) -> Projection:
    """The part of a projection that is of the experts of this process."""
    weights, bias_EN, recipe, stored, main_grad, adapter, refresh = given
    if adapter is not None:
        a, b, scaling, mask, p = adapter
        adapter = Adapter(local_part(a), local_part(b), scaling, mask, p)
    if stored is not None:
        stored = stored.each(local_part)
    weights = tuple(map(local_part, weights))
    bias_EN = local_part(bias_EN)
    return Projection(weights, bias_EN, recipe, stored, main_grad, adapter, refresh)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast computes in on a device, or None where it is off."""
    device_type = device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Activations in autocast's dtype, which leaves dtypes alone that are none of activations."""
    return x if dtype is None or x.dtype not in ACTIVATIONS else x.to(dtype)


def ready(op: str, given: Projection, dtype: torch.dtype | None) -> tuple[Projection, WeightList]:
    """A projection as it is multiplied, and the weights to differentiate; dtype is autocast's."""
    weights, bias_EN, recipe, stored, main_grad, adapter, refresh = given
    if stored is None and isinstance(weights[0], KEPT):
        stored = stored_weight(op, weights[0], recipe)
    cast = weights
    if dtype is not None and not recipe.weight.reads_any_dtype:  # its GEMM takes one dtype
        is_other = weights[0].dtype in ACTIVATIONS and weights[0].dtype != dtype
        cast = tuple(w.to(dtype) for w in weights) if is_other else weights
    projection = Projection(cast, bias_EN, recipe, stored, main_grad, adapter, refresh)
    return projection, cast if main_grad is None else weights


def with_dropout(projection: Projection, x: Tensor) -> Projection:
    """The projection, whose adapter's input, like x, dropout zeroes in part."""
    adapter = projection.adapter
    if adapter is None or adapter.dropout == 0:
        return projection
    mask = dropout(torch.ones_like(x), adapter.dropout)
    return projection._replace(adapter=adapter._replace(mask=mask))
