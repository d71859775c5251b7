"""What the quantizing recipes share in how they quantize a weight.

E groups, K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from grouped_linear.meta_kernels.rules import E4M3
from grouped_linear.recipes.base import (
    Experts,
    Operands,
    QuantizedWeight,
    QuantizerState,
    Recipe,
    Values,
    is_transposed,
    with_shared_scale,
)


def new_fp8_weight(
    E: int,
    N: int,
    K: int,
    device: torch.device | str | None,
    columnwise: bool,
    scale_shape: tuple[int, ...],
) -> QuantizedWeight:
    """Allocate a weight in e4m3 with float32 scales."""
    return QuantizedWeight(
        torch.empty(E, N, K, dtype=E4M3, device=device),
        torch.empty(scale_shape, dtype=torch.float32, device=device),
        torch.empty(E, K, N, dtype=E4M3, device=device) if columnwise else None,
    )


def in_dispatch_mode() -> bool:
    """Whether a mode sees every eager op, as selective activation checkpointing does.

    Such a mode may store an op's results and skip the op in the recomputation. An op that fills
    tensors returns nothing to store: skipped, it would leave new tensors unfilled.
    """
    return not torch.compiler.is_compiling() and is_in_torch_dispatch_mode()


def quantize_into_new_weight(
    recipe: Recipe, weights: Experts, state: QuantizerState | None, columnwise: bool
) -> Operands:
    """Quantize a weight for which there is a refreshing op but none that returns new tensors."""
    *_, N, K = weights[0].shape
    E = len(weights[0]) if weights[0].dim() == 3 else len(weights)
    quantized = recipe.new_weight(E, N, K, weights[0].device, columnwise)
    recipe.refresh_weight_(quantized, weights, state, None)
    return quantized.operands(columnwise)


class WeightByRefresh(Recipe):
    """A recipe whose refreshing op reads E tensors [N, K], and writes [E, K, N] for dgrad."""

    def quantize_weight_list(
        self, weights: Experts, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        """Quantize E tensors without a stacked copy, unless a dispatch mode needs one."""
        if in_dispatch_mode():
            return super().quantize_weight_list(weights, state, columnwise)
        return quantize_into_new_weight(self, weights, state, columnwise)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """[E, K, N], as it is."""
        return columnwise, scale


def quantize_as_stored(
    quantize: Callable[..., Any], w_ENK: Tensor, columnwise: bool, rowwise: bool = True
) -> Operands:
    """Quantize a weight in the layout in which it is stored, [E, N, K] or [E, K, N].

    Its blocks are squares or whole experts, so both layouts have the same scales.

    Args:
        quantize: called as ``quantize(stored, rowwise=..., columnwise=...)``, of the stored layout.
    """
    if not is_transposed(w_ENK):
        return with_shared_scale(*quantize(w_ENK, columnwise=columnwise, rowwise=rowwise))
    q_t, scale, q = quantize(w_ENK.mT, columnwise=rowwise, rowwise=columnwise)
    if scale.dim() == 3:  # one a block
        scale = scale.mT.contiguous()
    return with_shared_scale(q if rowwise else None, scale, q_t if columnwise else None)
