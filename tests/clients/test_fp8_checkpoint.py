# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in FP8, linear layers too: loaded, frozen, saved, and adapters on it."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations import finegrained_fp8

from grouped_linear import Float8BlockScaling, convert
from support.compare import assert_same_bits, assert_same_tensors, bits

pytest.importorskip("accelerate")  # what loads in FP8 needs it
pytest.importorskip("peft")
import peft

from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors
from grouped_linear.integrations.peft import use_grouped_adapters
from support.adapters import (
    EXPERTS,
    IDS,
    assert_close,
    checkpointed_results,
    config_of,
    deepseek,
    fp8_linear,
    grouped,
    logits,
    make_fp8_checkpoint,
    of_peft,
    qwen3_of_blocks,
    results,
)
from support.adapters import from_fp8_checkpoint as from_pretrained
from support.trainer import losses, trainer_of

RECIPE = Float8BlockScaling()
# Two in each layer of attention.
ADAPTERS = {"target_modules": ["q_proj", "v_proj", "q_b_proj", "kv_a_proj_with_mqa"], "r": 4}
MODELS = {"Qwen3-MoE": qwen3_of_blocks, "DeepSeek-V3": deepseek}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fp8_checkpoint(tmp_path_factory.mktemp("checkpoint"), MODELS[request.param])


@pytest.fixture(autouse=True)
def linear_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)


def adapted(model: Any, weights: Any) -> Any:
    return grouped(model, config_of(**ADAPTERS), RECIPE, weights, order="convert first")


def experts_of(model: Any) -> Iterator[Any]:
    return (m.mlp.experts for m in model.model.layers if hasattr(m.mlp, "experts"))


def assert_same_file(one: Path, other: Path) -> None:
    files = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert_same_tensors(files[0], files[1])


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_adapters_by_trainer(folder: Path, weights: Any, dataset: Any, tmp_path: Path) -> None:
    """On attention and experts: they learn, are saved, loaded, and generate."""
    base = from_pretrained(folder)
    convert(base, RECIPE, weights=weights)
    plain = logits(base)
    before = {name: t.clone() for name, t in base.state_dict().items()}
    model = peft.get_peft_model(base, config_of(**ADAPTERS))
    assert len(use_grouped_adapters(model)) == 4
    trainer = trainer_of(model, dataset, tmp_path, max_steps=3)
    trainer.train()
    assert torch.tensor(losses(trainer)).isfinite().all()
    learned = {n: p for n, p in model.named_parameters() if ".lora_B." in n}
    assert len(learned) == 2 * (len(base.model.layers) + 2)
    assert all(p.any() for p in learned.values())
    model.save_pretrained(tmp_path / "adapter")
    expected, tokens = logits(model.eval()), model.generate(input_ids=IDS, max_new_tokens=4)
    assert not torch.allclose(expected, plain, atol=1e-3)

    after = model.unload().state_dict()
    assert_same_tensors(after, before)

    loaded = from_pretrained(folder)
    convert(loaded, RECIPE, weights=weights)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    use_grouped_adapters(loaded)
    assert torch.equal(logits(loaded.eval()), expected)
    assert torch.equal(loaded.generate(input_ids=IDS, max_new_tokens=4), tokens)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_merged_without_rounding_to_fp8(folder: Path, weights: Any, tmp_path: Path) -> None:
    """In a model that is loaded without FP8."""
    model = from_pretrained(folder)
    convert(model, RECIPE, weights=weights)
    model = of_peft(model, config_of(**ADAPTERS))
    model.save_pretrained(tmp_path)
    config = transformers.FineGrainedFP8Config(dequantize=True)
    plain = from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    convert(plain)
    plain = peft.PeftModel.from_pretrained(plain, tmp_path)
    use_grouped_adapters(plain)
    expected = logits(plain)
    assert_close({"": logits(plain.merge_and_unload())}, {"": expected}, 1e-5)


@pytest.mark.parametrize("parameter", EXPERTS)
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_adapters_without_the_call(folder: Path, weights: Any, parameter: str) -> None:
    """PEFT adds them to e4m3 numbers without their scales: an error in place of wrong numbers."""
    model = from_pretrained(folder)
    convert(model, RECIPE, weights=weights)
    model = peft.get_peft_model(model, config_of([parameter]))
    with pytest.raises(ValueError, match=r"are parametrized.*then \S+use_grouped_adapters"):
        logits(model)
    with model.disable_adapter():
        logits(model)
    use_grouped_adapters(model)
    logits(model)


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(folder: Path, reentrant: bool, weights: Any) -> None:
    """The backward makes activations again."""
    checkpointed_results(adapted(from_pretrained(folder), weights), reentrant)


@pytest.mark.parametrize("folder", ["Qwen3-MoE"], indirect=True)
@pytest.mark.parametrize("weights", [None, "fp8"])
def test_compiled(folder: Path, weights: Any) -> None:
    """In one graph."""
    model = adapted(from_pretrained(folder, num_hidden_layers=1), weights)
    expected = results(model)
    assert_close(results(model, fullgraph=True, backend="aot_eager"), expected, 1e-4)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_adapters_by_trainer_resumed(
    folder: Path, weights: Any, dataset: Any, tmp_path: Path
) -> None:
    """In bf16, checkpointed, fused, in small batches: a run goes on from its first checkpoint."""
    options = {"max_steps": 4, "save_steps": 2, "bf16": True}
    options |= {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    found = []
    for resumed in (False, True):
        model = from_pretrained(folder, dtype=torch.bfloat16)
        convert(model, RECIPE, weights=weights)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config_of(**ADAPTERS))
        use_grouped_adapters(model)
        trainer = trainer_of(
            model, dataset, tmp_path / str(resumed), optim="adamw_torch_fused", **options
        )
        first = str(tmp_path / "False" / "checkpoint-2") if resumed else None
        trainer.train(resume_from_checkpoint=first)
        found.append(losses(trainer))
    assert found[1] == found[0]
    ends = [
        tmp_path / str(run) / "checkpoint-4" / "adapter_model.safetensors" for run in (False, True)
    ]
    files = [load_file(end) for end in ends]
    for name, t in files[0].items():
        assert_same_bits(files[1][name], t)


def test_numbers_without_their_scales(folder: Path) -> None:
    """A cast drops them: an error in place of wrong numbers; nothing casts frozen bytes."""
    model = from_pretrained(folder, dtype=torch.bfloat16)
    convert(model, RECIPE)
    experts = next(experts_of(model))
    x, chosen, scores = torch.randn(8, 128), torch.zeros(8, 1, dtype=torch.long), torch.ones(8, 1)
    expected = experts(x.bfloat16(), chosen, scores.bfloat16())
    with pytest.raises(
        ValueError, match=r"gate_up_proj float32 .*which convert\(weights='fp8'\) prevents"
    ):
        copy.deepcopy(experts).float()(x, chosen, scores)
    convert(model, RECIPE, weights="fp8")
    y = experts.float()(x, chosen, scores)
    assert_close({"": y}, {"": expected.float()}, 0.05)


def test_prepared_for_kbit_training(folder: Path) -> None:
    """Experts and linear layers keep their numbers and scales; all else is in float32 then."""
    for weights in (None, "fp8"):
        model = from_pretrained(folder, dtype=torch.bfloat16)
        convert(model, RECIPE, weights=weights)
        expected = logits(model).float()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        model = peft.prepare_model_for_kbit_training(model)
        for name, t in model.state_dict().items():
            assert_same_bits(bits(t), bits(before[name].to(t.dtype)))
            assert t.dtype != torch.bfloat16
        assert_close({"": logits(model)}, {"": expected}, 0.1)


def test_where_there_is_no_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers dequantizes all; experts go back to FP8, and are saved in it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not any(isinstance(module, finegrained_fp8.FP8Linear) for module in model.modules())
    before = [experts.down_proj.detach().clone() for experts in experts_of(model)]
    convert(model, RECIPE, weights="fp8")
    for experts, w in zip(experts_of(model), before, strict=True):
        assert_close({"": experts.dequantize("down_proj")}, {"": w}, 2**-5)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    convert(again, RECIPE, weights="fp8")
    for own, theirs in zip(experts_of(model), experts_of(again), strict=True):
        assert_same_bits(theirs.down_proj, own.down_proj)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_trainer_asks_for_adapters(
    weights: Any, folder: Path, dataset: Any, tmp_path: Path
) -> None:
    model = from_pretrained(folder)
    kept = "  frozen in FP8, " if weights == "fp8" else "  frozen in FP8 as loaded, "
    assert kept in str(convert(model, RECIPE, weights=weights))
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        trainer_of(model, dataset, tmp_path)


def test_it_saves_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, and the numbers in memory are those that were loaded, not a copy."""
    model = from_pretrained(folder)
    addresses = [experts.down_proj.data_ptr() for experts in experts_of(model)]
    convert(model, RECIPE)
    expected = logits(model)
    done = convert(model, RECIPE, weights="fp8")
    assert repr(convert(model, RECIPE, weights="fp8")) == repr(done)
    for experts, address in zip(experts_of(model), addresses, strict=True):
        assert {p.dtype for p in experts.parameters()} == {torch.uint8}
        assert experts.down_proj.data_ptr() == address
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert_same_file(tmp_path / "saved", folder)


def exponents(w: Tensor) -> Tensor:
    """Scales that are powers of two, as DeepSeek-V3.1's."""
    return w.log2().ceil().exp2()


def test_scales_that_are_exponents(folder: Path, tmp_path: Path) -> None:
    """transformers loads them as E8M0 bytes; in float32 they are the same numbers, and saved so."""
    shutil.copytree(folder, tmp_path / "published")
    file, config = (tmp_path / "published" / n for n in ("model.safetensors", "config.json"))
    state = load_file(file)
    state = {n: exponents(t) if n.endswith("_scale_inv") else t for n, t in state.items()}
    save_file(state, file, {"format": "pt"})
    found = {}
    for scale_fmt in ("float", "ue8m0"):
        described = json.loads(config.read_text())
        described["quantization_config"]["scale_fmt"] = scale_fmt
        config.write_text(json.dumps(described))
        model = from_pretrained(tmp_path / "published")
        scale = next(experts_of(model)).down_proj_scale_inv
        assert scale.dtype == (torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu)
        convert(model, RECIPE)
        found[scale_fmt] = logits(model)
        convert(model, weights="fp8")
        assert torch.equal(logits(model), found[scale_fmt])
        for name, t in CheckpointTensors(model):
            assert_same_bits(t.detach().float(), state[name].float())
        model.save_pretrained(tmp_path / scale_fmt)
        again = from_pretrained(tmp_path / scale_fmt)
        convert(again, RECIPE)
        assert torch.equal(logits(again), found[scale_fmt])
    assert torch.equal(found["ue8m0"], found["float"])


@pytest.mark.parametrize("in_fp8", [[0], [1], []])
def test_layers_in_high_precision(folder: Path, in_fp8: list[int], tmp_path: Path) -> None:
    """They join the others: what is saved and what a sampler gets load with the same numbers."""
    model = from_pretrained(folder)
    layers = [n for n, m in model.named_modules() if n.endswith(".experts")]
    high = [name for i, name in enumerate(layers) if i not in in_fp8]
    shutil.copytree(folder, tmp_path / "mixed")
    file, config = (tmp_path / "mixed" / n for n in ("model.safetensors", "config.json"))
    published = load_file(file)
    state = dict(published)
    for name in [n for n in state if n.startswith(tuple(f"{layer}." for layer in high))]:
        own = state.pop(name)
        if not name.endswith("_scale_inv"):
            scale = published[f"{name}_scale_inv"]
            state[name] = finegrained_fp8._dequantize_fp8_weight(
                own, scale, (128, 128), torch.float32
            )
    save_file(state, file, {"format": "pt"})
    described = json.loads(config.read_text())
    described["quantization_config"]["modules_to_not_convert"] = ["lm_head", *high]
    config.write_text(json.dumps(described))
    model = from_pretrained(tmp_path / "mixed")
    convert(model, RECIPE, weights="fp8")
    expected, tensors = logits(model), dict(CheckpointTensors(model))
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() == saved.keys() == published.keys()
    for name, t in saved.items():
        assert_same_bits(bits(tensors[name].detach()), bits(t))
    again = from_pretrained(tmp_path / "saved")
    assert not any(n in layers for n in again.config.quantization_config.modules_to_not_convert)
    for experts in experts_of(again):
        assert type(experts).__name__ == "FP8Experts"
    convert(again, RECIPE)
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("part", ["model", "model.layers.1.mlp.experts"])
def test_a_part_that_was_frozen_alone(part: str, tmp_path: Path) -> None:
    """The whole model's checkpoint says which experts are in FP8, once convert has seen it."""
    model = qwen3_of_blocks()
    convert(model.get_submodule(part), RECIPE, weights="fp8")
    with pytest.raises(ValueError, match="is in few bits since a part of this model was converted"):
        model.save_pretrained(tmp_path)
    convert(model, RECIPE)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    layers = [type(experts).__name__ for experts in experts_of(again)]
    assert [name == "FP8Experts" for name in layers] == [part == "model", True]
    convert(again, RECIPE)
    assert torch.equal(logits(again), expected)


def test_weights_to_a_sampler(folder: Path) -> None:
    """All tensors of the checkpoint, under its names, as it was loaded and frozen."""
    model, expected = from_pretrained(folder), load_file(folder / "model.safetensors")
    for weights in (None, "fp8"):
        convert(model, RECIPE, weights=weights)
        tensors = dict(CheckpointTensors(model))
        assert_same_tensors(tensors, expected)
