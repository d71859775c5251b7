# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and from_pretrained, with experts that are kept in FP8."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from grouped_linear import convert
from grouped_linear.quantized.frozen import frozen_of
from support.compare import assert_same_bits, assert_same_tensors

pytest.importorskip("accelerate")  # Trainer and FP8 checkpoints need it
from transformers import FineGrainedFP8Config, MixtralForCausalLM

from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors
from support.four_bits import learns_in_mxfp4
from support.hugging_face import tiny as tiny_model
from support.trainer import trainer_of

SIZES = {"intermediate_size": 64, "moe_intermediate_size": 64}


def train(model: nn.Module, dataset: Any, directory: Path, **resumed: Any) -> None:
    trainer_of(model, dataset, directory, save_steps=2).train(**resumed)


def test_experts_that_learn(tiny: Any, dataset: Any, tmp_path: Path) -> None:
    """A run that is resumed from its first checkpoint ends where the whole run does."""
    whole, resumed = tiny(), tiny()
    before = whole.experts.down_proj.detach().clone()
    train(whole, dataset, tmp_path)
    assert not torch.equal(whole.experts.down_proj.detach(), before)
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert saved.keys() == whole.state_dict().keys()
    assert_same_bits(saved["experts.down_proj"], whole.state_dict()["experts.down_proj"])
    train(resumed, dataset, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_tensors(resumed.state_dict(), whole.state_dict())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12)[None]).logits


def test_experts_that_learn_in_mxfp4(dataset: Any, tmp_path: Path) -> None:
    """Saved as published; in high precision by the option by which a run is resumed."""

    def trained(directory: str, **resumed: Any) -> Any:
        torch.manual_seed(0)
        model = tiny_model("mixtral", num_local_experts=4, **SIZES)
        convert(model, learns_in_mxfp4())
        if directory != "published":
            model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
        train(model, dataset, tmp_path / directory, **resumed)
        return model

    whole, first = trained("whole"), str(tmp_path / "whole" / "checkpoint-2")
    resumed = trained("resumed", resume_from_checkpoint=first)
    assert_same_tensors(resumed.state_dict(), whole.state_dict())
    published = trained("published")
    saved = load_file(tmp_path / "published" / "checkpoint-4" / "model.safetensors")
    assert {t.dtype for n, t in saved.items() if ".experts." in n} == {
        torch.int8,
        torch.float8_e8m0fnu,
    }
    assert_same_tensors(dict(CheckpointTensors(published)), saved)
    half = str(tmp_path / "published" / "checkpoint-2")
    with pytest.raises(RuntimeError, match="save with save_original_format=False"):
        trained("again", resume_from_checkpoint=half)


def test_experts_of_transformers(quantized_mixtral: Any, dataset: Any, tmp_path: Path) -> None:
    """What is not in FP8 learns; the checkpoint loads, dequantized."""
    train(quantized_mixtral, dataset, tmp_path)
    directory = tmp_path / "checkpoint-4"
    saved = load_file(directory / "model.safetensors")
    in_fp8 = [name for name, t in saved.items() if t.dtype == torch.float8_e4m3fn]
    assert len(in_fp8) == 2 * 4 * 3
    assert all(f"{name}_scale_inv" in saved for name in in_fp8)
    loaded = MixtralForCausalLM.from_pretrained(
        directory,
        experts_implementation="grouped_linear_fp8",
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    for name, p in quantized_mixtral.named_parameters():
        module_name, _, own = name.rpartition(".")
        module = quantized_mixtral.get_submodule(module_name)
        if own in frozen_of(module):
            p = module.dequantize(own)
        if p.is_floating_point():
            assert torch.equal(loaded.get_parameter(name), p), name
    assert torch.equal(logits(loaded), logits(quantized_mixtral))
