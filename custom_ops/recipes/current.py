"""FP8 with one scale a group, computed from the tensor that is quantized.

T rows, E groups, K in_features, N out_features.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import E4M3, FP8, dtype_name
from grouped_linear.recipes.amax_epsilon import AmaxEpsilon
from grouped_linear.recipes.base import (
    Experts,
    Operands,
    OutputMask,
    QuantizedWeight,
    QuantizerState,
    with_shared_scale,
)
from grouped_linear.recipes.weights import WeightByRefresh, new_fp8_weight, quantize_as_stored


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(AmaxEpsilon, WeightByRefresh):
    """FP8 GEMMs with one float32 scale a group, from the group's own amax.

    Each expert's weight has one scale, and so have each expert's rows of activations and of
    gradients. For each group::

        amax = max(largest finite magnitude, amax_epsilon)
        factor = min(fp8_max / amax, 2 ** 126)      # 1 where amax is 0
        q, scale = fp8(x * factor), 1 / factor

    Args:
        power_of_two_scales: round ``factor`` down to a power of two, so that scaling is exact.
        amax_epsilon: the smallest amax by which a group is scaled; not negative.
        gradient_dtype: of quantized gradients, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``
            (more range, less precision). Activations and weights are e4m3.
        requantize_weights: see :class:`grouped_linear.Float8BlockScaling`.

    Raises:
        ValueError: for an ``amax_epsilon`` that is negative or not finite, or another dtype.

    >>> Float8CurrentScaling(gradient_dtype=torch.float8_e5m2).gradient_dtype
    torch.float8_e5m2
    """

    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0
    gradient_dtype: torch.dtype = E4M3
    requantize_weights: bool = False

    reads_any_weight_dtype: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_dtype not in FP8:
            raise ValueError(
                "Float8CurrentScaling: gradient_dtype must be float8_e4m3fn or float8_e5m2, "
                f"got {dtype_name(self.gradient_dtype)}"
            )

    def quantize_input(
        self, x_TK: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """X in e4m3, one scale a group."""
        return self._quantize(x_TK, offs_E, E4M3, outputs)

    def quantize_weight(
        self, w_ENK: Tensor, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """The weight in e4m3, one scale an expert."""

        def quantize(w: Tensor, columnwise: bool, rowwise: bool) -> ops.WeightQuantized:
            return ops.quantize_weight_current(  # rowwise always
                w,
                amax_epsilon=self.epsilon,
                power_of_two_scales=self.power_of_two_scales,
                columnwise=columnwise,
            )

        return quantize_as_stored(quantize, w_ENK, columnwise)

    def quantize_grad_output(
        self, dy_TN: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """Dy in ``gradient_dtype``, one scale a group."""
        return self._quantize(dy_TN, offs_E, self.gradient_dtype, outputs)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """A weight in FP8 with one scale an expert."""
        return new_fp8_weight(E, N, K, device, columnwise, (E,))

    def refresh_weight_(
        self,
        quantized: QuantizedWeight,
        weights: Experts,
        state: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """Quantize the weight to e4m3 with one scale an expert."""
        assert quantized.scale is not None
        ops.refresh_weight_current_(
            weights,
            refresh,
            quantized.values,
            quantized.scale,
            quantized.columnwise,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
        )

    def _quantize(
        self, t_TK: Tensor, offs_E: Tensor, dtype: torch.dtype, outputs: OutputMask
    ) -> Operands:
        t = ops.group_quantize_current(
            t_TK,
            offs_E,
            dtype,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            rowwise=outputs.rowwise,
            columnwise=outputs.columnwise,
            bias_grad=outputs.bias_grad,
        )
        return with_shared_scale(*t)
