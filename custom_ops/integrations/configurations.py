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


def models_around(module: nn.Module) -> list[PreTrainedModel]:
    """transformers' models that this module is a part of, the innermost first.

    A module does not know who holds it, and the garbage collector does: a module holds others in a
    dict.
    """
    if not any(isinstance(holder, dict) for holder in gc.get_referrers(module)):
        return []
    models = [m for m in gc.get_objects() if issubclass(type(m), PreTrainedModel)]
    around = [m for m in models if m is not module and module in {*m.modules()}]
    return sorted(around, key=lambda m: len([*m.modules()]))


def separate_configs(
    model: nn.Module, around: Iterable[nn.Module], experts: Collection[nn.Module]
) -> None:
    """Give a model copies of its configurations: others that share them keep the objects.

    The models around it get the same copies, so that theirs still contain that of a language model,
    and ``set_experts_implementation`` and ``save_pretrained`` of the whole reach all of it. If
    experts outside of the model share a configuration with those inside, the model gets further
    copies.
    """
    inside = {*model.modules()}
    whole = dict.fromkeys(m for outer in (*around, model) for m in outer.modules())
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
