"""What a forward saved for its backward."""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.recipes import Format

OVERWRITTEN = "modified by an inplace operation"


def saved_tensors(ctx: Any, layer: str) -> Any:
    """``ctx.saved_tensors``.

    Raises:
        RuntimeError: if one was written since, in the layer's words instead of the engine's. A
            compiled backward has the engine's.
    """
    if torch.compiler.is_compiling():
        return ctx.saved_tensors
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if OVERWRITTEN not in str(error):
            raise
        raise RuntimeError(
            f"{layer}: a tensor that the forward saved has been {OVERWRITTEN} before its backward: "
            "call update_scales, step the optimizer and fill weight caches after a step's last "
            "backward"
        ) from error


def scale_of(format: Format) -> Tensor | None:
    """The scales that a format reads from a state, to be saved with what the backward reads.

    The backward reads them from the state. They are saved so that an update between a forward and
    its backward raises.
    """
    scale: Tensor | None = None if format.state is None else format.state.scale
    return scale
