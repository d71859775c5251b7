"""How the weights of a layer are drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grouped_linear.quantized.weight import is_quantized, quantized_as


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
