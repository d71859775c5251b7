"""Questions about torch's operations, for the tensors that handle them below autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults."""
    arguments = enumerate(func._schema.arguments)
    return {
        a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
        for i, a in arguments
    }


@contextmanager
def views_of(t: Tensor) -> Iterator[None]:
    """The context in which views of t's parts are made, with the parts' own version counters.

    Handlers run below autograd, where a view would get a counter of its own. In inference mode
    nothing is counted, and a view of a tensor from outside of it must be made outside too.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(t.is_inference()):
            yield
    else:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            yield
