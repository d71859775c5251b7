"""What collectives do to a GroupedTensor: they move its bytes.

A collective that only sends a tensor sends q and the scales. dispatch.py refuses one that computes
with its numbers, as an all-reduce does.

Two functions of torch make other tensors of a weight first, and send those:

- distribute_tensor splits it, pads the last parts, and receives in an empty tensor like the first
  part. What is made so of a part that ``split`` returned is quantized too.
- DistributedDataParallel makes all processes equal when it wraps a model: its C++ concatenates
  flattened parameters, broadcasts that, and copies slices of it back. Coalesced keeps the weights
  in it quantized: numbers would be quantized again on every process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grouped_linear.quantized import block_math
from grouped_linear.quantized.dispatch import aten, experts_of, handles, join, on_plain
from grouped_linear.quantized.operations import bound_arguments, count_write, run_collective
from grouped_linear.quantized.tensor import GroupedTensor

c10d = torch.ops.c10d


class Coalesced(Tensor):
    """Flattened tensors one after the other, the quantized ones as they are until something reads.

    torch's C++ passes by ``__torch_function__``; a broadcast from there sends the parts, and a
    slice is a part. Calls from Python read and write one plain tensor, which it then stays.
    """

    parts: list[Tensor]

    @staticmethod
    def __new__(cls: type["Coalesced"], tensors: Sequence[Tensor]) -> "Coalesced":
        """Copy flattened tensors; q_t is left out, as it is not sent."""
        size, of = sum(t.numel() for t in tensors), tensors[0]
        t: Any = Tensor._make_wrapper_subclass(cls, (size,), dtype=of.dtype, device=of.device)
        torch._C._set_throw_on_mutable_data_ptr(t)
        t.parts = [
            GroupedTensor(part.q.clone(), part.scale.clone(), None, part.metadata, part.shape)
            if isinstance(part, GroupedTensor)
            else part.clone()
            for part in tensors
        ]
        return t  # type: ignore[no-any-return]

    def plain(self) -> Tensor:
        """Its numbers, in memory that is this tensor's from now on."""
        if len(self.parts) > 1 or isinstance(self.parts[0], GroupedTensor):
            parts = [p.dequantize() if isinstance(p, GroupedTensor) else p for p in self.parts]
            self.parts = [torch.cat(parts)]
        return self.parts[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Coalesced, Coalesced.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is c10d.broadcast_.default:
            return _broadcast(func, args, kwargs or {})
        if func is aten.slice.Tensor:
            bound, first = bound_arguments(func, args, kwargs or {}), 0
            for part in args[0].parts:
                begin, first = first, first + part.numel()
                if (bound["start"], bound["end"], bound["step"]) == (begin, first, 1):
                    return aten.alias(part)
        return cls.__torch_function__(func, types, args, kwargs)


def _sent(t: Tensor) -> list[Tensor]:
    """What is sent of a tensor."""
    if isinstance(t, Coalesced):
        return [sent for part in t.parts for sent in _sent(part)]
    parts = [t.q, t.scale] if isinstance(t, GroupedTensor) else [t]
    return [part.view(-1).view(torch.uint8) for part in parts]


def _received(t: Tensor) -> None:
    """After q and the scales were overwritten."""
    if isinstance(t, GroupedTensor):
        if t.q_t is not None:
            t.q_t.copy_(block_math.transposed(t.q))
        count_write(t)


@handles(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate weights; or what is flattened, as DistributedDataParallel does."""
    tensors = args[0]
    flat = all(
        t.dim() == 1
        and (t.dtype, t.device) == (tensors[0].dtype, tensors[0].device)
        and not t.requires_grad
        and type(t.q if isinstance(t, GroupedTensor) else t) is Tensor  # not while tracing
        for t in tensors
    )
    if flat:
        return Coalesced(tensors)
    whole = join(func, args, kwargs)
    if isinstance(whole, GroupedTensor):
        whole.is_part = all(t.is_part for t in tensors)  # of _StridedShard
    return whole


@handles(c10d.broadcast_.default)
def _broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send q and the scales. It waits for them, as q_t is computed from q."""
    tensors, *others = args
    for t in tensors:
        for sent in _sent(t):
            _, work = run_collective(func, ([sent], *others), kwargs)
        _received(t)
    return tensors, work


@handles(c10d.scatter_.default)
def _scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send each process its q and scales. Numbers are quantized where they are sent."""
    [to], lists, *others = args
    lists = [
        [t if isinstance(t, GroupedTensor) else to.clone().copy_(t) for t in tensors]
        for tensors in lists
    ]
    for i, received in enumerate(_sent(to)):
        sent = [[_sent(t)[i] for t in tensors] for tensors in lists]
        _, work = run_collective(func, ([received], sent, *others), kwargs)
    _received(to)
    return [to], work


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of experts, which know that they are parts."""
    parts = experts_of(func, args, kwargs)
    for part in parts:
        part.is_part = isinstance(part, GroupedTensor)
    return parts


@handles(aten.constant_pad_nd.default)
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain numbers; of a part that gets experts of zeros, a quantized tensor."""
    t, pad, value = bound_arguments(func, args, kwargs).values()
    if not t.is_part or len(pad) != 6 or any(pad[:5]) or value != 0:
        return on_plain(func, args, kwargs)
    return torch.cat([t, t.new_zeros((pad[5], *t.shape[1:]))])
