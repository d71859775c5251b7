"""What delayed scaling remembers from step to step, and its update.

E groups, H steps of history.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.recipes import DelayedScaling, QuantizerState


class OperandState(nn.Module):
    """The scales of one operand, and what the next ones follow from.

    Attributes:
        scale: [E] float32, what quantized numbers are multiplied by. Forward and backward only read
            it.
        amax: [E] float32, the largest magnitude of each group since the last update; infinity where
            one was not finite.
        amax_history: [H, E] float32, the largest magnitudes of the last steps, the latest first;
            0 for a step that had none or was not finite.
    """

    scale: Tensor
    amax: Tensor
    amax_history: Tensor

    def __init__(
        self,
        num_groups: int,
        history_len: int,
        fp8_dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.fp8_max = torch.finfo(fp8_dtype).max
        like: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.register_buffer("scale", torch.empty(num_groups, **like))
        self.register_buffer("amax", torch.empty(num_groups, **like))
        self.register_buffer("amax_history", torch.empty(history_len, num_groups, **like))

    def reset(self) -> None:
        """Forget everything: scales of 1, no history."""
        self.scale.fill_(1)
        self.amax.zero_()
        self.amax_history.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OperandState":
        """Follow the model to another device, but not to another dtype: scales stay float32.

        What leaves the meta device had no values; a checkpoint may have none either.
        """
        was_meta = self.scale.is_meta

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)
        if was_meta and not self.scale.is_meta:
            self.reset()
        return self


class DelayedScalingState(nn.Module):
    """What a layer under ``DelayedScaling`` remembers of x, its weight and dy.

    ``GroupedLinear`` has one as its ``scaling_state``, saved with its parameters. With the function
    :func:`grouped_linear.grouped_linear` make one yourself, a layer each.

    Args:
        recipe: whose history length, margin and algorithm it follows.
        num_groups: E.
        device: of the buffers.

    Attributes:
        x: see :class:`OperandState`.
        weight: see :class:`OperandState`.
        dy: see :class:`OperandState`.

    >>> state = DelayedScalingState(DelayedScaling(amax_history_len=16), num_groups=4)
    >>> state.x.scale, state.dy.amax_history.shape
    (tensor([1., 1., 1., 1.]), torch.Size([16, 4]))
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        num_groups: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        steps = recipe.amax_history_len
        self.x = OperandState(num_groups, steps, E4M3, device)
        self.weight = OperandState(num_groups, steps, E4M3, device)
        self.dy = OperandState(num_groups, steps, torch.float8_e5m2, device)
        self.reset()

    @property
    def operands(self) -> tuple[OperandState, OperandState, OperandState]:
        """The states of x, weight and dy."""
        return self.x, self.weight, self.dy

    def reset(self) -> None:
        """Forget everything: scales of 1, no history."""
        for operand in self.operands:
            operand.reset()

    def slots(self) -> tuple[QuantizerState, QuantizerState, QuantizerState]:
        """What a call of the layer reads and raises; nothing is learnt without gradients."""
        learning = torch.is_grad_enabled()
        x, weight, dy = (
            QuantizerState(operand.scale, operand.amax if learning else None)
            for operand in self.operands
        )
        return x, weight, dy


def _check_keeps_amaxes(parallel: DistributedDataParallel) -> None:
    if dist.get_world_size(parallel.process_group) == 1 or not parallel.will_sync_module_buffers():
        return
    sent = {id(buffer) for buffer in parallel.modules_buffers}
    if any(isinstance(m, OperandState) and id(m.amax) in sent for m in parallel.modules()):
        raise RuntimeError(
            "update_scales: DistributedDataParallel sends rank 0's amaxes to every process before "
            "a forward, over what those have seen: make it with broadcast_buffers=False"
        )


@torch.no_grad()
def update_scales(model: nn.Module, group: "dist.ProcessGroup | None" = None) -> None:
    """Roll the scales of every delayed-scaling layer in a model: once a step, after backward.

    One op for all layers that share a margin and an algorithm; a model without such layers is left
    alone.

    Args:
        model: any module; its layers and other :class:`DelayedScalingState` inside it are updated.
        group: processes that hold the same experts and must agree on their scales: each amax
            becomes the largest of theirs first, with one all-reduce. None for this process alone.

    Raises:
        RuntimeError: if the model is a DistributedDataParallel that writes rank 0's amaxes over the
            others'; make it with ``broadcast_buffers=False``.

    >>> from grouped_linear import GroupedLinear
    >>> layer = GroupedLinear(2, 16, 32, recipe=DelayedScaling())
    >>> layer(torch.ones(5, 16), [2, 3]).sum().backward()
    >>> update_scales(layer)
    >>> layer.scaling_state.x.scale * 448
    tensor([1., 1.])
    """
    by_rule: dict[tuple[torch.device, int, str], list[OperandState]] = defaultdict(list)
    for state in model.modules():
        if isinstance(state, DistributedDataParallel):
            _check_keeps_amaxes(state)
        if isinstance(state, DelayedScalingState):
            rule = (state.x.scale.device, state.recipe.margin, state.recipe.amax_compute_algo)
            by_rule[rule] += state.operands
    for (_, margin, algorithm), operands in by_rule.items():
        amax = [operand.amax for operand in operands]
        if group is not None:
            flat = torch.cat(amax)
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
            for slot, largest in zip(amax, flat.split([len(a) for a in amax]), strict=True):
                slot.copy_(largest)
        ops.update_scales_(
            [operand.scale for operand in operands],
            amax,
            [operand.amax_history for operand in operands],
            [operand.fp8_max for operand in operands],
            margin=margin,
            most_recent=algorithm == "most_recent",
        )
