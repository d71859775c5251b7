# SPDX-License-Identifier: Apache-2.0
"""The tensors that a forward saves for its backward, by the names of their fields."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from grouped_linear.recipes import Recipe

OVERWRITTEN = "modified by an inplace operation"
# As the engine names it: "[torch.FloatTensor [5, 16]], which is output 0 of MulBackward0, is at".
SHAPE = re.compile(r"\[[\w.]+ (\[[\d, ]*\])\]")


def save(ctx: Any, parts: Sequence[tuple[Tensor | None, ...]], *recipes: Recipe) -> None:
    """Save tuples, named or not, which :func:`saved` returns.

    And the scales that a backward reads from the states of recipes: an update before it raises.
    """
    ctx.parts = [(type(part), len(part)) for part in parts]
    scales = [state.scale for recipe in recipes for state in recipe.states]
    ctx.save_for_backward(*chain(*parts), *scales)


def saved(ctx: Any, layer: str) -> list[Any]:
    """The tuples that :func:`save` was given."""
    tensors, parts, end = _saved_tensors(ctx, layer), [], 0
    for cls, size in ctx.parts:
        fields = tensors[end : end + size]
        parts.append(fields if cls is tuple else cls(*fields))
        end += size
    return parts


def _saved_tensors(ctx: Any, layer: str) -> Any:
    """``ctx.saved_tensors``; if one was written since, RuntimeError in the layer's words."""
    if torch.compiler.is_compiling():  # which has the engine's words
        return ctx.saved_tensors
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if OVERWRITTEN not in str(error):
            raise
        found = SHAPE.search(str(error))
        shape = f" (its shape is {found[1]})" if found else ""
        raise RuntimeError(
            f"{layer}: a tensor that the forward saved has been {OVERWRITTEN} before its backward: "
            "write x, a weight or a bias in place, step the optimizer, call update_scales and fill "
            f"weight caches only after the last backward that reads them{shape}"
        ) from error
