"""Autograd of the ops themselves: grouped_mm's gradient, and versions of what ops write in place.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.gemm import weight_grad
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_TK, b_ENK, offs_E, bias_EN, _ = inputs
    ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
    ctx.save_for_backward(a_TK, b_ENK, offs_E)


@strictly_once_differentiable
def _grouped_mm_backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
    a_TK, b_ENK, offs_E = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    # The dispatcher drops trailing arguments that equal their defaults: there may be no fourth.
    need_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    dy_cast_TN = dy_TN.to(a_TK.dtype)
    return (
        ops.grouped_mm(dy_cast_TN, b_ENK.transpose(1, 2), offs_E) if need_a else None,
        weight_grad(b_ENK, dy_cast_TN, a_TK, None, None, offs_E, b_ENK.dtype) if need_b else None,
        None,
        ops.grouped_bias_grad(dy_TN, offs_E).to(ctx.bias_dtype) if need_bias else None,
        None,
    )


torch.library.register_autograd(
    "grouped_linear::grouped_mm", _grouped_mm_backward, setup_context=_grouped_mm_setup
)


_implementations = torch.library.Library("grouped_linear", "IMPL")


def _bump_versions(op: torch._ops.OpOverload) -> None:
    """Make an in-place op increment the versions of what it writes, as torch's in-place ops do.

    Otherwise autograd would not notice that a tensor saved for backward was overwritten.
    """
    written = [
        i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def tensors(argument: Any) -> Sequence[Tensor]:
        return (argument,) if isinstance(argument, Tensor) else argument or ()

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled():
            for i in written:
                if any(t.requires_grad for t in tensors(args[i])):
                    name = op._schema.arguments[i].name
                    raise RuntimeError(f"{op._opname}: {name} must not require grad")
        outputs = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version([t for i in written for t in tensors(args[i])])
        return outputs

    _implementations.impl(op, kernel, "ADInplaceOrView", with_keyset=True)


for _op in (
    torch.ops.grouped_linear.grouped_mm_wgrad_.default,
    torch.ops.grouped_linear.grouped_scaled_mm_wgrad_.default,
    torch.ops.grouped_linear.grouped_mm_wgrad_list_.default,
    torch.ops.grouped_linear.grouped_scaled_mm_wgrad_list_.default,
    torch.ops.grouped_linear.group_quantize_delayed_.default,
    torch.ops.grouped_linear.quantize_weight_delayed_.default,
    torch.ops.grouped_linear.update_scales_.default,
    torch.ops.grouped_linear.refresh_weight_.default,
    torch.ops.grouped_linear.refresh_weight_current_.default,
    torch.ops.grouped_linear.refresh_weight_delayed_.default,
    torch.ops.grouped_linear.refresh_weight_mx_.default,
    torch.ops.grouped_linear.adam_weight_.default,
):
    _bump_versions(_op)
