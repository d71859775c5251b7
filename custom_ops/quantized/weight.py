"""What a layer does differently if its weight is a GroupedTensor.

`layer` and `op` are the names that error messages begin with.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor, by its type, which Dynamo sees; importing DTensor takes 0.5 s."""
    return hasattr(type(t), "to_local")


def local_part(t: Any) -> Any:
    """The part of a DTensor that this process has; another tensor, or None, as it is."""
    return t.to_local() if is_dtensor(t) else t


def is_quantized(w: Any) -> bool:
    """Whether a weight, or this process's part of it, is a GroupedTensor."""
    return isinstance(local_part(w), GroupedTensor)


def check_quantized_weight(
    layer: str,
    recipe: Recipe | None,
    quantized_weight: bool,
    cache_weights: bool,
    **only_with_quantized_weight: bool | None,
) -> None:
    """Raise ValueError for options of a layer that exclude each other.

    Args:
        layer: the layer's name.
        recipe: the layer's.
        quantized_weight: whether the weight is kept quantized.
        cache_weights: whether the layer has a weight cache.
        only_with_quantized_weight: options that need quantized_weight, by name.
    """
    if quantized_weight and not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            f"{layer}: quantized_weight needs the recipe Float8BlockScaling, got {recipe!r}"
        )
    if quantized_weight and cache_weights:
        raise ValueError(
            f"{layer}: cache_weights keeps what quantized_weight has already: choose one of them"
        )
    for name, given in only_with_quantized_weight.items():
        if given and not quantized_weight:
            raise ValueError(f"{layer}: {name} needs quantized_weight=True")


def quantized_weight_of(
    op: str, w: GroupedTensor, recipe: Recipe | None, columnwise: bool
) -> QuantizedWeight:
    """The parts of a quantized weight that GEMMs read.

    Args:
        op: the caller's name.
        w: the weight.
        recipe: the layer's.
        columnwise: whether dgrad reads the weight too.

    Raises:
        ValueError: for another recipe than ``Float8BlockScaling``.
        RuntimeError: under torch.jit.trace.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{op}: torch.jit.trace records no quantized weight: use torch.export or torch.compile"
        )
    if not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            f"{op}: a quantized weight needs the recipe Float8BlockScaling, got {recipe!r}"
        )
    return w.quantized_weight(columnwise)


def convert_assigned(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Convert a state that is loaded with ``assign=True``, in place, to what the module has.

    A quantized weight is dequantized for a plain parameter, and a plain one quantized for a
    quantized parameter. One that is quantized keeps its bytes and takes the parameter's options.
    Without ``assign`` the state is copied, and ``copy_`` converts.
    """
    for name, own in module.named_parameters(recurse=False):
        w = state_dict.get(prefix + name)
        if not isinstance(w, Tensor) or w.shape != own.shape:  # load_state_dict reports it
            continue
        if isinstance(w, GroupedTensor) and not isinstance(own, GroupedTensor):
            state_dict[prefix + name] = w.dequantize()
        elif isinstance(own, GroupedTensor):
            columnwise = own.q_t is not None
            if not isinstance(w, GroupedTensor):
                w = GroupedTensor.quantize(w, own.recipe, columnwise=columnwise)
            q, scale, q_t = w.quantized_weight(columnwise)
            assert scale is not None
            state_dict[prefix + name] = GroupedTensor(q, scale, q_t, own.metadata)
