# SPDX-License-Identifier: Apache-2.0
"""FP8 with one scale a block: the recipe that Hopper's kernels are made for, and MXFP8."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.recipes.format import (
    SIXTEEN_BITS,
    Format,
    check_amax_epsilon,
    check_flags,
    shown,
)
from grouped_linear.recipes.recipe import Recipe


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(Recipe):
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
        share_x_scales: in wgrad, let 128 features of x share one scale, see ``share_scales`` of
            :func:`grouped_linear.ops.group_quantize`: on an H200 wgrad is then 1.2 to 1.8 times as
            fast, or bound by memory where it adds to a float32 main_grad. An element moves by at
            most 2**-9.8 of its feature's amax. fprop, dgrad and gradients do not change.
        wgrad: what wgrad multiplies: ``torch.float8_e4m3fn``, or x and dy as they come, cast to
            ``torch.bfloat16`` or ``torch.float16`` where they have another dtype. fprop and dgrad
            are in FP8 either way. In 16 bits a layer keeps x itself for the backward, not a
            columnwise copy in FP8, and quantizes x and dy rowwise only. A GroupedMLP with at most
            256 intermediate features always computes the down projection's wgrad in the dtype of
            16-bit tokens, which is faster.
        qat: ``"mxfp4"`` is quantization-aware training, for weights that are served in four bits:
            each weight is rounded to MXFP4, as :func:`grouped_linear.ops.quantize_mxfp4` does, and
            written in e4m3, in one pass. The gradient reaches it as if it had not been rounded. y
            and dx are, bit for bit, those of ``weights="mxfp4"`` of the same numbers. in_features
            must be multiples of 32, and ``power_of_two_scales`` and ``amax_epsilon`` do not apply
            to the weight.
        requantize_weights: quantize weights for dgrad again in the backward, instead of keeping
            transposed FP8 weights from the forward on. Those take a byte for each number of all
            layers at once, under FSDP2 of whole layers. Weights that are cached or stored in FP8
            are read as they are.

    Raises:
        ValueError: if ``amax_epsilon`` is negative or not finite, for another ``wgrad``, or for a
            flag that is neither True nor False.

    >>> Float8BlockScaling(wgrad=torch.bfloat16)
    Float8BlockScaling(wgrad=torch.bfloat16)
    >>> from grouped_linear import GroupedLinear
    >>> layer = GroupedLinear(2, 16, 32, recipe=Float8BlockScaling(wgrad=torch.bfloat16))
    >>> layer(torch.ones(5, 16), [2, 3]).sum().backward()
    >>> layer.weight.grad[:, 0, 0]
    tensor([2., 3.])
    """

    input: Format = field(init=False, compare=False)
    weight: Format = field(init=False, compare=False)
    grad_output: Format = field(init=False, compare=False)
    power_of_two_scales: bool = True
    amax_epsilon: float = 0
    share_x_scales: bool = True
    wgrad: torch.dtype = E4M3
    qat: Literal["mxfp4"] | None = field(default=None, kw_only=True)
    requantize_weights: bool = field(default=False, kw_only=True)
    freezes_weights_as = ("fp8", "mxfp4")

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_amax_epsilon(name, self.amax_epsilon)
        check_flags(
            name, power_of_two_scales=self.power_of_two_scales, share_x_scales=self.share_x_scales
        )
        if self.wgrad not in (E4M3, *SIXTEEN_BITS):
            raise ValueError(
                f"{name}: wgrad must be float8_e4m3fn, bfloat16 or float16, got {shown(self.wgrad)}"
            )
        options = self.power_of_two_scales, self.amax_epsilon
        wgrad = None if self.wgrad is E4M3 else self.wgrad
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "input", Format(E4M3, "block", *options, self.share_x_scales, wgrad))
        set_field(self, "weight", Format(E4M3, "block", *options, qat=self.qat))
        set_field(self, "grad_output", Format(E4M3, "block", *options, wgrad_dtype=wgrad))
        super().__post_init__()


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(Recipe):
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

    input: Format = field(init=False, compare=False, default=Format(E4M3, "mx"))
    weight: Format = field(init=False, compare=False, default=Format(E4M3, "mx"))
    grad_output: Format = field(init=False, compare=False, default=Format(E4M3, "mx"))
    requantize_weights: bool = field(init=False, default=False)
    freezes_weights_as = ("mxfp4",)
