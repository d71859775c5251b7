# SPDX-License-Identifier: Apache-2.0
"""Models whose experts ``convert(weights="mxfp4")`` quantizes: beside the same numbers in BF16.

E experts, H features of a token, F features of an expert.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, replace_with_fp8_linear

from grouped_linear import Float8BlockScaling, MXFP8BlockScaling, Recipe, convert, ops
from grouped_linear.contrib import compare
from grouped_linear.integrations.experts import experts_of
from support.compare import assert_same_bits, assert_same_tensors, relative_error
from support.errors import sentence
from support.experts import GroupedExperts
from support.four_bits import learns_in_mxfp4
from support.hugging_face import FAMILIES, IDS, tiny
from support.layers import through_pickle
from support.tensors import BF16

E, H, F, ROWS = 3, 32, 64, 9
SIZES = {"intermediate_size": F, "moe_intermediate_size": F}
NARROW = {"muse_spark": {"moe_hidden_size": H}}
BITS = 4.25


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.experts = nn.Linear(H, H), GroupedExperts(E, H, F)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(0))
        x = x.to(self.enter.weight)
        y: Tensor = self.experts(self.enter(x), torch.tensor([4, 0, 5], device=x.device))
        return y


def model_of(family: str, dtype: torch.dtype = BF16, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Titan()
    if family != "titan":
        model = tiny(family, **SIZES | NARROW.get(family, {}) | options).eval()
        for p in model.parameters():
            nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    return model.to(dtype)


def in_mxfp4(family: str = "mixtral", recipe: Recipe | None = None, **options: Any) -> Any:
    model = model_of(family, **options)
    convert(model, recipe, weights="mxfp4")
    return model


def weights_of(model: nn.Module) -> dict[str, nn.Module]:
    """The experts' modules by the names of their weights."""
    found = {}
    for name, module in model.named_modules():
        experts = experts_of(module)
        for weight in () if experts is None else experts.weights:
            found[f"{name}.{weight}"] = module
    return found


def result(model: Any) -> Tensor:
    y = model(IDS.to(next(model.parameters()).device))
    y = getattr(y, "logits", getattr(y, "last_hidden_state", y))
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("family", [*FAMILIES, "titan"])
def test_as_quantized_by_the_op(family: str, device: str) -> None:
    """The bits of the dequantized weights' results, with and without a gate, biases and norms."""
    model, plain = model_of(family).to(device), model_of(family).to(device)
    before = {name: plain.get_parameter(name).detach().clone() for name in weights_of(plain)}
    done = convert(model, weights="mxfp4")
    off = whole = numbers = 0.0
    with torch.no_grad():
        for name, module in weights_of(model).items():
            w, (_, _, own) = plain.get_parameter(name), name.rpartition(".")
            is_transposed = getattr(plain.get_submodule(name[: -len(own) - 1]), "is_transposed", 0)
            w_ENK = w.mT.contiguous() if is_transposed else w
            rounded = ops.dequantize_mxfp4(*ops.quantize_mxfp4(w_ENK))
            w.copy_(rounded.mT if is_transposed else rounded)
            assert_same_bits(module.dequantize(own), w)
            off += (w.double() - before[name].double()).square().sum().item()
            whole += before[name].double().square().sum().item()
            numbers += w.numel()
    convert(plain)
    results = []
    for one in (model, plain):
        learns = [p for n, p in one.named_parameters() if "enter" in n or "embed" in n]
        y = result(one)
        results.append((y.detach(), *torch.autograd.grad(y.float().square().mean(), learns)))
    for actual, expected in zip(*results, strict=True):
        if device == "cpu":
            assert_same_bits(actual, expected)
        assert relative_error(actual, expected) < 2e-2
    [converted] = done.converted
    assert converted.error == pytest.approx(math.sqrt(off / whole), rel=1e-5)
    assert 0.1 < converted.error < 0.12
    parameters = plain.get_submodule(converted.name).parameters()
    assert converted.num_parameters == sum(p.numel() for p in parameters)
    assert (converted.weights, converted.nbytes) == ("frozen in MXFP4", numbers * BITS / 8)
    assert f", error {100 * converted.error:.3g}%" in repr(done)
    if family != "titan":  # which is converted once
        assert repr(convert(model, weights="mxfp4")) == repr(convert(model)) != repr(done)


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=repr)
@pytest.mark.parametrize("family", ["mixtral", "titan"])
def test_recipes(family: str, recipe: Recipe) -> None:
    """They round activations, beside the same weights."""
    model, plain = in_mxfp4(family, recipe), in_mxfp4(family)
    assert 0 < relative_error(result(model), result(plain)) < 0.1
    compared = compare(model, lambda: result(model).float().square().sum().backward())
    assert {d.tensor for d in compared.differences} == {"output", "x"}


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_bytes_are_no_numbers_of_plain_weights(weights: Any) -> None:
    """torch would cast bytes without their scales; converted experts take what they stand for."""
    frozen, plain = model_of("mixtral"), model_of("mixtral")
    convert(frozen, weights=weights)
    convert(plain)
    for both in (False, True):
        if both:
            convert(plain, Float8BlockScaling(), weights="both")
        plain.load_state_dict(frozen.state_dict())
        for name, module in weights_of(frozen).items():
            assert_same_bits(
                plain.get_parameter(name).detach().dequantize().float(),
                module.dequantize(name.rpartition(".")[2]).float(),
            )
        through_pickle(plain).load_state_dict(model_of("mixtral").state_dict())
    before = result(frozen)
    for p in frozen.parameters():
        p.detach().zero_()
    frozen.load_state_dict(plain.state_dict())  # and back
    assert_same_bits(result(frozen), before)


@pytest.mark.parametrize("weights", ["both", "mxfp4"])
def test_of_weights_that_were_kept_otherwise(weights: Any) -> None:
    model = model_of("mixtral")
    convert(model, Float8BlockScaling(), weights=weights)
    convert(model, weights="mxfp4")
    assert_same_bits(result(model), result(in_mxfp4()))


def test_compiled() -> None:
    """In one graph, which reads the parameters."""
    model = in_mxfp4("qwen3_moe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(result(compiled), result(model))
    other = in_mxfp4("qwen3_moe")
    for p in other.parameters():
        p.detach().copy_(p.roll(1, 0))
    model.load_state_dict(other.state_dict())
    assert_same_bits(result(compiled), result(other))
    assert_same_bits(
        functional_call(in_mxfp4("qwen3_moe"), dict(model.named_parameters()), IDS).logits,
        result(model),
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_saved_as_deepseek_v4_is_published(family: str, tmp_path: Path) -> None:
    """int8 and float8_e8m0fnu, which transformers dequantizes to the same numbers, or keeps."""
    model = in_mxfp4(family)
    model.save_pretrained(tmp_path / "published")
    saved = load_file(tmp_path / "published" / "model.safetensors")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    config = FineGrainedFP8Config(**config["quantization_config"])
    assert (config.expert_dtype, config.scale_fmt) == ("fp4", "ue8m0")
    experts, down = model.model.layers[0].mlp.experts, ("w2", "down_proj")[family == "qwen3_moe"]
    name = next(n for n in saved if n.endswith(f"experts.3.{down}.weight"))
    codes, scales = saved[name], saved[f"{name}_scale_inv"]
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float8_e8m0fnu)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, BF16)
    assert_same_bits(experts.dequantize("down_proj")[3], theirs)

    model.save_pretrained(tmp_path / "own", save_original_format=False)
    with torch.device("meta"):
        loaded = model_of(family)
    loaded = replace_with_fp8_linear(
        loaded, config.modules_to_not_convert, quantization_config=config
    ).to_empty(device="cpu")
    convert(loaded)
    loaded.load_state_dict(load_file(tmp_path / "own" / "model.safetensors"))
    for name, buffer in model.named_buffers():  # not saved
        loaded.get_buffer(name).copy_(buffer)
    addresses = {n: p.data_ptr() for n, p in loaded.named_parameters()}
    for weights in (None, "mxfp4"):
        done = convert(loaded, weights=weights)
        assert_same_bits(result(loaded), result(model))
        how = " as loaded" if weights is None else ""
        [one], [same] = done.converted, convert(model).converted
        assert one.weights == f"frozen in MXFP4{how}"
        assert (one.nbytes, one.num_parameters) == (same.nbytes, same.num_parameters)
    assert {n: p.data_ptr() for n, p in loaded.named_parameters()} == addresses
    state, expected = loaded.state_dict(), model.state_dict()
    assert_same_tensors(state, expected)
    through_pickle(loaded).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert_same_tensors(again, saved)


def test_saved_with_layers_in_high_precision(tmp_path: Path) -> None:
    """Where a pattern of recipes says None; beside FP8 there is no format."""
    model = model_of("qwen3_moe", num_hidden_layers=2)
    convert(model, weights="mxfp4", recipes={"model.layers.1.*": None})
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for layer, dtype in enumerate((torch.int8, BF16)):
        name = f"model.layers.{layer}.mlp.experts"
        assert saved[f"{name}.0.up_proj.weight"].dtype == dtype
        assert (name in config["modules_to_not_convert"]) == (dtype == BF16)
    convert(model, Float8BlockScaling(), weights="fp8", recipes={"model.layers.0.*": None})
    assert "a checkpoint has one: save the model before it is converted" in sentence(
        lambda: model.save_pretrained(tmp_path)
    )


def test_what_learns_where_no_format_is(tmp_path: Path) -> None:
    """One sentence before a file is written, and the way out, which works."""
    model = model_of("aria")
    convert(model, learns_in_mxfp4())
    said = sentence(lambda: model.save_pretrained(tmp_path))
    assert said == (
        "save_pretrained: experts in MXFP4, as DeepSeek-V4's files have it, have no biases, "
        "transposed weights or norms, model.layers.0.mlp.experts has: save high precision by "
        "save_original_format=False, the model before it is converted, or its state_dict()"
    )
    assert not [*tmp_path.iterdir()]
    model.save_pretrained(tmp_path, save_original_format=False)
    saved = load_file(tmp_path / "model.safetensors")
    assert_same_tensors(saved, model.state_dict())
    convert(model)
    model.save_pretrained(tmp_path)  # which no longer learns in MXFP4


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "titan"])
def test_refused(family: str) -> None:
    """GPT-OSS's weights are stored transposed."""
    model = GroupedExperts(E, H, 48)
    if family != "titan":
        model = model_of(family, intermediate_size=48)
    before = [(n, id(p), type(p)) for n, p in model.named_parameters()]
    classes = list(map(type, model.modules()))
    where, weight = "GroupedExperts", "w2_EDF"
    if family != "titan":
        where, weight = "model.layers.0.mlp.experts", "down_proj"
    assert sentence(lambda: convert(model, weights="mxfp4")) == (
        f"convert: {where}: in_features of {weight} must be a multiple of 32 with "
        "weights='mxfp4', got 48"
    )
    assert [(n, id(p), type(p)) for n, p in model.named_parameters()] == before
    assert list(map(type, model.modules())) == classes
