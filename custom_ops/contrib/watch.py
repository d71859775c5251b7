# SPDX-License-Identifier: Apache-2.0
"""watch: count what FP8 does to a model's layers while it trains, compiled or not.

E groups (experts), K in_features, N out_features.
"""

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan, sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grouped_linear.contrib.layers import ROLES, check_positive, layers_of
from grouped_linear.contrib.watch_counts import COLUMNS, MAXIMA, WatchedLayer
from grouped_linear.integrations.convert import aligned
from grouped_linear.integrations.experts import Experts
from grouped_linear.parallel import TokenDispatcher
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import DelayedScalingState


class OperandStatistics(NamedTuple):
    """An operand of a layer's GEMMs, for one expert or for all. NaN: not counted.

    Shares and errors are of a sample: 4 rows of each expert in a call, or as many as ``watch`` was
    given, others in each step.
    """

    layer: str
    """The name of the weight in the model."""
    role: str
    """input, weight or grad_output."""
    expert: int | None
    """None for all of them together."""
    tokens: float
    """Rows of the expert, summed over the calls; of a weight its rows in one call."""
    amax: float
    """The largest magnitude that was read."""
    scaled_amax: float
    """The largest magnitude that the largest scale can stand for, of 128 times as many rows: at
    least the amax of a block, and up to twice that where scales are powers of two. Blocks of zeros
    alone, as of padding's gradients, count nothing."""
    outlier: float
    """The larger of both, divided by the root mean square of the numbers that were read: of
    normally distributed numbers below 15."""
    underflow: float
    """The share of numbers that became zero and were not."""
    saturated: float
    """The share beyond the largest number of the format."""
    not_finite: float
    """The share that is infinite or NaN, before quantization or after."""
    error: float
    """The mean square of quantization's changes, divided by that of the numbers."""
    shared: float
    """The share of wgrad's blocks of 128 x 128 whose columns share a scale."""
    moved: float
    """The share of a learning weight's numbers that changed since the reading before."""


class Load(NamedTuple):
    """The tokens that the router sent to a layer's experts."""

    layer: str
    tokens: tuple[int, ...]
    """Rows of each expert, summed over the calls."""
    dropped: int
    """Rows past ``max_rows``, or a dispatcher's capacity."""

    @property
    def imbalance(self) -> float:
        """The most loaded expert's tokens, divided by the mean; 1 is even."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else nan

    @property
    def idle(self) -> list[int]:
        """The experts without a token."""
        return [e for e, tokens in enumerate(self.tokens) if not tokens]


#: Columns of the table: how they are printed, and of which sum they are a share.
PRINTED = {
    "tokens": ("{:.0f}", None),
    "amax": ("{:.3g}", None),
    "scaled_amax": ("{:.3g}", None),
    "outlier": ("{:.3g}", None),
    "underflow": ("{:.2%}", "compared"),
    "saturated": ("{:.2%}", "compared"),
    "not_finite": ("{:.2%}", "numbers"),
    "error": ("{:.1e}", "square"),
    "shared": ("{:.0%}", "blocks"),
    "moved": ("{:.1%}", "looked_at"),
}


@dataclass(frozen=True)
class Statistics:
    """A reading of :class:`Watch`. ``print`` it, or write its rows, which are named tuples.

    Args:
        experts: of each layer, role and expert.
        operands: the same of all experts together.
        loads: of each layer.
        step: the number of the step at which it was read.
    """

    experts: tuple[OperandStatistics, ...]
    operands: tuple[OperandStatistics, ...]
    loads: tuple[Load, ...]
    step: int

    def worst(
        self, column: str = "outlier", role: str | None = None, n: int = 10
    ) -> list[OperandStatistics]:
        """The experts with the largest numbers of a column, the largest first."""
        found = [row for row in self.experts if role in (None, row.role)]
        found = [row for row in found if not isnan(getattr(row, column))]
        return sorted(found, key=lambda row: -getattr(row, column))[:n]

    def __str__(self) -> str:
        """A line for each layer and role, with the expert of the largest outlier; then loads."""
        lines = [["layer", "role", *PRINTED, "worst expert"]]
        for row in self.operands:
            of_experts = [r for r in self.experts if r[:2] == row[:2] and r.outlier > 0]
            worst = max(of_experts, key=lambda r: r.outlier, default=None)
            named = "" if worst is None else f"{worst.expert}: {worst.outlier:.3g}"
            values = ((form, getattr(row, column)) for column, (form, _) in PRINTED.items())
            printed = (form.format(v) if v == v else "" for form, v in values)  # NaN is not printed
            lines.append([row.layer, row.role, *printed, named])
        loads = [["layer", "tokens", "imbalance", "idle experts", "dropped"]]
        for load in self.loads:
            idle = ", ".join(map(str, load.idle[:8])) + ", ..." * (len(load.idle) > 8)
            total, imbalance = sum(load.tokens), f"{load.imbalance:.2f}"
            loads.append([load.layer, str(total), imbalance, idle or "none", str(load.dropped)])
        return "\n".join([f"step {self.step}", *aligned(lines), "", *aligned(loads)])


#: The most rows, and columns, of each expert's weight that are compared with the reading before.
MOVED_ROWS, MOVED_COLUMNS = 8, 256

CALLS = COLUMNS.index("calls")

#: A layer counts for one of these: another would reset its numbers and its flag.
_watching: "weakref.WeakSet[Watch]" = weakref.WeakSet()


class Watch:
    """The layers of a model that are watched; :func:`watch` makes one.

    Attributes:
        layers: the counts of each watched module, by the module's name in the model without
            wrappers, as PEFT's and torch.compile's.
        steps: how often :meth:`step` was called.
    """

    def __init__(self, model: nn.Module, every: int, rows: int | None, to: Any) -> None:
        check_positive("watch", every=every, rows=1 if rows is None else rows)
        if not (to is None or callable(to)):
            raise ValueError(f"watch: to must be a function, got {type(to).__name__}")
        self.every, self.to, self.steps, self._is_on = every, to, 0, True
        watched = layers_of("watch", model)
        taken = {e.module for other in _watching for e in other._experts.values()}
        for name, e in watched.items():
            if e.module in taken:
                raise ValueError(
                    f"watch: {name or type(model).__name__} is watched already: read that Watch, "
                    "or call its remove()"
                )
        self._experts: dict[str, Experts] = watched
        self.layers: dict[str, WatchedLayer] = {}
        for name, e in watched.items():
            states = [m for m in e.module.modules() if isinstance(m, DelayedScalingState)]
            recipes = [e.recipe, *(r for state in states for r in state.recipes)]  # of all calls
            # A call has all experts, or those of this process: its calls say how many.
            w = getattr(e.module, e.weights[0], None)
            E = w.size(0) if isinstance(w, Tensor) and w.dim() > 2 else e.num_experts
            device = next(e.module.parameters()).device
            self.layers[name] = WatchedLayer(e.weights, E, device, rows, recipes)
        _watching.add(self)  # nothing above has changed a layer
        for name, e in watched.items():
            e.module.observed = self.layers[name]
        self._before: dict[tuple[str, str], Tensor] = {}
        for name in self.layers:
            self._numbers_of(name, True)  # looks at the weights
        self.switch(True)

    def switch(self, on: bool) -> None:
        """Begin or stop counting, by a flag on the device that graphs read."""
        self._is_on = on
        self._begin_step()

    def step(self) -> Statistics | None:
        """End a step: read its counts, if it has some, and say whether the next step counts.

        Call it after the optimizer's step. The host waits for the device at every `every`-th step
        alone.

        Returns:
            The reading at such a step, None otherwise.
        """
        read = None
        if self.steps % self.every == 0:
            read = self.read()
            if self.to is not None:
                self.to(read)
        self.steps += 1
        if self.steps % self.every in (0, 1):
            self._begin_step()
        return read

    def _begin_step(self) -> None:
        """Set the flag: 0, or the turn of the rows that this step reads."""
        counts = self._is_on and self.steps % self.every == 0
        for layer in self.layers.values():
            layer.switch(1 + self.steps // self.every if counts else 0)

    @torch.no_grad()
    def read(self, group: "dist.ProcessGroup | None" = None, *, reset: bool = True) -> Statistics:
        """Read the counts since the last reading. The host waits for the device.

        Args:
            group: processes with the same experts, as those of data parallelism: their numbers
                are added up, their maxima taken, and all of them get the result. All must call it.
            reset: begin anew.

        Raises:
            ValueError: for a group over which experts are spread.
        """
        if group is not None:
            ranks = set(dist.get_process_group_ranks(group))
            counted = _to_host({n: layer.read(reset=False) for n, layer in self.layers.items()})
            for name, e in self._experts.items():
                if len(ranks.intersection(_spread_over(e, _num_experts(counted[name])))) > 1:
                    raise ValueError(
                        f"watch: read: experts of {name or 'the model'} are spread over processes "
                        "of this group: give it those that hold the same experts, or no group"
                    )
        on_host = _to_host({name: self._numbers_of(name, reset) for name in self.layers}, group)
        experts, operands, loads = [], [], []
        for name, numbers in on_host.items():
            E = _num_experts(numbers)
            moved = numbers[:, ROLES.index("weight"), :, -2:]
            moved *= moved.any(-1).sum(-1)[:, None, None] == E  # not of FSDP2's shards
            for weight, of_weight in zip(self.layers[name].weights, numbers[:, :, :E], strict=True):
                layer = f"{name}.{weight}" if name else weight
                for role, numbers_EC in zip(ROLES, of_weight, strict=True):
                    if not numbers_EC.any():
                        continue
                    total_C, n = numbers_EC.sum(0), len(MAXIMA)
                    total_C[:n] = numbers_EC[:, :n].amax(0)
                    total_C[CALLS] = numbers_EC[:, CALLS].amax()  # all experts are in each call
                    operands.append(_statistics(layer, role, None, total_C))
                    experts += [_statistics(layer, role, e, t) for e, t in enumerate(numbers_EC)]
            rows_E, dropped_E = (numbers[0, 0, :E, COLUMNS.index(c)] for c in ("rows", "dropped"))
            tokens = tuple(map(round, rows_E.tolist()))
            loads.append(Load(name or "the model", tokens, round(dropped_E.sum().item())))
        return Statistics(tuple(experts), tuple(operands), tuple(loads), self.steps)

    def remove(self) -> None:
        """Stop watching: the layers compute, compile and cost what they did before."""
        if self in _watching:  # another may watch them since
            for e in self._experts.values():
                # The attribute is no module again, so graphs from before the watch fit again.
                del e.module.observed
                if e.library == "grouped_linear":
                    e.module.observed = None
        _watching.discard(self)

    def trainer_callback(self) -> Any:
        """A callback for transformers' Trainer that calls :meth:`step` after each step."""
        from transformers import TrainerCallback

        def on_step_end(*args: Any, **kwargs: Any) -> None:
            self.step()

        return type("WatchCallback", (TrainerCallback,), {"on_step_end": on_step_end})()

    def _numbers_of(self, name: str, reset: bool) -> Tensor:
        """[weights, 3, E, COLUMNS] on the device: what was counted, and which numbers moved."""
        layer = self.layers[name]
        read = layer.read(reset)
        for i, weight in enumerate(layer.weights):
            now = _looked_at(self._experts[name].module, weight)
            before = self._before.get((name, weight))
            if reset and now is not None:
                self._before[name, weight] = now
            if now is not None and before is not None and before.shape == now.shape:
                changed_E = (now != before.to(now.device)).flatten(1).double().sum(1)
                both = torch.stack([changed_E, torch.full_like(changed_E, now[0].numel())], dim=1)
                read[i, ROLES.index("weight"), : len(now), -2:] = both
        return read


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    rows: int | None = 4,
    to: Callable[[Statistics], Any] | None = None,
) -> Watch:
    """Count what FP8 does to each layer, role and expert of a model, on the device.

    :class:`OperandStatistics` and :class:`Load` have the counts. The layers get torch operations
    that read 4 rows of each expert, and other rows in the next step. A flag on the device keeps or
    drops what they count: no host read, no graph break, no recompilation, and CUDA graphs obey the
    flag. Results keep every bit. Watch a model before it is compiled or captured, before or after
    ``fully_shard``.

    Args:
        model: with :class:`GroupedLinear`, :class:`GroupedMLP` or experts that :func:`convert` has
            converted.
        every: count in every so many steps, as :meth:`Watch.step` counts them.
        rows: how many rows of each expert a call reads; of scales it reads 128 times as many. None
            reads all, which takes longer.
        to: called with each reading, a :class:`Statistics`, as ``print``; or None.

    Raises:
        ValueError: for a model without such layers, or one of whose layers is watched already; for
            a wrong option.
        TypeError: if `model` is not a module.

    >>> from grouped_linear import Float8BlockScaling, GroupedMLP
    >>> model = GroupedMLP(4, 128, 256, recipe=Float8BlockScaling())
    >>> seen = watch(model)
    >>> x, scores = torch.randn(64, 128), torch.randn(64, 4).softmax(dim=-1)
    >>> model(x, *scores.topk(2)).sum().backward()
    >>> statistics = seen.step()
    >>> [(row.layer, row.role, row.underflow < 0.01) for row in statistics.operands[:2]]
    [('gate_up_proj', 'input', True), ('gate_up_proj', 'weight', True)]
    >>> sum(statistics.loads[0].tokens)
    128
    """
    return Watch(model, every, rows, to)


def _num_experts(numbers: Tensor) -> int:
    """How many experts the calls of a layer had, from what it counted; all without a call."""
    calls_E = numbers[..., CALLS].flatten(0, 1).amax(0)
    return int(calls_E.count_nonzero()) or len(calls_E)


def _spread_over(experts: Experts, E: int) -> Sequence[int]:
    """The processes over which a layer's experts are spread, of which calls have E.

    FSDP2 spreads none: it gathers the weights before a call.
    """
    dispatcher = getattr(experts.module, "dispatcher", None)
    if isinstance(dispatcher, TokenDispatcher):
        return dispatcher.ranks
    w: Any = getattr(experts.module, experts.weights[0], None)
    if not hasattr(w, "device_mesh"):
        return ()
    mesh, parts, ranks = w.device_mesh, -(-w.size(0) // E), []
    for i in reversed(range(mesh.ndim)):  # FSDP2 puts its dimensions before those of the experts
        if parts > 1 and w.placements[i].is_shard(0):
            parts //= mesh.size(i)
            ranks += dist.get_process_group_ranks(mesh.get_group(i))
    return ranks


def _local(w: Any) -> Any:
    """The part of a DTensor that this process has."""
    return w.to_local() if hasattr(w, "to_local") else w


def _looked_at(module: nn.Module, name: str) -> Tensor | None:
    """Some numbers of a weight, as an optimizer steps them: [E, rows, columns]; None if frozen."""
    own = module._parameters  # FullyShardedDataParallel leaves views of no memory beside them
    of_experts: list[Any] = [p for n, p in own.items() if re.fullmatch(rf"{name}\d+", n)]
    looked_at = []
    for weight in of_experts or [own.get(name)]:
        w: Any = _local(weight)
        if not isinstance(w, Tensor) or w.dim() < 2 or w.is_meta or not weight.requires_grad:
            return None
        if type(w) not in (Tensor, nn.Parameter, GroupedTensorWithMaster):  # FSDP2 has gathered it
            return None
        w = w.flatten(1, 2) if w.dim() == 4 else w  # torchtitan's w13 is [E, F, 2, D]
        n, k = -(-w.size(-2) // MOVED_ROWS) or 1, -(-w.size(-1) // MOVED_COLUMNS)  # 0: of a shard
        looked_at.append(w[..., ::n, ::k].detach().clone())
    return torch.stack(looked_at) if of_experts else looked_at[0]


def _to_host(
    numbers: dict[str, Tensor], group: "dist.ProcessGroup | None" = None
) -> dict[str, Tensor]:
    """These tensors on the CPU, in one copy; of a group sums and maxima, in two all-reduces."""
    parts = [t.flatten(0, -2) for t in numbers.values()]
    flat = torch.cat([part.to(parts[0].device) for part in parts])
    if group is not None:
        largest = flat[:, : len(MAXIMA)].contiguous()
        dist.all_reduce(flat, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        flat[:, : len(MAXIMA)] = largest
    split = flat.cpu().split(list(map(len, parts)))
    return {n: t.view(like.shape) for (n, like), t in zip(numbers.items(), split, strict=True)}


def _statistics(layer: str, role: str, expert: int | None, numbers: Tensor) -> OperandStatistics:
    """Of numbers in COLUMNS."""
    n = dict(zip(COLUMNS, numbers.tolist(), strict=True))
    largest = max(n["amax"], n["scaled_amax"])
    shares: Any = {c: n[c] / n[of] if n[of] else nan for c, (_, of) in PRINTED.items() if of}
    return OperandStatistics(
        layer=layer,
        role=role,
        expert=expert,
        tokens=n["rows"] / max(n["calls"], 1) if role == "weight" else n["rows"],
        amax=n["amax"] if n["numbers"] else nan,
        scaled_amax=n["scaled_amax"] or nan,
        outlier=largest * sqrt(n["compared"] / n["square"]) if n["square"] else nan,
        **shares,
    )
