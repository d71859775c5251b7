"""What torch's operations do to a GroupedTensorWithMaster.

E experts, K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.quantized.operations import (
    count_write,
    run_collective,
    unfilled,
    views_of,
    written,
)
from grouped_linear.quantized.with_master import HANDLERS, GroupedTensorWithMaster, Handler

aten = torch.ops.aten
of_parts = GroupedTensorWithMaster._of_parts


def handles(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a handler of these overloads."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


@handles(None)
def _by_the_rules(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The class's three rules."""
    returned = [r.alias_info for r in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    if is_view and isinstance(args[0], GroupedTensorWithMaster):
        return _view(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"GroupedTensorWithMaster: {func} cannot change the shape of a quantized tensor"
        )
    return read_or_write(func, args, kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One view of the high-precision numbers, or a list of them."""
    t = args[0]
    with views_of(t):
        views = func(t.own, *args[1:], **kwargs)
        out = tree_map_only(Tensor, lambda own: _wrapped(t, own), views)
    return return_and_correct_aliasing(func, args, kwargs, out)


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views, which know that they are parts."""
    parts = _view(func, args, kwargs)
    for part in parts:
        part.is_part = True
    return parts


def _wrapped(t: GroupedTensorWithMaster, own: Tensor) -> GroupedTensorWithMaster:
    """A view of t's numbers, with the quantized numbers of the experts that it lies in."""
    parts, master = t.parts, t.master
    # The tensors of a format of one's own need not have one part for each expert.
    experts = _experts_in(master, own) if t.recipe.weight.quantize is None else None
    if experts is None:
        view: Tensor | None = own
    else:
        parts, master, view = parts.each(lambda part: part[experts]), own, None
    out = of_parts(master, parts, t.recipe, view, t.has_memory)
    if experts is not None and experts is not ...:
        out.whole = t if t.whole is None else t.whole
    return out


def _experts_in(master: Tensor, own: Tensor) -> Any:
    """The index of the experts that a view is, if it is whole experts; else None."""
    *_, N, K = master.shape
    is_weight = own.dim() in (2, 3) and own.shape[-2:] == (N, K) and own.is_contiguous()
    if not is_weight or own.dtype != master.dtype or own.numel() == 0:
        return None
    first, remainder = divmod(int(own.storage_offset() - master.storage_offset()), N * K)
    if remainder:
        return None
    if master.dim() == 2:
        return None if own.dim() == 3 else ...
    return first if own.dim() == 2 else slice(first, first + own.size(0))


def read_or_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on high-precision numbers; what it wrote is then quantized."""
    by_number: dict[int, GroupedTensorWithMaster] = {}

    def number(t: GroupedTensorWithMaster) -> Tensor:
        by_number[id(t.own)] = t
        return t.own

    plain_args, plain_kwargs = tree_map_only(GroupedTensorWithMaster, number, (args, kwargs))
    if func.namespace == "c10d":  # its schemas do not say what it writes, nor when
        out, changed = run_collective(func, plain_args, plain_kwargs), [args, kwargs]
    else:
        out, changed = func(*plain_args, **plain_kwargs), written(func, args, kwargs)
    leaves = [t for t in tree_leaves(changed) if isinstance(t, GroupedTensorWithMaster)]
    for t in {id(t): t for t in leaves}.values():  # each once
        t.refresh_()
    return tree_map(lambda leaf: by_number.get(id(leaf), leaf), out)


@handles(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy; of what a state dict has, as a plain tensor."""
    t = args[0]
    if not t.is_whole or t.has_memory:
        return func(t.own, **kwargs)
    parts = t.parts.each(lambda part: part.clone())
    master = func(t.own, memory_format=torch.contiguous_format)
    return of_parts(master, parts, t.recipe)


@handles(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to another device, with the quantized numbers; or to another dtype, and quantize.

    A tensor of a state dict becomes a plain one: programs copy it to the CPU before they save it.
    """
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not t.is_whole or t.has_memory or dtype not in ACTIVATIONS:
        return func(t.own, *args[1:], **kwargs)
    to = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    master = func(t.own, dtype=dtype, **to)
    if dtype != t.dtype:
        return t.of(master)
    parts = t.parts.each(lambda part: func(part, **to))
    return of_parts(master, parts, t.recipe)


@handles(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain, for an optimizer's state; of this class where torch makes parameters.

    That is in nn.Module.to_empty, and in distribute_tensor, which receives in it.
    """
    t = args[0]
    if t.is_part and t.own.is_contiguous() and kwargs.get("dtype") in (None, t.dtype):
        return t.of(func(t.own, **kwargs).zero_())
    device = torch.device(kwargs.get("device") or t.device)
    if not (t.is_meta and device.type != "meta" and t.is_whole):
        return func(t.own, **kwargs)
    parts = t.parts.each(lambda part: unfilled(part, device))
    return of_parts(func(t.own, **kwargs), parts, t.recipe)


@handles(aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of this class if only E differs: FSDP2 allocates a shard this way."""
    t, size = args[:2]
    zeros = func(t.own, size, **kwargs)
    alike = t.is_whole and zeros.dim() == t.dim() == 3 and zeros.shape[1:] == t.shape[1:]
    return t.of(zeros, columnwise=False) if alike and zeros.dtype in ACTIVATIONS else zeros


@handles(aten.set_.source_Tensor)
def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take another tensor's numbers, as torch.nn.utils.parametrize does when it is removed."""
    t, source = args
    if source.shape != t.shape:
        raise RuntimeError(
            f"GroupedTensorWithMaster: {func} cannot change the shape of a quantized tensor"
        )
    return t.copy_(source)


@handles(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the quantized numbers too from a tensor that has the same ones; else quantize."""
    to, source = args[:2]
    tensors = to, source
    if not all(isinstance(t, GroupedTensorWithMaster) and t.is_whole for t in tensors):
        return read_or_write(func, args, kwargs)
    alike = (to.dtype, to.recipe, to.shape) == (source.dtype, source.recipe, source.shape)
    if not alike or (to.q_t is not None and source.q_t is None):
        return read_or_write(func, args, kwargs)
    for own, other in zip((to.own, *to.parts), (source.own, *source.parts), strict=True):
        if own is not None:
            func(own, other, *args[2:], **kwargs)
    count_write(to)
    return to


@handles(aten.record_stream.default)
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the allocator of all memory that a tensor has; it writes nothing, though marked so."""
    t, stream = args
    for part in (t.master, *t.parts):
        if part is not None:
            func(part, stream)
