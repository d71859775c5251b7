"""The quantized weight that a layer keeps from one micro-batch to the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.recipes import QuantizedWeight, Recipe


class WeightCache(nn.Module):
    """A recipe's quantized weight in buffers that are never replaced, so that graphs may hold them.

    Born cold, and cold again when the module loads, draws anew or moves its weight. Whoever writes
    to the parameter otherwise, an optimizer or ``load_experts``, has the next call say True. Cold
    scales are NaN, so that what is computed from them shows, also in a graph. In inference mode,
    too, it is made of tensors that count their writes and that training can save.

    A layer with ``cache_weights=True`` makes its own.

    Args:
        recipe: that quantizes the weight.
        E: groups.
        N: out_features.
        K: in_features.
        device: of the buffers.

    >>> from grouped_linear import Float8BlockScaling
    >>> cache = WeightCache(Float8BlockScaling(), 2, 32, 16, "cpu")
    >>> cache.values.shape, cache.values.dtype, cache.warm
    (torch.Size([2, 32, 16]), torch.float8_e4m3fn, False)
    """

    values: Tensor
    scale: Tensor | None
    columnwise: Tensor | None
    _cold_writes: int | None

    def __init__(
        self, recipe: Recipe, E: int, N: int, K: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        with torch.inference_mode(False):
            kept = recipe.new_weight(E, N, K, device)
        for name, t in kept._asdict().items():
            self.register_buffer(name, t, persistent=False)
        self.reset()

    @property
    def warm(self) -> bool:
        """Whether it was written since it was last cold, by a graph or without one.

        On the host nobody knows what a flag on the device decided, so this is for the sentence that
        a mistake deserves; NaN is for the rest.
        """
        return self._writes != self._cold_writes

    @property
    def _writes(self) -> int:
        written = self.values if self.scale is None else self.scale
        return written._version

    def reset(self) -> None:
        """Forget the weight."""
        poisoned = (self.values, self.columnwise) if self.scale is None else (self.scale,)
        for t in poisoned:
            if t is not None:
                t.fill_(torch.nan)
        self._cold_writes = self._writes

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts its writes anew.

        float8 goes as bytes, because plain pickle fails on it (torch 2.13).
        """
        buffers = {
            name: t.view(torch.uint8) if t is not None and t.dtype == E4M3 else t
            for name, t in self._buffers.items()
        }
        return self.__dict__ | {"_cold_writes": -1 if self.warm else None, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a pickle: as warm as what it is of."""
        super().__setstate__(state)
        with torch.inference_mode(False):
            for name, t in self._buffers.items():
                if t is not None:
                    own = t.clone() if t.is_inference() else t
                    self._buffers[name] = own.view(E4M3) if t.dtype == torch.uint8 else own
        if self._cold_writes is None:
            self._cold_writes = self._writes

    def kept(self) -> QuantizedWeight:
        """The buffers."""
        return QuantizedWeight(self.values, self.scale, self.columnwise)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightCache":
        """Follow the model to another device, but keep each dtype; what moved is cold.

        As is what was to become another dtype, where no buffer shows it: MXFP8's are bfloat16.
        """
        number = torch.empty((), device=self.values.device)
        moved = fn(number) is not number

        def keep_dtype(t: Tensor) -> Tensor:
            nonlocal moved
            there = fn(t)
            moved = moved or there is not t
            return there if there.dtype == t.dtype else t.to(there.device)

        with torch.inference_mode(False), torch.no_grad():
            super()._apply(keep_dtype, recurse)
            if moved:
                self.reset()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of it is saved; the weight it was made of is being replaced."""
        super()._load_from_state_dict(*args, **kwargs)
        with torch.no_grad():
            self.reset()
