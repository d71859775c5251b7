"""The gradient of a grouped MLP under a recipe.

T tokens, C experts chosen for a token, R rows (T * C, or a bound plus one), E experts, H features
of a token, F features inside an expert, G = 2 F for gate and up together.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.activation import (
    MLPConfig,
    Saved,
    gate_up_and_h,
    grads_of_gate_up,
    restore,
    save,
    weighted_h,
)
from grouped_linear.autograd.context import LinearContext
from grouped_linear.autograd.gemm import multiply
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.routing import rows_of
from grouped_linear.autograd.saved import saved_tensors, scale_of
from grouped_linear.autograd.wgrad import needs_grad_now
from grouped_linear.recipes import Layouts, quantize, quantize_for_gemms


class GroupedMLPFunction(torch.autograd.Function):
    """Gather, gate and up, activation, down, weighted sum: ``grouped_mlp``, with its routing.

    Where rows come sorted, they are the tokens, and nothing is gathered or summed.

    The forward saves x [T, H] as it came, the output of the first GEMM [R, G], the routing and the
    columnwise weights, each only where a gradient needs it. The backward gathers x again, and makes
    the activation's output again beside its gradient. The routing weights' gradient needs no output
    of the experts: with dh the gradient by h of the unweighted outputs, it is the sum of dh * h.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_context: LinearContext,
        down_context: LinearContext,
        config: MLPConfig,
        x_TH: Tensor,
        weight_TC: Tensor | None,
        gate_up_EGH: Tensor,
        down_EHF: Tensor,
        gate_up_bias_EG: Tensor | None,
        down_bias_EH: Tensor | None,
        *routing_tensors: Tensor,
    ) -> Tensor:
        """Gather, compute two GEMMs an expert, sum with weights.

        Args:
            gate_up_context: of the first GEMM.
            down_context: of the second GEMM.
            config: the activation between them.
            gate_up_EGH: the tensor whose gradient the first wgrad returns.
            down_EHF: the tensor whose gradient the second wgrad returns.
            weight_TC: the routing weights; of rows that come sorted [R], or None.
            routing_tensors: the fields of ChosenRows or of SortedRows.
        """
        needed = [gate_up_context.grad_enabled and need for need in ctx.needs_input_grad[3:9]]
        need_x, need_weight, need_gate_up, need_down, need_gate_up_bias, _ = needed
        need_dh = need_x or need_weight or need_gate_up or need_gate_up_bias
        of_gate_up, of_down = gate_up_context.recipe, down_context.recipe
        routing = rows_of(routing_tensors)
        offs_E, dtype = routing.offs, x_TH.dtype

        rowwise, columns = Layouts(True, False), gate_up_EGH.size(1)
        x, rows_R, _ = quantize_for_gemms(
            routing.source(x_TH), of_gate_up.input, offs_E, rowwise, columns
        )
        gate_up = gate_up_context.weight_operands(columnwise=need_x)
        biases = gate_up_bias_EG, down_bias_EH
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        gate_up_bias_EG, down_bias_EH = (None if b is None else b.to(dtype) for b in biases)
        need_saved = need_dh or need_down
        gate_up_RG, h = gate_up_and_h(
            x,
            gate_up,
            offs_E,
            gate_up_bias_EG,
            rows_R,
            dtype,
            config.activation,
            of_down.input,
            need_saved,
        )
        saved = save(gate_up_RG if need_saved else None, offs_E, config)
        del gate_up_RG, x  # lowers the peak memory of an eager step
        down = down_context.weight_operands(columnwise=need_dh)
        y_RH = multiply(
            h.rowwise,
            h.rowwise_scale,
            down.rowwise,
            down.rowwise_scale,
            offs_E,
            down_bias_EH,
            dtype,
            transpose_b=True,
        )

        ctx.activation, ctx.num_routing = config.activation, len(routing)
        ctx.columns = columns, down_EHF.size(2)
        ctx.contexts = gate_up_context.for_backward(), down_context.for_backward()
        formats = of_gate_up.input, of_gate_up.grad_output, of_down.input, of_down.grad_output
        ctx.save_for_backward(
            *routing,
            weight_TC,
            x_TH if need_gate_up else None,
            *saved,
            down_bias_EH if need_dh else None,
            *(t for w in (gate_up, down) for t in (w.columnwise, w.columnwise_scale)),
            *map(scale_of, formats),
        )
        return routing.combine(y_RH, weight_TC)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the routing weights and the parameters, each only where needed."""
        need_x, need_weight, need_gate_up, need_down, need_gate_up_bias, need_down_bias = (
            ctx.needs_input_grad[3:9]
        )
        gate_up_context: LinearContext
        down_context: LinearContext
        gate_up_context, down_context = ctx.contexts
        if any(c.options.main_grad is not None for c in (gate_up_context, down_context)):
            needed = need_gate_up, need_down
            need_gate_up, need_down = needs_grad_now(ctx, needed, slice(2, 4))
        gate_up_columns, features = ctx.columns
        saved = saved_tensors(ctx, "grouped_mlp")
        routing, saved = rows_of(saved[: ctx.num_routing]), saved[ctx.num_routing :]
        weight_TC, x_TH, *saved_gate_up, down_bias_EH = saved[:5]
        gate_up, gate_up_scale, down, down_scale = saved[5:9]
        of_gate_up, of_down = gate_up_context.recipe, down_context.recipe
        offs_E, dtype = routing.offs, d_out_TH.dtype

        d_weight_TC = dx_TH = d_gate_up_EGH = d_down_EHF = None
        d_gate_up_bias_EG = d_down_bias_EH = None
        if need_down_bias:
            dy_RH = routing.weighted_gradient(d_out_TH, weight_TC)
            d_down_bias_EH = ops.grouped_bias_grad(dy_RH, offs_E).to(ctx.bias_dtypes[1])
        need_dh = need_x or need_weight or need_gate_up or need_gate_up_bias
        weight_R = routing.weights(weight_TC, d_out_TH)
        if need_dh or need_down:
            layouts, source = Layouts(need_dh, need_down), routing.source(d_out_TH)
            dy, dy_rows_R, wgrad_rows_R = quantize_for_gemms(
                source, of_down.grad_output, offs_E, layouts, features
            )
        if need_dh:
            w, w_scale = down_context.for_dgrad(down, down_scale)
            d_gate_up, h, d_weight_R = grads_of_gate_up(
                dy,
                dy_rows_R,
                w,
                w_scale,
                restore(Saved(*saved_gate_up), offs_E, dtype),
                weight_R,
                offs_E,
                ctx.activation,
                of_down.input,
                of_gate_up.grad_output,
                Layouts(need_x, need_gate_up, need_gate_up_bias),
                need_down,
            )
        elif need_down:
            gate_up_RG = restore(Saved(*saved_gate_up), offs_E, dtype)
            h_RF = weighted_h(gate_up_RG, weight_R, offs_E, ctx.activation)
            del gate_up_RG
            h = quantize(h_RF, of_down.input, offs_E, Layouts(False, True, again=True))
        if need_down:
            assert isinstance(h.columnwise, Tensor)
            wgrad = down_context.wgrad(dy, h.columnwise, h.columnwise_scale, offs_E, wgrad_rows_R)
            (d_down_EHF,) = wgrad.compute()
            del dy, h, wgrad
        if need_weight:
            d_weight_TC = routing.gradient_of_weights(d_weight_R, d_out_TH, down_bias_EH)
            d_weight_TC = d_weight_TC.to(weight_TC.dtype)
        if need_gate_up:
            layouts, source = Layouts(False, True, again=True), routing.source(x_TH)
            x, _, x_rows_R = quantize_for_gemms(
                source, of_gate_up.input, offs_E, layouts, gate_up_columns
            )
            assert isinstance(x.columnwise, Tensor)
            wgrad = gate_up_context.wgrad(
                d_gate_up, x.columnwise, x.columnwise_scale, offs_E, x_rows=x_rows_R
            )
            (d_gate_up_EGH,) = wgrad.compute()
            del x, wgrad
        if need_gate_up_bias:
            assert d_gate_up.bias_grad is not None
            d_gate_up_bias_EG = d_gate_up.bias_grad.to(ctx.bias_dtypes[0])
        if need_x:
            w, w_scale = gate_up_context.for_dgrad(gate_up, gate_up_scale)
            dx_RH = multiply(
                d_gate_up.rowwise, d_gate_up.rowwise_scale, w, w_scale, offs_E, None, dtype
            )
            dx_TH = routing.combine(dx_RH, None)
        of_weights = d_gate_up_EGH, d_down_EHF, d_gate_up_bias_EG, d_down_bias_EH
        return None, None, None, dx_TH, d_weight_TC, *of_weights, *(None,) * len(routing)
