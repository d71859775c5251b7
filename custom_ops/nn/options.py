"""Checks of constructor arguments that both layers share."""

from numbers import Integral
from typing import Any

import torch

from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, MAX_GROUPS
from grouped_linear.recipes import DelayedScalingState, Recipe
from grouped_linear.recipes.format import check_flags as check_flags
from grouped_linear.recipes.format import shown


def check_options(
    layer: str, recipe: Any, cache_weights: Any, fuse_wgrad_accumulation: Any, dtype: Any
) -> None:
    """Check options that both layers have, each alone."""
    check_flags(layer, cache_weights=cache_weights, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
    check_parameters_dtype(layer, "dtype", dtype)
    check_recipe(layer, recipe)


def check_num_groups(layer: str, name: str, number: int) -> None:
    """Raise ValueError unless it is an integer from 1 to 1024."""
    _check_integer(layer, name, number)
    if not 1 <= number <= MAX_GROUPS:
        raise ValueError(f"{layer}: {name} must be between 1 and {MAX_GROUPS}, got {number}")


def check_features(layer: str, name: str, size: int) -> None:
    """Raise ValueError unless it is a positive multiple of 16."""
    _check_integer(layer, name, size)
    if size <= 0 or size % FEATURE_MULTIPLE:
        raise ValueError(
            f"{layer}: {name} must be a positive multiple of {FEATURE_MULTIPLE}, got {size}"
        )


def _check_integer(layer: str, name: str, number: Any) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"{layer}: {name} must be an integer, got {number!r}")


def check_parameters_dtype(layer: str, name: str, dtype: Any) -> None:
    """Raise ValueError for a parameter dtype that no GEMM takes."""
    given = torch.get_default_dtype() if dtype is None else dtype
    if given not in ACTIVATIONS:
        default = ", torch's default dtype" if dtype is None else ""
        raise ValueError(
            f"{layer}: {name} must be bfloat16, float16 or float32, got {shown(given)}{default}"
        )


def check_recipe(layer: str, recipe: Recipe | None) -> None:
    """Raise ValueError unless it is None or an instance of Recipe."""
    if recipe is None or isinstance(recipe, Recipe):
        return
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        name = recipe.__name__
        raise ValueError(f"{layer}: recipe is the class {name}: call it, recipe={name}()")
    raise ValueError(f"{layer}: recipe must be None or a grouped_linear.Recipe, got {recipe!r}")


def check_state(op: str, *states: Any) -> None:
    """Raise ValueError unless each is None or a DelayedScalingState."""
    for state in states:
        if state is not None and not isinstance(state, DelayedScalingState):
            raise ValueError(
                f"{op}: state must be a grouped_linear.recipes.DelayedScalingState, got {state!r}"
            )
