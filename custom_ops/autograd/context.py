"""What a call of a layer passes to its gradient besides the tensors that are differentiated."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.autograd.wgrad import MainGrad, Wgrad
from grouped_linear.quantized.weight_cache import wait_for_refresh_
from grouped_linear.recipes import (
    Experts,
    Layouts,
    Operands,
    QuantizedWeight,
    Recipe,
    Values,
    is_transposed,
    quantize_weight,
    refresh_weight_,
    weight_for_dgrad,
)


class StoredWeight(NamedTuple):
    """A quantized weight that a call reads instead of quantizing the parameter."""

    weight: QuantizedWeight
    refresh: Tensor | bool = False
    """Whether it is quantized from the parameter first; a tensor is read on the device."""
    waits: bool = False
    """Whether a compiled call waits for ``refresh_weights``. An eager one has waited already."""


class LinearOptions(NamedTuple):
    """What differs from a plain call of a linear layer."""

    stored: StoredWeight | None = None
    """The quantized weight to read: a layer's cache, or the parameter itself."""
    main_grad: MainGrad | None = None
    save_input: bool = False
    """Save x itself for the backward, and quantize it for wgrad there."""
    deferred_wgrad: deque[Wgrad] | None = None
    """Where the backward leaves wgrad instead of computing it."""


PLAIN_CALL = LinearOptions()


class LinearContext(NamedTuple):
    """One call of a linear layer.

    A named tuple, as its fields are: Dynamo traces it as an argument of an autograd.Function, and
    making a frozen dataclass takes an eager call 2.5 times as long.
    """

    recipe: Recipe
    grad_enabled: bool
    """Whether a backward may follow: ctx.needs_input_grad stays true under no_grad."""
    weights: Experts
    """What is quantized or multiplied; under autocast a copy of the parameters."""
    options: LinearOptions
    parameters: Experts = ()
    """What a deferred gradient is of, the weights before autocast; empty without deferral.

    Anything held here lives as long as the graph.
    """

    @property
    def has_one_op_forward(self) -> bool:
        """Whether an eager forward may be one op, which quantizes all of x and of the weight."""
        return self.options.stored is None and self._may_use_linear_op

    @property
    def has_one_op_backward(self) -> bool:
        """Whether an eager backward may be one op, which returns weight gradients."""
        options = self.options
        returned = options.main_grad is None and options.deferred_wgrad is None
        return returned and self.recipe.has_linear_grad_op and self._may_use_linear_op

    @property
    def _may_use_linear_op(self) -> bool:
        """Whether this is an eager call with one packed weight, stored as it is multiplied.

        A compiled graph has the separate ops: passes look for them, and an op costs no time there.
        """
        recipe = self.recipe
        if not recipe.has_linear_op or torch.compiler.is_compiling():
            return False
        weight = self.weights[0]
        return not (self.options.save_input or weight.dim() == 2 or is_transposed(weight))

    def for_backward(self) -> "LinearContext":
        """Drop the values of temporary weights; keep their metadata.

        A parameter lives anyway. A weight that was computed would live as long as the graph.
        """
        if not self.grad_enabled or torch.compiler.is_compiling():
            return self
        if all(
            isinstance(w, nn.Parameter) or (w.is_leaf and w.requires_grad) for w in self.weights
        ):
            return self
        return self._replace(
            weights=tuple(torch.empty_like(w, device="meta") for w in self.weights)
        )

    def weight_operands(self, x: Operands, offs_E: Tensor, columnwise: bool) -> Operands:
        """The weight for fprop, and for dgrad if ``columnwise``: stored, or quantized now.

        Where a graph waits for it, the wait is said to write x, or offs where x is the caller's
        own, so that the GEMM, which reads both, comes after. Inductor copies what was read before:
        of a new x nothing.
        """
        recipe, _, weights, options, _ = self
        if options.stored is None:
            later = columnwise and recipe.requantize_weights
            w = quantize_weight(weights, recipe.weight, Layouts(True, columnwise and not later))
            if later:
                w = w._replace(columnwise=weights if weights[0].dim() == 2 else weights[0])
            return w
        quantized, refresh, waits = options.stored
        if waits and refresh is False:
            q = offs_E if x.rowwise_scale is None else x.rowwise
            assert isinstance(q, Tensor)
            wait_for_refresh_(q, quantized.values)
        elif waits:
            wait_for_refresh_(quantized.values, None)
        if refresh is not False:
            refresh_weight_(quantized, weights, recipe.weight, None if refresh is True else refresh)
        return quantized.operands(columnwise)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """The weight that dgrad multiplies, from what :meth:`weight_operands` gave columnwise."""
        if self.options.stored is None and self.recipe.requantize_weights:
            weights = columnwise if isinstance(columnwise, tuple) else (columnwise,)
            w = quantize_weight(weights, self.recipe.weight, Layouts(False, True))
            assert w.columnwise is not None
            columnwise, scale = w.columnwise, w.columnwise_scale
        return weight_for_dgrad(columnwise, scale, self.recipe.weight)

    def wgrad(
        self,
        dy: Operands,
        x: Tensor,
        x_scale: Tensor | None,
        offs_E: Tensor,
        dy_rows: Tensor | None = None,
        x_rows: Tensor | None = None,
    ) -> Wgrad:
        """The weight gradient of dy, or of dy[dy_rows], and columnwise x, or x[x_rows]."""
        assert isinstance(dy.columnwise, Tensor)
        return Wgrad(
            self.weights,
            self.options.main_grad,
            self.parameters,
            dy.columnwise,
            x,
            dy.columnwise_scale,
            x_scale,
            offs_E,
            dy_rows,
            x_rows,
        )
