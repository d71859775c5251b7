# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters over experts in MXFP4, beside PEFT's over dequantized weights."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, convert
from support.compare import assert_same_bits, assert_same_tensors
from support.errors import sentence
from support.gpt_oss import IDS, dequantized, packed, write_checkpoint
from support.tensors import BF16, FP32

pytest.importorskip("peft")
import peft

from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters
from support.adapters import assert_close, config_of, model_of, results, weights_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpt_oss"))


def randomized(model: Any) -> Any:
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(p, std=0.3)
    return model


def ours(folder: Path, **options: Any) -> Any:
    model = packed(folder, **options)
    model = peft.get_peft_model(model, for_packed_experts(config_of()))
    assert len(use_grouped_adapters(model)) == 4
    return randomized(model)


def theirs(folder: Path, **options: Any) -> Any:
    return randomized(peft.get_peft_model(dequantized(folder, **options), config_of()))


def saved(model: Any, path: Path) -> dict[str, Tensor]:
    model.save_pretrained(path)
    return load_file(path / "adapter_model.safetensors")


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(folder: Path, compiled: bool) -> None:
    """In float32, so that nothing but the order of sums differs."""
    model = ours(folder, dtype=FP32)
    options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"} if compiled else {}
    found = results(model, **options)
    assert_close(found, results(theirs(folder, dtype=FP32)), 1e-4)
    convert(model, Float8BlockScaling())
    assert_close(results(model), found, 0.15)
    assert {p.dtype for n, p in model.named_parameters() if n.endswith("_proj")} == {torch.uint8}


@pytest.mark.parametrize("weights", ["mxfp4", "fp8"])
@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_have_the_models_dtype(folder: Path, weights: str, autocast: bool) -> None:
    """As PEFT has it over 16 bits: float32 by default, else the dtype that the bytes stand for."""
    model = packed(folder) if weights == "mxfp4" else model_of().to(BF16)
    if weights == "fp8":
        convert(model, weights="fp8")
    options = {"autocast_adapter_dtype": autocast}
    model = peft.get_peft_model(model, for_packed_experts(config_of()), **options)
    use_grouped_adapters(model)
    model.add_adapter("later", for_packed_experts(config_of()), **options)
    dtypes = {p.dtype for n, p in model.named_parameters() if ".lora_" in n}
    assert dtypes == {FP32 if autocast else BF16}


@pytest.mark.parametrize("order", ["convert first", "adapters first"])
@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
def test_a_model_that_was_quantized(name: str, order: str) -> None:
    """Compiled too, and with a second adapter: weights of GPT-OSS were transposed."""
    model, plain, first = model_of(name), model_of(name), order == "convert first"
    if first:
        convert(model, weights="mxfp4")
    model = peft.get_peft_model(model, for_packed_experts(config_of()))
    if first:
        use_grouped_adapters(model)
    else:
        convert(model, weights="mxfp4")
    with torch.no_grad():
        for key, w in weights_of(model.get_base_model()).items():
            plain.get_parameter(key.replace("base_layer.", "")).copy_(w)
    plain = peft.get_peft_model(plain, config_of())
    for adapter in ("default", "more"):
        for one in (model, plain):
            if adapter == "more":
                one.add_adapter(adapter, for_packed_experts(config_of(r=2)))
            one.set_adapter(adapter)
            randomized(one)
        found = results(model)
        assert_close(found, results(plain), 1e-4)
    assert_close(results(model, fullgraph=True, backend="aot_eager"), found, 1e-5)


def test_files_are_pefts(folder: Path, tmp_path: Path) -> None:
    """Both ways, beside weights that are packed and that are not."""
    model, other = ours(folder, dtype=FP32), theirs(folder, dtype=FP32)
    own, expected = saved(model, tmp_path / "ours"), saved(other, tmp_path / "theirs")
    assert_same_tensors(own, expected)
    config = for_packed_experts(peft.LoraConfig.from_pretrained(tmp_path / "theirs"))
    again = peft.PeftModel.from_pretrained(
        packed(folder, dtype=FP32), tmp_path / "theirs", config=config
    )
    plain = peft.PeftModel.from_pretrained(dequantized(folder, dtype=FP32), tmp_path / "ours")
    with torch.no_grad():
        assert_same_bits(again(IDS).logits, model.eval()(IDS).logits)
        torch.testing.assert_close(plain(IDS).logits, again(IDS).logits, rtol=0, atol=1e-4)


def test_refused(folder: Path) -> None:
    plain = peft.get_peft_model(packed(folder), config_of())
    assert sentence(lambda: use_grouped_adapters(plain)) == (
        "use_grouped_adapters: model.layers.0.mlp.experts.down_proj is in MXFP4, and PEFT reads "
        "the adapter's sizes off its bytes: give get_peft_model for_packed_experts(config)"
    )
    assert "are parametrized" in sentence(lambda: plain(IDS))
    biases = for_packed_experts(config_of(["mlp.experts.gate_up_proj_bias"]))
    plain = peft.get_peft_model(packed(folder), biases)
    assert "has adapters on gate_up_proj_bias" in sentence(lambda: use_grouped_adapters(plain))
    whole = for_packed_experts(peft.LoraConfig(target_modules=["experts"]))
    with pytest.raises(ValueError, match=r"Target module Grouped.*is not supported"):  # by PEFT
        peft.get_peft_model(packed(folder), whole)
    model: Any = ours(folder)
    assert sentence(lambda: for_packed_experts(model), (TypeError,)) == (
        "for_packed_experts: config must be a LoraConfig, for get_peft_model(model, config), got "
        "PeftModel"
    )
    assert sentence(lambda: use_grouped_adapters(cast(Any, folder)), (TypeError,)).startswith(
        "use_grouped_adapters: model must be a torch.nn.Module, got a "
    )
    before = model(IDS).logits
    for merge in (model.merge_adapter, model.merge_and_unload):
        assert "is in MXFP4 and stays as it is" in sentence(merge)
    assert_same_bits(model(IDS).logits, before)
