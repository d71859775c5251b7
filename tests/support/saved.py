# SPDX-License-Identifier: Apache-2.0
"""What autograd saves for a backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """A list to which each tensor comes that is saved in the context."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        yield saved
