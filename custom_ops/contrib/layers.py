# SPDX-License-Identifier: Apache-2.0
"""The layers that tools look at, and a check that they share."""

from numbers import Integral
from typing import Any

from torch import Tensor, nn

from grouped_linear.integrations.experts import Experts, named_experts
from grouped_linear.nn.checks import check_model

#: The operands of a layer, in the order of a recipe's arguments.
ROLES = ("input", "weight", "grad_output")


def layers_of(op: str, model: nn.Module) -> dict[str, Experts]:
    """The layers of a model that are computed here, by name; ValueError for a model without any."""
    check_model(op, model)
    found = {name: experts for name, experts in named_experts(model) if experts.computed_here}
    if not found:
        raise ValueError(
            f"{op}: {type(model).__name__} has no GroupedLinear, no GroupedMLP and no experts that "
            "convert has converted: make its experts such layers, or convert it"
        )
    for name, experts in found.items():
        module = experts.module
        own = [t for n, t in vars(module).items() if n.startswith(experts.weights)]
        # FullyShardedDataParallel leaves views in place of parameters, or marks them.
        is_flat = any(isinstance(t, Tensor) and t._is_view() for t in own)
        if is_flat or any(hasattr(p, "_fsdp_flattened") for p in module.parameters()):
            raise ValueError(
                f"{op}: {name or type(model).__name__} has flat parameters, as "
                f"FullyShardedDataParallel makes them: call {op} before"
            )
    return found


def check_positive(op: str, **given: Any) -> None:
    """Raise ValueError for what is no positive integer."""
    for name, n in given.items():
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
            raise ValueError(f"{op}: {name} must be a positive integer, got {n!r}")
