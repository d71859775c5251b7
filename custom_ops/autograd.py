"""Gradients: of the op grouped_mm, and of a whole grouped linear layer under a recipe.

T rows, E groups, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grouped_linear import ops
from grouped_linear.recipes import Operand, Recipe, Scheme, Slot, Unquantized, Wanted


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


def _multiply(
    a: Operand | None,
    b: Operand | None,
    offs_E: Tensor,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """a[t] @ b[e].T + bias[e]: fprop and dgrad."""
    assert a is not None
    assert b is not None
    if a.scale is None or b.scale is None:
        return ops.grouped_mm(a.values, b.values, offs_E, bias_EN, dtype)
    return ops.grouped_scaled_mm(a.values, b.values, a.scale, b.scale, offs_E, bias_EN, dtype)


def _multiply_columns(dy: Operand | None, x: Operand, offs_E: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x over each group's rows: wgrad."""
    assert dy is not None
    if dy.scale is None or x.scale is None:
        return ops.grouped_mm_wgrad(dy.values, x.values, offs_E, dtype)
    return ops.grouped_scaled_mm_wgrad(dy.values, x.values, dy.scale, x.scale, offs_E, dtype)


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
        *state: Tensor,
    ) -> Tensor:
        """Fprop.

        Args:
            grad_enabled: whether a backward may follow; needs_input_grad does not tell.
            state: the scale and the amax of x, weight and dy, where the recipe keeps some.
        """
        need_x, need_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        scheme: Scheme = recipe or Unquantized()
        x_slot = w_slot = dy_scale = ctx.dy_amax = None
        if state:
            x_scale, x_amax, w_scale, w_amax, dy_scale, ctx.dy_amax = state
            # Nothing is learnt from a forward that no backward follows.
            x_slot = Slot(x_scale, x_amax if grad_enabled else None)
            w_slot = Slot(w_scale, w_amax if grad_enabled else None)
        x = scheme.activation(x_TK, offs_E, x_slot, need_weight)
        w = scheme.weight(weight_ENK, w_slot, need_x)
        ctx.recipe = recipe
        ctx.weight_dtype = weight_ENK.dtype
        ctx.state_args = len(state)
        nothing = (None, None)
        # Saved, so that an update between forward and backward raises; amax is only ever raised.
        ctx.save_for_backward(
            offs_E, dy_scale, *(x.columnwise or nothing), *(w.columnwise or nothing)
        )
        return _multiply(x.rowwise, w.rowwise, offs_E, bias_EN, x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Dgrad, wgrad and the bias gradient, each only where it is needed."""
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        offs_E, dy_scale, x_t, x_t_scale, w_t, w_t_scale = ctx.saved_tensors
        # For the bias alone nothing is quantized.
        scheme: Scheme = (ctx.recipe if need_x or need_weight else None) or Unquantized()
        slot = None if dy_scale is None else Slot(dy_scale, ctx.dy_amax)
        wanted = Wanted(need_x, need_weight, need_bias)
        dy = scheme.gradient(dy_TN, offs_E, slot, wanted)
        dx_TK = dw_ENK = db_EN = None
        if need_x:
            dx_TK = _multiply(dy.rowwise, Operand(w_t, w_t_scale), offs_E, None, dy_TN.dtype)
        if need_weight:
            x_columns = Operand(x_t, x_t_scale)
            dw_ENK = _multiply_columns(dy.columnwise, x_columns, offs_E, ctx.weight_dtype)
        if dy.bias_grad is not None:
            db_EN = dy.bias_grad.to(dy_TN.dtype)  # bias was added in y's dtype
        return dx_TK, dw_ENK, db_EN, None, None, None, *(None,) * ctx.state_args


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

    def tensors(argument: Any) -> list[Tensor]:
        if argument is None:
            return []
        return [argument] if isinstance(argument, Tensor) else list(argument)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        for i in written:
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors(args[i])):
                name = op._schema.arguments[i].name
                raise RuntimeError(f"{op._opname}: {name} must not require grad")
        outputs = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        for i in written:
            for t in tensors(args[i]):
                torch.autograd.graph.increment_version(t)
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
):
    _bump_versions(_op)
