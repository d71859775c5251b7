# SPDX-License-Identifier: Apache-2.0
"""One table: from a source and a format to the operand of a GEMM, in as few passes as ops allow.

A source is a tensor of rows, or what rows are computed from: tokens that are gathered, or gate and
up. Where an op computes and quantizes in one pass it is called; its bits are those of two passes.
A user's function is always composed: the rows are computed, then its function is called.

T rows or tokens, R rows sorted by expert, E groups, K features, H features of a token,
F features inside an expert, G = 2 F for gate and up together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from grouped_linear import ops
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.recipes.format import (
    COLUMNWISE_AGAIN,
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


class GradFormats(NamedTuple):
    """How an expert's backward quantizes an activation's gradient and the weighted h."""

    grad_output: Format
    """The format of the gradient of the first layer's output."""
    layouts: Layouts
    """The layouts of that gradient to return."""
    input: Format
    """The format of h, the second layer's input."""
    h_columnwise: bool
    """Whether to return h, columnwise."""


#: The results of :func:`grouped_linear.ops.swiglu_grad` for an expert's backward: the gradient of
#: gate_up, for the first layer's dgrad and wgrad; h, columnwise, for the second layer's wgrad; and
#: the gradient of the routing weights, [R] float32.
SwigluGradOperands = tuple[Operands, Operands, Tensor]


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
        made = _quantize(source, format, offs_E, layouts)
    if format.observer is not None:
        format.observer(source, made, offs_E, layouts)
    return made


def _quantize(source: Source, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    rowwise, columnwise, bias_grad, _ = layouts
    if isinstance(source, Tensor) and (format.wgrad_dtype is None or not columnwise):
        return _in_format(source, format, offs_E, layouts)
    # wgrad may multiply the rows themselves in 16 bits; the format is then for the rowwise operand.
    in_16_bits = columnwise and format.wgrad_dtype is not None
    in_one_pass = format.scaling == "block" and (rowwise or columnwise)
    if isinstance(source, SwigluOf):  # the op writes h rowwise and sums nothing
        in_one_pass = in_one_pass and rowwise and not bias_grad
    if in_one_pass and not in_16_bits:
        return _in_blocks(source, format, offs_E, layouts)
    # Under scales of blocks the forward has copied no rows that a graph could keep.
    t = rows_of(source, offs_E, layouts.again and format.scaling != "block")
    if not in_16_bits:
        return _in_format(t, format, offs_E, layouts)
    gathered = source if isinstance(source, Gathered) and rowwise and in_one_pass else None
    alone = Layouts(rowwise, False, bias_grad, layouts.again)
    made = _in_format(t if gathered is None else gathered, format, offs_E, alone)
    return made._replace(columnwise=t.to(format.wgrad_dtype))


def _in_format(t: Tensor | Gathered, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    """Rows in a format, which an op may gather under scales of blocks."""
    rowwise, columnwise, bias_grad, _ = layouts
    scaling = format.scaling if rowwise or columnwise else None
    if scaling == "block":
        return _in_blocks(t, format, offs_E, layouts)
    assert isinstance(t, Tensor)
    if scaling is not None:
        return _in_scaled_format(t, format, offs_E, layouts)
    sums = ops.grouped_bias_grad(t, offs_E) if bias_grad else None
    if not (rowwise or columnwise):  # for the bias alone
        return Operands(None, None, None, None, sums)
    if format.quantize is not None:
        return format.by_function(t, offs_E, layouts)._replace(bias_grad=sums)
    if format.dtype is not None:
        t = t.to(format.dtype)
    return Operands(t if rowwise else None, None, t if columnwise else None, None, sums)


def _in_scaled_format(t: Tensor, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    """Rows with a scale for each group, or of MXFP8."""
    outputs: dict[str, Any] = {
        "rowwise": layouts.rowwise,
        "columnwise": layouts.columnwise,
        "bias_grad": layouts.bias_grad,
    }
    if format.scaling == "mx":
        rowwise, columnwise, bias_grad = ops.group_round_mx(t, offs_E, **outputs)
        return Operands(rowwise, None, columnwise, None, bias_grad)
    dtype = format.dtype
    assert dtype is not None
    if format.scaling == "delayed":
        state = format.state
        assert state is not None
        records = format.records and not layouts.again
        scale, amax = state.scale, state.amax if records else None
        return with_shared_scale(
            *ops.group_quantize_delayed(t, offs_E, scale, amax, dtype, **outputs)
        )
    return with_shared_scale(
        *ops.group_quantize_current(
            t,
            offs_E,
            dtype,
            amax_epsilon=format.epsilon,
            power_of_two_scales=format.power_of_two_scales,
            **outputs,
        )
    )


def _of_tokens(
    source: Gathered, format: Format, offs_E: Tensor, layouts: Layouts, columns: int, few: bool
) -> Operands | None:
    """Operands whose rows GEMMs gather; None where rows are gathered before."""
    rows_R = source.routing.token
    if not layouts.rowwise:
        if not layouts.columnwise or layouts.bias_grad or columns > GATHERING_WGRAD_ALONE:
            return None
        t = source.tokens_TH
        if format.wgrad_dtype is not None:
            t = t.to(format.wgrad_dtype)
        elif not format.changes_nothing:
            return None
        return Operands(None, columnwise=t, columnwise_rows=rows_R)
    tokens = quantize_tokens(source.tokens_TH, format, columns, layouts.columnwise, few)
    if tokens is None:
        return None
    if tokens.columnwise is not None or not layouts.columnwise:
        return Operands(*tokens[:5], rows_R, rows_R)
    of_rows = _quantize(source, format, offs_E, Layouts(False, True))
    return Operands(*tokens[:2], *of_rows[2:4], rows=rows_R)


def recipe_of_wgrad(recipe: Recipe, dtype: torch.dtype, in_features: int) -> Recipe:
    """The recipe of an expert's down projection in the backward, which follows from sizes alone.

    Under scales of blocks few in_features get a wgrad in 16 bits; else it is the layer's recipe.
    ``dtype`` is that of dy.
    """
    return recipe.with_wgrad_in.get(dtype, recipe) if in_features <= WGRAD_IN_16_BITS else recipe


def quantize_tokens(
    tokens_TH: Tensor, format: Format, columns: int, columnwise: bool, few: bool
) -> Operands | None:
    """Tokens for GEMMs that gather their rows, with the bits of rows that were gathered before.

    None where rows are gathered before: because their numbers depend on the groups that they go to,
    or because that is faster. ``columns`` are of the output of the GEMM that reads the rowwise
    operand. With ``columnwise`` in what is returned, wgrad gathers them, too. ``few``: the GEMM
    gathers so few rows in 16 bits, however many columns it has.
    """
    in_16_bits = format.wgrad_dtype is not None
    if format.quantize is not None or format.dtype in (torch.bfloat16, torch.float16):
        return None
    if format.scaling is None and not in_16_bits:
        most = GATHERING_WGRAD if columnwise else GATHERING_16_BITS
        if columns > most and (columnwise or not few):
            return None
        return Operands(tokens_TH, None, tokens_TH if columnwise else None)
    if format.scaling != "block":
        return None
    beside_columnwise = columnwise and not in_16_bits
    if columns > (GATHERING_FP8_BESIDE_COLUMNWISE if beside_columnwise else GATHERING_FP8):
        return None
    one_group = torch.full((1,), tokens_TH.size(0), dtype=torch.int32, device=tokens_TH.device)
    tokens = _quantize(tokens_TH, format, one_group, Layouts(True, False))
    if columnwise and in_16_bits and columns <= GATHERING_WGRAD:
        tokens = tokens._replace(columnwise=tokens_TH.to(format.wgrad_dtype))
    return tokens


def quantize_swiglu_grad(
    source: SwigluGradOf, offs_E: Tensor, formats: GradFormats
) -> SwigluGradOperands:
    """SwiGLU's gradient in the format of gradients, and the weighted h in the format of inputs."""
    grad_output, layouts, input, h_columnwise = formats
    dh_RF, gate_up_RG, weight_R, form = source
    if not (_same_blocks(input, grad_output) and (layouts.rowwise or layouts.columnwise)):
        grads = ops.swiglu_grad(dh_RF, gate_up_RG, weight_R, offs_E, form)
        return quantize_grads(grads, offs_E, formats)
    h_itself = h_columnwise and input.wgrad_dtype is not None
    *made, h_t, scale_h_t, h_RF, d_weight_R = ops.group_quantize_swiglu_grad(
        dh_RF,
        gate_up_RG,
        weight_R,
        offs_E,
        amax_epsilon=input.epsilon,
        power_of_two_scales=input.power_of_two_scales,
        rowwise=layouts.rowwise,
        columnwise=layouts.columnwise,
        bias_grad=layouts.bias_grad,
        h_columnwise=h_columnwise and not h_itself,
        keep_h=h_itself,
        share_h_scales=input.share_scales,
        activation=form,
    )
    if h_itself:
        assert h_RF is not None
        h_t = h_RF.to(input.wgrad_dtype)
    d_gate_up, h = Operands(*made), Operands(None, None, h_t, scale_h_t)
    if grad_output.observer is not None:
        grad_output.observer(source, d_gate_up, offs_E, layouts)
    if input.observer is not None and h_columnwise:
        input.observer(source, h, offs_E, COLUMNWISE_AGAIN)
    return d_gate_up, h, d_weight_R


def quantize_grads(
    grads: ops.SwigluGrad, offs_E: Tensor, formats: GradFormats
) -> SwigluGradOperands:
    """:func:`quantize_swiglu_grad` of an activation's gradient that was computed before."""
    grad_output, layouts, input, h_columnwise = formats
    d_gate_up_RG, h_RF, d_weight_R = grads
    d_gate_up, h = quantize(d_gate_up_RG, grad_output, offs_E, layouts), Operands(None)
    if h_columnwise:
        h = quantize(h_RF, input, offs_E, Layouts(False, True, again=True))
    return d_gate_up, h, d_weight_R


def rows_of(source: Source, offs_E: Tensor, again: bool = False) -> Tensor:
    """The rows themselves, computed from their source; see :class:`Layouts` for ``again``."""
    if isinstance(source, Tensor):
        return source
    if isinstance(source, Gathered):
        t: Tensor = source.routing.tokens(source.tokens_TH, again=again)
        return t
    return ops.swiglu(source.gate_up_RG, offs_E, source.form)


def _in_blocks(source: Source, format: Format, offs_E: Tensor, layouts: Layouts) -> Operands:
    """Scales of blocks: one op computes and quantizes, whatever the source is."""
    if isinstance(source, SwigluOf):
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
    if isinstance(source, Gathered):
        t, rows_R = source.tokens_TH, source.routing.token
    else:
        t, rows_R = source, None
    return Operands(
        *ops.group_quantize(
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
    )


def _same_blocks(input: Format, grad_output: Format) -> bool:
    """Whether one op makes both: d_gate_up in FP8, h in FP8 with blocks alike or in 16 bits."""
    if input.scaling != "block" or grad_output.scaling != "block":
        return False
    if grad_output.wgrad_dtype is not None:
        return False
    a, b = input, grad_output
    same = a.power_of_two_scales == b.power_of_two_scales and a.epsilon == b.epsilon
    return same and not grad_output.share_scales
