# SPDX-License-Identifier: Apache-2.0
"""The activation between the two layers of an expert, with the GEMM before it.

R rows sorted by expert, E experts, F features inside an expert, G = 2 F for gate and up together,
or F without a gate.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.gemm import Gemm
from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.ops.activation import Activation, SwiGLU
from grouped_linear.recipes import Format, Operands
from grouped_linear.recipes.format import ROWWISE, call_without_writes
from grouped_linear.recipes.quantize import SwigluGradOf, SwigluOf, quantize
from grouped_linear.recipes.quantize_weight import in_dispatch_mode


class MLPConfig(NamedTuple):
    """The activation between the two layers, and how its input is saved."""

    activation: Activation
    save_in_fp8: bool  # keep gate_up for the backward in e4m3, in 1x128 blocks
    recompute: bool = False  # keep no gate_up: the backward computes it again

    def save(
        self, gate_up_RG: Tensor | None, offs_E: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The tensors a backward reads: gate_up and None, or e4m3 and scales of 1x128 blocks."""
        if gate_up_RG is None or not self.save_in_fp8:
            return gate_up_RG, None
        if self.activation.swiglu is not None:
            gate_up_RG = _decide_limit(gate_up_RG, self.activation.swiglu)
        # Explicit: Dynamo makes an input of a float default, as of a number of an activation.
        quantized = ops.group_quantize(
            gate_up_RG, offs_E, amax_epsilon=0.0, power_of_two_scales=True
        )
        return quantized.q, quantized.scale


#: The significant bits of the numbers of a dtype; of e4m3 four.
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def _decide_limit(gate_up_RG: Tensor, form: SwiGLU) -> Tensor:
    """Make numbers that a limit clamps stay beyond it in e4m3, and others not; written in place.

    Rounded to e4m3, 7.2 is 7.0, where a limit of 7.0 lets the gradient pass. All numbers beyond the
    limit count alike, so they become the next one with four significant bits; those that would
    round past the limit become the last one inside. Scales are powers of two, under which e4m3 has
    both numbers where no gate of the block is below -14336 times the limit.

    In a dispatch mode nothing is written. Selective checkpointing may keep any result, and where it
    keeps views a recompute would write the forward's numbers in place of its own.
    """
    limit, dtype = form.arguments[2], gate_up_RG.dtype
    if limit is None or limit >= torch.finfo(dtype).max:
        return gate_up_RG
    limit = _to_bits(limit, BITS[torch.float32], round)  # as the kernels read it
    limit = _to_bits(limit, BITS[dtype], math.floor)  # the last number of the dtype that passes
    inside = _to_bits(limit, 4, math.floor)
    beyond = min(_to_bits(inside, 4, lambda fraction: fraction + 1), torch.finfo(dtype).max)
    gate, up = form.split(gate_up_RG)
    over, up_over, up_under = gate > limit, up > limit, up < -limit
    if in_dispatch_mode():
        gate, up = gate.clamp(max=inside), up.clamp(-inside, inside)
        gate = gate.masked_fill(over, beyond)
        up = up.masked_fill(up_over, beyond).masked_fill(up_under, -beyond)
        return torch.stack((gate, up), 2 if form.interleaved else 1).flatten(1)
    if inside != limit:
        gate.clamp_(max=inside)
        up.clamp_(-inside, inside)
    gate.masked_fill_(over, beyond)
    up.masked_fill_(up_over, beyond).masked_fill_(up_under, -beyond)
    return gate_up_RG


def _to_bits(number: float, bits: int, rounded: Callable[[float], float]) -> float:
    """A positive number with so many significant bits, whose fraction is rounded in this way."""
    fraction, exponent = math.frexp(number)
    return math.ldexp(rounded(math.ldexp(fraction, bits)), exponent - bits)


def gate_up_and_h(
    fprop: Gemm, activation: Activation, format: Format, keep_gate_up: bool, keep_h: bool
) -> tuple[Tensor | None, Operands, Tensor | None]:
    """Compute the first layer and the second one's input, in one kernel if one exists.

    ``fprop`` is the first layer's, ``format`` of the second layer's input. Without ``keep_gate_up``
    the first result may be None, without ``keep_h`` the last, which is h itself.
    """
    offs_E, form = fprop.offs_E, activation.swiglu
    if form is not None and fprop.has_swiglu_kernel:
        x: Any = fprop.operands.rowwise
        given = x, fprop.b.transpose(1, 2), offs_E, fprop.bias_EN, fprop.operands.rows
        both = ops.grouped_mm_swiglu(*given, keep_gate_up=keep_gate_up, activation=form)
        h = quantize(both.h, format, offs_E, ROWWISE)
        return both.gate_up, h, both.h if keep_h else None
    gate_up_RG = fprop.compute()
    if form is not None and not keep_h:
        return gate_up_RG, quantize(SwigluOf(gate_up_RG, form), format, offs_E, ROWWISE), None
    if form is not None:
        h_RF = ops.swiglu(gate_up_RG, offs_E, form)
    else:
        h_RF = _call(activation, "forward", gate_up_RG.float()).to(fprop.dtype)
    return gate_up_RG, quantize(h_RF, format, offs_E, ROWWISE), h_RF if keep_h else None


def dh_for_grads(dgrad: Gemm, more_dh_RF: Tensor | None, activation: Activation) -> Gemm | Tensor:
    """Compute the second layer's dgrad, or leave that to a kernel of the activation's gradient.

    ``dgrad`` is of the gradient of the unweighted output, to whose product ``more_dh_RF`` is added.
    """
    if activation.swiglu is not None and more_dh_RF is None and dgrad.has_swiglu_kernel:
        return dgrad
    dh_RF = dgrad.compute()
    return dh_RF if more_dh_RF is None else dh_RF + more_dh_RF


def grads_of_gate_up(
    dh: Gemm | Tensor,
    gate_up_RG: Tensor,
    weight_R: Tensor,
    offs_E: Tensor,
    activation: Activation,
    keep: bool,
) -> ops.SwigluGrad | SwigluGradOf:
    """Compute the activation's gradient, of what :func:`dh_for_grads` returned.

    ``weight_R`` weighs each row's output, in float32. Without ``keep`` a quantizer may compute
    SwiGLU's gradient.
    """
    form: Any = activation.swiglu
    if isinstance(dh, Gemm):
        dy: Any = dh.operands.rowwise
        given = dy, dh.b, gate_up_RG, weight_R, offs_E, dh.operands.rows
        return ops.grouped_mm_swiglu_grad(*given, activation=form)
    if form is None:
        dtype, weight_R1 = dh.dtype, weight_R[:, None]
        dh_RF, gate_up_RG = dh.float(), gate_up_RG.float()
        h_RF = _call(activation, "forward", gate_up_RG)
        d_weight_R = (dh_RF * h_RF).sum(dim=1)
        d_gate_up_RG = _call(activation, "backward", gate_up_RG, weight_R1 * dh_RF)
        return ops.SwigluGrad(d_gate_up_RG.to(dtype), (weight_R1 * h_RF).to(dtype), d_weight_R)
    if keep:
        return ops.swiglu_grad(dh, gate_up_RG, weight_R, offs_E, form)
    return SwigluGradOf(dh, gate_up_RG, weight_R, form)


def weighted_h(
    gate_up_RG: Tensor, weight_R: Tensor, offs_E: Tensor, activation: Activation
) -> Tensor:
    """Compute the weighted h [R, F], for the second layer's wgrad, and no gradient."""
    if activation.swiglu is not None:
        any_dh_RF = gate_up_RG[:, : gate_up_RG.size(1) // 2]
        return ops.swiglu_grad(any_dh_RF, gate_up_RG, weight_R, offs_E, activation.swiglu).h
    h_RF = _call(activation, "forward", gate_up_RG.float())
    return (weight_R[:, None] * h_RF).to(gate_up_RG.dtype)


def _call(activation: Activation, method: str, gate_up_RG: Tensor, *dh_RF: Tensor) -> Tensor:
    """Call a method of a user's activation and check its result; it may write dh alone."""
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
