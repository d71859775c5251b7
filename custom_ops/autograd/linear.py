# SPDX-License-Identifier: Apache-2.0
"""The gradient of a grouped linear layer under a recipe.

T rows, E groups, K in_features, N out_features, r the rank of an adapter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.projection import Kept, Parameters, Projection
from grouped_linear.autograd.saved import save, saved
from grouped_linear.autograd.wgrad import Wgrad, edges_of, needs_grad_now
from grouped_linear.ops.gradients import refuse_transforms
from grouped_linear.recipes import Layouts, Operands
from grouped_linear.recipes.format import BOTH, COLUMNWISE_AGAIN, ROWWISE
from grouped_linear.recipes.quantize import quantize
from grouped_linear.recipes.quantize_weight import is_transposed


class LinearCall(NamedTuple):
    """A call of a linear layer, with the tensors that autograd need not know."""

    projection: Projection
    grad_enabled: bool  # whether a backward may follow: needs_input_grad is true under no_grad
    m_splits_E: Tensor | None  # the rows of each group, for a forward in one op: takes_one_op
    offs_E: Tensor | None  # the group ends, for any other
    save_input: bool = False  # save x itself for the backward, and quantize it for wgrad there
    defer_wgrad: Callable[[Wgrad], None] | None = None  # takes wgrad, which no backward computes


class Saved(NamedTuple):
    """The tensors that the forward saves besides its projection's; None where none is needed."""

    offs_E: Any
    x: Any  # columnwise in its format; with save_input the input itself
    x_scale: Tensor | None
    adapter_x_TK: Tensor | None  # the adapter's input before dropout


def takes_one_op(projection: Projection) -> bool:
    """Whether this is an eager call with one packed weight, stored as it is multiplied, in e4m3.

    A compiled graph has the separate ops: passes look for them, and an op costs no time there.
    """
    if not projection.recipe.has_linear_op or torch.compiler.is_compiling():
        return False
    weight = projection.weights[0]
    other = weight.dim() == 2 or is_transposed(weight) or projection.in_mxfp4
    return projection.adapter is None and not other


NOTHING = Parameters(False, False, False, False)


class GroupedLinearFunction(torch.autograd.Function):
    """y[t] = x[t] @ weight[e].T + bias[e], with dgrad and wgrad computed as the recipe says.

    The forward quantizes and saves only what the backward will read: columnwise x for wgrad, the
    columnwise weight for dgrad, x [T, K] and h [T, r] for an adapter. Without gradients that is
    nothing.
    """

    @staticmethod
    def forward(ctx: Any, call: LinearCall, *tensors: Tensor | None) -> Tensor:
        """Compute fprop.

        ``tensors`` are what is differentiated: x_TK, bias_EN, a_ErK and b_ENr of the adapter, then
        one for each weight, whose gradients are returned, or where these are deferred any tensor
        that requires grad. Any of them may be None.

        The caller decides whether one op computes it, because Dynamo may trace the caller and run
        this function in eager mode. Tensors are one parameter, because Dynamo passes no ctx to a
        function with as many parameters as arguments where nothing needs a gradient (torch 2.11,
        2.13).
        """
        refuse_transforms("grouped_linear")
        projection, grad_enabled, m_splits_E, offs_E, save_input, ctx.defer_wgrad = call
        x_TK, bias_EN, _, _, *weights = tensors
        assert x_TK is not None
        need_x, needs = _needs(ctx) if grad_enabled else (False, NOTHING)
        if need_x or any(needs):
            ctx.projection, ctx.save_input = projection.for_backward(), save_input
            ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
            if projection.main_grad is not None or ctx.defer_wgrad is not None:
                ctx.weight_edges = edges_of(tensors, range(-len(weights), 0))
        if m_splits_E is not None:
            return _forward_in_one_op(ctx, projection, x_TK, m_splits_E, need_x, needs)
        assert offs_E is not None
        recipe, adapter = projection.recipe, projection.adapter
        layouts = BOTH if needs.weight and not save_input else ROWWISE
        x = quantize(x_TK, recipe.input, offs_E, layouts)
        w = projection.weight(need_x)
        term = None if adapter is None else adapter.forward_term(adapter.input(x_TK), offs_E)
        if need_x or any(needs):
            saved_x = x_TK if save_input and needs.weight else x.columnwise
            own = Saved(offs_E, saved_x, x.columnwise_scale, x_TK if needs.a else None)
            kept, experts = projection.keep(w, needs, need_x, term), ()
            if isinstance(kept.weight, tuple):
                kept, experts = kept._replace(weight=None), kept.weight
            save(ctx, (own, kept, experts), recipe)
        return projection.fprop(x, w, offs_E, x_TK.dtype, term).compute()

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dgrad, wgrad and the bias gradient, each only where it is needed."""
        projection, as_results = ctx.projection, False
        need_x, needs = _needs(ctx)
        written = projection.main_grad is not None or ctx.defer_wgrad is not None
        if written:  # the engine is asked about gradients that are not returned
            of_weights = ctx.needs_input_grad[-len(ctx.weight_edges) :]
            now, as_results = needs_grad_now(ctx, of_weights, ctx.weight_edges)
            needs = needs._replace(weight=any(now))
        own, kept, experts = saved(ctx, "grouped_linear")
        if experts:
            kept = kept._replace(weight=experts)
        offs_E = own.offs_E
        may_take_one_op = projection.recipe.has_linear_grad_op and not (written or ctx.save_input)
        if (need_x or needs.weight) and may_take_one_op and takes_one_op(projection):
            return _backward_in_one_op(ctx, own, kept, dy_TN, need_x, needs)
        projection = projection.restored(kept)
        recipe, adapter = projection.recipe, projection.adapter
        layouts = Layouts(need_x, needs.weight, needs.bias)
        dy = quantize(dy_TN, recipe.grad_output, offs_E, layouts)
        dx_TK = db_EN = da_ErK = db_ENr = term = None
        dws: tuple[Tensor | None, ...] = (None,) * len(projection.weights)
        if adapter is not None:
            of_adapter = dy_TN, own.adapter_x_TK, kept.h_Tr, offs_E
            da_ErK, db_ENr, term = adapter.grads(*of_adapter, need_x)
        if need_x:
            term, beside = projection.split(term)
            dx_TK = projection.dgrad(dy, kept, offs_E, dy_TN.dtype, term).compute()
            if beside is not None:
                dx_TK = dx_TK + adapter.input(beside.product(offs_E))
        if needs.weight:
            x = Operands(None, None, own.x, own.x_scale)
            if ctx.save_input:
                x = quantize(own.x, recipe.input, offs_E, COLUMNWISE_AGAIN)
            wgrad = projection.wgrad(dy, x, offs_E)
            if ctx.defer_wgrad is None:
                dws = wgrad.compute(as_results)
            else:
                ctx.defer_wgrad(wgrad)
        if dy.bias_grad is not None:
            db_EN = dy.bias_grad.to(ctx.bias_dtype)
        return None, dx_TK, db_EN, da_ErK, db_ENr, *dws


def _needs(ctx: Any) -> tuple[bool, Parameters]:
    """Whether the gradient of x is needed, and which of the parameters; of E weights any."""
    _, need_x, need_bias, need_a, need_b, *need_weights = ctx.needs_input_grad
    return need_x, Parameters(any(need_weights), need_bias, need_a, need_b)


# --- eager block scaling: one op forward, one op backward ----------------------------------------


def _forward_in_one_op(
    ctx: Any,
    projection: Projection,
    x_TK: Tensor,
    m_splits_E: Tensor,
    need_x: bool,
    needs: Parameters,
) -> Tensor:
    """Compute fprop, and save what the separate ops would save."""
    format, bias_EN = projection.recipe.input, projection.bias_EN
    in_fp8 = format.wgrad_dtype is None
    y, offs_E, x_t, x_t_scale, w_t, w_scale = ops.block_scaled_linear(
        x_TK,
        projection.weights[0],
        m_splits_E,
        None if bias_EN is None else bias_EN.to(x_TK.dtype),
        amax_epsilon=format.epsilon,
        power_of_two_scales=format.power_of_two_scales,
        share_scales=format.share_scales,
        columnwise_x=needs.weight and in_fp8,
        columnwise_w=need_x,
    )
    if needs.weight and not in_fp8:
        x_t = x_TK.to(format.wgrad_dtype)
    if need_x or any(needs):
        save(ctx, (Saved(offs_E, x_t, x_t_scale, None), Kept(w_t, w_scale), ()), projection.recipe)
    return y


def _backward_in_one_op(
    ctx: Any, own: Saved, kept: Kept, dy_TN: Tensor, need_x: bool, needs: Parameters
) -> tuple[Tensor | None, ...]:
    """Compute the gradients that :meth:`GroupedLinearFunction.backward` returns."""
    projection = ctx.projection
    dtype, format, w_t = projection.weights[0].dtype, projection.recipe.grad_output, kept.weight
    if need_x and projection.transposes_weight:
        w_t = ops.transpose_weight(w_t)
    dx_TK, dw_ENK, db_EN = ops.block_scaled_linear_grad(
        dy_TN,
        own.offs_E,
        *((own.x, own.x_scale) if needs.weight else (None, None)),
        *((w_t, kept.weight_scale) if need_x else (None, None)),
        amax_epsilon=format.epsilon,
        power_of_two_scales=format.power_of_two_scales,
        bias_grad=needs.bias,
        out_dtype=None if dtype is dy_TN.dtype else dtype,
    )
    if db_EN is not None:
        db_EN = db_EN.to(ctx.bias_dtype)
    return None, dx_TK, db_EN, None, None, dw_ENK
