"""The quantized weight that a layer keeps from one micro-batch to the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.quantized.pickle_version import check_pickle_version
from grouped_linear.recipes import QuantizedWeight, Recipe

PICKLE_VERSION = 1


class WeightCache(nn.Module):
    """A recipe's quantized weight in buffers that are never replaced, so that graphs can read them.

    The cache is cold at first: it holds no weight. It becomes cold again when the layer loads,
    reinitializes or moves its weight. After any other write to the parameter, as by an optimizer or
    ``load_experts``, pass ``is_first_microbatch=True`` to the next call. Scales of a cold cache are
    NaN, so that results computed from it are NaN, also in a graph.

    The buffers are ordinary tensors even if the cache is made in inference mode, so that their
    writes are counted and that training can save them.

    A layer with ``cache_weights=True`` makes its own.

    Args:
        recipe: how the weight is quantized.
        E: experts.
        N: out_features.
        K: in_features.
        device: the buffers' device.

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
            weight = recipe.new_weight(E, N, K, device)
        for name, t in weight._asdict().items():
            self.register_buffer(name, t, persistent=False)
        self.reset()

    @property
    def warm(self) -> bool:
        """Whether it was written since it was last cold, in eager mode or by a graph.

        The host cannot know whether a flag on the device skipped a write. So this serves to report
        what the host can see; the NaN of a cold cache shows the rest.
        """
        return self._writes != self._cold_writes

    @property
    def _writes(self) -> int:
        written = self.values if self.scale is None else self.scale
        return written._version

    def reset(self) -> None:
        """Make the cache cold."""
        poisoned = (self.values, self.columnwise) if self.scale is None else (self.scale,)
        for t in poisoned:
            if t is not None:
                t.fill_(torch.nan)
        self._cold_writes = self._writes

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, whose count of writes starts anew.

        float8 goes as bytes, because plain pickle fails on it (torch 2.13).
        """
        buffers = {
            name: t.view(torch.uint8) if t is not None and t.dtype == E4M3 else t
            for name, t in self._buffers.items()
        }
        changed = {"_cold_writes": -1 if self.warm else None, "_buffers": buffers}
        return self.__dict__ | changed | {"pickle_version": PICKLE_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, warm if the original is."""
        state = dict(state)
        check_pickle_version("WeightCache", state.pop("pickle_version"), PICKLE_VERSION)
        super().__setstate__(state)
        with torch.inference_mode(False):
            for name, t in self._buffers.items():
                if t is not None:
                    own = t.clone() if t.is_inference() else t
                    self._buffers[name] = own.view(E4M3) if t.dtype == torch.uint8 else own
        if self._cold_writes is None:
            self._cold_writes = self._writes

    def quantized_weight(self) -> QuantizedWeight:
        """The buffers, as a recipe refreshes and reads them."""
        return QuantizedWeight(self.values, self.scale, self.columnwise)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightCache":
        """Follow the model to another device, but keep each dtype. A cache that moved is cold.

        It is cold too if the model's dtype changes, because the weight does. A number in float32
        shows such a change where no buffer does: MXFP8's are bfloat16.
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
        """Become cold: loading replaces the weight. The cache itself is in no state dict."""
        super()._load_from_state_dict(*args, **kwargs)
        with torch.no_grad():
            self.reset()
