# SPDX-License-Identifier: Apache-2.0
"""FP8 with scales from earlier steps: the recipe, its state, and the state's update.

T rows, E groups, K in_features, N out_features, H steps of history.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import E4M3, MAX_MARGIN
from grouped_linear.ops.constants import is_integer
from grouped_linear.recipes.format import Device, Format, check_model, check_num_groups
from grouped_linear.recipes.recipe import Recipe, check_is_recipe

E5M2 = torch.float8_e5m2


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """FP8 GEMMs with one float32 scale a group, from the amax of earlier steps.

    Quantization is one pass: its scale is known before, and it records the amax of what it reads.
    Activations and weights are e4m3, gradients e5m2 (HYBRID). For each operand (x, weight, dy) and
    group a :class:`grouped_linear.recipes.DelayedScalingState` holds the scale, the amax since the
    last update and a history of amaxes. Scales change only in :func:`grouped_linear.update_scales`,
    called once a step for the whole model, after the last backward::

        amax = the history's largest ("max"), or the last step's ("most_recent")
        scale = 1 / clamp(fp8_max / amax / 2 ** margin, 2 ** -126, 2 ** 126)

    The scale stays where an amax is zero (a group without tokens) or not finite (a step that
    diverged). A group's scale is 0 until an update sets it. Till then a call scales the group by
    its own amax, as :class:`grouped_linear.Float8CurrentScaling` does; the device decides that.

    Args:
        margin: how many powers of two to stay below the format's largest number; 0 to 64.
        amax_history_len: steps in the history.
        amax_compute_algo: ``"max"`` or ``"most_recent"``.

    Raises:
        ValueError: for an option out of range.

    >>> DelayedScaling(amax_history_len=16)
    DelayedScaling(amax_history_len=16)
    """

    input: Format = field(init=False, compare=False, default=Format(E4M3, "delayed"))
    weight: Format = field(init=False, compare=False, default=Format(E4M3, "delayed"))
    grad_output: Format = field(init=False, compare=False, default=Format(E5M2, "delayed"))
    requantize_weights: bool = field(init=False, default=False)
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        for name in ("margin", "amax_history_len"):
            number = getattr(self, name)
            if not is_integer(number):
                raise ValueError(f"DelayedScaling: {name} must be an integer, got {number!r}")
        if not 0 <= self.margin <= MAX_MARGIN:
            raise ValueError(
                f"DelayedScaling: margin must be between 0 and {MAX_MARGIN}, got {self.margin}"
            )
        if self.amax_history_len < 1:
            raise ValueError(
                f"DelayedScaling: amax_history_len must be positive, got {self.amax_history_len}"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                "DelayedScaling: amax_compute_algo must be 'max' or 'most_recent', "
                f"got {self.amax_compute_algo!r}"
            )
        super().__post_init__()


class OperandState(nn.Module):
    """The scales of one operand, and the amaxes that the next scales are computed from.

    Attributes:
        scale: [E] float32, multiplies quantized values to dequantize them; 0 where no step was seen
            yet. Forward and backward only read it.
        amax: [E] float32, the largest magnitudes since the last update; infinity if not finite.
        amax_history: [H, E] float32, those of the last steps, the latest first; 0 for a step
            without one or with one that was not finite.
    """

    scale: Tensor
    amax: Tensor
    amax_history: Tensor

    def __init__(
        self, num_groups: int, history_len: int, fp8_dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        self.fp8_max = torch.finfo(fp8_dtype).max
        like: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.register_buffer("scale", torch.empty(num_groups, **like))
        self.register_buffer("amax", torch.empty(num_groups, **like))
        self.register_buffer("amax_history", torch.empty(history_len, num_groups, **like))

    def reset(self) -> None:
        """Forget the scales and the history."""
        self.scale.zero_()
        self.amax.zero_()
        self.amax_history.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OperandState":
        """Follow the model to another device, but not to another dtype: scales stay float32.

        Buffers that leave the meta device had no values, and a checkpoint may not have them either:
        they become zero, one by one, since others of a state may have been loaded.
        """

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            moved = moved if moved.dtype == t.dtype else t.to(moved.device)
            return moved.zero_() if t.is_meta else moved

        super()._apply(keep_dtype, recurse)
        return self


class DelayedScalingState(nn.Module):
    """The scales and amaxes of x, the weight and dy of a layer under ``DelayedScaling``.

    ``GroupedLinear`` has one as its ``weight_state``, saved with its parameters. With the function
    :func:`grouped_linear.grouped_linear` make one for each layer yourself.

    Args:
        recipe: gives the history's length, the margin and the algorithm.
        num_groups: E.
        device: of the buffers.

    Raises:
        ValueError: for another recipe, and for numbers of groups that no op takes.

    Attributes:
        x, weight, dy: see :class:`OperandState`.

    >>> state = DelayedScalingState(DelayedScaling(amax_history_len=16), num_groups=4)
    >>> state.x.scale, state.dy.amax_history.shape
    (tensor([0., 0., 0., 0.]), torch.Size([16, 4]))
    """

    def __init__(
        self, recipe: DelayedScaling, num_groups: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        check_is_recipe("DelayedScalingState", recipe)
        if not isinstance(recipe, DelayedScaling):
            raise ValueError(f"DelayedScalingState: recipe must be DelayedScaling, got {recipe!r}")
        check_num_groups("DelayedScalingState", "num_groups", num_groups)
        self.recipe = recipe
        steps = recipe.amax_history_len
        self.x = OperandState(num_groups, steps, E4M3, device)
        self.weight = OperandState(num_groups, steps, E4M3, device)
        self.dy = OperandState(num_groups, steps, E5M2, device)
        #: The three recipes that :meth:`of_call` chooses from.
        self.recipes = tuple(
            Recipe(
                replace(recipe.input, state=self.x, records=records),
                replace(recipe.weight, state=self.weight, records=of_weight),
                replace(recipe.grad_output, state=self.dy, records=records),
            )
            for records, of_weight in ((True, True), (False, True), (False, False))
        )
        self.reset()

    @property
    def operands(self) -> tuple[OperandState, OperandState, OperandState]:
        """The states of x, weight and dy."""
        return self.x, self.weight, self.dy

    def reset(self) -> None:
        """Forget the scales and the histories."""
        for operand in self.operands:
            operand.reset()

    def of_call(self, fills_cache: bool = False) -> Recipe:
        """The recipe with these scales; without gradients no amax is recorded.

        Only a weight that fills a cache has its amax recorded: calls with gradients read the cache.
        """
        recording, filling, reading = self.recipes
        if torch.is_grad_enabled():
            return recording
        return filling if fills_cache else reading


def new_state(recipe: Recipe | None, num_groups: int, device: Device) -> DelayedScalingState | None:
    """The state that a layer keeps from step to step; None under a recipe without one."""
    if recipe is None or not recipe.has_state:
        return None
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"{recipe!r}: only the recipe DelayedScaling says how the scales of 'delayed' formats "
            "are updated"
        )
    return DelayedScalingState(recipe, num_groups, device)


@torch.no_grad()
def update_scales(model: nn.Module, group: "dist.ProcessGroup | None" = None) -> None:
    """Update the scales of every delayed-scaling layer in a model: once a step, after backward.

    All layers that share a margin and an algorithm are updated by one op.

    Args:
        model: any module; every :class:`DelayedScalingState` inside it is updated.
        group: processes that hold the same experts and must agree on their scales. Each amax first
            becomes the largest of theirs, with one all-reduce. None for this process alone.

    Raises:
        RuntimeError: if the model is a DistributedDataParallel that overwrites every process's
            amaxes with rank 0's; construct it with ``broadcast_buffers=False``.
        TypeError: for what is no module, as a list of them.

    >>> from grouped_linear import GroupedLinear
    >>> layer = GroupedLinear(2, 16, 32, recipe=DelayedScaling())
    >>> layer(torch.ones(5, 16), [2, 3]).sum().backward()
    >>> update_scales(layer)
    >>> layer.weight_state.x.scale * 448
    tensor([1., 1.])
    """
    check_model("update_scales", model)
    by_rule: dict[tuple[torch.device, int, str], list[OperandState]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            copies = dist.get_world_size(module.process_group) > 1 and (
                module.will_sync_module_buffers()
            )
            sent = {id(buffer) for buffer in module.modules_buffers} if copies else ()
            if any(isinstance(m, OperandState) and id(m.amax) in sent for m in module.modules()):
                raise RuntimeError(
                    "update_scales: DistributedDataParallel overwrites all amaxes with rank 0's "
                    "before each forward: construct it with broadcast_buffers=False"
                )
        if isinstance(module, DelayedScalingState):
            recipe = module.recipe
            by_rule[module.x.scale.device, recipe.margin, recipe.amax_compute_algo] += (
                module.operands
            )
    for (_, margin, algorithm), operands in by_rule.items():
        amax = [operand.amax for operand in operands]
        if group is not None:
            flat = torch.cat(amax)
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
            for own, largest in zip(amax, flat.split([len(a) for a in amax]), strict=True):
                own.copy_(largest)
        ops.update_scales_(
            [operand.scale for operand in operands],
            amax,
            [operand.amax_history for operand in operands],
            [operand.fp8_max for operand in operands],
            margin=margin,
            most_recent=algorithm == "most_recent",
        )
