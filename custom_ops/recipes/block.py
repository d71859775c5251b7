"""FP8 with one scale a block: the recipe that Hopper's kernels are made for.

T rows, R rows sorted by expert, E groups, K in_features, N out_features, H features of a token,
F features inside an expert, G = 2 F for gate and up together.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, ceil_div, dtype_name
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.recipes.amax_epsilon import AmaxEpsilon
from grouped_linear.recipes.base import (
    GATHERING_WGRAD,
    Experts,
    Operands,
    OutputMask,
    QuantizedWeight,
    QuantizerState,
    Recipe,
    SwigluGradOperands,
    Values,
    overrides,
    with_shared_scale,
)
from grouped_linear.recipes.weights import new_fp8_weight, quantize_as_stored


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(AmaxEpsilon, Recipe):
    """FP8 (e4m3) GEMMs with one float32 scale a block.

    Activations and gradients have a scale for each 1x128 block: 128 features of one token for fprop
    and dgrad, 128 tokens of one feature for wgrad. Weights have a scale for each 128x128 block.
    GEMMs accumulate in float32 and apply the scales every 128 elements. For each block::

        amax = max(largest finite magnitude, amax_epsilon)
        factor = min(448 / amax, 2 ** 126)      # 1 where amax is 0
        q, scale = e4m3(x * factor), 1 / factor

    Args:
        power_of_two_scales: round ``factor`` down to a power of two, so that scaling is exact.
        amax_epsilon: the smallest amax by which a block is scaled; not negative.
        share_x_scales: in wgrad, let 128 features of x share one scale, that of their largest amax
            over 128 tokens, wherever none of their amaxes but 0 is less than 1/256 of it. On an
            H200 wgrad is then 1.2 to 1.8 times as fast as with a scale for each feature. Where it
            adds to a float32 main_grad it may be bound by memory bandwidth either way. e4m3 is a
            floating-point format, so an element moves by at most 2**-9.8 of its feature's amax.
            False: every feature has its own scale. fprop, dgrad and gradients do not change.
        wgrad: what wgrad multiplies: ``torch.float8_e4m3fn``, or x and dy as they come, cast to
            ``torch.bfloat16`` or ``torch.float16`` where they have another dtype. fprop and dgrad
            are in FP8 either way. In 16 bits a layer keeps x itself for the backward, not a
            columnwise copy in FP8, and quantizes x and dy rowwise only.
        requantize_weights: quantize weights for dgrad in the backward, a packed weight in dgrad's
            layout alone. Otherwise the forward does, in the pass that quantizes them for fprop, and
            keeps them: a byte for each number, of all layers at once. Under FSDP2 that is of whole
            layers, not of shards. Weights that are cached or stored in FP8 are read as they are
            either way.

    Raises:
        ValueError: if ``amax_epsilon`` is negative or not finite, or for another ``wgrad``.

    >>> Float8BlockScaling(wgrad=torch.bfloat16)
    Float8BlockScaling(wgrad=torch.bfloat16)
    >>> from grouped_linear import GroupedLinear
    >>> layer = GroupedLinear(2, 16, 32, recipe=Float8BlockScaling(wgrad=torch.bfloat16))
    >>> layer(torch.ones(5, 16), [2, 3]).sum().backward()
    >>> layer.weight.grad[:, 0, 0]
    tensor([2., 3.])
    """

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0
    share_x_scales: bool = True
    wgrad: torch.dtype = E4M3
    requantize_weights: bool = False

    reads_any_weight_dtype: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wgrad not in (E4M3, torch.bfloat16, torch.float16):
            given = self.wgrad
            raise ValueError(
                "Float8BlockScaling: wgrad must be float8_e4m3fn, bfloat16 or float16, got "
                f"{dtype_name(given) if isinstance(given, torch.dtype) else repr(given)}"
            )

    @property
    def has_linear_grad_op(self) -> bool:
        """The op multiplies in FP8 only."""
        return self.wgrad is E4M3

    def quantize_input(
        self, x_TK: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """X in 1x128 blocks; columnwise with shared scales where ``share_x_scales`` is true."""
        return self._quantize(x_TK, offs_E, outputs, share_scales=self.share_x_scales)

    def quantize_weight(
        self, w_ENK: Tensor, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """The weight in 128x128 blocks."""
        return self._quantize_weight(w_ENK, rowwise=True, columnwise=columnwise)

    def quantize_weight_list(
        self, weights: Experts, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """The weight in 128x128 blocks, from E tensors in one op."""
        w = ops.quantize_weight_list(
            weights,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            columnwise=columnwise,
        )
        return with_shared_scale(*w)

    def requantize_weight(self, w_ENK: Tensor) -> Operands:
        """The weight for dgrad alone."""
        if overrides(self, Float8BlockScaling, "quantize_weight"):
            return super().requantize_weight(w_ENK)
        return self._quantize_weight(w_ENK, rowwise=False, columnwise=True)

    def _quantize_weight(self, w_ENK: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        quantize = partial(
            ops.quantize_weight,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
        )
        return quantize_as_stored(quantize, w_ENK, columnwise, rowwise)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """[E, K, N], with the scales of [E, N, K] transposed."""
        assert scale is not None
        return columnwise, scale.transpose(1, 2)

    def quantize_grad_output(
        self, dy_TN: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """Dy in 1x128 blocks."""
        return self._quantize(dy_TN, offs_E, outputs, share_scales=False)

    def quantize_tokens(self, x_TH: Tensor, columns: int) -> Operands | None:
        """Each token once: 1x128 blocks of a row are its own."""
        own = overrides(self, Float8BlockScaling, "quantize_input", "quantize_gathered")
        return None if own or columns > 1024 else self._quantize_each(x_TH)

    def quantize_grad_tokens(
        self, d_out_TH: Tensor, columns: int, columnwise: bool
    ) -> Operands | None:
        """Each token once. Beside e4m3 for wgrad, which one pass writes too, it saves less."""
        methods = "quantize_grad_output", "quantize_gathered_grad"
        own = overrides(self, Float8BlockScaling, *methods)
        in_16_bits = self.wgrad is not E4M3
        if own or columns > (512 if columnwise and not in_16_bits else 1024):
            return None
        tokens = self._quantize_each(d_out_TH)
        if columnwise and in_16_bits and columns <= GATHERING_WGRAD:
            tokens = tokens._replace(columnwise=d_out_TH.to(self.wgrad))
        return tokens

    def _quantize_each(self, rows_TH: Tensor) -> Operands:
        one_group = torch.full((1,), rows_TH.size(0), dtype=torch.int32, device=rows_TH.device)
        outputs = OutputMask(True, False, False)
        return self._quantize(rows_TH, one_group, outputs, share_scales=False)

    def quantize_gathered(
        self,
        x_TH: Tensor,
        routing: ops.SortedByExpert,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        """Gather and quantize in one op, with the bits of two."""
        return self._quantize(
            x_TH,
            routing.offs,
            outputs,
            share_scales=self.share_x_scales,
            routing=routing,
        )

    def quantize_gathered_grad(
        self,
        d_out_TH: Tensor,
        routing: ops.SortedByExpert,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        """Gather and quantize in one op, with the bits of two."""
        return self._quantize(d_out_TH, routing.offs, outputs, share_scales=False, routing=routing)

    def quantize_swiglu(
        self,
        gate_up_RG: Tensor,
        offs_E: Tensor,
        activation: SwiGLU,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        """SwiGLU and quantization in one op, with the bits of two; rowwise always."""
        if outputs.columnwise and self.wgrad is not E4M3:
            return super().quantize_swiglu(gate_up_RG, offs_E, activation, state, outputs)
        q, scale, q_t, scale_t, _ = ops.group_quantize_swiglu(
            gate_up_RG,
            offs_E,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            columnwise=outputs.columnwise,
            share_scales=self.share_x_scales,
            activation=activation,
        )
        return Operands(q, scale, q_t, scale_t)

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
        """SwiGLU's gradient, h and quantization in one op, with the bits of several.

        For wgrad in 16 bits they are written anyway, and d_gate_up is quantized from there.
        """
        if self.wgrad is not E4M3 or not (outputs.rowwise or outputs.columnwise):
            states = h_state, grad_state
            return super().quantize_swiglu_grad(
                dh_RF, gate_up_RG, weight_R, offs_E, activation, *states, outputs, h_columnwise
            )
        *d_gate_up, h_t, scale_h_t, d_weight_R = ops.group_quantize_swiglu_grad(
            dh_RF,
            gate_up_RG,
            weight_R,
            offs_E,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            rowwise=outputs.rowwise,
            columnwise=outputs.columnwise,
            bias_grad=outputs.bias_grad,
            h_columnwise=h_columnwise,
            share_h_scales=self.share_x_scales,
            activation=activation,
        )
        h = Operands(None, None, h_t, scale_h_t)
        return SwigluGradOperands(Operands(*d_gate_up), h, d_weight_R)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """A weight in FP8 with one scale a block."""
        scales = (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK))
        return new_fp8_weight(E, N, K, device, columnwise, scales)

    def refresh_weight_(
        self,
        quantized: QuantizedWeight,
        weights: Experts,
        state: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """Quantize the weight in 128x128 blocks."""
        assert quantized.scale is not None
        ops.refresh_weight_(
            weights,
            refresh,
            quantized.values,
            quantized.scale,
            quantized.columnwise,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
        )

    def linear(
        self,
        x_TK: Tensor,
        w_ENK: Tensor,
        m_splits_E: Tensor,
        bias_EN: Tensor | None,
        columnwise_x: bool,
        columnwise_w: bool,
    ) -> ops.BlockScaledLinear:
        """A layer's forward in one op."""
        in_fp8 = self.wgrad is E4M3
        y = ops.block_scaled_linear(
            x_TK,
            w_ENK,
            m_splits_E,
            bias_EN,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            share_scales=self.share_x_scales,
            columnwise_x=columnwise_x and in_fp8,
            columnwise_w=columnwise_w,
        )
        return y if in_fp8 or not columnwise_x else y._replace(x_t=x_TK.to(self.wgrad))

    def linear_grad(
        self,
        dy_TN: Tensor,
        offs_E: Tensor,
        x: tuple[Tensor | None, Tensor | None],
        w: tuple[Tensor | None, Tensor | None],
        bias_grad: bool,
        dtype: torch.dtype,
    ) -> ops.LinearGrad:
        """Its backward in one op."""
        return ops.block_scaled_linear_grad(
            dy_TN,
            offs_E,
            *x,
            *w,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            bias_grad=bias_grad,
            out_dtype=None if dtype is dy_TN.dtype else dtype,
        )

    def _quantize(
        self,
        t_SK: Tensor,
        offs_E: Tensor,
        outputs: OutputMask,
        *,
        share_scales: bool,
        routing: ops.SortedByExpert | None = None,
    ) -> Operands:
        """:func:`grouped_linear.ops.group_quantize` with this recipe's scales.

        For wgrad in 16 bits the columnwise operand is t itself, or its rows.

        Args:
            t_SK: rows, or tokens if there is a routing.
            offs_E: ends of the groups.
            outputs: which operands to make.
            share_scales: see ``group_quantize``.
            routing: to which rows the tokens go.
        """
        columnwise = None
        if outputs.columnwise and self.wgrad is not E4M3:
            t_TK = t_SK if routing is None else routing.tokens(t_SK)
            columnwise = t_TK.to(self.wgrad)
            outputs = outputs._replace(columnwise=False)
            if not outputs.rowwise:
                bias_grad = ops.grouped_bias_grad(t_TK, offs_E) if outputs.bias_grad else None
                return Operands(None, None, columnwise, None, bias_grad)
        q, scale, q_t, scale_t, bias_grad = ops.group_quantize(
            t_SK,
            offs_E,
            None if routing is None else routing.token,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            rowwise=outputs.rowwise,
            columnwise=outputs.columnwise,
            bias_grad=outputs.bias_grad,
            share_scales=share_scales,
        )
        return Operands(q, scale, q_t if columnwise is None else columnwise, scale_t, bias_grad)
