"""GroupedLinear, the layer as a torch.nn.Module.

T rows, E groups, K in_features, N out_features.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grouped_linear.delayed import DelayedScalingState
from grouped_linear.functional import grouped_linear
from grouped_linear.meta_kernels.rules import FEATURE_MULTIPLE, MAX_GROUPS
from grouped_linear.recipes import DelayedScaling, Recipe


class RngStateTracker(Protocol):
    """What ``get_rng_state_tracker`` returns, Megatron's convention."""

    def fork(self, name: str = ...) -> AbstractContextManager[Any]:
        """A context in which the named random state is the current one."""
        ...


@dataclass(frozen=True)
class _Options:
    num_gemms: int
    in_features: int
    out_features: int
    return_bias: bool
    init_method: Callable[[Tensor], Any] | None
    get_rng_state_tracker: Callable[[], RngStateTracker] | None
    rng_tracker_name: str | None
    recipe: Recipe

    def __post_init__(self) -> None:
        if not 1 <= self.num_gemms <= MAX_GROUPS:
            raise ValueError(
                f"GroupedLinear: num_gemms must be between 1 and {MAX_GROUPS}, got {self.num_gemms}"
            )
        for name in ("in_features", "out_features"):
            size = getattr(self, name)
            if size <= 0 or size % FEATURE_MULTIPLE:
                raise ValueError(
                    f"GroupedLinear: {name} must be a positive multiple of {FEATURE_MULTIPLE}, "
                    f"got {size}"
                )
        if not isinstance(self.recipe, Recipe):
            raise ValueError(
                "GroupedLinear: recipe must be None or one of grouped_linear's recipes, "
                f"got {self.recipe!r}"
            )


class GroupedLinear(nn.Module):
    """A linear layer an expert: ``y[t] = x[t] @ weight[e].T + bias[e]`` for the rows t of group e.

    Args:
        num_gemms: E, the number of groups (experts), at most 1024.
        in_features: K, a multiple of 16.
        out_features: N, a multiple of 16.
        bias: whether the layer has a bias.
        return_bias: return ``(y, bias)`` with the bias in y's dtype and not added.
        init_method: called with every expert's weight [N, K] to fill it; torch.nn.Linear's
            initialisation by default.
        get_rng_state_tracker: returns an object whose ``fork(name)`` context holds the random state
            that parameters are drawn from.
        rng_tracker_name: the name that ``fork`` is called with, if any.
        dtype: of the parameters; ``params_dtype`` is another name for it.
        device: of the parameters. After ``device="meta"`` call ``to_empty(device=...)`` and
            ``reset_parameters()``.
        recipe: how products are computed, for example ``Float8BlockScaling()``; None computes in
            the activations' dtype.

    Attributes:
        weight: [E, N, K].
        bias: [E, N], or None.
        scaling_state: what ``DelayedScaling`` remembers, see
            :class:`grouped_linear.DelayedScalingState`; None under any other recipe.

    Raises:
        ValueError: for a configuration that no call could run.

    >>> layer = GroupedLinear(num_gemms=2, in_features=16, out_features=32)
    >>> layer
    GroupedLinear(num_gemms=2, in_features=16, out_features=32, bias=True, recipe=None)
    >>> layer(torch.randn(7, 16), torch.tensor([4, 2])).shape
    torch.Size([7, 32])
    """

    bias: nn.Parameter | None
    scaling_state: DelayedScalingState | None

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        get_rng_state_tracker: Callable[[], RngStateTracker] | None = None,
        rng_tracker_name: str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        recipe: Recipe = None,
    ) -> None:
        super().__init__()
        if dtype is not None and params_dtype is not None:
            raise ValueError("GroupedLinear: dtype and params_dtype are one option, got both")
        self._options = _Options(
            num_gemms,
            in_features,
            out_features,
            return_bias,
            init_method,
            get_rng_state_tracker,
            rng_tracker_name,
            recipe,
        )
        like: dict[str, Any] = {"dtype": dtype or params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(num_gemms, out_features, in_features, **like))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_gemms, out_features, **like))
        else:
            self.register_parameter("bias", None)
        self.scaling_state = None
        if isinstance(recipe, DelayedScaling):
            self.scaling_state = DelayedScalingState(recipe, num_gemms, device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew, forget scales; nothing happens on the meta device."""
        if self.weight.is_meta:
            return
        if self.scaling_state is not None:
            self.scaling_state.reset()
        options, tracker = self._options, self._options.get_rng_state_tracker
        names = () if options.rng_tracker_name is None else (options.rng_tracker_name,)
        bound = 1 / math.sqrt(options.in_features)
        with nullcontext() if tracker is None else tracker().fork(*names):
            for weight_NK in self.weight:
                if options.init_method is None:
                    nn.init.uniform_(weight_NK, -bound, bound)
                else:
                    options.init_method(weight_NK)
            if self.bias is not None:
                nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, m_splits: Tensor | Sequence[int]
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to x [..., K], whose rows are sorted by group.

        Args:
            x: [..., K] bfloat16, float16 or float32.
            m_splits: [E] rows of each group, int32 or int64; on x's device it is never read by the
                host. Their sum may be less than the rows there are; it may not be more.

        Returns:
            y [..., N], zero in rows at and past sum(m_splits); with return_bias ``(y, bias)``.
        """
        weight, recipe, state = self.weight, self._options.recipe, self.scaling_state
        if not self._options.return_bias:
            return grouped_linear(x, weight, m_splits, self.bias, recipe, state)
        y = grouped_linear(x, weight, m_splits, None, recipe, state)
        return y, None if self.bias is None else self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """The options that tell layers apart."""
        options = self._options
        return (
            f"num_gemms={options.num_gemms}, in_features={options.in_features}, "
            f"out_features={options.out_features}, bias={self.bias is not None}, "
            f"recipe={options.recipe}"
        )
