# SPDX-License-Identifier: Apache-2.0
"""The quantized weight that a layer keeps from one micro-batch to the next."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.recipes import Recipe
from grouped_linear.recipes.format import Device, WeightList
from grouped_linear.recipes.quantize_weight import QuantizedWeight, new_weight, poison_, stores


class WeightCache(nn.Module):
    """A recipe's quantized weight in tensors that are never replaced, so that graphs can read them.

    The cache is cold at first: it holds no weight. It becomes cold again when the layer loads,
    reinitializes or moves its weight, and copies of it are cold. After any other write to the
    parameter, as by an optimizer, pass ``is_first_microbatch=True`` to the next
    call. An eager call raises if the cache was filled from another tensor, or before a write that
    torch counts. Scales of a cold cache are NaN, so that results computed from it are NaN,
    also in a graph.

    The tensors move with the model and are no buffers: ``AveragedModel`` and
    DistributedDataParallel write buffers. They are ordinary tensors even if the cache is made in
    inference mode, so that their writes are counted and that training can save them.

    Attributes:
        recipe: as given.
        values: [E, N, K], for fprop; of MXFP4 the codes, which dgrad reads, too.
        scale: of ``values`` and of ``columnwise``; None under MXFP8.
        columnwise: for dgrad, in FP8 [E, K, N], under MXFP8 [E, N, K], of MXFP4 None.
    """

    _numbers: Any
    _cold_writes: int
    _source: Any  # each tensor that filled it, as a function returns it, with its writes
    _filling: Any  # the writes before a call that fills it, and the source that it then has

    def __init__(self, recipe: Recipe, E: int, N: int, K: int, device: Device) -> None:
        super().__init__()
        if not stores(recipe.weight):
            raise ValueError(
                f"{type(recipe).__name__}: cache_weights=True stores weights in this package's "
                f"formats, got {recipe.weight!r}: leave cache_weights out"
            )
        self.recipe, self._in_graphs = recipe, False
        with torch.inference_mode(False):
            self._keep(new_weight(recipe.weight, E, N, K, device))
        self.reset()

    def _keep(self, weight: QuantizedWeight) -> None:
        """Register buffers, which torch.compile takes to stay in place, outside of the tree."""
        numbers = vars(self)["_numbers"] = nn.Module()
        for name, t in weight._asdict().items():
            numbers.register_buffer(name, t, persistent=False)

    @property
    def values(self) -> Tensor:
        """[E, N, K]."""
        return self._numbers.values  # type: ignore[no-any-return]

    @property
    def scale(self) -> Tensor | None:
        """The scales, of the format's shape."""
        return self._numbers.scale  # type: ignore[no-any-return]

    @property
    def columnwise(self) -> Tensor | None:
        """The operand of dgrad."""
        return self._numbers.columnwise  # type: ignore[no-any-return]

    @property
    def warm(self) -> bool:
        """Whether it was written since it was last cold, in eager mode or by a graph.

        The host cannot see a write that a flag on the device skipped. The NaN scales show that.
        """
        return self._writes != self._cold_writes

    @property
    def _writes(self) -> int:
        written = self.values if self.scale is None else self.scale
        return written._version

    def read(self, layer: str, weights: WeightList, first: Tensor | bool) -> QuantizedWeight:
        """The tensors, for a call of these weights, which fills them first unless told False."""
        device = weights[0].device
        left = self.values.device != device  # accelerate moves parameters one by one
        if torch.compiler.is_compiling():  # a graph must not depend on it; an empty one gives NaN
            if left:
                raise RuntimeError(
                    f"{layer}: the weight cache is on {self.values.device}, and the weight that "
                    f"was moved without it on {device}: an eager call moves the cache"
                )
            return self.quantized_weight()
        if left:
            self._apply(partial(torch.empty_like, device=device))
        tensors = self.quantized_weight()
        if first is False and not self.warm:
            raise RuntimeError(
                f"{layer}: is_first_microbatch=False reads the weight cache, which holds no "
                "weight yet, or none since parameters were loaded, drawn or moved: call with True"
            )
        # A call that raised before it quantized the weight has filled nothing.
        if self._filling is not None and self._filling[0] != self._writes:
            self._source = self._filling[1]
        self._filling = None
        if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            # The graph fills it, or may: from now on the host cannot know from what.
            self._in_graphs, self._source = True, None
        elif first is not False:
            known = first is True and not self._in_graphs
            source = tuple((_hold(w), _count(w)) for w in weights)  # ids are used again
            self._filling = self._writes, source if known else None
        elif self._source is not None:
            pairs = list(zip(self._source, weights, strict=True))
            if not all(filled() is w for (filled, _), w in pairs):
                was = "is another tensor in this call"
            elif any(count != _count(w) for (_, count), w in pairs):
                was = "was written since, as by an optimizer"
            else:
                return tensors
            raise RuntimeError(
                f"{layer}: is_first_microbatch=False reads the weight cache, and the weight that "
                f"filled it {was}: call with True"
            )
        return tensors

    def quantized_weight(self) -> QuantizedWeight:
        """The tensors, as a recipe refreshes and reads them."""
        return QuantizedWeight(self.values, self.scale, self.columnwise)

    # --- cold and warm ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Make the cache cold."""
        self._source = self._filling = None
        poisoned = (self.values, self.columnwise) if self.scale is None else (self.scale,)
        for t in poisoned:
            if t is not None:
                poison_(t)
        self._cold_writes = self._writes

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: all but the numbers, which loading makes anew.

        An empty tensor has their device, as ``torch.load`` maps it.
        """
        sizes = tuple(self.quantized_weight().stand_in.shape)
        there = torch.empty(0, device=self.values.device)
        return vars(self) | {"_numbers": (sizes, there), "_source": None, "_filling": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, cold: it belongs to another parameter."""
        state = dict(state)
        (E, N, K), there = state.pop("_numbers")
        super().__setstate__(state)
        with torch.inference_mode(False):
            self._keep(new_weight(self.recipe.weight, E, N, K, there.device))
            self.reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightCache":
        """Follow the model to another device, but keep each dtype. A cache that moved is cold.

        It is cold too if the model's dtype changes, because the weight does. A number in float32
        shows such a change where no buffer does: MXFP8's are bfloat16.
        """
        number = torch.empty((), dtype=torch.float32, device=self.values.device)
        moved = fn(number) is not number

        def keep_dtype(t: Tensor) -> Tensor:
            nonlocal moved
            there = fn(t)
            moved = moved or there is not t
            return there if there.dtype == t.dtype else t.to(there.device)

        with torch.inference_mode(False), torch.no_grad():
            self._numbers._apply(keep_dtype)
            if moved:
                self.reset()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Become cold: loading replaces the weight. The cache itself is in no state dict."""
        super()._load_from_state_dict(*args, **kwargs)
        with torch.no_grad():
            self.reset()


def _hold(w: Tensor) -> Callable[[], Tensor | None]:
    """A parameter, as torch swaps none with weak references; another tensor while it lives."""
    return (lambda: w) if isinstance(w, nn.Parameter) else weakref.ref(w)


def _count(w: Tensor) -> int | None:
    """How often a tensor was written, where that is counted."""
    return None if w.is_inference() else w._version
