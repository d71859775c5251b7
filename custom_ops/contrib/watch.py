# SPDX-License-Identifier: Apache-2.0
"""watch: count what FP8 does to a model's layers while it trains, compiled or not.

E groups (experts), K in_features, N out_features.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grouped_linear.contrib.watch_counts import MAXIMA, WatchedLayer
from grouped_linear.contrib.watch_statistics import (
    READ_COLUMNS,
    Load,
    Statistics,
    statistics_of_layer,
)
from grouped_linear.integrations.experts import Experts, experts_of
from grouped_linear.integrations.torchtitan import as_matrices
from grouped_linear.integrations.wrappers import named_unwrapped, sizes_before_fsdp
from grouped_linear.meta_kernels.rules import ceil_div
from grouped_linear.nn.checks import check_model
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.grouped_layer import GroupedLayer
from grouped_linear.ops.constants import is_integer
from grouped_linear.quantized.gathered import GatheredWeight
from grouped_linear.quantized.keep import is_dtensor, local_part
from grouped_linear.recipes import DelayedScalingState
from grouped_linear.recipes.recipe import ROLES

#: The most rows, and columns, of each expert's weight that are compared with the reading before.
MOVED_ROWS, MOVED_COLUMNS = 8, 256

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
        check_model("watch", model)
        for name, given in (("every", every), ("rows", 1 if rows is None else rows)):
            if not is_integer(given) or given < 1:
                raise ValueError(f"watch: {name} must be a positive integer, got {given!r}")
        if not (to is None or callable(to)):
            raise ValueError(f"watch: to must be a function, got {type(to).__name__}")
        self.every, self.to, self.steps, self._is_on = every, to, 0, True
        found = {name: experts_of(module) for name, module in named_unwrapped(model)}
        watched = {name: e for name, e in found.items() if e is not None and e.computed_here}
        if not watched:
            raise ValueError(
                f"watch: {type(model).__name__} has no GroupedLinear, no GroupedMLP and no "
                "experts that convert has converted"
            )
        taken = {id(module) for other in _watching for module in other._modules.values()}
        for name, e in watched.items():
            if id(e.module) in taken:
                raise ValueError(
                    f"watch: {name or type(model).__name__} is watched already: read that Watch, "
                    "or call its remove()"
                )
        sizes = sizes_before_fsdp(model)
        spread = {
            name: _spread(f"watch: {name or type(model).__name__}", e, sizes)
            for name, e in watched.items()
        }
        self._ranks = {name: ranks for name, (_, ranks) in spread.items()}
        self._modules: dict[str, Any] = {name: e.module for name, e in watched.items()}
        _watching.add(self)
        for (name, module), experts in zip(self._modules.items(), watched.values(), strict=True):
            recipes = [experts.recipe]  # those of all its calls
            for state in module.modules():
                if isinstance(state, DelayedScalingState):
                    recipes += state.recipes
            device, (E, _) = next(module.parameters()).device, spread[name]
            module.observed = WatchedLayer(experts.weights, E, device, rows, recipes)
        self.layers: dict[str, WatchedLayer] = {n: m.observed for n, m in self._modules.items()}
        self._before: dict[str, Tensor] = {}
        for name in self.layers:
            list(self._moved(name, True))  # looks at the weights
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
        ranks = set() if group is None else set(dist.get_process_group_ranks(group))
        for name, of_experts in self._ranks.items():
            if len(ranks.intersection(of_experts)) > 1:
                raise ValueError(
                    f"watch: read: experts of {name or 'the model'} are spread over processes of "
                    "this group: give it those that hold the same experts, or no group"
                )
        on_host = _to_host({name: self._numbers_of(name, reset) for name in self.layers}, group)
        experts, operands, loads = [], [], []
        for name, of_module in on_host.items():
            for weight, of_weight in zip(self.layers[name].weights, of_module, strict=True):
                layer = f"{name}.{weight}" if name else weight
                for role, numbers_ES in zip(ROLES, of_weight, strict=True):
                    if not numbers_ES.any():
                        continue
                    together, of_each = statistics_of_layer(layer, role, numbers_ES)
                    operands.append(together)
                    experts += of_each
            rows_E = of_module[0, 0, :, READ_COLUMNS.index("rows")]
            dropped = of_module[0, 0, :, READ_COLUMNS.index("dropped")].sum()
            tokens = tuple(map(round, rows_E.tolist()))
            loads.append(Load(name or "the model", tokens, round(dropped.item())))
        return Statistics(tuple(experts), tuple(operands), tuple(loads), self.steps)

    def remove(self) -> None:
        """Stop watching: the layers compute, compile and cost what they did before."""
        if self in _watching:  # another may watch them since
            for module in self._modules.values():
                # The attribute is no module again, so graphs from before the watch fit again.
                del module.observed
                if isinstance(module, GroupedLayer):
                    module.observed = None
        _watching.discard(self)

    def trainer_callback(self) -> Any:
        """A callback for transformers' Trainer that calls :meth:`step` after each step."""
        from transformers import TrainerCallback

        watch = self

        class WatchCallback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                watch.step()

        return WatchCallback()

    def _numbers_of(self, name: str, reset: bool) -> Tensor:
        """[weights, 3, E, READ_COLUMNS] on the device."""
        layer = self.layers[name]
        counted = layer.read(reset)
        read = counted.new_zeros(*counted.shape[:3], len(READ_COLUMNS))
        read[..., : counted.size(3)] = counted
        for i, moved in enumerate(self._moved(name, reset)):
            if moved is not None and len(moved) == counted.size(2):
                read[i, ROLES.index("weight"), :, -2:] = moved
        return read

    def _moved(self, name: str, remember: bool) -> Any:
        """For each weight [E, 2]: numbers that differ from those remembered, and all; or None."""
        module = self._modules[name]
        for weight in self.layers[name].weights:
            key = f"{name}.{weight}"
            now, before = _looked_at(getattr(module, weight, None)), self._before.get(key)
            if remember and now is not None:
                self._before[key] = now
            if now is None or before is None or before.shape != now.shape:
                yield None
                continue
            changed = (now != before.to(now.device)).flatten(1).double().sum(1)
            yield torch.stack([changed, torch.full_like(changed, now.shape[1:].numel())], dim=1)


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    rows: int | None = 4,
    to: Callable[[Statistics], Any] | None = None,
) -> Watch:
    """Count what FP8 does to each layer, role and expert of a model, on the device.

    Of each layer's input, weight and gradient, for each expert: tokens, the largest magnitude, the
    shares of numbers that became zero, saturated or are not finite, the error of quantization, how
    often wgrad's columns share scales; how many rows the router sent to it, and how many were
    dropped.

    The layers get torch operations that read 4 rows of each expert, whatever their number, and
    others in the next step. A flag on the device keeps or drops what they count: no host read, no
    graph break, no recompilation, and CUDA graphs obey the flag. Results keep every bit. Watch a
    model before it is compiled or captured, before or after ``fully_shard``.

    Args:
        model: with :class:`GroupedLinear`, :class:`GroupedMLP` or experts that :func:`convert` has
            converted.
        every: count in every so many steps, as :meth:`Watch.step` counts them.
        rows: of each expert the sample in a call: so many rows, 128 times as many rows of scales.
            None reads all, which takes longer.
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


def _spread(
    where: str, experts: Experts, before_fsdp: Mapping[tuple[nn.Module, str], torch.Size]
) -> tuple[int, Sequence[int]]:
    """How many experts a call has on this process, and the processes over which all are spread.

    FSDP2 spreads none: it gathers the weights before a call.
    """
    module, name = experts.module, experts.weights[0]
    dispatcher = getattr(module, "dispatcher", None)
    if isinstance(dispatcher, TokenDispatcher):
        return experts.num_experts, dispatcher.ranks
    w: Any = getattr(module, name, None)
    E = experts.num_experts
    is_flat = experts.library == "torchtitan" and local_part(w).dim() < 3
    if is_flat or (name in vars(module) and w._is_view()):  # with use_orig_params, and without
        raise ValueError(
            f"{where} has flat parameters, as FullyShardedDataParallel makes them: watch before, "
            "or shard by fully_shard"
        )
    if experts.library != "transformers" and (module, name) in before_fsdp:
        E = before_fsdp[module, name][0]
    if not is_dtensor(w):
        return E, ()
    mesh, parts, ranks = w.device_mesh, ceil_div(w.size(0), max(E, 1)), []
    for i in reversed(range(mesh.ndim)):  # FSDP2 puts its dimensions before those of the experts
        if parts > 1 and w.placements[i].is_shard(0):
            parts //= mesh.size(i)
            ranks += dist.get_process_group_ranks(mesh.get_group(i))
    return E, ranks


def _looked_at(weight: Any) -> Tensor | None:
    """Some numbers of a weight, as an optimizer steps them: [E, rows, columns]; None if frozen."""
    w = local_part(weight)
    if not isinstance(w, Tensor) or w.dim() not in (3, 4) or w.is_meta:
        return None
    if isinstance(w, GatheredWeight) or not weight.requires_grad:
        # FSDP2 has the numbers in shards; a frozen weight does not move.
        return None
    w = as_matrices(w)
    _, N, K = w.shape
    n, k = slice(None, None, -(-N // MOVED_ROWS)), slice(None, None, -(-K // MOVED_COLUMNS))
    return w[:, n, k].detach().clone()


def _to_host(numbers: dict[str, Tensor], group: "dist.ProcessGroup | None") -> dict[str, Tensor]:
    """These tensors on the CPU, in one copy; of a group sums and maxima, in two all-reduces."""
    parts = [t.flatten(0, -2) for t in numbers.values()]
    flat = torch.cat([part.to(parts[0].device) for part in parts])
    if group is not None:
        maxima = list(map(READ_COLUMNS.index, MAXIMA))
        largest = flat[:, maxima].contiguous()
        dist.all_reduce(flat, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        flat[:, maxima] = largest
    split = flat.cpu().split(list(map(len, parts)))
    return {n: t.view(like.shape) for (n, like), t in zip(numbers.items(), split, strict=True)}
