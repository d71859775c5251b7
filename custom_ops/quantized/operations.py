"""Views by tensors that handle torch's operations below autograd."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
