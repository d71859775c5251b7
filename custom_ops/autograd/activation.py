"""The activation between the two layers of an expert, with the GEMM before it.

R rows sorted by expert, E experts, F features inside an expert, G = 2 F for gate and up together,
or F without a gate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.gemm import LowRankTerm, multiply, takes_swiglu
from grouped_linear.autograd.watched import SwigluGradOf, Watched, shared_scales
from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.ops.activation import Activation
from grouped_linear.recipes import (
    Format,
    Layouts,
    Operands,
    RowOperands,
    SwigluGradOperands,
    SwigluOf,
    quantize,
    quantize_grads,
    quantize_swiglu_grad,
)
from grouped_linear.recipes.format import call_without_writes


class MLPConfig(NamedTuple):
    """The activation between the two layers, and how its input is saved."""

    activation: Activation
    save_in_fp8: bool
    """Keep gate_up for the backward in e4m3, in 1x128 blocks."""


def save(
    gate_up_RG: Tensor | None, offs_E: Tensor, config: MLPConfig
) -> tuple[Tensor | None, Tensor | None]:
    """What a backward reads of gate_up: itself and None, or e4m3 and the scales of 1x128 blocks."""
    if gate_up_RG is None or not config.save_in_fp8:
        return gate_up_RG, None
    quantized = ops.group_quantize(gate_up_RG, offs_E)
    return quantized.q, quantized.scale


def restore(saved_RG: Tensor, scale: Tensor | None, offs_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gate_up in the activations' dtype, from what :func:`save` returned."""
    return saved_RG if scale is None else ops.group_dequantize(saved_RG, scale, offs_E, dtype)


def gate_up_and_h(
    x: Operands,
    w: Operands,
    offs_E: Tensor,
    bias_EG: Tensor | None,
    rows_R: Tensor | None,
    dtype: torch.dtype,
    activation: Activation,
    format: Format,
    keep_gate_up: bool,
    keep_h: bool,
    low_rank: LowRankTerm | None,
) -> tuple[Tensor | None, Operands, Tensor | None]:
    """Compute the first layer and the second one's input, in one kernel if one exists.

    ``format`` is of the second layer's input. Without ``keep_gate_up`` the first result may be
    None, without ``keep_h`` the last, which is h itself. ``low_rank`` joins gate_up.
    """
    rowwise, form = Layouts(True, False), activation.swiglu
    one_kernel = low_rank is None and takes_swiglu(x, w.rowwise, w.rowwise_scale, dtype)
    if form is not None and one_kernel:
        assert isinstance(x.rowwise, Tensor)
        assert isinstance(w.rowwise, Tensor)
        both = ops.grouped_mm_swiglu(
            x.rowwise,
            w.rowwise.mT,
            offs_E,
            bias_EG,
            rows_R,
            keep_gate_up=keep_gate_up,
            activation=form,
        )
        h = quantize(both.h, format, offs_E, rowwise)
        return both.gate_up, h, both.h if keep_h else None
    gate_up_RG = multiply(
        x, w, offs_E, bias_EG, dtype, transpose_b=True, rows=rows_R, low_rank=low_rank
    )
    if form is not None and not keep_h:
        return gate_up_RG, quantize(SwigluOf(gate_up_RG, form), format, offs_E, rowwise), None
    if form is not None:
        h_RF = ops.swiglu(gate_up_RG, offs_E, form)
    else:
        h_RF = _call(activation, "forward", gate_up_RG.float()).to(dtype)
    return gate_up_RG, quantize(h_RF, format, offs_E, rowwise), h_RF if keep_h else None


def h_source_of(
    gate_up_RG: Tensor | None, h: Operands, h_RF: Tensor | None, activation: Activation
) -> Tensor | SwigluOf:
    """What :func:`gate_up_and_h` has made h from."""
    if h_RF is not None:
        return h_RF
    if gate_up_RG is None or activation.swiglu is None:
        assert isinstance(h.rowwise, Tensor)
        return h.rowwise
    return SwigluOf(gate_up_RG, activation.swiglu)


def grads_of_gate_up(
    dy: Operands,
    rows_R: Tensor | None,
    w: Operands,
    gate_up_RG: Tensor,
    weight_R: Tensor,
    offs_E: Tensor,
    activation: Activation,
    input: Format,
    grad_output: Format,
    layouts: Layouts,
    h_columnwise: bool,
    keep: bool,
    low_rank: LowRankTerm | None,
    more_dh_RF: Tensor | None,
    watched: Watched | None,
) -> tuple[SwigluGradOperands, ops.SwigluGrad | None]:
    """Compute the second layer's dgrad and the activation's gradient, in one kernel if one exists.

    Args:
        dy: the gradient of the second layer's unweighted output, or of dy[rows_R[t]].
        weight_R: float32, what each row's output is weighted by.
        input, grad_output: the formats of h and of d_gate_up.
        layouts, h_columnwise: what to return of d_gate_up and of h.
        keep: whether the gradient itself is needed, beside the operands; else it may be None.
        low_rank, more_dh_RF: what is added to dgrad: by an adapter, and after that.
        watched: where d_gate_up is measured, and h of the next layer.
    """

    def measure(source: Tensor | SwigluGradOf, made: SwigluGradOperands) -> SwigluGradOperands:
        if watched is not None:
            h_scale_t = shared_scales(made.h, input) if h_columnwise else None
            watched.gradient(source, RowOperands(made.d_gate_up), offs_E, grad_output, h_scale_t)
        return made

    dtype, form = gate_up_RG.dtype, activation.swiglu
    how = input, grad_output, layouts, h_columnwise
    is_alone = low_rank is None and more_dh_RF is None
    one_kernel = is_alone and takes_swiglu(dy, w.columnwise, w.columnwise_scale, dtype)
    if form is not None and one_kernel:
        assert isinstance(dy.rowwise, Tensor)
        assert isinstance(w.columnwise, Tensor)
        grads = ops.grouped_mm_swiglu_grad(
            dy.rowwise, w.columnwise, gate_up_RG, weight_R, offs_E, rows_R, activation=form
        )
        made = measure(grads.d_gate_up, quantize_grads(grads, offs_E, *how))
        return made, grads if keep else None
    dh_RF = multiply(dy, w, offs_E, None, dtype, rows=rows_R, low_rank=low_rank)
    if more_dh_RF is not None:
        dh_RF = dh_RF + more_dh_RF
    if form is not None and not keep:
        source = SwigluGradOf(dh_RF, gate_up_RG, weight_R, form)
        made = quantize_swiglu_grad(dh_RF, gate_up_RG, weight_R, offs_E, form, *how)
        return measure(source, made), None
    if form is not None:
        grads = ops.swiglu_grad(dh_RF, gate_up_RG, weight_R, offs_E, form)
    else:
        grads = _grad(activation, dh_RF, gate_up_RG, weight_R)
    del dh_RF  # lowers the peak memory of an eager step
    made = measure(grads.d_gate_up, quantize_grads(grads, offs_E, *how))
    return made, grads if keep else None


def weighted_h(
    gate_up_RG: Tensor, weight_R: Tensor, offs_E: Tensor, activation: Activation
) -> Tensor:
    """Compute the weighted h [R, F], for the second layer's wgrad, and no gradient."""
    if activation.swiglu is not None:
        any_dh_RF = gate_up_RG[:, : gate_up_RG.size(1) // 2]
        return ops.swiglu_grad(any_dh_RF, gate_up_RG, weight_R, offs_E, activation.swiglu).h
    h_RF = _call(activation, "forward", gate_up_RG.float())
    return (weight_R[:, None] * h_RF).to(gate_up_RG.dtype)


def _grad(
    activation: Activation, dh_RF: Tensor, gate_up_RG: Tensor, weight_R: Tensor
) -> ops.SwigluGrad:
    """Compute what :func:`grouped_linear.ops.swiglu_grad` returns, for any other activation."""
    dtype, weight_R1 = dh_RF.dtype, weight_R[:, None]
    dh_RF, gate_up_RG = dh_RF.float(), gate_up_RG.float()
    h_RF = _call(activation, "forward", gate_up_RG)
    d_weight_R = (dh_RF * h_RF).sum(dim=1)
    d_gate_up_RG = _call(activation, "backward", gate_up_RG, weight_R1 * dh_RF)
    return ops.SwigluGrad(d_gate_up_RG.to(dtype), (weight_R1 * h_RF).to(dtype), d_weight_R)


def _call(activation: Activation, method: str, gate_up_RG: Tensor, *dh_RF: Tensor) -> Tensor:
    """A method of a user's own activation, whose result is checked; it may write dh alone."""
    name = f"{type(activation).__name__}.{method}"
    R, G = gate_up_RG.shape
    columns = G if dh_RF or not activation.gated else G // 2

    def call(gate_up_RG: Tensor) -> Tensor:
        function: Callable[..., Tensor] = getattr(activation, method)
        return function(*dh_RF, gate_up_RG)

    result: Any = call_without_writes(name, call, gate_up_RG)
    if not isinstance(result, Tensor):
        raise TypeError(f"{name} must return a tensor, got {type(result).__name__}")
    if result.shape != (R, columns) or not result.is_floating_point():
        raise RuntimeError(
            f"{name} must return {[R, columns]} float32, of gate_up {[R, G]}, got "
            f"{list(result.shape)} {dtype_name(result.dtype)}"
        )
    return result
