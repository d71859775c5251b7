# SPDX-License-Identifier: Apache-2.0
"""Configurations of transformers' models: convert changes none, so others that share one stay.

transformers reads the choice of experts from the configuration in every forward. Converted experts
have a configuration of their own.
"""

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from grouped_linear import Float8BlockScaling, convert
from grouped_linear.integrations.transformers import register
from support.compare import assert_same_bits, assert_same_tensors
from support.errors import sentence
from support.hugging_face import tiny, tokens

FP8 = Float8BlockScaling()
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
    assert other.config is model.config is config
    assert config.to_dict() == described
    assert_same_bits(logits(twin_of(other)), expected)


@pytest.mark.parametrize("of", MODELS)
def test_names_reach_what_is_not_converted(of: str) -> None:
    """``generate`` on a GPU sets all names for a while."""
    model = MODELS[of]()
    other = twin_of(model)
    convert(model, FP8)
    expected, before = logits(model), logits(other)
    named = model.get_experts_implementation()
    register("grouped_linear_fp8", FP8)
    model.set_experts_implementation("grouped_linear_fp8")  # of all that share the configuration
    assert_same_bits(logits(model), expected)
    assert not torch.equal(logits(other), before)
    model.set_experts_implementation(named)
    assert_same_bits(logits(other), before)


def test_both_at_once_and_again() -> None:
    model = mixtral()
    both = nn.ModuleList([model, twin_of(model)])
    convert(both, FP8)
    expected = logits(both[0])
    assert_same_bits(logits(both[1]), expected)
    convert(model)
    assert not torch.equal(logits(model), expected)
    assert_same_bits(logits(both[1]), expected)


def test_what_is_refused_keeps_its_configuration() -> None:
    model = mixtral()
    experts = [layer.mlp.experts for layer in model.model.layers]
    both = nn.ModuleList([model, mixtral(F=72)])
    assert "multiple of 16" in sentence(lambda: convert(both, FP8))
    assert all(one.config is model.config for one in experts)
    model.config.lock = (i for i in "of a kind that no copy is made of")
    convert(model, FP8)
    assert all(one.config.lock is model.config.lock for one in experts)


@pytest.mark.parametrize("part", ["model", "model.layers.0", "model.layers.0.mlp.experts"])
def test_a_part(part: str) -> None:
    """The rest of the model computes as before, and so does another."""
    model = mixtral()
    other, whole = twin_of(model), copy.deepcopy(model)
    expected = logits(other)
    convert(whole, FP8)
    convert(model.get_submodule(part), FP8)
    assert torch.equal(logits(model), logits(whole)) == (part == "model")
    assert not torch.equal(logits(model), expected)
    convert(model.model.layers[1], FP8)
    assert_same_bits(logits(model), logits(whole))
    assert_same_bits(logits(other), expected)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("part", ["model", "model.layers.1", "model.layers.1.mlp.experts"])
def test_a_part_in_fp8(part: str, hidden: bool, tmp_path: Path) -> None:
    """What holds it is saved only where its config.json can say so, whatever the collector sees."""
    model = mixtral(F=128)
    other = twin_of(model)
    if hidden:
        gc.freeze()
    convert(model.get_submodule(part), FP8, weights="fp8")
    gc.unfreeze()
    first = 0 if part == "model" else 1
    assert sentence(lambda: model.save_pretrained(tmp_path / "refused")) == (
        f"save_pretrained: model.layers.{first}.mlp.experts is in few bits since a part of this "
        "model was converted, and its config.json would not say so: call convert(model, recipe) of "
        "the whole model before, which leaves weights as they are"
    )
    assert not [*tmp_path.glob("refused/*.safetensors")]
    before, state = model.config.to_dict(), model.state_dict()
    convert(model, FP8)
    saved = {"model": model, "copy": copy.deepcopy(model), "other": other}
    if part == "model":  # alone it is a model that convert was given
        saved["part"] = model.model
    found = {}
    for name, one in saved.items():
        one.save_pretrained(tmp_path / name)
        described = json.loads((tmp_path / name / "config.json").read_text())
        found[name] = described.get("quantization_config")
    assert found["other"] is None
    assert found["model"] == found["copy"]
    skipped = found["model"]["modules_to_not_convert"]
    high = {f"model.layers.{i}.mlp.experts" for i in (0, 1)} & {*skipped}
    assert high == (set() if part == "model" else {"model.layers.0.mlp.experts"})
    assert "quantization_config" not in model.config.to_dict()
    assert before.keys() <= model.config.to_dict().keys()
    assert_same_tensors(model.state_dict(), state)


def test_a_forward_of_the_instance() -> None:
    """As accelerate's hooks and expert parallelism put one there: it calls the class's."""
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    called, before = [], experts.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return before(*args, **kwargs)

    experts.forward = forward
    whole = twin_of(model)
    convert(model, FP8)
    convert(whole, FP8)
    assert_same_bits(logits(model), logits(whole))
    assert called


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
