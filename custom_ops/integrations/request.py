# SPDX-License-Identifier: Apache-2.0
"""The arguments of a conversion, and the steps that all libraries' experts share.

First everything is checked, then everything is written: a model is converted as a whole or not at
all, unless memory runs out.
"""

import gc
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, MAX_GROUPS, dtype_name
from grouped_linear.quantized.weight import Weights, local_part
from grouped_linear.recipes import Recipe


@dataclass(frozen=True)
class Request:
    """The arguments of a conversion, after their checks."""

    recipe: Recipe | None
    weights: Weights
    save_gate_up_in_fp8: bool
    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)
    """Other recipes, by patterns of the modules' names."""

    def of(self, name: str) -> "Request":
        """The request for one module: where a pattern has no recipe, its weights stay plain."""
        recipe, weights = self.recipe, self.weights
        for pattern, other in self.recipes.items():
            if fnmatchcase(name, pattern):
                recipe, weights = other, None if other is None else self.weights
        return replace(self, recipe=recipe, weights=weights, recipes={})


def where_in(name: str, module: nn.Module) -> str:
    """The words that an error about a module of the model begins with."""
    return f"convert: {name or type(module).__name__}"


@dataclass(frozen=True)
class Changes:
    """What a conversion has done to parameters."""

    replaced: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    """Those that learn and were replaced by others. Whoever holds one still, holds the old one."""
    squares: dict[nn.Module, Tensor] = field(default_factory=dict)
    """Of weights that were quantized: see :meth:`KeepsFrozen.squared_error`."""


def warn_of_others_that_hold(changes: Changes) -> None:
    """Warn of replaced parameters that something still holds, as an optimizer does."""
    if any(one() is not None for one in changes.replaced):
        gc.collect()  # modules and their hooks hold each other
    held = sum(one() is not None for one in changes.replaced)
    if held:
        warnings.warn(
            f"convert: {held} parameters were replaced and something still holds them, as an "
            "optimizer or DistributedDataParallel does that was made before: make it again, or it "
            "steps the old ones and keeps their memory",
            stacklevel=4,  # convert and its decorator
        )


def check_replaceable(where: str, module: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError for weights that are no parameters, or that have hooks."""
    for name in names:
        p = module._parameters.get(name)
        if p is None:
            raise ValueError(
                f"{where}: {name} is parametrized or pruned, so it is no parameter that weights= "
                "can replace: undo that before, or leave weights out"
            )
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(
                f"{where}: {name} has hooks, which would be lost: register them after convert"
            )


def replace_parameter(changes: Changes, module: nn.Module, name: str, w: Tensor) -> None:
    """Give a parameter of a module another tensor, of the same shape and numbers.

    It stays the same object where torch can do that, so that an optimizer which has it steps it.
    Its gradient and the attributes that others have set stay, too.
    """
    old = module.get_parameter(name)
    grad, attributes = old.grad, _set_by_others(old)
    new = nn.Parameter(w, requires_grad=old.requires_grad)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # a weak reference to it, as hooks have, or a graph that ends in it
        setattr(module, name, new)
        changes.replaced.extend([weakref.ref(old)] if old.requires_grad else [])
    now = module.get_parameter(name)
    vars(now).update(attributes)
    if now.requires_grad:
        now.grad = grad


def freeze_parameter(
    changes: Changes, module: Any, name: str, weight: Any, request: Request, dtype: torch.dtype
) -> None:
    """Freeze a parameter, as ``KeepsFrozen.freeze`` does. What others have set on it stays."""
    old: nn.Parameter = module.get_parameter(name)
    attributes = _set_by_others(old)
    module.freeze(name, weight, request.recipe, dtype, weights=request.weights)
    vars(module.get_parameter(name)).update(attributes)
    if not isinstance(weight, Tensor):  # numbers that a checkpoint has
        return
    changes.replaced.extend([weakref.ref(old)] if old.requires_grad else [])
    if not weight.is_meta:
        squares = module.squared_error(name, weight)
        changes.squares[module] = squares + changes.squares.get(module, 0)


def _set_by_others(p: nn.Parameter) -> dict[str, Any]:
    """The attributes of a parameter besides those of its class."""
    names = vars(p).keys() - vars(p.detach()).keys() - {"_is_param"}
    return {name: vars(p)[name] for name in names}


def check_weights(where: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for weights [E, N, K], or of one expert [N, K], that kernels do not take."""
    for name, w in weights:
        local = local_part(w)
        if local.dtype not in ACTIVATIONS:
            raise ValueError(
                f"{where}: {name} must be bfloat16, float16 or float32, got "
                f"{dtype_name(local.dtype)}"
            )
        check_sizes(where, name, list(local.shape))


def check_sizes(where: str, name: str, shape: list[int]) -> None:
    """Raise ValueError for a weight [E, N, K] or [N, K] of sizes that the kernels do not take."""
    *groups, N, K = shape
    if N <= 0 or K <= 0 or N % FEATURE_MULTIPLE or K % FEATURE_MULTIPLE:
        raise ValueError(
            f"{where}: {name} is {shape}, and kernels take in_features and out_features that are "
            f"positive multiples of {FEATURE_MULTIPLE}"
        )
    if groups and not 1 <= groups[0] <= MAX_GROUPS:
        raise ValueError(f"{where}: {name} is {shape}, and kernels take 1 to {MAX_GROUPS} experts")
