# SPDX-License-Identifier: Apache-2.0
"""Weights in a format: for one call, or stored from one call to the next.

E groups, K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, MX_BLOCK, ceil_div
from grouped_linear.recipes.format import (
    Device,
    Format,
    Layouts,
    Operands,
    Values,
    WeightList,
    with_shared_scale,
)


class QuantizedWeight(NamedTuple):
    """A weight in a format, stored from one call to the next."""

    values: Tensor  # [E, N, K]; of MXFP4 its codes, [E, N, K / 2] uint8
    scale: Tensor | None  # the scales of ``values`` and of ``columnwise``
    columnwise: Tensor | None  # for weight_for_dgrad: in FP8 [E, K, N], in MXFP8 [E, N, K]

    def each(self, op: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """Apply `op` to each tensor that is not None."""
        return QuantizedWeight(*(None if t is None else op(t) for t in self))  # type: ignore[arg-type]

    @property
    def is_mxfp4(self) -> bool:
        """Whether it is in MXFP4, whose GEMMs read one layout for fprop and dgrad."""
        return self.values.dtype == torch.uint8

    @property
    def stand_in(self) -> Tensor:
        """[E, N, K], for code that asks a weight for its sizes; of MXFP4 without memory."""
        if not self.is_mxfp4:
            return self.values
        return self.values[..., :1].expand(*self.values.shape[:2], 2 * self.values.size(2))

    def operands(self, columnwise: bool) -> Operands:
        """The weight for fprop and, where ``columnwise`` is true, for dgrad."""
        values, scale, transposed = self
        if self.is_mxfp4:
            transposed = values
        return with_shared_scale(values, scale, transposed if columnwise else None)


def is_transposed(w_ENK: Tensor) -> bool:
    """Whether a weight is a view of one that is stored as [E, K, N]."""
    return not w_ENK.is_contiguous() and w_ENK.mT.is_contiguous()


def in_dispatch_mode() -> bool:
    """Whether a mode, as of selective checkpointing, may keep the results of ops in eager code."""
    return not torch.compiler.is_compiling() and is_in_torch_dispatch_mode()


def quantize_weight(weights: WeightList, format: Format, layouts: Layouts) -> Operands:
    """Make a weight, [E, N, K] or E of [N, K], ready for fprop (rowwise) and dgrad (columnwise).

    The rowwise operand may be there in any case.
    """
    weights = _whole(weights, format)
    is_list, rowwise, columnwise = weights[0].dim() == 2, layouts.rowwise, layouts.columnwise
    if format.stored_as == "mxfp4":
        codes, of_codes = ops.quantize_mxfp4(weights[0])
        return with_shared_scale(codes, of_codes, codes if columnwise else None)
    if format.scaling is None and format.quantize is None:
        cast = weights if format.dtype is None else tuple(w.to(format.dtype) for w in weights)
        w = cast if is_list else cast[0]
        return Operands(w, None, w if columnwise else None)
    options = format.weight_options
    if format.scaling == "block" and is_list:
        made = ops.quantize_weight_list(weights, columnwise=columnwise, **options)
        return with_shared_scale(*made)
    # Ops that refresh read E tensors in place, and MXFP8 has no other op for a weight. A dispatch
    # mode, as selective activation checkpointing is, may store an op's results and skip the op in
    # the recomputation. An op that fills tensors returns nothing to store: skipped, it would leave
    # new tensors unfilled.
    if format.quantize is None and (is_list or format.scaling == "mx") and not in_dispatch_mode():
        *_, N, K = weights[0].shape
        E = len(weights) if is_list else len(weights[0])
        quantized = new_weight(format, E, N, K, weights[0].device, columnwise)
        refresh_weight_(quantized, weights, format, None)
        return quantized.operands(columnwise)
    w_ENK = torch.stack(weights) if is_list else weights[0]
    if format.quantize is not None:
        return format.by_function(w_ENK, None, layouts)
    if format.scaling == "delayed":
        of_state = ops.quantize_weight_delayed(
            w_ENK, *format.scale_and_amax(), columnwise=columnwise
        )
        return with_shared_scale(*of_state)
    if format.scaling == "mx":  # E groups of N rows, so blocks for dgrad run along N in an expert
        E, N, K = w_ENK.shape
        ends_E = torch.arange(N, E * N + 1, N, dtype=torch.int32, device=w_ENK.device)
        rounded = ops.group_round_mx(w_ENK.reshape(E * N, K), ends_E, columnwise=columnwise)
        x, x_t = (None if t is None else t.view(E, N, K) for t in rounded[:2])
        return Operands(x, None, x_t)
    # As it is stored, [E, N, K] or [E, K, N]. Blocks are squares or whole experts, so both layouts
    # have the same scales. With scales of groups rowwise is always there.
    quantize: Callable[..., Any] = ops.quantize_weight_current
    transposed = is_transposed(w_ENK)
    if format.scaling == "block":
        quantize = ops.quantize_weight
        options["rowwise"] = columnwise if transposed else rowwise
    if not transposed:
        return with_shared_scale(*quantize(w_ENK, columnwise=columnwise, **options))
    if format.qat is not None:
        options["mxfp4_dim"] = -2
    q_t, scale, q = quantize(w_ENK.mT, columnwise=rowwise, **options)
    if scale.dim() == 3:
        scale = scale.mT.contiguous()
    return with_shared_scale(q if rowwise else None, scale, q_t if columnwise else None)


def _whole(weights: WeightList, format: Format) -> WeightList:
    """One tensor in place of E where ops round to MXFP4."""
    return weights if format.qat is None or weights[0].dim() == 3 else (torch.stack(weights),)


def weight_for_dgrad(columnwise: Values, scale: Tensor | None, format: Format) -> Operands:
    """The columnwise weight as [E, N, K], from the columnwise fields of :func:`quantize_weight`.

    FP8 data is [E, K, N] and is transposed now, in the backward. What the forward saves is then the
    tensor itself. A view made in a compiled forward would have another version counter, and an
    in-place write to the tensor would go unnoticed. Nor does compiled autograd find such a view.
    """
    if format.transposes_columnwise:
        assert isinstance(columnwise, Tensor)
        columnwise = columnwise.transpose(-2, -1)  # of mT Dynamo makes that view (torch 2.13)
    return Operands(None, None, columnwise, scale)


def stores(format: Format) -> bool:
    """Whether a weight in this format differs from the parameter and can be stored."""
    return format.quantize is None and format.stored_as is not None


def new_weight(
    format: Format, E: int, N: int, K: int, device: Device, columnwise: bool = True
) -> QuantizedWeight:
    """Allocate a weight in a format, its contents unspecified."""
    if format.stored_as == "mxfp4":  # codes and scales of [E, N, K], also of one kept as [E, K, N]
        N, K = (N, K) if format.qat_dim == -1 else (K, N)
        codes = torch.empty(E, N, K // 2, dtype=torch.uint8, device=device)
        return QuantizedWeight(codes, codes.new_empty(E, N, K // MX_BLOCK), None)
    if format.scaling == "mx":  # bfloat16 numbers for each of the two roundings
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        values = torch.empty(E, N, K, **like)
        return QuantizedWeight(values, None, torch.empty(E, N, K, **like) if columnwise else None)
    scales = (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)) if format.scaling == "block" else (E,)
    return QuantizedWeight(
        torch.empty(E, N, K, dtype=E4M3, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
        torch.empty(E, K, N, dtype=E4M3, device=device) if columnwise else None,
    )


def poison_(t: Tensor) -> None:
    """Fill scales, or numbers without any, with NaN; of MXFP4 that is 255."""
    t.fill_(torch.nan if t.is_floating_point() else 255)


def store_weight(w_ENK: Tensor, format: Format, columnwise: bool) -> QuantizedWeight:
    """Quantize a weight into new tensors. A format's function makes both layouts."""
    if format.quantize is not None:
        return _by_function(w_ENK, format).each(torch.clone)
    E, N, K = w_ENK.shape
    stored = new_weight(format, E, N, K, w_ENK.device, columnwise)
    refresh_weight_(stored, (w_ENK,), format, None)
    return stored


def _by_function(w_ENK: Tensor, format: Format) -> QuantizedWeight:
    """A weight as a format's function makes it.

    One tensor for both layouts is stored once: ``columnwise`` is then None.
    """
    made = format.by_function(w_ENK, None, Layouts(True, True))
    if made.columnwise_scale is not made.rowwise_scale:
        raise ValueError(
            f"{format.role}: both layouts of a weight that is stored must have one scale tensor, "
            "the function returned two"
        )
    columnwise = None if made.columnwise is made.rowwise else made.columnwise
    return QuantizedWeight(made.rowwise, made.rowwise_scale, columnwise)  # type: ignore[arg-type]


def refresh_weight_(
    quantized: QuantizedWeight, weights: WeightList, format: Format, refresh: Tensor | None
) -> None:
    """Quantize a weight, [E, N, K] or E of [N, K], into ``quantized``; ops count these writes.

    ``refresh`` is a bool of no dimensions on the weight's device, which only the device reads:
    false leaves ``quantized`` alone. None stands for true.
    """
    values, scale, columnwise = quantized
    weights = _whole(weights, format)
    if format.stored_as == "mxfp4":
        w = weights[0] if format.qat_dim == -1 else weights[0].mT
        for part, new in zip((values, scale), ops.quantize_mxfp4(w), strict=True):
            assert part is not None
            part.copy_(new if refresh is None else torch.where(refresh, new, part))
    elif format.quantize is not None:
        for part, numbers in zip(quantized, _by_function(weights[0], format), strict=True):
            if part is not None and numbers is not None:
                part.copy_(numbers)
    elif scale is None:
        ops.refresh_weight_mx_(values, columnwise, weights, refresh)
    elif format.scaling == "delayed":
        own, amax = format.scale_and_amax()
        ops.refresh_weight_delayed_(values, scale, columnwise, amax, weights, own, refresh)
    else:
        in_blocks = format.scaling == "block"
        refresh_ = ops.refresh_weight_ if in_blocks else ops.refresh_weight_current_
        refresh_(values, scale, columnwise, weights, refresh, **format.weight_options)
