# SPDX-License-Identifier: Apache-2.0
"""Weights to a sampler: names of a published checkpoint, and the bits that training multiplies.

E experts, H features of a token, F features inside an expert.
"""

import inspect
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

from grouped_linear import Float8BlockScaling, Float8CurrentScaling, convert
from support.compare import assert_same_bits, assert_same_tensors, bits
from support.documents import ROOT
from support.errors import sentence
from support.four_bits import cast_to_blocks, decoded, decoded_blocks, learns_in_mxfp4
from support.hugging_face import tiny
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    from grouped_linear.integrations.checkpoints import formats
    from grouped_linear.integrations.checkpoints.tensors import CheckpointTensors

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
    model = tiny(family, **sizes | options)
    with torch.no_grad():  # blocks have other scales than their neighbours
        for w in (p for p in model.parameters() if p.dim() == 3):
            w.mul_(torch.logspace(-1, 1, w.numel()).view_as(w))
    return model.to(device, BF16)


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
        tensors = {name: t.clone() for name, t in CheckpointTensors(model)}
        with Multiplied() as multiplied:
            loss = model(ids, labels=ids).loss
        loss.backward()
        for layer in range(2):
            names = [f"model.layers.{layer}.{PREFIX[family]}{n}.weight" for n in NAMES[family]]
            for parts in (names[:2], names[2:]):
                for suffix, found in (("", multiplied.weights), ("_scale_inv", multiplied.scales)):
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


@WEIGHTS
def test_views_of_the_models_memory(weights: Any) -> None:
    model = model_of("qwen3_moe")
    convert(model, Float8BlockScaling(), weights=weights)
    down, tensors = model.model.layers[0].mlp.experts.down_proj, dict(CheckpointTensors(model))
    of_one = tensors["model.layers.0.mlp.experts.1.down_proj.weight"]
    assert of_one.data_ptr() == (down.q if weights == "both" else down)[1].data_ptr()


def loaded(model: Any, **options: Any) -> Any:
    """As transformers loads a checkpoint of this model, which it describes."""
    config = FineGrainedFP8Config(**CheckpointTensors(model).quantization_config | options)
    empty = replace_with_fp8_linear(
        model_of("qwen3_moe"), config.modules_to_not_convert, quantization_config=config
    ).to_empty(device="cpu")
    convert(empty, Float8BlockScaling())  # whose experts take the bytes of frozen ones
    empty.load_state_dict(model.state_dict())
    empty.hf_quantizer = FineGrainedFP8HfQuantizer(config)
    empty.config.quantization_config = config
    found = get_model_conversion_mapping(empty, hf_quantizer=empty.hf_quantizer)
    empty._weight_conversions = [c for c in found if isinstance(c, WeightConverter)]  # it uses them
    return empty


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_a_checkpoint_in_fp8(scale_fmt: str) -> None:
    """As it was loaded, and frozen; scales that were published as exponents are float32.

    Of what was published it also keeps names of modules that the model lacks.
    """
    model = model_of("qwen3_moe")
    convert(model, weights="fp8")
    others = [*CheckpointTensors(model).quantization_config["modules_to_not_convert"], "mtp"]
    checkpoint = loaded(model, scale_fmt=scale_fmt, modules_to_not_convert=others)
    scale = checkpoint.model.layers[0].mlp.experts.down_proj_scale_inv
    assert scale.dtype == (torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu)
    expected = dict(CheckpointTensors(model))
    for weights in (None, "fp8"):
        convert(checkpoint, Float8BlockScaling(), weights=weights)
        config = CheckpointTensors(checkpoint).quantization_config
        assert (config["scale_fmt"], config["modules_to_not_convert"]) == (scale_fmt, others)
        tensors = dict(CheckpointTensors(checkpoint))
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
    convert(
        model,
        Float8BlockScaling(),
        weights=weights,
        recipes=None if weights else {"model.layers.1.*": None},
    )
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert json.loads(json.dumps(CheckpointTensors(model).quantization_config)) == written
    saved, tensors = load_file(tmp_path / "model.safetensors"), dict(CheckpointTensors(model))
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
    for call in (lambda: CheckpointTensors(model), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="the checkpoint's scales are powers of two, those of"):
            call()


@pytest.mark.parametrize("weights", ["both", "fp8", "mxfp4"])
def test_names_of_compiled_layers(weights: Any, tmp_path: Path) -> None:
    """Those of the plain model: torch.compile wraps what is compiled apart."""
    model = model_of("qwen3_moe", hidden_size=160)
    convert(model, Float8BlockScaling(), weights=weights)
    expected = dict(CheckpointTensors(model))
    model.model.layers[1] = torch.compile(model.model.layers[1])
    model.model = torch.compile(model.model)
    tensors = dict(CheckpointTensors(model))
    assert_same_tensors(tensors, expected)
    if weights != "both":  # which transformers saves as it saves any model
        for folder, given in (("own", None), ("given", torch.compile(model).state_dict())):
            model.save_pretrained(tmp_path / folder, state_dict=given)
            assert_same_tensors(load_file(tmp_path / folder / "model.safetensors"), expected)


def test_tied_weights_come_once() -> None:
    model = model_of("qwen3_moe", tie_word_embeddings=True)
    convert(model, Float8BlockScaling(), weights="both")
    names = [name for name, _ in CheckpointTensors(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Granite SWA", "GraniteMoeSWA"),
        ("Hy4", "HYV4"),
        ("Lara 4 Mini", "LaraMini"),
        ("Mistral Small 4", "Mistral4"),
        ("ZAYA1", "Zaya"),
        ("Mixtral", "Mixtral"),
        ("OLMoE", "Olmoe"),
        ("Solar Open", "SolarOpen"),
    ],
)
def test_the_page_of_models_has_those_fused_in_files(name: str, model: str) -> None:
    """Of which transformers dequantizes numbers without their scales."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "pad_token_id": 0}
    sizes |= {"moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts_per_tok": 1 + (name != "ZAYA1"),
    }
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    own = getattr(transformers, f"{model}Config")
    names = inspect.signature(own).parameters
    made = getattr(transformers, f"{model}ForCausalLM")(
        own(**{n: size for n, size in sizes.items() if n in names})
    )
    announced = CheckpointTensors(made, "fp8").metadata()
    is_fused = any(meta.dtype == E4M3 and len(meta.shape) == 3 for meta in announced)
    page = (ROOT / "docs" / "models.md").read_text()
    line = page[page.index("**Fused in files**") : page.index("they load bit for bit where")]
    assert is_fused == (name in " ".join(line.split()))


@pytest.mark.parametrize("weights", [None, "both", "fp8"])
def test_experts_that_layers_share(weights: Any) -> None:
    """By each name the same tensors, as a model has them whose layers have copies."""
    shared, apart = model_of("qwen3_moe"), model_of("qwen3_moe")
    first, second = (layer.mlp for layer in shared.model.layers)
    apart.model.layers[1].mlp.experts.load_state_dict(first.experts.state_dict())
    second.experts = first.experts
    for model in (shared, apart):
        convert(model, Float8BlockScaling(), weights=weights)
    assert_same_tensors(dict(CheckpointTensors(shared)), dict(CheckpointTensors(apart)))


def test_what_is_refused() -> None:
    def tensors(how: Any = None, kept: Any = None, model: Any = None, weights: Any = None) -> None:
        model = model_of() if model is None else model
        if how is not None or kept is not None:
            convert(model, how, weights=kept)
        CheckpointTensors(model, weights)

    gpt_oss = tiny("gpt_oss", hidden_size=128, intermediate_size=128)
    narrow = tiny("gpt_oss", intermediate_size=48)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    dense, adapted, prompted = transformers.LlamaForCausalLM(config), model_of(), model_of()
    adapted.lm_head.register_parameter("lora_a", nn.Parameter(torch.zeros(1)))
    # As PEFT has a head that learns beside prompts.
    prompted.lm_head = nn.ModuleDict({"original_module": prompted.lm_head})
    recipe = Float8BlockScaling()

    def changed(change: Callable[[Any], Any]) -> None:
        model = model_of("mixtral", num_hidden_layers=1)
        convert(model, recipe, weights="both")
        change(model)
        CheckpointTensors(model)

    def rename(model: Any) -> None:
        layer = model.model.layers[0].mlp
        layer.others = layer.experts
        del layer.experts

    mistakes = [
        lambda: tensors(model=nn.Linear(16, 16)),
        lambda: tensors(weights="int8"),
        lambda: tensors(model=dense, weights="fp8"),
        lambda: tensors(model=adapted),
        lambda: tensors(model=prompted),
        lambda: tensors(model=model_of(device="meta")),
        lambda: tensors(Float8CurrentScaling(), "both"),
        lambda: tensors(None, "fp8", weights="mxfp4"),
        lambda: tensors(None, "mxfp4", model_of(hidden_size=128), "bf16"),
        lambda: tensors(learns_in_mxfp4(), None, model_of(hidden_size=128), "fp8"),
        lambda: tensors(recipe, "both", model_of(intermediate_size=144, moe_intermediate_size=144)),
        lambda: tensors(recipe, model=gpt_oss),
        lambda: tensors(model=narrow, weights="mxfp4"),
        lambda: tensors(model=tiny("aria", intermediate_size=64), weights="mxfp4"),
        lambda: changed(rename),
        lambda: changed(lambda model: model.config.update({"moe_intermediate_size": 2 * F})),
        lambda: changed(lambda model: setattr(model.config, "hidden_act", "gelu")),
        lambda: changed(lambda model: setattr(model, "hf_quantizer", object())),
    ]
    sentences = (textwrap.fill(sentence(mistake), 96) for mistake in mistakes)
    assert_expected_inline(
        "\n".join(sentences),
        """\
CheckpointTensors: model must be a transformers model, got Linear
CheckpointTensors: weights must be None, 'bf16', 'fp8' or 'mxfp4', got 'int8'
CheckpointTensors: LlamaForCausalLM has no experts that are known
CheckpointTensors: lm_head.lora_a is of a model with adapters: merge or unload them
CheckpointTensors: lm_head.original_module.weight is of a model with adapters: merge or unload
them
CheckpointTensors: model.embed_tokens.weight is on the meta device and has no numbers yet
CheckpointTensors: no checkpoint has model.layers.0.mlp.experts as Float8CurrentScaling()
multiplies it: choose weights='bf16', 'fp8' or 'mxfp4'
CheckpointTensors: training multiplies model.layers.0.mlp.experts in FP8, which is handed over
as it is: leave weights='mxfp4' out
CheckpointTensors: training multiplies model.layers.0.mlp.experts in MXFP4, which is handed over
as it is: leave weights='bf16' out
CheckpointTensors: training multiplies model.layers.0.mlp.experts in MXFP4, which is handed over
as it is: leave weights='fp8' out
CheckpointTensors: a checkpoint has gate and up apart, and a block of scales reaches from one
into the other where an expert's 144 features are no multiple of 128: weights='bf16' hands
experts over in 16 bits
CheckpointTensors: experts in FP8 have no biases, transposed weights or norms,
model.layers.0.mlp.experts has: weights='bf16' hands experts over in 16 bits
CheckpointTensors: MXFP4 is in blocks of 32, model.layers.0.mlp.experts.down_proj has 48
in_features: weights='bf16' hands experts over in 16 bits
CheckpointTensors: experts in MXFP4, as DeepSeek-V4's files have it, have no biases, transposed
weights or norms, model.layers.0.mlp.experts has: weights='bf16' hands experts over in 16 bits
CheckpointTensors: transformers looks for experts in FP8 in modules called experts, not
model.layers.0.mlp.others: weights='bf16' hands experts over in 16 bits
CheckpointTensors: transformers' FP8 experts have another gate_up_proj than
model.layers.0.mlp.experts, of [3, 512, 144]: weights='bf16' hands experts over in 16 bits
CheckpointTensors: transformers' FP8 experts have another activation than
model.layers.0.mlp.experts: weights='bf16' hands experts over in 16 bits
CheckpointTensors: the model's other modules are quantized in a format of theirs, a checkpoint
has one""",
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
    monkeypatch.setattr(formats, "revert_weight_conversion", names)
    convert(model, weights="fp8")
    for call in (lambda: CheckpointTensors(model), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=sentence):
            call()
    assert not [*tmp_path.iterdir()]


# --- every form ----------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {
    "16 bits": lambda model: convert(model),
    "as transformers has it": lambda model: None,
    "both": lambda model: convert(model, Float8BlockScaling(), weights="both"),
    "fp8": lambda model: convert(model, weights="fp8"),
    "mxfp4": lambda model: convert(model, weights="mxfp4"),
    "learns": lambda model: convert(model, learns_in_mxfp4()),
    "learns, FP8": lambda model: convert(model, learns_in_mxfp4(fp8=True)),
    "learns, both": lambda model: convert(model, learns_in_mxfp4(fp8=True), weights="both"),
}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128}
CASES = [
    *((family, form) for family in ("mixtral", "qwen3_moe", "deepseek_v3") for form in FORMS),
    *((f, form) for f in ("gpt_oss",) for form in FORMS if form not in ("both", "fp8")),
    *((f, "16 bits") for f in ("aria", "nemotron_h", "muse_spark")),
]


class NoNumbers(TorchDispatchMode):
    """Refuses operations on tensors with memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info for r in func._schema.returns)
        assert is_view or not isinstance(made, Tensor) or made.is_meta, func
        return made


@pytest.mark.parametrize(("family", "form"), CASES)
def test_as_saved_and_as_announced(family: str, form: str, tmp_path: Path) -> None:
    """Names, dtypes and shapes come first, then tensors in the same order: those of the files."""
    torch.manual_seed(0)
    model = tiny(family, num_hidden_layers=1, **({} if family == "muse_spark" else WIDE)).to(BF16)
    FORMS[form](model)
    source = CheckpointTensors(model)
    with NoNumbers():
        announced = source.metadata()
    pairs = [*source]
    assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == [tuple(m) for m in announced]
    if form == "both":  # which save_pretrained writes in high precision
        convert(model, weights="fp8")
    model.save_pretrained(tmp_path)
    assert len(dict(pairs)) == len(pairs)
    assert_same_tensors(dict(pairs), load_file(tmp_path / "model.safetensors"))
    written = json.loads((tmp_path / "config.json").read_text()).get("quantization_config")
    assert json.loads(json.dumps(source.quantization_config)) == written


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "learns"])
def test_a_state_dict_that_is_given_is_saved(form: str, tmp_path: Path) -> None:
    """As Trainer gives what it has gathered, and others give averages of weights."""
    models = []
    for seed in range(2):
        model = model_of(hidden_size=160)
        torch.manual_seed(seed)
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        learns = {"recipe": Float8BlockScaling(qat="mxfp4")}
        convert(model, **learns if form == "learns" else {"weights": form})
        models.append(model)
    models[1].save_pretrained(tmp_path / "own")
    models[0].save_pretrained(tmp_path / "named", state_dict=models[1].state_dict())
    given = models[1].state_dict()
    if form == "mxfp4":  # its numbers in high precision, whose codes are theirs
        for name, experts in models[1].named_modules():
            for w in getattr(experts, "_frozen", ()):
                given[f"{name}.{w}"] = experts.dequantize(w)
                del given[f"{name}.{w}_scale_inv"]
    models[0].save_pretrained(tmp_path / "placed", True, given)
    expected = load_file(tmp_path / "own" / "model.safetensors")
    for folder in ("named", "placed"):
        assert_same_tensors(load_file(tmp_path / folder / "model.safetensors"), expected)


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_a_state_dict_of_parts(form: Any, tmp_path: Path) -> None:
    """Bytes without scales are no weight; high precision beside the model's scales is one."""
    model = model_of(hidden_size=160)
    given = model.state_dict()
    convert(model, weights=form)
    name, own = "model.layers.1.mlp.experts.down_proj", model.state_dict()
    parts = {n: t for n, t in own.items() if n != f"{name}_scale_inv"}
    assert sentence(lambda: model.save_pretrained(tmp_path, state_dict=parts)) == (
        f"save_pretrained: state_dict has {name} in uint8 without scales"
    )
    parts = {n: t for n, t in own.items() if n != name}
    assert sentence(lambda: model.save_pretrained(tmp_path, state_dict=parts)) == (
        f"save_pretrained: state_dict has {name}_scale_inv without the numbers that it scales"
    )
    assert not [*tmp_path.iterdir()]
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "given", state_dict=own | {name: given[name]})
    expected = load_file(tmp_path / "own" / "model.safetensors")
    assert_same_tensors(load_file(tmp_path / "given" / "model.safetensors"), expected)


@pytest.mark.parametrize("weights", [None, "both"])
def test_bytes_of_fp8_by_another_cast(weights: Any) -> None:
    """Which other stacks compute from weights in 16 bits, and so does a trainer in 16 bits."""
    model, plain = model_of("qwen3_moe"), model_of("qwen3_moe")
    convert(model, Float8BlockScaling(), weights=weights)
    found, ours = 0, dict(CheckpointTensors(model))
    for name, w in CheckpointTensors(plain):
        if ".experts." in name:
            q, scale = cast_to_blocks(w)
            assert_same_bits(bits(ours[name]), bits(q))
            assert_same_bits(ours[f"{name}_scale_inv"], scale)
            found += 1
    assert found == 2 * E * 3
    assert_same_tensors(dict(CheckpointTensors(plain, "fp8")), ours)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("mixtral", form) for form in ("learns", "learns, FP8", "learns, both")),
        *(("gpt_oss", form) for form in ("learns", "learns, FP8", "learns, both")),
    ],
)
def test_a_sampler_of_bytes_in_mxfp4(family: str, form: str) -> None:
    """It reads them by the specification, and computes the logits of the trainer to the bit."""
    torch.manual_seed(0)
    trainer, sampler = (tiny(family, num_hidden_layers=1, **WIDE).to(BF16) for _ in range(2))
    nn.init.normal_(trainer.lm_head.weight)
    FORMS[form](trainer)
    optimizer, ids = torch.optim.AdamW(trainer.parameters(), lr=1e-2), torch.arange(14)[None]
    for _ in range(2):
        trainer(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handed, state = dict(CheckpointTensors(trainer)), {}
    for name, t in handed.items():
        if name.endswith("_blocks"):
            w = decoded_blocks(t, handed[name.replace("_blocks", "_scales")])
            state[name.removesuffix("_blocks")] = w.mT.to(BF16)
        elif t.dtype == torch.int8:
            state[name] = decoded(t, handed[f"{name}_scale_inv"]).to(BF16)
        elif not name.endswith(("_scales", "_scale_inv")):
            state[name] = t
    assert {name for name, _ in CheckpointTensors(sampler)} == state.keys()
    layer = sampler.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj") if family == "mixtral" else ():
        prefix = f"model.layers.0.{PREFIX[family]}"
        parts = NAMES[family][:2] if name == "gate_up_proj" else NAMES[family][2:]
        stacked = [
            torch.cat([state.pop(f"{prefix.format(e)}{part}.weight") for part in parts])
            for e in range(layer.num_experts)
        ]
        state[f"model.layers.0.mlp.experts.{name}"] = torch.stack(stacked)
    missing = sampler.load_state_dict(
        {n.replace("block_sparse_moe", "mlp"): t for n, t in state.items()}, strict=False
    )
    assert not missing.missing_keys
    convert(sampler, None if form == "learns" else Float8BlockScaling(), weights="mxfp4")
    with torch.no_grad():
        assert_same_bits(sampler(ids).logits, trainer(ids).logits)


def test_in_bfloat16(device: str) -> None:
    """Weights that learn, in float32 and both precisions, whatever training multiplies."""
    model = model_of("mixtral", device, hidden_size=128).float()
    expected = {name: t.to(BF16) for name, t in CheckpointTensors(model)}
    for form in ("both", "learns", "learns, FP8"):
        FORMS[form](model)
        source = CheckpointTensors(model, "bf16")
        assert source.quantization_config is None
        tensors = dict(source)
        assert tensors.keys() == expected.keys()
        for name, t in tensors.items():
            assert t.dtype == (BF16 if ".experts." in name else torch.float32)
            assert_same_bits(t.to(BF16), expected[name])
        assert [tuple(m) for m in source.metadata()] == [
            (n, t.dtype, tuple(t.shape)) for n, t in tensors.items()
        ]


def test_a_model_without_experts() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    )
    tensors = dict(CheckpointTensors(dense))
    assert tensors.keys() == {n for n, _ in dense.named_parameters()}


def test_what_is_not_what_was_asked_for() -> None:
    """A convert in between, other adapters than LoRA, a remedy that would be refused, too."""
    model = tiny("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    source = CheckpointTensors(model)
    convert(model, weights="mxfp4")
    for ask in (source.metadata, lambda: next(iter(source))):
        with pytest.raises(ValueError, match="was converted since: make another one"):
            ask()
    aria = tiny("aria", hidden_size=64, intermediate_size=64)
    convert(aria, weights="mxfp4")
    with pytest.raises(ValueError, match="CheckpointTensors") as raised:
        CheckpointTensors(aria)
    assert "weights='bf16'" not in str(raised.value)


def test_a_part_that_learns_is_not_saved_by_the_whole(tmp_path: Path) -> None:
    """In MXFP4 it would be in 16 bits in silence."""
    for part, saved in (("model", ""), ("", "model")):
        model = tiny("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
        convert(model.get_submodule(part), learns_in_mxfp4())
        with pytest.raises(ValueError, match="is in few bits since a part of this model"):
            model.get_submodule(saved).save_pretrained(tmp_path)
