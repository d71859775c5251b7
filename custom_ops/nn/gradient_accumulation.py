"""What a layer does otherwise in the first micro-batch of a step than in those after it.

Each function checks what the caller of a layer gave and returns fields of
:class:`grouped_linear.autograd.linear.Call`. `layer` is the name that a sentence begins with.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import Recipe


def read_flag(
    layer: str, first: Tensor | bool | None, x: Tensor, recipe: Recipe, keeps_weight: bool
) -> Tensor | bool | None:
    """``is_first_microbatch``, one that nobody else writes to.

    Args:
        layer: whose call it is.
        first: as it was given.
        x: the activations, on whose device a tensor must be.
        recipe: the layer's.
        keeps_weight: whether the layer has room for a quantized weight.
    """
    if first is None:
        return None
    if recipe is not None and not keeps_weight:
        raise ValueError(
            f"{layer}: is_first_microbatch needs cache_weights=True under the recipe "
            f"{type(recipe).__name__}"
        )
    if not isinstance(first, Tensor):
        return bool(first)
    if first.dim() != 0 or first.dtype != torch.bool or first.device != x.device:
        raise ValueError(
            f"{layer}: is_first_microbatch must be None, a bool or a 0-D bool tensor on "
            f"{x.device}, got {first.dim()}-D {dtype_name(first.dtype)} on {first.device}"
        )
    # The caller's may be the next micro-batch's when this one's backward reads it.
    return first.clone()


def cache_plan(
    layer: str, cache: WeightCache | None, first: Tensor | bool | None
) -> dict[str, Any]:
    """Which quantized weight is read, and whether it is made anew before."""
    if first is None or cache is None:
        return {}
    # A graph must not depend on what is in it: in a compiled one NaN shows.
    if first is False and not torch.compiler.is_compiling() and not cache.warm:
        raise RuntimeError(
            f"{layer}: is_first_microbatch=False reads the weight cache, which holds no "
            "weight yet, or none since parameters were loaded, drawn or moved: call with True"
        )
    return {"kept": cache.kept(), "refresh": first}


def main_grad_plan(
    layer: str, weights: dict[str, Any], first: Tensor | bool | None
) -> dict[str, Any]:
    """What weight gradients are added to; nothing where no weight requires one."""
    parameters = tuple(weights.values())
    learning = [w.requires_grad for w in parameters]
    if not any(learning):
        return {}
    if not all(learning):
        raise RuntimeError(
            f"{layer}: fuse_wgrad_accumulation computes the gradients of all experts, "
            f"but only {sum(learning)} of {len(learning)} require one"
        )
    for name, w in weights.items():
        if not isinstance(getattr(w, "main_grad", None), Tensor):
            raise RuntimeError(
                f"{layer}: fuse_wgrad_accumulation adds to {name}.main_grad, which is not there"
            )
    main_grads = tuple(w.main_grad for w in parameters)
    # Two products would add to one tensor at a time. Dynamo says so itself.
    if not torch.compiler.is_compiling() and len(set(map(id, main_grads))) < len(main_grads):
        raise RuntimeError(
            f"{layer}: fuse_wgrad_accumulation needs a main_grad of its own for each expert, "
            "some have one together"
        )
    plan: dict[str, Any] = {"main_grad": main_grads}
    plan["overwrite"] = False if first is None else first
    if getattr(parameters[0], "overwrite_main_grad", False):
        plan["overwrite"] = True
    if hasattr(parameters[0], "grad_added_to_main_grad"):
        plan["dummy_grad"] = True
        # In the forward: a compiled backward cannot set an attribute.
        for w in parameters:
            w.grad_added_to_main_grad = True
    return plan
