"""What pickles of our classes have in common: a version, and recipes as data."""

from typing import Any

from grouped_linear.recipes import Float8BlockScaling, Float8CurrentScaling, Recipe


def check_pickle_version(cls: str, version: int, newest: int) -> None:
    """Raise ValueError for a pickle that a newer grouped_linear wrote.

    >>> check_pickle_version("GroupedTensor", 2, newest=1)
    Traceback (most recent call last):
    ValueError: GroupedTensor: the pickle has version 2, this grouped_linear reads versions up to 1
    """
    if version > newest:
        raise ValueError(
            f"{cls}: the pickle has version {version}, this grouped_linear reads versions up to "
            f"{newest}"
        )


def recipe_to_pickle(recipe: Recipe) -> Any:
    """The options of this package's recipes, so that files name no modules; others as they are."""
    if type(recipe) is Float8BlockScaling:
        return recipe.options()
    if type(recipe) is Float8CurrentScaling:
        return {"class": "Float8CurrentScaling", **recipe.options()}
    return recipe


def recipe_from_pickle(pickled: Any) -> Recipe:
    """The recipe of :func:`recipe_to_pickle`."""
    if not isinstance(pickled, dict):
        return pickled
    options = dict(pickled)
    current = options.pop("class", None) == "Float8CurrentScaling"
    return Float8CurrentScaling(**options) if current else Float8BlockScaling(**options)
