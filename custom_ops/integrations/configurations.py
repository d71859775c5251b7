# SPDX-License-Identifier: Apache-2.0
"""Configurations of transformers' models, which say how experts are computed: one for each model.

transformers reads the choice from ``config._experts_implementation`` in every forward, and models
that were made of one configuration share the object. So a conversion gives its model copies and
writes into these.
"""

import copy
import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from grouped_linear.integrations.experts import goes_through_interface


def modules_around(model: nn.Module, experts: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules outside of a model that hold experts of it, at any depth, the smallest first.

    A module does not know who holds it, and the garbage collector knows all modules.
    """
    holders: dict[int, list[nn.Module]] = {}
    for m in gc.get_objects():
        if issubclass(type(m), nn.Module):
            for held in vars(m).get("_modules", {}).values():  # a failed __init__ leaves none
                holders.setdefault(id(held), []).append(m)
    found: dict[nn.Module, None] = {}
    left, inside = [*experts], {*model.modules()}
    while left:
        for holder in holders.get(id(left.pop()), ()):
            if holder not in found:
                found[holder] = None
                left.append(holder)
    return sorted((m for m in found if m not in inside), key=lambda m: len([*m.modules()]))


def separate_configs(
    model: nn.Module, around: Iterable[nn.Module], experts: Collection[nn.Module]
) -> None:
    """Give a model copies of its configurations: others that share them keep the objects.

    The modules around it get the same copies, so that those of transformers' models still contain
    that of a language model, and ``set_experts_implementation`` and ``save_pretrained`` of the
    whole reach all of it. If experts outside of the model share a configuration with those inside,
    the model gets further copies.
    """
    inside = {*model.modules()}
    whole = dict.fromkeys(model.modules())
    for outer in around:
        whole |= dict.fromkeys(outer.modules() if isinstance(outer, PreTrainedModel) else [outer])
    _copy_configs(whole)
    others = {id(c) for m in whole if m not in inside for c in _read_by_experts(m).values()}
    if any(id(config) in others for m in experts for config in _read_by_experts(m).values()):
        _copy_configs(inside)


def _copy_configs(modules: Iterable[nn.Module]) -> None:
    """Give modules copies that refer to each other as the originals do, all or none."""
    memo: dict[int, Any] = {}
    copies = [(m, name, copy.deepcopy(config, memo)) for m in modules for name, config in _held(m)]
    for module, name, copied in copies:
        vars(module)[name] = copied


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configurations that a module holds, by its attributes' names."""
    found = {n: held for n, held in vars(module).items() if isinstance(held, PreTrainedConfig)}
    yield from (found | _read_by_experts(module)).items()


def _read_by_experts(module: Any) -> dict[str, Any]:
    """The configuration of any class that says how experts are computed."""
    return {"config": module.config} if goes_through_interface(module) else {}
