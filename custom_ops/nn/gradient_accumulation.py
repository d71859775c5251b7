# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: ``is_first_microbatch`` and ``main_grad``.

Each function checks its arguments. `layer` is the name that error messages begin with.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grouped_linear.autograd.projection import Projection
from grouped_linear.autograd.wgrad import MainGrad
from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.quantized.keep import local_part
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.quantize_weight import stores


def read_flag(
    layer: str, first: Tensor | bool | None, x: Tensor, recipe: Recipe | None, stores_weight: bool
) -> Tensor | bool | None:
    """Return ``is_first_microbatch`` as the caller gave it; a tensor is copied.

    ``stores_weight`` says whether the layer has a weight cache or a quantized weight.
    """
    if first is None:
        return None
    if recipe is not None and stores(recipe.weight) and not stores_weight:
        raise ValueError(
            f"{layer}: is_first_microbatch needs cache_weights=True under the recipe "
            f"{type(recipe).__name__}"
        )
    if isinstance(first, bool):
        return first
    is_tensor = isinstance(first, Tensor)
    if not is_tensor or first.dim() or first.dtype != torch.bool or first.device != x.device:
        got = repr(first)
        if is_tensor:
            got = f"{first.dim()}-D {dtype_name(first.dtype)} on {first.device}"
        raise RuntimeError(
            f"{layer}: is_first_microbatch must be None, a bool or a 0-D bool tensor on "
            f"{x.device}, got {got}"
        )
    # The caller may refill it for the next micro-batch before this one's backward reads it.
    return first.clone()


def main_grad_of(
    layer: str, weights: Mapping[str, Any], first: Tensor | bool | None
) -> MainGrad | None:
    """Return where weight gradients are added, or None if no weight requires one."""
    parameters = tuple(weights.values())
    learning = [w.requires_grad for w in parameters]
    if not any(learning):
        return None
    if not all(learning):
        raise RuntimeError(
            f"{layer}: fuse_wgrad_accumulation computes the gradients of all experts, "
            f"but only {sum(learning)} of {len(learning)} require one"
        )
    for name, w in weights.items():
        if not isinstance(getattr(w, "main_grad", None), Tensor):
            raise RuntimeError(
                f"{layer}: fuse_wgrad_accumulation adds to {name}.main_grad, which is not set"
            )
    main_grads = tuple(local_part(w.main_grad) for w in parameters)
    for (name, w), grad in zip(weights.items(), main_grads, strict=True):
        own = local_part(w)
        fits = grad.shape == own.shape and grad.device == own.device
        if not fits or grad.dtype not in (torch.float32, torch.bfloat16):
            raise RuntimeError(
                f"{layer}: {name}.main_grad must be {list(own.shape)} float32 or bfloat16 on "
                f"{own.device}, as {name} is, got {list(grad.shape)} {dtype_name(grad.dtype)} on "
                f"{grad.device}"
            )
    # Two GEMMs would add to one tensor concurrently. Dynamo raises an error of its own.
    if not torch.compiler.is_compiling() and len(set(map(id, main_grads))) < len(main_grads):
        raise RuntimeError(
            f"{layer}: fuse_wgrad_accumulation needs a main_grad of its own for each expert, "
            "and some share one"
        )
    overwrite = False if first is None else first
    if getattr(parameters[0], "overwrite_main_grad", False):
        overwrite = True
    return MainGrad(main_grads, overwrite, hasattr(parameters[0], "grad_added_to_main_grad"))


def mark_added(*given: Projection) -> None:
    """Set ``grad_added_to_main_grad`` of weights that have it, after a call that was not refused.

    In the forward: a compiled backward cannot set an attribute.
    """
    for projection in given:
        if projection.main_grad is not None and projection.main_grad.returns_zeros:
            for w in projection.weights:
                w.grad_added_to_main_grad = True  # type: ignore[attr-defined]
