# SPDX-License-Identifier: Apache-2.0
"""Experts of any library: the one place that recognizes them. Whoever meets a module asks here.

Three adapters answer: this package's layers, experts that go through transformers' interface, and
torchtitan's.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from grouped_linear.integrations import torchtitan
from grouped_linear.integrations.adapter import Experts as Experts
from grouped_linear.integrations.wrappers import named_unwrapped
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.quantized.keep import local_part
from grouped_linear.recipes import Recipe


def named_experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """The experts in a model, as ``named_modules`` has modules: for a tool that looks at them.

    Names are those of the model without wrappers, as torch.compile's and PEFT's.

    >>> from grouped_linear import GroupedMLP
    >>> for name, experts in named_experts(nn.ModuleDict({"moe": GroupedMLP(4, 16, 32)})):
    ...     print(name, experts.form, experts.weights, experts.recipe)
    moe GroupedMLP ('gate_up_proj', 'down_proj') None
    """
    for name, module in named_unwrapped(model):
        experts = experts_of(module)
        if experts is not None:
            yield name, experts


def experts_of(module: nn.Module) -> Experts | None:
    """The experts that a module holds itself; None if it holds none."""
    if isinstance(module, GroupedLinear | GroupedMLP):
        return _layer(module)
    if goes_through_interface(module):  # transformers is imported for such experts alone
        from grouped_linear.integrations import transformers

        return transformers.experts_in(module)
    return torchtitan.experts_in(module)


def goes_through_interface(module: nn.Module) -> bool:
    """Whether a module is experts of transformers' interface, which adds the attribute.

    A wrapper that answers for the module inside it, as PEFT's ModulesToSaveWrapper, does not count.
    """
    return {"is_concatenated", "config"} <= vars(module).keys()


def _layer(module: Any) -> Experts:
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
