"""torch.optim.AdamW and Adam with ``fused=True``, over weights that are kept quantized.

E experts, K in_features, N out_features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.quantized.dispatch import handles, is_whole, write_in_place
from grouped_linear.quantized.operations import bound_arguments, count_write
from grouped_linear.quantized.tensor import GroupedTensor

aten = torch.ops.aten

_LISTS = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
_OVERLOADS = (
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
)


@handles(*_OVERLOADS)
def _fused_adam(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A step of each quantized weight in one pass; of the others as torch does it."""
    arguments = bound_arguments(func, args, kwargs)
    lists = {name: arguments.pop(name) for name in _LISTS}
    options = {
        "decoupled_weight_decay": func.overloadpacket is aten._fused_adamw_,
        "maximize": arguments["maximize"],
        **{name: arguments[name] for name in ("beta1", "beta2", "weight_decay", "eps")},
        **{name: _scalar(arguments[name]) for name in ("grad_scale", "found_inf")},
    }
    others = []
    for i, w in enumerate(lists["self"]):
        tensors: list[Any] = [values[i] if values else None for values in lists.values()][1:]
        if _fits(w, tensors):
            _step(w, tensors, _lr_of(w, arguments["lr"]), options)
        else:
            others.append(i)
    if others:
        rest = [[values[i] for i in others] if values else [] for values in lists.values()]
        _write(func, tuple(rest), arguments)


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As every operation that writes."""
    if any(isinstance(w, GroupedTensor) for w in args[0]):
        write_in_place(func, args, kwargs)
    else:
        func(*args, **kwargs)


def _lr_of(w: GroupedTensor, lr: float | Tensor) -> dict[str, Any]:
    """The learning rate: in a tensor on the weight's device, or a number."""
    if isinstance(lr, Tensor) and lr.device == w.device:
        return {"lr_tensor": _scalar(lr)}
    return {"lr": float(lr)}


def _scalar(t: Any) -> Any:
    """The number in a tensor of one element, as the op takes it."""
    return t if t is None else t.reshape(()).float()


def _experts(t: Any) -> Any:
    """The tensor of E experts, also where t is that of one."""
    return t if t is None else t.view(-1, *t.shape[-2:])


def _fits(w: Any, tensors: list[Any]) -> bool:
    """Whether the op steps w: not a flattened view, nor one with state of another kind."""
    *like_w, step = tensors
    return (
        isinstance(w, GroupedTensor)
        and is_whole(w)
        and w.dim() in (2, 3)
        and w.numel() > 0
        and all(
            not isinstance(t, GroupedTensor) and t.dtype == w.dtype and t.device == w.device
            for t in like_w
            if t is not None
        )
        and all(t.is_contiguous() for t in like_w[1:] if t is not None)
        and step.device == w.device
    )


def _step(
    w: GroupedTensor, tensors: Sequence[Any], lr: dict[str, Any], options: dict[str, Any]
) -> None:
    grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step = tensors
    dense = grad.contiguous()
    ops.adam_weight_(
        _experts(w.q),
        _experts(w.scale),
        _experts(w.q_t),
        None,
        _experts(dense),
        _experts(exp_avg),
        _experts(exp_avg_sq),
        _experts(max_exp_avg_sq),
        _scalar(step),
        stochastic_rounding=w.stochastic_rounding,
        **w.recipe.weight.scale_options,
        **lr,
        **options,
    )
    if dense is not grad and options["grad_scale"] is not None:
        grad.copy_(dense)
    count_write(w)
