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
    gate_up_and_h,
    grads_of_gate_up,
    h_source_of,
    restore,
    save,
    weighted_h,
)
from grouped_linear.autograd.context import LinearContext
from grouped_linear.autograd.gemm import multiply
from grouped_linear.autograd.low_rank import (
    backward_term,
    forward_term,
    grad_of_a,
    grad_of_b,
    low_rank_grads,
)
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.autograd.routing import rows_of
from grouped_linear.autograd.saved import saved_tensors, scale_of
from grouped_linear.autograd.wgrad import edges_behind, needs_grad_now
from grouped_linear.recipes import Layouts, RowOperands, quantize, quantize_for_gemms


class _Needs(NamedTuple):
    """Which gradients are needed, in the order of the function's arguments."""

    x: bool
    weight: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool
    dropped_x: bool
    gate_up_a: bool
    gate_up_b: bool
    down_a: bool
    down_b: bool
    dropout: bool

    @property
    def d_gate_up(self) -> bool:
        """Whether the gradient of the activation's input is needed."""
        first = self.gate_up or self.gate_up_bias or self.gate_up_a or self.gate_up_b
        return self.x or first

    @property
    def dh(self) -> bool:
        """Whether dgrad of the second layer is needed."""
        return self.d_gate_up or self.weight

    @property
    def gate_up_adapter(self) -> bool:
        """Whether the backward multiplies by the adapter of the first layer."""
        return self.x or self.gate_up_a or self.gate_up_b

    @property
    def down_adapter(self) -> bool:
        """Whether the backward multiplies by the adapter of the second layer."""
        return self.dh or self.down_a or self.down_b


def _needs_now(ctx: Any) -> _Needs:
    """The gradients that this run of the backward computes; of main_grad the engine is asked."""
    needs = _Needs(*ctx.needs_input_grad[3:15])
    of_gate_up, of_down = ctx.contexts
    if of_gate_up.options.main_grad is None and of_down.options.main_grad is None:
        return needs
    gate_up, down = needs_grad_now(ctx, (needs.gate_up, needs.down), ctx.weight_edges)
    return needs._replace(gate_up=gate_up, down=down)


class GroupedMLPFunction(torch.autograd.Function):
    """Gather, gate and up, activation, down, weighted sum: ``grouped_mlp``, with its routing.

    Where rows come sorted, they are the tokens, and nothing is gathered or summed.

    The forward saves x [T, H] as it came, the output of the first GEMM [R, G], the routing, the
    columnwise weights and the adapters' products [R, r], each only where a gradient needs it. The
    backward gathers x again, and makes the activation's output h again beside its gradient. It
    needs no output of the experts: a routing weight's gradient is the sum of dh * h, where dh is
    the gradient of h for an unweighted output.
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
        dropped_x_TH: Tensor | None,
        gate_up_a_ErH: Tensor | None,
        gate_up_b_EGr: Tensor | None,
        down_a_ErF: Tensor | None,
        down_b_EHr: Tensor | None,
        dropout_RF: Tensor | None,
        *routing_tensors: Tensor,
    ) -> Tensor:
        """Gather rows, send them through both layers, and sum each token's rows with its weights.

        Args:
            gate_up_EGH, down_EHF: the weights whose gradients the two wgrads return.
            weight_TC: the routing weights; of rows that come sorted [R], or None.
            dropped_x_TH: what the first adapter multiplies; None where it is x.
            dropout_RF: what h is multiplied by where the second adapter multiplies it, or None.
            routing_tensors: the fields of ChosenRows or of SortedRows.
        """
        needs = _Needs(*(gate_up_context.grad_enabled and n for n in ctx.needs_input_grad[3:15]))
        of_gate_up, of_down = gate_up_context.recipe, down_context.recipe
        routing = rows_of(routing_tensors)
        offs_E, dtype = routing.offs, x_TH.dtype
        columns = gate_up_EGH.size(1), down_EHF.size(2)
        of_first, of_second = gate_up_context.options.watched, down_context.options.watched
        biases = gate_up_bias_EG, down_bias_EH
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        gate_up_bias_EG, down_bias_EH = (None if b is None else b.to(dtype) for b in biases)

        # The first layer, of gathered tokens.
        source, rowwise = routing.source(x_TH), Layouts(True, False)
        made = quantize_for_gemms(source, of_gate_up.input, offs_E, rowwise, columns[0])
        x, rows_R, _ = made
        gate_up = gate_up_context.weight_operands(columnwise=needs.x)
        if of_first is not None:
            of_first.input(source, made, offs_E, of_gate_up.input, False)
            of_first.weight(gate_up_context.weights, gate_up, of_gate_up.weight)
        del made
        adapter = gate_up_a_ErH, gate_up_b_EGr, gate_up_context.options.lora_scaling
        lora_x_TH = x_TH if dropped_x_TH is None else dropped_x_TH
        gate_up_term = forward_term(adapter, lora_x_TH, offs_E, routing.token)

        # Its output, and the activation of it.
        need_saved = needs.dh or needs.down or needs.down_a
        gate_up_RG, h, h_RF = gate_up_and_h(
            x,
            gate_up,
            offs_E,
            gate_up_bias_EG,
            rows_R,
            dtype,
            config.activation,
            of_down.input,
            need_saved,
            down_a_ErF is not None or (of_second is not None and config.activation.swiglu is None),
            gate_up_term,
        )
        if of_second is not None:
            h_source = h_source_of(gate_up_RG, h, h_RF, config.activation)
            of_second.input(h_source, RowOperands(h), offs_E, of_down.input, False)
            del h_source
        saved = save(gate_up_RG if need_saved else None, offs_E, config)
        del gate_up_RG, x  # lowers the peak memory of an eager step

        # The second layer.
        down_term = None
        if h_RF is not None:
            adapter = down_a_ErF, down_b_EHr, down_context.options.lora_scaling
            h_RF = h_RF if dropout_RF is None else h_RF * dropout_RF
            down_term = forward_term(adapter, h_RF, offs_E)
        del h_RF
        down = down_context.weight_operands(columnwise=needs.dh)
        if of_second is not None:
            of_second.weight(down_context.weights, down, of_down.weight)
        y_RH = multiply(h, down, offs_E, down_bias_EH, dtype, transpose_b=True, low_rank=down_term)

        ctx.activation, ctx.num_routing, ctx.columns = config.activation, len(routing), columns
        ctx.contexts = gate_up_context.for_backward(), down_context.for_backward()
        ctx.weight_edges = edges_behind((x_TH, weight_TC), 2)
        formats = of_gate_up.input, of_gate_up.grad_output, of_down.input, of_down.grad_output
        ctx.save_for_backward(
            *routing,
            weight_TC,
            x_TH if needs.gate_up else None,
            *saved,
            down_bias_EH if needs.dh else None,
            *(t for w in (gate_up, down) for t in (w.columnwise, w.columnwise_scale)),
            lora_x_TH if needs.gate_up_a else None,
            *((gate_up_a_ErH, gate_up_b_EGr) if needs.gate_up_adapter else (None, None)),
            gate_up_term.a_Tr if needs.gate_up_b and gate_up_term is not None else None,
            *((down_a_ErF, down_b_EHr) if needs.down_adapter else (None, None)),
            down_term.a_Tr if needs.down_b and down_term is not None else None,
            dropout_RF,
            *map(scale_of, formats),
        )
        return routing.combine(y_RH, weight_TC)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the routing weights and the parameters, each only where needed."""
        gate_up_context, down_context = ctx.contexts
        of_gate_up, of_down = gate_up_context.recipe, down_context.recipe
        needs = _needs_now(ctx)
        saved = saved_tensors(ctx, "grouped_mlp")
        routing, saved = rows_of(saved[: ctx.num_routing]), saved[ctx.num_routing :]
        weight_TC, x_TH, saved_RG, saved_scale, down_bias_EH = saved[:5]
        gate_up, gate_up_scale, down, down_scale = saved[5:9]
        lora_x_TH, gate_up_a_ErH, gate_up_b_EGr, gate_up_Rr = saved[9:13]
        down_a_ErF, down_b_EHr, down_Rr, dropout_RF = saved[13:17]
        of_first, of_second = gate_up_context.options.watched, down_context.options.watched
        offs_E, dtype = routing.offs, d_out_TH.dtype
        d_weight_TC = dx_TH = d_gate_up_EGH = d_down_EHF = None
        d_gate_up_bias_EG = d_down_bias_EH = d_dropped_x_TH = None
        d_gate_up_a_ErH = d_gate_up_b_EGr = d_down_a_ErF = d_down_b_EHr = None

        # The gradient of the second layer's output before it is weighted. Its wgrad multiplies it
        # by the weighted h.
        if needs.down_bias:
            dy_RH = routing.weighted_gradient(d_out_TH, weight_TC)
            d_down_bias_EH = ops.grouped_bias_grad(dy_RH, offs_E).to(ctx.bias_dtypes[1])
        weight_R = routing.weights(weight_TC, d_out_TH)
        if needs.dh or needs.down:
            source, layouts = routing.source(d_out_TH), Layouts(needs.dh, needs.down)
            made = quantize_for_gemms(source, of_down.grad_output, offs_E, layouts, ctx.columns[1])
            dy, dy_rows_R, wgrad_rows_R = made
            if of_second is not None:
                of_second.gradient(source, made, offs_E, of_down.grad_output)
            del made

        # The second layer's adapter, which multiplies that gradient itself.
        term = more_dh_RF = None
        if needs.dh or needs.down_a:
            adapter = down_a_ErF, down_b_EHr, down_context.options.lora_scaling
            term = backward_term(adapter, d_out_TH, offs_E, routing.token)
        d_down_Rr = None if term is None else term.a_Tr
        if needs.down_b:
            weighted_Rr = (weight_R[:, None] * down_Rr).to(dtype)
            d_down_b_EHr = grad_of_b(down_b_EHr, d_out_TH, weighted_Rr, offs_E, routing.token)

        # Its dgrad, the activation's gradient, and h again.
        d_gate_up_RG = h_RF = None
        if needs.dh:
            if term is not None and dropout_RF is not None:
                more_dh_RF, term = ops.grouped_mm(*term, offs_E) * dropout_RF, None
            (d_gate_up, h, d_weight_R), grads = grads_of_gate_up(
                dy,
                dy_rows_R,
                down_context.for_dgrad(down, down_scale),
                restore(saved_RG, saved_scale, offs_E, dtype),
                weight_R,
                offs_E,
                ctx.activation,
                of_down.input,
                of_gate_up.grad_output,
                Layouts(needs.x, needs.gate_up, needs.gate_up_bias),
                needs.down,
                needs.down_a or gate_up_a_ErH is not None,
                term,
                more_dh_RF,
                of_first,
            )
            if grads is not None:
                d_gate_up_RG, h_RF, _ = grads
            del grads, more_dh_RF  # as below: lowers the peak memory of an eager step
        elif needs.down or needs.down_a:
            gate_up_RG = restore(saved_RG, saved_scale, offs_E, dtype)
            h_RF = weighted_h(gate_up_RG, weight_R, offs_E, ctx.activation)
            del gate_up_RG
            if needs.down:
                h = quantize(h_RF, of_down.input, offs_E, Layouts(False, True, again=True))
                if of_second is not None:
                    of_second.shares(h, offs_E, of_down.input)
        if needs.weight:
            d_weight_TC = routing.gradient_of_weights(d_weight_R, d_out_TH, down_bias_EH)
            d_weight_TC = d_weight_TC.to(weight_TC.dtype)

        # The second layer's weight.
        if needs.down_a:
            assert h_RF is not None
            assert d_down_Rr is not None
            h_RF = h_RF if dropout_RF is None else h_RF * dropout_RF
            d_down_a_ErF = grad_of_a(down_a_ErF, d_down_Rr, h_RF, offs_E)
        del h_RF
        if needs.down:
            (d_down_EHF,) = down_context.wgrad(dy, h, offs_E, wgrad_rows_R).compute()
            del dy, h

        # The first layer's weight and bias, of tokens that are gathered again.
        if needs.gate_up:
            source, layouts = routing.source(x_TH), Layouts(False, True, again=True)
            x, _, x_rows_R = quantize_for_gemms(
                source, of_gate_up.input, offs_E, layouts, ctx.columns[0]
            )
            if of_first is not None:
                of_first.shares(x, offs_E, of_gate_up.input)
            wgrad = gate_up_context.wgrad(d_gate_up, x, offs_E, x_rows=x_rows_R)
            (d_gate_up_EGH,) = wgrad.compute()
            del x, wgrad
        if needs.gate_up_bias:
            assert d_gate_up.bias_grad is not None
            d_gate_up_bias_EG = d_gate_up.bias_grad.to(ctx.bias_dtypes[0])

        # Its adapter and its dgrad.
        term = None
        if d_gate_up_RG is not None:
            adapter = gate_up_a_ErH, gate_up_b_EGr, gate_up_context.options.lora_scaling
            d_gate_up_a_ErH, d_gate_up_b_EGr, term = low_rank_grads(
                adapter, d_gate_up_RG, lora_x_TH, gate_up_Rr, offs_E, needs.x, routing.token
            )
            del d_gate_up_RG
        if needs.dropped_x and term is not None:
            d_dropped_x_TH, term = routing.combine(ops.grouped_mm(*term, offs_E), None), None
        if needs.x:
            w = gate_up_context.for_dgrad(gate_up, gate_up_scale)
            dx_RH = multiply(d_gate_up, w, offs_E, None, dtype, low_rank=term)
            dx_TH = routing.combine(dx_RH, None)

        of_weights = d_gate_up_EGH, d_down_EHF, d_gate_up_bias_EG, d_down_bias_EH
        of_adapters = d_gate_up_a_ErH, d_gate_up_b_EGr, d_down_a_ErF, d_down_b_EHr
        of_inputs = dx_TH, d_weight_TC, *of_weights, d_dropped_x_TH, *of_adapters
        return None, None, None, *of_inputs, None, *(None,) * len(routing)
