# SPDX-License-Identifier: Apache-2.0
"""watch, compare and fake_quantize of experts that convert has converted.

R rows, E experts, H features of a token, F features inside an expert.
"""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Format,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    convert,
)
from grouped_linear.contrib import compare, fake_quantize, watch
from support import reference
from support.compare import assert_same_bits
from support.experts import FusedExperts, GroupedExperts
from support.recipes import RECIPES

E, H, F = 4, 128, 144
COUNTS = (16, 0, 140, 2)
FP8 = Float8BlockScaling()


class Layers(nn.Module):
    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(experts(E, H, F) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, torch.tensor(COUNTS))
        return x


def layers(experts: Any, recipe: Recipe | None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Layers(experts)
    convert(model, recipe, **options)
    return model


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(sum(COUNTS), H, requires_grad=True)


def mixtral(recipes: Any = None, **sizes: Any) -> Any:
    pytest.importorskip("transformers", reason="needs transformers")
    from support.hugging_face import tiny

    torch.manual_seed(0)
    model = tiny("mixtral", **{"num_hidden_layers": 2} | sizes)
    convert(model, FP8, recipes=recipes)
    return model


def loss_of(model: Any) -> Tensor:
    tokens = torch.arange(40).view(2, 20)
    return model(input_ids=tokens, labels=tokens).loss


WEIGHTS = {GroupedExperts: ("w1", "w3", "w2"), FusedExperts: ("w13", "w2_EDF")}


@pytest.mark.parametrize(
    ("experts", "name"),
    [(GroupedExperts, "none"), (FusedExperts, "block"), (GroupedExperts, "delayed")],
)
def test_watch_experts_in_one_module(experts: Any, name: str) -> None:
    """Eager and compiled count the same; the bits stay; every weight has a name and moves."""
    model, x = layers(experts, RECIPES[name]), rows()
    plain = copy.deepcopy(model)(x)
    plain.sum().backward()
    seen = watch(model)
    y = model(x)
    y.sum().backward()
    assert_same_bits(y, plain)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    read = seen.read()
    names = [f"layers.{i}.{w}" for i in range(2) for w in WEIGHTS[experts]]
    assert list(dict.fromkeys(row.layer for row in read.operands)) == names
    assert len(read.operands) == 3 * len(names)
    assert all(row.moved > 0.99 for row in read.operands if row.role == "weight")
    assert [load.tokens for load in read.loads] == [COUNTS, COUNTS]
    if name != "delayed":  # whose state the first call has moved
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1
        torch._dynamo.reset()
        model.zero_grad()
        seen.read()
        torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
        again = seen.read()
        assert [r[:4] for r in again.experts] == [r[:4] for r in read.experts]
        for now, before in zip(again.experts, read.experts, strict=True):
            assert now.amax == pytest.approx(before.amax, rel=1e-5, nan_ok=True)  # of silu


@pytest.mark.parametrize(
    ("name", "compiled"), [("block", True), ("mxfp8", False), ("delayed", False)]
)
def test_compare_experts_in_one_module(name: str, compiled: bool) -> None:
    model, x = layers(GroupedExperts, RECIPES[name]), rows()
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    roles = name == "block"
    found = compare(
        model, lambda: model(x).square().sum().backward(), roles=roles, compiled=compiled
    )
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
    whole = {(d.layer, d.tensor): d.difference for d in found.differences if d[1] == "all"}
    tensors = ("output", "x", "w1", "w2", "w3")
    assert set(whole) == {(f"layers.{i}", t) for i in range(2) for t in tensors}
    assert all(0.01 < d < 0.15 for d in whole.values())
    if roles:
        by_role = {d.quantized: d.difference for d in found.differences if d[2] == "output"}
        assert by_role["grad_output"] == 0
        assert 0.01 < by_role["weight"] < by_role["all"]
    assert type(model.layers[0]) is type(plain.layers[0])


def test_compare_hugging_face() -> None:
    model = mixtral(recipes={"model.layers.1.*": None})
    found = compare(model, lambda: loss_of(model).backward(), roles=True)
    assert {d.layer for d in found.differences} == {"model.layers.0.mlp.experts"}
    assert {d.tensor for d in found.differences} == {"output", "x", "gate_up_proj", "down_proj"}
    whole = [d.difference for d in found.differences if d.quantized == "all"]
    assert all(0.01 < d < 0.15 for d in whole)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_of(model).backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert_same_bits(p.grad, grad)


# --- one role, and one expert, in high precision -------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", [FP8, MXFP8BlockScaling(), RECIPES["current"]])
def test_one_role_in_high_precision(recipe: Any, compiled: bool) -> None:
    """Outputs have the error of the recipe, the gradient by x only that of the weight."""
    torch.manual_seed(0)
    own = fake_quantize(recipe, ("input", "weight"))
    assert own.grad_output == Format()
    x, dy = torch.randn(sum(COUNTS), H), torch.randn(sum(COUNTS), F)
    results = {}
    for kind, one in {
        "own": own,
        "whole": recipe,
        "weight": fake_quantize(recipe, ("weight",)),
    }.items():
        torch.manual_seed(1)
        layer = GroupedLinear(E, H, F, bias=False, recipe=one)
        leaf = x.clone().requires_grad_()
        torch._dynamo.reset()
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        call(leaf, list(COUNTS)).backward(dy)
        results[kind] = call(leaf, list(COUNTS)).detach(), leaf.grad
    torch.testing.assert_close(results["own"][0], results["whole"][0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(results["own"][1], results["weight"][1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(results["own"][1], results["whole"][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_expert_in_high_precision(compiled: bool) -> None:
    """Its rows and its gradients have the numbers of no recipe, the others' those of the recipe."""
    torch.manual_seed(0)
    x, dy = torch.randn(sum(COUNTS), H), torch.randn(sum(COUNTS), F)
    recipes = {
        "none": None,
        "all": fake_quantize(FP8),
        "but 2": fake_quantize(FP8, except_experts=[2]),
    }
    results = {}
    for kind, recipe in recipes.items():
        torch.manual_seed(1)
        layer = GroupedLinear(E, H, F, bias=False, recipe=recipe)
        leaf = x.clone().requires_grad_()
        torch._dynamo.reset()
        y = (torch.compile(layer, fullgraph=True) if compiled else layer)(leaf, list(COUNTS))
        y.backward(dy)
        results[kind] = y.detach(), leaf.grad, layer.weight.grad
    group = reference.groups(torch.tensor(COUNTS).cumsum(0), len(x))
    for of_one, none, whole in zip(*(results[k] for k in ("but 2", "none", "all")), strict=True):
        by_expert = len(of_one) == E
        for e in range(E):
            where = e if by_expert else group[e]
            assert_same_bits(of_one[where], (none if e == 2 else whole)[where])


def test_wgrad_in_16_bits() -> None:
    """It rounds the tensors that wgrad multiplies, as the recipe does."""
    recipe, grads = Float8BlockScaling(wgrad=torch.bfloat16), []
    x, dy = torch.randn(sum(COUNTS), H), torch.randn(sum(COUNTS), F)
    for one in (recipe, fake_quantize(recipe)):
        torch.manual_seed(1)
        layer = GroupedLinear(E, H, F, bias=False, recipe=one)
        layer(x, list(COUNTS)).backward(dy)
        grads.append(layer.weight.grad)
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


def test_by_pattern() -> None:
    """convert gives one layer the recipe whose gradient stays in high precision; it trains."""
    own = fake_quantize(FP8, ("input", "weight"))
    model = mixtral(recipes={"*.layers.0.*": own})
    seen = watch(model)
    loss_of(model).backward()
    compared = {
        (row.layer.split(".")[2], row.role): row.error == row.error
        for row in seen.read().operands
        if "gate_up" in row.layer
    }
    assert compared == {
        (layer, role): layer == "1" or role != "grad_output"
        for layer in "01"
        for role in ("input", "weight", "grad_output")
    }


def test_a_language_model_is_healthy() -> None:
    """By the rules of docs/debugging_fp8.md: padding and last tokens have gradients of zeros."""
    model = mixtral(num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    seen, tokens = watch(model), torch.randint(64, (4, 64))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, 40:], mask[0, 40:] = -100, 0
    model(input_ids=tokens, labels=labels, attention_mask=mask).loss.backward()
    for row in seen.read().operands:
        assert row.amax <= row.scaled_amax < 8 * row.amax, row
        assert row.underflow < 0.01
        assert row.saturated == row.not_finite == 0
        assert 5e-4 < row.error < 1e-3


def test_what_cannot_be_fake_quantized() -> None:
    def as_it_is(t: Tensor, offs: Any, layouts: Any) -> Tensor:
        return t

    layer = GroupedLinear(E, H, F, bias=False, recipe=fake_quantize(FP8, except_experts=[1, 99]))
    for call, message in (
        (lambda: layer(torch.randn(4, H), [4, 0, 0, 0]), "has 99, and the layer has experts 0 to"),
        (lambda: fake_quantize(cast(Any, None)), "recipe must be a grouped_linear.Recipe, got No"),
        (lambda: fake_quantize(cast(Any, Float8BlockScaling)), "recipe is the class Float8Block"),
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
