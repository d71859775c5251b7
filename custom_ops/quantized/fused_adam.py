# SPDX-License-Identifier: Apache-2.0
"""torch.optim.AdamW and Adam with ``fused=True``, over weights with their masters.

E experts, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import arguments_of
from grouped_linear.quantized.master_dispatch import handles, read_or_write
from grouped_linear.quantized.with_master import GroupedTensorWithMaster, count_write

aten = torch.ops.aten

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
    others = []
    for i, w in enumerate(lists["self"]):
        tensors: list[Any] = [values[i] if values else None for values in lists.values()][1:]
        if _fits(w, tensors, options):
            _step(w, tensors, _lr_of(w, arguments["lr"]), options)
        else:
            others.append(i)
    if others:
        rest = [[values[i] for i in others] if values else [] for values in lists.values()]
        read_or_write(func, tuple(rest), arguments)


def _lr_of(w: Tensor, lr: float | Tensor) -> dict[str, Any]:
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


def _fits(w: Any, tensors: list[Any], options: dict[str, Any]) -> bool:
    """Whether one pass has the bits of torch's step, and of quantizing what it gives."""
    *like_w, step = tensors
    is_adamw = options["decoupled_weight_decay"] or not options["weight_decay"]
    return (
        isinstance(w, GroupedTensorWithMaster)
        and w.device.type == "cuda"  # torch's step on a CPU has other bits
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


def _step(
    w: GroupedTensorWithMaster, others: list[Any], lr: dict[str, Any], options: dict[str, Any]
) -> None:
    grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step = others
    dense = grad.contiguous()
    q, scale, q_t, master = map(_experts, (w.q, w.scale, w.q_t, w.master))
    g, m, v, max_v = map(_experts, (dense, exp_avg, exp_avg_sq, max_exp_avg_sq))
    options = {**w.recipe.weight.scale_options, **lr, **options}
    ops.adam_weight_(q, scale, q_t, master, g, m, v, max_v, _scalar(step), **options)
    if dense is not grad and options["grad_scale"] is not None:
        grad.copy_(dense)
    count_write(w.parts)
