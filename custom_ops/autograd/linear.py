"""The gradient of a grouped linear layer under a recipe.

T rows, E groups, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.autograd.context import LinearContext
from grouped_linear.autograd.gemm import multiply
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.saved import saved_tensors
from grouped_linear.autograd.wgrad import needs_grad_now
from grouped_linear.recipes import UNQUANTIZED, OutputMask


class GroupedLinearFunction(torch.autograd.Function):
    """y[t] = x[t] @ weight[e].T + bias[e], with dgrad and wgrad computed as the recipe says.

    Only what the backward will read is quantized and saved: nothing without gradients, columnwise x
    for wgrad, the columnwise weight for dgrad.
    """

    @staticmethod
    def forward(ctx: Any, context: LinearContext, *operands: Tensor | None) -> Tensor:
        """Compute fprop.

        Args:
            context: the rest of the call.
            operands: x_TK; bias_EN; m_splits_E, the rows of each group, for a forward in one op;
                offs_E, the group ends, for any other forward; then one tensor for each of the
                context's weights, of which weight gradients are returned, or any tensor that
                requires grad where they are deferred. The caller decides between m_splits_E and
                offs_E, because Dynamo may trace the caller and run this function in eager mode.
                The operands are not a parameter each: where nothing needs a gradient and there are
                as many arguments as parameters, ctx among them, Dynamo passes no ctx (torch 2.11,
                2.13).
        """
        x_TK, bias_EN, m_splits_E, offs_E, *_ = operands
        assert x_TK is not None
        needs = ctx.needs_input_grad
        need_x = context.grad_enabled and needs[1]
        need_weight = context.grad_enabled and any(needs[5:])
        recipe, options = context.recipe, context.options
        ctx.context = context.for_backward()
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
        bias = None if bias_EN is None else bias_EN.to(x_TK.dtype)
        if offs_E is None:
            assert m_splits_E is not None
            y, offs_E, *x_for_wgrad, w_t, w_scale = recipe.linear(
                x_TK, context.weights[0], m_splits_E, bias, need_weight, need_x
            )
            ctx.save_for_backward(offs_E, None, *x_for_wgrad, w_scale, w_t)
            return y
        x_state, _, dy_state = options.states or (None, None, None)
        columnwise_now = need_weight and not options.save_input
        x = recipe.quantize_input(x_TK, offs_E, x_state, OutputMask(True, columnwise_now, False))
        w = context.weight_operands(x, offs_E, need_x)
        saved_x = x_TK if options.save_input and need_weight else x.columnwise
        ctx.save_for_backward(
            offs_E,
            None if dy_state is None else dy_state.scale,
            saved_x,
            x.columnwise_scale,
            w.columnwise_scale,
            *(w.columnwise if isinstance(w.columnwise, tuple) else (w.columnwise,)),
        )
        return multiply(
            x.rowwise, x.rowwise_scale, w.rowwise, w.rowwise_scale, offs_E, bias, x_TK.dtype
        )

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dgrad, wgrad and the bias gradient, each only where it is needed."""
        context: LinearContext = ctx.context
        options = context.options
        _, need_x, need_bias, _, _, *need_weights = ctx.needs_input_grad
        if options.main_grad is not None or options.deferred_wgrad is not None:
            edges = slice(-len(need_weights), None)
            need_weights = list(needs_grad_now(ctx, need_weights, edges))
        need_weight = any(need_weights)
        offs_E, dy_scale, x, x_scale, w_scale, *w = saved_tensors(ctx, "grouped_linear")
        if (need_x or need_weight) and context.has_one_op_backward:
            dx_TK, dw_ENK, db_EN = context.recipe.linear_grad(
                dy_TN,
                offs_E,
                (x, x_scale) if need_weight else (None, None),
                (w[0], w_scale) if need_x else (None, None),
                need_bias,
                context.weights[0].dtype,
            )
            if db_EN is not None:
                db_EN = db_EN.to(ctx.bias_dtype)
            return None, dx_TK, db_EN, None, None, dw_ENK
        # For the bias alone nothing is quantized.
        recipe = context.recipe if need_x or need_weight else UNQUANTIZED
        dy = recipe.quantize_grad_output(
            dy_TN,
            offs_E,
            context.grad_output_state(dy_scale),
            OutputMask(need_x, need_weight, need_bias),
        )
        dx_TK = db_EN = None
        dws: tuple[Tensor | None, ...] = (None,) * len(need_weights)
        if need_x:
            weight = context.for_dgrad(tuple(w) if w[0].dim() == 2 else w[0], w_scale)
            dx_TK = multiply(
                dy.rowwise, dy.rowwise_scale, *weight, offs_E, None, dy_TN.dtype, transpose_b=True
            )
        if need_weight:
            if options.save_input:  # refused by the layer under a recipe with a state
                x_t = recipe.quantize_input(x, offs_E, None, OutputMask(False, True, False))
                x, x_scale = x_t.columnwise, x_t.columnwise_scale
            wgrad = context.wgrad(dy, x, x_scale, offs_E)
            if options.deferred_wgrad is None:
                dws = wgrad.compute()
            else:
                captured = dy_TN.is_cuda and torch.cuda.is_current_stream_capturing()
                options.deferred_wgrad.append(wgrad.deferred(captured))
        if dy.bias_grad is not None:
            db_EN = dy.bias_grad.to(ctx.bias_dtype)
        return None, dx_TK, db_EN, None, None, *dws
