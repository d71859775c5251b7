"""The gradient of a grouped linear layer under a recipe.

T rows, E groups, K in_features, N out_features.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.context import LinearContext
from grouped_linear.autograd.gemm import multiply
from grouped_linear.autograd.low_rank import forward_term, low_rank_grads
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.saved import saved_tensors, scale_of
from grouped_linear.autograd.wgrad import edges_behind, needs_grad_now
from grouped_linear.recipes import Layouts, Operands, RowOperands, quantize


class GroupedLinearFunction(torch.autograd.Function):
    """y[t] = x[t] @ weight[e].T + bias[e], with dgrad and wgrad computed as the recipe says.

    The forward quantizes and saves only what the backward will read: columnwise x for wgrad, the
    columnwise weight for dgrad, x [T, K] and h [T, r] for an adapter. Without gradients that is
    nothing.
    """

    @staticmethod
    def forward(ctx: Any, context: LinearContext, *operands: Tensor | None) -> Tensor:
        """Compute fprop.

        Args:
            context: the rest of the call.
            operands: x_TK; bias_EN; m_splits_E, the rows of each group, for a forward in one op;
                offs_E, the group ends, for any other forward; a_ErK and b_ENr of the adapter, and
                the dropped x_TK that it multiplies; then one tensor for each of the context's
                weights, whose gradients are returned, or where these are deferred any tensor that
                requires grad. What does not apply is None.

        The caller decides between m_splits_E and offs_E, because Dynamo may trace the caller and
        run this function in eager mode. Operands are one parameter, because Dynamo passes no ctx to
        a function with as many parameters as arguments where nothing needs a gradient (torch 2.11,
        2.13).
        """
        x_TK, bias_EN, m_splits_E, offs_E, a_ErK, b_ENr, dropped_x_TK, *_ = operands
        assert x_TK is not None
        needs = [context.grad_enabled and need for need in ctx.needs_input_grad]
        need_x, need_a, need_b = needs[1], *needs[5:7]
        need_weight = any(needs[8:])
        recipe, options = context.recipe, context.options
        ctx.context = context.for_backward()
        ctx.weight_edges = edges_behind(operands[:7], len(operands) - 7)
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
        bias = None if bias_EN is None else bias_EN.to(x_TK.dtype)
        if offs_E is None:
            assert m_splits_E is not None
            x_format, in_fp8 = recipe.input, recipe.input.wgrad_dtype is None
            y, offs_E, x_t, x_t_scale, w_t, w_scale = ops.block_scaled_linear(
                x_TK,
                context.weights[0],
                m_splits_E,
                bias,
                amax_epsilon=x_format.epsilon,
                power_of_two_scales=x_format.power_of_two_scales,
                share_scales=x_format.share_scales,
                columnwise_x=need_weight and in_fp8,
                columnwise_w=need_x,
            )
            if need_weight and not in_fp8:
                x_t = x_TK.to(x_format.wgrad_dtype)
            ctx.save_for_backward(offs_E, *(None,) * 5, x_t, x_t_scale, w_scale, w_t)
            return y
        columnwise_now = need_weight and not options.save_input
        x = quantize(x_TK, recipe.input, offs_E, Layouts(True, columnwise_now))
        w = context.weight_operands(need_x)
        if options.watched is not None:
            options.watched.input(x_TK, RowOperands(x), offs_E, recipe.input, columnwise_now)
            options.watched.weight(context.weights, w, recipe.weight)
        saved_x = x_TK if options.save_input and need_weight else x.columnwise
        lora_x_TK = x_TK if dropped_x_TK is None else dropped_x_TK
        term = forward_term((a_ErK, b_ENr, options.lora_scaling), lora_x_TK, offs_E)
        ctx.save_for_backward(
            offs_E,
            scale_of(recipe.grad_output),
            *((a_ErK, b_ENr) if need_x or need_a or need_b else (None, None)),
            lora_x_TK if need_a else None,
            term.a_Tr if need_b and term is not None else None,
            saved_x,
            x.columnwise_scale,
            w.columnwise_scale,
            *(w.columnwise if isinstance(w.columnwise, tuple) else (w.columnwise,)),
        )
        return multiply(x, w, offs_E, bias, x_TK.dtype, transpose_b=True, low_rank=term)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dgrad, wgrad and the bias gradient, each only where it is needed."""
        context: LinearContext = ctx.context
        options = context.options
        _, need_x, need_bias, *_ = ctx.needs_input_grad
        need_dropped_x, *need_weights = ctx.needs_input_grad[7:]
        if options.main_grad is not None or options.defer_wgrad is not None:
            need_weights = list(needs_grad_now(ctx, need_weights, ctx.weight_edges))
        need_weight = any(need_weights)
        offs_E, _, a_ErK, b_ENr, lora_x_TK, h_Tr, x, x_scale, w_scale, *w = saved_tensors(
            ctx, "grouped_linear"
        )
        if (need_x or need_weight) and context.has_one_op_backward:
            dtype, format = context.weights[0].dtype, context.recipe.grad_output
            if need_x and context.transposes_weight:
                w = [ops.transpose_weight(w[0])]
            dx_TK, dw_ENK, db_EN = ops.block_scaled_linear_grad(
                dy_TN,
                offs_E,
                *((x, x_scale) if need_weight else (None, None)),
                *((w[0], w_scale) if need_x else (None, None)),
                amax_epsilon=format.epsilon,
                power_of_two_scales=format.power_of_two_scales,
                bias_grad=need_bias,
                out_dtype=None if dtype is dy_TN.dtype else dtype,
            )
            if db_EN is not None:
                db_EN = db_EN.to(ctx.bias_dtype)
            return None, dx_TK, db_EN, None, None, *(None,) * 3, dw_ENK
        recipe = context.recipe
        layouts = Layouts(need_x, need_weight, need_bias)
        dy = quantize(dy_TN, recipe.grad_output, offs_E, layouts)
        if options.watched is not None:
            options.watched.gradient(dy_TN, RowOperands(dy), offs_E, recipe.grad_output)
        dx_TK = db_EN = None
        dws: tuple[Tensor | None, ...] = (None,) * len(need_weights)
        adapter = a_ErK, b_ENr, options.lora_scaling
        da_ErK, db_ENr, term = low_rank_grads(adapter, dy_TN, lora_x_TK, h_Tr, offs_E, need_x)
        d_dropped_x_TK = None
        if need_dropped_x and term is not None:
            d_dropped_x_TK, term = ops.grouped_mm(*term, offs_E), None
        if need_x:
            weight = context.for_dgrad(tuple(w) if w[0].dim() == 2 else w[0], w_scale)
            dx_TK = multiply(dy, weight, offs_E, None, dy_TN.dtype, low_rank=term)
        if need_weight:
            x_t = Operands(None, None, x, x_scale)
            if options.save_input:
                x_t = quantize(x, recipe.input, offs_E, Layouts(False, True, again=True))
                if options.watched is not None:
                    options.watched.shares(x_t, offs_E, recipe.input)
            wgrad = context.wgrad(dy, x_t, offs_E)
            if options.defer_wgrad is None:
                dws = wgrad.compute()
            else:
                options.defer_wgrad(wgrad)
        if dy.bias_grad is not None:
            db_EN = dy.bias_grad.to(ctx.bias_dtype)
        return None, dx_TK, db_EN, None, None, da_ErK, db_ENr, d_dropped_x_TK, *dws
