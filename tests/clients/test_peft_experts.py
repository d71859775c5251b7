"""PEFT's adapters on experts, grouped: beside PEFT's own result, which makes all weights again."""

import copy
import doctest
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from grouped_linear import Float8BlockScaling, GroupedTensor, convert
from support.compare import assert_same_bits, bits
from support.documents import ROOT, examples

pytest.importorskip("peft")
import peft

import grouped_linear.integrations.peft
from grouped_linear.integrations.peft import use_grouped_adapters
from support.adapters import (
    DOWN,
    EXPERTS,
    GATE_UP,
    MODELS,
    NewWeights,
    assert_close,
    config_of,
    grouped,
    logits,
    mixtral,
    model_of,
    randomize,
    results,
    weights_of,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "both": {},
    "gate_up alone": {"parameters": [GATE_UP]},
    "down alone": {"parameters": [DOWN]},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"layers.1.mlp.experts.gate_up_proj": 7, "q_proj": 2},
        "alpha_pattern": {"layers.0.mlp.experts.down_proj": 3},
    },
    "router too": {"parameters": [*EXPERTS, "mlp.gate.weight"]},
}


@pytest.mark.parametrize("order", ["convert first", "convert last"])
@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, "both") for name in MODELS), *(("Mixtral", config) for config in CONFIGS)],
)
def test_as_peft(name: str, config: str, order: str) -> None:
    """In float32, so that nothing but the order of sums differs."""
    theirs = peft.get_peft_model(model_of(name), config_of(**CONFIGS[config]))
    randomize(theirs)
    ours = grouped(model_of(name), config_of(**CONFIGS[config]), order=order)
    assert_close(results(ours), results(theirs), 1e-4)


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
@pytest.mark.parametrize("weights", [None, "fp8", "both"])
def test_over_fp8(weights: Any, name: str) -> None:
    """The experts' weights are those that the recipe makes; e4m3 activations are what differs."""
    theirs = model_of(name)
    for parameter_name, p in theirs.named_parameters():
        if parameter_name.endswith(("gate_up_proj", "down_proj")):
            p.data.copy_(GroupedTensor.quantize(p.data).dequantize())
    theirs = peft.get_peft_model(theirs, config_of())
    randomize(theirs)
    ours = grouped(model_of(name), config_of(), Float8BlockScaling(), weights)
    base = [p for n, p in ours.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))]
    found = results(ours)
    assert_close(found, results(theirs), 0.1)
    assert len(base) == 4
    assert all(p.grad is None for p in base)
    assert all(isinstance(p, GroupedTensor) for p in base) == (weights is not None)


@pytest.mark.parametrize("weights", [None, "fp8", "both"])
def test_no_weights_are_made(weights: Any) -> None:
    theirs = peft.get_peft_model(model_of(), config_of())
    ours = grouped(model_of(), config_of(), Float8BlockScaling() if weights else None, weights)
    counts = []
    for model in (theirs, ours):
        with NewWeights(weights_of(model)) as made:
            results(model)
        counts.append(made.count)
    assert counts[0] >= 8  # of two layers, in the forward and in the backward
    assert counts[1] == 0


def test_compiled() -> None:
    """In one graph, which sees whether adapters are on, which, and how they are scaled."""
    model = grouped(mixtral(num_hidden_layers=1), config_of(), Float8BlockScaling(), "fp8")
    model.add_adapter("other", config_of(r=8))
    randomize(model)
    options = {"fullgraph": True, "backend": "aot_eager"}
    before = results(model)
    assert_close(results(model, **options), before, 1e-5)
    compiled = torch.compile(model, **options)
    for active in ("other", ["default", "other"]):
        model.base_model.set_adapter(active)
        assert not torch.equal(logits(model), before["logits"])
        assert_close({"": logits(compiled)}, {"": logits(model)}, 1e-5)
    for factor in (0.5, 3.0, 2.0):
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.scale_layer(factor)
        assert_close({"": logits(compiled)}, {"": logits(model)}, 1e-5)
    with model.disable_adapter():
        assert_close({"": logits(compiled)}, {"": logits(model)}, 1e-5)


def test_several_adapters() -> None:
    """Of different ranks and scalings, one after another and together, on and off."""
    models = []
    for convert_first in (None, True, False):
        if convert_first is None:
            model = peft.get_peft_model(model_of(), config_of())
        else:
            model = grouped(model_of(), config_of(), order="convert first" if convert_first else "")
        model.add_adapter("wide", config_of(r=12, use_rslora=True))
        model.add_adapter("narrow", config_of(r=1, lora_alpha=3))
        randomize(model)
        models.append(model)
    theirs, *ours = models
    base = logits(model_of())

    def check(tolerance: float = 1e-4) -> None:
        expected = results(theirs)
        assert not torch.allclose(expected["logits"], base, atol=0.01)
        for model in ours:
            assert_close(results(model), expected, tolerance)

    check()
    for active in ("wide", ["default", "wide"], ["narrow", "default", "wide"]):
        for model in models:
            model.base_model.set_adapter(active)
        check()
    for model in models:
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.scale_layer(0.5)
    check()
    for model in models:
        model.delete_adapter("wide")
        model.base_model.set_adapter(["narrow", "default"])
    check()
    for model in ours:
        with model.disable_adapter():
            torch.testing.assert_close(logits(model), base)
        torch.testing.assert_close(logits(model.unload()), base)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_files_are_those_of_peft(weights: Any, tmp_path: Path) -> None:
    """To plain PEFT over plain transformers and back, bit for bit."""
    ours = grouped(model_of(), config_of(use_rslora=True), Float8BlockScaling(), weights)
    ours.save_pretrained(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(model_of(), tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again = model_of()
    convert(again, Float8BlockScaling(), weights=weights)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "theirs")
    use_grouped_adapters(again)
    again.load_adapter(tmp_path / "ours", "second")
    again.save_pretrained(tmp_path / "again")
    names = "ours", "theirs", "again", "again/second"
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in names]
    assert len(files[0]) == 12
    for other in files[1:]:
        assert other.keys() == files[0].keys()
        for name, t in files[0].items():
            assert_same_bits(bits(other[name]), bits(t))
    expected = logits(ours)
    for adapter in ("default", "second"):
        again.set_adapter(adapter)
        assert torch.equal(logits(again), expected)


def test_without_a_peft_model() -> None:
    """Injected into the model, as transformers' ``add_adapter`` does."""
    models = model_of(), model_of()
    for model in models:
        peft.inject_adapter_in_model(config_of(), model)
        randomize(model)
    convert(models[1])
    assert_close(results(models[1]), results(models[0]), 1e-4)


def test_copies_and_pickles(tmp_path: Path) -> None:
    model = grouped(model_of(), config_of(target_modules=[]), weights="fp8")
    expected = logits(model)
    model.merge_adapter()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        one.unmerge_adapter()
        assert torch.equal(logits(one), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_prepared_and_checkpointed(reentrant: bool) -> None:
    """prepare_model_for_kbit_training, gradient checkpointing, and modules that learn beside."""
    found = []
    for checkpointed in (False, True):
        model = model_of().bfloat16()
        convert(model, weights="fp8")
        model = peft.prepare_model_for_kbit_training(model)  # casts; checkpointing is bitsandbytes'
        model = peft.get_peft_model(model, config_of(modules_to_save=["lm_head"]))
        use_grouped_adapters(model)
        randomize(model)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        found.append(results(model.train()))
    assert any("modules_to_save" in name for name in found[0])
    assert_close(found[1], found[0], 1e-6)


def test_autocast() -> None:
    """Adapters in float32 over weights in bf16, which is what PEFT makes of a model in bf16."""
    config = config_of(target_modules=[])
    theirs = peft.get_peft_model(model_of().bfloat16(), config)
    randomize(theirs)
    ours = grouped(model_of().bfloat16(), config)
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    assert_close(results(ours), results(theirs), 0.1)
    plain = grouped(model_of(), config)
    expected = results(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(results(plain), expected, 0.1)


def test_what_cannot_be() -> None:
    """One sentence, and a model that is as it was."""

    def refused(sentence: str, model: nn.Module, call: Any = use_grouped_adapters) -> None:
        classes = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=f"^{sentence}"):
            call(model)
        assert [type(module) for module in model.modules()] == classes

    model = model_of()
    convert(model)
    refused("use_grouped_adapters: MixtralForCausalLM has no adapter on experts", model)
    attention = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    refused("use_grouped_adapters: PeftModel has no adapter on experts", attention)
    sentence = (
        r"use_grouped_adapters: base_model\.\S+down_proj: the experts implementation 'grouped_mm'"
    )
    refused(sentence, peft.get_peft_model(model_of(), config_of()))

    for call in (convert, use_grouped_adapters):
        model = model_of("GPT-OSS")
        if call is use_grouped_adapters:
            convert(model)
        biases = config_of([DOWN, "mlp.experts.down_proj_bias"], target_modules=[])
        sentence = (
            rf"{call.__name__}: \S+down_proj_bias: GptOssExperts has adapters on down_proj_bias"
        )
        refused(sentence, peft.get_peft_model(model, biases), call)

    model = grouped(model_of(), config_of())
    for name in ("grouped_mm", "eager"):
        model.base_model.model.set_experts_implementation(name)
        with pytest.raises(ValueError, match=f"implementation '{name}' is not one of grouped_lin"):
            logits(model)
        with model.disable_adapter():
            logits(model)

    for option in ({"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}):
        model = model_of()
        convert(model)
        with pytest.raises(ValueError, match=r"ParamWrapper does not|Invalid or unsupp"):
            peft.get_peft_model(model, config_of(**option))


def test_trainer(dataset: Any, tmp_path: Path) -> None:
    """transformers' Trainer: experts' adapters learn as PEFT's own do, and the base does not."""
    found = []
    for ours in (False, True):
        if ours:
            model = grouped(model_of(), config_of())
        else:
            model = peft.get_peft_model(model_of(), config_of())
            randomize(model)
        before, adapters = weights_of(model), peft.get_peft_model_state_dict(model)
        adapters = {name: t.clone() for name, t in adapters.items()}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(ours)),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
        trainer.train()
        torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        saved = load_file(tmp_path / str(ours) / "checkpoint-4" / "adapter_model.safetensors")
        assert saved.keys() == adapters.keys()
        assert not any(torch.equal(t, adapters[name]) for name, t in saved.items())
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_documentation() -> None:
    """Its examples, which need PEFT."""
    assert doctest.testmod(grouped_linear.integrations.peft).failed == 0
    names: dict[str, Any] = {}
    for example in examples((ROOT / "docs" / "fine_tuning.md").read_text()):
        exec(example, names)
