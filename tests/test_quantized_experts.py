"""Hugging Face's models whose experts are kept in FP8: what is saved, loaded and refused.

tests/clients has the same with the packages that train and load such models.
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import FineGrainedFP8Config

from grouped_linear import Float8BlockScaling, GroupedTensor, MXFP8BlockScaling
from support.compare import assert_same_bits, bits
from support.errors import sentence
from support.hugging_face import tiny
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    from grouped_linear.integrations.transformers import (
        dequantize_experts,
        quantize_experts,
        register,
    )

E, F, H = 3, 128, 32
SIZES = {"intermediate_size": F, "moe_intermediate_size": F, "num_hidden_layers": 2}
IDS = torch.arange(14).reshape(2, 7)
PREFIX = {"mixtral": "block_sparse_moe.experts.{}.", "qwen3_moe": "mlp.experts.{}."}
NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
FAMILY = pytest.mark.parametrize("family", PREFIX)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register("grouped_linear_fp8", Float8BlockScaling())
    register("grouped_linear_fp8_any", Float8BlockScaling(power_of_two_scales=False))


def model_of(family: str = "mixtral", **options: Any) -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": E} if family != "qwen3_moe" else {"num_experts": E}
    model = tiny(family, **SIZES | experts | options).to(BF16)
    model.set_experts_implementation("grouped_linear_fp8")
    return model.eval()


def quantized(family: str = "mixtral", **options: Any) -> Any:
    model = model_of(family, **options)
    quantize_experts(model)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, GroupedTensor)}


@FAMILY
def test_saved_as_fp8_checkpoints_are(family: str, tmp_path: Path) -> None:
    """Names and numbers of a published checkpoint."""
    model = quantized(family)
    model.save_pretrained(tmp_path)
    saved, plain = load_file(tmp_path / "model.safetensors"), tmp_path / "plain"
    model_of(family).save_pretrained(plain)
    unquantized = load_file(plain / "model.safetensors")
    assert {n for n in saved if not n.endswith("_scale_inv")} == unquantized.keys()
    for name, t in unquantized.items():
        in_fp8 = ".experts." in name
        assert saved[name].dtype == (torch.float8_e4m3fn if in_fp8 else BF16)
        assert (f"{name}_scale_inv" in saved) == in_fp8
        assert in_fp8 or torch.equal(saved[name], t)
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        gate, up, down = (
            f"model.layers.{layer}.{PREFIX[family]}{name}.weight" for name in NAMES[family]
        )
        for w, names in ((experts.gate_up_proj, [gate, up]), (experts.down_proj, [down])):
            for suffix, part in (("", bits(w.q).view(w.shape)), ("_scale_inv", w.scale)):
                experts_of = [[saved[n.format(e) + suffix] for n in names] for e in range(E)]
                whole = torch.stack([torch.cat(parts) for parts in experts_of])
                assert_same_bits(bits(whole), bits(part))


@FAMILY
@pytest.mark.parametrize("name", ["grouped_linear_fp8", "grouped_linear_fp8_any"])
def test_loaded_by_transformers_fp8_experts(name: str, family: str, tmp_path: Path) -> None:
    """Into the modules that transformers makes by the configuration that was saved."""
    model = model_of(family)
    model.set_experts_implementation(name)
    expected = logits(model)
    quantize_experts(model)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path, save_original_format=False)
    config = FineGrainedFP8Config(
        **json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    )
    loaded = replace_with_fp8_linear(
        model_of(family), config.modules_to_not_convert, quantization_config=config
    )
    loaded = loaded.to_empty(device="cpu")
    theirs = [m for m in loaded.modules() if type(m).__name__.startswith("FP8")]
    assert {type(m).__name__ for m in theirs} == {"FP8Experts"}
    assert len(theirs) == 2
    buffers = dict(model.named_buffers())
    for key, buffer in loaded.named_buffers():  # not saved, and to_empty cleared them
        buffer.copy_(buffers[key])
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    loaded.set_experts_implementation(name)
    assert torch.equal(logits(loaded), expected)


def test_state_dicts_load_bit_for_bit(tmp_path: Path) -> None:
    """Into quantized experts, assigned or copied, and dequantized into plain ones."""
    model, state = quantized(), quantized().state_dict()
    assert {type(t) for t in state.values()} == {Tensor}
    for assign in (False, True):
        other = quantized()
        for w in weights_of(other).values():
            nn.init.zeros_(w)
        other.load_state_dict(state, strict=True, assign=assign)
        for name, w in weights_of(other).items():
            assert_same_bits(bits(w.q), bits(weights_of(model)[name].q))
            assert_same_bits(w.scale, weights_of(model)[name].scale)
        assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_are_saved_too(copied: Any, tmp_path: Path) -> None:
    model = quantized()
    copied(model).save_pretrained(tmp_path / "copy")
    model.save_pretrained(tmp_path / "model")
    files = [load_file(tmp_path / d / "model.safetensors") for d in ("copy", "model")]
    assert files[0].keys() == files[1].keys()
    for name, t in files[0].items():
        assert_same_bits(bits(t), bits(files[1][name]))


def test_dequantized_experts_are_saved_as_those_of_any_model(tmp_path: Path) -> None:
    """Without a word of FP8, which transformers would make modules for."""
    model = quantized()
    expected = {name: w.detach().dequantize() for name, w in weights_of(model).items()}
    dequantize_experts(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16)
    for name, w in expected.items():
        assert_same_bits(loaded.get_parameter(name).detach(), w)


def test_what_the_format_cannot_hold_is_saved_in_its_own_dtype(tmp_path: Path) -> None:
    """With the same numbers, and a warning; quantized again it computes the same."""
    models = [
        quantized(intermediate_size=192, moe_intermediate_size=192),
        quantized("gpt_oss", layer_types=["full_attention"] * 2),
    ]
    messages = []
    for i, model in enumerate(models):
        directory = tmp_path / str(i)
        expected = logits(model)
        with pytest.warns(UserWarning, match="^save_pretrained: ") as warned:
            model.save_pretrained(directory)
        messages += [str(w.message) for w in warned if "save_pretrained" in str(w.message)]
        assert weights_of(model)  # the model itself is as it was
        assert torch.equal(logits(model), expected)
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
        dequantize_experts(model)
        model.save_pretrained(tmp_path / "dequantized")
        files = [load_file(d / "model.safetensors") for d in (directory, tmp_path / "dequantized")]
        assert files[0].keys() == files[1].keys()
        for name, t in files[0].items():
            assert torch.equal(t, files[1][name])
        again = type(model).from_pretrained(directory, dtype=BF16).eval()
        again.set_experts_implementation("grouped_linear_fp8")
        quantize_experts(again)
        assert torch.equal(logits(again), expected)
    assert_expected_inline(
        "\n".join(messages),
        """\
save_pretrained: a checkpoint has gate and up apart, and a block of scales reaches from one into the other where an expert's 192 features are no multiple of 128: experts are written in bfloat16, with the numbers that they have in FP8
save_pretrained: transformers' FP8 experts have no biases, transposed weights or norms, model.layers.0.mlp.experts has: experts are written in bfloat16, with the numbers that they have in FP8""",  # noqa: E501
    )


def test_memory_footprint() -> None:
    """It counts an element's byte, and leaves out a scale for 128 x 128 of them."""
    model = model_of()
    before = model.get_memory_footprint()
    quantize_experts(model)
    elements = sum(w.numel() for w in weights_of(model).values())
    assert elements == 2 * E * 3 * F * H
    assert model.get_memory_footprint() == before - elements  # one byte instead of two
    held = sum(p.nbytes for p in model.parameters())
    assert 0 < held + sum(b.nbytes for b in model.buffers()) - model.get_memory_footprint() < 200


def test_models_that_cannot_be_quantized() -> None:
    """Refused at once, in one sentence, and left as they were."""
    register("grouped_linear_plain")
    register("grouped_linear_mx", MXFP8BlockScaling())
    messages = []
    for name in ("grouped_mm", "eager", "grouped_linear_plain", "grouped_linear_mx"):
        model = model_of()
        model.set_experts_implementation(name)
        messages.append(sentence(lambda m=model: quantize_experts(m)))
        assert not weights_of(model)
    model = model_of()
    model.model.layers[1].to("meta")
    messages.append(sentence(lambda: quantize_experts(model)))
    assert not weights_of(model)
    assert_expected_inline(
        "\n".join(messages),
        """\
quantize_experts: the experts implementation 'grouped_mm' is not one of grouped_linear's, and would not compute with quantized weights: call register(name, Float8BlockScaling()) and model.set_experts_implementation(name) before
quantize_experts: the experts implementation 'eager' is not one of grouped_linear's, and would not compute with quantized weights: call register(name, Float8BlockScaling()) and model.set_experts_implementation(name) before
quantize_experts: the experts implementation 'grouped_linear_plain' has the recipe None, and would not compute with quantized weights: call register(name, Float8BlockScaling()) and model.set_experts_implementation(name) before
quantize_experts: the experts implementation 'grouped_linear_mx' has the recipe MXFP8BlockScaling(), and would not compute with quantized weights: call register(name, Float8BlockScaling()) and model.set_experts_implementation(name) before
quantize_experts: model.layers.1.mlp.experts.gate_up_proj is on the meta device, it has no numbers yet: load the checkpoint before""",  # noqa: E501
    )


def test_moved_as_accelerate_does() -> None:
    """It makes a parameter's class anew of the tensor on another device, or of none."""
    w = nn.Parameter(GroupedTensor.quantize(torch.ones(2, 32, 16)))
    moved: Any = type(w)(w.to("cpu"), requires_grad=False)
    assert isinstance(moved, nn.Parameter)
    assert isinstance(moved, GroupedTensor)
    assert not moved.requires_grad
    assert_same_bits(bits(moved.q), bits(w.q))
    messages = [sentence(lambda t=t: type(w)(t)) for t in (w.to("meta"), torch.ones(2))]
    assert_expected_inline(
        "\n".join(messages),
        """\
GroupedTensor: a quantized weight cannot be offloaded, as accelerate would do: leave its module on a device, where it takes half of bfloat16's memory
GroupedTensor: make one with GroupedTensor.quantize or GroupedTensor.from_parts, got a Tensor of float32""",  # noqa: E501
    )
