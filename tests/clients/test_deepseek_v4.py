# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4 checkpoint, experts in FP4: read as it is, trained by adapters, saved again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8

from grouped_linear import Float8BlockScaling, Format, MXFP8BlockScaling, Recipe, convert
from support.compare import assert_same_bits, assert_same_tensors, bits
from support.deepseek_v4 import write_checkpoint
from support.errors import sentence
from support.four_bits import learns_in_mxfp4
from support.tensors import BF16, FP32

pytest.importorskip("accelerate")  # what loads in few bits needs it
pytest.importorskip("peft")
import peft

from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors
from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters
from support.adapters import (
    IDS,
    assert_close,
    config_of,
    fp8_grouped_matmul,
    fp8_linear,
    from_fp8_checkpoint,
    logits,
    randomize,
    results,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("deepseek_v4"))


def packed(folder: Path, recipe: Recipe | None = None, weights: Any = None, **options: Any) -> Any:
    """Kept in FP4, as transformers does on a GPU."""
    model = from_fp8_checkpoint(folder, **options)
    convert(model, recipe, weights=weights)
    return model


def dequantized(folder: Path, **options: Any) -> Any:
    """By transformers, as it does where there is no GPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    convert(model)
    return model


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.get_submodule("model").layers]


@pytest.mark.parametrize("weights", [None, "mxfp4"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_as_transformers_dequantizes(folder: Path, dtype: torch.dtype, weights: Any) -> None:
    model, plain = packed(folder, None, weights, dtype=dtype), dequantized(folder, dtype=dtype)
    assert_same_bits(logits(model), logits(plain))
    for recipe in (Float8BlockScaling(), MXFP8BlockScaling()):
        convert(model, recipe)
        assert_close({"": logits(model).float()}, {"": logits(plain).float()}, 0.2)
    report = convert(model)
    loaded = " as loaded" if weights is None else ""
    assert {one.weights for one in report.converted} == {f"frozen in MXFP4{loaded}"}
    assert report.converted[0].error is None
    expected = convert(plain)
    assert [one.num_parameters for one in report.converted] == [
        one.num_parameters for one in expected.converted
    ]
    numbers = expected.converted[0].nbytes // dtype.itemsize
    assert report.converted[0].nbytes == numbers * 17 // 32


@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_saves_the_files_bits(folder: Path, weights: Any, tmp_path: Path) -> None:
    model = packed(folder)
    addresses = [experts.down_proj.data_ptr() for experts in experts_of(model)]
    convert(model, Float8BlockScaling(), weights=weights)
    assert [experts.down_proj.data_ptr() for experts in experts_of(model)] == addresses
    model.save_pretrained(tmp_path)
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert saved.keys() == source.keys()
    for name, t in source.items():
        assert_same_bits(bits(saved[name]), bits(t))
        assert saved[name].dtype == t.dtype
    assert_same_bits(logits(packed(tmp_path)), logits(packed(folder)))
    assert_same_bits(logits(dequantized(tmp_path)), logits(dequantized(folder)))


@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_states(folder: Path, weights: Any) -> None:
    """Those of experts that are frozen, and that are read as loaded, into each and in 16 bits."""
    model, plain = packed(folder, None, weights), dequantized(folder)
    convert(plain, Float8BlockScaling(), weights="both")
    convert(plain)
    for other in (packed(folder), packed(folder, None, "mxfp4"), plain):
        for experts in experts_of(other):
            for p in experts.parameters():
                bits(p.detach()).zero_()
        assert not torch.equal(logits(other), logits(model))
        other.load_state_dict(copy.deepcopy(model).state_dict())
        assert_same_bits(logits(other), logits(model))
        assert_same_bits(logits(copy.deepcopy(other)), logits(model))


def test_quantized_again(folder: Path, tmp_path: Path) -> None:
    """What transformers has dequantized: the numbers are kept, and saved in the format."""
    model = dequantized(folder)
    expected = logits(model)
    done = convert(model, weights="mxfp4")
    assert [one.error for one in done.converted] == [0, 0]
    assert_same_bits(logits(model), expected)
    model.save_pretrained(tmp_path)
    assert_same_bits(logits(packed(tmp_path)), expected)


def test_published_names_of_one_loaded_in_16_bits(folder: Path, tmp_path: Path) -> None:
    dequantized(folder).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    convert(model, weights="mxfp4")
    model.save_pretrained(tmp_path / "few")
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path / "few", folder))
    assert saved.keys() == source.keys()


@pytest.mark.parametrize("weights", [None, "both"])
def test_saves_what_learns_as_published(folder: Path, weights: Any, tmp_path: Path) -> None:
    """From the published checkpoint through steps to one of the same names, dtypes and sizes."""
    trainer = AutoModelForCausalLM.from_pretrained(folder)
    convert(trainer, learns_in_mxfp4(fp8=weights == "both"), weights=weights)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for _ in range(2):
        trainer(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    convert(trainer, learns_in_mxfp4())  # beside activations in 16 bits
    expected = logits(trainer)
    trainer.save_pretrained(tmp_path)
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {
        n: (t.shape, t.dtype) for n, t in source.items()
    }
    assert_same_tensors(dict(CheckpointTensors(trainer)), saved)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close({"": logits(stock).float()}, {"": expected.float()}, 2e-2)  # its sums are rounded
    assert_same_bits(logits(dequantized(tmp_path)), expected)
    assert_same_bits(logits(packed(tmp_path)), expected)


def test_beside_linear_layers_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published: they are transformers', whose kernels dequantize here. Saved, and adapters.

    In float32, so that nothing but the order of sums differs; adapters' files are PEFT's.
    """
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
    monkeypatch.setattr(finegrained_fp8, "fp8_grouped_matmul", fp8_grouped_matmul)
    source = write_checkpoint(tmp_path / "source", linear_in_fp8=True)
    plain = dequantized(source, dtype=FP32)
    for weights in (None, "mxfp4"):
        model = packed(source, None, weights, dtype=FP32)
        linear = [m for m in model.modules() if isinstance(m, finegrained_fp8.FP8Linear)]
        assert len(linear) == 16
        assert {m.weight.dtype for m in linear} == {torch.float8_e4m3fn}
        assert_close({"": logits(model)}, {"": logits(plain)}, 1e-5)
        saved = tmp_path / f"saved as {weights}"
        packed(source, None, weights).save_pretrained(saved)
        files = [load_file(path / "model.safetensors") for path in (saved, source)]
        assert_same_tensors(*({n: bits(t) for n, t in file.items()} for file in files))
        found = []
        for one in (model, copy.deepcopy(plain)):
            config = for_packed_experts(config_of(target_modules=["q_a_proj", "o_b_proj"]))
            adapted = peft.get_peft_model(one, config)
            use_grouped_adapters(adapted)
            randomize(adapted)
            found.append(results(adapted))
            adapted.save_pretrained(tmp_path / f"adapter {len(found)}")
            if len(found) == 1:
                experts = experts_of(adapted.get_base_model())[0]
                assert "in MXFP4 and stays as it is" in sentence(experts.merge)
        assert_close(*found, 1e-4)
        files = [load_file(tmp_path / f"adapter {i}" / "adapter_model.safetensors") for i in (1, 2)]
        assert_same_tensors(*files)


@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_dtype_of_adapters(folder: Path, weights: Any) -> None:
    """The model's 16 bits where PEFT does not cast to float32; bytes show no dtype."""
    config = for_packed_experts(config_of(target_modules=["q_a_proj"]))
    model = peft.get_peft_model(packed(folder, None, weights), config, autocast_adapter_dtype=False)
    assert {p.dtype for n, p in model.named_parameters() if ".lora_" in n} == {BF16}


def test_compiled(folder: Path) -> None:
    experts = experts_of(packed(folder))[0]
    compiled = torch.compile(experts, fullgraph=True)
    x = torch.randn(20, 64, dtype=BF16)
    chosen, scores = torch.rand(20, 4).topk(2).indices, torch.rand(20, 2, dtype=BF16)
    assert_same_bits(compiled(x, chosen, scores), experts(x, chosen, scores))


def test_refused(folder: Path, tmp_path: Path) -> None:
    model = packed(folder)
    for weights in ("fp8", "both"):
        said = sentence(lambda w=weights: convert(model, Float8BlockScaling(), weights=w))
        assert "the weights are frozen in MXFP4 and stay so: take weights='mxfp4'" in said
    plain = peft.get_peft_model(packed(folder), config_of(target_modules=["q_a_proj"]))
    assert "for_packed_experts(config)" in sentence(lambda: use_grouped_adapters(plain))
    assert "are parametrized" in sentence(lambda: logits(plain))
    plain = peft.get_peft_model(packed(folder), config_of(target_modules=["q_a_proj"]))
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type Char"):
        plain.merge_adapter()  # PEFT's own wrapper would add to bytes, and torch refuses
    model.to(BF16)
    assert "scales [4, 192, 2] in float8_e8m0fnu and dynamic" in (
        said := sentence(lambda: logits(model))
    )
    assert said.endswith("which convert(weights='mxfp4') prevents")
    assert_same_bits(
        logits(packed(folder, None, "mxfp4").to(BF16)), logits(dequantized(folder).to(BF16))
    )

    write_checkpoint(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    in_float = {n: t.float() if t.dtype == torch.float8_e8m0fnu else t for n, t in state.items()}
    save_file(in_float, tmp_path / "model.safetensors", {"format": "pt"})
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"scale_fmt": "ue8m0"', '"scale_fmt": "float"'))
    assert "load the checkpoint with FineGrainedFP8Config(dequantize=True)" in sentence(
        lambda: packed(tmp_path)
    )


def test_learns_in_four_bits(folder: Path) -> None:
    """Dequantized and trained for MXFP4, it has the numbers of the checkpoint, frozen."""
    for recipe, learns in (
        (Float8BlockScaling(), Float8BlockScaling(qat="mxfp4")),
        (None, Recipe(weight=Format(qat="mxfp4"))),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
        convert(model, learns, weights="both" if recipe else None)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        frozen = packed(folder, recipe, "mxfp4", dtype=BF16)
        assert_same_bits(loss, frozen(input_ids=IDS, labels=IDS).loss)
        assert all(e.down_proj.grad.any() for e in experts_of(model))
