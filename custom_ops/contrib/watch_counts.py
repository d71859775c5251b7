# SPDX-License-Identifier: Apache-2.0
"""The counts of `watch` for a layer: the observer of an operand, and the numbers that it adds to.

T rows, E groups (experts), K features, R rows that are read, B = 128.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grouped_linear import Format, Recipe, ops
from grouped_linear.contrib.layers import ROLES
from grouped_linear.recipes import Layouts, Operands
from grouped_linear.recipes.quantize import Gathered, SwigluGradOf, SwigluOf

B = 128
#: The numbers of each group and operand: maxima, then sums.
MAXIMA = ("amax", "scaled_amax")
SUMS = (
    "calls",
    "rows",  # of the group
    "numbers",  # that were read
    "compared",  # with what became of them, and both finite
    "underflow",  # zero, and was not
    "saturated",  # beyond the largest number of the format by more than half a step
    "not_finite",
    "error",  # the sum of squares of what quantization changed
    "square",  # the sum of squares
    "blocks",  # of 128 rows and 128 features, columnwise
    "shared",  # of them those with one scale
    "dropped",  # rows past a capacity
    "moved",  # of a weight, from one reading to the next; a Watch counts this
    "looked_at",  # for it
)
COLUMNS = (*MAXIMA, *SUMS)
FP8 = torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATIONS = torch.bfloat16, torch.float16, torch.float32
#: 2^32 times the golden ratio's fraction. Turns that go by it are far apart, and many are even.
GOLDEN = 2654435769


class Observer:
    """Counts one operand of a projection, in its role: the observer of a format.

    Sums have a fixed order: a group's rows are gathered, and each group is reduced by itself.
    """

    def __init__(self, counts: Any, number: int, role: str, format: Format) -> None:
        self.counts, self.role, self.format = counts, role, format
        self.operand = len(ROLES) * number + ROLES.index(role)

    def __call__(
        self, source: Any, made: Operands, offs_E: Tensor | None, layouts: Layouts | None
    ) -> None:
        """Add what this call shows; all of it is on the device, and of static shapes."""
        stats = self.counts.forward_stats
        if offs_E is None or layouts is None:
            self._add(stats, self._of_weight(source, made))
            return
        first_E = pad(offs_E[:-1], (1, 0))
        groups = first_E, offs_E - first_E
        if self.role == "grad_output":
            stats, now = self.counts.backward_stats, self._of_rows(source, made, offs_E, *groups)
        elif layouts.again:  # the forward has counted the rows
            stats, now = self.counts.backward_stats, self._of_columns(made, *groups)
        else:
            now = self._of_rows(source, made, offs_E, *groups) | self._of_columns(made, *groups)
            routed_E = getattr(getattr(source, "routing", None), "routed", None)
            if routed_E is not None:
                now["dropped"] = routed_E.diff(prepend=routed_E.new_zeros(1)) - groups[1]
        self._add(stats, now)

    def _add(self, stats: Tensor, now: dict[str, Tensor]) -> None:
        """Add to the experts of a call in [operands, E, columns] where the flag is set."""
        if not now:
            return
        E, n = len(next(iter(now.values()))), len(MAXIMA)
        zero_E = stats.new_zeros(E)
        of_columns = [now.get(name, zero_E).to(stats.dtype) for name in COLUMNS]
        now_ES = torch.where(self.counts.turn != 0, torch.stack(of_columns, dim=1), 0.0)
        stats[self.operand, :E, :n] = stats[self.operand, :E, :n].maximum(now_ES[:, :n])
        stats[self.operand, :E, n:] += now_ES[:, n:]

    def _spaced(
        self, first_E: Tensor, size_E: Tensor, most: int | None, total: int
    ) -> tuple[Tensor, Tensor]:
        """[E, most]: of each group one row in each of `most` equal spaces, as the turn says.

        Returned are their numbers among all, and whether there are so many. For None these are
        [1, total], and [E, total], whether each is of the group.
        """
        if most is None:
            i = torch.arange(total, device=size_E.device)[None]
            end_E = first_E + size_E
            return i, (i >= first_E[:, None]) & (i < end_E[:, None])
        i, n_E1 = torch.arange(most, device=size_E.device), size_E[:, None].long()
        count_E1 = n_E1.clamp(1, most)
        larger, width = n_E1 % count_E1, n_E1 // count_E1
        share = (self.counts.turn.long() - 1) * GOLDEN % 2**32
        at = i * width + torch.minimum(i, larger) + (share * (width + (i < larger)) >> 32)
        return (first_E[:, None] + at).clamp(0, total - 1), i < n_E1

    def _of_rows(
        self, source: Any, made: Operands, offs_E: Tensor, first_E: Tensor, size_E: Tensor
    ) -> dict[str, Tensor]:
        """Count what quantization does to some rows of each group."""
        now = {"calls": torch.ones_like(size_E), "rows": size_E}
        total = _number_of_rows(source)
        if total == 0:
            return now
        index, is_of = self._spaced(first_E, size_E, self.counts.rows, total)
        row, (q, scale) = index.flatten(), _quantized(made, self.format)
        before, scales, largest_E = _numbers(source, row), None, None
        if q is not None:
            at, q_TK = _places(made.rows, row, q.size(0)), q
            q = _select(q_TK, 0, at)
            if scale is not None and scale.dim() == 1:
                group = torch.searchsorted(offs_E, row.int(), right=True)
                scales = scale[group.clamp(max=len(offs_E) - 1), None]
                largest_E = _largest_of_groups(scale, q, is_of)
            elif scale is not None:
                scales = _of_features(scale.index_select(1, at).t(), q.size(1))
                most = None if self.counts.rows is None else B * self.counts.rows
                index, is_of_s = self._spaced(first_E, size_E, most, total)
                at = _places(made.rows, index.flatten(), q_TK.size(0))
                of_row = _largest(scale.index_select(1, at).t(), _select(q_TK, 0, at)).amax(1)
                largest_E = _by_group("amax", of_row, is_of_s)
        return now | _compared(before, q, scales, largest_E, is_of)

    def _of_weight(self, weights: tuple[Any, ...], made: Operands) -> dict[str, Tensor]:
        """The same for a weight. Without a tensor in high precision, measure q."""
        own: list[Any] = [getattr(w, "numbers", None if hasattr(w, "q") else w) for w in weights]
        # Without strides it has no memory and stands for one that FSDP2 gathered.
        is_known = all(w is not None and w.dtype in ACTIVATIONS and any(w.stride()) for w in own)
        q, scale = _quantized(made, self.format)
        if not is_known and q is None:
            return {}
        shape = weights[0].shape if q is None else q.shape
        E, N, K = shape if len(shape) == 3 else (len(own), *shape)  # one, or a tensor an expert
        size_1 = torch.full((1,), N, device=weights[0].device)
        rows, is_of = self._spaced(torch.zeros_like(size_1), size_1, self.counts.rows, N)
        row, is_of = rows[0], is_of.expand(E, -1)
        before, scales, largest_E = None, None, None
        if is_known:
            before = torch.cat([w.index_select(-2, row).flatten(0, -2) for w in own]).double()
        if self.format.stored_as == "mxfp4" and is_known:
            both: Any = made.rowwise, made.rowwise_scale  # the op takes sixteen rows at a time
            more = 0, 0, 0, -len(row) % 16
            codes, scale_RB = (pad(part.index_select(1, row), more) for part in both)
            q = ops.dequantize_mxfp4(codes, scale_RB)[:, : len(row)].flatten(0, 1)
        elif q is not None:
            q_ENK = q
            q = _select(q_ENK, 1, row).flatten(0, 1)
            if scale is not None and scale.dim() == 1:
                scales = scale.repeat_interleave(len(row))[:, None]
                largest_E = _largest_of_groups(scale, q, is_of)
            elif scale is not None:
                scales = _of_features(scale.index_select(1, row // B).flatten(0, 1), K)
                first = torch.arange(scale.size(1), device=scale.device) * B  # row of each block
                rows_RK = _select(q_ENK, 1, first).flatten(0, 1)
                largest_E = _largest(scale.flatten(0, 1), rows_RK).view(E, -1).amax(1)
        now = {"calls": size_1.new_ones(E), "rows": size_1.expand(E)}
        return now | _compared(before, q, scales, largest_E, is_of)

    def _of_columns(self, made: Operands, first_E: Tensor, size_E: Tensor) -> dict[str, Tensor]:
        """Where 128 features of columnwise data share their scale."""
        scale_t = made.columnwise_scale
        if not self.format.share_scales or scale_t is None or len(scale_t) == 0:
            return {}
        blocks_E = (size_E + B - 1) // B
        first_E = blocks_E.cumsum(0) - blocks_E
        index, is_of = self._spaced(first_E, blocks_E, self.counts.rows, len(scale_t))
        scale_RK = scale_t.index_select(0, index.flatten())
        K = scale_t.size(1)
        features = torch.arange(K, device=scale_t.device)
        same = scale_RK == scale_RK.index_select(1, features // B * B)
        shared = pad(same, (0, -K % B), value=True).unflatten(1, (-1, B)).all(-1).sum(1)
        blocks = torch.full_like(shared, -(-K // B))
        both = {"blocks": blocks, "shared": shared}
        return {name: _by_group(name, t, is_of) for name, t in both.items()}


def _number_of_rows(source: Any) -> int:
    if isinstance(source, Gathered):
        return source.routing.token.size(0)
    return (source.gate_up_RG if isinstance(source, SwigluOf | SwigluGradOf) else source).size(0)


def _places(rows_T: Tensor | None, index_R: Tensor, most: int) -> Tensor:
    """Where a GEMM that gathers finds these rows; past the last group numbers are unspecified."""
    return index_R if rows_T is None else rows_T.index_select(0, index_R).clamp(0, most - 1)


def _numbers(source: Any, index_R: Tensor) -> Tensor:
    """These rows before quantization, [R, K] float64, with the bits that were quantized."""
    one_group = torch.full((1,), index_R.size(0), dtype=torch.int32, device=index_R.device)
    if isinstance(source, Gathered):
        t = source.tokens_TH
        rows = t.index_select(0, _places(source.routing.token, index_R, t.size(0)))
    elif isinstance(source, SwigluOf):
        rows = ops.swiglu(source.gate_up_RG.index_select(0, index_R), one_group, source.form)
    elif isinstance(source, SwigluGradOf):
        dh, gate_up, weight = (t.index_select(0, index_R) for t in source[:3])
        rows = ops.swiglu_grad(dh, gate_up, weight, one_group, source.form).d_gate_up
    else:
        rows = source.index_select(0, index_R)
    return rows.double()


def _quantized(made: Operands, format: Format) -> tuple[Tensor | None, Tensor | None]:
    """The rowwise operand and its scales, where they differ from the numbers; else None."""
    q, scale = made.rowwise, made.rowwise_scale
    if format.changes_nothing or not isinstance(q, Tensor) or q.dtype not in (*ACTIVATIONS, *FP8):
        return None, None
    if scale is not None and scale.dtype != torch.float32:  # by a user's function
        return None, None
    return q, scale


def _select(q: Tensor, dim: int, index: Tensor) -> Tensor:
    """Some rows of numbers, which may be FP8."""
    if q.dtype not in FP8:
        return q.index_select(dim, index)
    return q.view(torch.uint8).index_select(dim, index).view(q.dtype)


def _of_features(scale_RB: Tensor, K: int) -> Tensor:
    """The scale of each number, from those of blocks of 128 features."""
    return scale_RB.index_select(1, torch.arange(K, device=scale_RB.device) // B)


def _is_number(q: Tensor) -> Tensor:
    """Whether FP8 numbers are other than 0."""
    return (q.view(torch.uint8) & 0x7F) != 0


def _largest(scale_RB: Tensor, q_RK: Tensor) -> Tensor:
    """The scales of blocks of FP8 numbers; 0 of zeros alone, whose scale is 1."""
    has_number = pad(_is_number(q_RK), (0, -q_RK.size(1) % B)).unflatten(1, (-1, B)).any(-1)
    return torch.where((scale_RB != 1) | has_number, scale_RB, 0)


def _largest_of_groups(scale_E: Tensor, q_RK: Tensor, is_of: Tensor) -> Tensor:
    """The scales of groups; 0 of zeros alone, and of no row."""
    counts = _by_group("amax", _is_number(q_RK).any(1), is_of) != 0
    return torch.where(counts | ((scale_E != 1) & is_of.any(1)), scale_E, 0)


def _compared(
    before: Tensor | None,
    q: Tensor | None,
    scales: Tensor | None,
    largest_E: Tensor | None,
    is_of: Tensor,
) -> dict[str, Tensor]:
    """Measure quantization of rows [R, K]. ``is_of`` [E, rows] says which are of each group."""
    after = None if q is None else q.double() if scales is None else q.double() * scales
    t: Any = after if before is None else before
    finite = t.isfinite() if after is None else t.isfinite() & after.isfinite()
    of_rows = {
        "numbers": torch.full_like(t[:, 0], t.size(1)),
        "not_finite": (~finite).sum(1),
        "amax": torch.where(finite, t.abs(), 0.0).amax(1),
    }
    if before is not None and after is not None:
        off = torch.where(finite, after - before, 0.0)
        of_rows |= {
            "compared": finite.sum(1),
            "underflow": (finite & (before != 0) & (after == 0)).sum(1),
            "error": off.square().sum(1),
            "square": torch.where(finite, before, 0.0).square().sum(1),
        }
    now = {}
    if q is not None and scales is not None and largest_E is not None:
        now["scaled_amax"] = largest_E.double() * torch.finfo(q.dtype).max
        if before is not None:
            # Half a step beyond the largest number, of 3 or of 2 bits of mantissa.
            beyond = 464.0 if q.dtype == torch.float8_e4m3fn else 61440.0
            of_rows["saturated"] = (finite & (before.abs() > beyond * scales.double())).sum(1)
    return now | {name: _by_group(name, t, is_of) for name, t in of_rows.items()}


def _by_group(name: str, t_R: Tensor, is_of: Tensor) -> Tensor:
    """[E] float64: the largest of each group's rows, or their sum."""
    now = torch.where(is_of, t_R.view(-1, is_of.size(1)).double(), 0.0)
    return now.amax(1) if name in MAXIMA else now.sum(1)


class WatchedLayer(nn.Module):
    """The numbers of a layer's operands, which its calls add to while the flag is true.

    It is a layer's ``observed`` and moves with it. Copies and pickles of the layer have None there.
    The numbers are none of its buffers: DistributedDataParallel would overwrite them with those of
    rank 0. They are buffers of a module in no tree, which torch.compile takes to stay in place.

    The forward and the backward have a tensor each, [weights * roles, E, columns]: AOTAutograd
    takes none that both write. A call reads ``rows`` of each group; None for all. ``recipes`` are
    those of the layer's calls, which a compiled call then finds.
    """

    def __init__(
        self,
        weights: tuple[str, ...],
        num_groups: int,
        device: torch.device,
        rows: int | None,
        recipes: Iterable[Recipe | None] = (),
    ) -> None:
        super().__init__()
        self.weights = weights
        self._counts: Any
        counts = vars(self)["_counts"] = nn.Module()
        counts.rows = rows  # type: ignore[assignment]
        shape = len(weights) * len(ROLES), num_groups, len(COLUMNS)
        with torch.inference_mode(False), torch.device(device):
            for name in ("forward_stats", "backward_stats"):
                counts.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
            counts.register_buffer("turn", torch.zeros((), dtype=torch.int32))
        self._turn = 0
        self._recipes: list[tuple[Recipe, str, Recipe]] = []
        for recipe in recipes:
            for name in weights:
                self.recipe(name, recipe or Recipe())

    def recipe(self, name: str, recipe: Recipe) -> Recipe:
        """A recipe of the same numbers whose formats count, for the layer's weight of a name."""
        for given, of_weight, made in self._recipes:
            if of_weight == name and (given is recipe or given == recipe):
                return made
        number = self.weights.index(name)
        observed = {
            role: replace(format, observer=Observer(self._counts, number, role, format))
            for role in ROLES
            for format in (getattr(recipe, role),)
        }
        made = Recipe(**observed, requantize_weights=recipe.requantize_weights)
        if not torch.compiler.is_compiling():
            self._recipes.append((recipe, name, made))
        return made

    @torch.no_grad()
    def switch(self, turn: int) -> None:
        """Set the flag, which captured graphs read: 0, or which of the rows a call reads."""
        self._turn = int(turn)
        self._counts.turn.fill_(self._turn)

    @torch.no_grad()
    def read(self, reset: bool = True) -> Tensor:
        """[weights, 3, E, columns] float64 on the device: of each weight, role and group."""
        read = self._counts.forward_stats + self._counts.backward_stats
        if reset:
            self.reset()
        return read.unflatten(0, (-1, len(ROLES)))

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the numbers."""
        self._counts.forward_stats.zero_()
        self._counts.backward_stats.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WatchedLayer":
        """Follow the model to another device, but keep each dtype and, of memory, each number."""

        def move(t: Tensor) -> Tensor:
            device = fn(t).device
            return torch.zeros_like(t, device=device) if t.is_meta else t.to(device)

        with torch.inference_mode(False), torch.no_grad():
            self._counts._apply(move)
            self.switch(self._turn)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a layer are not watched."""
        return type(None), ()
