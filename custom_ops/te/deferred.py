# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that a backward leaves to ``backward_dw``.

A forgotten ``backward_dw`` is an error in the optimizer's step, and a warning when many wait.
"""

import warnings
from collections import deque
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.wgrad import Wgrad
from grouped_linear.recipes.format import WeightList

# More gradients than a pipeline schedule defers. The warning is for optimizers that are not torch's
# or that step copies of the parameters: the check in the step does not see these.
MANY = 64
_layers: WeakSet[Any] = WeakSet()


class Deferred(NamedTuple):
    """A waiting weight gradient of the parameters, which are the weights before autocast."""

    wgrad: Wgrad
    parameters: WeightList
    captured: bool  # whether a CUDA graph fills the operands each time it is replayed
    versions: tuple[int, int] | None  # of dy and x; None where a graph writes them

    def compute(self) -> tuple[Tensor | None, ...]:
        """The gradient of each weight, or None where it went into main_grad."""
        if self.versions not in (None, (self.wgrad.dy._version, self.wgrad.x._version)):
            raise RuntimeError(
                "GroupedLinear: backward_dw: the layer's input, or the gradient of its output, was "
                "modified in place since the backward"
            )
        return self.wgrad.compute()


def defer(waiting: deque[Deferred], parameters: WeightList, wgrad: Wgrad) -> None:
    """Append the gradient of the parameters, with its operands detached from their graph."""
    captured = wgrad.dy.is_cuda and torch.cuda.is_current_stream_capturing()
    versions = None if captured else (wgrad.dy._version, wgrad.x._version)
    wgrad = wgrad._replace(dy=wgrad.dy.detach(), x=wgrad.x.detach())
    waiting.append(Deferred(wgrad, parameters, captured, versions))


class DeferredWgrad(torch.autograd.Function):
    """A graph of its own for a deferred gradient, so that autograd runs the parameters' hooks."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, *parameters: Tensor) -> Tensor:
        """Return a scalar to call backward on."""
        ctx.deferred = deferred
        return parameters[0].new_zeros(())

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the layer's own backward left out."""
        return None, *ctx.deferred.compute()


def watch(layer: nn.Module, waiting: deque[Deferred]) -> None:
    """Watch a layer, in its forward, whose backward will leave a weight gradient in `waiting`.

    Warns where many wait. A step of torch's optimizers raises before it writes a weight that waits.
    """
    _register()
    _layers.add(layer)
    if len(waiting) == MANY:
        warnings.warn(
            f"{type(layer).__name__}: {MANY} backwards have left weight gradients to backward_dw, "
            "each with its operands: call it once for each backward",
            stacklevel=5,  # who calls the layer
        )


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    waiting = [(layer, deferred) for layer in _layers for deferred in layer._deferred]
    if not waiting:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer, deferred in waiting:
        if any(p.requires_grad and id(p) in stepped for p in deferred.parameters):
            raise RuntimeError(
                f"{type(layer).__name__}: {type(optimizer).__name__} steps a weight whose gradient "
                "a backward has left to backward_dw: call it once for each backward, before the "
                "step"
            )
