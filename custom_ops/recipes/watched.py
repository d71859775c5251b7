"""The counts of a watched layer's operands, taken where its recipe's formats make them.

T rows, E groups, K in_features, N out_features, F features inside an expert, G = 2 F.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FP8
from grouped_linear.recipes.format import Format, Layouts, Operands, WeightList
from grouped_linear.recipes.quantize import Gathered, Source, SwigluGradOf, SwigluOf


class WatchedOperand(NamedTuple):
    """Where a format counts one operand of a projection, in the role that it has there.

    An operand is measured when it is made, so that none lives longer.
    """

    counts: Any  # the layer's numbers, see grouped_linear.nn.watched
    number: int  # the projection's number in the layer
    is_gradient: bool = False

    def rows(
        self,
        source: Source | SwigluGradOf,
        made: Operands,
        format: Format,
        offs_E: Tensor,
        layouts: Layouts,
    ) -> None:
        """Measure x, also how wgrad's columns share scales, or dy."""
        E = self.counts.forward_stats.size(2)
        if len(offs_E) != E:  # as of a part of the model that FSDP2 shards as a whole
            raise ValueError(
                f"watch: a call has {len(offs_E)} experts on this process, and {E} are counted: "
                "watch the whole model, when experts are spread and before fully_shard"
            )
        if layouts.again:  # the forward has measured it
            self.shares(made, format, offs_E)
            return
        given: dict[str, Any] = {}
        t: Tensor | None = None
        if isinstance(source, SwigluGradOf):
            t, given["gate_up"], given["weight"], given["activation"] = source
        elif isinstance(source, SwigluOf):
            given["gate_up"], given["activation"] = source
        elif isinstance(source, Gathered):
            t, given["rows"] = source.tokens_TH, source.routing.token
        else:
            t = source
        q, scale = _quantized(made, format)
        if q is not None:
            given["q_rows"] = made.rows
        stats, operand = self.counts.backward_stats, 2 * self.number + 1
        if not self.is_gradient:
            stats, operand = self.counts.forward_stats, 2 * self.number
            given["scale_t"] = made.columnwise_scale if format.share_scales else None
            if isinstance(source, Gathered):
                given["routed"] = getattr(source.routing, "routed", None)
        self._measure(stats, operand, t, q, scale, offs_E, **given)

    def shares(self, x: Operands, format: Format, offs_E: Tensor) -> None:
        """Count where the columns of x share scales, which the backward has made."""
        scale_t = x.columnwise_scale
        if format.share_scales and scale_t is not None:
            stats = self.counts.backward_stats
            self._measure(stats, 2 * self.number, offs=offs_E, scale_t=scale_t)

    def weight(self, weights: WeightList, made: Operands, format: Format) -> None:
        """Measure the weight: of one in FP8 alone, and of E tensors, what q tells."""
        first: Any = weights[0]
        w: Tensor | None = getattr(first, "numbers", None if hasattr(first, "q") else first)
        if w is not None and (w.dim() == 2 or w.dtype not in ACTIVATIONS or not any(w.stride())):
            w = None  # without strides it has no memory and stands for one that FSDP2 gathered
        q, scale = _quantized(made, format)
        if w is not None or q is not None:
            self._measure(self.counts.forward_stats, 2 * self.number + 1, w, q, scale)

    def _measure(
        self, stats: Tensor, operand: int, x: Tensor | None = None, *rest: Any, **more: Any
    ) -> None:
        counts = self.counts
        ops.watch_operand_(stats, counts.turn, operand, x, *rest, most=counts.rows, **more)


def _quantized(made: Operands, format: Format) -> tuple[Tensor | None, Tensor | None]:
    """The rowwise operand and its scales, where they differ from the numbers; else None."""
    q, scale = made.rowwise, made.rowwise_scale
    if format.changes_nothing or not isinstance(q, Tensor) or q.dtype not in (*ACTIVATIONS, *FP8):
        return None, None
    if scale is not None and scale.dtype != torch.float32:  # by a user's function
        return None, None
    return q, scale
