"""What a watched layer counts of its operands, beside the GEMMs that read them.

T rows, E groups, K in_features, N out_features, F features inside an expert, G = 2 F.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FP8
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.quantized.weight import KEPT
from grouped_linear.recipes import (
    Format,
    Gathered,
    Operands,
    RowOperands,
    Source,
    SwigluOf,
    WeightList,
)


class SwigluGradOf(NamedTuple):
    """The gradient of gate_up that ``ops.swiglu_grad`` returns."""

    dh_RF: Tensor
    gate_up_RG: Tensor
    weight_R: Tensor
    form: SwiGLU


class Watched(NamedTuple):
    """The numbers of one linear layer in a call, which :func:`ops.watch_operand_` adds to.

    The forward and the backward have a tensor each: AOTAutograd takes none that both write. An
    operand is measured when it is made, so that none lives longer: d_gate_up and h together.
    """

    forward: Tensor
    """[2 * layers, parts, E, 14]: each layer's input and weight."""
    backward: Tensor
    """The same: the columnwise input, and the gradient of the output."""
    turn: Tensor
    """An int32 on the device: 0 counts nothing, others say which rows."""
    rows: int
    """How many rows of each group are read."""
    layer: int = 0
    routed: Tensor | None = None
    """[E] int32 group ends before rows were dropped."""

    def input(
        self, source: Source, made: RowOperands, offs_E: Tensor, format: Format, shares: bool
    ) -> None:
        """Measure x; with ``shares`` also how wgrad's columns share scales."""
        x = made.operands
        self._measure_rows(
            self.forward,
            2 * self.layer,
            source,
            made,
            offs_E,
            format,
            scale_t=shared_scales(x, format) if shares else None,
            routed=self.routed,
        )

    def shares(self, x: Operands, offs_E: Tensor, format: Format) -> None:
        """Count where the columns of x share scales, which the backward has made."""
        scale_t = shared_scales(x, format)
        if scale_t is not None:
            self._measure(self.backward, 2 * self.layer, offs=offs_E, scale_t=scale_t)

    def gradient(
        self,
        source: Source | SwigluGradOf,
        made: RowOperands,
        offs_E: Tensor,
        format: Format,
        h_scale_t: Tensor | None = None,
    ) -> None:
        """Measure dy, and how the columns of h, the next layer's x, share scales."""
        number = 2 * self.layer + 1
        given: dict[str, Any] = {}
        if h_scale_t is not None:
            given = {"scale_t": h_scale_t, "operand_t": number + 1}
        self._measure_rows(self.backward, number, source, made, offs_E, format, **given)

    def weight(self, weights: WeightList, made: Operands, format: Format) -> None:
        """Measure the weight: of one in FP8 alone, and of E tensors, what q tells."""
        w: Tensor | None = weights[0]
        w = getattr(w, "master", None if isinstance(w, KEPT) else w)
        if w is not None and (w.dim() == 2 or w.dtype not in ACTIVATIONS):
            w = None
        q, scale = quantized(made, format)
        if w is not None or q is not None:
            self._measure(self.forward, 2 * self.layer + 1, w, q, scale)

    def _measure_rows(
        self,
        stats: Tensor,
        operand: int,
        source: Source | SwigluGradOf,
        made: RowOperands,
        offs_E: Tensor,
        format: Format,
        **more: Any,
    ) -> None:
        x: Tensor | None = None
        given: dict[str, Any] = dict(more)
        if isinstance(source, SwigluGradOf):
            x, given["gate_up"], given["weight"], given["activation"] = source
        elif isinstance(source, SwigluOf):
            given["gate_up"], given["activation"] = source
        elif isinstance(source, Gathered):
            x, given["rows"] = source.tokens_TH, source.routing.token
        else:
            x = source
        q, scale = quantized(made.operands, format)
        if q is not None:
            given["q_rows"] = made.rows
        self._measure(stats, operand, x, q, scale, offs_E, **given)

    def _measure(
        self, stats: Tensor, operand: int, x: Tensor | None = None, *rest: Any, **more: Any
    ) -> None:
        ops.watch_operand_(stats, self.turn, operand, x, *rest, most=self.rows, **more)


def shared_scales(x: Operands, format: Format) -> Tensor | None:
    """The scales of columnwise x, under a format in which features share them."""
    return x.columnwise_scale if format.share_scales else None


def quantized(made: Operands, format: Format) -> tuple[Tensor | None, Tensor | None]:
    """What the rowwise GEMM multiplies and its scales, where these differ from the numbers."""
    q, scale = made.rowwise, made.rowwise_scale
    as_it_is = format.scaling is None and format.dtype is None and format.quantize is None
    if as_it_is or not isinstance(q, Tensor) or q.dtype not in (*ACTIVATIONS, *FP8):
        return None, None
    if scale is not None and scale.dtype != torch.float32:  # of a format of a user's own
        return None, None
    return q, scale
