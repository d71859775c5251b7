"""Gradients that have no gradient of their own."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]


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
        passed = *(t if t is None else t.detach().requires_grad_() for t in results), *incoming
        refuse: Any = torch._C._functions.DelayedError(
            b"trying to differentiate twice a function that was marked with @once_differentiable",
            len(passed),
        )
        # What comes in goes through it too, so that a way leads back to the inputs: without one a
        # derivative that may be unused, as torch.autograd.functional.hessian's, is zero in silence.
        refusing: Gradients = refuse(*passed)[: len(results)]
        return refusing

    return once
