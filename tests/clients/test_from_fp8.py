# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in FP8 and FP4 loaded into few bits, beside ``convert`` of a model in memory."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, HYV4Config, HYV4ForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

from grouped_linear import convert
from support import deepseek_v4
from support.compare import assert_same_bits, assert_same_tensors
from support.errors import sentence

pytest.importorskip("accelerate")  # what loads in few bits needs it
pytest.importorskip("peft")
import peft

from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters
from support.adapters import (
    config_of,
    deepseek,
    fp8_checkpoints_on_cpu,
    fp8_grouped_matmul,
    fp8_linear,
    logits,
    make_fp8_checkpoint,
    qwen3_of_blocks,
)
from support.trainer import losses, trainer_of

#: Of ours, or after its report, of transformers.
BAD = "GroupedLinearConfig: .*checkpoint has|4 experts, the checkpoint|ignore_mis|`CONVERSION`"
MODELS = {"Qwen3-MoE": qwen3_of_blocks, "DeepSeek-V3": deepseek}


@pytest.fixture(scope="module", params=[*MODELS, "DeepSeek-V4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    if request.param == "DeepSeek-V4":
        return deepseek_v4.write_checkpoint(path, linear_in_fp8=True)
    return make_fp8_checkpoint(path, MODELS[request.param])


@pytest.fixture(autouse=True)
def linear_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
    monkeypatch.setattr(finegrained_fp8, "fp8_grouped_matmul", fp8_grouped_matmul)


def load(folder: Path, config: Any, on_gpu: bool, **options: Any) -> Any:
    with fp8_checkpoints_on_cpu() if on_gpu else nullcontext():
        if config is not None:  # transformers takes None for one in 16 bits
            options["quantization_config"] = config
        return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options)


def is_v4(folder: Path) -> bool:
    return "deepseek_v4" in (folder / "config.json").read_text()


def experts_of(model: Any) -> dict[str, Any]:
    return {n: t for n, t in model.state_dict().items() if ".experts." in n}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_as_converted(folder: Path, weights: Any, on_gpu: bool, tmp_path: Path) -> None:
    """The file's bits, or MXFP4 of what transformers dequantizes; other modules as it has them."""
    config = GroupedLinearConfig(weights)
    if is_v4(folder) and weights == "fp8":
        assert "are frozen in MXFP4 and stay so" in sentence(lambda: load(folder, config, on_gpu))
        return
    model = load(folder, config, on_gpu)
    as_is = is_v4(folder) or weights == "fp8"
    expected = load(folder, None, on_gpu=as_is)
    convert(expected, weights=weights)
    assert_same_tensors(experts_of(model), experts_of(expected))
    others = load(folder, None, on_gpu)
    assert_same_tensors(
        {n: t for n, t in model.state_dict().items() if ".experts." not in n},
        {n: t for n, t in others.state_dict().items() if ".experts." not in n},
    )
    assert any(isinstance(m, FP8Linear) for m in model.modules()) == on_gpu
    found = logits(model)
    assert found.isfinite().all()
    report = model.hf_quantizer.report
    assert {one.weights for one in report.converted} == {f"frozen in {weights.upper()}"}

    if on_gpu and not as_is:  # linear layers have scales in float32
        assert "the model would be in two formats" in sentence(
            lambda: model.save_pretrained(tmp_path)
        )
        return
    model.save_pretrained(tmp_path)
    again = load(tmp_path, GroupedLinearConfig(weights), on_gpu)
    assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_bits(logits(again), found)
    if as_is and on_gpu:
        saved, source = (load_file(p / "model.safetensors") for p in (tmp_path, folder))
        assert saved.keys() == source.keys()


@pytest.mark.parametrize("source", ["16 bits", "FP8"])
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_adapters_by_trainer(source: str, weights: Any, dataset: Any, tmp_path: Path) -> None:
    """Trainer asks for adapters; they learn as over a converted model, and the bytes stay."""
    found = []
    for by_config in (True, False):
        folder = tmp_path / "checkpoint"
        if source == "FP8":
            make_fp8_checkpoint(folder)
        else:
            torch.manual_seed(0)
            qwen3_of_blocks().save_pretrained(folder)
        model = load(folder, GroupedLinearConfig(weights) if by_config else None, False)
        if by_config:
            with pytest.raises(ValueError, match="purely quantized models"):  # of Trainer
                trainer_of(model, dataset, tmp_path)
        else:
            if source == "FP8" and weights == "fp8":  # the bits of the file
                model = load(folder, None, True)
            convert(model, weights=weights)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, for_packed_experts(config_of()))
        assert len(use_grouped_adapters(model)) == 4
        before = {n: t.clone() for n, t in model.state_dict().items() if ".experts." in n}
        trainer = trainer_of(model, dataset, tmp_path, max_steps=3)
        trainer.train()
        found.append(losses(trainer))
        for name, t in model.state_dict().items():
            if name in before and ".lora_" not in name:
                assert torch.equal(t, before[name])
        model.save_pretrained(tmp_path / "adapter")
    assert found[0] == found[1] or (source, weights) == ("FP8", "fp8")  # linear layers differ
    base = load(folder, GroupedLinearConfig(weights), False)
    config = for_packed_experts(peft.LoraConfig.from_pretrained(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", config=config)
    use_grouped_adapters(again)
    if (source, weights) != ("FP8", "fp8"):
        assert_same_bits(logits(again.eval()), logits(model.eval()))


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("source", ["16 bits", "FP8"])
def test_offloaded(weights: Any, source: str, tmp_path: Path) -> None:
    """Experts on a disk are refused; other modules there are not."""
    if source == "FP8":
        make_fp8_checkpoint(tmp_path)
    else:
        qwen3_of_blocks().save_pretrained(tmp_path)
    config, places = GroupedLinearConfig(weights), {"model": "cpu", "lm_head": "disk"}
    options = {"quantization_config": config, "offload_folder": tmp_path / "offloaded"}
    read = partial(AutoModelForCausalLM.from_pretrained, tmp_path, **options)
    assert logits(read(device_map=places)).isfinite().all()
    places |= {f"model.{n}": "cpu" for n in ("embed_tokens", "layers.0", "norm", "rotary_emb")}
    places |= {"model.layers.1": "disk"}
    del places["model"]
    said = sentence(lambda: read(device_map=places))
    assert "model.layers.1.mlp.experts is offloaded by accelerate, whose hooks do not keep" in said


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("name", ["down_proj", "up_proj"])
def test_a_bad_file(weights: Any, name: str, tmp_path: Path) -> None:
    """No number is read without its scale; transformers would draw a part of what is missing."""
    folder = make_fp8_checkpoint(tmp_path)
    state = load_file(folder / "model.safetensors")
    for part in ("weight", "weight_scale_inv"):
        for experts in ("3", "[0-3]"):
            pattern = re.compile(rf"model\.layers\.1\.mlp\.experts\.{experts}\.{name}\.{part}")
            broken = {n: t for n, t in state.items() if not pattern.fullmatch(n)}
            assert len(state) - len(broken) == (1 if experts == "3" else 4)
            save_file(broken, folder / "model.safetensors", {"format": "pt"})
            with pytest.raises((ValueError, RuntimeError), match=BAD):
                load(folder, GroupedLinearConfig(weights), True)


def test_a_model_that_wants_scales_in_float32(tmp_path: Path) -> None:
    """Hy4's hyper-connections have a `scale`, by which transformers finds those of experts."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_experts": 4}
    sizes |= {"moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2}
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    config = HYV4Config(**sizes, qk_nope_head_dim=16, v_head_dim=32, pad_token_id=0)
    model = HYV4ForCausalLM(config).to(torch.bfloat16)
    convert(model, weights="mxfp4")
    model.save_pretrained(tmp_path)
    again = load(tmp_path, GroupedLinearConfig("mxfp4"), on_gpu=False)
    assert_same_tensors(experts_of(again), experts_of(model))
