# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS's checkpoints in MXFP4, loaded as bytes, beside transformers' dequantized weights."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GptOssModel

from grouped_linear import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    convert,
)
from grouped_linear.contrib import compare
from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors
from support.compare import assert_same_bits, assert_same_tensors, outcome, relative_error
from support.errors import sentence
from support.four_bits import learns_in_mxfp4
from support.gpt_oss import IDS, QUANTIZATION, dequantized, packed, write_checkpoint
from support.layers import through_pickle
from support.tensors import BF16, DTYPES, FP32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpt_oss"))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS.to(model.device)).logits
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_dequantized(folder: Path, device: str, dtype: torch.dtype) -> None:
    """Without a recipe: rounding of activations is all that differs from transformers' experts."""
    expected = logits(dequantized(folder, dtype=dtype).to(device))
    actual = logits(packed(folder, dtype=dtype).to(device))
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < max(1e-5, 4 * torch.finfo(dtype).eps)


def test_scales_are_spread_with_their_codes(folder: Path) -> None:
    """By transformers' expert parallelism (tests/clients/test_distributed.py)."""
    plan = packed(folder).ep_plan
    for name in ("gate_up_proj", "down_proj"):
        codes = f"model.layers.*.mlp.experts.{name}"
        assert plan[f"{codes}_scale_inv"] == plan[codes] == "grouped_gemm"


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling(), MXFP8BlockScaling()], ids=repr)
def test_same_bits_as_converted(folder: Path, recipe: Recipe | None) -> None:
    """Without a recipe; with one activations are rounded beside weights that are exact."""
    model, other = packed(folder), dequantized(folder)
    report = convert(model, recipe)
    convert(other)
    if recipe is None:
        assert_same_bits(logits(model), logits(other))
    else:
        assert relative_error(logits(model), logits(other)) < 0.05  # 0.026 to 0.035 by processor
    codes, scales = 2 * 4 * (192 * 32 + 64 * 48), 2 * 4 * (192 * 2 + 64 * 3)
    assert sum(one.nbytes for one in report.converted) == codes + scales
    assert report.converted[0].num_parameters == sum(
        p.numel() for p in other.model.layers[0].mlp.experts.parameters()
    )
    assert all(one.weights == "frozen in MXFP4" for one in report.converted)


class LargestFloat(TorchDispatchMode):
    """The most bytes of a floating-point tensor with memory that an op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta:
                self.nbytes = max(self.nbytes, t.nbytes)
        return out


def test_nothing_is_dequantized(folder: Path) -> None:
    """From the files to adapters' gradients of the input."""
    smallest_weight = 4 * 64 * 96 * BF16.itemsize
    with LargestFloat() as theirs:
        dequantized(folder)
    assert theirs.nbytes >= smallest_weight
    with LargestFloat() as ours:
        model = packed(folder)
        experts = model.model.layers[0].mlp.experts
        x = torch.randn(5, 64, dtype=BF16, requires_grad=True)
        chosen = torch.tensor([[0, 1]] * 5)
        experts(x, chosen, torch.ones(5, 2, dtype=BF16)).sum().backward()
    assert ours.nbytes < smallest_weight
    assert {p.dtype for n, p in experts.named_parameters() if "bias" not in n} == {torch.uint8}


def test_generates(folder: Path, device: str) -> None:
    model, other = packed(folder, dtype=FP32), dequantized(folder, dtype=FP32)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = other.to(device).generate(IDS.to(device), **options)
    assert torch.equal(model.to(device).generate(IDS.to(device), **options), expected)


def test_compiles(folder: Path, device: str) -> None:
    experts = packed(folder).model.layers[0].mlp.experts.to(device)
    compiled = torch.compile(experts, fullgraph=True)
    x = torch.randn(20, 64, dtype=BF16, device=device, requires_grad=True)
    chosen = torch.rand(20, 4).topk(2).indices.to(device)
    scores = torch.rand(20, 2, dtype=BF16, device=device, requires_grad=True)
    results = [outcome(call(x, chosen, scores), (x, scores)) for call in (experts, compiled)]
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 2e-2
        assert device == "cuda" or torch.equal(actual, expected)


@pytest.mark.parametrize("way", ["as loaded", "FP8 activations", "deepcopy", "pickle", "state"])
def test_saves_the_files_bits(folder: Path, tmp_path: Path, way: str) -> None:
    model = packed(folder)
    expected = logits(model)
    if way == "FP8 activations":
        convert(model, Float8BlockScaling())
    if way in ("deepcopy", "pickle"):
        model = copy.deepcopy(model) if way == "deepcopy" else through_pickle(model)
    if way == "state":
        state, model = model.state_dict(), packed(folder)
        for name, p in model.named_parameters():
            if ".experts." in name:
                p.data.zero_()
        model.load_state_dict(state)
    if way != "FP8 activations":
        assert_same_bits(logits(model), expected)
    model.save_pretrained(tmp_path)
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert_same_tensors(saved, source)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == QUANTIZATION
    assert_same_bits(logits(packed(tmp_path)), expected)
    assert_same_bits(logits(dequantized(tmp_path)), logits(dequantized(folder)))


@pytest.mark.parametrize("weights", [None, "both"])
@pytest.mark.parametrize("given", [False, True])
def test_saves_what_learns_as_published(
    folder: Path, tmp_path: Path, weights: Any, given: bool
) -> None:
    """transformers reads it and computes the trainer's logits; so does what keeps bytes."""
    trainer = dequantized(folder)
    convert(trainer, learns_in_mxfp4(fp8=weights == "both"), weights=weights)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for _ in range(2):
        trainer(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if weights == "both":
        in_fp8 = logits(trainer)
    convert(trainer, learns_in_mxfp4())
    expected, state = logits(trainer), trainer.state_dict()
    before = {name: t.detach().clone() for name, t in state.items()}
    trainer.save_pretrained(tmp_path, **({"state_dict": state} if given else {}))
    assert getattr(trainer.config, "quantization_config", None) is None
    assert state.keys() == before.keys()
    for name, t in trainer.state_dict().items():
        assert torch.equal(t, before[name])
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {
        n: (t.shape, t.dtype) for n, t in source.items()
    }
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == QUANTIZATION
    name = "model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(saved[f"{name}_blocks"], source[f"{name}_blocks"])
    assert_same_bits(logits(loaded := packed(tmp_path)), expected)
    if weights == "both":
        convert(loaded, Float8BlockScaling())
        assert_same_bits(logits(loaded), in_fp8)
    stock = dequantized(tmp_path)
    # Its sums are rounded.
    assert relative_error(logits(stock), expected) < 4 * torch.finfo(BF16).eps
    convert(stock)
    assert_same_bits(logits(stock), expected)
    assert_same_tensors(saved, dict(CheckpointTensors(trainer)))


@pytest.mark.parametrize("weights", [None, "both"])
def test_high_precision_of_what_learns(folder: Path, tmp_path: Path, weights: Any) -> None:
    """By the option that a run needs to go on; the way out also where no format is."""
    trainer = dequantized(folder, dtype=FP32)
    convert(trainer, learns_in_mxfp4(fp8=weights == "both"), weights=weights)
    trainer.save_pretrained = partial(trainer.save_pretrained, save_original_format=False)
    trainer.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    plain = type(trainer).from_pretrained(tmp_path)
    for name, p in plain.named_parameters():
        assert torch.equal(p, trainer.get_parameter(name))
    trainer.load_state_dict(load_file(tmp_path / "model.safetensors"))  # as Trainer resumes


def test_frozen_by_the_names_of_the_model(folder: Path, tmp_path: Path) -> None:
    """As a run needs them that goes on; GroupedLinearConfig reads these files, too."""
    model = packed(folder)
    model.save_pretrained(tmp_path, save_original_format=False)
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    assert_same_tensors(dict(packed(tmp_path).state_dict()), expected)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same_tensors(dict(model.state_dict()), expected)


def test_a_layer_in_high_precision(folder: Path, tmp_path: Path) -> None:
    """It is written so, and named in the configuration; one that joins the others, as they are."""
    model = dequantized(folder)
    convert(model, weights="mxfp4", recipes={"model.layers.1.*": None})
    expected = logits(model)
    model.save_pretrained(tmp_path / "one")
    described = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert described["modules_to_not_convert"][-1] == "model.layers.1.mlp.experts"
    loaded = packed(tmp_path / "one", recipes={"model.layers.1.*": None})
    assert_same_bits(logits(loaded), expected)
    assert [p.dtype for n, p in loaded.named_parameters() if n.endswith("down_proj")] == [
        torch.uint8,
        BF16,
    ]
    convert(loaded, weights="mxfp4")
    asked_for_all = packed(tmp_path / "one")
    assert_same_tensors(dict(asked_for_all.state_dict()), dict(loaded.state_dict()))
    loaded.save_pretrained(tmp_path / "all")
    saved, source = (load_file(p / "model.safetensors") for p in (tmp_path / "all", folder))
    assert_same_tensors(saved, source)
    assert_same_bits(logits(packed(tmp_path / "all")), logits(packed(folder)))


def test_compare(folder: Path) -> None:
    """Beside the same numbers in high precision: the biases and the input are what FP8 rounds."""
    model = packed(folder)
    convert(model, Float8BlockScaling())
    compared = str(compare(model, lambda: model(IDS, labels=IDS).loss.backward()))
    assert "model.layers.1.mlp.experts" in compared


def test_loads_high_precision(tmp_path: Path) -> None:
    """Which is transposed: down_proj [E, K, N] of the published models is square."""
    folder = write_checkpoint(tmp_path, intermediate_size=64)
    model, other = packed(folder), dequantized(folder)
    convert(other)
    name = "model.layers.1.mlp.experts.down_proj"
    experts, w = model.model.layers[1].mlp.experts, other.get_parameter(name).detach()
    w.mul_(0.5)
    for assign in (False, True):
        experts.down_proj.zero_()
        model.load_state_dict({name: w}, strict=False, assign=assign)
        assert_same_bits(experts.dequantize("down_proj").contiguous(), w)
        assert_same_bits(logits(model), logits(other))
    learner = dequantized(folder)
    convert(learner, Float8BlockScaling(), weights="both")
    learner.load_state_dict(model.state_dict())
    assert_same_bits(learner.get_parameter(name).detach() * 1, w)


def test_dequantized_and_back(folder: Path, tmp_path: Path) -> None:
    """Numbers of the format are kept. What is loaded packed is what weights="mxfp4" makes."""
    model = packed(folder)
    expected, done = logits(model), convert(model, weights="mxfp4")
    assert [one.error for one in done.converted] == [None, None]
    model = dequantized(folder)
    done = convert(model, weights="mxfp4")
    assert [one.error for one in done.converted] == [0, 0]
    assert_same_bits(logits(model), expected)
    model.save_pretrained(tmp_path)
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert_same_tensors(saved, source)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == QUANTIZATION
    loaded = packed(folder)
    loaded.load_state_dict(model.state_dict())
    assert_same_bits(logits(loaded), expected)


def test_a_model_without_a_head(folder: Path) -> None:
    model = GptOssModel.from_pretrained(folder, quantization_config=GroupedLinearConfig("mxfp4"))
    expected = packed(folder).model(IDS).last_hidden_state
    assert_same_bits(model(IDS).last_hidden_state, expected)


def test_refused(folder: Path) -> None:
    model = packed(folder)
    expected = logits(model)
    for weights in ("fp8", "both"):
        message = sentence(lambda w=weights: convert(model, weights=w))
        assert message == (
            "convert: model.layers.0.mlp.experts: the weights are frozen in MXFP4 and stay so: "
            "take weights='mxfp4', or load the model in high precision (a checkpoint: "
            "dequantize=True in its quantization config)"
        )
    assert sentence(lambda: convert(model, Float8CurrentScaling())) == (
        "convert: model.layers.0.mlp.experts: weights='mxfp4' needs no recipe, Float8BlockScaling "
        "or MXFP8BlockScaling, got Float8CurrentScaling()"
    )
    assert_same_bits(logits(model), expected)
    model.set_experts_implementation("eager")  # which reaches no converted experts
    assert_same_bits(logits(model), expected)

    assert "is for experts without biases" in sentence(lambda: packed(folder, weights="fp8"))


@pytest.mark.parametrize(
    ("in_file", "parameter"),
    [
        ("down_proj_scales", "down_proj_scale_inv"),
        ("gate_up_proj_blocks", "gate_up_proj"),
        ("down_proj_bias", "down_proj_bias"),
    ],
)
def test_a_file_without_a_tensor(
    folder: Path, tmp_path: Path, in_file: str, parameter: str
) -> None:
    """transformers warns, and leaves memory as it was."""
    state = load_file(folder / "model.safetensors")
    del state[f"model.layers.1.mlp.experts.{in_file}"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert sentence(lambda: packed(tmp_path)) == (
        f"GroupedLinearConfig: the checkpoint has no model.layers.1.mlp.experts.{parameter}"
    )


def test_with_a_recipe(folder: Path) -> None:
    model, other = packed(folder, recipe=Float8BlockScaling()), packed(folder)
    convert(other, Float8BlockScaling())
    assert_same_bits(logits(model), logits(other))
