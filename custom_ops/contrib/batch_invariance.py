# SPDX-License-Identifier: Apache-2.0
"""Whether a token's bits depend on that token alone: a promise of most recipes, and its check."""

from torch import nn

from grouped_linear.integrations.experts import Experts, named_experts
from grouped_linear.loading import host_module
from grouped_linear.nn.checks import check_model


def check_batch_invariant(model: nn.Module) -> None:
    """Raise ValueError unless each token's expert output has the same bits in any batch.

    Where this passes, the output of a token depends on that token, its routing and the weights
    alone, to the bit. It holds on a GPU for the recipes whose scales each row has for itself:
    ``Float8BlockScaling``, ``MXFP8BlockScaling`` and None; on a CPU with AVX-512 BF16 for
    ``Float8BlockScaling`` without adapters. It says nothing of other layers, as
    attention. docs/compile.md has the whole promise.

    Args:
        model: with layers of this package, or converted, on the device where it will run.

    Raises:
        ValueError: that names a layer and why it cannot promise this; and for a model that has
            none of these layers.
        TypeError: if `model` is not a module.

    >>> from grouped_linear import Float8CurrentScaling, GroupedMLP
    >>> check_batch_invariant(GroupedMLP(4, 16, 32, recipe=Float8CurrentScaling()))
    Traceback (most recent call last):
    ValueError: check_batch_invariant: GroupedMLP: Float8CurrentScaling() has scales that all rows
    of an expert share, so a token's bits follow its batch
    """
    check_model("check_batch_invariant", model)
    name = None
    inside = {m for n, m in model.named_modules() if "base_layer" in n.split(".")}  # of PEFT's
    for name, experts in named_experts(model):
        own = any("lora_" in n for n, _ in experts.module.named_parameters())
        reason = _reason(experts, own or experts.module in inside)
        if reason is not None:
            raise ValueError(f"check_batch_invariant: {name or experts.form}: {reason}")
    if name is None:
        raise ValueError(f"check_batch_invariant: {type(model).__name__} has no grouped layers")


def _reason(experts: Experts, has_adapters: bool) -> str | None:
    """Why a layer's rows may depend on each other; None if they do not."""
    layer, recipe = experts.module, experts.recipe
    if not experts.computed_here:
        return "convert has not converted it"
    if getattr(layer, "dispatcher", None) is not None:
        return "its experts are on several processes, whose capacity other tokens may take"
    if recipe is not None and recipe.why_rows_depend is not None:
        return recipe.why_rows_depend
    if next(layer.parameters()).device.type != "cpu":
        return None
    if recipe is None or recipe.input.scaling != "block" or has_adapters:
        return "torch multiplies on a CPU, and its sums follow the number of rows"
    host = host_module()
    if host is None or not host.has_bf16_units():
        return "this CPU has no AVX-512 BF16, so torch multiplies, and its sums follow the rows"
    return None
