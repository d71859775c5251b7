# SPDX-License-Identifier: Apache-2.0
"""The gradient of a grouped MLP under a recipe.

T tokens, C experts chosen for a token, R rows (T * C, or a bound plus one), E experts, H features
of a token, F features inside an expert, G = 2 F for gate and up together, r the rank of an adapter.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.activation import (
    MLPConfig,
    dh_for_grads,
    gate_up_and_h,
    grads_of_gate_up,
    weighted_h,
)
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.projection import Parameters, Projection
from grouped_linear.autograd.routing import ChosenRows, SortedRows
from grouped_linear.autograd.saved import save, saved
from grouped_linear.autograd.wgrad import edges_of, needs_grad_now
from grouped_linear.ops.gradients import refuse_transforms
from grouped_linear.recipes import Layouts
from grouped_linear.recipes.format import COLUMNWISE_AGAIN, ROWWISE
from grouped_linear.recipes.quantize import quantize, quantize_grads, recipe_of_wgrad


class Arriving(NamedTuple):
    """Tokens that other processes have sent to this call's experts, and that return to them.

    T are then the tokens of this process outside of the layer, and those that come inside of it.
    """

    transport: Any  # a Transport of grouped_linear.parallel.exchange
    received: Any  # what its ``receive`` returned
    weight_SC: Tensor  # float32, of S tokens that came; zero for a choice without a row


class MLPCall(NamedTuple):
    """A call of an expert layer, with the tensors that autograd need not know."""

    gate_up: Projection
    down: Projection
    config: MLPConfig
    rows: ChosenRows | SortedRows
    grad_enabled: bool  # whether a backward may follow: needs_input_grad is true under no_grad
    arriving: Arriving | None = None  # the tokens, where experts are on several processes


class _Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    weights: bool  # those of the routing
    gate_up: Parameters
    down: Parameters
    as_results: bool = False  # whether weight gradients are returned: needs_grad_now

    @classmethod
    def of(cls, ctx: Any) -> "_Needs":
        """The gradients that a backward may be asked for."""
        _, x, weights, *parameters = ctx.needs_input_grad
        return cls(x, weights, Parameters(*parameters[:4]), Parameters(*parameters[4:]))

    @classmethod
    def now(cls, ctx: Any) -> "_Needs":
        """The gradients that this backward computes; the engine tells of those that are written."""
        needs = cls.of(ctx)
        if ctx.gate_up.main_grad is None and ctx.down.main_grad is None:
            return needs
        x, weights, gate_up, down, _ = needs
        given = gate_up.weight, down.weight
        asked, as_results = needs_grad_now(ctx, given, ctx.weight_edges)
        of_gate_up, of_down = asked
        gate_up, down = gate_up._replace(weight=of_gate_up), down._replace(weight=of_down)
        return cls(x, weights, gate_up, down, as_results)

    @property
    def dh(self) -> bool:
        """Whether dgrad of the second layer is needed."""
        return self.x or any(self.gate_up) or self.weights

    @property
    def activation(self) -> bool:
        """Whether the activation is needed again: its gradient, or its output."""
        return self.dh or self.down.weight or self.down.a


NOTHING = _Needs(False, False, *(Parameters(False, False, False, False),) * 2)


class Saved(NamedTuple):
    """The tensors that the forward saves besides its projections' and its routing's.

    None where no gradient needs one.
    """

    weight_TC: Any  # the weights of the routing
    x_TH: Any
    gate_up_RG: Any  # in FP8 if the layer saves it so
    gate_up_scale: Tensor | None
    down_bias_EH: Tensor | None


class GroupedMLPFunction(torch.autograd.Function):
    """Gather, gate and up, activation, down, weighted sum: ``grouped_mlp``, with its routing.

    Where rows come sorted, they are the tokens, and nothing is gathered or summed.

    The forward saves x [T, H] as it came, the output of the first GEMM [R, G] or what that is
    computed from again, the routing, the columnwise weights and the adapters' products [R, r], each
    only where a gradient needs it. The backward gathers x again, and makes the activation's output
    h again beside its gradient. It needs no output of the experts: a routing weight's gradient is
    the sum of dh * h, where dh is the gradient of h for an unweighted output.
    """

    @staticmethod
    def forward(ctx: Any, call: MLPCall, *tensors: Tensor | None) -> Tensor:
        """Gather rows, send them through both layers, and sum each token's rows with its weights.

        ``tensors`` are what is differentiated: x_TH, the weights of the routing, and for each
        projection weight, bias, a and b of its adapter. Any of them may be None. They are one
        parameter as in :class:`GroupedLinearFunction`.
        """
        refuse_transforms("grouped_mlp")
        gate_up, down, config, rows, grad_enabled, arriving = call
        x_TH, weight_TC, *_ = tensors
        assert x_TH is not None
        needs = _Needs.of(ctx) if grad_enabled else NOTHING
        offs_E, dtype = rows.offs, x_TH.dtype
        gate_up_w, gate_up_term, adapter = gate_up.weight(needs.x), None, gate_up.adapter
        if arriving is not None:
            ctx.weight_dtype = None if weight_TC is None else weight_TC.dtype
            x_TH = arriving.transport.finish_dispatch(arriving.received, dtype)
            weight_TC = arriving.weight_SC

        # The first layer, of gathered tokens, and the activation of its output.
        x = gate_up.input(rows.source(x_TH), offs_E, ROWWISE)
        if adapter is not None:
            gate_up_term = adapter.forward_term(adapter.input(x_TH), offs_E, rows.token)
        fprop = gate_up.fprop(x, gate_up_w, offs_E, dtype, gate_up_term)
        recompute = needs.activation and config.recompute
        keep = needs.activation and not recompute
        gate_up_RG, h, h_RF = gate_up_and_h(
            fprop, config.activation, down.recipe.input, keep, down.adapter is not None
        )
        saved_RG, saved_scale = config.save(gate_up_RG if keep else None, offs_E)
        del gate_up_RG, x, fprop  # lowers the peak memory of an eager step

        # The second layer.
        down_w, down_term, adapter = down.weight(needs.dh), None, down.adapter
        if adapter is not None and h_RF is not None:
            down_term = adapter.forward_term(adapter.input(h_RF), offs_E)
        del h_RF
        y_RH = down.fprop(h, down_w, offs_E, dtype, down_term).compute()

        if needs.dh or any(needs.down):
            biases = gate_up.bias_EN, down.bias_EN
            ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
            if gate_up.main_grad is not None or down.main_grad is not None:
                ctx.weight_edges = edges_of(tensors, (2, 6))  # where both weights are
            ctx.activation = config.activation
            ctx.gate_up, ctx.down = gate_up.for_backward(), down.for_backward()
            saved_x_TH = x_TH if needs.gate_up.weight or needs.gate_up.a or recompute else None
            bias_EH = down.bias_EN if needs.dh else None
            own = Saved(weight_TC, saved_x_TH, saved_RG, saved_scale, bias_EH)
            dgrad = needs.x or recompute
            of_gate_up = gate_up.keep(gate_up_w, needs.gate_up, dgrad, gate_up_term, recompute)
            of_down = down.keep(down_w, needs.down, needs.dh, down_term)
            read = rows._replace(routed=None) if isinstance(rows, ChosenRows) else rows
            parts, ctx.transport = [own, of_gate_up, of_down, read], None
            if arriving is not None:
                parts.append(arriving.transport.exchange)
                ctx.transport = arriving.transport._replace(exchange=None)
            save(ctx, parts, gate_up.recipe, down.recipe)
        y_TH = rows.combine(y_RH, weight_TC)
        if arriving is None:
            return y_TH
        return arriving.transport.finish_combine(arriving.transport.start_combine(y_TH))

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the routing weights and the parameters, each only where needed."""
        needs = _Needs.now(ctx)
        own, of_gate_up, of_down, rows, *exchange = saved(ctx, "grouped_mlp")
        weight_TC, transport = own.weight_TC, ctx.transport
        if transport is not None:
            transport = transport._replace(exchange=exchange[0])
        offs_E, dtype = rows.offs, d_out_TH.dtype
        gate_up, down = ctx.gate_up.restored(of_gate_up), ctx.down.restored(of_down)
        recipe_of_down = recipe_of_wgrad(down.recipe, dtype, down.in_features)
        if recipe_of_down is not down.recipe:
            down = down._replace(recipe=recipe_of_down)
        dx_TH = d_weight_TC = d_gate_up_RG = h_RF = None
        d_gate_up_w = d_gate_up_bias = d_gate_up_a = d_gate_up_b = None
        d_down_w = d_down_bias = d_down_a = d_down_b = None

        # gate_up is computed again while the gradient of the output travels.
        sent = None if transport is None else transport.start_dispatch(d_out_TH)
        if needs.activation:
            gate_up_RG, scale = own.gate_up_RG, own.gate_up_scale
            if gate_up_RG is None:
                x = rows.source(own.x_TH), own.x_TH, rows.token
                gate_up_RG = gate_up.fprop_again(of_gate_up, *x, offs_E, d_out_TH).compute()
            elif scale is not None:
                gate_up_RG = ops.group_dequantize(gate_up_RG, scale, offs_E, dtype)
        if transport is not None:
            d_out_TH = transport.finish_dispatch(transport.receive(sent), dtype)

        # The gradient of the second layer's output before it is weighted. Its wgrad multiplies it
        # by the weighted h.
        if needs.down.bias:
            dy_RH = rows.weighted_gradient(d_out_TH, weight_TC)
            d_down_bias = ops.grouped_bias_grad(dy_RH, offs_E).to(ctx.bias_dtypes[1])
        weight_R = rows.weights(weight_TC, d_out_TH)
        if needs.dh or needs.down.weight:
            layouts = Layouts(needs.dh, needs.down.weight)
            dy = down.gradient(rows.source(d_out_TH), offs_E, layouts)

        # The second layer's adapter, which multiplies that gradient itself.
        term, adapter = None, down.adapter
        if adapter is not None and (needs.dh or needs.down.a):
            term = adapter.backward_term(d_out_TH, offs_E, rows.token)
        d_down_Rr = None if term is None else term.a_Tr
        if adapter is not None and needs.down.b:
            weighted_Rr = (weight_R[:, None] * of_down.h_Tr).to(dtype)
            d_down_b = adapter.grad_of_b(d_out_TH, weighted_Rr, offs_E, rows.token)

        # Its dgrad, the activation's gradient, and h again.
        if needs.dh:
            term, beside = down.split(term)
            more_dh_RF = None if beside is None else adapter.input(beside.product(offs_E))
            keep = needs.down.a or gate_up.adapter is not None
            dgrad = down.dgrad(dy, of_down, offs_E, dtype, term)
            dh = dh_for_grads(dgrad, more_dh_RF, ctx.activation)
            del dgrad  # as below, for the peak memory of an eager step
            if not needs.down.weight:
                del dy
            grads = grads_of_gate_up(dh, gate_up_RG, weight_R, offs_E, ctx.activation, keep=keep)
            del dh, more_dh_RF, gate_up_RG
            layouts = Layouts(needs.x, needs.gate_up.weight, needs.gate_up.bias)
            formats = gate_up.recipe.grad_output, layouts, down.recipe.input, needs.down.weight
            d_gate_up, h, d_weight_R = quantize_grads(grads, offs_E, *formats)
            if isinstance(grads, ops.SwigluGrad) and keep:
                d_gate_up_RG, h_RF = grads.d_gate_up, grads.h
            del grads
        elif needs.down.weight or needs.down.a:
            h_RF = weighted_h(gate_up_RG, weight_R, offs_E, ctx.activation)
            if needs.down.weight:
                h = quantize(h_RF, down.recipe.input, offs_E, COLUMNWISE_AGAIN)
        if needs.weights:
            d_weight_TC = rows.gradient_of_weights(d_weight_R, d_out_TH, own.down_bias_EH)
            if transport is None:
                d_weight_TC = d_weight_TC.to(weight_TC.dtype)
            else:
                assert isinstance(rows, ChosenRows)
                d_weight_TC = d_weight_TC.masked_fill(rows.without_row, 0)
                d_weight_TC = transport.start_combine(d_weight_TC)

        # The second layer's parameters.
        if needs.down.a:
            d_down_a = adapter.grad_of_a(d_down_Rr, adapter.input(h_RF), offs_E)
        del h_RF
        if needs.down.weight:
            (d_down_w,) = down.wgrad(dy, h, offs_E).compute(needs.as_results)
            del dy, h

        # The first layer's adapter and dgrad.
        term, adapter = None, gate_up.adapter
        if adapter is not None:
            given = own.x_TH if needs.gate_up.a else None, of_gate_up.h_Tr, offs_E, needs.x
            d_gate_up_a, d_gate_up_b, term = adapter.grads(d_gate_up_RG, *given, rows.token)
        del d_gate_up_RG
        if needs.x:
            term, beside = gate_up.split(term)
            dgrad = gate_up.dgrad(d_gate_up, of_gate_up, offs_E, dtype, term)
            dx_TH = rows.combine(dgrad.compute(), None)
            del dgrad
            if beside is not None:
                dx_TH = dx_TH + adapter.input(rows.combine(beside.product(offs_E), None))
            if transport is not None:
                dx_TH = transport.start_combine(dx_TH)

        # Its other parameters, of tokens that are gathered again, while the gradient of x travels.
        if needs.gate_up.weight:
            x = gate_up.input(rows.source(own.x_TH), offs_E, COLUMNWISE_AGAIN)
            (d_gate_up_w,) = gate_up.wgrad(d_gate_up, x, offs_E).compute(needs.as_results)
        if needs.gate_up.bias and d_gate_up.bias_grad is not None:
            d_gate_up_bias = d_gate_up.bias_grad.to(ctx.bias_dtypes[0])
        if transport is not None:
            if needs.x:
                dx_TH = transport.finish_combine(dx_TH)
            if needs.weights:
                d_weight_TC = transport.finish_weights(d_weight_TC).to(ctx.weight_dtype)

        of_gate_up = Parameters(d_gate_up_w, d_gate_up_bias, d_gate_up_a, d_gate_up_b)
        return None, dx_TH, d_weight_TC, *of_gate_up, d_down_w, d_down_bias, d_down_a, d_down_b
