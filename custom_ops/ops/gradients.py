# SPDX-License-Identifier: Apache-2.0
"""Ops without a gradient formula raise in backward: a derivative without their share is wrong."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LINEAR = "grouped_linear(..., recipe=...)"
_MLP = "grouped_mlp"

#: Ops that give a gradient.
_DIFFERENTIABLE = ("grouped_mm", "topk_experts")
#: Ops that return integers or take nothing else.
_OF_INTEGERS = ("splits_to_offsets", "sort_by_expert", "quantize_mxfp4", "dequantize_mxfp4")
#: The differentiable function in place of an op; of ops that are not here it is ``_LINEAR``.
_INSTEAD = {
    "grouped_mm_list": "grouped_linear, or grouped_mm of torch.stack(b)",
    "grouped_mm_mxfp4": None,
    "topk_experts_grad": "topk_experts",
    "addmm": "torch.addmm",
    "gather_sum": f"{_MLP}, or torch's index_select",
    "gather_dot": f"{_MLP}, or torch's index_select",
    "scatter_rows": f"{_MLP}, or torch's index_select",
    "swiglu": f"{_MLP}, or SwiGLU.forward",
    "swiglu_grad": f"{_MLP}, or SwiGLU.backward",
    "group_quantize_swiglu": _MLP,
    "group_quantize_swiglu_grad": _MLP,
    "grouped_mm_swiglu": _MLP,
    "grouped_mm_swiglu_grad": _MLP,
    "update_scales_": None,
    "adam_weight_": None,
}

_registered = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
#: Every other op that is registered, with what to use instead.
WITHOUT_GRADIENT = {
    op: _INSTEAD.get(op, _LINEAR)
    for namespace, op in sorted(_registered)
    if namespace == "grouped_linear" and op not in (*_DIFFERENTIABLE, *_OF_INTEGERS)
}

_functions: Any = torch._C._functions


def _refusing(name: str, instead: str | None) -> Callable[..., Any]:
    op = getattr(torch.ops.grouped_linear, name).default
    has_outputs = bool(op._schema.returns)
    ways = [] if instead is None else [f"use {instead}"]
    ways.append("where no gradient is wanted, call it under torch.no_grad()")
    sentence = f"{name}: not differentiable: {'; '.join(ways)}"

    def call(*arguments: Any) -> Any:
        # A layer's gradient, where time counts, takes this way.
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return op(*arguments)
        _check_no_tangents(name, arguments)
        is_compiling = torch.compiler.is_compiling()
        # Dynamo does not show that a tensor of torch.func.grad requires one.
        of_func = is_compiling and torch.is_grad_enabled() and "Grad" in _transforms()
        needing = [t for t in _tensors(arguments) if t.requires_grad]
        if not of_func and not (needing and torch.is_grad_enabled()):
            return op(*arguments)
        # A compiled graph and torch.func have their backward before any is asked for. An op
        # that only writes has no output that could refuse later.
        if is_compiling or not has_outputs or torch._C._are_functorch_transforms_active():
            raise RuntimeError(sentence)
        with torch.no_grad():
            results = op(*arguments)
        return _refuse(sentence, results, needing)

    return call


def _transforms() -> tuple[str, ...]:
    """The transforms of torch.func that are active, as "Grad"; in a graph, while it is made."""
    return tuple(t.key().name for t in torch._C._functorch.get_interpreter_stack() or ())


# As torch.compiler.assume_constant_result does, which would import Dynamo here.
_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms(name: str) -> None:
    """Raise in a graph that torch.func transforms, which would drop a Function's backward.

    Elsewhere torch's Function raises.
    """
    if torch.compiler.is_compiling() and _transforms():
        raise RuntimeError(
            f"{name}: not for torch.func's transforms (grad, vjp, jvp, jacrev, vmap): use "
            "torch.autograd.grad, or backward"
        )


def _without_tangents(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.grouped_linear, name).default

    def call(*arguments: Any) -> Any:
        _check_no_tangents(name, arguments)
        return op(*arguments)

    return call


def _check_no_tangents(name: str, arguments: Iterable[Any]) -> None:
    """Raise in forward mode, where torch would drop the tangents of a custom op in silence."""
    if forward_ad._current_level < 0:
        return
    for t in _tensors(arguments):
        if forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(f"{name}: forward-mode autograd is not supported")


def _refuse(sentence: str, results: Any, needing: list[Tensor]) -> Any:
    """The results with a node behind them that raises in a backward, as torch's own ops do."""
    is_one = isinstance(results, Tensor)
    outputs = [results] if is_one else list(results)
    real = [i for i, t in enumerate(outputs) if t.is_floating_point()]
    # With edges to what needs a gradient: autograd runs only nodes that lead to what it is asked
    # for.
    aliases = [outputs[i].detach().requires_grad_() for i in real]
    refusing = _functions.DelayedError(sentence.encode(), len(aliases) + len(needing))
    for i, t in zip(real, refusing(*aliases, *needing), strict=False):
        outputs[i] = t
    return outputs[0] if is_one else tuple(outputs)


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among an op's arguments; of a list all."""
    found = []
    for argument in arguments:
        for t in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(t, Tensor):
                found.append(t)
    return found


_plain = torch.ops.grouped_linear

#: The ops of ``torch.ops.grouped_linear``, for this package's own functions.
OPS = SimpleNamespace(
    **{name: getattr(_plain, name).default for name in _OF_INTEGERS},
    **{name: _without_tangents(name) for name in _DIFFERENTIABLE},
    **{name: _refusing(name, instead) for name, instead in WITHOUT_GRADIENT.items()},
)
