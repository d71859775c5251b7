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
    """A quantized weight of w's shape and dtype, which rounds stochastically if None or True."""
    return GroupedTensor.quantize(w, recipe, stochastic_rounding=stochastic is not False)


@contextmanager
def drawn(weight: Any) -> Iterator[Any]:
    """What to initialise in place of a weight: itself, or numbers that are then quantized into it.

    So a quantized weight starts as what any other layer draws, quantized.
    """
    if not is_quantized(weight):
        yield weight
        return
    numbers = torch.empty_like(weight)
    yield numbers
    weight.copy_(quantized_as(weight, numbers))
