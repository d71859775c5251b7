"""From the arguments of a function to the projections of one call.

T rows, E groups (experts), K in_features, N out_features.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from grouped_linear.autograd.low_rank import Adapter
from grouped_linear.autograd.projection import Projection, StoredWeight
from grouped_linear.autograd.wgrad import MainGrad
from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.nn.lora import LoraWeights
from grouped_linear.quantized.weight import KEPT, local_part, stored_weight
from grouped_linear.recipes import UNQUANTIZED, Recipe, WeightList


class ProjectionArguments(NamedTuple):
    """A projection as a layer's function takes it, before the call is checked."""

    weights: WeightList
    """One [E, N, K], or E of [N, K], which have no adapter."""
    bias: Tensor | None = None
    recipe: Recipe | None = None
    """Whose formats have the state of delayed scaling and count where the layer is watched."""
    lora: LoraWeights | None = None
    stored: StoredWeight | None = None
    """The quantized weight to read: a frozen one or a cache. One beside a master is found."""
    main_grad: MainGrad | None = None

    def local(self) -> "ProjectionArguments":
        """The part that is of the experts of this process."""
        lora = self.lora
        if lora is not None:
            lora = lora._replace(a=local_part(lora.a), b=local_part(lora.b))
        weights, stored = tuple(map(local_part, self.weights)), self.stored
        if stored is not None:
            stored = StoredWeight(stored.weight.each(local_part), stored.refresh)
        bias = local_part(self.bias)
        return self._replace(weights=weights, bias=bias, lora=lora, stored=stored)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast computes in on a device, or None where it is off."""
    device_type = device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Activations in autocast's dtype, which leaves dtypes alone that are none of activations."""
    return x if dtype is None or x.dtype not in ACTIVATIONS else x.to(dtype)


def _autocast_weights(weights: WeightList, recipe: Recipe, dtype: torch.dtype) -> WeightList:
    """Cast weights to autocast's dtype, unless the recipe's quantizer reads any dtype."""
    w = weights[0]
    if recipe.weight.reads_any_dtype or w.dtype not in ACTIVATIONS or w.dtype == dtype:
        return weights
    return tuple(w.to(dtype) for w in weights)


def projection_of(
    op: str, given: ProjectionArguments, dtype: torch.dtype | None
) -> tuple[Projection, WeightList]:
    """A projection in one call, and the weights to differentiate; dtype is autocast's."""
    weights, bias_EN, recipe, lora, stored, main_grad = given
    if stored is None and isinstance(weights[0], KEPT):
        quantized = stored_weight(op, weights[0], recipe)
        stored = None if quantized is None else StoredWeight(quantized)
    recipe = UNQUANTIZED if recipe is None else recipe
    cast = weights if dtype is None else _autocast_weights(weights, recipe, dtype)
    adapter = None if lora is None else Adapter(lora.a, lora.b, lora.scaling)
    projection = Projection(cast, bias_EN, recipe, stored, main_grad, adapter)
    return projection, cast if main_grad is None else weights


def with_dropout(projection: Projection, lora: LoraWeights, x: Tensor) -> Projection:
    """The projection, whose adapter's input, like x, dropout zeroes in part."""
    if lora.dropout == 0 or projection.adapter is None:
        return projection
    mask = dropout(torch.ones_like(x), lora.dropout)
    return projection._replace(adapter=projection.adapter._replace(mask=mask))
