"""The quantized weight that a layer keeps from one micro-batch to the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.recipes import KeptWeight, Quantizing


class WeightCache(nn.Module):
    """A recipe's quantized weight in buffers that are never replaced, so that graphs may hold them.

    Born cold, and cold again whenever the weight may have changed behind it: loaded, drawn anew,
    moved. Cold scales are NaN, so that what is computed from them shows, also in a graph.

    Attributes:
        warm: whether a weight may be in it. On the host nobody knows what a flag on the device
            decided, so this is for the sentence that a mistake deserves; NaN is for the rest.
    """

    values: Tensor
    scale: Tensor | None
    columnwise: Tensor | None

    def __init__(
        self, recipe: Quantizing, E: int, N: int, K: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        kept = recipe.new_weight(E, N, K, device)
        for name, t in kept._asdict().items():
            self.register_buffer(name, t, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Forget the weight."""
        self.warm = False
        poisoned = (self.values, self.columnwise) if self.scale is None else (self.scale,)
        for t in poisoned:
            if t is not None:
                t.fill_(torch.nan)

    def kept(self) -> KeptWeight:
        """The buffers."""
        return KeptWeight(self.values, self.scale, self.columnwise)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightCache":
        """Follow the model to another device, but keep each dtype; what moved is cold."""
        moved = False

        def keep_dtype(t: Tensor) -> Tensor:
            nonlocal moved
            there = fn(t)
            moved = moved or there is not t
            return there if there.dtype == t.dtype else t.to(there.device)

        with torch.no_grad():
            super()._apply(keep_dtype, recurse)
            if moved:
                self.reset()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of it is saved; the weight it was made of is being replaced."""
        super()._load_from_state_dict(*args, **kwargs)
        with torch.no_grad():
            self.reset()
