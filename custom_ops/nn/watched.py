# SPDX-License-Identifier: Apache-2.0
"""A watched layer: recipes whose formats count their operands, and the numbers that they add to.

T rows, E groups (experts), K in_features, N out_features.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FP8
from grouped_linear.meta_kernels.watch import COLUMNS, MAXIMA, WATCH_COLUMNS
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.format import Device, Format, Layouts, Operands, WeightList
from grouped_linear.recipes.quantize import Gathered, Source, SwigluGradOf, SwigluOf
from grouped_linear.recipes.recipe import UNQUANTIZED

#: Thread blocks per group. One thread block per group would be slower than the layer.
PARTS = 4
#: The number of rows that stands for all of them.
ALL = 2**31 - 1


class WatchedOperand(NamedTuple):
    """Where a format counts one operand of a projection, in the role that it has there.

    An operand is measured when it is made, so that none lives longer.
    """

    counts: Any  # the layer's numbers, of WatchedLayer
    number: int  # the projection's number in the layer
    is_gradient: bool = False

    def rows(
        self,
        source: Source | SwigluGradOf,
        made: Operands,
        format: Format,
        offs_E: Tensor,
        layouts: Layouts,
    ) -> None:
        """Measure x, also how wgrad's columns share scales, or dy."""
        E = self.counts.forward_stats.size(2)
        if len(offs_E) != E:  # as of a part of the model that FSDP2 shards as a whole
            raise ValueError(
                f"watch: a call has {len(offs_E)} experts on this process, and {E} are counted: "
                "watch the whole model, when experts are spread and before fully_shard"
            )
        if layouts.again:  # the forward has measured it
            self.shares(made, format, offs_E)
            return
        given: dict[str, Any] = {}
        t: Tensor | None = None
        if isinstance(source, SwigluGradOf):
            t, given["gate_up"], given["weight"], given["activation"] = source
        elif isinstance(source, SwigluOf):
            given["gate_up"], given["activation"] = source
        elif isinstance(source, Gathered):
            t, given["rows"] = source.tokens_TH, source.routing.token
        else:
            t = source
        q, scale = _quantized(made, format)
        if q is not None:
            given["q_rows"] = made.rows
        stats, operand = self.counts.backward_stats, 2 * self.number + 1
        if not self.is_gradient:
            stats, operand = self.counts.forward_stats, 2 * self.number
            given["scale_t"] = made.columnwise_scale if format.share_scales else None
            if isinstance(source, Gathered):
                given["routed"] = getattr(source.routing, "routed", None)
        self._measure(stats, operand, t, q, scale, offs_E, **given)

    def shares(self, x: Operands, format: Format, offs_E: Tensor) -> None:
        """Count where the columns of x share scales, which the backward has made."""
        scale_t = x.columnwise_scale
        if format.share_scales and scale_t is not None:
            stats = self.counts.backward_stats
            self._measure(stats, 2 * self.number, offs=offs_E, scale_t=scale_t)

    def weight(self, weights: WeightList, made: Operands, format: Format) -> None:
        """Measure the weight: of one in FP8 alone, and of E tensors, what q tells."""
        first: Any = weights[0]
        w: Tensor | None = getattr(first, "numbers", None if hasattr(first, "q") else first)
        if w is not None and (w.dim() == 2 or w.dtype not in ACTIVATIONS or not any(w.stride())):
            w = None  # without strides it has no memory and stands for one that FSDP2 gathered
        q, scale = _quantized(made, format)
        if w is not None or q is not None:
            self._measure(self.counts.forward_stats, 2 * self.number + 1, w, q, scale)

    def _measure(
        self, stats: Tensor, operand: int, x: Tensor | None = None, *rest: Any, **more: Any
    ) -> None:
        counts = self.counts
        ops.watch_operand_(stats, counts.turn, operand, x, *rest, most=counts.rows, **more)


def _quantized(made: Operands, format: Format) -> tuple[Tensor | None, Tensor | None]:
    """The rowwise operand and its scales, where they differ from the numbers; else None."""
    q, scale = made.rowwise, made.rowwise_scale
    if format.changes_nothing or not isinstance(q, Tensor) or q.dtype not in (*ACTIVATIONS, *FP8):
        return None, None
    if scale is not None and scale.dtype != torch.float32:  # by a user's function
        return None, None
    return q, scale


class WatchedLayer(nn.Module):
    """The numbers of a layer's operands, which its calls add to while the flag is true.

    They move with the model and are none of its buffers: DistributedDataParallel would overwrite
    them with those of rank 0. They are buffers of a module in no tree, which torch.compile takes to
    stay in place. A copy of the layer has other numbers and another flag.

    The forward and the backward have a tensor each, [2 * weights, parts, E, 14]: AOTAutograd takes
    none that both write. The first has each weight's input and the weight, the second its
    columnwise input and the gradient of its output. ``recipes`` are those of the layer's calls,
    which a compiled call then finds.
    """

    def __init__(
        self,
        weights: tuple[str, ...],
        num_groups: int,
        device: Device,
        recipes: Iterable[Recipe | None] = (),
    ) -> None:
        super().__init__()
        self.weights, self.num_groups = weights, num_groups
        self._counts: Any
        counts = vars(self)["_counts"] = nn.Module()
        counts.rows = 4  # type: ignore[assignment]
        with torch.inference_mode(False):
            for name in ("forward_stats", "backward_stats"):
                shape = 2 * len(weights), PARTS, num_groups, WATCH_COLUMNS
                stats = torch.zeros(shape, dtype=torch.float64, device=device)
                counts.register_buffer(name, stats, persistent=False)
            turn = torch.zeros((), dtype=torch.int32, device=device)
            counts.register_buffer("turn", turn, persistent=False)
        self._recipes: list[tuple[Recipe | None, int, Recipe]] = []
        for recipe in recipes:
            for number in range(len(weights)):
                self.recipe(recipe, number)

    def recipe(self, recipe: Recipe | None, number: int) -> Recipe:
        """A recipe of the same numbers whose formats count, for the layer's weight of a number."""
        for given, of_weight, made in self._recipes:
            if given is recipe and of_weight == number:
                return made
        plain, operand = UNQUANTIZED if recipe is None else recipe, (self._counts, number)
        made = Recipe(
            replace(plain.input, watched=WatchedOperand(*operand)),
            replace(plain.weight, watched=WatchedOperand(*operand)),
            replace(plain.grad_output, watched=WatchedOperand(*operand, True)),
            requantize_weights=plain.requantize_weights,
        )
        if not torch.compiler.is_compiling():
            self._recipes.append((recipe, number, made))
        return made

    @property
    def rows(self) -> int | None:
        """How many rows of each group a call reads; None for all."""
        return None if self._counts.rows == ALL else self._counts.rows

    @rows.setter
    def rows(self, rows: int | None) -> None:
        self._counts.rows = ALL if rows is None else min(rows, ALL)

    @property
    def turn(self) -> Tensor:
        """The flag, an int32 on the device: 0 counts nothing, others say which rows are read."""
        return self._counts.turn

    @torch.no_grad()
    def switch(self, turn: int) -> None:
        """Set the flag, which captured graphs read."""
        self._counts.turn.fill_(turn)

    @torch.no_grad()
    def read(self, reset: bool = True) -> Tensor:
        """[weights, 3, E, 14] float64 on the device: of each weight, role and group."""
        both = self._counts.forward_stats, self._counts.backward_stats
        forward, backward = (_whole(t).unflatten(0, (-1, 2)) for t in both)
        read = torch.cat([forward, backward[:, 1:]], dim=1)
        read[:, 0] += backward[:, 0]  # where wgrad's columns share scales
        if reset:
            self.reset()
        return read

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the numbers."""
        self._counts.forward_stats.zero_()
        self._counts.backward_stats.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WatchedLayer":
        """Follow the model to another device, but keep each dtype."""
        was_meta = self.turn.is_meta

        def keep_dtype(t: Tensor) -> Tensor:
            there = fn(t)
            return there if there.dtype == t.dtype else t.to(there.device)

        with torch.inference_mode(False), torch.no_grad():
            self._counts._apply(keep_dtype)
            if was_meta and not self.turn.is_meta:
                self.reset()
                self.switch(0)
        return self


def _whole(stats: Tensor) -> Tensor:
    """[operands, E, 14] of all parts."""
    whole, maxima = stats.sum(1), list(map(COLUMNS.index, MAXIMA))
    whole[..., maxima] = stats[..., maxima].amax(1)
    return whole
