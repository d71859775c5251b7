# SPDX-License-Identifier: Apache-2.0
"""From a source and a format to the operand of a GEMM, in as few passes as ops allow.

A source is a tensor of rows, or what rows are computed from: tokens that are gathered, or gate and
up. Two tables have the ops: ``OF_ROWS`` by the scaling, ``FUSED`` by the scaling and the source,
where one op computes the rows and quantizes them. Its bits are those of two passes.

T rows or tokens, R rows sorted by expert, E groups, K features, H features of a token,
F features inside an expert, G = 2 F for gate and up together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from grouped_linear import ops
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.recipes.format import (
    COLUMNWISE_AGAIN,
    ROWWISE,
    SIXTEEN_BITS,
    Format,
    Layouts,
    Operands,
    with_shared_scale,
)
from grouped_linear.recipes.recipe import Recipe

# --- up to how many columns of its output a GEMM gathers rows itself ------------------------------
# Every 256 columns of an output read the rows again, by copies of 16 bytes that take some of the
# GEMM's time. H100 and H200, docs/notes/gemm_sm90.md, "Rows gathered
# inside the GEMM".

#: fprop and dgrad of 16-bit tokens. With more columns BF16 takes a copy and swapped operands.
GATHERING_16_BITS = 512
#: Rows a group, on average, up to which fprop in 16 bits has a kernel that gathers them, on Hopper.
FEW_ROWS = 16
#: fprop and dgrad of tokens that are quantized once each, in place of once a row.
GATHERING_FP8 = 1024
#: The same beside a columnwise pass over the rows, which quantizes them rowwise as well.
GATHERING_FP8_BESIDE_COLUMNWISE = 512
#: Most columns for which wgrad in 16 bits gathers rows that dgrad reads too, beside a copy of them.
GATHERING_WGRAD = 256
#: The same of rows that nothing else reads. H100, 2026-11, beside a copy and a GEMM of it: 256
#: columns take 0.60 of the time, 512 0.82 (the whole layer 0.98), 768 0.96, 1024 0.90 to 1.03 (the
#: layer 1.00 with 160 rows a group, 1.04 with 1024), 1536 1.13.
GATHERING_WGRAD_ALONE = 512

#: in_features up to which down's wgrad is in 16 bits under scales of blocks as well. It gathers dy,
#: where FP8 needs a columnwise copy of every row; the whole layer takes 0.964 of its time at 256
#: (H100, 2026-11, docs/notes/expert_layer.md).
WGRAD_IN_16_BITS = GATHERING_WGRAD


class Gathered(NamedTuple):
    """The rows that a routing makes of tokens: ``tokens[routing.token]``."""

    tokens_TH: Tensor
    routing: Any
    """A :class:`grouped_linear.ops.SortedByExpert`, or what has its ``token`` and ``tokens``."""


class SwigluOf(NamedTuple):
    """``swiglu(gate_up)``."""

    gate_up_RG: Tensor
    form: SwiGLU


class SwigluGradOf(NamedTuple):
    """The gradient of gate_up that :func:`grouped_linear.ops.swiglu_grad` returns."""

    dh_RF: Tensor
    gate_up_RG: Tensor
    weight_R: Tensor
    form: SwiGLU


#: The source of an operand.
Source = Tensor | Gathered | SwigluOf


def quantize(
    source: Source,
    format: Format,
    offs_E: Tensor,
    layouts: Layouts,
    columns: int | None = None,
    gathers_few: bool = False,
) -> Operands:
    """Make rows of x, or of a gradient, ready for the GEMMs that read them.

    Args:
        source: rows sorted by group, or what they are computed from.
        format: which numbers they become.
        offs_E: int32 group ends; rows at and past the last one hold anything.
        layouts: what to return.
        columns: given where GEMMs can gather rows, so that tokens may be quantized once each: of
            the output of the GEMM that reads the rowwise operand; without one, of the other
            operand of wgrad.
        gathers_few: whether that GEMM gathers few rows, however many columns it has.
    """
    made = None
    if columns is not None and isinstance(source, Gathered):
        # No guard: a graph of a symbolic number of rows copies them.
        few = gathers_few and statically_known_true(
            source.routing.token.numel() <= FEW_ROWS * offs_E.numel()
        )
        made = _of_tokens(source, format, offs_E, layouts, columns, few)
    if made is None:
        made = _of_rows(source, format, offs_E, layouts)
    if format.observer is not None:
        format.observer(source, made, offs_E, layouts)
    return made


def _of_rows(source: Source, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    rowwise, columnwise, bias_grad, again = layouts
    scaling = format.scaling if rowwise or columnwise else None  # else for the bias alone
    in_16_bits = columnwise and format.wgrad_dtype is not None
    fused = FUSED.get((scaling, type(source)))
    if fused is not None and not in_16_bits:
        return fused(source, format, offs_E, layouts)
    # Under scales of blocks the forward has copied no rows that a graph could keep.
    t = rows_of(source, offs_E, again and fused is None)
    if not in_16_bits:
        return OF_ROWS[scaling](t, format, offs_E, layouts)
    # wgrad multiplies the rows themselves; the format is for the rowwise operand.
    left = source if fused is not None and rowwise else t
    made = _of_rows(left, format, offs_E, Layouts(rowwise, False, bias_grad, again))
    return made._replace(columnwise=t.to(format.wgrad_dtype))


def rows_of(source: Source, offs_E: Tensor, again: bool) -> Tensor:
    """The rows themselves, computed from their source; see :class:`Layouts` for ``again``."""
    if isinstance(source, Tensor):
        return source
    if isinstance(source, Gathered):
        t: Tensor = source.routing.tokens(source.tokens_TH, again=again)
        return t
    return ops.swiglu(source.gate_up_RG, offs_E, source.form)


def _of_tokens(
    source: Gathered, format: Format, offs_E: Tensor, layouts: Layouts, columns: int, few: bool
) -> Operands | None:
    """Operands whose rows GEMMs gather, with the bits of rows that were gathered before.

    None where rows are gathered before: because their numbers depend on the groups that they go to,
    or because that is faster. See :func:`quantize` for ``columns``. ``few``: the GEMM gathers so
    few rows in 16 bits, however many columns it has.
    """
    (tokens_TH, routing), (rowwise, columnwise, bias_grad, _) = source, layouts
    in_16_bits = format.wgrad_dtype is not None
    q: Any = None
    scale = None
    if not rowwise:
        gathers = columnwise and not bias_grad and columns <= GATHERING_WGRAD_ALONE
        if not gathers or not (in_16_bits or format.changes_nothing):
            return None
    elif format.changes_nothing and not in_16_bits:
        most = GATHERING_WGRAD if columnwise else GATHERING_16_BITS
        if columns > most and (columnwise or not few):
            return None
        q, gathers = tokens_TH, columnwise
    elif format.scaling == "block":
        beside_columnwise = columnwise and not in_16_bits
        if columns > (GATHERING_FP8_BESIDE_COLUMNWISE if beside_columnwise else GATHERING_FP8):
            return None
        one_group = torch.full((1,), tokens_TH.size(0), dtype=torch.int32, device=tokens_TH.device)
        q, scale, *_ = _of_rows(tokens_TH, format, one_group, ROWWISE)
        gathers = columnwise and in_16_bits and columns <= GATHERING_WGRAD
    else:
        return None
    rows_R: Tensor = routing.token
    t: Any = None
    scale_t = None
    if gathers:
        t = tokens_TH.to(format.wgrad_dtype) if in_16_bits else tokens_TH
    elif columnwise:
        of_rows = _of_rows(source, format, offs_E, Layouts(False, True))
        t, scale_t = of_rows.columnwise, of_rows.columnwise_scale
    return Operands(q, scale, t, scale_t, None, rows_R, rows_R if gathers else None)


# --- one op for each scaling, and those that compute the rows as well ----------------------------


def _unscaled(t: Tensor, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    rowwise, columnwise, bias_grad, _ = layouts
    sums = ops.grouped_bias_grad(t, offs_E) if bias_grad else None
    if format.quantize is not None and (rowwise or columnwise):
        return format.by_function(t, offs_E, layouts)._replace(bias_grad=sums)
    if format.dtype in SIXTEEN_BITS:
        t = t.to(format.dtype)
    return Operands(t if rowwise else None, None, t if columnwise else None, None, sums)


def _in_blocks(
    t: Tensor, format: Format, offs_E: Tensor, layouts: Layouts, rows_R: Tensor | None = None
) -> Operands:
    made = ops.group_quantize(
        t,
        offs_E,
        rows_R,
        amax_epsilon=format.epsilon,
        power_of_two_scales=format.power_of_two_scales,
        rowwise=layouts.rowwise,
        columnwise=layouts.columnwise,
        bias_grad=layouts.bias_grad,
        share_scales=format.share_scales,
    )
    return Operands(*made)


def _swiglu_in_blocks(
    source: SwigluOf, format: Format, offs_E: Tensor, layouts: Layouts
) -> Operands:
    q, scale, q_t, scale_t, _ = ops.group_quantize_swiglu(
        source.gate_up_RG,
        offs_E,
        amax_epsilon=format.epsilon,
        power_of_two_scales=format.power_of_two_scales,
        columnwise=layouts.columnwise,
        share_scales=format.share_scales,
        activation=source.form,
    )
    return Operands(q, scale, q_t, scale_t)


def _by_group(t: Tensor, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    assert format.dtype is not None
    made = ops.group_quantize_current(
        t,
        offs_E,
        format.dtype,
        amax_epsilon=format.epsilon,
        power_of_two_scales=format.power_of_two_scales,
        rowwise=layouts.rowwise,
        columnwise=layouts.columnwise,
        bias_grad=layouts.bias_grad,
    )
    return with_shared_scale(*made)


def _delayed(t: Tensor, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    assert format.dtype is not None
    scale_E, amax_E = format.scale_and_amax(layouts.again)
    rowwise, columnwise, bias_grad, _ = layouts
    options = {"rowwise": rowwise, "columnwise": columnwise, "bias_grad": bias_grad}
    made = ops.group_quantize_delayed(t, offs_E, scale_E, amax_E, format.dtype, **options)
    return with_shared_scale(*made)


def _in_mx(t: Tensor, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    rowwise, columnwise, bias_grad, _ = layouts
    options = {"rowwise": rowwise, "columnwise": columnwise, "bias_grad": bias_grad}
    x_rowwise, x_columnwise, sums = ops.group_round_mx(t, offs_E, **options)
    return Operands(x_rowwise, None, x_columnwise, None, sums)


OF_ROWS: dict[str | None, Callable[[Tensor, Format, Tensor, Layouts], Operands]] = {
    None: _unscaled,
    "block": _in_blocks,
    "group": _by_group,
    "delayed": _delayed,
    "mx": _in_mx,
}
FUSED: dict[tuple[str | None, type], Callable[[Any, Format, Tensor, Layouts], Operands]] = {
    ("block", Gathered): lambda source, format, offs_E, layouts: _in_blocks(
        source.tokens_TH, format, offs_E, layouts, source.routing.token
    ),
    ("block", SwigluOf): _swiglu_in_blocks,
}


# --- an expert's backward ------------------------------------------------------------------------


def recipe_of_wgrad(recipe: Recipe, dtype: torch.dtype, in_features: int) -> Recipe:
    """The recipe of an expert's down projection in the backward, which follows from sizes alone.

    Under scales of blocks few in_features get a wgrad in 16 bits; else it is the layer's recipe.
    ``dtype`` is that of dy.
    """
    return recipe.with_wgrad_in.get(dtype, recipe) if in_features <= WGRAD_IN_16_BITS else recipe


def quantize_grads(
    source: SwigluGradOf | ops.SwigluGrad,
    offs_E: Tensor,
    grad_output: Format,
    layouts: Layouts,
    input: Format,
    h_columnwise: bool,
) -> tuple[Operands, Operands, Tensor]:
    """Make an activation's gradient, computed or not, ready for the GEMMs of both layers.

    Args:
        source: what is quantized, or computed and quantized.
        offs_E: int32 group ends.
        grad_output, layouts: of the gradient of the first layer's output.
        input: the format of h, the second layer's input.
        h_columnwise: whether to return h.

    Returns:
        The gradient of gate_up, for the first layer's dgrad and wgrad; the weighted h, columnwise,
        for the second layer's wgrad; the gradient of the routing weights, [R] float32.
    """
    # One op makes both: d_gate_up in FP8, h in FP8 with blocks alike or in 16 bits.
    in_blocks = grad_output.scaling == input.scaling == "block" and grad_output.wgrad_dtype is None
    alike = grad_output.scale_options == input.scale_options and not grad_output.share_scales
    in_one_pass = in_blocks and alike and (layouts.rowwise or layouts.columnwise)
    if not isinstance(source, SwigluGradOf) or not in_one_pass:
        if isinstance(source, SwigluGradOf):
            dh_RF, gate_up_RG, weight_R, form = source
            source = ops.swiglu_grad(dh_RF, gate_up_RG, weight_R, offs_E, form)
        d_gate_up, h = quantize(source.d_gate_up, grad_output, offs_E, layouts), Operands(None)
        if h_columnwise:
            h = quantize(source.h, input, offs_E, COLUMNWISE_AGAIN)
        return d_gate_up, h, source.d_weight
    h_itself = h_columnwise and input.wgrad_dtype is not None
    *made, h_t, scale_h_t, h_RF, d_weight_R = ops.group_quantize_swiglu_grad(
        source.dh_RF,
        source.gate_up_RG,
        source.weight_R,
        offs_E,
        amax_epsilon=input.epsilon,
        power_of_two_scales=input.power_of_two_scales,
        rowwise=layouts.rowwise,
        columnwise=layouts.columnwise,
        bias_grad=layouts.bias_grad,
        h_columnwise=h_columnwise and not h_itself,
        keep_h=h_itself,
        share_h_scales=input.share_scales,
        activation=source.form,
    )
    if h_RF is not None:
        h_t = h_RF.to(input.wgrad_dtype)
    d_gate_up, h = Operands(*made), Operands(None, None, h_t, scale_h_t)
    if grad_output.observer is not None:
        grad_output.observer(source, d_gate_up, offs_E, layouts)
    if input.observer is not None and h_columnwise:
        input.observer(source, h, offs_E, COLUMNWISE_AGAIN)
    return d_gate_up, h, d_weight_R
