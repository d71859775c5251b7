"""Weights of a layer, stored quantized or not: how they are made and drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import is_quantized, quantized_as
from grouped_linear.recipes import Recipe


def quantized_like(w: Tensor, recipe: Recipe | None, stochastic: bool | None) -> GroupedTensor:
    """Quantize w. The weight rounds stochastically unless `stochastic` is False."""
    return GroupedTensor.quantize(w, recipe, stochastic_rounding=stochastic is not False)


@contextmanager
def drawn(weight: Any) -> Iterator[Any]:
    """Yield the tensor to initialise: the weight, or a plain one that is then quantized into it.

    So a quantized weight starts as the quantized numbers that a plain weight would have.
    """
    if not is_quantized(weight):
        yield weight
        return
    numbers = torch.empty_like(weight)
    yield numbers
    weight.copy_(quantized_as(weight, numbers))
