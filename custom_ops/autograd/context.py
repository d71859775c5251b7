"""The arguments of a layer's autograd.Function besides the tensors that it differentiates."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.autograd.watched import Watched
from grouped_linear.autograd.wgrad import MainGrad, Wgrad
from grouped_linear.recipes import (
    Layouts,
    Operands,
    QuantizedWeight,
    Recipe,
    Values,
    WeightList,
    is_transposed,
    quantize_weight,
    refresh_weight_,
    weight_for_dgrad,
)
from grouped_linear.recipes.format import with_shared_scale


class StoredWeight(NamedTuple):
    """A quantized weight that a call reads instead of quantizing the parameter."""

    weight: QuantizedWeight
    refresh: Tensor | bool = False
    """Whether it is quantized from the parameter first; a tensor is read on the device."""


class LinearOptions(NamedTuple):
    """What differs from a plain call of a linear layer."""

    stored: StoredWeight | None = None
    """The quantized weight to read: a layer's cache, or the parameter itself."""
    main_grad: MainGrad | None = None
    save_input: bool = False
    """Save x itself for the backward, and quantize it for wgrad there."""
    defer_wgrad: Callable[[Wgrad], None] | None = None
    """Called with the weight gradient, which the backward then does not compute."""
    lora_scaling: float | None = None
    """What the adapter's product is multiplied by; None without an adapter."""
    watched: Watched | None = None
    """Where the layer counts what quantization does; None where nobody watches."""


PLAIN_CALL = LinearOptions()


class LinearContext(NamedTuple):
    """One call of a linear layer.

    A named tuple, as its fields are: Dynamo traces it as an argument of an autograd.Function, and
    making a frozen dataclass takes an eager call 2.5 times as long.
    """

    recipe: Recipe
    grad_enabled: bool
    """Whether a backward may follow: ctx.needs_input_grad stays true under no_grad."""
    weights: WeightList
    """The weights that are quantized or multiplied; under autocast copies of the parameters."""
    options: LinearOptions

    @property
    def has_one_op_forward(self) -> bool:
        """Whether an eager forward may be one op, which quantizes all of x and of the weight."""
        return self.options.stored is None and self._may_use_linear_op

    @property
    def has_one_op_backward(self) -> bool:
        """Whether an eager backward may be one op, which returns weight gradients."""
        options = self.options
        returned = options.main_grad is None and options.defer_wgrad is None
        return returned and self.recipe.has_linear_grad_op and self._may_use_linear_op

    @property
    def _may_use_linear_op(self) -> bool:
        """Whether this is an eager call with one packed weight, stored as it is multiplied.

        A compiled graph has the separate ops: passes look for them, and an op costs no time there.
        """
        recipe, options = self.recipe, self.options
        if not recipe.has_linear_op or torch.compiler.is_compiling():
            return False
        plain = options.lora_scaling is None and not options.save_input and options.watched is None
        weight = self.weights[0]
        return plain and not (weight.dim() == 2 or is_transposed(weight))

    @property
    def transposes_weight(self) -> bool:
        """Whether the weight is stored for fprop alone, and the backward transposes it."""
        stored = self.options.stored
        in_fp8 = self.recipe.weight.quantize is None
        return in_fp8 and stored is not None and stored.weight.columnwise is None

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

    def weight_operands(self, columnwise: bool) -> Operands:
        """The weight for fprop, and for dgrad if ``columnwise``: stored, or quantized now."""
        recipe, _, weights, options = self
        if options.stored is None:
            later = columnwise and recipe.requantize_weights
            w = quantize_weight(weights, recipe.weight, Layouts(True, columnwise and not later))
            if later:
                w = w._replace(columnwise=weights if weights[0].dim() == 2 else weights[0])
            return w
        quantized, refresh = options.stored
        if refresh is not False:
            refresh_weight_(quantized, weights, recipe.weight, None if refresh is True else refresh)
        if columnwise and quantized.columnwise is None:
            return with_shared_scale(quantized.values, quantized.scale, quantized.values)
        return quantized.operands(columnwise)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> Operands:
        """The weight that dgrad multiplies, from what :meth:`weight_operands` gave columnwise."""
        if self.transposes_weight:
            assert isinstance(columnwise, Tensor)
            columnwise = ops.transpose_weight(columnwise)
        elif self.options.stored is None and self.recipe.requantize_weights:
            weights = columnwise if isinstance(columnwise, tuple) else (columnwise,)
            w = quantize_weight(weights, self.recipe.weight, Layouts(False, True))
            assert w.columnwise is not None
            columnwise, scale = w.columnwise, w.columnwise_scale
        return weight_for_dgrad(columnwise, scale, self.recipe.weight)

    def wgrad(
        self,
        dy: Operands,
        x: Operands,
        offs_E: Tensor,
        dy_rows: Tensor | None = None,
        x_rows: Tensor | None = None,
    ) -> Wgrad:
        """The weight gradient of columnwise dy, or dy[dy_rows], and x, or x[x_rows]."""
        assert isinstance(dy.columnwise, Tensor)
        assert isinstance(x.columnwise, Tensor)
        operands = dy.columnwise, x.columnwise, dy.columnwise_scale, x.columnwise_scale
        return Wgrad(self.weights, self.options.main_grad, *operands, offs_E, dy_rows, x_rows)

    def with_routed(self, offs_E: Tensor) -> "LinearContext":
        """Tell who watches the layer the group ends from before rows were dropped."""
        watched = self.options.watched
        if watched is None:
            return self
        options = self.options._replace(watched=watched._replace(routed=offs_E))
        return self._replace(options=options)
