# SPDX-License-Identifier: Apache-2.0
"""convert with another recipe for some of a model's experts, by patterns of their names."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from grouped_linear import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, convert
from grouped_linear.integrations.experts import experts_of
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.compare import assert_same_bits
from support.experts import GroupedExperts

FP8 = Float8BlockScaling()


def blocks() -> Any:
    torch.manual_seed(0)
    return nn.ModuleList(GroupedExperts(2, 32, 32) for _ in range(3))


def qwen() -> Any:
    pytest.importorskip("transformers", reason="needs transformers")
    from support.hugging_face import tiny

    torch.manual_seed(0)
    return tiny("qwen3_moe", num_hidden_layers=3, moe_intermediate_size=64)


def test_the_last_pattern_that_matches_counts() -> None:
    model = blocks()
    patterns = {"*": Float8CurrentScaling(), "1": None}
    found = convert(model, FP8, recipes=patterns)
    assert [experts_of(module).recipe for module in model] == [
        Float8CurrentScaling(),
        None,
        Float8CurrentScaling(),
    ]
    assert dict(found.recipes) == patterns
    assert "recipe of 1: None" in str(found).splitlines()


def test_hugging_face_layers_have_their_own() -> None:
    """Each layer's experts give the bits of a model converted with that recipe alone."""
    recipes = {"model.layers.0.*": None, "model.layers.2.*": Float8CurrentScaling()}
    model = qwen()
    convert(model, FP8, recipes=recipes)
    x = torch.randn(10, 32)
    weights, chosen = torch.rand(10, 4).topk(2)
    for i, recipe in enumerate((None, FP8, Float8CurrentScaling())):
        alone = qwen()
        convert(alone, recipe)
        experts = [m.model.layers[i].mlp.experts for m in (model, alone)]
        assert_same_bits(*(one(x, chosen, weights) for one in experts))
        torch._dynamo.reset()
        compiled = torch.compile(experts[0], backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(x, chosen, weights), experts[1](x, chosen, weights))
    copied = copy.deepcopy(model)
    tokens = torch.arange(8)[None]
    assert_same_bits(copied(tokens).logits, model(tokens).logits)
    convert(model, FP8)  # without patterns: one recipe for all
    alone = qwen()
    convert(alone, FP8)
    assert_same_bits(model(tokens).logits, alone(tokens).logits)


@pytest.mark.parametrize("weights", ["both", "fp8", "mxfp4"])
def test_without_a_recipe_weights_stay_plain(weights: Any) -> None:
    model = qwen()
    convert(model, FP8, weights=weights, recipes={"model.layers.0.*": None})

    def is_kept(w: Any) -> bool:
        return (
            isinstance(w, GroupedTensorWithMaster) if weights == "both" else w.dtype == torch.uint8
        )

    assert [is_kept(m.mlp.experts.down_proj) for m in model.model.layers] == [False, True, True]
    model(torch.arange(8)[None]).logits.sum().backward()
    model = blocks()
    convert(model, FP8, weights=weights, recipes={"0": None})
    assert [is_kept(experts.w2_EDF) for experts in model] == [False, True, True]


def test_wrong_patterns_and_recipes() -> None:
    model = blocks()
    before = copy.deepcopy(model.state_dict())

    def refused(recipes: Any, **options: Any) -> str:
        with pytest.raises(ValueError, match=r"^convert: ") as error:
            convert(model, FP8, recipes=recipes, **options)
        return str(error.value)

    assert refused({"layers.0.*": None, "1": None}) == (
        "convert: no experts have a name that matches 'layers.0.*' of recipes: names are whole, as "
        "'0'"
    )
    maps = "convert: recipes must map patterns of names to recipes, as {'model.layers.0.*': None}"
    assert refused([("1", None)]) == f"{maps}, got list: recipe= is that of all experts"
    assert refused(FP8) == f"{maps}, got Float8BlockScaling: recipe= is that of all experts"
    assert refused({1: None}) == "convert: a pattern of recipes must be a string, got 1"
    assert refused({"1": "fp8"}).startswith("convert: recipes['1']: recipe must be None or")
    assert refused({"1": DelayedScaling()}, weights="fp8").startswith(
        "convert: recipes['1']: weights='fp8' needs the recipe Float8BlockScaling, got Delayed"
    )
    assert type(model[0]) is GroupedExperts
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match=r"^convert: DelayedScaling keeps scales from step"):
        convert(qwen(), FP8, recipes={"model.layers.0.*": DelayedScaling()})
