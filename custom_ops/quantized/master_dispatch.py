# SPDX-License-Identifier: Apache-2.0
"""Torch's operations on a GroupedTensorWithMaster.

E experts, K in_features, N out_features.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import ACTIVATIONS, E4M3, arguments_of
from grouped_linear.quantized.gathered import views_of
from grouped_linear.recipes.quantize_weight import QuantizedWeight, poison_, stores

aten = torch.ops.aten

#: ``handler(overload, args, kwargs)`` is called in place of an overload that has a
#: :class:`HandledTensor` among its arguments.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: Overloads with a handler of their own. Others follow the three rules of :func:`read_or_write`.
HANDLERS: dict[Any, Handler] = {}


class HandledTensor(Tensor):
    """A tensor whose operations the handlers below run: a GroupedTensorWithMaster."""

    # Operations are intercepted below autograd, in __torch_dispatch__, and only there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return HANDLERS.get(func, read_or_write)(func, args, kwargs or {})


def count_write(parts: QuantizedWeight) -> None:
    """Count a write to each part, below autograd."""
    for part in parts:
        if part is not None:
            torch.autograd.graph.increment_version(part)


def handles(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a handler of these overloads."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


def read_or_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The class's three rules: the operation on high-precision numbers, which are then quantized.

    It quantizes what it wrote even if it raises half way. A result that shares memory with the
    numbers is a view, whatever the schema says.
    """
    if func._can_decompose():  # inference mode and handlers give operations made of others
        return func.decompose(*args, **kwargs)
    _check_can_be_seen(func)
    kept: dict[int, Any] = {}
    results: list[tuple[Any, Tensor]] = []

    def plain(t: Any) -> Any:
        kept[id(t.numbers)] = t
        return t.numbers

    def result(t: Any) -> Tensor:  # a result of another shape would resize t
        results.append((t, torch.empty_like(t.numbers)))
        kept[id(results[-1][1])] = t
        return results[-1][1]

    outs = {a.name for a in func._schema.arguments if a.is_out}
    plain_args = tree_map_only(HandledTensor, plain, args)
    plain_kwargs = {
        name: tree_map_only(HandledTensor, result if name in outs else plain, value)
        for name, value in kwargs.items()
    }
    given = {id(t) for t in tree_leaves((plain_args, plain_kwargs)) if isinstance(t, Tensor)}
    changed = _written(func, args, kwargs)
    is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    try:
        with views_of(args[0]) if is_view else nullcontext():
            out = _run(func, plain_args, plain_kwargs)
        for t, computed in results:
            if computed.shape != t.shape:
                raise RuntimeError(
                    f"GroupedTensorWithMaster: out= of {func} must be {list(computed.shape)}, got "
                    f"{list(t.shape)}, whose shape does not change"
                )
        for t, computed in results:
            t.numbers.copy_(computed)
    finally:
        try:
            for t in changed:
                t.refresh_()
        except BaseException:  # an interrupt, or too little memory: the others have their turn
            for t in changed:
                with suppress(Exception):
                    t.refresh_()
            raise

    def returned(leaf: Tensor) -> Tensor:
        if id(leaf) in kept:
            return kept[id(leaf)]
        if id(leaf) not in given:
            for t in kept.values():
                if torch._C._is_alias_of(leaf, t.numbers):  # type: ignore[attr-defined]
                    return _view_of(t, leaf)
        return leaf

    out = tree_map_only(Tensor, returned, out)
    if is_view and all(isinstance(t, HandledTensor) for t in tree_leaves(out)):
        return return_and_correct_aliasing(func, args, kwargs, out)
    return out


def _check_can_be_seen(func: Any) -> None:
    """Raise RuntimeError for an operation that would leave old FP8 numbers behind."""
    if torch.Tag.inplace_view in func.tags or func is aten._resize_output_.default:
        raise RuntimeError(
            f"GroupedTensorWithMaster: {func} cannot change the shape of a quantized tensor"
        )
    if "c10d" in func.namespace and any(name in str(func) for name in ("recv", "p2p")):
        raise RuntimeError(
            f"GroupedTensorWithMaster: {func} ends when nothing shows it, and the FP8 "
            "numbers would be old: receive in a plain tensor and copy_ that"
        )


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on plain tensors. Its writes are complete when this returns."""
    if _writes_unsaid(func):
        # NCCL returns a null work for an operation that is not asynchronous, where gloo returns
        # one. A null cannot be waited for, so the operation is always asynchronous here.
        bound = arguments_of(func, args, kwargs)
        bound |= {name: True for name in bound if name in ("async_op", "asyncOp")}
        out = func(*bound.values())
        (out[-1] if isinstance(out, (tuple, list)) else out).wait()
        return out
    out = func(*args, **kwargs)
    if func.namespace == "_c10d_functional" and func._schema.is_mutable:
        for t in tree_leaves(out):
            torch.ops._c10d_functional.wait_tensor(t)
    return out


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of this class that an operation writes, each once."""
    given = arguments_of(func, args, kwargs)
    if not _writes_unsaid(func):
        infos = ((a.name, a.alias_info) for a in func._schema.arguments)
        given = {name: given[name] for name, info in infos if info and info.is_write}
    leaves = tree_leaves(given)
    return list({id(t): t for t in leaves if isinstance(t, HandledTensor)}.values())


def _writes_unsaid(func: Any) -> bool:
    """Whether it is an operation of c10d, whose schemas do not say what is written.

    A send reads alone; its caller waits for it, once.
    """
    return func.namespace == "c10d" and func is not torch.ops.c10d.send.default


def _view_of(t: Any, numbers: Tensor) -> Any:
    """A view of t's numbers, with the quantized numbers of the experts that it touches."""
    if not stores(t.recipe.weight):  # a function's need not have one part for each expert
        return t._of_parts(t.master, t.parts, t.recipe, numbers, t.has_memory)
    master, parts = whole = t.whole or (t.master, t.parts)
    experts = _experts_of(master, numbers)
    with views_of(t):
        if experts is not ...:
            master, parts = master[experts], parts.each(lambda part: part[experts])
        out = t._of_parts(master, parts, t.recipe, numbers, t.has_memory)
    if experts is not ...:
        out.whole = whole
    return out


def _experts_of(master: Tensor, numbers: Tensor) -> Any:
    """The index of the experts that a view of a weight touches; ``...`` for all of it."""
    if master.dim() == 2 or numbers.numel() == 0 or numbers.itemsize != master.itemsize:
        return ...
    E, N, K = master.shape
    begin = int(numbers.storage_offset() - master.storage_offset())
    end = begin + sum((n - 1) * by for n, by in zip(numbers.shape, numbers.stride(), strict=True))
    first, last = begin // (N * K), int(end) // (N * K)
    if first < 0 or last >= E:  # as_strided leaves the weight
        return ...
    if first == last and numbers.shape == (N, K):
        return first
    return ... if (first, last) == (0, E - 1) else slice(first, last + 1)


@handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views, which know that they are parts."""
    parts = read_or_write(func, args, kwargs)
    for part in parts:
        part.is_part = True
    return parts


@handles(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy; a tensor of a state dict becomes a plain one."""
    t = args[0]
    if not t.is_whole or t.has_memory:
        return func(t.numbers, **kwargs)
    parts = t.parts.each(lambda part: part.clone())
    master = func(t.numbers, memory_format=torch.contiguous_format)
    return t._of_parts(master, parts, t.recipe)


@handles(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to another device, with the quantized numbers; or to another dtype, and quantize.

    A tensor of a state dict becomes a plain one: programs copy it to the CPU before they save it.
    """
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if not t.is_whole or t.has_memory or dtype not in ACTIVATIONS:
        return func(t.numbers, *args[1:], **kwargs)
    to = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    master = func(t.numbers, dtype=dtype, **to)
    if dtype != t.dtype:
        return t.of(master)
    parts = t.parts.each(lambda part: func(part, **to))
    return t._of_parts(master, parts, t.recipe)


@handles(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor for an optimizer's state; one of this class where torch makes parameters.

    It does so in nn.Module.to_empty, and in distribute_tensor, which receives in it.
    """
    t = args[0]
    if t.is_part and t.numbers.is_contiguous() and kwargs.get("dtype") in (None, t.dtype):
        return t.of(func(t.numbers, **kwargs).zero_())
    device = torch.device(kwargs.get("device") or t.device)
    if not (t.is_meta and device.type != "meta" and t.is_whole):
        return func(t.numbers, **kwargs)
    parts = t.parts.each(lambda part: torch.empty_like(part, device=device))
    for part in parts:  # NaN until the weight is drawn or loaded
        if part is not None and part.dtype != E4M3:
            poison_(part)
    return t._of_parts(func(t.numbers, **kwargs), parts, t.recipe)


@handles(aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of this class if only E differs: FSDP2 allocates a shard this way."""
    t, size = args[:2]
    zeros = func(t.numbers, size, **kwargs)
    alike = t.is_whole and zeros.dim() == t.dim() == 3 and zeros.shape[1:] == t.shape[1:]
    return t.of(zeros, columnwise=False) if alike and zeros.dtype in ACTIVATIONS else zeros


@handles(aten.set_.source_Tensor)
def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take over another tensor's numbers, as torch.nn.utils.parametrize does when it is removed."""
    t, source = args
    if not t.is_whole or (source.shape, source.dtype) != (t.shape, t.dtype):
        raise RuntimeError(
            f"GroupedTensorWithMaster: {func} cannot change the shape of a quantized tensor"
        )
    t.data = source
    return t


@handles(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Quantize; copies of a weight into another at the end of a trace copy each part."""
    to, source = args[:2]
    both = isinstance(to, HandledTensor) and isinstance(source, HandledTensor)
    is_traced = both and type(to.q) is not Tensor and to.is_whole and source.is_whole
    if not is_traced or len({(t.recipe, t.dtype, t.shape, t.q_t is None) for t in args[:2]}) > 1:
        return read_or_write(func, args, kwargs)
    for part, other in zip((to.numbers, *to.parts), (source.numbers, *source.parts), strict=True):
        if part is not None:
            func(part, other, *args[2:], **kwargs)
    return to


@handles(aten.record_stream.default)
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the allocator of all memory that a tensor has; it writes nothing, though marked so."""
    t, stream = args
    for part in (t.master, *t.parts):
        if part is not None:
            func(part, stream)


# --- torch.optim.AdamW and Adam with fused=True --------------------------------------------------

_LISTS = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")


@handles(
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
)
def _fused_adam(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A step of each weight in one pass, where that has torch's bits; of the others as torch."""
    arguments = arguments_of(func, args, kwargs)
    lists = {name: arguments.pop(name) for name in _LISTS}
    options = {
        "decoupled_weight_decay": func.overloadpacket is aten._fused_adamw_,
        "maximize": arguments["maximize"],
        **{name: arguments[name] for name in ("beta1", "beta2", "weight_decay", "eps")},
        **{name: _scalar(arguments[name]) for name in ("grad_scale", "found_inf")},
    }
    others, lr = [], arguments["lr"]
    for i, w in enumerate(lists["self"]):
        tensors: list[Any] = [values[i] if values else None for values in lists.values()][1:]
        if isinstance(w, HandledTensor) and _fits(w, tensors, options):
            on_device = isinstance(lr, Tensor) and lr.device == w.device
            given = {"lr_tensor": _scalar(lr)} if on_device else {"lr": float(lr)}
            _step(w, tensors, options | given)
        else:
            others.append(i)
    if others:
        rest = [[values[i] for i in others] if values else [] for values in lists.values()]
        read_or_write(func, tuple(rest), arguments)


def _scalar(t: Any) -> Any:
    """The number in a tensor of one element, as the op takes it."""
    return t if t is None else t.reshape(()).float()


def _experts(t: Any) -> Any:
    """The tensor of E experts: t itself, or the one that t is an expert of."""
    return t if t is None else t.view(-1, *t.shape[-2:])


def _fits(w: Any, tensors: list[Any], options: dict[str, Any]) -> bool:
    """Whether one pass has the bits of torch's step, and of quantizing what it gives."""
    *like_w, step = tensors
    is_adamw = options["decoupled_weight_decay"] or not options["weight_decay"]
    return (
        w.device.type == "cuda"  # torch's step on a CPU has other bits
        and is_adamw
        and w.recipe.weight.in_blocks
        and w.is_whole
        and not w.is_traced_part
        and w.dim() in (2, 3)
        and w.numel() > 0
        and all(t.dtype == w.dtype and t.device == w.device for t in like_w if t is not None)
        and all(t.is_contiguous() for t in like_w[1:] if t is not None)
        and step.device == w.device
    )


def _step(w: Any, others: list[Any], options: dict[str, Any]) -> None:
    grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step = others
    dense = grad.contiguous()
    q, scale, q_t, master = map(_experts, (w.q, w.scale, w.q_t, w.master))
    g, m, v, max_v = map(_experts, (dense, exp_avg, exp_avg_sq, max_exp_avg_sq))
    options = w.recipe.weight.weight_options | options
    ops.adam_weight_(q, scale, q_t, master, g, m, v, max_v, _scalar(step), **options)
    if dense is not grad and options["grad_scale"] is not None:
        grad.copy_(dense)
    count_write(w.parts)
