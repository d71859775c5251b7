"""Recipes: which numbers a layer multiplies. A layer takes one as ``recipe=``.

A :class:`Recipe` is data: a :class:`Format` for x, for the weight and for dy. ``quantize`` and
``weight`` make operands in these formats; no other code depends on a layer's format.
"""

from grouped_linear.recipes.block import Float8BlockScaling
from grouped_linear.recipes.current import Float8CurrentScaling
from grouped_linear.recipes.delayed import (
    DelayedScaling,
    DelayedScalingState,
    OperandState,
    new_state,
    update_scales,
)
from grouped_linear.recipes.format import Format, Layouts, Operands, Values, WeightList
from grouped_linear.recipes.mx import MXFP8BlockScaling
from grouped_linear.recipes.quantize import (
    Gathered,
    GradFormats,
    Source,
    SwigluGradOf,
    SwigluGradOperands,
    SwigluOf,
    quantize,
    quantize_grads,
    quantize_swiglu_grad,
    recipe_of_wgrad,
)
from grouped_linear.recipes.recipe import ROLES, UNQUANTIZED, Recipe
from grouped_linear.recipes.weight import (
    QuantizedWeight,
    check_stores,
    is_transposed,
    new_weight,
    quantize_weight,
    refresh_weight_,
    store_weight,
    stores,
    weight_for_dgrad,
)

__all__ = [
    "ROLES",
    "UNQUANTIZED",
    "DelayedScaling",
    "DelayedScalingState",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Gathered",
    "GradFormats",
    "Layouts",
    "MXFP8BlockScaling",
    "OperandState",
    "Operands",
    "QuantizedWeight",
    "Recipe",
    "Source",
    "SwigluGradOf",
    "SwigluGradOperands",
    "SwigluOf",
    "Values",
    "WeightList",
    "check_stores",
    "is_transposed",
    "new_state",
    "new_weight",
    "quantize",
    "quantize_grads",
    "quantize_swiglu_grad",
    "quantize_weight",
    "recipe_of_wgrad",
    "refresh_weight_",
    "store_weight",
    "stores",
    "update_scales",
    "weight_for_dgrad",
]
