"""What a watched layer keeps: the numbers that it counts, and a flag on the device.

E groups (experts).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.autograd.watched import Watched
from grouped_linear.meta_kernels.watch import COLUMNS, MAXIMA, WATCH_COLUMNS

#: What a linear layer multiplies, as a recipe names it, in the order of :meth:`WatchedLayer.read`.
ROLES = ("input", "weight", "grad_output")


#: Thread blocks of each group: one alone takes longer than the layer has time for.
PARTS = 4
#: Where all rows are read.
ALL = 2**31 - 1


class WatchedLayer(nn.Module):
    """The numbers of a layer's operands, which its calls add to while the flag is true.

    They move with the model and are none of its buffers: DistributedDataParallel would overwrite
    them with those of rank 0. A copy of the layer has numbers and a flag of its own.

    Args:
        weights: the names of the layer's weights.
        num_groups: E.
        device: of the layer's parameters.

    Attributes:
        rows: how many rows of each group a call reads; None for all.
    """

    rows: int | None = 4

    _numbers: "_Numbers"

    def __init__(
        self, weights: tuple[str, ...], num_groups: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.weights, self.num_groups = weights, num_groups
        with torch.inference_mode(False):  # in no tree of modules
            vars(self)["_numbers"] = _Numbers(len(weights), num_groups, device)

    @property
    def turn(self) -> Tensor:
        """The flag, an int32 on the device: 0 counts nothing, others say which rows are read."""
        return self._numbers.turn

    def of_call(self, weight: int = 0) -> Watched:
        """What the call of one of the linear layers adds to."""
        numbers = self._numbers
        rows = ALL if self.rows is None else min(self.rows, ALL)
        both = numbers.forward_stats, numbers.backward_stats
        return Watched(*both, numbers.turn, rows, weight)

    @torch.no_grad()
    def switch(self, turn: int) -> None:
        """Set the flag, which captured graphs read."""
        self._numbers.turn.fill_(turn)

    @torch.no_grad()
    def read(self, reset: bool = True) -> Tensor:
        """[weights, 3, E, 14] float64 on the device: of each weight, role and group."""
        numbers = self._numbers
        both = numbers.forward_stats, numbers.backward_stats
        forward, backward = (_whole(t).unflatten(0, (-1, 2)) for t in both)
        read = torch.cat([forward, backward[:, 1:]], dim=1)
        read[:, 0] += backward[:, 0]  # where wgrad's columns share scales
        if reset:
            self.reset()
        return read

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the numbers."""
        self._numbers.forward_stats.zero_()
        self._numbers.backward_stats.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WatchedLayer":
        """Follow the model to another device, but keep each dtype."""
        was_meta = self.turn.is_meta

        def keep_dtype(t: Tensor) -> Tensor:
            there = fn(t)
            return there if there.dtype == t.dtype else t.to(there.device)

        with torch.inference_mode(False), torch.no_grad():
            self._numbers._apply(keep_dtype)
            if was_meta and not self.turn.is_meta:
                self.reset()
                self.switch(0)
        return self


def _whole(stats: Tensor) -> Tensor:
    """[operands, E, 14] of all parts."""
    whole, maxima = stats.sum(1), list(map(COLUMNS.index, MAXIMA))
    whole[..., maxima] = stats[..., maxima].amax(1)
    return whole


class _Numbers(nn.Module):
    """The tensors. They are buffers, which torch.compile takes to stay in place."""

    forward_stats: Tensor
    backward_stats: Tensor
    turn: Tensor

    def __init__(self, weights: int, num_groups: int, device: torch.device | str | None) -> None:
        super().__init__()
        like: dict[str, Any] = {"dtype": torch.float64, "device": device}
        for name in ("forward_stats", "backward_stats"):
            t = torch.zeros(2 * weights, PARTS, num_groups, WATCH_COLUMNS, **like)
            self.register_buffer(name, t, persistent=False)
        self.register_buffer("turn", torch.zeros((), dtype=torch.int32, device=device), False)
