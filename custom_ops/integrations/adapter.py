# SPDX-License-Identifier: Apache-2.0
"""The adapters of other libraries' experts share this: the request, converted classes, weights.

The plan of an adapter checks a module, raises, and returns the function that writes. ``convert``
collects all plans and then runs them, so a model is converted as a whole or not at all, unless
memory runs out.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from grouped_linear.nn.checks import (
    check_features,
    check_mx_blocks,
    check_num_groups,
    check_parameters_dtype,
)
from grouped_linear.quantized.frozen import KeepsFrozen
from grouped_linear.quantized.keep import KEPT, SCALE, Weights, keep_weight
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe

Write = Callable[["Changes"], None]


@dataclass(frozen=True)
class Experts:
    """A module with experts: its weights by name, who computes them, and by which recipe."""

    module: Any
    library: Literal["grouped_linear", "transformers", "torchtitan"]
    form: str  # how it holds them, for ConvertedExperts.form
    weights: tuple[str, ...]  # the names of its weights [E, N, K], in the order of their GEMMs
    num_experts: int  # on this process; of torchtitan's and another dispatcher's of the shard
    input: str  # the name of the tokens or rows among the arguments of its forward
    computed_here: bool  # whether this package computes them: a layer, or converted experts
    recipe: Recipe | None
    compute_by: Callable[[Recipe | None], None]  # of a copy in high precision: by another recipe
    plan: "Callable[[str, Request], Write] | None" = None  # of convert; the name in the model


@dataclass(frozen=True)
class Request:
    """The arguments of a conversion, after their checks."""

    model: nn.Module
    recipe: Recipe | None
    weights: Weights
    save_gate_up_in_fp8: bool
    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)
    """Other recipes, by patterns of the modules' names."""
    before_loading: bool = False
    """Whether weights have no numbers yet, which a file then brings in few bits."""

    def of(self, name: str) -> "Request":
        """The request for one module: where a pattern has no recipe, its weights stay plain."""
        recipe, weights = self.recipe, self.weights
        for pattern, other in self.recipes.items():
            if fnmatchcase(name, pattern):
                recipe, weights = other, None if other is None else self.weights
        return replace(self, recipe=recipe, weights=weights, recipes={})


# --- the class of a converted module -------------------------------------------------------------


class Converted(KeepsFrozen):
    """A module of another library that is computed here; the first base of its new class."""

    recipe: Recipe | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles name the two classes, of which loading makes the new one again."""
        whole: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        made_of = vars(type(self)).get("_made_of")
        if made_of is None:  # a subclass, such as FSDP2 makes
            return whole
        return _new_converted, made_of, *whole[2:]


def class_before(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one that it had before it was converted."""
    before: type[nn.Module] = getattr(type(module), "_made_of", (type(module),))[0]
    return before


def convert_class(module: Any, kind: type[Converted]) -> None:
    """Give a module a subclass of its class with the members of ``kind``, unless it has one."""
    if not isinstance(module, Converted):
        made_of: Any = type(module), kind
        module.__class__ = _converted_class(*made_of)


@lru_cache  # all layers of a class, copies and loaded ones too, share it and compile once
def _converted_class(before: type[nn.Module], kind: type[Converted]) -> type[nn.Module]:
    body = {"__module__": before.__module__, "_made_of": (before, kind)}
    return type(f"Grouped{before.__name__}", (kind, before), body)


def _new_converted(*made_of: Any) -> nn.Module:
    """An empty module for a copy or a pickle, which then sets its attributes."""
    converted = _converted_class(*made_of)
    return converted.__new__(converted)


# --- checks of weights ---------------------------------------------------------------------------


def check_weight(where: str, name: str, local: Any) -> None:
    """Raise ValueError for a weight in high precision whose numbers kernels do not read."""
    if type(local).__torch_dispatch__ != Tensor.__torch_dispatch__ and not isinstance(
        local, (*KEPT, FakeTensor)
    ):
        raise ValueError(
            f"{where}: {name} is a {type(local).__module__}.{type(local).__name__}, whose numbers "
            "no kernel here reads: convert the model before its experts are quantized, and choose "
            "weights= for few bits"
        )
    check_parameters_dtype(where, name, local.dtype)


def check_sizes(where: str, name: str, shape: Iterable[int], request: Request) -> None:
    """Raise ValueError for a weight [E, N, K] of sizes that kernels, or MXFP4, do not take."""
    E, N, K = shape
    check_num_groups(where, f"experts of {name}", E)
    check_features(where, **{f"out_features of {name}": N, f"in_features of {name}": K})
    check_mx_blocks(where, request.recipe, request.weights, **{f"in_features of {name}": K})


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


def check_registration() -> None:
    """Raise ValueError where a new parameter loses its memory, as in ``init_empty_weights``."""
    probe = nn.Module()
    probe.register_parameter("p", nn.Parameter(torch.zeros(1, device="cpu")))
    if probe.get_parameter("p").is_meta:
        raise ValueError(
            "convert: new parameters go to the meta device here, as inside of accelerate's "
            "init_empty_weights, and weights would be lost: call convert outside of it"
        )


# --- weights are exchanged -----------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """The changes that a conversion made to parameters."""

    replaced: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    """Learning parameters that new ones replaced. Whoever still holds one holds the old one."""
    squares: dict[nn.Module, Tensor] = field(default_factory=dict)
    """Of weights that were quantized: see :meth:`KeepsFrozen.squared_error`."""
    first: Any = field(default_factory=WeakTensorKeyDictionary)
    """By a replaced parameter the module and name that had it first: other modules may have it."""

    def warn_of_holders(self) -> None:
        """Warn of replaced parameters that something still holds, as an optimizer does."""
        if any(one() is not None for one in self.replaced):
            gc.collect()  # modules and their hooks hold each other
        held = sum(one() is not None for one in self.replaced)
        if held:
            warnings.warn(
                f"convert: {held} parameters were replaced and something still holds the old ones, "
                "as an earlier optimizer or DistributedDataParallel does: make it again, or it "
                "steps the old ones and keeps their memory",
                stacklevel=5,  # convert, its part and that one's decorator
            )


@torch.no_grad()
def keep_both(changes: Changes, module: Any, name: str, recipe: Any) -> None:
    """Keep a weight in high precision and FP8, unless it is kept so.

    It stays the same object where torch can do that, so that an optimizer which has it steps it.
    Its gradient and the attributes that others have set stay, too.
    """
    old: Any = module.get_parameter(name)
    recipe = recipe.transposed if module.is_transposed else recipe
    if isinstance(old, GroupedTensorWithMaster) and old.recipe.weight == recipe.weight:
        return
    if old in changes.first:  # tied weights stay tied
        other, of_other = changes.first[old]
        setattr(module, name, other.get_parameter(of_other))
        return
    grad, attributes = old.grad, _set_by_others(old)
    new = nn.Parameter(keep_weight(old.detach(), "both", recipe), requires_grad=old.requires_grad)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # a weak reference to it, as hooks have, or a graph that ends in it
        setattr(module, name, new)
        changes.first[old] = module, name
        changes.replaced.extend([weakref.ref(old)] if old.requires_grad else [])
    now = module.get_parameter(name)
    vars(now).update(attributes)
    if now.requires_grad:
        now.grad = grad


@torch.no_grad()
def freeze(
    changes: Changes,
    module: Any,
    name: str,
    request: Request,
    loaded: tuple[Any, torch.dtype] | None = None,
) -> None:
    """Freeze a parameter, or what a checkpoint has of it and the dtype that this stands for.

    It keeps attributes that others set.
    """
    old = module.get_parameter(name)
    other, of_other = changes.first.setdefault(old, (module, name))
    w = old.mT if module.is_transposed else old
    weight, dtype = loaded or (w, w.dtype)
    if other is module:
        attributes = _set_by_others(old)
        module.freeze(name, weight, request.recipe, dtype, weights=request.weights)
        vars(module.get_parameter(name)).update(attributes)
        changes.replaced.extend([weakref.ref(old)] if old.requires_grad and not loaded else [])
    else:  # tied weights stay tied
        module._frozen = {**module._frozen, name: other._frozen[of_other]}
        for part in ("", SCALE):
            module.register_parameter(name + part, other.get_parameter(of_other + part))
    if not loaded and not w.is_meta:
        squares = module.squared_error(name, w)
        changes.squares[module] = squares + changes.squares.get(module, 0)


def _set_by_others(p: nn.Parameter) -> dict[str, Any]:
    """The attributes of a parameter besides those of its class."""
    own = {*vars(p.detach()), "_is_param"}
    return {name: value for name, value in vars(p).items() if name not in own}
