# SPDX-License-Identifier: Apache-2.0
"""Recipes to test with, and their counterparts in the reference."""

import torch

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from grouped_linear.recipes import DelayedScalingState
from support import reference

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "mxfp8": MXFP8BlockScaling(),
}
MORE_RECIPES: dict[str, Recipe | None] = {
    **RECIPES,
    "block_exact": Float8BlockScaling(False, 1e-4),
    "block_own": Float8BlockScaling(share_x_scales=False),
    "block_bf16_wgrad": Float8BlockScaling(wgrad=torch.bfloat16),
    "current_e5m2": Float8CurrentScaling(True, 1e-4, reference.E5M2),
}


def state_for(recipe: Recipe | None, E: int, device: str) -> DelayedScalingState | None:
    """Scales as a few training steps might leave them. None for recipes without a state."""
    if not isinstance(recipe, DelayedScaling):
        return None
    state = DelayedScalingState(recipe, E)
    for operand, scale in zip(state.operands, (0.008, 0.009, 0.0001), strict=True):
        operand.scale.copy_(scale * (1 + torch.arange(E) % 5 / 7))
    return state.to(device)


def scheme_of(recipe: Recipe | None, E: int) -> reference.Scheme:
    """The reference's counterpart of the recipe. DelayedScaling brings the scales of its state."""
    match recipe:
        case Float8BlockScaling(pow2, epsilon, share_x_scales, wgrad):
            return reference.Scaling(pow2, epsilon, share_x_scales, wgrad)
        case Float8CurrentScaling(pow2, epsilon, gradient_dtype):
            return reference.Current(reference.Scaling(pow2, epsilon), gradient_dtype)
        case MXFP8BlockScaling():
            return reference.Mx()
        case DelayedScaling():
            state = state_for(recipe, E, "cpu")
            assert state is not None
            return reference.Delayed(*(operand.scale for operand in state.operands))
    return None
