"""Convert plain torch models: recognize their experts, check them and replace them.

R rows, E experts, H features of a token, F features inside an expert.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.integrations.check_swiglu import (
    check_swiglu,
    device_to_run_on,
    run_each,
    run_sorted,
)
from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name
from grouped_linear.nn.functional import check_whole, grouped_linear, is_dtensor
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.quantized.pickle_version import check_pickle_version
from grouped_linear.recipes import Recipe

Forward = Callable[..., Any]
Names = tuple[str, str, str]

# The parameters of an expert that computes ``down(silu(gate(x)) * up(x))``: gate, up, down.
SWIGLU: tuple[Names, ...] = (
    ("w1.weight", "w3.weight", "w2.weight"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)
# The parameters of a module that holds all experts in one tensor each, and its forward's arguments:
# torchtitan's names before and after https://github.com/pytorch/torchtitan/pull/3425.
GROUPED_SWIGLU: dict[Names, list[str]] = {
    ("w1", "w3", "w2"): ["x", "num_tokens_per_expert"],
    ("w1_EFD", "w3_EFD", "w2_EDF"): ["x_RD", "num_tokens_per_expert_E"],
}

# Options of the modules that replace lists. Their other options follow from the experts, or would
# change the form of parameters.
SWIGLU_OPTIONS = (
    "cache_weights",
    "fuse_wgrad_accumulation",
    "quantized_weight",
    "stochastic_rounding",
)
LINEAR_OPTIONS = (*SWIGLU_OPTIONS, "return_bias", "delay_wgrad_compute", "save_original_input")

PICKLE_VERSION = 1


class ConvertedExperts(NamedTuple):
    """One module that :func:`convert_experts` converted."""

    name: str
    """The module's name in ``named_modules`` of the model."""
    form: str
    """The form of its experts: ``"Linear"``, ``"SwiGLU"`` or ``"grouped SwiGLU"``."""
    num_experts: int


@torch.inference_mode(False)
def convert_experts(
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Forward] | None = None,
    recipe: Recipe | None = None,
    **options: bool,
) -> list[ConvertedExperts]:
    """Replace the experts of a model by grouped ones, in place.

    Two forms of experts are recognized:

    **Experts in one tensor**, as in torchtitan: a module whose only parameters are w1 and w3
    [E, F, H] and w2 [E, H, F], called as ``(x, num_tokens_per_expert)``; or w1_EFD, w3_EFD and
    w2_EDF, called as ``(x_RD, num_tokens_per_expert_E)``. Its forward becomes three grouped layers.
    Its parameters, their names and its callers stay the same. If a parameter becomes a DTensor, the
    forward uses its local part, as torchtitan does; experts may be sharded by expert or by feature.

    **A ModuleList of experts** in a block whose class is a key of ``forwards``. Experts that are
    torch.nn.Linear become one :class:`grouped_linear.GroupedLinear`. Experts that compute
    ``w2(silu(w1(x)) * w3(x))``, or have the names gate_proj, up_proj and down_proj, become one
    :class:`grouped_linear.GroupedMLP`. It replaces the list under the same name. The block's loop
    over its experts cannot be recognized, so ``forwards`` gives the block's new forward, a function
    of the block and its inputs. The parameters are new: create the optimizer after the conversion.
    Any other ModuleList is left alone.

    Names and shapes do not show what experts compute. So SwiGLU experts are run on random rows, in
    training mode, and must give SwiGLU's result: another activation, a clamp or dropout is an
    error. It is an error too if a list's experts have anything that would be lost: hooks (as of
    weight_norm or pruning), parametrizations, buffers, their own forward or a subclass of Linear,
    modules or parameters with a second owner. Attributes of parameters are not copied.

    Load a checkpoint before the conversion. Convert before sharding and before
    DistributedDataParallel. The parameters of lists take twice their memory until the conversion
    ends. If anything raises, the model is unchanged. Modules that are converted already are left
    alone. A converted model can be copied, and pickled if ``forwards`` can.

    A model may be on the meta device. The check then runs small random parameters in place of its
    own, on a GPU if there is one. After ``to_empty`` call ``reset_parameters()`` of the modules
    that replaced lists.

    Args:
        model: a model, or a module that is to be converted itself.
        forwards: for each class of block with a ModuleList of experts, its new forward.
        recipe: how the GEMMs are computed.
        options: for the modules that replace lists: ``cache_weights``, ``fuse_wgrad_accumulation``,
            ``quantized_weight`` and ``stochastic_rounding``; if all of them are GroupedLinear, also
            ``return_bias``, ``delay_wgrad_compute`` and ``save_original_input``.

    Returns:
        What was converted, in the order of ``named_modules``; never empty.

    Raises:
        ValueError: if no experts are recognized; if a class of ``forwards`` is not in the model or
            has no such ModuleList; if experts differ in form, compute something else or have
            something that would be lost; for unknown options, and for any option with experts in
            one tensor; for experts in one tensor on the meta device under a recipe with a state
            (``DelayedScaling``); if small parameters do not run; for sharded parameters, and for
            lists inside DistributedDataParallel.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.router = nn.Linear(16, 4)
    ...         self.experts = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))
    ...
    ...     def forward(self, x):
    ...         best = self.router(x).argmax(dim=-1)
    ...         return torch.stack([self.experts[e](row) for e, row in zip(best, x)])
    >>> def grouped_forward(self, x):
    ...     best, order = self.router(x).argmax(dim=-1).sort()
    ...     m_splits = (best[:, None] == torch.arange(4)).sum(dim=0)
    ...     return self.experts(x[order], m_splits)[order.argsort()]
    >>> block, x = Block(), torch.randn(10, 16)
    >>> y = block(x)
    >>> convert_experts(block, {Block: grouped_forward})
    [ConvertedExperts(name='', form='Linear', num_experts=4)]
    >>> torch.allclose(block(x), y, atol=1e-5)
    True
    """
    forwards = dict(forwards or {})
    found: dict[str, nn.Module] = {}
    replaced: dict[str, tuple[str, nn.Module]] = {}  # the name of a block's list, its replacement
    names_of: dict[str, Names] = {}  # the parameters of experts in one tensor
    converted = []
    devices = set(map(device_to_run_on, model.parameters()))
    gpus = {device.index for device in devices if device.type == "cuda"}
    with torch.random.fork_rng(gpus):  # random parameters and rows leave the generators unchanged
        for name, module in model.named_modules():
            where = f"convert_experts: {name or type(module).__name__}"
            if type(module) in forwards:
                list_name, experts = _list_of_experts(where, module)
                check_whole(f"{where}.{list_name}", experts.parameters(), "convert")
                lost = next(_lost(experts, (module, list_name), model), None)
                if lost is not None:
                    raise ValueError(f"{where}.{list_name}: {lost}, which would be lost")
                form, grouped = _grouped(f"{where}.{list_name}", experts, recipe, options)
                replaced[name] = list_name, grouped
                num_experts = len(experts)
            elif (weight_names := _grouped_swiglu_names(module)) is not None:
                if _is_converted(module):
                    continue
                if options:
                    raise ValueError(
                        f"{where}: experts in one tensor stay what they are, so there is nothing "
                        f"to give {' and '.join(options)} to"
                    )
                weights = [module.get_parameter(n) for n in weight_names]
                check_whole(where, weights, "convert")
                if recipe is not None and recipe.has_state and weights[0].is_meta:
                    raise ValueError(
                        f"{where}: the first scales of {type(recipe).__name__} would be lost on "
                        "the meta device: convert when parameters have values"
                    )
                form, num_experts = "grouped SwiGLU", len(weights[0])
                check_swiglu(where, module, run_sorted(module, weight_names), *weights)
                names_of[name] = weight_names
            else:
                continue
            if "forward" in vars(module):
                raise ValueError(f"{where} has a forward of its own, which would hide the new one")
            found[name] = module
            converted.append(ConvertedExperts(name, form, num_experts))
    _check_found(model, forwards, found.values(), bool(replaced))

    # Nothing has changed the model yet, and nothing below raises.
    for name, module in found.items():
        before: Any = type(module)
        if name in replaced:
            setattr(module, *replaced[name])
            module.__class__ = _converted_class(before, forwards[before])
            continue
        if recipe is not None and recipe.has_state:
            w1 = module.get_parameter(names_of[name][0])
            states = (recipe.new_state(len(w1), w1.device) for _ in names_of[name])
            module.scaling_states = nn.ModuleList(state for state in states if state is not None)
        module.__class__ = _converted_class(before, _GroupedSwiGLU(names_of[name], recipe))
    return converted


def _check_found(
    model: nn.Module,
    forwards: Collection[type[nn.Module]],
    found: Collection[nn.Module],
    replaces_lists: bool,
) -> None:
    """Raise ValueError if too little was found, or if DistributedDataParallel has the lists."""
    absent = set(forwards).difference(map(type, found))
    if absent:
        names = " or ".join(sorted(block.__name__ for block in absent))
        raise ValueError(f"convert_experts: {type(model).__name__} has no module of class {names}")
    if not found and any(map(_is_converted, model.modules())):
        raise ValueError(
            f"convert_experts: experts of {type(model).__name__} are converted already"
        )
    if not found:
        raise ValueError(
            f"convert_experts: {type(model).__name__} has no module with parameters w1, w2 and w3 "
            "[E, ...] that is called as (x, num_tokens_per_expert), and no class is in forwards"
        )
    if replaces_lists and any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        raise ValueError(
            "convert_experts: DistributedDataParallel holds the parameters of lists, which are "
            "replaced: convert before it is made"
        )


def _grouped_swiglu_names(module: nn.Module) -> Names | None:
    parameters = dict(module.named_parameters())
    names = next((names for names in GROUPED_SWIGLU if set(names) == set(parameters)), None)
    if names is None or any(p.dim() != 3 for p in parameters.values()):
        return None
    E, F, H = parameters[names[0]].shape
    shapes = [tuple(parameters[name].shape) for name in names]
    called_with = list(inspect.signature(module.forward).parameters)
    right_shapes = shapes == [(E, F, H), (E, F, H), (E, H, F)]
    return names if right_shapes and called_with == GROUPED_SWIGLU[names] else None


@dataclass(frozen=True)
class _GroupedSwiGLU:
    """The forward of experts in one tensor, as data: a local function cannot be pickled."""

    names: Names
    recipe: Recipe | None

    def forward(self) -> Forward:
        names, recipe = self.names, self.recipe

        def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            m_splits_E = num_tokens_per_expert.to(torch.int32)  # some routers count in float
            states = getattr(self, "scaling_states", (None, None, None))

            def layer(x: Tensor, i: int) -> Tensor:
                weight, state = getattr(self, names[i]), states[i]
                if is_dtensor(weight):
                    weight = weight.to_local()
                held = None if state is None else len(state.quantizer_states().weight.scale)
                if held is not None and len(weight) != held:
                    raise ValueError(
                        f"{type(self).__name__}: {type(recipe).__name__} holds scales of "
                        f"{held} experts, {len(weight)} are on this process: "
                        "shard in another way or take another recipe"
                    )
                if recipe is None or not recipe.reads_any_weight_dtype:
                    weight = weight.to(x.dtype)
                return grouped_linear(x, weight, m_splits_E, None, recipe, state)

            return layer(silu(layer(x, 0)) * layer(x, 1), 2).to(x.dtype)

        def forward_RD(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            return forward(self, x_RD, num_tokens_per_expert_E)

        return forward if GROUPED_SWIGLU[names][0] == "x" else forward_RD


def _is_converted(module: nn.Module) -> bool:
    return hasattr(type(module), "_converted_from")


@lru_cache  # all layers of a class, copies and loaded ones too, share it and compile once
def _converted_class(before: type[nn.Module], new: Forward | _GroupedSwiGLU) -> type[nn.Module]:
    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        whole: tuple[Any, ...] = super(converted, self).__reduce_ex__(protocol)
        if type(self) is not converted:  # a subclass, such as FSDP2 makes
            return whole
        # An import cannot find a class that is made here, so loading a pickle makes it again.
        made_of = {"version": PICKLE_VERSION, "class": before, "forward": new}
        return _new_converted, (made_of,), *whole[2:]

    body = {
        "forward": new.forward() if isinstance(new, _GroupedSwiGLU) else new,
        "__module__": before.__module__,
        "__reduce_ex__": reduce_ex,
        "_converted_from": before,
    }
    converted: type[nn.Module] = type(f"Grouped{before.__name__}", (before,), body)
    return converted


def _new_converted(made_of: dict[str, Any]) -> nn.Module:
    """An empty module for a copy or a pickle, which then sets its attributes."""
    check_pickle_version("convert_experts", made_of["version"], PICKLE_VERSION)
    converted = _converted_class(made_of["class"], made_of["forward"])
    return converted.__new__(converted)


def _list_of_experts(where: str, block: nn.Module) -> tuple[str, nn.ModuleList]:
    """The one ModuleList of experts in a block, and its name."""
    lists = {
        name: child
        for name, child in block.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(map(_is_expert, child))
    }
    if len(lists) != 1:
        held = [
            f"{name} of {', '.join(sorted({type(expert).__name__ for expert in child}))}"
            for name, child in block.named_children()
            if isinstance(child, nn.ModuleList)
        ]
        raise ValueError(
            f"{where} must hold one ModuleList of torch.nn.Linear or of SwiGLU experts without "
            f"biases, it has {' and '.join(held) or 'none'}"
        )
    [found] = lists.items()
    return found


def _is_expert(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _swiglu_names(module) is not None


def _swiglu_names(expert: nn.Module) -> Names | None:
    """The names of gate, up and down, if an expert has these parameters and no others."""
    parameters = {name for name, _ in expert.named_parameters()}
    return next((names for names in SWIGLU if set(names) == parameters), None)


def _lost(experts: nn.ModuleList, place: tuple[nn.Module, str], model: nn.Module) -> Iterator[str]:
    """What a replacement of the experts would lose: it copies their parameters and nothing else."""
    for name, module in experts.named_modules():
        for attribute, value in vars(module).items():
            if attribute.endswith("_hooks") and value:
                yield f"{name} has {attribute}"
        if "forward" in vars(module):
            yield f"{name} has a forward of its own"
        for buffer, _ in module.named_buffers(recurse=False):
            yield f"{name} has the buffer {buffer}"
    inside = {module: name for name, module in experts.named_modules()}
    others = [module for module in model.modules() if module not in inside]
    for owner in others:
        for attribute, child in owner._modules.items():
            if child is None or child not in inside or (owner, attribute) == place:
                continue
            if next(child.parameters(), None) is not None:
                yield f"{inside[child] or 'the list'} has a second owner"
    owned = {id(p) for module in others for p in module.parameters(recurse=False)}
    for name, p in experts.named_parameters(remove_duplicate=False):
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            yield f"{name} has hooks"
        if id(p) in owned:
            yield f"{name} has a second owner"
        owned.add(id(p))


def _grouped(
    where: str, experts: nn.ModuleList, recipe: Recipe | None, options: dict[str, bool]
) -> tuple[str, nn.Module]:
    """The form of a list of experts, and one grouped module with their parameters."""
    parameters = [dict(expert.named_parameters()) for expert in experts]
    forms = {tuple((name, p.shape, p.dtype) for name, p in one.items()) for one in parameters}
    if len(forms) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' names, shapes or dtypes")
    if len({tuple(p.requires_grad for p in one.values()) for one in parameters}) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' requires_grad")
    for name, p in parameters[0].items():
        if p.dtype not in ACTIVATIONS:
            raise ValueError(
                f"{where}: {name} must be bfloat16, float16 or float32, got {dtype_name(p.dtype)}"
            )

    def stacked(name: str) -> Tensor:
        return torch.stack([one[name].detach() for one in parameters])

    names = _swiglu_names(experts[0])
    known = LINEAR_OPTIONS if names is None else SWIGLU_OPTIONS
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"{where}: options may be {', '.join(known)}, got {' and '.join(unknown)}")
    first = next(iter(parameters[0].values()))
    like: dict[str, Any] = {"recipe": recipe, "dtype": first.dtype, "device": first.device}
    like |= options
    grouped: nn.Module
    if names is None:
        E, (N, K) = len(experts), first.shape
        grouped = GroupedLinear(E, K, N, bias="bias" in parameters[0], **like)
        values = {name: stacked(name) for name in parameters[0]}
        trained = {name: p.requires_grad for name, p in parameters[0].items()}
    else:
        gate, up, down = map(stacked, names)
        of_gate, of_up, of_down = (parameters[0][name].requires_grad for name in names)
        if of_gate != of_up:
            raise ValueError(
                f"{where}: {names[0]} and {names[1]} become one parameter: let both require grad, "
                "or neither"
            )
        if not gate.shape == up.shape == down.mT.shape:
            shapes = ", ".join(f"{name} {list(parameters[0][name].shape)}" for name in names)
            raise ValueError(f"{where}: experts are not SwiGLU by their shapes: {shapes}")
        trained = {"gate_up_proj": of_gate, "down_proj": of_down}
        check_swiglu(where, experts, run_each(experts, names), gate, up, down)
        grouped = GroupedMLP(len(experts), gate.size(2), gate.size(1), **like)
        values = {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}
    with torch.no_grad():
        for name, value in values.items():
            grouped.get_parameter(name).copy_(value).requires_grad_(trained[name])
    grouped.train(experts.training)
    return "Linear" if names is None else "SwiGLU", grouped
