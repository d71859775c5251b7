# SPDX-License-Identifier: Apache-2.0
"""Weights to a sampler: names of a checkpoint in FP8, and the bits that training multiplies.

E experts, H features of a token, F features inside an expert.
"""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FineGrainedFP8Config

from grouped_linear import Float8BlockScaling, Float8CurrentScaling, GroupedMLP, convert
from support.compare import assert_same_bits, assert_same_tensors
from support.errors import sentence
from support.hugging_face import tiny
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    from grouped_linear.integrations.checkpoints import fp8
    from grouped_linear.integrations.checkpoints.fp8 import fp8_quantization_config, fp8_tensors

E, F, H = 3, 256, 144
PREFIX = {"mixtral": "block_sparse_moe.experts.{}.", "qwen3_moe": "mlp.experts.{}."}
NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
E4M3 = torch.float8_e4m3fn
WEIGHTS = pytest.mark.parametrize("weights", ["both", "fp8"])
FAMILY = pytest.mark.parametrize("family", PREFIX)


def model_of(family: str = "mixtral", device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": H,
        "intermediate_size": F,
        "moe_intermediate_size": F,
        "num_hidden_layers": 2,
        "num_experts" if family == "qwen3_moe" else "num_local_experts": E,
    }
    return tiny(family, **sizes | options).to(device, BF16)


class Multiplied(TorchDispatchMode):
    """The weights in FP8 that GEMMs read as [E, N, K], and all their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.scales: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "grouped_linear" and "_mm" in func._schema.name:
            given = [t for t in args if isinstance(t, Tensor) and t.dim() == 3]
            self.weights += [t.mT for t in given if t.dtype == E4M3 and t.mT.is_contiguous()]
            self.weights += [t for t in given if t.dtype == E4M3 and t.is_contiguous()]
            self.scales += [s for t in given if t.dtype == torch.float32 for s in (t, t.mT)]
        return func(*args, **(kwargs or {}))


def is_among(t: Tensor, multiplied: list[Tensor]) -> bool:
    return any(
        m.shape == t.shape and torch.equal(m.view(torch.uint8), t.view(torch.uint8))
        for m in (m.contiguous() for m in multiplied)
    )


@WEIGHTS
@FAMILY
def test_what_training_multiplied(family: str, weights: Any, device: str) -> None:
    """In each step, those that a fused optimizer has written among them."""
    model = model_of(family, device)
    convert(model, Float8BlockScaling(), weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    ids, handed = torch.arange(14, device=device).reshape(2, 7), []
    for _ in range(3):
        tensors = {name: t.clone() for name, t in fp8_tensors(model)}
        with Multiplied() as multiplied:
            loss = model(ids, labels=ids).loss
        loss.backward()
        for layer in range(2):
            names = [f"model.layers.{layer}.{PREFIX[family]}{n}.weight" for n in NAMES[family]]
            for parts in (names[:2], names[2:]):
                for suffix, found in (
                    ("", multiplied.weights),
                    ("_scale_inv", multiplied.scales),
                ):
                    stacked = torch.stack(
                        [
                            torch.cat([tensors[n.format(e) + suffix] for n in parts])
                            for e in range(E)
                        ]
                    )
                    assert is_among(stacked, found)
        handed.append(tensors)
        optimizer.step()
        optimizer.zero_grad()
    changed = [
        n for n in handed[0] if not torch.equal(*(h[n].view(torch.uint8) for h in handed[1:]))
    ]
    kinds = {n.rpartition(".")[2] for n in changed if ".experts." in n}
    assert kinds == ({"weight", "weight_scale_inv"} if weights == "both" else set())


@FAMILY
def test_names_are_those_of_a_saved_checkpoint(family: str, tmp_path: Path) -> None:
    """Views of the model's memory, in the two ways in which weights are kept."""
    models = {weights: model_of(family) for weights in ("both", "fp8")}
    for weights, model in models.items():
        convert(model, Float8BlockScaling(), weights=weights)
    models["fp8"].save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for model in models.values():
        pairs = [*fp8_tensors(model)]
        tensors = dict(pairs)
        assert len(pairs) == len(tensors)
        assert_same_tensors(tensors, saved)
        down = model.model.layers[0].mlp.experts.down_proj
        q = down if down.dtype == torch.uint8 else down.q
        name = f"model.layers.0.{PREFIX[family].format(1)}{NAMES[family][2]}.weight"
        assert tensors[name].data_ptr() == q[1].data_ptr()
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert json.loads(json.dumps(fp8_quantization_config(models["both"]))) == written


class SamplerExperts:
    """Experts of a sampler, loaded as vLLM's and SGLang's ``load_weights`` do: by names alone.

    They hold w13 [E, 2 F, H] and w2 [E, H, F] in e4m3, and a scale of each block.
    """

    def __init__(self) -> None:
        self.w13 = torch.zeros(E, 2 * F, H, dtype=E4M3)
        self.w2 = torch.zeros(E, H, F, dtype=E4M3)
        self.w13_scale = torch.zeros(E, 2 * F // 128, 2)
        self.w2_scale = torch.zeros(E, 2, F // 128)

    def load(self, family: str, name: str, loaded: Tensor) -> None:
        gate, up, _ = NAMES[family]
        number, projection, kind = name.split(".")[-3:]
        of_w13 = self.w13_scale if kind == "weight_scale_inv" else self.w13
        of_w2 = self.w2_scale if kind == "weight_scale_inv" else self.w2
        rows = (of_w13 if projection in (gate, up) else of_w2)[int(number)]
        if projection in (gate, up):
            rows = rows.chunk(2)[projection == up]
        assert rows.dtype == loaded.dtype
        assert rows.shape == loaded.shape
        rows.copy_(loaded)


@WEIGHTS
@FAMILY
def test_a_sampler_computes_the_bits_of_training(family: str, weights: Any) -> None:
    model = model_of(family)
    convert(model, Float8BlockScaling(), weights=weights)
    sampler = SamplerExperts()
    for name, t in fp8_tensors(model):
        if name.startswith("model.layers.1.") and ".experts." in name:
            sampler.load(family, name, t)
    mlp = GroupedMLP(E, H, F, recipe=Float8BlockScaling(), weights="fp8")
    parts = {"gate_up_proj": sampler.w13, "gate_up_proj_scale_inv": sampler.w13_scale}
    mlp.load_state_dict(parts | {"down_proj": sampler.w2, "down_proj_scale_inv": sampler.w2_scale})
    x, scores = torch.randn(10, H, dtype=BF16), torch.rand(10, E)
    experts = model.model.layers[1].mlp.experts
    top, chosen = scores.topk(2)
    assert_same_bits(mlp(x, top, chosen), experts(x, chosen, top))


def loaded(model: Any, **options: Any) -> Any:
    """As transformers loads a checkpoint of this model, which it describes."""
    config = FineGrainedFP8Config(**fp8_quantization_config(model) | options)
    empty = replace_with_fp8_linear(
        model_of("qwen3_moe"), config.modules_to_not_convert, quantization_config=config
    ).to_empty(device="cpu")
    convert(empty, Float8BlockScaling())  # whose experts take the bytes of frozen ones
    empty.load_state_dict(model.state_dict())
    empty.hf_quantizer = FineGrainedFP8HfQuantizer(config)
    empty.config.quantization_config = config
    *_, empty._weight_conversions = fp8._in_blocks("loaded", model)
    return empty


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_a_checkpoint_in_fp8(scale_fmt: str) -> None:
    """As it was loaded, and frozen; scales that were published as exponents are float32."""
    model = model_of("qwen3_moe")
    convert(model, weights="fp8")
    checkpoint = loaded(model, scale_fmt=scale_fmt)
    scale = checkpoint.model.layers[0].mlp.experts.down_proj_scale_inv
    assert scale.dtype == (torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu)
    expected = dict(fp8_tensors(model))
    for weights in (None, "fp8"):
        convert(checkpoint, Float8BlockScaling(), weights=weights)
        assert fp8_quantization_config(checkpoint)["scale_fmt"] == scale_fmt
        tensors = dict(fp8_tensors(checkpoint))
        assert_same_tensors(tensors, expected)
        with torch.no_grad():
            assert_same_bits(
                checkpoint.model.layers[0].mlp(torch.ones(1, 1, H, dtype=BF16)),
                model.model.layers[0].mlp(torch.ones(1, 1, H, dtype=BF16)),
            )


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_a_checkpoint_with_a_layer_in_high_precision(weights: Any, tmp_path: Path) -> None:
    """Tensors and configurations say the same, for a sampler and in files."""
    model = model_of("qwen3_moe")
    convert(model, Float8BlockScaling(), weights="fp8", recipes={"model.layers.1.*": None})
    model = loaded(model)
    assert type(model.model.layers[1].mlp.experts).__name__ == "GroupedQwen3MoeExperts"
    convert(model, Float8BlockScaling(), weights=weights)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert json.loads(json.dumps(fp8_quantization_config(model))) == written
    saved, tensors = load_file(tmp_path / "model.safetensors"), dict(fp8_tensors(model))
    assert_same_tensors(tensors, saved)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        in_fp8 = layer == 0 or weights == "fp8"
        assert (experts not in written["modules_to_not_convert"]) == in_fp8
        assert (saved[f"{experts}.0.up_proj.weight"].dtype == E4M3) == in_fp8
        assert (f"{experts}.0.up_proj.weight_scale_inv" in saved) == in_fp8


def test_scales_that_are_no_powers_of_two(tmp_path: Path) -> None:
    """Of a layer that joins a checkpoint of such: refused, in place of another rounding."""
    model = model_of("qwen3_moe")
    convert(model, Float8BlockScaling(), weights="fp8", recipes={"model.layers.1.*": None})
    model = loaded(model, scale_fmt="ue8m0")
    convert(model, Float8BlockScaling(power_of_two_scales=False), weights="fp8")
    for call in (lambda: fp8_tensors(model), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="the checkpoint's scales are powers of two, those of"):
            call()


def test_names_of_compiled_layers() -> None:
    """Those of the plain model: torch.compile wraps what is compiled apart."""
    model = model_of("qwen3_moe")
    convert(model, Float8BlockScaling(), weights="both")
    expected = dict(fp8_tensors(model))
    model.model.layers[1] = torch.compile(model.model.layers[1])
    tensors = dict(fp8_tensors(model))
    assert_same_tensors(tensors, expected)


def test_tied_weights_come_once() -> None:
    model = model_of("qwen3_moe", tie_word_embeddings=True)
    convert(model, Float8BlockScaling(), weights="both")
    names = [name for name, _ in fp8_tensors(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_what_is_refused() -> None:
    def tensors(convert_to: Any = None, weights: Any = None, model: Any = None) -> None:
        model = model_of() if model is None else model
        if convert_to is not None:
            convert(model, convert_to, weights=weights)
        fp8_tensors(model)

    gpt_oss = tiny("gpt_oss", hidden_size=128, intermediate_size=128)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    dense, adapted = transformers.LlamaForCausalLM(config), model_of()
    adapted.lm_head.register_parameter("lora_a", nn.Parameter(torch.zeros(1)))
    recipe = Float8BlockScaling()

    def changed(change: Callable[[Any], Any]) -> None:
        model = model_of("mixtral", num_hidden_layers=1)
        convert(model, recipe, weights="both")
        change(model)
        fp8_tensors(model)

    def rename(model: Any) -> None:
        layer = model.model.layers[0].mlp
        layer.others = layer.experts
        del layer.experts

    mistakes = [
        lambda: tensors(model=dense),
        lambda: tensors(model=adapted),
        lambda: tensors(model=nn.Linear(16, 16)),
        lambda: tensors(),
        lambda: tensors(recipe),
        lambda: tensors(Float8CurrentScaling(), "both"),
        lambda: tensors(recipe, "both", model_of(intermediate_size=144, moe_intermediate_size=144)),
        lambda: tensors(recipe, "both", gpt_oss),
        lambda: changed(rename),
        lambda: changed(lambda model: model.config.update({"moe_intermediate_size": 2 * F})),
        lambda: changed(lambda model: setattr(model.config, "hidden_act", "gelu")),
        lambda: changed(lambda model: setattr(model, "hf_quantizer", object())),
    ]
    sentences = (textwrap.fill(sentence(mistake), 96) for mistake in mistakes)
    assert_expected_inline(
        "\n".join(sentences),
        """\
fp8_tensors: LlamaForCausalLM has no experts that are known
fp8_tensors: lm_head.lora_a is of an adapter: merge it before
fp8_tensors: model must be a transformers model, got Linear
fp8_tensors: model.layers.0.mlp.experts is not in FP8 blocks: convert with weights='both'
fp8_tensors: model.layers.0.mlp.experts is not in FP8 blocks: convert with weights='both'
fp8_tensors: model.layers.0.mlp.experts is not in FP8 blocks: convert with weights='both'
fp8_tensors: a checkpoint has gate and up apart, and a block of scales reaches from one into the
other where an expert's 144 features are no multiple of 128
fp8_tensors: experts in FP8 have no biases, transposed weights or norms,
model.layers.0.mlp.experts has
fp8_tensors: transformers looks for experts in FP8 in modules called experts, not
model.layers.0.mlp.others
fp8_tensors: transformers' FP8 experts have another gate_up_proj than
model.layers.0.mlp.experts, of [3, 512, 144]
fp8_tensors: transformers' FP8 experts have another activation than model.layers.0.mlp.experts
fp8_tensors: the model's other modules are quantized in a format of theirs, a checkpoint has one""",
    )


def names_fail(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    raise KeyError("w1")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (names_fail, r"transformers cannot name the experts' tensors \('w1'\)"),
        (
            lambda _, state: {n: t.view(E4M3) for n, t in state.items() if "scale" not in n},
            "transformers does not save .*gate_up_proj with scales of its own",
        ),
        (
            lambda _, state: {n: t.float() for n, t in state.items()},
            "transformers does not save its scales",
        ),
    ],
)
def test_a_transformers_with_other_names(
    names: Any, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is asked on tensors without memory, before a file is written."""
    model = model_of("mixtral", num_hidden_layers=1)
    monkeypatch.setattr(fp8, "revert_weight_conversion", names)
    convert(model, weights="fp8")
    for call in (lambda: fp8_tensors(model), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=sentence):
            call()
    assert not [*tmp_path.iterdir()]
