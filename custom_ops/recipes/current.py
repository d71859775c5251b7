# SPDX-License-Identifier: Apache-2.0
"""FP8 with one scale a group, computed from the tensor that is quantized."""

from dataclasses import dataclass, field

import torch

from grouped_linear.meta_kernels.rules import E4M3, FP8
from grouped_linear.recipes.format import Format, check_amax_epsilon, check_flags, shown
from grouped_linear.recipes.recipe import Recipe


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(Recipe):
    """FP8 GEMMs with one float32 scale a group, from the group's own amax.

    Each expert's weight has one scale, and so have each expert's rows of activations and of
    gradients. For each group::

        amax = max(largest finite magnitude, amax_epsilon)
        factor = min(fp8_max / amax, 2 ** 126)      # 1 where amax is 0
        q, scale = fp8(x * factor), 1 / factor

    Args:
        power_of_two_scales: round ``factor`` down to a power of two, so that scaling is exact.
        amax_epsilon: the smallest amax by which a group is scaled; not negative.
        gradient_dtype: of quantized gradients, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``
            (more range, less precision). Activations and weights are e4m3.
        requantize_weights: see :class:`grouped_linear.Float8BlockScaling`.

    Raises:
        ValueError: for an ``amax_epsilon`` that is negative or not finite, another dtype, or a
            flag that is neither True nor False.

    >>> Float8CurrentScaling(gradient_dtype=torch.float8_e5m2).gradient_dtype
    torch.float8_e5m2
    """

    input: Format = field(init=False, compare=False)
    weight: Format = field(init=False, compare=False)
    grad_output: Format = field(init=False, compare=False)
    power_of_two_scales: bool = False
    amax_epsilon: float = 0
    gradient_dtype: torch.dtype = E4M3
    requantize_weights: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_amax_epsilon(name, self.amax_epsilon)
        check_flags(name, power_of_two_scales=self.power_of_two_scales)
        if self.gradient_dtype not in FP8:
            raise ValueError(
                f"{name}: gradient_dtype must be float8_e4m3fn or float8_e5m2, got "
                f"{shown(self.gradient_dtype)}"
            )
        options = self.power_of_two_scales, self.amax_epsilon
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "input", Format(E4M3, "group", *options))
        set_field(self, "weight", Format(E4M3, "group", *options))
        set_field(self, "grad_output", Format(self.gradient_dtype, "group", *options))
        super().__post_init__()
