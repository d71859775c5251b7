# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models whose experts are kept in FP8: what is saved, loaded and refused.

tests/clients has the same with the packages that train and load such models.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from safetensors.torch import load_file
from transformers import FineGrainedFP8Config

from grouped_linear import Float8BlockScaling, MXFP8BlockScaling, convert
from support.compare import assert_same_bits, bits
from support.errors import sentence
from support.hugging_face import frozen_names, logits, tiny
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    import grouped_linear.integrations.transformers  # noqa: F401

E, F, H = 3, 128, 32
SIZES = {"intermediate_size": F, "moe_intermediate_size": F, "num_hidden_layers": 2}
PREFIX = {"mixtral": "block_sparse_moe.experts.{}.", "qwen3_moe": "mlp.experts.{}."}
FAMILY = pytest.mark.parametrize("family", PREFIX)


RECIPES = [Float8BlockScaling(), Float8BlockScaling(power_of_two_scales=False)]


def model_of(family: str = "mixtral", **options: Any) -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": E} if family != "qwen3_moe" else {"num_experts": E}
    return tiny(family, **SIZES | experts | options).to(BF16).eval()


def frozen(family: str = "mixtral", **options: Any) -> Any:
    model = model_of(family, **options)
    convert(model, weights="fp8")
    return model


@FAMILY
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_loaded_into_transformers_modules(recipe: Any, family: str, tmp_path: Path) -> None:
    """Those that the saved configuration names; converted they hold the same state."""
    model, plain = model_of(family), model_of(family)
    convert(plain, recipe)
    convert(model, recipe, weights="fp8")
    expected = logits(plain)
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
    assert [type(m).__name__ for m in theirs] == ["FP8Experts"] * 2
    buffers = dict(model.named_buffers())
    for key, buffer in loaded.named_buffers():  # not saved, and to_empty cleared them
        buffer.copy_(buffers[key])
    convert(loaded, recipe)  # takes the bytes of frozen experts as numbers and scales
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    addresses = {name: p.data_ptr() for name, p in loaded.named_parameters()}
    for weights in (None, "fp8"):
        convert(loaded, recipe, weights=weights)
        assert torch.equal(logits(loaded), expected)
    assert {name: p.data_ptr() for name, p in loaded.named_parameters()} == addresses
    assert frozen_names(loaded) == frozen_names(model)
    for of_model in (lambda m: m.state_dict(), lambda m: dict(m.named_parameters())):
        state, same = of_model(model), of_model(loaded)
        assert state.keys() == same.keys()
        for name, t in state.items():
            assert t.dtype == same[name].dtype
            assert_same_bits(bits(same[name].detach()), bits(t.detach()))


def ernie_vl() -> Any:
    """Experts of two sizes, for text and for images, which its configuration has as a list."""
    config = transformers.Ernie4_5_VLMoeTextConfig(
        vocab_size=64,
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=F,
        moe_num_experts=E,
        moe_intermediate_size=[F, 2 * F],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [22, 22, 20]},
    )
    return transformers.Ernie4_5_VLMoeTextModel(config)


def test_what_transformers_cannot_save(tmp_path: Path) -> None:
    """Refused before a file is written; it computes, and its state dict is as any other."""
    messages = []
    models = [tiny(family) for family in ("mixtral", "nemotron_h", "muse_spark")]
    for model in (m.to(BF16) for m in (*models, ernie_vl())):
        convert(model, weights="fp8")
        assert frozen_names(model)
        messages.append(sentence(lambda m=model: m.save_pretrained(tmp_path)))
        assert not [*tmp_path.iterdir()]
        assert getattr(model.config, "quantization_config", None) is None
        model.load_state_dict(model.state_dict())
    assert_expected_inline(
        "\n".join(messages),
        """\
save_pretrained: a checkpoint has gate and up apart, and a block of scales reaches from one into the other where an expert's 48 features are no multiple of 128: save the model before it is converted, or its state_dict()
save_pretrained: transformers' FP8 experts do not know the configuration of model.layers.1.mixer.experts (NemotronHConfig has none of: ('hidden_activation', 'hidden_act')): save the model before it is converted, or its state_dict()
save_pretrained: experts in FP8 have no biases, transposed weights or norms, layers.0.mlp.experts has: save the model before it is converted, or its state_dict()
save_pretrained: transformers' FP8 experts have one size, the configuration of layers.1.mlp.text_moe.experts lists several: save the model before it is converted, or its state_dict()""",  # noqa: E501
    )


def test_experts_that_fp8_does_not_hold() -> None:
    """Refused at once, in one sentence, and left as they were."""
    on_meta = model_of()
    on_meta.model.layers[1].to("meta")
    loaded = frozen()
    mistakes = [
        (tiny("gpt_oss"), {"weights": "fp8"}),
        (tiny("aria"), {"weights": "fp8"}),
        (on_meta, {"weights": "fp8"}),
        (loaded, {"recipe": MXFP8BlockScaling()}),
        (loaded, {}),
        (loaded, {"weights": "mxfp4"}),
    ]
    messages = []
    for model, options in mistakes:
        before = {name: p.dtype for name, p in model.named_parameters()}
        messages.append(sentence(lambda m=model, o=options: convert(m, **o)))
        assert {name: p.dtype for name, p in model.named_parameters()} == before
    assert_expected_inline(
        "\n".join(messages),
        """\
convert: model.layers.0.mlp.experts: weights='fp8' is for experts without biases that are stored as [E, out_features, in_features], as checkpoints in FP8 have them: use weights='mxfp4', 'both' or None
convert: model.layers.0.mlp.experts: weights='fp8' is for experts without biases that are stored as [E, out_features, in_features], as checkpoints in FP8 have them: use weights='mxfp4', 'both' or None
convert: model.layers.1.mlp.experts: gate_up_proj is on the meta device, it has no numbers yet: load the checkpoint before
convert: model.layers.0.mlp.experts: weights are in FP8 already and need the recipe Float8BlockScaling, got MXFP8BlockScaling(); or load the checkpoint with FineGrainedFP8Config(dequantize=True)
convert: model.layers.0.mlp.experts: weights are in FP8 already and need the recipe Float8BlockScaling, got None; or load the checkpoint with FineGrainedFP8Config(dequantize=True)
convert: model.layers.0.mlp.experts: the weights are frozen in FP8 and stay so: take weights='fp8', or load the model in high precision (a checkpoint: dequantize=True in its quantization config)""",  # noqa: E501
    )
