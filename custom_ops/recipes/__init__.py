# SPDX-License-Identifier: Apache-2.0
"""Recipes: which numbers a layer multiplies. A layer takes one as ``recipe=``.

A :class:`Recipe` is data: a :class:`Format` for x, for the weight and for dy. ``quantize`` and
``weight`` make operands in these formats; no other code depends on a layer's format. Here are the
names that users need; the package imports others from their files.
"""

from grouped_linear.recipes.block import Float8BlockScaling, MXFP8BlockScaling
from grouped_linear.recipes.current import Float8CurrentScaling
from grouped_linear.recipes.delayed import (
    DelayedScaling,
    DelayedScalingState,
    OperandState,
    update_scales,
)
from grouped_linear.recipes.format import Format, Layouts, Operands
from grouped_linear.recipes.recipe import Recipe

__all__ = [
    "DelayedScaling",
    "DelayedScalingState",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Layouts",
    "MXFP8BlockScaling",
    "OperandState",
    "Operands",
    "Recipe",
    "update_scales",
]
