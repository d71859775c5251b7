"""Gradients that have no gradient of their own."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]
_functions: Any = torch._C._functions


def differentiable_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Refuse a second derivative through ``backward``, as torch's ``once_differentiable`` does.

    Also where what comes in is a constant, as of ``y.sum()``: the gradients here depend on weights
    and inputs besides, so torch would let a penalty on them have no effect, in silence. Where
    gradients cannot be differentiated anyway, nothing is asked: that takes an eager forward and
    backward 58 us and not 60.
    """
    refused = once_differentiable(backward)

    @wraps(backward)
    def once(ctx: Any, *incoming: Tensor) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        if torch.compiler.is_compiling():
            return refused(ctx, *incoming)
        with torch.no_grad():
            results = backward(ctx, *incoming)
        aliases = [t if t is None else t.detach().requires_grad_() for t in results]
        # What the gradients depend on goes through it too: autograd runs only what leads to the
        # tensors that it is asked for, and would find that the gradients do not depend on them.
        passed = *aliases, *incoming, *_leaves(ctx)
        refuse = _functions.DelayedError(
            b"trying to differentiate twice a function that was marked with @once_differentiable",
            len(passed),
        )
        refusing: Gradients = refuse(*passed)[: len(results)]
        return refusing

    return once


def _leaves(ctx: Any) -> list[Tensor]:
    """The leaves that a function's inputs were computed from.

    A way to what lies between, that a derivative may be asked by as well, cannot be made. Looking
    for them takes a backward with ``create_graph=True`` three times as long in 100 layers.
    """
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        if isinstance(node, _functions.AccumulateGrad):
            leaves.append(node.variable)
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return leaves
