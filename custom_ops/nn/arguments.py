# SPDX-License-Identifier: Apache-2.0
"""From the arguments of a function to the rows and the projections that it multiplies.

T rows, E groups (experts), K in_features, N out_features.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from grouped_linear.autograd.projection import Projection
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE
from grouped_linear.nn.checks import (
    check_mx_blocks,
    check_parameter,
    check_recipe,
    check_state,
    check_tensor,
)
from grouped_linear.quantized.keep import KEPT, local_part, stored_weight
from grouped_linear.recipes import DelayedScalingState, Recipe
from grouped_linear.recipes.format import WeightList
from grouped_linear.recipes.recipe import UNQUANTIZED


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast computes in on a device, or None where it is off."""
    device_type = device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Activations in autocast's dtype, which leaves dtypes alone that are none of activations."""
    return x.to(dtype) if x.dtype in ACTIVATIONS else x


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn torch.autocast off, in which torch.stack refuses 16 bits of another kind than its own.

    The arguments have the dtypes in which a layer computes.
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    if torch.compiler.is_compiling():  # Dynamo does not trace the guard below, which costs less
        return torch.autocast(device.type, enabled=False)
    return torch._C._DisableAutocast()


def as_rows(op: str, x: Tensor) -> tuple[Tensor, torch.dtype | None]:
    """x [..., K] as [T, K] in the dtype of torch.autocast, and that dtype; None where it is off."""
    check_tensor(op, "x", x)
    if x.dim() == 0 or x.size(-1) == 0:
        raise RuntimeError(
            f"{op}: x must have a last dimension of a positive multiple of {FEATURE_MULTIPLE}, "
            f"got shape {list(x.shape)}"
        )
    dtype = autocast_dtype(x.device)
    x = x if dtype is None else autocast(x, dtype)
    return x if x.dim() == 2 else x.reshape(-1, x.size(-1)), dtype


def ready(
    op: str,
    names: Sequence[str],
    given: Projection,
    dtype: torch.dtype | None,
    has_dispatcher: bool = False,
) -> tuple[Projection, WeightList]:
    """A projection as it is multiplied, and the weights to differentiate; dtype is autocast's.

    With a dispatcher it is of the experts of this process.
    """
    if has_dispatcher:
        stored, adapter = given.stored, given.adapter
        if adapter is not None:
            a, b = local_part(adapter.a_ErK), local_part(adapter.b_ENr)
            adapter = adapter._replace(a_ErK=a, b_ENr=b)
        given = given._replace(
            weights=tuple(map(local_part, given.weights)),
            bias_EN=local_part(given.bias_EN),
            stored=None if stored is None else stored.each(local_part),
            adapter=adapter,
        )
    weights = cast = given.weights
    check = check_parameter if given.stored is None else check_tensor
    check(op, names[0], weights[0])
    if given.recipe.weight.qat is not None:
        check_mx_blocks(op, given.recipe, None, **{f"in_features of {names[0]}": given.in_features})
    if given.bias_EN is not None:
        check_parameter(op, names[1], given.bias_EN)
    takes_one_dtype = dtype is not None and not given.recipe.weight.reads_any_dtype
    if takes_one_dtype and weights[0].dtype in ACTIVATIONS and weights[0].dtype != dtype:
        cast = tuple(w.to(dtype) for w in weights)
        given = given._replace(weights=cast)
    if given.stored is None and isinstance(cast[0], KEPT):
        given = given._replace(stored=stored_weight(op, cast[0], given.recipe))
    return given, cast if given.main_grad is None else weights


def recipe_of_call(
    op: str, layer: str, recipe: Recipe | None, state: DelayedScalingState | None
) -> Recipe:
    """The recipe of a call without a module, which has the layer's state."""
    check_recipe(op, recipe)
    check_state(op, state)
    has_state = recipe is not None and recipe.has_state
    if has_state and state is None:
        name = type(recipe).__name__
        raise ValueError(f"{op}: {name} has a state: pass state, or use {layer}")
    if state is not None and not has_state:
        raise ValueError(f"{op}: state needs a recipe that has one, got recipe {recipe}")
    return (recipe if state is None else state.of_call()) or UNQUANTIZED


def with_dropout(projection: Projection, x: Tensor, rows: Tensor) -> Projection:
    """The projection; dropout zeroes its adapter's input in part, of x's dtype and as many rows."""
    adapter = projection.adapter
    if adapter is None or adapter.dropout == 0:
        return projection
    mask = dropout(x.new_ones(rows.size(0), projection.in_features), adapter.dropout)
    return projection._replace(adapter=adapter._replace(mask=mask))
