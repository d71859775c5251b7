# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters on experts, grouped: beside PEFT's own result, which makes all weights again."""

import copy
import doctest
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from grouped_linear import Float8BlockScaling, convert, ops
from grouped_linear.contrib import compare, record_routing, replay_routing, watch
from grouped_linear.quantized.frozen import dequantize_blocks
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.compare import assert_same_tensors
from support.documents import ROOT, examples
from support.gpt_oss import write_checkpoint

pytest.importorskip("peft")
import peft
from peft.tuners.lora import config as lora_config
from peft.utils.hotswap import hotswap_adapter

import grouped_linear.integrations.peft
from grouped_linear.integrations.peft import use_grouped_adapters
from grouped_linear.integrations.transformers import register
from support.adapters import (
    DOWN,
    EXPERTS,
    GATE_UP,
    IDS,
    MODELS,
    NewWeights,
    assert_close,
    checkpointed_results,
    config_of,
    grouped,
    logits,
    model_of,
    of_peft,
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
    "of some layers": {
        "parameters": ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    },
    "layers_to_transform": {"layers_to_transform": [1]},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
    "all-linear": {"target_modules": "all-linear"},
    "experts alone": {"target_modules": None},
    "exclude_modules": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj"]},
    "bias": {"bias": "all"},
    "trainable_token_indices": {"trainable_token_indices": [1, 2, 3]},
    "modules_to_save": {"modules_to_save": ["embed_tokens", "gate"], "ensure_weight_tying": True},
    "rank 256": {"r": 256},
    "negative alpha": {"lora_alpha": -1},
}


@pytest.mark.parametrize("order", ["convert first", "convert last"])
@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, "both") for name in MODELS), *(("Mixtral", config) for config in CONFIGS)],
)
def test_as_peft(name: str, config: str, order: str) -> None:
    """In float32, so that nothing but the order of sums differs."""
    theirs = of_peft(model_of(name), config_of(**CONFIGS[config]))
    ours = grouped(model_of(name), config_of(**CONFIGS[config]), order=order)
    assert_close(results(ours), results(theirs), 1e-4)


@pytest.mark.parametrize("order", ["convert first", "convert last"])
def test_a_configuration_of_two_models(order: str) -> None:
    model = model_of()
    theirs = peft.get_peft_model(type(model)(model.config), config_of())
    expected, held = logits(theirs), theirs.config
    ours = grouped(model, config_of(), Float8BlockScaling(), "fp8", order)
    assert torch.equal(logits(theirs), expected)
    for one in (theirs, ours):  # experts alone have a configuration of their own
        assert one.config is one.get_base_model().config is held
    assert getattr(held, "quantization_config", None) is None


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva"])
def test_initialized_as_by_peft(init: Any) -> None:
    """Of one seed, over weights of any kind; ways that look at a weight know no experts."""
    found = []
    for weights in ("not converted", None, "fp8", "both"):
        model = model_of()
        if weights != "not converted":
            convert(model, weights=weights)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config_of(init_lora_weights=init))
        if weights != "not converted":
            use_grouped_adapters(model)
        model.add_adapter("later", config_of(init_lora_weights=init))
        found.append({n: p.detach() for n, p in model.named_parameters() if ".lora_" in n})
    assert len(found[0]) == 2 * 2 * (2 * 2 + 2)
    for own in found[1:]:
        assert_same_tensors(own, found[0])


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (None, "Mixtral"),
        ("fp8", "Mixtral"),
        ("both", "Mixtral"),
        (None, "GPT-OSS"),
        ("both", "GPT-OSS"),
    ],
)
def test_over_fp8(weights: Any, name: str) -> None:
    """The experts' weights are those that the recipe makes; e4m3 activations are what differs."""
    theirs = model_of(name)
    for parameter_name, p in theirs.named_parameters():
        if parameter_name.endswith(("gate_up_proj", "down_proj")):
            q, scale, _ = ops.quantize_weight(p.data, columnwise=False)
            p.data.copy_(dequantize_blocks(q, scale, p.dtype))
    theirs = of_peft(theirs)
    ours = grouped(model_of(name), config_of(), Float8BlockScaling(), weights)
    base = [p for n, p in ours.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))]
    found = results(ours)
    assert_close(found, results(theirs), 0.1)
    assert len(base) == 4
    assert all(p.grad is None for p in base)
    assert all(isinstance(p, GroupedTensorWithMaster) for p in base) == (weights == "both")
    assert all(p.dtype == torch.uint8 for p in base) == (weights == "fp8")


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
    model = grouped(model_of(num_hidden_layers=1), config_of(), Float8BlockScaling(), "fp8")
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
        assert_same_tensors(other, files[0])
    expected = logits(ours)
    for adapter in ("default", "second"):
        again.set_adapter(adapter)
        assert torch.equal(logits(again), expected)


def test_one_warning_without_the_call() -> None:
    """PEFT alone makes all weights in each call, right and slow."""
    model = model_of()
    convert(model)
    model = of_peft(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        expected = logits(model)
        logits(model)
    said = [w for w in said if "use_grouped_adapters(model)" in str(w.message)]
    assert len(said) == 1
    use_grouped_adapters(model)
    with warnings.catch_warnings(action="error"):
        assert_close({"": logits(model)}, {"": expected}, 1e-4)


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
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(logits(one), expected)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_compared_and_watched(weights: Any) -> None:
    """By the plain model's names; of frozen weights the outputs and the gradients of x."""
    model = grouped(model_of(), config_of(), Float8BlockScaling(), weights).train()
    use_grouped_adapters(model, dropout=0.5)
    seen = watch(model)
    found = compare(model, lambda: model(input_ids=IDS, labels=IDS).loss.backward())
    layers = {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert {(d.layer, d.tensor) for d in found.differences} == {
        (layer, tensor) for layer in layers for tensor in ("output", "x")
    }
    assert all(0 < d.difference < 0.1 for d in found.differences)
    assert {load.layer for load in seen.read().loads} == layers


@pytest.mark.parametrize(
    "options",
    [
        {"parameters": [*EXPERTS, "mlp.gate.weight"]},
        {"parameters": [], "modules_to_save": ["gate"]},
        {"parameters": [], "modules_to_save": ["experts"]},
    ],
    ids=["LoRA on the router", "router", "experts"],
)
def test_routing_replay(options: Any) -> None:
    model = peft.get_peft_model(model_of(), config_of(**options))
    convert(model)
    routing = torch.stack([torch.randperm(4)[:2] for _ in range(2 * 12 * 2)]).view(2, 12, 2, 2)
    with replay_routing(model, routing), record_routing(model, 2, 12) as recording:
        results(model)
    assert torch.equal(recording.take(), routing.byte())
    if options.get("modules_to_save") == ["gate"]:
        with record_routing(model, 2, 12) as recording, model.disable_adapter():
            own = logits(model)
        with replay_routing(model, recording.take()), model.disable_adapter():
            assert torch.equal(logits(model), own)


@pytest.mark.parametrize("reentrant", [True, False])
def test_prepared_and_checkpointed(reentrant: bool) -> None:
    """prepare_model_for_kbit_training, gradient checkpointing, and modules that learn beside."""
    model = model_of().bfloat16()
    convert(model, weights="fp8")
    model = peft.prepare_model_for_kbit_training(model)  # casts; checkpointing is bitsandbytes'
    model = peft.get_peft_model(model, config_of(modules_to_save=["lm_head"]))
    use_grouped_adapters(model)
    randomize(model)
    assert any("modules_to_save" in name for name in checkpointed_results(model, reentrant))


def test_autocast() -> None:
    """Adapters in float32 over weights in bf16, which is what PEFT makes of a model in bf16."""
    config = config_of(target_modules=[])
    theirs = of_peft(model_of().bfloat16(), config)
    ours = grouped(model_of().bfloat16(), config)
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    assert_close(results(ours), results(theirs), 0.1)
    plain = grouped(model_of(), config)
    expected = results(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(results(plain), expected, 0.1)


def test_adapters_in_other_16_bits_than_autocasts() -> None:
    """Two at once, which torch.cat refuses under autocast."""
    model = grouped(model_of(), config_of(target_modules=[]))
    model.add_adapter("wide", config_of(target_modules=[], r=12))
    model.base_model.set_adapter(["default", "wide"])
    randomize(model)
    expected = results(model)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.half()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(results(model), expected, 0.1)


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
    sentence = r"use_grouped_adapters: model\.\S+down_proj: the experts implementation 'grouped_mm'"
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

    register()
    by_name, converted = model_of(), grouped(model_of(), config_of())
    by_name.set_experts_implementation("grouped_linear")
    model, expected = peft.get_peft_model(by_name, config_of()), logits(converted)
    use_grouped_adapters(model)
    for name in ("grouped_mm", "eager"):
        converted.base_model.model.set_experts_implementation(name)  # which does not reach them
        assert torch.equal(logits(converted), expected)
        by_name.set_experts_implementation(name)
        with pytest.raises(ValueError, match=f"implementation '{name}' is not one of grouped_lin"):
            logits(model)
        with model.disable_adapter():
            logits(model)

    for option in ({"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}):
        model = model_of()
        convert(model)
        with pytest.raises(ValueError, match=r"ParamWrapper does not|Invalid or unsupp"):
            peft.get_peft_model(model, config_of(**option))


LATER: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "dropout": {"lora_dropout": 0.1},
    "biases": {"lora_bias": True},
    "aLoRA": {"alora_invocation_tokens": [3]},
    "BD-LoRA": {"use_bdlora": lora_config.BdLoraConfig(["q_proj"], match_strict=False)},
    "VeLoRA": {"velora_config": lora_config.VeloraConfig()},
    "MonteCLoRA": {"monteclora_config": lora_config.MontecloraConfig()},
    "KaSA": {"kasa_config": lora_config.KasaConfig()},
    "MiCA": {"init_lora_weights": "mica"},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "CorDA": {"init_lora_weights": "corda"},
    "LoRA-GA": {"init_lora_weights": "lora_ga"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "rank": {"r": 257},
    "rank of a pattern": {"rank_pattern": {"down_proj": 300}},
    "other parameters": {"parameters": [DOWN]},
}


@pytest.mark.parametrize("option", LATER)
def test_an_adapter_that_experts_cannot_have(option: str) -> None:
    """Refused when it is added, before any layer has some of it; PEFT's PiSSA writes weights."""
    model = grouped(model_of(), config_of())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"^(add_adapter: \S+ |KaSA|When using multiple adapters)"):
        model.add_adapter("later", config_of(**LATER[option]))
    assert list(model.peft_config) == ["default"]
    after = model.state_dict()
    assert_same_tensors(after, before)
    results(model)


def test_mixed_batches() -> None:
    """Refused before anything is changed: PEFT's hooks would stay, and fail all later calls."""
    model = grouped(model_of(), config_of())
    model.add_adapter("other", config_of())
    expected = logits(model)
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=r"^adapter_names: adapters on experts are those of"):
            call(input_ids=IDS, adapter_names=["default", "other"])
        assert torch.equal(logits(model), expected)


def test_weighted_adapters() -> None:
    """Sums of adapters, which PEFT makes of linear layers alone, beside an adapter on experts."""
    found = []
    for ours in (False, True):
        model = grouped(model_of(), config_of()) if ours else None
        model = model or peft.get_peft_model(model_of(), config_of())
        for name, rank in (("a", 4), ("b", 2)):
            model.add_adapter(name, peft.LoraConfig(r=rank, target_modules=["q_proj"]))
        randomize(model)
        before = logits(model)
        with pytest.raises(ValueError, match=r"does not support targeting nn\.Parameter"):
            model.add_weighted_adapter(["default", "a"], [0.5, 0.5], "sum")
        assert torch.equal(logits(model), before)
        model.add_weighted_adapter(["a", "b"], [0.3, 0.7], "sum", combination_type="cat")
        outputs = {}
        for active in ("sum", ["sum", "default"]):
            model.base_model.set_adapter(active)
            outputs[str(active)] = logits(model)
        found.append(outputs)
    assert_close(found[1], found[0], 1e-5)


@pytest.mark.parametrize("rank", [4, 8])
def test_hotswap(rank: int, tmp_path: Path) -> None:
    """Of the same rank or a higher one; PEFT puts a lower one in the wrong rows of experts."""
    other = of_peft(model_of(), config_of(r=rank, lora_alpha=5))
    other.save_pretrained(tmp_path)
    model = grouped(model_of(), config_of())
    assert not torch.allclose(logits(model), logits(other), atol=0.01)
    hotswap_adapter(model, str(tmp_path), "default", torch_device="cpu")
    assert_close({"": logits(model)}, {"": logits(other)}, 1e-5)


@pytest.mark.parametrize("order", ["convert first", "convert last"])
@pytest.mark.parametrize("weights", [None, "both"])
def test_experts_to_save(weights: Any, order: str, tmp_path: Path) -> None:
    """A copy of the experts that learns whole, and is converted as they are, and counted once."""
    model, config = model_of(), config_of([], modules_to_save=["experts"])
    if order == "convert first":
        convert(model, weights=weights)
        model = peft.get_peft_model(model, config)
    else:
        model = peft.get_peft_model(model, config)
        report = convert(model, weights=weights)
        assert {one.form for one in report.converted} == {"MixtralExperts"}
        assert len(report.converted) == 2 * 2
    before = weights_of(model)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2, fused=True)
    for _ in range(2):
        results(model)
        optimizer.step()
    after = weights_of(model)
    assert len(after) == 2 * 2 * 2
    for name, w in after.items():
        assert torch.equal(w, before[name]) == (".original_module." in name), name
    model.save_pretrained(tmp_path)
    again = model_of()
    convert(again, weights=weights)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert_close({"": logits(model.merge_and_unload())}, {"": logits(again)}, 1e-5)


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_frozen_experts_are_not_to_save(weights: Any) -> None:
    model = peft.get_peft_model(model_of(), config_of([], modules_to_save=["experts"]))
    with pytest.raises(ValueError, match=r"is in PEFT's modules_to_save and learns whole, as no"):
        convert(model, weights=weights)
    with model.disable_adapter():  # asks gradients of those that were copied
        logits(model)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_dropout(weights: Any) -> None:
    """The mask is one of the adapter's input: W x + scaling B A (mask x), in training alone."""
    model = grouped(model_of(), config_of([GATE_UP], target_modules=["q_proj"]), weights=weights)
    before = logits(model)
    for wrong in (1.0, -0.1, "0.1"):
        with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1"):
            use_grouped_adapters(model, dropout=wrong)
    use_grouped_adapters(model, dropout=0.5)
    attention = model.base_model.model.model.layers[0].self_attn.q_proj
    assert attention.lora_dropout["default"].p == 0.5
    model.eval()
    assert torch.equal(logits(model), before)
    model.train()
    assert not torch.allclose(logits(model), before, atol=1e-3)

    wrapper = model.base_model.model.model.layers[0].mlp.experts
    x, scores = torch.randn(40, 32, requires_grad=True), torch.ones(40, 1)
    chosen = torch.randint(4, (40, 1))
    torch.manual_seed(4)
    y = wrapper(x, chosen, scores)
    torch.manual_seed(4)
    own = wrapper.factors("default")
    assert own.dropout == 0.5
    masked = nn.functional.dropout(x, 0.5)
    experts, e = wrapper.get_base_layer(), chosen.flatten()
    of_experts = (getattr(experts, name) for name in ("gate_up_proj", "down_proj"))
    gate_up, down = (p.detach().dequantize() if weights == "both" else p for p in of_experts)
    if weights == "fp8":
        gate_up, down = map(experts.dequantize, ("gate_up_proj", "down_proj"))
    expected = torch.einsum("th,tgh->tg", x, gate_up[e]) + own.scaling * torch.einsum(
        "th,trh,tgr->tg", masked, own.a[e], own.b[e]
    )
    gate, up = expected.chunk(2, dim=-1)
    expected = torch.einsum("tf,thf->th", experts.act_fn(gate) * up, down[e])
    assert_close({"": y}, {"": expected}, 1e-5 if weights is None else 0.1)
    results(model.train())
    model.add_adapter("other", config_of([GATE_UP]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="active together must have one dropout, got"):
        logits(model)
    use_grouped_adapters(model, dropout=0.0)
    assert torch.equal(logits(model), logits(model.eval()))


def test_the_documentation(tmp_path: Path) -> None:
    """Its examples, which need PEFT."""
    tiny = str(write_checkpoint(tmp_path / "gpt_oss"))
    assert doctest.testmod(grouped_linear.integrations.peft).failed == 0
    names: dict[str, Any] = {}
    for example in examples((ROOT / "docs" / "fine_tuning.md").read_text()):
        exec(example.replace("openai/gpt-oss-20b", tiny), names)
