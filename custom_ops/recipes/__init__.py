"""Recipes: how a layer computes its GEMMs. A layer takes one as ``recipe=``.

``base`` has the class :class:`Recipe`, which anyone can subclass, and the types that its methods
take and return. Each other recipe is a subclass of it in a file of its own. No code outside this
package asks which recipe a layer has, except where a format is a recipe's own
(:class:`grouped_linear.GroupedTensor` is in ``Float8BlockScaling``'s).
"""

from grouped_linear.recipes.base import (
    UNQUANTIZED,
    Experts,
    LayerStates,
    Operands,
    OutputMask,
    QuantizedWeight,
    QuantizerState,
    Recipe,
    RecipeState,
    SwigluGradOperands,
    Unquantized,
    Values,
    is_transposed,
    with_shared_scale,
)
from grouped_linear.recipes.block import Float8BlockScaling
from grouped_linear.recipes.current import Float8CurrentScaling
from grouped_linear.recipes.delayed import (
    DelayedScaling,
    DelayedScalingState,
    OperandState,
    update_scales,
)
from grouped_linear.recipes.mx import MXFP8BlockScaling

__all__ = [
    "UNQUANTIZED",
    "DelayedScaling",
    "DelayedScalingState",
    "Experts",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "LayerStates",
    "MXFP8BlockScaling",
    "OperandState",
    "Operands",
    "OutputMask",
    "QuantizedWeight",
    "QuantizerState",
    "Recipe",
    "RecipeState",
    "SwigluGradOperands",
    "Unquantized",
    "Values",
    "is_transposed",
    "update_scales",
    "with_shared_scale",
]
