# SPDX-License-Identifier: Apache-2.0
"""Models that are made of one configuration object: convert changes that which it is given alone.

transformers reads the choice of experts from the configuration in every forward.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from grouped_linear import Float8BlockScaling, convert
from support.compare import assert_same_bits
from support.errors import sentence
from support.hugging_face import tiny, tokens

FP8 = Float8BlockScaling()
NAME = f"grouped_linear {FP8!r}"
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = tokens("cpu", 2, 7)


def mixtral(F: int = 64) -> Any:
    sizes = {"num_hidden_layers": 2, "intermediate_size": F, "moe_intermediate_size": F}
    return tiny("mixtral", **sizes).eval()


def of_images_and_text() -> Any:
    """A model whose configuration holds that of its language model, in which the experts are."""
    text = {**SIZES, "vocab_size": 64, "hidden_size": 32, "head_dim": 16, "num_experts": 4}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    image = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    image |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=image)
    return Qwen3VLMoeForConditionalGeneration(config).eval()


MODELS = {"mixtral": mixtral, "images and text": of_images_and_text}


def twin_of(model: Any) -> Any:
    """A model of the same configuration object, with the same weights."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def configs_of(model: nn.Module) -> dict[int, PreTrainedConfig]:
    """All that its modules hold, and those inside of them, by address."""
    held = [c for m in model.modules() for c in vars(m).values() if isinstance(c, PreTrainedConfig)]
    inside = [c for one in held for c in vars(one).values() if isinstance(c, PreTrainedConfig)]
    return {id(c): c for c in held + inside}


def choices_of(model: Any) -> dict[str, Any]:
    return {n: m.config._experts_implementation for n, m in model.named_modules() if has_config(m)}


def has_config(module: nn.Module) -> bool:
    return "config" in vars(module)


@pytest.mark.parametrize("weights", [None, "both", "fp8", "mxfp4"])
@pytest.mark.parametrize("of", MODELS)
def test_another_model_keeps_its_bits(of: str, weights: Any) -> None:
    model = MODELS[of]()
    config, described = model.config, model.config.to_dict()
    other = twin_of(model)
    expected = logits(other)
    convert(model, FP8, weights=weights)
    assert not torch.equal(logits(model), expected)
    assert_same_bits(logits(other), expected)
    assert other.config is config
    assert config.to_dict() == described
    assert_same_bits(logits(twin_of(other)), expected)
    assert not configs_of(model).keys() & configs_of(other).keys()


@pytest.mark.parametrize("of", MODELS)
def test_a_model_has_one_configuration(of: str) -> None:
    """And its name reaches all of it, as that which generate chooses for a while."""
    model = MODELS[of]()
    before = configs_of(model)
    convert(model, FP8)
    assert len(configs_of(model)) == len(before)
    expected = logits(model)
    named = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    assert not torch.equal(logits(model), expected)
    model.set_experts_implementation(named)
    assert_same_bits(logits(model), expected)


def test_a_configuration_that_was_converted() -> None:
    """Whoever makes a model of it has asked for these experts, and keeps them."""
    model = mixtral()
    convert(model, FP8)
    other, expected = twin_of(model), logits(model)
    assert_same_bits(logits(other), expected)
    convert(model)
    assert not torch.equal(logits(model), expected)
    assert_same_bits(logits(other), expected)


def test_both_at_once() -> None:
    model = mixtral()
    both = nn.ModuleList([model, twin_of(model)])
    convert(both, FP8)
    assert_same_bits(logits(both[0]), logits(both[1]))
    assert both[0].config is both[1].config  # as before


def test_what_is_refused_keeps_its_configuration() -> None:
    model = mixtral()
    held, other = configs_of(model), twin_of(model)
    both = nn.ModuleList([model, mixtral(F=72)])
    assert "multiples of 16" in sentence(lambda: convert(both, FP8))
    assert configs_of(model) == held == configs_of(other)
    model.config.lock = (i for i in "of a kind that no copy is made of")
    with pytest.raises(TypeError, match="generator"):
        convert(model, FP8)
    assert configs_of(model) == held
    assert choices_of(model) == choices_of(other)


@pytest.mark.parametrize("part", ["model", "lm_head and layers"])
def test_a_part(part: str) -> None:
    """The rest of the model computes as before, and so does another."""
    model = mixtral()
    other = twin_of(model)
    expected = logits(other)
    whole = copy.deepcopy(model)
    convert(whole, FP8)
    if part == "model":
        convert(model.model, FP8)
        assert_same_bits(logits(model), logits(whole))
        model.set_experts_implementation("eager")
        assert set(choices_of(model).values()) == {"eager"}
    else:
        first, second = model.model.layers
        convert(first, FP8)
        assert set(choices_of(first).values()) == {NAME}
        assert not {NAME} & {*choices_of(second).values(), *choices_of(model.lm_head).values()}
        assert model.config is model.model.config is second.mlp.experts.config
        assert not torch.equal(logits(model), expected)
        assert not torch.equal(logits(model), logits(whole))
        convert(second, FP8)
        assert_same_bits(logits(model), logits(whole))
    assert_same_bits(logits(other), expected)


def test_a_language_model_inside_of_another() -> None:
    """``generate`` on a GPU sets all names for a while and puts those back that it has read."""
    model = of_images_and_text()
    other, whole = twin_of(model), copy.deepcopy(model)
    before = logits(other)
    convert(whole, FP8)
    language_model = model.model.language_model
    convert(language_model, FP8)
    assert model.config.text_config is language_model.config
    expected = logits(model)
    assert_same_bits(expected, logits(whole))
    model.set_experts_implementation(model.get_experts_implementation())
    assert_same_bits(logits(model), expected)
    assert_same_bits(logits(other), before)


@pytest.mark.parametrize("part", ["model", "model.layers.1", "model.layers.1.mlp.experts"])
def test_a_part_in_fp8_is_saved_as_such(part: str, tmp_path: Path) -> None:
    """tests/clients/test_fp8_checkpoint.py loads it."""
    model = mixtral(F=128)
    other = twin_of(model)
    convert(model.get_submodule(part), FP8, weights="fp8")
    for name, saved in (("model", model), ("other", other)):
        saved.save_pretrained(tmp_path / name)
    found = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("model", "other")]
    assert "quantization_config" not in found[1]
    skipped = found[0]["quantization_config"]["modules_to_not_convert"]
    high = {f"model.layers.{i}.mlp.experts" for i in (0, 1)} & {*skipped}
    assert high == (set() if part == "model" else {"model.layers.0.mlp.experts"})


def test_others_that_hold_the_experts(tmp_path: Path) -> None:
    """Another model, and a wrapper, as PEFT's and TRL's; a failed __init__ has left a module."""
    model = mixtral(F=128)
    other = twin_of(model)
    other.model = model.model
    wrapper: Any = nn.Module()
    wrapper.inside, wrapper.config = model, model.config
    half_made = nn.Module.__new__(type(model))
    convert(model, FP8, weights="fp8")
    assert wrapper.config is other.config is model.config is model.model.config
    other.save_pretrained(tmp_path)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
    other.set_experts_implementation("eager")
    assert set(choices_of(other).values()) == {"eager"}
    del half_made


def test_compiled_before() -> None:
    model = mixtral()
    other = twin_of(model)
    for one in (model, other):
        one.set_experts_implementation("grouped_mm")
    compiled = torch.compile(model, backend="eager")
    of_other = torch.compile(other, backend="eager")
    before = logits(compiled), logits(of_other)
    convert(model, FP8)
    assert_same_bits(logits(compiled), logits(model))
    assert not torch.equal(logits(compiled), before[0])
    assert_same_bits(logits(of_other), before[1])
