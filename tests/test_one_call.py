"""convert, the one call: what it recognises, what it says of the rest, and weights in FP8.

T tokens, E experts, H features of a token, F features of an expert.
"""

import importlib
import re
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import (
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    GroupedTensor,
    convert,
)
from support.compare import assert_same_bits
from support.devices import OPS, devices
from support.errors import sentence
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    from grouped_linear.integrations import hugging_face

DEVICES = pytest.mark.parametrize("device", devices(*OPS))
T, E, H, F = 20, 4, 32, 48
SIZES = {
    "vocab_size": 64,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": E,
    "max_position_embeddings": 64,
}


def mixtral(device: str = "cpu") -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES)).to(device, BF16)


def gpt_oss() -> Any:
    config = {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default"}}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **config)).to(BF16)


def logits(model: Any) -> Tensor:
    device = next(model.parameters()).device
    return model(torch.arange(24, device=device).view(2, 12)).logits


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(H, F, bias=False) for _ in range(2))
        self.w2 = nn.Linear(F, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        best = self.router(x).argmax(dim=-1)
        return torch.stack([self.experts[e](row) for e, row in zip(best, x, strict=True)])


def routed(self: Block, x: Tensor) -> Tensor:
    best = self.router(x).argmax(dim=-1, keepdim=True)
    return self.experts(x, torch.ones_like(best, dtype=x.dtype), best)


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, F, H) / H**0.5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        rows = x.split(num_tokens_per_expert.tolist())
        weights = zip(self.w1, self.w3, self.w2, rows, strict=True)
        return torch.cat([(silu(r @ w1.T) * (r @ w3.T)) @ w2.T for w1, w3, w2, r in weights])


class StrangeExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, H, F))
        self.down = nn.Parameter(torch.randn(E, F, H))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return torch.stack(
            [row @ self.up[e] @ self.down[e] for row, e in zip(x, chosen, strict=True)]
        )


COUNTS = torch.tensor([7, 0, 9, 4])


def everything() -> nn.Module:
    parts = {
        "mixtral": mixtral(),
        "blocks": nn.ModuleList([Block(), Block()]),
        "moe": GroupedExperts(),
        "odd": nn.ModuleList([StrangeExperts(), StrangeExperts()]),
    }
    return nn.ModuleDict(parts)


def test_a_model_of_every_form() -> None:
    model, x = everything(), torch.randn(T, H)
    calls: dict[str, Callable[[], Tensor]] = {
        "mixtral": lambda: logits(model["mixtral"]).float(),
        "blocks": lambda: model["blocks"][1](x),
        "moe": lambda: model["moe"](x, COUNTS),
        "odd": lambda: model["odd"][1](x, torch.arange(T) % E),
    }
    expected = {name: call() for name, call in calls.items()}
    done = convert(model, forwards={Block: routed})
    assert [one.name for one in done.converted] == [
        "mixtral.model.layers.0.mlp.experts",
        "mixtral.model.layers.1.mlp.experts",
        "blocks.0",
        "blocks.1",
        "moe",
    ]
    assert [one.name for one in done.left] == ["odd.0", "odd.1"]
    assert str(done) == repr(done)
    assert_expected_inline(
        str(done).replace("experts implementation", "..."),
        """\
module                              modules  form            experts  parameters  computed by
mixtral.model.layers.*.mlp.experts        2  MixtralExperts        4      36,864  ...
blocks.*                                  2  SwiGLU                4      36,864  GroupedMLP
moe                                       1  grouped SwiGLU        4      18,432  grouped_linear
recipe: None
left: odd.* (no known form has parameters up, down and is called as (x, chosen); 2 of them)""",
    )
    assert isinstance(model["blocks"][0].experts, GroupedMLP)
    for name, call in calls.items():
        y = call()
        assert (y - expected[name]).norm() < 2.0**-6 * expected[name].norm(), name


def test_a_module_by_itself() -> None:
    experts = mixtral().model.layers[0].mlp.experts
    [one] = convert(experts, Float8BlockScaling()).converted
    assert (one.name, one.form) == ("", "MixtralExperts")
    name = hugging_face.implementation_of(Float8BlockScaling())
    assert experts.config._experts_implementation == name
    assert "(the model)" in str(convert(experts))


def test_recipes_side_by_side_and_one_after_another() -> None:
    first, second = mixtral(), mixtral()
    second.load_state_dict(first.state_dict())
    convert(first, Float8BlockScaling())
    convert(second)
    assert not torch.equal(logits(first), logits(second))
    convert(first)
    assert_same_bits(logits(first), logits(second))


# --- what is left --------------------------------------------------------------------------------


def of_library(name: str) -> nn.Module:
    """Experts of transformers that do not go through its interface."""
    where, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{where}.modeling_{where}")
    config = SimpleNamespace(
        hidden_size=H,
        d_model=H,
        d_ff=F,
        ffn_hidden_size=F,
        intermediate_size=F,
        moe_intermediate_size=F,
        expert_ffn_hidden_size=F,
        moe_num_experts=E,
        num_experts=E,
        num_local_experts=E,
        n_routed_experts=E,
        zero_expert_num=0,
        hidden_act="silu",
        activation_function="relu",
        dense_act_fn="relu",
        ffn_act_fn={"name": "silu"},
        dropout_rate=0.0,
        activation_dropout=0.0,
        moe_token_dropout=0.0,
    )
    arguments = {"JetMoeParallelExperts": (E, H, F), "NllbMoeExperts": (config, F)}
    with torch.device("meta"):
        return getattr(module, cls)(*arguments.get(cls, (config,)))


OF_LIBRARY = {
    "dbrx.DbrxExperts": "experts.mlp (DbrxExpertGLU",
    "jetmoe.JetMoeParallelExperts": "experts (JetMoeParallelExperts",
    "llama4.Llama4TextExperts": "experts (Llama4TextExperts",
    "longcat_flash.LongcatFlashExperts": "experts (LongcatFlashExperts",
    "nllb_moe.NllbMoeExperts": "experts (NllbMoeExperts",
    "step3p7.Step3p7Experts": "experts (Step3p7Experts",
    "switch_transformers.SwitchTransformersExperts": "experts (SwitchTransformersExperts",
}


@pytest.mark.parametrize("name", OF_LIBRARY)
def test_experts_of_the_library_without_its_interface(name: str) -> None:
    model = nn.ModuleDict({"experts": of_library(name), "lm_head": nn.Linear(H, 8)})
    assert sentence(lambda: convert(model)) == (
        "convert: ModuleDict has no experts of a form that is known, and these look like experts: "
        f"{OF_LIBRARY[name]} does not go through transformers' experts interface)"
    )


class Clamped(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", nn.Parameter(torch.ones(1)))


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no forward": (Block, "experts (no forward for Block in forwards)"),
    "of another kind": (
        lambda: Block(Clamped),
        "experts (Clamped is neither torch.nn.Linear nor SwiGLU without biases)",
    ),
    "a dict": (
        lambda: nn.ModuleDict({"experts": nn.ModuleDict({"a": Expert(), "b": Expert()})}),
        "experts (ModuleDict is no ModuleList)",
    ),
    "other parameters": (
        StrangeExperts,
        "(the model) (no known form has parameters up, down and is called as (x, chosen))",
    ),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_looks_like_experts(kind: str) -> None:
    make, left = LEFT[kind]
    model = make()
    name = type(model).__name__
    assert sentence(lambda: convert(model)) == (
        f"convert: {name} has no experts of a form that is known, and these look like experts: "
        f"{left}"
    )


def test_what_does_not() -> None:
    """Layers, heads, convolutions and gates of shared experts, among others."""
    parts = {
        "layers": nn.ModuleList(nn.TransformerEncoderLayer(H, 2, F) for _ in range(2)),
        "shared_expert": Expert(),
        "shared_expert_gate": nn.Linear(H, 1),
        "expert_embedding": nn.Embedding(4, H),
        "conv": nn.Conv1d(H, H, 3),
        "lstm": nn.LSTM(H, H),
    }
    assert sentence(lambda: convert(nn.ModuleDict(parts))) == (
        "convert: ModuleDict has no experts of a form that is known"
    )


# --- mistakes ------------------------------------------------------------------------------------

FORWARDS = {Block: routed}
MISTAKES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "weights": (
        Block,
        {"weights": "int8"},
        "convert: weights must be None or 'fp8', got 'int8'",
    ),
    "recipe of weights": (
        Block,
        {"weights": "fp8", "recipe": Float8CurrentScaling()},
        "convert: weights='fp8' needs the recipe Float8BlockScaling, got "
        f"{Float8CurrentScaling()!r}",
    ),
    "said twice": (
        Block,
        {"quantized_weight": True},
        "convert: give weights='fp8' in place of quantized_weight",
    ),
    "state": (
        mixtral,
        {"recipe": DelayedScaling()},
        "convert: DelayedScaling has a state in each layer, and Hugging Face's experts have no "
        "place for it: choose a recipe without state",
    ),
    "options": (
        mixtral,
        {"cache_weights": True},
        "convert: experts of a Hugging Face model stay what they are, so there is nothing to give "
        "cache_weights to",
    ),
    "options of grouped": (
        GroupedExperts,
        {"cache_weights": True},
        "convert: GroupedExperts: experts in one module stay what they are, so there is nothing to "
        "give cache_weights to",
    ),
    "rounding": (
        GroupedExperts,
        {"stochastic_rounding": True, "recipe": Float8BlockScaling()},
        "convert: stochastic_rounding needs weights='fp8'",
    ),
    "class": (
        GroupedExperts,
        {"forwards": FORWARDS},
        "convert: GroupedExperts has no module of class Block",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    make, options, expected = MISTAKES[mistake]
    model = make()
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    assert sentence(lambda: convert(model, **options)) == expected
    assert type(model) is type(make())
    if implementation is not None:
        assert model.config._experts_implementation == implementation


def test_what_is_not_a_recipe() -> None:
    with pytest.raises(ValueError, match=r"^convert: recipe must be"):
        convert(Block(), "fp8")


def test_converted_already() -> None:
    experts = GroupedExperts()
    convert(experts)
    expected = "convert: experts of GroupedGroupedExperts are converted already"
    assert sentence(lambda: convert(experts)) == expected


def test_a_refused_list_leaves_the_other_forms_as_they_were() -> None:
    model = everything()
    model["blocks"][1].experts[0].w1.register_forward_hook(lambda *_: None)
    before = model["mixtral"].config._experts_implementation
    expected = "convert: blocks.1.experts: 0.w1 has _forward_hooks, which would be lost"
    assert sentence(lambda: convert(model, forwards=FORWARDS)) == expected
    assert model["mixtral"].config._experts_implementation == before
    assert isinstance(model["blocks"][0].experts, nn.ModuleList)
    assert type(model["moe"]) is GroupedExperts


def test_the_implementation_stays_where_quantization_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    model = mixtral()
    before = model.config._experts_implementation
    monkeypatch.setattr(hugging_face, "quantize_experts", refuse)
    assert sentence(lambda: convert(model, weights="fp8")) == "refused"
    assert model.config._experts_implementation == before


# --- weights in FP8 ------------------------------------------------------------------------------


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    y = logits(model)
    y.float().square().mean().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@DEVICES
def test_hugging_face_in_fp8_computes_the_same_and_learns(device: str) -> None:
    """A quantizing recipe quantizes in every call what is kept quantized here."""
    model = mixtral(device)
    kept = deepcopy(model)
    convert(model, Float8BlockScaling())
    done = convert(kept, weights="fp8")
    assert done.recipe == Float8BlockScaling()
    assert {one.path for one in done.converted} == {"experts implementation, weights in FP8"}
    y, gradients = step(model)
    kept_y, kept_gradients = step(kept)
    assert_same_bits(kept_y, y)
    assert kept_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_same_bits(kept_gradients[name], gradient)
    weights = [p for n, p in kept.named_parameters() if "experts" in n]
    assert len(weights) == 4
    assert all(isinstance(w, GroupedTensor) and w.q_t is None for w in weights)  # a byte an element
    before = [w.dequantize() for w in weights]
    torch.optim.SGD(weights, lr=1e3).step()
    assert not any(torch.equal(w.dequantize(), b) for w, b in zip(weights, before, strict=True))


def test_what_is_frozen_stays_frozen() -> None:
    model = mixtral()
    model.model.layers[0].mlp.experts.requires_grad_(False)
    convert(model, weights="fp8")
    assert not any(p.requires_grad for p in model.model.layers[0].mlp.experts.parameters())
    assert all(p.requires_grad for p in model.model.layers[1].mlp.experts.parameters())


def test_transposed_weights_do_not_learn() -> None:
    model = gpt_oss()
    done = convert(model, weights="fp8")
    assert {one.path for one in done.converted} == {
        "experts implementation, weights in FP8 that do not learn"
    }
    _, gradients = step(model)
    assert not any(n.endswith(("gate_up_proj", "down_proj")) for n in gradients)
    assert any(n.endswith("gate_up_proj_bias") for n in gradients)
    assert "model.embed_tokens.weight" in gradients


def test_a_checkpoint_in_fp8() -> None:
    model = mixtral()
    in_fp8 = replace_with_fp8_linear(model, quantization_config=FineGrainedFP8Config())
    expected = re.compile(
        "^convert: model.layers.0.mlp.experts: weights are in FP8 already and need the recipe "
        "Float8BlockScaling, got None; or load"
    )
    with pytest.raises(ValueError, match=expected):
        convert(in_fp8)
    for weights in (None, "fp8"):
        done = convert(in_fp8, Float8BlockScaling(), weights=weights)
        assert {one.path for one in done.converted} == {
            "experts implementation, weights in FP8 as loaded"
        }


@DEVICES
@pytest.mark.parametrize("form", ["list", "linear", "grouped"])
def test_other_forms_in_fp8_compute_the_same_and_learn(form: str, device: str) -> None:
    if form == "grouped":
        model, forwards, call = GroupedExperts(), None, lambda m, x: m(x, COUNTS.to(device))
    else:
        expert = Expert if form == "list" else lambda: nn.Linear(H, F)
        model, forwards = Block(expert), {Block: routed if form == "list" else routed_linear}
        call = lambda m, x: m(x)  # noqa: E731
    model, x = model.to(device, BF16), torch.randn(T, H, device=device, dtype=BF16)
    kept = deepcopy(model)
    convert(model, Float8BlockScaling(), forwards=forwards)
    [one] = convert(kept, weights="fp8", forwards=forwards).converted
    assert one.path.endswith(", weights in FP8")
    outputs = [call(m, x) for m in (model, kept)]
    assert_same_bits(outputs[1], outputs[0])
    for y in outputs:
        y.float().square().sum().backward()
    weights = [p for p in kept.parameters() if isinstance(p, GroupedTensor)]
    assert len(weights) == {"list": 2, "linear": 1, "grouped": 3}[form]
    for (name, p), (_, q) in zip(model.named_parameters(), kept.named_parameters(), strict=True):
        if p.grad is not None:
            assert_same_bits(q.grad, p.grad)
        else:
            assert "router" in name
    before = [w.dequantize() for w in weights]
    torch.optim.SGD(weights, lr=1.0).step()
    assert not any(torch.equal(w.dequantize(), b) for w, b in zip(weights, before, strict=True))


def routed_linear(self: Block, x: Tensor) -> Tensor:
    best, order = self.router(x).argmax(dim=-1).sort()
    m_splits = (best[:, None] == torch.arange(E, device=x.device)).sum(dim=0)
    return self.experts(x[order], m_splits)[order.argsort()]


def test_options_of_layers() -> None:
    block = Block(lambda: nn.Linear(H, F))
    convert(block, Float8BlockScaling(), forwards={Block: routed_linear}, cache_weights=True)
    assert isinstance(block.experts, GroupedLinear)
    assert block.experts.weight_cache is not None
