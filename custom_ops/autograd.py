"""Gradients: of the op grouped_mm, and of a whole grouped linear layer under a recipe.

T rows, E groups, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grouped_linear import ops
from grouped_linear.recipes import Recipe


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_TK, b_ENK, offs_E, bias_EN, _ = inputs
    ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
    ctx.save_for_backward(a_TK, b_ENK, offs_E)


@once_differentiable
def _grouped_mm_backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
    a_TK, b_ENK, offs_E = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    # The dispatcher drops trailing arguments that equal their defaults, so there may be no fourth.
    need_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    dy_cast_TN = dy_TN.to(a_TK.dtype)
    return (
        ops.grouped_mm(dy_cast_TN, b_ENK.transpose(1, 2), offs_E) if need_a else None,
        ops.grouped_mm_wgrad(dy_cast_TN, a_TK, offs_E) if need_b else None,
        None,
        ops.grouped_bias_grad(dy_TN, offs_E).to(ctx.bias_dtype) if need_bias else None,
        None,
    )


torch.library.register_autograd(
    "grouped_linear::grouped_mm", _grouped_mm_backward, setup_context=_grouped_mm_setup
)


class GroupedLinearFunction(torch.autograd.Function):
    """y[t] = x[t] @ weight[e].T + bias[e], with dgrad and wgrad computed as the recipe says.

    Only what the backward will read is quantized and kept: nothing without gradients, columnwise x
    for wgrad, the transposed weight for dgrad.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_ENK: Tensor,
        bias_EN: Tensor | None,
        offs_E: Tensor,
        recipe: Recipe,
        grad_enabled: bool,
    ) -> Tensor:
        """Fprop. grad_enabled: whether a backward may follow; needs_input_grad does not tell."""
        need_x, need_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        ctx.recipe = recipe
        ctx.weight_dtype = weight_ENK.dtype
        if recipe is None:
            ctx.save_for_backward(
                offs_E, x_TK if need_weight else None, weight_ENK if need_x else None
            )
            return ops.grouped_mm(x_TK, weight_ENK, offs_E, bias_EN)

        x = ops.group_quantize(
            x_TK,
            offs_E,
            amax_epsilon=recipe.amax_epsilon,
            power_of_two_scales=recipe.power_of_two_scales,
            columnwise=need_weight,
        )
        w = ops.quantize_weight(
            weight_ENK,
            amax_epsilon=recipe.amax_epsilon,
            power_of_two_scales=recipe.power_of_two_scales,
            columnwise=need_x,
        )
        ctx.save_for_backward(offs_E, x.q_t, x.scale_t, w.q_t, w.scale if need_x else None)
        assert x.q is not None
        assert x.scale is not None
        return ops.grouped_scaled_mm(x.q, w.q, x.scale, w.scale, offs_E, bias_EN, x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Dgrad, wgrad and the bias gradient, each only where it is needed."""
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        recipe: Recipe = ctx.recipe
        dx_TK = dw_ENK = db_EN = None
        if recipe is None or not (need_x or need_weight):
            offs_E, *saved = ctx.saved_tensors
            if need_x:
                dx_TK = ops.grouped_mm(dy_TN, saved[1].transpose(1, 2), offs_E)
            if need_weight:
                dw_ENK = ops.grouped_mm_wgrad(dy_TN, saved[0], offs_E)
            if need_bias:
                db_EN = ops.grouped_bias_grad(dy_TN, offs_E)
        else:
            offs_E, x_q_t, x_scale_t, w_q_t, w_scale = ctx.saved_tensors
            dy = ops.group_quantize(
                dy_TN,
                offs_E,
                amax_epsilon=recipe.amax_epsilon,
                power_of_two_scales=recipe.power_of_two_scales,
                rowwise=need_x,
                columnwise=need_weight,
                bias_grad=need_bias,
            )
            if need_x:
                assert dy.q is not None
                assert dy.scale is not None
                dx_TK = ops.grouped_scaled_mm(
                    dy.q, w_q_t, dy.scale, w_scale.transpose(1, 2), offs_E, None, dy_TN.dtype
                )
            if need_weight:
                assert dy.q_t is not None
                assert dy.scale_t is not None
                dw_ENK = ops.grouped_scaled_mm_wgrad(
                    dy.q_t, x_q_t, dy.scale_t, x_scale_t, offs_E, ctx.weight_dtype
                )
            db_EN = dy.bias_grad
        if db_EN is not None:
            db_EN = db_EN.to(dy_TN.dtype)  # bias was added in y's dtype
        return dx_TK, dw_ENK, db_EN, None, None, None


_implementations = torch.library.Library("grouped_linear", "IMPL")


def _bump_versions(op: torch._ops.OpOverload) -> None:
    """Make an in-place op increase the version of what it writes, as torch's own in-place ops do.

    Without this a tensor that was saved for backward and then overwritten would go unnoticed.
    """
    written = [
        i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> None:
        for i in written:
            if torch.is_grad_enabled() and args[i].requires_grad:
                name = op._schema.arguments[i].name
                raise RuntimeError(f"{op._opname}: {name} must not require grad")
        op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        for i in written:
            torch.autograd.graph.increment_version(args[i])

    _implementations.impl(op, kernel, "ADInplaceOrView", with_keyset=True)


_bump_versions(torch.ops.grouped_linear.grouped_mm_wgrad_.default)
_bump_versions(torch.ops.grouped_linear.grouped_scaled_mm_wgrad_.default)
