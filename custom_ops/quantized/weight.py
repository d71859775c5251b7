"""What a layer does otherwise whose weight is a GroupedTensor.

`layer` and `op` are the names that a sentence begins with.
"""

from typing import Any

from torch import Tensor, nn

from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe


def check_quantized_weight(
    layer: str,
    recipe: Recipe | None,
    quantized_weight: bool,
    cache_weights: bool,
    **of_quantized_weight: bool,
) -> None:
    """Raise ValueError for options of a quantized weight that do not go together.

    Args:
        layer: whose they are.
        recipe: the layer's.
        quantized_weight: whether its weight is to be kept quantized.
        cache_weights: whether it has room for a quantized weight besides.
        of_quantized_weight: options that mean nothing without, by their names.
    """
    if quantized_weight and not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            f"{layer}: quantized_weight needs the recipe Float8BlockScaling, got {recipe!r}"
        )
    if quantized_weight and cache_weights:
        raise ValueError(
            f"{layer}: cache_weights keeps what quantized_weight has already: choose one of them"
        )
    for name, needs_grad_now in of_quantized_weight.items():
        if needs_grad_now and not quantized_weight:
            raise ValueError(f"{layer}: {name} needs quantized_weight=True")


def kept_weight(
    op: str, w: GroupedTensor, recipe: Recipe | None, columnwise: bool
) -> QuantizedWeight:
    """A quantized weight as products read it.

    Args:
        op: what reads it.
        w: the weight.
        recipe: how products are computed.
        columnwise: whether dgrad will read it, too.
    """
    if not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            f"{op}: a quantized weight needs the recipe Float8BlockScaling, got {recipe!r}"
        )
    return w.kept(columnwise)


def convert_assigned(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Make parameters of a state that is assigned what they take the place of: quantized, or not.

    A state that is copied needs no such thing, since copying converts.
    """
    for name, own in module.named_parameters():
        w = state_dict.get(prefix + name)
        if not isinstance(w, Tensor) or w.shape != own.shape:  # torch says so
            continue
        if isinstance(w, GroupedTensor) and not isinstance(own, GroupedTensor):
            state_dict[prefix + name] = w.dequantize()
        elif isinstance(own, GroupedTensor) and not isinstance(w, GroupedTensor):
            rounding = own.stochastic_rounding
            quantized = GroupedTensor.quantize(w, own.recipe, stochastic_rounding=rounding)
            state_dict[prefix + name] = quantized
