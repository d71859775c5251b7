"""The recipe of a layer, of whichever kind it is."""

from typing import Any

from grouped_linear.integrations.grouped_experts import form_and_recipe
from grouped_linear.integrations.look_alikes import goes_through_interface
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.recipes import Recipe


def layer_recipe(module: Any) -> tuple[Recipe | None] | None:
    """The recipe, or None, of a layer of this package or of experts that it computes, in a tuple.

    None of any other module, as experts of transformers with another implementation.
    """
    if isinstance(module, GroupedLinear | GroupedMLP):
        return (module.recipe,)
    if goes_through_interface(module):
        from grouped_linear.integrations.experts_forward import recipe_of
        from grouped_linear.integrations.implementation import Implementation

        ours = Implementation.of(module.config._experts_implementation)
        return None if ours is None else (recipe_of(module, ours.recipe),)
    form, recipe = form_and_recipe(module)
    return None if form is None else (recipe,)
