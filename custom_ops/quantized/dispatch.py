"""What torch's operations do to a GroupedTensor, registered as its handlers.

E experts, K in_features, N out_features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name
from grouped_linear.quantized import block_math
from grouped_linear.quantized.operations import (
    bound_arguments,
    count_write,
    unfilled,
    views_of,
    written,
)
from grouped_linear.quantized.tensor import HANDLERS, GroupedTensor, Handler

aten = torch.ops.aten
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# How many elements of a weight an optimizer's step holds in float32 at a time: 128 MiB, and as much
# for each of the optimizer's states.
ELEMENTS_AT_ONCE = 2**25
# In-place operations that do not read what they overwrite round to nearest: no steps add up.
OVERWRITING = (aten.fill_, aten.zero_, aten.uniform_, aten.normal_)


def handles(
    *overloads: Any, handlers: dict[Any, Handler] = HANDLERS
) -> Callable[[Handler], Handler]:
    """Register a handler of these overloads."""

    def register(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(overloads, handler))
        return handler

    return register


@handles(None)
def _any_other(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute with high precision; quantize the result if the operation is in place."""
    if func.namespace == "c10d":
        raise NotImplementedError(
            f"GroupedTensor: {func} would not reach a quantized tensor: pass its q and scale"
        )
    if func._schema.is_mutable:
        return write_in_place(func, args, kwargs)
    return on_plain(func, args, kwargs)


def on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call with dequantized numbers."""
    args, kwargs = tree_map_only(GroupedTensor, lambda t: t.numbers(t.dtype), (args, kwargs))
    return func(*args, **kwargs)


def _store(t: GroupedTensor, w: Tensor, *, stochastic: bool) -> None:
    """Quantize w into t's own memory."""
    if t.numel() == 0:
        return
    block_math.quantize_(t.q, t.scale, t.q_t, w.reshape(t.q.shape), t.recipe, stochastic)
    count_write(t)


def _of_each_part(
    t: GroupedTensor,
    op: Callable[[Tensor], Tensor],
    *,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> GroupedTensor:
    metadata = t.metadata if dtype is None else t.metadata._replace(dtype=dtype)
    q_t = None if t.q_t is None else op(t.q_t)
    return GroupedTensor(op(t.q), op(t.scale), q_t, metadata, size)


def is_whole(t: GroupedTensor) -> bool:
    """Whether t has the shape of its parts, as opposed to a flattened view."""
    return t.shape == t.q.shape


@handles(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _of_each_part(args[0], lambda part: func(part), size=args[0].shape)


@handles(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with views_of(args[0]):
        out = _of_each_part(args[0], lambda part: func(part), size=args[0].shape)
    return return_and_correct_aliasing(func, args, kwargs, out)


@handles(aten.select.int, aten.slice.Tensor, aten.unbind.int)
def experts_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of experts."""
    t, bound = args[0], bound_arguments(func, args, kwargs)
    if func is aten.slice.Tensor and _takes_all(t, bound):
        return _alias(aten.alias.default, (t,), {})
    over_experts = is_whole(t) and t.dim() == 3 and bound["dim"] in (0, -3)
    if not over_experts or bound.get("step", 1) != 1:
        return on_plain(func, args, kwargs)
    with views_of(t):
        parts = [func(p, *args[1:], **kwargs) for p in (t.q, t.scale, t.q_t) if p is not None]
        if isinstance(parts[0], Tensor):
            out: Any = _from_list(parts, t)
        else:
            out = [_from_list(each, t) for each in zip(*parts, strict=True)]
    return return_and_correct_aliasing(func, args, kwargs, out)


def _takes_all(t: GroupedTensor, bound: dict[str, Any]) -> bool:
    """Whether a slice is the whole tensor."""
    start, end = bound["start"] or 0, bound["end"]
    return start == 0 and bound["step"] == 1 and (end is None or end >= t.size(bound["dim"]))


def _from_list(parts: Sequence[Tensor], like: GroupedTensor) -> GroupedTensor:
    q, scale, *q_t = parts
    return GroupedTensor(q, scale, q_t[0] if q_t else None, like.metadata)


@handles(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of all elements in another shape. The parts keep theirs."""
    t, size = args
    size = torch.empty(t.shape, device="meta").view(size).shape  # raises for a wrong size
    with views_of(t):
        out = _of_each_part(t, aten.alias, size=size)
    return return_and_correct_aliasing(func, args, kwargs, out)


@handles(aten.as_strided.default)
def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The views above again: torch.compile replays a view as as_strided."""
    t, bound = args[0], bound_arguments(func, args, kwargs)
    *lead, N, K = t.q.shape
    size, offset = tuple(bound["size"]), bound["storage_offset"]
    first, remainder = divmod(0 if offset is None else offset - t.storage_offset(), N * K)
    if remainder or first < 0 or tuple(bound["stride"]) != block_math.contiguous_stride(size):
        return on_plain(func, args, kwargs)
    with views_of(t):
        if first == 0 and math.prod(size) == t.numel():
            out = _of_each_part(t, aten.alias, size=size)
        elif lead and size[-2:] == (N, K) and len(size) in (2, 3):
            experts = slice(first, first + size[0]) if len(size) == 3 else first
            out = _of_each_part(t, lambda part: part[experts])
        else:
            return on_plain(func, args, kwargs)
    return return_and_correct_aliasing(func, args, kwargs, out)


@handles(aten.stack.default)
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stack experts to a weight, or concatenate weights along the experts."""
    tensors, dim = args[0], bound_arguments(func, args, kwargs)["dim"]
    experts = 2 if func is aten.stack.default else 3
    alike = all(
        isinstance(t, GroupedTensor)
        and is_whole(t)
        and t.dim() == experts
        and t.metadata == tensors[0].metadata
        for t in tensors
    )
    if not alike or dim not in (0, -3) or len({tuple(t.shape[-2:]) for t in tensors}) > 1:
        return on_plain(func, args, kwargs)
    q, scale = func([t.q for t in tensors]), func([t.scale for t in tensors])
    columnwise = all(t.q_t is not None for t in tensors)
    q_t = func([t.q_t for t in tensors]) if columnwise else None
    return GroupedTensor(q, scale, q_t, tensors[0].metadata)


@handles(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to another device or dtype. The dtypes of the parts do not change."""
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in ACTIVATIONS:
        return on_plain(func, args, kwargs)
    to = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    return _of_each_part(t, lambda part: func(part, **to), size=t.shape, dtype=dtype)


@handles(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy bytes if both are quantized; quantize or dequantize otherwise."""
    to, source = args[:2]
    if not isinstance(to, GroupedTensor):
        dtype = to.dtype if to.dtype in ACTIVATIONS else source.dtype
        return func(to, source.numbers(dtype), *args[2:], **kwargs)
    shapes = [(t.shape, t.q.shape) for t in (to, source) if isinstance(t, GroupedTensor)]
    if len(shapes) == 2 and shapes[0] == shapes[1]:
        func(to.q, source.q, *args[2:], **kwargs)
        func(to.scale, source.scale, *args[2:], **kwargs)
        if to.q_t is not None:
            to.q_t.copy_(to.q.transpose(-2, -1))
        count_write(to)
    else:
        w = source.numbers(source.dtype) if isinstance(source, GroupedTensor) else source
        if w.is_floating_point() and w.element_size() == 1:
            raise ValueError(
                f"GroupedTensor: copy_ of a tensor of {dtype_name(w.dtype)} has no scales: copy "
                "GroupedTensor.from_parts(q, scale), or load its state dict, which has both"
            )
        dtype = w.dtype if w.dtype in ACTIVATIONS else torch.float32
        _store(to, w.to(to.device, dtype).expand(to.shape), stochastic=to.stochastic_rounding)
    return to


@handles(aten.empty_like.default, aten.zeros_like.default)
def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain, for an optimizer's state; but empty_like is quantized where torch makes parameters.

    That is in nn.Module.to_empty, and in distribute_tensor, which receives in it.
    """
    t = args[0]
    device = torch.device(kwargs.get("device") or t.device)
    leaves_meta = t.is_meta and device.type != "meta"
    receives = t.is_part and kwargs.get("dtype") in (None, t.dtype)
    if func is aten.empty_like.default and (leaves_meta or receives):
        return _of_each_part(t, lambda part: unfilled(part, device), size=t.shape)
    like = torch.empty(t.shape, dtype=t.dtype, device="meta")
    return func(like, **{**kwargs, "device": device, "memory_format": torch.contiguous_format})


@handles(aten.new_empty.default)
def _new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Quantized if the shape is the same: distributed checkpoints stage copies this way."""
    t, size = args[:2]
    dtype, device = kwargs.get("dtype") or t.dtype, torch.device(kwargs.get("device") or t.device)
    if tuple(size) != tuple(t.shape) or dtype not in ACTIVATIONS:
        return func(t.scale, size, **{**kwargs, "dtype": dtype, "device": device})
    return _of_each_part(t, lambda part: unfilled(part, device), size=size, dtype=dtype)


@handles(aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Quantized if only E differs: FSDP2 allocates a shard this way. A shard has no q_t."""
    t, size = args[:2]
    metadata = t.metadata._replace(dtype=kwargs.get("dtype") or t.dtype)
    device = kwargs.get("device") or t.device
    alike = is_whole(t) and len(size) == t.dim() == 3 and tuple(size[1:]) == t.shape[1:]
    if not alike or metadata.dtype not in ACTIVATIONS:
        return func(t.scale, size, **{**kwargs, "dtype": metadata.dtype, "device": device})
    q = t.q.new_zeros(size, device=device)
    scale = t.scale.new_ones((size[0], *t.scale.shape[1:]), device=device)
    return GroupedTensor(q, scale, None, metadata)


@handles(aten.record_stream.default)
def record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the allocator of all memory that a tensor has; it writes nothing, though marked so."""
    t, stream = args
    for name in t._memory:
        if getattr(t, name) is not None:
            func(getattr(t, name), stream)


@handles(aten._foreach_copy_.default)
def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for to, source in zip(*args[:2], strict=True):
        to.copy_(source)


def write_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place operation: on float32 copies, which are then quantized.

    Operations on lists of tensors (``foreach`` and ``fused`` optimizers) return nothing. They are
    split, so that only some experts of one quantized weight are in float32 at a time.
    """
    calls = [*_one_weight_a_call(args, kwargs)] or [*_some_experts_a_call(args, kwargs)]
    for some_args, some_kwargs in calls:
        func(*some_args, **some_kwargs)
    return None if calls else _write_in_float32(func, args, kwargs)


def _lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sequence[Any]]:
    """The arguments that are lists, as long as the first one."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return [value for value in lists if len(value) == len(lists[0])]


def _one_weight_a_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Arguments]:
    """A call for each quantized weight in lists of several tensors, and one for all others."""
    lists = _lists(args, kwargs)
    count = len(lists[0]) if lists else 0
    quantized = [any(isinstance(value[i], GroupedTensor) for value in lists) for i in range(count)]
    if count < 2 or not any(quantized):
        return
    others = [i for i in range(count) if not quantized[i]]
    for indices in [*([i] for i in range(count) if quantized[i]), *([others] if others else [])]:

        def chosen(value: Any, indices: list[int] = indices) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == count
            return [value[i] for i in indices] if is_list else value

        yield tuple(map(chosen, args)), {name: chosen(value) for name, value in kwargs.items()}


def _some_experts_a_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Arguments]:
    """Calls for some experts each of the one quantized weight in lists, if it is large."""
    lists = _lists(args, kwargs)
    firsts = [value[0] for value in lists if len(value) == 1]
    weights = [t for t in firsts if isinstance(t, GroupedTensor)]
    if not weights or not is_whole(weights[0]) or weights[0].dim() != 3:
        return
    weight = weights[0]
    at_once = max(1, ELEMENTS_AT_ONCE // math.prod(weight.q.shape[-2:]))
    if weight.size(0) <= at_once:
        return
    for begin in range(0, weight.size(0), at_once):

        def experts(t: Any, begin: int = begin) -> Any:
            is_like_weight = isinstance(t, Tensor) and t.shape == weight.shape
            return t[begin : begin + at_once] if is_like_weight else t

        yield tree_map(experts, args), tree_map(experts, kwargs)


def _write_in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on float32 copies of all tensors; what it wrote is then stored."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def in_float32(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dtype not in ACTIVATIONS:
            return t
        if id(t) not in copies:
            w = t.numbers(torch.float32) if isinstance(t, GroupedTensor) else t.float()
            copies[id(t)] = (t, w)
        return copies[id(t)][1]

    out = func(*tree_map(in_float32, args), **tree_map(in_float32, kwargs))
    for t in tree_leaves(written(func, args, kwargs)):
        if isinstance(t, Tensor) and id(t) in copies:
            _store_result(func, t, copies[id(t)][1])
    originals = {id(w): t for t, w in copies.values()}
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), out)


def _store_result(func: Any, t: Tensor, w: Tensor) -> None:
    if isinstance(t, GroupedTensor):
        if w.shape != t.shape:
            raise RuntimeError(
                f"GroupedTensor: {func} cannot change the shape of a quantized tensor"
            )
        stochastic = t.stochastic_rounding and func.overloadpacket not in OVERWRITING
        _store(t, w, stochastic=stochastic)
    elif t is not w:
        t.resize_(w.shape).copy_(w)  # `out` may have come with another shape
