"""MXFP8 numbers, multiplied in bfloat16.

T rows, E groups, K in_features, N out_features.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.recipes.base import (
    Experts,
    Operands,
    OutputMask,
    QuantizedWeight,
    QuantizerState,
)
from grouped_linear.recipes.weights import (
    WeightByRefresh,
    in_dispatch_mode,
    quantize_into_new_weight,
)


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(WeightByRefresh):
    """GEMMs of MXFP8 numbers: e4m3 with a power of two as the scale of each 1x32 block.

    A block is 32 features of one token for fprop and dgrad. For wgrad it is 32 tokens of one
    feature, counted from the group's first token. A weight's blocks run along K for fprop and along
    N for dgrad. A block's scale is the smallest power of two that brings its amax to at most 448,
    within 2^-124 and 2^119. In that range every ``q * scale`` is exactly a finite bfloat16 number.

    Hopper has no instruction that multiplies MX numbers. Operands are therefore dequantized,
    exactly, to bfloat16 and multiplied in bfloat16: the numbers are the format's, the speed is
    bfloat16's.

    >>> MXFP8BlockScaling()
    MXFP8BlockScaling()
    """

    reads_any_weight_dtype: ClassVar[bool] = True

    def quantize_input(
        self, x_TK: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """X rounded to MXFP8 along each dimension, as bfloat16."""
        return self.quantize_grad_output(x_TK, offs_E, state, outputs)

    def quantize_weight(
        self, w_ENK: Tensor, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """The weight rounded to MXFP8 along each dimension, as bfloat16."""
        if not in_dispatch_mode():
            return quantize_into_new_weight(self, (w_ENK,), state, columnwise)
        E, N, K = w_ENK.shape
        ends_E = torch.arange(N, E * N + 1, N, dtype=torch.int32, device=w_ENK.device)
        w = ops.group_round_mx(w_ENK.reshape(E * N, K), ends_E, columnwise=columnwise)
        w_EKN = None if w.x_columnwise is None else w.x_columnwise.view(E, N, K).transpose(1, 2)
        assert w.x_rowwise is not None
        return Operands(w.x_rowwise.view(E, N, K), None, w_EKN, None)

    def quantize_grad_output(
        self, dy_TN: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        """Dy rounded to MXFP8 along each dimension, as bfloat16."""
        rowwise, columnwise, bias_grad = ops.group_round_mx(
            dy_TN,
            offs_E,
            rowwise=outputs.rowwise,
            columnwise=outputs.columnwise,
            bias_grad=outputs.bias_grad,
        )
        return Operands(rowwise, None, columnwise, None, bias_grad)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """A weight in bfloat16 for each of the two roundings."""
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        values = torch.empty(E, N, K, **like)
        return QuantizedWeight(
            values, None, torch.empty(E, N, K, **like).transpose(1, 2) if columnwise else None
        )

    def refresh_weight_(
        self,
        quantized: QuantizedWeight,
        weights: Experts,
        state: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """Round the weight to MXFP8 along each dimension."""
        w_EKN = quantized.columnwise
        w_ENK = None if w_EKN is None else w_EKN.transpose(1, 2)
        ops.refresh_weight_mx_(weights, refresh, quantized.values, w_ENK)
