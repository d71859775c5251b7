# SPDX-License-Identifier: Apache-2.0
"""Autograd of the ops themselves: gradients, and versions of what ops write in place.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.wgrad import Wgrad
from grouped_linear.meta_kernels.rules import arguments_of
from grouped_linear.ops.gradients import WITHOUT_GRADIENT


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_TK, b_EKN, offs_E, bias_EN, _, rows_T, low_Tr, low_ErN = inputs
    ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
    ctx.save_for_backward(a_TK, b_EKN, offs_E, rows_T, low_Tr, low_ErN)


@strictly_once_differentiable
def _grouped_mm_backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
    a_TK, b_EKN, offs_E, rows_T, low_Tr, low_ErN = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    # The dispatcher drops trailing arguments that equal their defaults: there may be no fourth.
    need_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    need_low_a, need_low_b = (False, False) if low_Tr is None else ctx.needs_input_grad[6:8]
    dy_cast_TN = dy_TN.to(a_TK.dtype)
    da_TK = db_EKN = d_bias_EN = d_low_Tr = d_low_ErN = None
    if need_a:
        da_TK = ops.grouped_mm(dy_cast_TN, b_EKN.mT, offs_E)
        if rows_T is not None:
            # Each row's sum, in float32 as torch adds. Rows past the last group are zero already;
            # their numbers may be anything.
            used_T = torch.arange(rows_T.size(0), device=rows_T.device) < offs_E[-1]
            numbers_T = torch.where(used_T, rows_T, 0).long()
            total = a_TK.new_zeros(a_TK.shape, dtype=torch.float32)
            da_TK = total.index_add(0, numbers_T, da_TK.float()).to(a_TK.dtype)
    if need_b:
        db_EKN = _wgrad(b_EKN, dy_cast_TN, a_TK, offs_E, rows_T)
    if need_bias:
        d_bias_EN = ops.grouped_bias_grad(dy_TN, offs_E).to(ctx.bias_dtype)
    if need_low_a:
        d_low_Tr = ops.grouped_mm(dy_cast_TN, low_ErN.mT, offs_E)
    if need_low_b:
        d_low_ErN = _wgrad(low_ErN, dy_cast_TN, low_Tr, offs_E, None)
    return da_TK, db_EKN, None, d_bias_EN, None, None, d_low_Tr, d_low_ErN


def _wgrad(b: Tensor, dy: Tensor, a: Tensor, offs: Tensor, rows: Tensor | None) -> Tensor:
    (db,) = Wgrad((b.mT,), None, dy, a, None, None, offs, x_rows=rows).compute()
    assert db is not None
    return db.mT


torch.library.register_autograd(
    "grouped_linear::grouped_mm", _grouped_mm_backward, setup_context=_grouped_mm_setup
)


def _topk_experts_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # The dispatcher drops trailing arguments that equal their defaults.
    given = arguments_of(torch.ops.grouped_linear.topk_experts.default, inputs, {})
    ctx.scoring = {n: given[n] for n in ("score_function", "normalize", "scaling_factor")}
    ctx.save_for_backward(given["logits"], output[1])


@strictly_once_differentiable
def _topk_experts_backward(ctx: Any, d_weights_Tk: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits_TE, experts_Tk = ctx.saved_tensors
    d_logits_TE = ops.topk_experts_grad(d_weights_Tk, logits_TE, experts_Tk, **ctx.scoring)
    return d_logits_TE, *(None,) * 5


torch.library.register_autograd(
    "grouped_linear::topk_experts", _topk_experts_backward, setup_context=_topk_experts_setup
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


for _name in WITHOUT_GRADIENT:
    if (_op := getattr(torch.ops.grouped_linear, _name).default)._schema.is_mutable:
        _bump_versions(_op)
