"""The gradient of a grouped MLP under a recipe.

T tokens, C experts chosen for a token, R rows (T * C, or a bound plus one), E experts, H features
of a token, F features inside an expert, G = 2 F for gate and up together.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.context import LinearContext
from grouped_linear.autograd.gemm import multiply
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.routing import gradient_of_weights, sum_of_rows, weight_of_rows
from grouped_linear.autograd.wgrad import needs_grad_now
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.recipes import UNQUANTIZED, OutputMask


class GroupedMLPFunction(torch.autograd.Function):
    """Gather, gate and up, SwiGLU, down, weighted sum: ``grouped_mlp`` of sorted rows.

    The forward saves columnwise x and swiglu, for wgrad; the columnwise weights, for dgrad; the
    output of the first GEMM in the activations' dtype, from which SwiGLU's gradient is computed as
    it is quantized; and the experts' outputs, if the routing weights need a gradient. Each is saved
    only where a gradient needs it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_context: LinearContext,
        down_context: LinearContext,
        activation: SwiGLU,
        x_TH: Tensor,
        weight_TC: Tensor,
        gate_up_EGH: Tensor,
        down_EHF: Tensor,
        gate_up_bias_EG: Tensor | None,
        down_bias_EH: Tensor | None,
        *routing_tensors: Tensor,
    ) -> Tensor:
        """Gather, compute two GEMMs an expert, sum with weights.

        Args:
            gate_up_context: of the first GEMM. Its recipe is also the second's.
            down_context: of the second GEMM.
            activation: between them.
            gate_up_EGH: the tensor whose gradient the first wgrad returns.
            down_EHF: the tensor whose gradient the second wgrad returns.
            routing_tensors: the fields of a SortedByExpert.
        """
        needed = [gate_up_context.grad_enabled and need for need in ctx.needs_input_grad[3:9]]
        need_x, need_weight, need_gate_up, need_down, need_gate_up_bias, _ = needed
        need_h = need_x or need_gate_up or need_gate_up_bias
        recipe = gate_up_context.recipe
        routing = ops.SortedByExpert(*routing_tensors)
        offs_E, dtype = routing.offs, x_TH.dtype
        x_state, _, d_gate_up_state = gate_up_context.options.states or (None, None, None)
        h_state, _, dy_state = down_context.options.states or (None, None, None)

        outputs = OutputMask(True, need_gate_up, False)
        x = recipe.quantize_gathered(x_TH, routing, x_state, outputs)
        gate_up = gate_up_context.weight_operands(columnwise=need_x)
        biases = gate_up_bias_EG, down_bias_EH
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        gate_up_bias_EG, down_bias_EH = (None if b is None else b.to(dtype) for b in biases)
        gate_up_RG = multiply(
            x.rowwise,
            x.rowwise_scale,
            gate_up.rowwise,
            gate_up.rowwise_scale,
            offs_E,
            gate_up_bias_EG,
            dtype,
        )
        outputs = OutputMask(True, need_down, False)
        h = recipe.quantize_swiglu(gate_up_RG, offs_E, activation, h_state, outputs)
        down = down_context.weight_operands(columnwise=need_h)
        y_RH = multiply(
            h.rowwise,
            h.rowwise_scale,
            down.rowwise,
            down.rowwise_scale,
            offs_E,
            down_bias_EH,
            dtype,
        )

        ctx.activation = activation
        ctx.contexts = gate_up_context.for_backward(), down_context.for_backward()
        ctx.save_for_backward(
            *routing,
            weight_TC,
            gate_up_RG if need_h else None,
            y_RH if need_weight else None,
            *(t for o in (x, gate_up, h, down) for t in (o.columnwise, o.columnwise_scale)),
            *(None if state is None else state.scale for state in (d_gate_up_state, dy_state)),
        )
        return sum_of_rows(y_RH, routing.row, weight_TC)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the routing weights and the parameters, each only where needed."""
        need_x, _, need_gate_up, need_down, need_gate_up_bias, need_down_bias = (
            ctx.needs_input_grad[3:9]
        )
        gate_up_context: LinearContext
        down_context: LinearContext
        gate_up_context, down_context = ctx.contexts
        if any(c.options.main_grad is not None for c in (gate_up_context, down_context)):
            needed = need_gate_up, need_down
            need_gate_up, need_down = needs_grad_now(ctx, needed, slice(2, 4))
        need_h = need_x or need_gate_up or need_gate_up_bias
        saved = ctx.saved_tensors
        routing = ops.SortedByExpert(*saved[:4])
        weight_TC, gate_up_RG, y_RH = saved[4:7]
        x, x_scale, gate_up, gate_up_scale, h, h_scale, down, down_scale = saved[7:15]
        d_gate_up_state = gate_up_context.grad_output_state(saved[15])
        dy_state = down_context.grad_output_state(saved[16])
        offs_E, dtype = routing.offs, d_out_TH.dtype

        d_weight_TC = gradient_of_weights(d_out_TH, weight_TC, y_RH, routing)
        dx_TH = d_gate_up_EGH = d_down_EHF = d_gate_up_bias_EG = d_down_bias_EH = None
        if need_h or need_down or need_down_bias:
            outputs = OutputMask(need_h, need_down, need_down_bias)
            # For a bias alone nothing is quantized.
            recipe = down_context.recipe if need_h or need_down else UNQUANTIZED
            weight_R = weight_of_rows(weight_TC, routing)
            dy = recipe.quantize_gathered_grad(d_out_TH, weight_R, routing, dy_state, outputs)
            if dy.bias_grad is not None:
                d_down_bias_EH = dy.bias_grad.to(ctx.bias_dtypes[1])
        if need_down:
            (d_down_EHF,) = down_context.wgrad(dy, h, h_scale, offs_E).compute()
        if need_h:
            w, w_scale = down_context.recipe.for_dgrad(down, down_scale)
            dh_RF = multiply(dy.rowwise, dy.rowwise_scale, w, w_scale, offs_E, None, dtype)
            outputs = OutputMask(need_x, need_gate_up, need_gate_up_bias)
            recipe = gate_up_context.recipe if need_x or need_gate_up else UNQUANTIZED
            d_gate_up = recipe.quantize_swiglu_grad(
                dh_RF, gate_up_RG, offs_E, ctx.activation, d_gate_up_state, outputs
            )
            if need_gate_up:
                wgrad = gate_up_context.wgrad(d_gate_up, x, x_scale, offs_E)
                (d_gate_up_EGH,) = wgrad.compute()
            if d_gate_up.bias_grad is not None:
                d_gate_up_bias_EG = d_gate_up.bias_grad.to(ctx.bias_dtypes[0])
            if need_x:
                w, w_scale = gate_up_context.recipe.for_dgrad(gate_up, gate_up_scale)
                dx_RH = multiply(
                    d_gate_up.rowwise, d_gate_up.rowwise_scale, w, w_scale, offs_E, None, dtype
                )
                dx_TH = sum_of_rows(dx_RH, routing.row)
        of_weights = d_gate_up_EGH, d_down_EHF, d_gate_up_bias_EG, d_down_bias_EH
        return None, None, None, dx_TH, d_weight_TC, *of_weights, *(None,) * len(routing)
