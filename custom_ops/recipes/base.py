"""The base class of recipes, and the types that its methods take and return.

T rows, R rows sorted by expert, E groups, K in_features, N out_features, H features of a token,
F features inside an expert, G = 2 F for gate and up together.
"""

from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.ops.activation import SwiGLU

#: A layer's weight: one tensor [E, N, K], or E tensors [N, K].
Experts = tuple[Tensor, ...]

#: One operand of a GEMM: a tensor, or a weight of E tensors [N, K].
Values = Tensor | Experts


# Up to so many columns of h a 16-bit wgrad of down_proj that gathers takes less time than a copy
# of the rows and a GEMM of them: docs/notes/gemm_sm90.md.
GATHERING_WGRAD = 256


class Operands(NamedTuple):
    """One tensor (x, a weight or dy) for the GEMMs that read it; None for what was not requested.

    The fields have the order in which quantizing ops return them. The tuple is flat because an
    eager layer makes three of them a call.
    """

    rowwise: Values | None
    """For GEMMs that reduce over the last dimension: x and the weight in fprop, dy in dgrad."""
    rowwise_scale: Tensor | None
    """Multiplies ``rowwise`` to dequantize it; None where ``rowwise`` is not quantized."""
    columnwise: Values | None
    """For GEMMs that reduce over another dimension: x and dy in wgrad, the weight in dgrad.

    Of a weight: what :meth:`Recipe.for_dgrad` takes.
    """
    columnwise_scale: Tensor | None
    """Multiplies ``columnwise`` to dequantize it."""
    bias_grad: Tensor | None = None
    """[E, N] float32: the sums of dy over each group's rows."""


class OutputMask(NamedTuple):
    """Which fields of :class:`Operands` a method must return."""

    rowwise: bool
    columnwise: bool
    bias_grad: bool


class SwigluGradOperands(NamedTuple):
    """What an expert's backward takes from gate_up; :func:`grouped_linear.ops.swiglu_grad`."""

    d_gate_up: Operands
    """For the first layer's dgrad and wgrad."""
    h: Operands
    """Columnwise, for the second layer's wgrad."""
    d_weight: Tensor
    """[R] float32."""


class QuantizerState(NamedTuple):
    """What a recipe with a state keeps for one operand."""

    scale: Tensor
    """[E] float32, which forward and backward only read."""
    amax: Tensor | None
    """[E] float32, raised in place to the largest magnitudes; None where nothing is recorded."""


class LayerStates(NamedTuple):
    """The quantizer states of a layer's three operands."""

    input: QuantizerState
    weight: QuantizerState
    grad_output: QuantizerState


class RecipeState(nn.Module):
    """What a layer keeps from step to step under a recipe that has a state.

    A layer registers it as a submodule, so that its buffers are saved with the parameters.
    """

    def reset(self) -> None:
        """Return to the state of a new layer."""
        raise NotImplementedError

    def quantizer_states(self) -> LayerStates:
        """What one call of the layer reads and updates."""
        raise NotImplementedError


class QuantizedWeight(NamedTuple):
    """A weight in a recipe's format, stored from one call to the next."""

    values: Tensor
    """[E, N, K]."""
    scale: Tensor | None
    """The scales of ``values`` and of ``columnwise``."""
    columnwise: Tensor | None
    """What :meth:`Recipe.for_dgrad` takes: in FP8 [E, K, N], contiguous."""

    def operands(self, columnwise: bool) -> Operands:
        """The weight for fprop and, where ``columnwise`` is true, for dgrad."""
        values, scale, transposed = self
        return with_shared_scale(values, scale, transposed if columnwise else None)


def with_shared_scale(
    rowwise: Values | None,
    scale: Tensor | None,
    columnwise: Values | None,
    bias_grad: Tensor | None = None,
) -> Operands:
    """Operands whose two layouts have the same scales."""
    return Operands(rowwise, scale, columnwise, None if columnwise is None else scale, bias_grad)


def is_transposed(w_ENK: Tensor) -> bool:
    """Whether a weight is a view of one that is stored as [E, K, N]."""
    return not w_ENK.is_contiguous() and w_ENK.mT.is_contiguous()


def overrides(recipe: "Recipe", base: type["Recipe"], *methods: str) -> bool:
    """Whether one of these methods of a recipe is not that of `base`."""
    return any(getattr(type(recipe), name) is not getattr(base, name) for name in methods)


class Recipe:
    """How a layer computes its GEMMs: what x, the weight and dy become before they are multiplied.

    This class leaves every tensor as it is. A subclass overrides what it changes and is passed as
    ``recipe=``; docs/recipes.md develops one. The operands alone decide how they are multiplied:
    with scales by ``grouped_scaled_mm``, without by ``grouped_mm``. The two operands of a GEMM must
    agree: both with scales or both without, and of one dtype (in wgrad e4m3 and e5m2 may mix).

    ==========  ============================================  ====================================
    GEMM        left operand                                  right operand
    ==========  ============================================  ====================================
    fprop       ``quantize_input(...).rowwise``               ``quantize_weight(...).rowwise``
    dgrad       ``quantize_grad_output(...).rowwise``         ``for_dgrad(...columnwise)``
    wgrad       ``quantize_grad_output(...).columnwise``      ``quantize_input(...).columnwise``
    ==========  ============================================  ====================================

    A method may use any torch operation: the layer's own gradient calls it, with autograd off. A
    recipe is compared and hashed where a layer is compiled, exported or converted, so make it a
    ``@dataclass(frozen=True)``.

    >>> class RoundedWeights(Recipe):
    ...     def quantize_weight(self, w_ENK, state, columnwise):
    ...         w_ENK = w_ENK.to(torch.float8_e4m3fn).to(w_ENK.dtype)
    ...         return Operands(w_ENK, None, w_ENK if columnwise else None, None)
    >>> from grouped_linear import GroupedLinear
    >>> layer = GroupedLinear(2, 16, 32, bias=False, recipe=RoundedWeights())
    >>> layer.weight.data.fill_(1.03)[0, 0, 0], layer(torch.ones(1, 16), [1, 0])[0, 0]
    (tensor(1.0300), tensor(16., grad_fn=<SelectBackward0>))
    """

    reads_any_weight_dtype: ClassVar[bool] = False
    """Whether quantize_weight takes a weight of another dtype than x's.

    Where it does not, the layer demands one dtype, and casts the weight under torch.autocast.
    """

    requantize_weights: bool = False
    """Whether a backward quantizes the weight once more, instead of keeping it from the forward."""

    has_state: ClassVar[bool] = False
    """Whether the subclass overrides :meth:`new_state`; set by this class."""
    caches_weights: ClassVar[bool] = False
    """Whether the subclass overrides :meth:`refresh_weight_`; set by this class."""
    has_linear_op: ClassVar[bool] = False
    """Whether the subclass overrides :meth:`linear`; set by this class."""

    @property
    def has_linear_grad_op(self) -> bool:
        """Whether :meth:`linear_grad` can follow; by default where :meth:`linear` is overridden."""
        return self.has_linear_op

    def __repr__(self) -> str:
        """The options that are not the defaults, as scikit-learn prints its estimators."""
        options: tuple[Any, ...] = fields(self) if is_dataclass(self) else ()
        values = {option.name: getattr(self, option.name) for option in options}
        changed = (f"{o.name}={values[o.name]!r}" for o in options if values[o.name] != o.default)
        return f"{type(self).__name__}({', '.join(changed)})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Plain class attributes: Dynamo reads them as constants.
        cls.has_state = cls.new_state is not Recipe.new_state
        cls.caches_weights = cls.refresh_weight_ is not Recipe.refresh_weight_
        cls.has_linear_op = cls.linear is not Recipe.linear

    # --- the three operands ---------------------------------------------------------------------

    def quantize_input(
        self, x_TK: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """Prepare x for fprop (rowwise) and wgrad (columnwise).

        Args:
            x_TK: rows sorted by group, contiguous or not.
            offs_E: int32 group ends on x's device; rows at and past the last one hold anything.
            state: of the input, under a recipe with a state.
            outputs: what to return.
        """
        return Operands(
            x_TK if outputs.rowwise else None, None, x_TK if outputs.columnwise else None, None
        )

    def quantize_weight(
        self, w_ENK: Tensor, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """Prepare the weight for fprop (rowwise) and, if ``columnwise``, for dgrad."""
        return Operands(w_ENK, None, w_ENK if columnwise else None, None)

    def requantize_weight(self, w_ENK: Tensor) -> Operands:
        """Prepare the weight for dgrad again, in the backward; what fprop reads is not needed."""
        return self.quantize_weight(w_ENK, None, True)

    def quantize_weight_list(
        self, weights: Experts, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """Do the same for a weight of E tensors [N, K]; by default they are stacked."""
        return self.quantize_weight(torch.stack(weights), state, columnwise)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """Return the weight [E, K, N] and its scales, from quantize_weight's columnwise fields.

        By default the columnwise weight is [E, N, K] and is transposed here, in the backward. What
        the forward saves is then the weight itself. A view made in a compiled forward would have a
        version counter of its own, and an in-place write to the weight would go unnoticed.
        """
        assert isinstance(columnwise, Tensor)
        return columnwise.transpose(1, 2), scale

    def quantize_grad_output(
        self, dy_TN: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """Prepare dy for dgrad (rowwise) and wgrad (columnwise), and sum it for the bias."""
        bias_grad = ops.grouped_bias_grad(dy_TN, offs_E) if outputs.bias_grad else None
        return Operands(
            dy_TN if outputs.rowwise else None,
            None,
            dy_TN if outputs.columnwise else None,
            None,
            bias_grad,
        )

    # --- tensors that GroupedMLP makes only to quantize them -------------------------------------
    # A recipe overrides these where an op makes and quantizes a tensor in one pass.

    def quantize_tokens(self, x_TH: Tensor, columns: int) -> Operands | None:
        """Tokens for an fprop that gathers their rows, with its bits; rowwise only.

        None where rows are gathered before: because they depend on the groups that they go to, or
        because that is faster. Every 256 columns of an output read the rows again, by copies of 16
        bytes that take some of the GEMM's time.

        Args:
            x_TH: tokens.
            columns: of the output.
        """
        if columns > 1536 or overrides(self, Recipe, "quantize_input", "quantize_gathered"):
            return None
        return Operands(x_TH, None, None, None)

    def quantize_grad_tokens(
        self, d_out_TH: Tensor, columns: int, columnwise: bool
    ) -> Operands | None:
        """The same of tokens' gradients, for a dgrad that gathers their rows.

        With ``columnwise`` in what is returned, wgrad gathers the tokens' rows, too; without it,
        rows are gathered for wgrad before.

        Args:
            d_out_TH: gradients of tokens.
            columns: of the output.
            columnwise: whether wgrad needs them, too.
        """
        own = overrides(self, Recipe, "quantize_grad_output", "quantize_gathered_grad")
        if own or columns > (GATHERING_WGRAD if columnwise else 1536):
            return None
        return Operands(d_out_TH, None, d_out_TH if columnwise else None, None)

    def quantize_gathered(
        self,
        x_TH: Tensor,
        routing: ops.SortedByExpert,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        """``quantize_input(x[routing.token])``: rowwise in the forward, columnwise in the backward.

        Rows are copied again in the backward, in a compiled graph too.
        """
        x_RH = routing.tokens(x_TH, again=not outputs.rowwise)
        return self.quantize_input(x_RH, routing.offs, state, outputs)

    def quantize_gathered_grad(
        self,
        d_out_TH: Tensor,
        routing: ops.SortedByExpert,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        """``quantize_grad_output(d_out[routing.token])``."""
        d_out_RH = routing.tokens(d_out_TH)
        return self.quantize_grad_output(d_out_RH, routing.offs, state, outputs)

    def quantize_swiglu(
        self,
        gate_up_RG: Tensor,
        offs_E: Tensor,
        activation: SwiGLU,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        """``quantize_input(swiglu(gate_up))``."""
        h_RF = ops.swiglu(gate_up_RG, offs_E, activation)
        return self.quantize_input(h_RF, offs_E, state, outputs)

    def quantize_swiglu_grad(
        self,
        dh_RF: Tensor,
        gate_up_RG: Tensor,
        weight_R: Tensor,
        offs_E: Tensor,
        activation: SwiGLU,
        h_state: QuantizerState | None,
        grad_state: QuantizerState | None,
        outputs: OutputMask,
        h_columnwise: bool,
    ) -> SwigluGradOperands:
        """``quantize_grad_output`` of SwiGLU's gradient; ``quantize_input`` of the weighted h.

        Args:
            dh_RF: the gradient by h of the unweighted output.
            gate_up_RG: the input of SwiGLU.
            weight_R: float32, what each row's output is weighted by.
            offs_E: int32 group ends.
            activation: the form of SwiGLU.
            h_state: of the second layer's input, under a recipe with a state; records nothing.
            grad_state: of the gradient of the first layer's output.
            outputs: what to return of d_gate_up.
            h_columnwise: whether to return h.
        """
        grads = ops.swiglu_grad(dh_RF, gate_up_RG, weight_R, offs_E, activation)
        return self.quantize_grads(grads, offs_E, h_state, grad_state, outputs, h_columnwise)

    def quantize_grads(
        self,
        grads: ops.SwigluGrad,
        offs_E: Tensor,
        h_state: QuantizerState | None,
        grad_state: QuantizerState | None,
        outputs: OutputMask,
        h_columnwise: bool,
    ) -> SwigluGradOperands:
        """What :meth:`quantize_swiglu_grad` returns, of SwiGLU's gradient. Not to be overridden."""
        d_gate_up_RG, h_RF, d_weight_R = grads
        if outputs.rowwise or outputs.columnwise:
            d = self.quantize_grad_output(d_gate_up_RG, offs_E, grad_state, outputs)
        else:  # for a bias alone nothing is quantized
            bias_grad = ops.grouped_bias_grad(d_gate_up_RG, offs_E) if outputs.bias_grad else None
            d = Operands(None, None, None, None, bias_grad)
        h = Operands(None, None, None, None)
        if h_columnwise:
            h = self.quantize_input(h_RF, offs_E, h_state, OutputMask(False, True, False))
        return SwigluGradOperands(d, h, d_weight_R)

    # --- weights that are stored quantized: cache_weights=True -----------------------------------

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """Allocate a quantized weight, its contents unspecified.

        Raises:
            ValueError: if the recipe cannot cache weights.
        """
        raise ValueError(
            f"{type(self).__name__}: cache_weights=True needs a recipe that defines new_weight and "
            "refresh_weight_"
        )

    def refresh_weight_(
        self,
        quantized: QuantizedWeight,
        weights: Experts,
        state: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """Quantize a weight into ``quantized``.

        Args:
            quantized: from :meth:`new_weight`; an op must write it, so that writes are counted.
            weights: one tensor [E, N, K] or E tensors [N, K].
            state: of the weight.
            refresh: a bool of no dimensions on the weight's device, which only the device reads;
                false leaves ``quantized`` alone. None stands for true.
        """
        raise NotImplementedError

    # --- a state from step to step -----------------------------------------------------------

    def new_state(self, num_groups: int, device: torch.device | str | None) -> RecipeState | None:
        """Make what a layer of ``num_groups`` experts keeps; None under a recipe without state."""
        return None

    # --- a whole layer in one op, for eager calls ------------------------------------------------

    def linear(
        self,
        x_TK: Tensor,
        w_ENK: Tensor,
        m_splits_E: Tensor,
        bias_EN: Tensor | None,
        columnwise_x: bool,
        columnwise_w: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """A layer's forward in one op, where the recipe has such an op.

        Returns:
            y_TN, offs_E, columnwise x and its scale, the columnwise weight and its scale.
        """
        raise NotImplementedError

    def linear_grad(
        self,
        dy_TN: Tensor,
        offs_E: Tensor,
        x: tuple[Tensor | None, Tensor | None],
        w: tuple[Tensor | None, Tensor | None],
        bias_grad: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Its backward in one op.

        Args:
            x: columnwise, and its scale; None where wgrad is not needed.
            w: columnwise, and its scale; None where dgrad is not needed.
            dtype: of the weight's gradient.

        Returns:
            dx_TK, dw_ENK and the bias's gradient [E, N] float32.
        """
        raise NotImplementedError


class Unquantized(Recipe):
    """GEMMs in the activations' dtype. ``recipe=None`` stands for this one."""

    def quantize_weight_list(
        self, weights: Experts, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """The E tensors themselves: grouped_mm_list reads them in place."""
        return Operands(weights, None, weights if columnwise else None, None)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """The weight transposed; grouped_mm_list transposes E tensors itself."""
        return columnwise if isinstance(columnwise, tuple) else columnwise.transpose(1, 2), None


UNQUANTIZED = Unquantized()
