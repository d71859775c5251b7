# SPDX-License-Identifier: Apache-2.0
"""Checkpoints loaded straight into few bits, beside ``convert`` of a model that is in memory."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, convert
from grouped_linear.integrations.checkpoints.quantizer import GroupedLinearConfig
from grouped_linear.quantized.frozen import FrozenBytes
from support.compare import assert_same_bits, assert_same_tensors
from support.errors import sentence
from support.hugging_face import FAMILIES, IDS, tiny
from support.layers import through_pickle
from support.tensors import BF16, FP32

WEIGHTS = "fp8", "mxfp4"
NOT_SAVED = "aria", "muse_spark", "nemotron_h"  # docs/models.md; in FP8 none of these sizes


def write(folder: Path, family: str = "mixtral", dtype: torch.dtype = BF16, **options: Any) -> Path:
    """A checkpoint in 16 bits, in several files, of random numbers of some size."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64}
    sizes |= {"moe_hidden_size": 32} if family == "muse_spark" else {}
    model = tiny(family, **sizes | options)
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder


def class_of(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name)


def load(folder: Path, weights: Any = "mxfp4", recipe: Any = None, **options: Any) -> Any:
    config = GroupedLinearConfig(weights, recipe, recipes=options.pop("recipes", None))
    return class_of(folder).from_pretrained(folder, quantization_config=config, **options)


def converted(folder: Path, weights: Any = "mxfp4", recipe: Any = None, **options: Any) -> Any:
    recipes = options.pop("recipes", None)
    model = class_of(folder).from_pretrained(folder, **options)
    convert(model, recipe, weights=weights, recipes=recipes)
    return model


def output(model: Any) -> Tensor:
    with torch.no_grad():
        y = model(IDS)
    found: Tensor = getattr(y, "logits", getattr(y, "last_hidden_state", y))
    return found


def assert_same_model(model: Any, expected: Any) -> None:
    """Bits, names, classes of parameters, and what is computed."""
    assert_same_tensors(dict(model.state_dict()), dict(expected.state_dict()))
    kinds = [
        {n: (type(p), p.requires_grad) for n, p in m.named_parameters()} for m in (model, expected)
    ]
    assert kinds[0] == kinds[1]
    assert FrozenBytes in {kind for kind, _ in kinds[0].values()}
    assert_same_bits(output(model), output(expected))
    configs = [m.config.to_dict() | {"_name_or_path": ""} for m in (model, expected)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_converted(family: str, weights: Any, tmp_path: Path) -> None:
    """Each form of experts; those that convert refuses are refused before a file is read."""
    folder = write(tmp_path / "plain", family)
    if weights == "fp8" and family in ("aria", "gpt_oss"):
        expected = sentence(lambda: converted(folder, weights))
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")
        assert sentence(lambda: load(folder, weights)) == expected
        return
    model, expected = load(folder, weights), converted(folder, weights)
    assert_same_model(model, expected)
    if weights == "fp8" or family in NOT_SAVED:
        given = sentence(lambda: model.save_pretrained(tmp_path / "ours"))
        assert given == sentence(lambda: expected.save_pretrained(tmp_path / "theirs"))
        assert not (tmp_path / "ours").exists()
        return
    expected.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")]
    assert configs[0] == configs[1]
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        assert_same_tensors(load_file(tmp_path / "ours" / file.name), load_file(file))
    if find_spec("accelerate") is None:  # transformers needs it to load files in few bits
        return
    again = load(tmp_path / "ours", weights)
    assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_bits(output(again), output(model))


@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_options(weights: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of from_pretrained, and those of convert."""
    folder = write(tmp_path, num_hidden_layers=2, dtype=FP32)
    recipe = MXFP8BlockScaling() if weights == "mxfp4" else Float8BlockScaling()
    options: dict[str, Any] = {"dtype": dtype, "recipes": {"model.layers.1.*": None}}
    model = load(folder, weights, recipe, low_cpu_mem_usage=True, **options)
    expected = converted(folder, weights, recipe, **options)
    assert_same_model(model, expected)
    assert model.model.layers[1].mlp.experts.down_proj.dtype == dtype
    for other in (copy.deepcopy(model), through_pickle(model)):
        assert_same_model(other, expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_names_that_the_model_has(weights: Any, tmp_path: Path) -> None:
    """Files of save_original_format=False, in 16 bits and few."""
    folder = write(tmp_path / "plain", intermediate_size=128, moe_intermediate_size=128)
    plain, expected = class_of(folder).from_pretrained(folder), converted(folder, weights)
    for name, model in {"plain": plain, "few": expected}.items():
        model.save_pretrained(tmp_path / "fused" / name, save_original_format=False)
    assert_same_model(load(tmp_path / "fused" / "plain", weights), expected)
    if find_spec("accelerate") is not None:  # transformers needs it to load files in few bits
        again = load(tmp_path / "fused" / "few", weights)
        assert_same_tensors(dict(again.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_bad_file(weights: Any, tmp_path: Path) -> None:
    """One sentence or transformers' report, and no model."""
    folder = write(tmp_path / "plain")
    whole = {}
    for file in folder.glob("*.safetensors"):
        whole |= load_file(file)
    prefix = "model.layers.0.block_sparse_moe.experts"

    def load_without(*missing: str, **others: Tensor) -> Any:
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "config.json").write_text((folder / "config.json").read_text())
        state = {n: t for n, t in whole.items() if n not in missing} | others
        save_file(state, broken / "model.safetensors", {"format": "pt"})
        return load(broken, weights)

    assert sentence(lambda: load_without(f"{prefix}.3.w1.weight")) == (
        "GroupedLinearConfig: model.layers.0.mlp.experts.gate_up_proj has 5 experts, the "
        "checkpoint {'.experts.*.w1.weight': 4, '.experts.*.w3.weight': 5}"
    )
    assert sentence(lambda: load_without(*(f"{prefix}.{e}.w2.weight" for e in range(5)))) == (
        "GroupedLinearConfig: the checkpoint has no model.layers.0.mlp.experts.down_proj"
    )
    assert "has 5 experts, the checkpoint {'.experts.*.w2.weight': 4}" in sentence(
        lambda: load_without(f"{prefix}.3.w2.weight")
    )
    assert "has 5 experts, the checkpoint {'.experts.*.w2.weight': 6}" in sentence(
        lambda: load_without(**{f"{prefix}.5.w2.weight": torch.ones(32, 64)})
    )
    for shape in ((32, 96), (96, 64), (32, 50)):
        w = torch.ones(shape, dtype=BF16)
        assert sentence(lambda w=w: load_without(**{f"{prefix}.3.w2.weight": w})) == (
            f"GroupedLinearConfig: the checkpoint has {[1, *w.shape]} in bfloat16 for model.layers."
            "0.mlp.experts.down_proj, whose experts are [32, 64], with scales if in FP8"
        )
    load_without()


def test_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, intermediate_size=48)
    assert sentence(lambda: load(folder)) == sentence(lambda: converted(folder))
    assert "multiple of 32" in sentence(lambda: load(folder))
    load(folder, "fp8")
    assert "no experts have a name that matches 'x'" in sentence(
        lambda: load(folder, "fp8", recipes={"x": None})
    )
    for weights in ("both", None, "int4"):
        assert sentence(lambda w=weights: GroupedLinearConfig(w)) == (
            f"GroupedLinearConfig: weights must be 'fp8' or 'mxfp4', got {weights!r}"
        )
    assert "needs no recipe, Float8BlockScaling" in sentence(
        lambda: GroupedLinearConfig("mxfp4", Float8CurrentScaling())
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert "is quantized with BitsAndBytesConfig" in sentence(lambda: load(folder))


def test_a_state_dict_of_experts_in_16_bits_is_saved(tmp_path: Path) -> None:
    """transformers leaves out what a model with a quantizer is given."""
    model = load(write(tmp_path / "file"), recipes={"*": None})
    given = {name: 2 * t for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=given)
    model.load_state_dict(given)
    model.save_pretrained(tmp_path / "own")
    found, own = (load_file(tmp_path / f / "model.safetensors") for f in ("given", "own"))
    assert_same_tensors(found, own)
    assert "quantization_config" not in json.loads((tmp_path / "own" / "config.json").read_text())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tied_experts(weights: Any, tmp_path: Path) -> None:
    """The encoder has the decoder's, once in memory; of each byte there is one in a file."""
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    text |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128}
    vision = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config = transformers.DiffusionGemmaConfig(
        text_config=text | {"layer_types": ["sliding_attention"]}, vision_config=vision
    )
    plain = transformers.DiffusionGemmaForBlockDiffusion(config).to(BF16)
    plain.save_pretrained(tmp_path / "plain")
    model, expected = load(tmp_path / "plain", weights), converted(tmp_path / "plain", weights)
    expected.save_pretrained(tmp_path / "file")
    expected.save_pretrained(tmp_path / "fused", save_original_format=False)
    state = expected.state_dict()
    file = load_file(tmp_path / "file" / "model.safetensors")
    ends = "gate_up_proj", "down_proj"  # of tied ones in files: not these, but their scales
    assert not [n for n in file if n.startswith("model.encoder") and n.endswith(ends)]
    assert {n for n in state if n.endswith("_proj_scale_inv")} <= {*file}
    expected.save_pretrained(tmp_path / "again", state_dict=file)
    models = [model, expected, through_pickle(expected)]
    if find_spec("accelerate") is not None:
        models += [load(tmp_path / name, weights) for name in ("file", "fused", "again")]
    for found in models:
        assert_same_tensors(dict(found.state_dict()), dict(state))
        assert len([*found.parameters()]) == len([*plain.parameters()]) + 2  # scales
    file = load_file(tmp_path / "fused" / "model.safetensors")
    missing, unexpected = model.load_state_dict(file, strict=False)  # as Trainer resumes
    assert all(n.startswith("model.encoder") for n in missing if ".experts." in n)
    assert not unexpected
    assert_same_tensors(dict(model.state_dict()), dict(state))


def test_steps_of_other_files(tmp_path: Path) -> None:
    """Experts of two modules in one list, and weights that a file has transposed."""
    text = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    ernie = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [64, 32]}
    ernie |= {"mlp_layer_types": ["sparse"]}
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [6, 6, 4]}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    qwen3 = {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32}
    seen = {**vision, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    for model, config in (
        (
            transformers.Ernie4_5_VLMoeForConditionalGeneration,
            transformers.Ernie4_5_VLMoeConfig(
                text_config=text | ernie | {"rope_parameters": rope}, vision_config=vision
            ),
        ),
        (
            transformers.Qwen3VLMoeForConditionalGeneration,
            transformers.Qwen3VLMoeConfig(text_config=text | qwen3, vision_config=seen),
        ),
    ):
        folder = tmp_path / model.__name__
        model(config).to(BF16).save_pretrained(folder)
        for weights in WEIGHTS:
            found, expected = load(folder, weights), converted(folder, weights)
            assert len(found.hf_quantizer.report.converted) == 2 - ("Qwen3" in model.__name__)
            assert_same_tensors(dict(found.state_dict()), dict(expected.state_dict()))
