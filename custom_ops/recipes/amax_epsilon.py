"""The option ``amax_epsilon``, which two recipes have."""

import math


class AmaxEpsilon:
    """The part of a recipe that checks ``amax_epsilon`` and passes it to ops."""

    amax_epsilon: float
    _epsilon_text: str

    def __post_init__(self) -> None:
        amax_epsilon = self.amax_epsilon
        if not (math.isfinite(amax_epsilon) and amax_epsilon >= 0):
            raise ValueError(
                f"{type(self).__name__}: amax_epsilon must be finite and not negative, "
                f"got {amax_epsilon:g}"
            )
        object.__setattr__(self, "_epsilon_text", repr(float(amax_epsilon)))

    @property
    def epsilon(self) -> float:
        """The argument of ops, as a constant for Dynamo.

        Dynamo makes a float that changes, or any float with ``dynamic=True``, an input of the graph
        on the CPU. It then cannot compile two layers of one recipe (torch 2.13). A string stays a
        constant.
        """
        return float(self._epsilon_text)
