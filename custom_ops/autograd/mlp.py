"""The gradient of a grouped MLP under a recipe.

T tokens, C experts chosen for a token, R rows (T * C, or a bound plus one), E experts, H features
of a token, F features inside an expert, G = 2 F for gate and up together.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.context import LinearContext
from grouped_linear.autograd.gemm import multiply, takes_swiglu
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.routing import gradient_of_rows, sum_of_rows, weight_of_rows
from grouped_linear.autograd.saved import saved_tensors
from grouped_linear.autograd.wgrad import needs_grad_now
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.recipes import OutputMask, Recipe


class GroupedMLPFunction(torch.autograd.Function):
    """Gather, gate and up, SwiGLU, down, weighted sum: ``grouped_mlp`` of sorted rows.

    The forward saves x [T, H] as it came, the output of the first GEMM [R, G], the routing and the
    columnwise weights, each only where a gradient needs it. The backward gathers x again, and makes
    SwiGLU's output again beside its gradient. The routing weights' gradient needs no output of the
    experts: with dh the gradient by h of the unweighted outputs, it is the sum of dh * h.
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
        need_dh = need_x or need_weight or need_gate_up or need_gate_up_bias
        recipe = gate_up_context.recipe
        routing = ops.SortedByExpert(*routing_tensors)
        offs_E, dtype = routing.offs, x_TH.dtype
        x_state, _, d_gate_up_state = gate_up_context.options.states or (None, None, None)
        h_state, _, dy_state = down_context.options.states or (None, None, None)

        outputs = OutputMask(True, False, False)
        rows_R: Tensor | None = routing.token
        x = recipe.quantize_tokens(x_TH, columns=gate_up_EGH.size(1))
        if x is None:
            x, rows_R = recipe.quantize_gathered(x_TH, routing, x_state, outputs), None
        gate_up = gate_up_context.weight_operands(x, offs_E, columnwise=need_x)
        biases = gate_up_bias_EG, down_bias_EH
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        gate_up_bias_EG, down_bias_EH = (None if b is None else b.to(dtype) for b in biases)
        swiglu_is_apart = type(recipe).quantize_swiglu is Recipe.quantize_swiglu
        if swiglu_is_apart and takes_swiglu(x, gate_up.rowwise, gate_up.rowwise_scale, dtype):
            assert isinstance(x.rowwise, Tensor)
            assert isinstance(gate_up.rowwise, Tensor)
            gate_up_RG, h_RF = ops.grouped_mm_swiglu(
                x.rowwise,
                gate_up.rowwise,
                offs_E,
                gate_up_bias_EG,
                rows_R,
                keep_gate_up=need_dh or need_down,
                activation=activation,
            )
            h = recipe.quantize_input(h_RF, offs_E, h_state, outputs)
        else:
            gate_up_RG = multiply(
                x.rowwise,
                x.rowwise_scale,
                gate_up.rowwise,
                gate_up.rowwise_scale,
                offs_E,
                gate_up_bias_EG,
                dtype,
                rows=rows_R,
            )
            h = recipe.quantize_swiglu(gate_up_RG, offs_E, activation, h_state, outputs)
        down = down_context.weight_operands(h, offs_E, columnwise=need_dh)
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
        states = x_state, d_gate_up_state, h_state, dy_state
        ctx.save_for_backward(
            *routing,
            weight_TC,
            x_TH if need_gate_up else None,
            gate_up_RG if need_dh or need_down else None,
            down_bias_EH if need_dh else None,
            *(t for w in (gate_up, down) for t in (w.columnwise, w.columnwise_scale)),
            *(None if state is None else state.scale for state in states),
        )
        return sum_of_rows(y_RH, routing.row, weight_TC)

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
        saved = saved_tensors(ctx, "grouped_mlp")
        routing = ops.SortedByExpert(*saved[:4])
        weight_TC, x_TH, gate_up_RG, down_bias_EH = saved[4:8]
        gate_up, gate_up_scale, down, down_scale, *state_scales = saved[8:]
        x_state, h_state = map(gate_up_context.input_state, state_scales[::2])
        d_gate_up_state = gate_up_context.grad_output_state(state_scales[1])
        dy_state = down_context.grad_output_state(state_scales[3])
        offs_E, dtype, recipe = routing.offs, d_out_TH.dtype, gate_up_context.recipe

        d_weight_TC = dx_TH = d_gate_up_EGH = d_down_EHF = None
        d_gate_up_bias_EG = d_down_bias_EH = None
        if need_down_bias:
            dy_RH = gradient_of_rows(d_out_TH, weight_TC, routing)
            d_down_bias_EH = ops.grouped_bias_grad(dy_RH, offs_E).to(ctx.bias_dtypes[1])
        need_dh = need_x or need_weight or need_gate_up or need_gate_up_bias
        weight_R = weight_of_rows(weight_TC, routing)
        if need_dh or need_down:
            outputs = OutputMask(need_dh, need_down, False)
            dy = recipe.quantize_gathered_grad(d_out_TH, routing, dy_state, outputs)
        if need_dh:
            w, w_scale = recipe.for_dgrad(down, down_scale)
            outputs = OutputMask(need_x, need_gate_up, need_gate_up_bias)
            states = h_state, d_gate_up_state
            swiglu_is_apart = type(recipe).quantize_swiglu_grad is Recipe.quantize_swiglu_grad
            if swiglu_is_apart and takes_swiglu(dy, w, w_scale, dtype):
                assert isinstance(dy.rowwise, Tensor)
                assert isinstance(w, Tensor)
                grads = ops.grouped_mm_swiglu_grad(
                    dy.rowwise, w, gate_up_RG, weight_R, offs_E, activation=ctx.activation
                )
                d_gate_up, h, d_weight_R = recipe.quantize_grads(
                    grads, offs_E, *states, outputs, need_down
                )
                del grads
            else:
                dh_RF = multiply(dy.rowwise, dy.rowwise_scale, w, w_scale, offs_E, None, dtype)
                d_gate_up, h, d_weight_R = recipe.quantize_swiglu_grad(
                    dh_RF, gate_up_RG, weight_R, offs_E, ctx.activation, *states, outputs, need_down
                )
                del dh_RF  # what is not read again goes, for the peak of an eager step
        elif need_down:  # h alone, for which any dh will do
            any_dh_RF = gate_up_RG[:, : gate_up_RG.size(1) // 2]
            h_RF = ops.swiglu_grad(any_dh_RF, gate_up_RG, weight_R, offs_E, ctx.activation).h
            h = recipe.quantize_input(h_RF, offs_E, h_state, OutputMask(False, True, False))
        if need_down:
            assert isinstance(h.columnwise, Tensor)
            wgrad = down_context.wgrad(dy, h.columnwise, h.columnwise_scale, offs_E)
            (d_down_EHF,) = wgrad.compute()
            del dy, h, wgrad
        if need_weight:
            d_weight_TC = d_weight_R[routing.row]
            if down_bias_EH is not None:
                experts_TC = torch.searchsorted(offs_E, routing.row, right=True)
                experts_TC = experts_TC.clamp(max=len(down_bias_EH) - 1)
                d_weight_TC = d_weight_TC + ops.gather_dot(d_out_TH, down_bias_EH, experts_TC)
            d_weight_TC = d_weight_TC.to(weight_TC.dtype)
        if need_gate_up:
            outputs = OutputMask(False, True, False)
            x = recipe.quantize_gathered(x_TH, routing, x_state, outputs)
            assert isinstance(x.columnwise, Tensor)
            wgrad = gate_up_context.wgrad(d_gate_up, x.columnwise, x.columnwise_scale, offs_E)
            (d_gate_up_EGH,) = wgrad.compute()
            del x, wgrad
        if need_gate_up_bias:
            assert d_gate_up.bias_grad is not None
            d_gate_up_bias_EG = d_gate_up.bias_grad.to(ctx.bias_dtypes[0])
        if need_x:
            w, w_scale = recipe.for_dgrad(gate_up, gate_up_scale)
            dx_RH = multiply(
                d_gate_up.rowwise, d_gate_up.rowwise_scale, w, w_scale, offs_E, None, dtype
            )
            dx_TH = sum_of_rows(dx_RH, routing.row)
        of_weights = d_gate_up_EGH, d_down_EHF, d_gate_up_bias_EG, d_down_bias_EH
        return None, None, None, dx_TH, d_weight_TC, *of_weights, *(None,) * len(routing)
