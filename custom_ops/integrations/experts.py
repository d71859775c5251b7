# SPDX-License-Identifier: Apache-2.0
"""Experts of any library: the one place that recognizes them. Whoever meets a module asks here.

Three adapters answer: this package's layers, experts that go through transformers' interface, and
torchtitan's. convert, compare, watch, the batch check, routing replay and PEFT's adapters use them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from grouped_linear.integrations.converted_class import class_before, convert_class
from grouped_linear.integrations.grouped_experts import form_of, grouped_members
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.quantized.weight import local_part
from grouped_linear.recipes import Recipe


@dataclass(frozen=True)
class Experts:
    """A module with experts, and how they are computed."""

    module: Any
    library: Literal["grouped_linear", "transformers", "torchtitan"]
    form: str  # how it holds them, for ConvertedExperts.form
    weights: tuple[str, ...]  # the names of its weights [E, N, K], in the order of their GEMMs
    num_experts: int  # on this process; of torchtitan's and another dispatcher's of the shard
    input: str  # the name of the tokens or rows among the arguments of its forward
    computed_here: bool  # whether this package computes them: a layer, or converted experts
    recipe: Recipe | None
    compute_by: Callable[[Recipe | None], None]  # of a copy in high precision: by another recipe


def experts_of(module: nn.Module) -> Experts | None:
    """The experts that a module holds itself; None if it holds none."""
    for adapter in (_layer, _of_transformers, _of_torchtitan):
        experts = adapter(module)
        if experts is not None:
            return experts
    return None


def goes_through_interface(module: nn.Module) -> bool:
    """Whether a module is experts of transformers' interface, which adds the attribute.

    A wrapper that answers for the module inside of it, as PEFT's ModulesToSaveWrapper, is none.
    """
    return {"is_concatenated", "config"} <= vars(module).keys()


def _layer(module: Any) -> Experts | None:
    if not isinstance(module, GroupedLinear | GroupedMLP):
        return None
    weights: tuple[str, ...] = ("weight",)
    E = module.num_experts
    if isinstance(module, GroupedMLP):
        weights = "gate_up_proj", "down_proj"
        if isinstance(module.dispatcher, TokenDispatcher) and module.dispatcher.ranks:
            E //= len(module.dispatcher.ranks)  # FSDP2 may shard the part of a process, too
        elif module.dispatcher is not None:
            E = local_part(module.down_proj).size(0)

    def compute_by(recipe: Recipe | None) -> None:
        vars(module).update(weights=None, fuse_wgrad_accumulation=False, _recipe=recipe)

    form = type(module).__name__
    return Experts(module, "grouped_linear", form, weights, E, "x", True, module.recipe, compute_by)


def _of_transformers(module: Any) -> Experts | None:
    """Experts that go through transformers' interface, which is imported for them alone."""
    if not goes_through_interface(module):
        return None
    from grouped_linear.integrations.experts_forward import recipe_of, set_own_recipe, weight_names
    from grouped_linear.integrations.implementation import Implementation

    ours = Implementation.of(module.config._experts_implementation)
    default = None if ours is None else ours.recipe

    def compute_by(recipe: Recipe | None) -> None:
        set_own_recipe(module, recipe, default)

    form, weights, E = class_before(module).__name__, weight_names(module), module.num_experts
    given = form, weights, E, "hidden_states", ours is not None, recipe_of(module, default)
    return Experts(module, "transformers", *given, compute_by)


def _of_torchtitan(module: nn.Module) -> Experts | None:
    """Experts that one module holds in tensors [E, ...]."""
    members, *made_of = getattr(type(module), "_converted_with", (None,))
    converted = members is grouped_members
    form, recipe = made_of[:2] if converted else (form_of(module), None)
    if form is None:
        return None
    E = local_part(getattr(module, form.weights[0])).size(0)
    given = form.name, form.weights, E, form.inputs[0], converted, recipe
    compute_by = partial(convert_class, module, grouped_members, form)
    return Experts(module, "torchtitan", *given, compute_by)
