"""A recipe for each module of a model: one for all, and others for names that match a pattern."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.weight import Weights, check_weights_kept
from grouped_linear.recipes import Recipe


class RecipesByName:
    """The recipe of a module by its name, see ``recipes`` of :func:`grouped_linear.convert`.

    Raises:
        ValueError: for what is no mapping of patterns to recipes, and for a recipe that cannot keep
            weights as asked.
    """

    def __init__(
        self, op: str, recipe: Recipe | None, recipes: Mapping[str, Any] | None, weights: Weights
    ) -> None:
        self.op, self.recipe, self.recipes = op, recipe, dict(recipes or {})
        if recipes is not None and not isinstance(recipes, Mapping):
            raise ValueError(
                f"{op}: recipes must map patterns of names to recipes, got {type(recipes).__name__}"
            )
        for pattern, own in self.recipes.items():
            if not isinstance(pattern, str):
                raise ValueError(f"{op}: a pattern of recipes must be a string, got {pattern!r}")
            where = f"{op}: recipes[{pattern!r}]"
            check_recipe(where, own)
            if own is not None:
                check_weights_kept(where, own, weights)
        self._unused = set(self.recipes)

    def of(self, name: str) -> Recipe | None:
        """The recipe of the module with this name."""
        found = self.recipe
        for pattern, own in self.recipes.items():
            if fnmatchcase(name, pattern):
                self._unused.discard(pattern)
                found = own
        return found

    def check_used(self) -> None:
        """Raise ValueError for a pattern that matched no module."""
        unused = [pattern for pattern in self.recipes if pattern in self._unused]
        if unused:
            named = ", ".join(map(repr, unused))
            raise ValueError(f"{self.op}: no experts have a name that matches {named} of recipes")
