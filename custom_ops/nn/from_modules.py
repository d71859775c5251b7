# SPDX-License-Identifier: Apache-2.0
"""A layer made of a list of modules, one an expert: their parameters are checked and stacked.

E experts, H features of a token, F features inside an expert, N out_features, K in_features.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from grouped_linear.nn.check_swiglu import check_swiglu
from grouped_linear.nn.checks import check_whole

Names = tuple[str, str, str]
Parameters = dict[str, nn.Parameter]

# The parameters of an expert that computes ``down(silu(gate(x)) * up(x))``: gate, up, down.
SWIGLU: tuple[Names, ...] = (
    ("w1.weight", "w3.weight", "w2.weight"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)


def stack_linears(op: str, linears: Iterable[nn.Module]) -> Parameters:
    """The weights of torch.nn.Linear as weight [E, N, K], their biases as bias [E, N]."""
    experts = _listed(op, linears)
    if not experts or any(type(one) is not nn.Linear for one in experts):
        got = ", ".join(sorted({type(one).__name__ for one in experts}))
        raise ValueError(f"{op}: modules must be torch.nn.Linear, got {got or 'no module'}")
    _check_alike(op, experts)
    return {
        name: _stacked([[e.get_parameter(name)] for e in experts]) for name in _names(experts[0])
    }


def stack_experts(op: str, modules: Iterable[nn.Module]) -> Parameters:
    """The weights of SwiGLU experts as gate_up_proj [E, 2 F, H] and down_proj [E, H, F]."""
    experts = _listed(op, modules)
    own = set(_names(experts[0])) if experts else None
    names = next((names for names in SWIGLU if set(names) == own), None)
    if names is None:
        got = ", ".join(_names(experts[0])) if experts else "no module"
        raise ValueError(
            f"{op}: modules must have the weights w1, w3, w2 or gate_proj, up_proj, down_proj and "
            f"no other parameters, got {got or 'none'}"
        )
    _check_alike(op, experts)
    gate, up, down = (experts[0].get_parameter(name) for name in names)
    if not gate.shape == up.shape == down.mT.shape:
        shapes = ", ".join(f"{name} {list(experts[0].get_parameter(name).shape)}" for name in names)
        raise ValueError(f"{op}: modules are not SwiGLU by their shapes: {shapes}")
    if gate.requires_grad != up.requires_grad:
        raise ValueError(
            f"{op}: {names[0]} and {names[1]} become one parameter: let both require grad, or "
            "neither"
        )
    for expert in experts:
        check_swiglu(op, expert, names)
    return {
        "gate_up_proj": _stacked([[e.get_parameter(name) for name in names[:2]] for e in experts]),
        "down_proj": _stacked([[e.get_parameter(names[2])] for e in experts]),
    }


def fill(layer: nn.Module, parameters: Parameters) -> None:
    """Give a layer on the meta device these parameters, to be kept as the layer keeps its weights.

    Frozen ones stay frozen.
    """
    for name, p in parameters.items():
        if not p.requires_grad:
            layer.get_parameter(name).requires_grad_(False)
    layer.load_state_dict(parameters, strict=False, assign=True)


def _listed(op: str, modules: Any) -> tuple[nn.Module, ...]:
    """The modules of a list; TypeError for anything else, as the block that holds the list."""
    given = tuple(modules) if isinstance(modules, Iterable) else ()
    if not isinstance(modules, Iterable) or not all(isinstance(one, nn.Module) for one in given):
        got = next((one for one in given if not isinstance(one, nn.Module)), modules)
        of = "" if got is modules else f"{type(modules).__name__} of "
        raise TypeError(
            f"{op}: needs a list of modules, one an expert, got {of}{type(got).__name__}"
        )
    return given


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _stacked(rows: Sequence[Sequence[nn.Parameter]]) -> nn.Parameter:
    """[E, ...], of each expert's parameters below each other, in one copy."""
    first = rows[0][0]
    whole = torch.cat([p.detach() for parameters in rows for p in parameters])
    return nn.Parameter(whole.view(len(rows), -1, *first.shape[1:]), first.requires_grad)


def _check_alike(op: str, experts: Sequence[nn.Module]) -> None:
    """Raise ValueError for experts whose parameters cannot be stacked, or hold more than these."""
    parameters = [dict(expert.named_parameters()) for expert in experts]
    every = [p for one in parameters for p in one.values()]
    check_whole(op, every, "make the layer")
    forms = [[(n, p.shape, p.dtype, p.device) for n, p in one.items()] for one in parameters]
    other = next((e for e, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        raise ValueError(
            f"{op}: modules 0 and {other} differ in parameters' names, shapes, dtypes or devices"
        )
    if len({tuple(p.requires_grad for p in one.values()) for one in parameters}) != 1:
        raise ValueError(f"{op}: modules differ in their parameters' requires_grad")
    lost = next((f"{e}{one}" for e, m in enumerate(experts) for one in _lost(m)), None)
    if lost is not None:
        raise ValueError(f"{op}: module {lost}, which would be lost")
    if len(set(map(id, every))) < len(every):
        raise ValueError(f"{op}: modules share parameters, which would be lost")


def _lost(expert: nn.Module) -> Iterator[str]:
    """Hooks, buffers and others that an expert has besides parameters, as a sentence goes on."""
    for name, module in expert.named_modules(prefix="."):
        where = name.rstrip(".").replace("..", ".")
        for attribute, value in vars(module).items():
            if attribute.endswith("_hooks") and value:
                yield f"{where} has {attribute}"
        if "forward" in vars(module):
            yield f"{where} has a forward of its own"
    for name, _ in expert.named_buffers():
        yield f" has the buffer {name}"
    for name, p in expert.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            yield f".{name} has hooks"
