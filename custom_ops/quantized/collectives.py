"""What collectives do to a GroupedTensor: they move its bytes; dispatch.py refuses an all-reduce.

DistributedDataParallel makes all processes equal when it wraps a model: it concatenates many
parameters, flattened, to one tensor of their dtype, broadcasts that, and copies its parts back. A
quantized weight puts the bytes of q and the scales there, which are at most 1/64 more: an element
has at least two bytes. Dequantized numbers would be quantized again on every process.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from grouped_linear.quantized import block_math
from grouped_linear.quantized.dispatch import (
    aten,
    copy,
    count_write,
    experts_of,
    handles,
    join,
    run_collective,
)
from grouped_linear.quantized.tensor import GroupedTensor


def _caller(name: str) -> FrameType | None:
    """The call of one of torch's functions that led here, if any did.

    The arguments of an operation do not show what its caller does next.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == name and module.startswith("torch.distributed."):
            return frame
        frame = frame.f_back
    return None


def _synchronizes() -> bool:
    """Whether DistributedDataParallel is making processes equal."""
    return _caller("_sync_params_and_buffers") is not None


def _parts(t: GroupedTensor) -> list[Tensor]:
    """q and the scales as bytes."""
    return [part.view(-1).view(torch.uint8) for part in (t.q, t.scale)]


def _written(t: GroupedTensor) -> None:
    """After q and the scales were overwritten."""
    if t.q_t is not None:
        t.q_t.copy_(block_math.transposed(t.q))
    count_write(t)


@handles(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate weights; for DistributedDataParallel, their bytes."""
    if not _synchronizes():
        return join(func, args, kwargs)
    packed = []
    for t in args[0]:
        if isinstance(t, GroupedTensor):
            room = torch.zeros(t.numel(), dtype=t.dtype, device=t.device)
            sent = torch.cat(_parts(t))
            room.view(torch.uint8)[: len(sent)] = sent
            t = room
        packed.append(t)
    return func(packed, *args[1:], **kwargs)


@handles(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy; from DistributedDataParallel, the bytes of q and the scales."""
    to, source = args[:2]
    if isinstance(source, GroupedTensor) or not _synchronizes():
        return copy(func, args, kwargs)
    sent = source.reshape(-1).view(torch.uint8)
    first = 0
    for part in _parts(to):
        part.copy_(sent[first : first + len(part)])
        first += len(part)
    _written(to)
    return to


@handles(torch.ops.c10d.broadcast_.default)
def _broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send q and the scales. It waits for them, as q_t is computed from q."""
    tensors, *others = args
    for t in tensors:
        for part in _parts(t) if isinstance(t, GroupedTensor) else (t,):
            _, work = run_collective(func, ([part], *others), kwargs)
        if isinstance(t, GroupedTensor):
            _written(t)
    return tensors, work


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of experts.

    distribute_tensor is refused where it splits, which every process does. A refusal where one
    process sends would leave the others waiting. On the meta device nothing is sent.
    """
    frame = None if args[0].is_meta else _caller("_shard_tensor")
    if frame is not None and frame.f_locals.get("src_data_rank") is not None:
        raise NotImplementedError(
            "GroupedTensor: distribute_tensor cannot send a quantized tensor: pass "
            "src_data_rank=None, so that each process keeps its part of its own"
        )
    return experts_of(func, args, kwargs)
