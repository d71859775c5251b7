"""Who forgets ``backward_dw`` is told: by an optimizer's step, or when very many gradients wait."""

import warnings
from collections import deque
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grouped_linear.autograd.wgrad import Wgrad

# More than a pipeline's schedule lets wait. For optimizers that are not torch's, or that step
# copies of the parameters: their steps do not show which gradients are missing.
MANY = 64
_layers: WeakSet[Any] = WeakSet()


def watch(layer: nn.Module, deferred: deque[Wgrad]) -> None:
    """Called in the forward of a layer whose backward will leave a weight gradient in `deferred`.

    Warns where many wait already. From now on a step of torch's optimizers raises RuntimeError
    before it writes a parameter whose gradient waits.
    """
    _register()
    _layers.add(layer)
    if len(deferred) == MANY:
        warnings.warn(
            f"{type(layer).__name__}: {MANY} backwards have left weight gradients to backward_dw, "
            "each with its operands: call it once for each backward",
            stacklevel=5,  # who calls the layer
        )


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    waiting = [(layer, wgrad) for layer in _layers for wgrad in layer._deferred_wgrads]
    if not waiting:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer, wgrad in waiting:
        if any(p.requires_grad and id(p) in stepped for p in wgrad.parameters):
            raise RuntimeError(
                f"{type(layer).__name__}: {type(optimizer).__name__} steps a weight whose gradient "
                "a backward has left to backward_dw: call it once for each backward, before the "
                "step"
            )
