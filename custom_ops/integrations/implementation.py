# SPDX-License-Identifier: Apache-2.0
"""An experts implementation of transformers' interface: a name with its options."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grouped_linear.integrations.experts_forward import experts_forward
from grouped_linear.recipes import Recipe


def check_stateless(op: str, recipe: Recipe | None) -> None:
    """Raise ValueError for a recipe that experts of transformers cannot have."""
    if recipe is not None and recipe.has_state:
        raise ValueError(
            f"{op}: {type(recipe).__name__} has a state in each layer, and an experts "
            "implementation is a function: choose a recipe without state"
        )


@dataclass(frozen=True)
class Implementation:
    """A registered name and its options. Unpickling registers it again.

    A model's configuration holds the name alone, and a name is registered in one process. So
    converted experts carry the implementation with them as an attribute.
    """

    name: str
    recipe: Recipe | None
    save_gate_up_in_fp8: bool

    @staticmethod
    def of(name: str) -> "Implementation | None":
        """What is registered under a name, if it is one of grouped_linear's."""
        function: Any = ALL_EXPERTS_FUNCTIONS.get(name)
        ours = isinstance(function, partial) and function.func is experts_forward
        return Implementation(name, **function.keywords) if ours else None

    def check(self, op: str) -> None:
        """Raise ValueError if the name stands for something else, or the recipe has a state."""
        check_stateless(op, self.recipe)
        taken = {"eager", *ALL_EXPERTS_FUNCTIONS, *ALL_FP8_EXPERTS_FUNCTIONS}
        if self.name in taken and Implementation.of(self.name) != self:
            raise ValueError(f"{op}: {self.name!r} names another experts implementation already")

    def register(self) -> None:
        """Register the name with transformers."""
        if Implementation.of(self.name) == self:
            return
        function: Any = partial(
            experts_forward, recipe=self.recipe, save_gate_up_in_fp8=self.save_gate_up_in_fp8
        )
        for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
            interface.register(self.name, function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (self.name, self.recipe, self.save_gate_up_in_fp8)


def _registered(name: str, recipe: Recipe | None, save_gate_up_in_fp8: bool) -> Implementation:
    implementation = Implementation(name, recipe, save_gate_up_in_fp8)
    implementation.check("register")
    implementation.register()
    return implementation
