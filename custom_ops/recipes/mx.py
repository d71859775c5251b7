# SPDX-License-Identifier: Apache-2.0
"""MXFP8 numbers, multiplied in bfloat16."""

from dataclasses import dataclass, field

from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.recipes.format import Format
from grouped_linear.recipes.recipe import Recipe


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
