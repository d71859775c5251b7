"""The quantized weight that a layer keeps from one micro-batch to the next."""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.quantized.pickle_version import check_pickle_version
from grouped_linear.recipes import (
    Experts,
    Format,
    QuantizedWeight,
    Recipe,
    check_stores,
    new_weight,
    refresh_weight_,
)

PICKLE_VERSION = 1

# Caches that were refreshed apart from a forward, by the address of `values`. A graph has tensors
# for arguments and no caches, so the op that waits for a refresh finds the cache here.
_refreshed: "WeakValueDictionary[int, WeightCache]" = WeakValueDictionary()


class WeightCache(nn.Module):
    """A recipe's quantized weight in buffers that are never replaced, so that graphs can read them.

    The cache is cold at first: it holds no weight. It becomes cold again when the layer loads,
    reinitializes or moves its weight. After any other write to the parameter, as by an optimizer or
    ``load_experts``, pass ``is_first_microbatch=True`` to the next call. Scales of a cold cache are
    NaN, so that results computed from it are NaN, also in a graph.

    :func:`grouped_linear.refresh_weights` fills it too, on a stream of its own. The cache then
    knows which tensors it was quantized from, and a call that reads it raises once they were
    written.

    The buffers are ordinary tensors even if the cache is made in inference mode, so that their
    writes are counted and that training can save them.

    A layer with ``cache_weights=True`` makes its own.

    Args:
        recipe: how the weight is quantized.
        E: experts.
        N: out_features.
        K: in_features.
        device: the buffers' device.
        of: the names of the parameters that it caches, in the module that it is a child of.

    Attributes:
        recipe: as given.
        of: as given.
        refreshed_apart: whether ``refresh_weights`` has ever filled it.

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
        self,
        recipe: Recipe,
        E: int,
        N: int,
        K: int,
        device: torch.device | str | None,
        *,
        of: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        check_stores(type(recipe).__name__, recipe.weight)
        self.recipe, self.of = recipe, of
        self._forget_refresh()
        with torch.inference_mode(False):
            weight = new_weight(recipe.weight, E, N, K, device)
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

    # --- filled by refresh_weights ---------------------------------------------------------------

    def _forget_refresh(self) -> None:
        """Clear the refresh bookkeeping."""
        self.refreshed_apart = False
        self._event: torch.cuda.Event | None = None
        self._sources: tuple[ref[Tensor], ...] = ()
        self._versions: tuple[int, ...] | None = None

    def refresh(
        self,
        weights: Experts,
        format: Format,
        stream: "torch.cuda.Stream | None",
    ) -> None:
        """Quantize weights into the cache, on a stream that waits for the current one.

        Args:
            weights: one tensor [E, N, K] or E tensors [N, K].
            format: the weight's, with the state of the layer if it has one.
            stream: where; None for the current one. A layer's forward waits for it on the device.
        """
        if stream is None:
            self.wait()
            refresh_weight_(self.quantized_weight(), weights, format, None)
        else:
            if self._event is None:
                # External: a graph that is captured with a wait waits for the latest refresh.
                self._event = torch.cuda.Event(external=True)
            with torch.cuda.stream(stream):
                self._event.wait(stream)
                refresh_weight_(self.quantized_weight(), weights, format, None)
                self._event.record(stream)
            for w in weights:
                w.record_stream(stream)
        self._sources = tuple(map(ref, weights))
        self._versions = self._versions_now()
        self.refreshed_apart = True
        _refreshed[self.values.data_ptr()] = self

    def _versions_now(self) -> tuple[int, ...] | None:
        """Of the cache and of what it was refreshed from; None where that is not counted."""
        sources = [source() for source in self._sources]
        if any(w is not None and w.is_inference() for w in sources):
            return None
        return self._writes, *(-1 if w is None else w._version for w in sources)

    def wait(self) -> None:
        """Let the current stream wait for the last refresh."""
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self.values.device))

    def check_fresh(self) -> None:
        """Raise RuntimeError if a parameter was written since ``refresh_weights`` read it.

        A forward that fills the cache ends that: from then on its caller knows what is in it.
        """
        if self._versions is None:
            return
        writes, *versions = self._versions
        if writes == self._writes and (writes, *versions) != self._versions_now():
            raise RuntimeError(
                f"refresh_weights: {', '.join(self.of)} was written since, as by an optimizer: "
                "call refresh_weights again before the next forward"
            )

    # --- cold and warm ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Make the cache cold."""
        self.wait()
        poisoned = (self.values, self.columnwise) if self.scale is None else (self.scale,)
        for t in poisoned:
            if t is not None:
                t.fill_(torch.nan)
        self._cold_writes = self._writes

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, whose count of writes starts anew.

        float8 goes as bytes, because plain pickle fails on it (torch 2.13). The copy does not know
        its own parameters yet, so it cannot tell whether they were written since a refresh.
        """
        self.wait()
        buffers = {
            name: t.view(torch.uint8) if t is not None and t.dtype == E4M3 else t
            for name, t in self._buffers.items()
        }
        changed = {"_cold_writes": -1 if self.warm else None, "_buffers": buffers}
        own = ("refreshed_apart", "_event", "_sources", "_versions")
        kept = {name: value for name, value in vars(self).items() if name not in own}
        return kept | changed | {"pickle_version": PICKLE_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, warm if the original is."""
        state = dict(state)
        check_pickle_version("WeightCache", state.pop("pickle_version"), PICKLE_VERSION)
        super().__setstate__(state)
        self._forget_refresh()
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
        self.wait()
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


@torch.library.custom_op("grouped_linear_host::wait_for_refresh_", mutates_args=("first",))
def wait_for_refresh_(first: Tensor, values: Tensor | None) -> None:
    """Wait on the device for the refresh of a weight cache, in a compiled graph.

    An event can be no argument of a graph. So a graph has this op, which finds the cache by the
    address of its memory. It is a Python op, apart from those in csrc: it has no kernel.

    Args:
        first: a tensor that whatever must come after the wait reads. It does not change.
        values: the cache's ``values``; None if `first` is that, to be written.

    Raises:
        RuntimeError: if `values` is of a cache that is stale, see
            :meth:`WeightCache.check_fresh`.
    """
    cache = _refreshed.get((first if values is None else values).data_ptr())
    if cache is None:  # a copy: wait for whichever it may be of
        for any_cache in list(_refreshed.values()):
            if any_cache.values.device == first.device:
                any_cache.wait()
        return
    cache.wait()
    if values is not None:
        cache.check_fresh()


@wait_for_refresh_.register_fake
def _(first: Tensor, values: Tensor | None) -> None:
    return None
