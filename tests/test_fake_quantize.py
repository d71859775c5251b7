# SPDX-License-Identifier: Apache-2.0
"""fake_quantize: one role, or one expert, in high precision.

E experts, H features of a token, F features inside an expert.
"""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Format,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
)
from grouped_linear.contrib import fake_quantize, watch
from support import reference
from support.compare import assert_same_bits
from support.layers import call_of
from support.recipes import RECIPES

E, H, F = 4, 128, 144
COUNTS = (16, 0, 140, 2)
FP8 = Float8BlockScaling()


def trained(recipe: Recipe | None, compiled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The output of a layer, and the gradients of x and of the weight."""
    torch.manual_seed(1)
    x, dy = torch.randn(sum(COUNTS), H, requires_grad=True), torch.randn(sum(COUNTS), F)
    layer = GroupedLinear(E, H, F, bias=False, recipe=recipe)
    torch._dynamo.reset()
    y = call_of(layer, compiled)(x, list(COUNTS))
    return y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", [FP8, MXFP8BlockScaling(), RECIPES["current"]])
def test_one_role_in_high_precision(recipe: Any, compiled: bool) -> None:
    """Outputs have the error of the recipe, the gradient by x only that of the weight."""
    own = fake_quantize(recipe, ("input", "weight"))
    assert own.grad_output == Format()
    of_weight = fake_quantize(recipe, ("weight",))
    y, dx, _ = trained(own, compiled)
    whole_y, whole_dx, _ = trained(recipe, compiled)
    torch.testing.assert_close(y, whole_y, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(dx, trained(of_weight, compiled)[1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(dx, whole_dx, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_expert_in_high_precision(compiled: bool) -> None:
    """Its rows and its gradients have the numbers of no recipe, the others' those of the recipe."""
    recipes = fake_quantize(FP8, except_experts=[2]), None, fake_quantize(FP8)
    group = reference.groups(torch.tensor(COUNTS).cumsum(0), sum(COUNTS))
    for of_one, none, whole in zip(*(trained(r, compiled) for r in recipes), strict=True):
        by_expert = len(of_one) == E
        for e in range(E):
            where = e if by_expert else group[e]
            assert_same_bits(of_one[where], (none if e == 2 else whole)[where])


def test_wgrad_in_16_bits() -> None:
    """It rounds the tensors that wgrad multiplies, as the recipe does."""
    recipe = Float8BlockScaling(wgrad=torch.bfloat16)
    grads = (trained(one)[2] for one in (recipe, fake_quantize(recipe)))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)  # unrounded: 2.4e-3 of it


def test_wgrad_of_few_features_while_watched() -> None:
    """Also in a copy of the watched layer, whose recipes are made from their options."""
    layer = GroupedMLP(E, H, F, recipe=fake_quantize(FP8), dtype=torch.bfloat16)
    x, scores = torch.randn(50, H).bfloat16(), torch.rand(50, E)

    def down_grad(layer: GroupedMLP) -> Tensor:
        layer.zero_grad()
        layer(x, *scores.topk(2)).square().sum().backward()
        assert layer.down_proj.grad is not None
        return layer.down_proj.grad.clone()

    plain, seen = down_grad(layer), watch(layer)
    for one in (layer, copy.deepcopy(layer)):
        assert_same_bits(down_grad(one), plain)
    seen.remove()


def test_printed_and_copied() -> None:
    whole = fake_quantize(FP8)
    one = fake_quantize(MXFP8BlockScaling(), ["weight"], except_experts=[3])
    assert repr(whole) == "fake_quantize(Float8BlockScaling())"
    assert repr(one) == "fake_quantize(MXFP8BlockScaling(), ('weight',), except_experts=[3])"
    for recipe in (whole, one):
        assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe


def test_what_cannot_be_fake_quantized() -> None:
    def as_it_is(t: Tensor, offs: Any, layouts: Any) -> Tensor:
        return t

    layer = GroupedLinear(E, H, F, bias=False, recipe=fake_quantize(FP8, except_experts=[1, 99]))
    for call, message in (
        (lambda: layer(torch.randn(4, H), [4, 0, 0, 0]), "has 99, and the layer has experts 0 to"),
        (lambda: fake_quantize(cast(Any, None)), "recipe must be a grouped_linear.Recipe, got No"),
        (
            lambda: fake_quantize(cast(Any, Float8BlockScaling)),
            "got <class .*Float8BlockScaling'>: call it",
        ),
        (lambda: fake_quantize(DelayedScaling()), "needs a recipe without state, got Delayed"),
        (lambda: fake_quantize(FP8, ("gradient",)), "roles must be of input, weight, grad_output"),
        (lambda: fake_quantize(FP8, "weight"), "roles must be a list, got 'weight'"),
        (lambda: fake_quantize(FP8, except_experts=cast(Any, 3)), "experts must be a list, got 3"),
        (lambda: fake_quantize(FP8, except_experts=[-1]), "except_experts must be numbers, got -1"),
        (
            lambda: fake_quantize(Recipe(Format(quantize=as_it_is)), except_experts=[1]),
            "except_experts needs formats with scales",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
