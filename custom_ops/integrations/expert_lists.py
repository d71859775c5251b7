"""Experts that are modules of a ModuleList: find them, and replace a list by one grouped module.

R rows, E experts, H features of a token, F features inside an expert.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.integrations.check_swiglu import Expert, check_swiglu
from grouped_linear.integrations.converted_class import (
    Forward,
    check_forward_can_change,
    class_before,
    convert_class,
    forward_alone,
    is_converted,
)
from grouped_linear.integrations.plan import (
    WEIGHT_OPTIONS,
    Plan,
    Replaced,
    Request,
    check_weights,
    how_weights_are_kept,
    replaced_by_others,
)
from grouped_linear.nn.functional import check_whole
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.nn.options import check_num_groups
from grouped_linear.quantized.weight import quantized_as

Names = tuple[str, str, str]

# The parameters of an expert that computes ``down(silu(gate(x)) * up(x))``: gate, up, down.
SWIGLU: tuple[Names, ...] = (
    ("w1.weight", "w3.weight", "w2.weight"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)

KNOWN_EXPERTS = (
    "torch.nn.Linear, or of SwiGLU experts without biases whose layers gate, up, down are called "
    + " or ".join(", ".join(n.removesuffix(".weight") for n in names) for names in SWIGLU)
)

# Options of the modules that replace lists. Their other options follow from the experts.
LINEAR_OPTIONS = ("cache_weights", "fuse_wgrad_accumulation", *WEIGHT_OPTIONS)
MLP_OPTIONS = (*LINEAR_OPTIONS, "save_gate_up_in_fp8")


def swiglu_names(expert: nn.Module) -> Names | None:
    """The names of gate, up and down, if an expert has these parameters and no others."""
    parameters = {name for name, _ in expert.named_parameters()}
    return next((names for names in SWIGLU if set(names) == parameters), None)


def is_expert(module: nn.Module) -> bool:
    """Whether a module is a Linear or has the parameters of a SwiGLU expert."""
    return type(module) is nn.Linear or swiglu_names(module) is not None


def lists_of_experts(block: nn.Module) -> dict[str, nn.ModuleList]:
    """The ModuleLists of experts in a block, by name."""
    return {
        name: child
        for name, child in block.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(map(is_expert, child))
    }


def find_lists(plan: Plan, request: Request, model: nn.Module) -> None:
    """Plan the replacement of the lists in blocks whose classes are keys of ``forwards``."""
    unused = set(request.forwards)
    for name, block in model.named_modules():
        where = request.where(name, block)
        cls = None if is_converted(block) else _key_of(where, block, request.forwards)
        if cls is not None:
            unused.discard(cls)
            _plan_list(plan, request.of(name), model, name, block, request.forwards[cls])
    if not unused:
        return
    converted = [class_before(module) for module in model.modules() if is_converted(module)]
    of_converted = [cls for cls in unused if any(issubclass(one, cls) for one in converted)]
    if of_converted:
        raise ValueError(f"{request.op}: experts of {_names(of_converted)} are converted already")
    raise ValueError(
        f"{request.op}: {type(model).__name__} has no module of class {_names(unused)}"
    )


def _names(classes: Iterable[type]) -> str:
    return " or ".join(sorted(cls.__name__ for cls in classes))


def _key_of(
    where: str, module: nn.Module, forwards: Mapping[type[nn.Module], Forward]
) -> type[nn.Module] | None:
    """The class in ``forwards`` that the module is of, if its forward is that of this class."""
    cls = type(module)
    block = next((base for base in cls.__mro__ if base in forwards), None)
    if block is None or block is cls:
        return block
    if not lists_of_experts(module):
        return None
    if getattr(cls, "forward", None) is not getattr(block, "forward", None):
        raise ValueError(
            f"{where}: {cls.__name__} is a {block.__name__} with a forward of its own: give "
            f"forwards one for {cls.__name__}, too"
        )
    return block


def _plan_list(
    plan: Plan, request: Request, model: nn.Module, name: str, block: nn.Module, forward: Forward
) -> None:
    where = request.where(name, block)
    list_name, experts = _list_of_experts(where, block)
    place = f"{where}.{list_name}"
    check_whole(place, experts.parameters(), "convert")
    lost = next(_what_would_be_lost(experts, (block, list_name), model), None)
    if lost is not None:
        raise ValueError(f"{place}: {lost}, which would be lost")
    if any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        raise ValueError(
            f"{place}: DistributedDataParallel holds the parameters of lists, which are replaced: "
            "convert before it is made"
        )
    grouped = _empty_grouped_module(place, experts, request)
    check_forward_can_change(where, block)
    form = "Linear" if isinstance(grouped, GroupedLinear) else "SwiGLU"
    path = type(grouped).__name__ + how_weights_are_kept(request.weights)
    plan.add(name, form, len(experts), experts.parameters(), path)
    plan.write(_replace_list, block, list_name, grouped, forward)


def _replace_list(block: Any, list_name: str, grouped: nn.Module, forward: Forward) -> Replaced:
    experts = block.get_submodule(list_name)
    _fill(grouped, experts)
    setattr(block, list_name, grouped)
    convert_class(block, forward_alone, forward)
    return replaced_by_others(experts.parameters())


def _list_of_experts(where: str, block: nn.Module) -> tuple[str, nn.ModuleList]:
    """The one ModuleList of experts in a block, and its name."""
    lists = lists_of_experts(block)
    if len(lists) == 1:
        [found] = lists.items()
        return found
    if lists:
        raise ValueError(
            f"{where} must hold one ModuleList of experts, it has {' and '.join(lists)}"
        )
    others = {n: m for n, m in block.named_children() if isinstance(m, nn.ModuleList) and len(m)}
    held = [f"{name} of {what_they_are([*others[name]])}" for name in others]
    hint = next(filter(None, (what_takes_them([*held]) for held in others.values())), "")
    raise ValueError(
        f"{where} must hold one ModuleList of {KNOWN_EXPERTS}; it has "
        f"{' and '.join(held) or 'no ModuleList'}{hint}"
    )


def what_they_are(experts: Sequence[nn.Module]) -> str:
    """The classes of a list's members and, where they are of one class, their parameters."""
    classes = sorted({type(expert).__name__ for expert in experts})
    if len(classes) > 1 or type(experts[0]) is nn.Linear:
        return ", ".join(classes)
    names = [name for name, _ in experts[0].named_parameters()]
    return f"{classes[0]} with {', '.join(names)}" if names else classes[0]


def what_takes_them(experts: Sequence[nn.Module]) -> str:
    """What experts with biases or without a gate are computed by, to be written by hand."""
    parameters = dict(experts[0].named_parameters())
    biases = [name for name in parameters if name.endswith("bias")]
    matrices = [p for p in parameters.values() if p.dim() == 2]
    if len(matrices) == 3 and biases:
        return ": GroupedMLP(bias=True) takes experts with biases, in a block of your own"
    if len(matrices) == 2:
        layers = "two GroupedLinear, or GroupedMLP(activation=SquaredReLU()),"
        return f": {layers} take experts without a gate, in a block of your own"
    return ""


def _what_would_be_lost(
    experts: nn.ModuleList, place: tuple[nn.Module, str], model: nn.Module
) -> Iterator[str]:
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


def _empty_grouped_module(where: str, experts: nn.ModuleList, request: Request) -> nn.Module:
    """Check experts, and make the module that can replace them, on the meta device."""
    parameters = [dict(expert.named_parameters()) for expert in experts]
    forms = {tuple((name, p.shape, p.dtype) for name, p in one.items()) for one in parameters}
    if len(forms) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' names, shapes or dtypes")
    if len({tuple(p.requires_grad for p in one.values()) for one in parameters}) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' requires_grad")
    check_num_groups(where, "the number of experts", len(experts))
    check_weights(where, ((name, p) for name, p in parameters[0].items() if p.dim() == 2))
    names, E, recipe = swiglu_names(experts[0]), len(experts), request.recipe
    known = LINEAR_OPTIONS if names is None else MLP_OPTIONS
    unknown = [option for option in request.options if option not in known]
    if unknown:
        raise ValueError(f"{where}: options may be {', '.join(known)}, got {' and '.join(unknown)}")
    first = next(iter(parameters[0].values()))
    like: dict[str, Any] = {
        "dtype": first.dtype,
        "device": "meta",
        **request.options,
        "columnwise": request.columnwise,
    }
    grouped: nn.Module
    if names is None:
        N, K = first.shape
        grouped = GroupedLinear(E, K, N, bias="bias" in parameters[0], recipe=recipe, **like)
        trained = {name: p.requires_grad for name, p in parameters[0].items()}
    else:
        gate, up, down = (parameters[0][name] for name in names)
        if gate.requires_grad != up.requires_grad:
            raise ValueError(
                f"{where}: {names[0]} and {names[1]} become one parameter: let both require grad, "
                "or neither"
            )
        if not gate.shape == up.shape == down.mT.shape:
            shapes = ", ".join(f"{name} {list(parameters[0][name].shape)}" for name in names)
            raise ValueError(f"{where}: experts are not SwiGLU by their shapes: {shapes}")
        grouped = GroupedMLP(E, gate.size(1), gate.size(0), recipe=recipe, **like)
        trained = {"gate_up_proj": gate.requires_grad, "down_proj": down.requires_grad}
        for expert in experts:
            _check_expert(where, expert, names)
    for name, is_trained in trained.items():
        grouped.get_parameter(name).requires_grad_(is_trained)
    return grouped.train(experts.training)


def _check_expert(where: str, expert: nn.Module, names: Names) -> None:
    def run(x_ERH: Tensor, stand_ins: Sequence[Expert] | None) -> Tensor:
        own = {} if stand_ins is None else dict(zip(names, stand_ins[0][:3], strict=True))
        y_RH: Tensor = functional_call(expert, own, x_ERH[0])
        return y_RH[None]

    weights = (expert.get_parameter(name).detach() for name in names)
    check_swiglu(where, expert, run, [Expert(*weights)])


@torch.no_grad()
def _fill(grouped: nn.Module, experts: nn.Module) -> None:
    """Give a grouped module on the meta device memory and the experts' parameters.

    Besides the grouped module there is never more than a copy of one expert.
    """
    first = next(experts.parameters())
    if first.is_meta:
        return
    grouped.to_empty(device=first.device)
    for module in grouped.modules():  # scales and caches, which have no values yet
        if module is not grouped and callable(reset := getattr(module, "reset", None)):
            reset()
    for e, expert in enumerate(experts.children()):
        own: dict[str, Tensor] = dict(expert.named_parameters())
        names = swiglu_names(expert)
        if names is not None:
            gate, up, down = (own[name] for name in names)
            own = {"gate_up_proj": torch.cat([gate, up]), "down_proj": down}
        for name, value in own.items():
            w = grouped.get_parameter(name)
            w[e].copy_(quantized_as(w[e], value))
