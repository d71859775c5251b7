# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear as a module: parameters, their birth and their travels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, GroupedLinear, GroupedMLP, Recipe
from support.compare import assert_same_bits
from support.recipes import RECIPES as EVERY_RECIPE

RECIPES = pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=EVERY_RECIPE)


def call(layer: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 7 * layer.weight.size(2)).view(7, -1).to(layer.weight.dtype)
    return layer(x, [3, 0, 4])


def make_layer(**options: Any) -> GroupedLinear:
    return GroupedLinear(3, 16, 32, **options)


def test_initialisation_is_that_of_linear() -> None:
    layer = GroupedLinear(4, 64, 256)
    bound = 1 / math.sqrt(64)
    for p in layer.parameters():
        assert p.abs().max() <= bound
        # 1024 or more draws come within 1% of the bound, and their mean within a few errors of 0
        assert p.abs().max() > 0.99 * bound
        assert p.mean().abs() < 4 * bound / math.sqrt(3 * p.numel())
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_configuration_is_read_only() -> None:
    layer = make_layer(recipe=Float8BlockScaling())
    assert (layer.num_experts, layer.in_features, layer.out_features) == (3, 16, 32)
    assert layer.recipe == Float8BlockScaling()
    with pytest.raises(AttributeError, match="recipe"):
        layer.recipe = None
    mlp = GroupedMLP(3, 16, 32)
    assert (mlp.num_experts, mlp.hidden_size, mlp.intermediate_size) == (3, 16, 32)
    with pytest.raises(AttributeError, match="recipe"):
        mlp.recipe = Float8BlockScaling()


@RECIPES
def test_meta_device(recipe: Recipe | None) -> None:
    torch.manual_seed(5)
    expected = make_layer(recipe=recipe)
    layer = make_layer(recipe=recipe, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert layer(
        torch.empty(7, 16, device="meta"), torch.empty(3, dtype=int, device="meta")
    ).is_meta
    layer.reset_parameters()  # nothing to draw yet
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    assert_same_bits(call(layer), call(expected))
    assert all(p.requires_grad for p in layer.parameters())
