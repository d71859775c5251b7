# SPDX-License-Identifier: Apache-2.0
"""torch's FLOP counter counts our products.

T rows, E groups, K in_features, N out_features.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    ops,
)
from support.layers import linear_of

SIZES = [250, 0, 53, 697]
T, E, N, K = sum(SIZES), len(SIZES), 96, 64
ONE = 2 * T * N * K
# Columnwise data are padded, and their shapes tell the number of rows to within so many.
WITHIN = 2 * 64 * N * K
RECIPES: list[Recipe] = [
    None,
    Float8BlockScaling(),
    Float8CurrentScaling(),
    DelayedScaling(),
    MXFP8BlockScaling(),
]


@pytest.mark.parametrize("single_grouped_weight", [True, False])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_layer(recipe: Recipe | None, single_grouped_weight: bool) -> None:
    layer = linear_of(E, K, N, recipe=recipe, single_grouped_weight=single_grouped_weight)
    x, sizes = torch.randn(T, K, requires_grad=True), torch.tensor(SIZES)
    with FlopCounterMode(display=False) as counter:
        y = layer(x, sizes)
    assert counter.get_total_flops() == ONE
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == pytest.approx(2 * ONE, abs=WITHIN)
    with FlopCounterMode(display=False) as counter:
        layer(x.detach(), sizes).sum().backward()
    assert counter.get_total_flops() == pytest.approx(2 * ONE, abs=WITHIN)


def test_low_rank() -> None:
    offs = torch.tensor(SIZES).cumsum(0).int()
    low = {"a_low": torch.randn(T, 32), "b_low": torch.randn(E, 32, N)}
    with FlopCounterMode(display=False) as counter:
        ops.grouped_mm(torch.randn(T, K), torch.randn(E, K, N), offs, **low)
    assert counter.get_total_flops() == ONE + 2 * T * 32 * N


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("single_grouped_weight", [True, False])
def test_main_grad(single_grouped_weight: bool, recipe: Recipe | None) -> None:
    layer = linear_of(
        E,
        K,
        N,
        recipe=recipe,
        single_grouped_weight=single_grouped_weight,
        fuse_wgrad_accumulation=True,
    )
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(T, K), torch.tensor(SIZES)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(2 * ONE, abs=WITHIN)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda r: type(r).__name__)
def test_experts(recipe: Recipe | None) -> None:
    """Without a recipe GEMMs gather rows."""
    experts = GroupedMLP(E, K, N, recipe=recipe)
    x, choices = torch.randn(T, K, requires_grad=True), torch.randint(0, E, (T, 2))
    with FlopCounterMode(display=False) as counter:
        experts(x, torch.rand(T, 2), choices).sum().backward()
    assert counter.get_total_flops() == pytest.approx(3 * 2 * 3 * ONE, abs=3 * WITHIN)


@pytest.mark.parametrize("rows", [0, 1, 7, 128, 1000])
@pytest.mark.parametrize("groups", [1, 8, 300])
def test_rows_of_padded_data(rows: int, groups: int) -> None:
    offs = torch.full((groups,), rows, dtype=torch.int32)
    x = torch.randn(rows, 16)
    quantized = ops.group_quantize(x, offs, rowwise=False, columnwise=True)
    with FlopCounterMode(display=False) as counter:
        ops.grouped_scaled_mm_wgrad(
            quantized.q_t, quantized.q_t, quantized.scale_t, quantized.scale_t, offs
        )
    assert counter.get_total_flops() == pytest.approx(2 * rows * 16 * 16, abs=2 * 64 * 16 * 16)
