"""The option ``amax_epsilon``, which two recipes have, and their flags."""

import math
from dataclasses import fields
from numbers import Real
from typing import Any


class AmaxEpsilon:
    """The part of a recipe that checks ``amax_epsilon`` and flags, and passes the former to ops."""

    amax_epsilon: float
    _epsilon_text: str

    def __post_init__(self) -> None:
        name, amax_epsilon = type(self).__name__, self.amax_epsilon
        is_number = isinstance(amax_epsilon, Real) and not isinstance(amax_epsilon, bool)
        if not (is_number and math.isfinite(amax_epsilon) and amax_epsilon >= 0):
            got = f"{amax_epsilon:g}" if is_number else repr(amax_epsilon)
            raise ValueError(f"{name}: amax_epsilon must be finite and not negative, got {got}")
        recipe: Any = self
        for option in fields(recipe):
            flag = getattr(self, option.name)
            if isinstance(option.default, bool) and not isinstance(flag, bool):
                raise ValueError(f"{name}: {option.name} must be True or False, got {flag!r}")
        object.__setattr__(self, "_epsilon_text", repr(float(amax_epsilon)))

    @property
    def epsilon(self) -> float:
        """The argument of ops, as a constant for Dynamo.

        Dynamo makes a float that changes, or any float with ``dynamic=True``, an input of the graph
        on the CPU. It then cannot compile two layers of one recipe (torch 2.13). A string stays a
        constant.
        """
        return float(self._epsilon_text)
