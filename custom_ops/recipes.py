"""How a layer's matrix products are computed: frozen dataclasses, passed as ``recipe=``."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Float8BlockScaling:
    """FP8 (e4m3) products with one float32 scale a block.

    Activations and gradients share a scale over 1x128 blocks (128 features of one token for fprop
    and dgrad, 128 tokens of one feature for wgrad), weights over 128x128 blocks. Products are
    summed in float32 with the scales applied every 128 elements. For each block::

        amax = max(largest finite magnitude, amax_epsilon)
        factor = min(448 / amax, 2 ** 126)      # 1 where amax is 0
        q, scale = e4m3(x * factor), 1 / factor

    Args:
        power_of_two_scales: round ``factor`` down to a power of two, so that scaling is exact.
        amax_epsilon: the smallest amax a block is scaled by; not negative.

    Raises:
        ValueError: if ``amax_epsilon`` is negative or not finite.

    >>> Float8BlockScaling()
    Float8BlockScaling(power_of_two_scales=True, amax_epsilon=0.0)
    """

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.amax_epsilon) and self.amax_epsilon >= 0):
            raise ValueError(
                "Float8BlockScaling: amax_epsilon must be finite and not negative, "
                f"got {self.amax_epsilon:g}"
            )


#: A recipe, or ``None`` for products in the activations' own dtype.
Recipe = Float8BlockScaling | None
