# SPDX-License-Identifier: Apache-2.0
"""convert, the one call: what it recognises, what it says of the rest, and weights in FP8.

T tokens, E experts, H features of a token, F features of an expert.
"""

import importlib
import pickle
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import FineGrainedFP8Config

from grouped_linear import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, convert
from grouped_linear.contrib import check_batch_invariant, compare, watch
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support.compare import assert_same_bits
from support.documents import models
from support.errors import sentence
from support.experts import Expert, GroupedExperts
from support.fresh import assert_fresh
from support.hugging_face import AnyConfig, tiny
from support.tensors import BF16
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

T, E, H, F = 20, 4, 32, 48
SIZES = {"num_hidden_layers": 2, "num_local_experts": E}


def mixtral(device: str = "cpu", **sizes: int) -> Any:
    return tiny("mixtral", **SIZES | sizes).to(device, BF16)


def gpt_oss() -> Any:
    config = {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default"}}
    return tiny("gpt_oss", **SIZES, **config).to(BF16)


def logits(model: Any) -> Tensor:
    device = next(model.parameters()).device
    return model(torch.arange(24, device=device).view(2, 12)).logits


class Block(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        best = self.router(x).argmax(dim=-1)
        return torch.stack([self.experts[e](row) for e, row in zip(best, x, strict=True)])


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
        "moe": GroupedExperts(E, H, F),
        "odd": nn.ModuleList([StrangeExperts(), StrangeExperts()]),
    }
    return nn.ModuleDict(parts)


def test_a_model_of_every_form() -> None:
    model, x = everything(), torch.randn(T, H)
    calls: dict[str, Callable[[], Tensor]] = {
        "mixtral": lambda: logits(model["mixtral"]).float(),
        "moe": lambda: model["moe"](x, COUNTS),
        "odd": lambda: model["odd"][1](x, torch.arange(T) % E),
    }
    expected = {name: call().detach() for name, call in calls.items()}
    done = convert(model)
    assert [one.name for one in done.converted] == [
        "mixtral.model.layers.0.mlp.experts",
        "mixtral.model.layers.1.mlp.experts",
        "moe",
    ]
    assert list(done.skipped) == ["odd.0", "odd.1"]
    assert str(done) == repr(done)
    assert_expected_inline(
        str(done),
        """\
module                              modules  form            experts  parameters  weights
mixtral.model.layers.*.mlp.experts        2  MixtralExperts        4      36,864  bfloat16, 73.73 kB
moe                                       1  grouped SwiGLU        4      18,432  float32, 73.73 kB
recipe: None
skipped: odd.* (no known form has parameters up, down and is called as (x, chosen); 2 of them)""",
    )
    for name, call in calls.items():
        y = call()
        assert (y - expected[name]).norm() < 2.0**-6 * expected[name].norm(), name


def test_a_module_by_itself() -> None:
    experts = mixtral().model.layers[0].mlp.experts
    [one] = convert(experts, Float8BlockScaling()).converted
    assert (one.name, one.form) == ("", "MixtralExperts")
    assert "(the model)" in str(convert(experts))


def test_recipes_side_by_side_and_one_after_another() -> None:
    first, second = mixtral(), mixtral()
    second.load_state_dict(first.state_dict())
    convert(first, Float8BlockScaling())
    convert(second)
    assert not torch.equal(logits(first), logits(second))
    convert(first)
    assert_same_bits(logits(first), logits(second))


# --- what is skipped -----------------------------------------------------------------------------


class LibraryConfig(AnyConfig):
    SIZES = (
        (r"ffn_act_fn", {"name": "silu"}),
        (r"dropout", 0.0),
        (r"^d_model$|^d_ff$", 32),
        *AnyConfig.SIZES,
    )


def of_library(name: str) -> nn.Module:
    """Experts of transformers that do not go through its interface."""
    where, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{where}.modeling_{where}")
    config = LibraryConfig()
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
        f"{OF_LIBRARY[name]} does not go through transformers' experts interface: give the class a "
        "forward that calls grouped_mlp or grouped_linear)"
    )


def test_the_page_of_models_has_them() -> None:
    assert models()[1].keys() == {name.split(".")[0] for name in OF_LIBRARY}


class OneWeight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


class RoutedExperts(nn.Module):
    """As torchtitan's is to be: https://github.com/pytorch/torchtitan/pull/4539."""

    def __init__(self) -> None:
        super().__init__()
        self.w13, self.w2 = OneWeight(E, 2, F, H), OneWeight(E, H, F)

    def forward(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        return x_TD


SKIPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a list": (
        Block,
        "experts (a ModuleList of Expert: GroupedMLP.from_experts and GroupedLinear.from_linears "
        "make layers of such)",
    ),
    "a dict": (
        lambda: nn.ModuleDict(
            {"experts": nn.ModuleDict({"a": nn.Linear(H, F), "b": nn.Linear(H, F)})}
        ),
        "experts (a ModuleDict of Linear: GroupedMLP.from_experts and GroupedLinear.from_linears "
        "make layers of such)",
    ),
    "torchtitan after 0.3.0": (
        RoutedExperts,
        "(the model) (no known form has parameters w13.weight, w2.weight and is called as (x_TD, "
        "topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E))",
    ),
    "other parameters": (
        StrangeExperts,
        "(the model) (no known form has parameters up, down and is called as (x, chosen))",
    ),
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_what_looks_like_experts(kind: str) -> None:
    make, skipped = SKIPPED[kind]
    model = make()
    name = type(model).__name__
    assert sentence(lambda: convert(model)) == (
        f"convert: {name} has no experts of a form that is known, and these look like experts: "
        f"{skipped}"
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
        "convert: ModuleDict has no experts of a form that is known: help(grouped_linear.convert) "
        "names the forms, and what makes a layer of a list"
    )


# --- mistakes ------------------------------------------------------------------------------------


def patched() -> Any:
    """As Liger's kernels bind a function to each layer's experts."""
    model = mixtral()
    experts = model.model.layers[1].mlp.experts
    experts.forward = MethodType(lambda self, x, chosen, scores: x, experts)
    return model


def shallow() -> Any:
    """A shallow copy, whose forward is still that of the module it was copied from."""
    model = mixtral()
    mlp = model.model.layers[1].mlp
    mlp.experts.forward = mlp.experts.forward
    mlp.experts = copy(mlp.experts)
    return model


# A model of every form but for one mistake, which is met at its very end: what is refused, and how.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "weights": (
        GroupedExperts,
        {"weights": "int8"},
        "weights must be None, 'both', 'fp8' or 'mxfp4', got 'int8'",
    ),
    "recipe of weights": (
        GroupedExperts,
        {"weights": "fp8", "recipe": Float8CurrentScaling()},
        f"weights='fp8' needs the recipe Float8BlockScaling, got {Float8CurrentScaling()!r}",
    ),
    "state": (
        mixtral,
        {"recipe": DelayedScaling(), "weights": None},
        "DelayedScaling keeps scales from step to step, for which experts of transformers have no "
        "place: take Float8BlockScaling() or Float8CurrentScaling()",
    ),
    "features of Hugging Face experts": (
        lambda: mixtral(intermediate_size=72),
        {},
        "last.model.layers.0.mlp.experts: in_features of down_proj must be a positive multiple of "
        "16, got 72",
    ),
    "another forward": (
        patched,
        {},
        "last.model.layers.1.mlp.experts has a forward of its own, as Liger's kernels give it, "
        "which would hide the new one: delete it, or convert a model without it",
    ),
    "forward of another module": (
        shallow,
        {},
        "last.model.layers.1.mlp.experts has a forward of its own, as Liger's kernels give it, "
        "which would hide the new one: delete it, or convert a model without it",
    ),
    "dtype in one module": (
        lambda: GroupedExperts(E, H, F).double(),
        {},
        "last: w1_EFD must be bfloat16, float16 or float32, got float64",
    ),
    "number of experts": (
        lambda: GroupedExperts(1025, H, 16),
        {},
        "last: experts of w1_EFD must be between 1 and 1024, got 1025",
    ),
    "on the meta device, in both precisions": (
        lambda: mixtral("meta"),
        {"weights": "both"},
        "last.model.layers.0.mlp.experts: gate_up_proj is on the meta device, it has no numbers "
        "yet: load the checkpoint before",
    ),
    "a checkpoint in FP8": (
        lambda: replace_with_fp8_linear(mixtral(), quantization_config=FineGrainedFP8Config()),
        {"recipe": Float8BlockScaling()},
        "last.model.layers.0.mlp.experts: experts in FP8 must be float8_e4m3fn with scales "
        "[4, 1, 1] in float32 or float8_e8m0fnu and dynamic activations, got gate_up_proj "
        "float8_e4m3fn with float32 scales [4, 2, 1] and dynamic activations: load the checkpoint "
        "with FineGrainedFP8Config(dequantize=True)",
    ),
}


def state_of(model: nn.Module) -> list[Any]:
    """All that a conversion changes: classes, parameters and what they hold, configurations."""
    modules = [
        (module, type(module), [*module._parameters.items()], [*module._modules.items()])
        for module in model.modules()
    ]
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    conversions = [getattr(m, "_weight_conversions", None) for m in model.modules()]
    learning = [p.requires_grad for p in model.parameters()]
    return [
        [[id(part) for part in one[:2]] + [str(one[3])] for one in modules],
        [[(n, id(p)) for n, p in one[2]] for one in modules],
        [(id(config), config._experts_implementation) for config in configs],
        conversions,
        learning,
    ]


@pytest.mark.parametrize("weights", [None, "fp8"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_leaves_everything_as_it_was(kind: str, weights: str | None) -> None:
    make, options, expected = REFUSED[kind]
    model = nn.ModuleDict({**everything(), "last": make()})
    before = state_of(model)
    how = {"weights": weights, **options}
    assert sentence(lambda: convert(model, **how)) == f"convert: {expected}"
    assert state_of(model) == before


# What is put into an instance around the forward that it has.
AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "compiled": lambda experts, forward: torch.compile(forward, backend="eager"),
    "bound, of the class": lambda experts, forward: MethodType(
        torch.autocast("cpu", enabled=False)(forward.__func__), experts
    ),
    "bound, of the instance": lambda experts, forward: MethodType(
        wraps(forward)(lambda self, *args: forward(*args)), experts
    ),
}


@pytest.mark.parametrize("kind", AROUND)
def test_a_forward_of_its_own_that_is_the_same(kind: str) -> None:
    model, other = mixtral(), mixtral()
    other.load_state_dict(model.state_dict())
    for layer in model.model.layers:
        layer.mlp.experts.forward = AROUND[kind](layer.mlp.experts, layer.mlp.experts.forward)
    for one in (model, other):
        convert(one, Float8BlockScaling())
    assert_same_bits(logits(model), logits(other))


def test_what_is_no_model_and_no_option() -> None:
    said = [sentence(lambda m=m: convert(m), TypeError) for m in (None, Block, [Block()])]
    wrong: Any = {"weigths": "fp8"}
    unknown = sentence(lambda: convert(Block(), **wrong), TypeError)  # from 3.13 on with a proposal
    assert unknown.startswith("convert() got an unexpected keyword argument 'weigths'")
    wrong = {"save_gate_up_in_fp8": 1}
    said.append(sentence(lambda: convert(Block(), **wrong)))
    for look in (watch, check_batch_invariant, partial(compare, step=print)):
        said.append(sentence(lambda look=look: look(Block), TypeError))
    assert_expected_inline(
        "\n".join(said),
        """\
convert: model must be a torch.nn.Module, got None
convert: model must be a torch.nn.Module, got the class Block: make a model of it
convert: model must be a torch.nn.Module, got a list
convert: save_gate_up_in_fp8 must be True or False, got 1
watch: model must be a torch.nn.Module, got the class Block: make a model of it
check_batch_invariant: model must be a torch.nn.Module, got the class Block: make a model of it
compare: model must be a torch.nn.Module, got the class Block: make a model of it""",
    )


# --- weights in FP8 ------------------------------------------------------------------------------


def test_a_checkpoint_in_fp8() -> None:
    model = mixtral(intermediate_size=128, moe_intermediate_size=128)
    in_fp8 = replace_with_fp8_linear(model, quantization_config=FineGrainedFP8Config())
    done = convert(in_fp8, Float8BlockScaling())
    assert {one.weights for one in done.converted} == {"frozen in FP8 as loaded"}
    loaded = in_fp8.to_empty(device="cpu")
    for p in loaded.parameters():
        p.data = torch.rand(p.shape).to(p.dtype)
    experts = loaded.model.layers[0].mlp.experts
    before = deepcopy(experts.state_dict())
    x, chosen, scores = torch.randn(6, H), torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
    y = experts(x, chosen, scores)
    for _ in range(2):
        done = convert(loaded, Float8BlockScaling(), weights="fp8")
        assert {one.weights for one in done.converted} == {"frozen in FP8"}
    for copied in (experts, deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        for key, t in copied.state_dict().items():
            as_loaded = t.view(before[key].dtype).reshape(before[key].shape)
            assert_same_bits(as_loaded, before[key])
        copied.load_state_dict(before)
        assert_same_bits(copied(x, chosen, scores), y)


def one_step(model: nn.Module, call: Callable[[], Tensor], optimizer: Any) -> dict[str, Tensor]:
    """How far a step of an optimizer moves each parameter."""
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    call().square().mean().backward()
    optimizer.step()
    return {n: (p.detach().double() - before[n]).abs().max() for n, p in model.named_parameters()}


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("form", ["hugging face", "one module"])
@pytest.mark.parametrize("weights", [None, "both"])
def test_an_older_optimizer_steps_what_stays(weights: Any, form: str, fused: bool) -> None:
    hugging_face = form == "hugging face"
    model: Any = mixtral() if hugging_face else GroupedExperts(E, H, F)
    x = torch.randn(T, H)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    done = convert(model, Float8BlockScaling(), weights=weights)
    assert repr(done).startswith("module ")
    moved = one_step(
        model, (lambda: logits(model)) if hugging_face else lambda: model(x, COUNTS), optimizer
    )
    experts = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert len(experts) == (4 if hugging_face else 3)
    assert all(moved[name] > 0.01 for name in experts)


@pytest.mark.parametrize("form", ["hugging face", "one module"])
def test_frozen_weights_in_both_precisions_stay_frozen(form: str) -> None:
    model: Any = mixtral() if form == "hugging face" else GroupedExperts(E, H, F)
    [name, *_] = [n for n, p in model.named_parameters() if p.dim() == 3]
    model.get_parameter(name).requires_grad_(False)
    convert(model, Float8BlockScaling(), weights="both")
    assert isinstance(model.get_parameter(name), GroupedTensorWithMaster)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [name]


def test_converted_again_to_both_precisions() -> None:
    """Quantized as the later call says, from high-precision numbers."""
    recipe = Float8BlockScaling(power_of_two_scales=False)
    model = mixtral()
    convert(model, Float8BlockScaling(), weights="both")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, recipe, weights="both")
    for w in (p for p in model.parameters() if p.dim() == 3):
        assert any(w is p for p in optimizer.param_groups[0]["params"])
        assert type(w.master) is Tensor
        assert w.recipe == recipe
        assert_fresh(w)


@pytest.mark.parametrize("weights", ["both", "fp8"])
@pytest.mark.parametrize("why", ["weak reference", "graph"])
def test_warns_of_an_optimizer_that_would_step_nothing(why: str, weights: Any) -> None:
    """Torch exchanges a tensor for another only where nothing but Python holds it."""
    model = mixtral()
    p = model.model.layers[0].mlp.experts.down_proj
    held: Any = weakref.ref(p) if why == "weak reference" else logits(model)
    kept = [p, torch.optim.AdamW(model.parameters())]
    number = 1 if why == "weak reference" and weights == "both" else 4
    with pytest.warns(UserWarning, match=f"^convert: {number} parameters were replaced") as warned:
        convert(model, Float8BlockScaling(), weights=weights)
    assert [Path(one.filename).name for one in warned] == ["test_convert.py"]
    assert p is not model.model.layers[0].mlp.experts.down_proj
    del held, kept


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("form", ["hugging face", "one module"])
def test_what_hangs_on_a_parameter_stays(form: str, swapped: bool) -> None:
    model: Any = mixtral() if form == "hugging face" else GroupedExperts(E, H, F)
    name, p = next((n, p) for n, p in model.named_parameters() if p.dim() == 3)
    p.allreduce, p.grad = False, torch.ones_like(p)
    held = None if swapped else weakref.ref(p)
    grad = p.grad
    del p
    convert(model, Float8BlockScaling(), weights="both")
    p = model.get_parameter(name)
    assert isinstance(p, GroupedTensorWithMaster)
    assert p.grad is grad
    assert p.allreduce is False
    assert swapped or held() is None
    if form == "hugging face":
        convert(model, Float8BlockScaling(power_of_two_scales=False), weights="both")
        assert model.get_parameter(name).allreduce is False


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("weights", ["both", "fp8", "mxfp4"])
def test_tied_weights_stay_tied(weights: Any, swapped: bool) -> None:
    model = tiny("mixtral", num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    one, other = (layer.mlp.experts for layer in model.model.layers)
    other.gate_up_proj, other.down_proj = one.gate_up_proj, one.down_proj
    held = [] if swapped else [weakref.ref(p) for p in model.parameters()]
    recipes = {"model.layers.0.*": None}
    assert sentence(
        lambda: convert(model, Float8BlockScaling(), weights=weights, recipes=recipes)
    ) == (
        "convert: model.layers.1.mlp.experts has a weight of model.layers.0.mlp.experts: recipes "
        "must keep both in one way"
    )
    if weights == "fp8":  # its scales are those of one recipe
        of_one = {"model.layers.0.*": Float8BlockScaling(power_of_two_scales=False)}
        with pytest.raises(ValueError, match=r"recipes must keep both in one way$"):
            convert(model, Float8BlockScaling(), weights=weights, recipes=of_one)
    done = convert(model, Float8BlockScaling(), weights=weights)
    assert {*map(id, one.parameters())} == {*map(id, other.parameters())}
    error, same = (experts.error for experts in done.converted)
    assert error == same
    assert (error is None) == (weights == "both")
    del held


@pytest.mark.parametrize("form", ["hugging face", "one module"])
def test_attributes_of_a_frozen_parameter_stay(form: str) -> None:
    model: Any = mixtral() if form == "hugging face" else GroupedExperts(E, H, F)
    name, p = next((n, p) for n, p in model.named_parameters() if p.dim() == 3)
    p.allreduce = False
    del p
    convert(model, weights="fp8")
    assert model.get_parameter(name).dtype == torch.uint8
    assert model.get_parameter(name).allreduce is False


@pytest.mark.parametrize("form", ["hugging face", "one module"])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_would_be_lost(hook: str, form: str) -> None:
    """An optimizer in the backward is one."""
    model: Any = mixtral() if form == "hugging face" else GroupedExperts(E, H, F)
    name, p = [(n, p) for n, p in model.named_parameters() if p.dim() == 3][-1]
    getattr(p, hook)(lambda _: None)
    before, (where, _, weight) = state_of(model), name.rpartition(".")
    for weights in ("both", "fp8"):
        assert sentence(lambda w=weights: convert(model, weights=w)) == (
            f"convert: {where or 'GroupedExperts'}: {weight} has hooks, which would be lost: "
            "register them after convert"
        )
    assert state_of(model) == before
    convert(model, Float8BlockScaling())


@pytest.mark.parametrize("kind", ["parametrized", "pruned"])
def test_weights_that_are_no_parameters(kind: str) -> None:
    """Computed as they are, and not replaced; frozen bytes are not pruned."""
    model = mixtral(intermediate_size=64)
    experts = model.model.layers[0].mlp.experts

    def change() -> None:
        if kind == "pruned":
            prune.l1_unstructured(experts, "gate_up_proj", 0.5)
        else:
            parametrize.register_parametrization(experts, "gate_up_proj", nn.Identity())

    change()
    before = state_of(model)
    for weights in ("both", "fp8", "mxfp4"):
        assert sentence(lambda w=weights: convert(model, weights=w)) == (
            "convert: model.layers.0.mlp.experts: gate_up_proj is parametrized or pruned, so it is "
            "no parameter that weights= can replace: undo that before, or leave weights out"
        )
    assert state_of(model) == before
    expected = logits(model)
    assert "MixtralExperts" in repr(convert(model))
    torch.testing.assert_close(logits(model), expected, rtol=0.02, atol=0.02)
    model = mixtral()
    convert(model, weights="fp8")
    experts = model.model.layers[0].mlp.experts
    change()
    with pytest.raises((RuntimeError, ValueError), match=r"parametriz.*use_grouped_adapters"):
        logits(model)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "bfloat16, 73.73 kB"),
        ({"weights": "both"}, "both, 147.5 kB"),
        ({"weights": "fp8"}, "frozen in FP8, 36.93 kB, error 2."),
    ],
)
def test_says_what_weights_it_made(options: dict[str, Any], line: str) -> None:
    model = mixtral()
    done = convert(model, Float8BlockScaling(), **options)
    assert line in repr(done)
    weights_of_experts = [p for p in model.parameters() if p.dim() > 2]
    assert sum(one.nbytes for one in done.converted) == sum(w.nbytes for w in weights_of_experts)


class Quantized(Tensor):
    """As torchao's tensors: the dtype is that of high precision, and operations are its own."""

    @staticmethod
    def __new__(cls, w: Tensor) -> "Quantized":
        return Tensor._make_wrapper_subclass(cls, w.shape, dtype=w.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


@pytest.mark.parametrize("weights", [None, "both", "fp8", "mxfp4"])
@pytest.mark.parametrize("form", ["hugging face", "one module"])
def test_weights_of_another_library(form: str, weights: Any) -> None:
    """tests/clients/test_torchao.py has torchao's own."""
    model: Any = nn.ModuleDict({"a": GroupedExperts(E)})
    if form == "hugging face":
        model = mixtral(intermediate_size=64)
    name, p = [(n, p) for n, p in model.named_parameters() if p.dim() == 3][-1]
    where, _, weight = name.rpartition(".")
    quantized = nn.Parameter(Quantized(p), requires_grad=False)
    setattr(model.get_submodule(where), weight, quantized)
    before = state_of(model)
    assert sentence(lambda: convert(model, Float8BlockScaling(), weights=weights)) == (
        f"convert: {where}: {weight} is a test_convert.Quantized, whose numbers no kernel here "
        "reads: convert the model before its experts are quantized, and choose weights= for few "
        "bits"
    )
    assert state_of(model) == before


@pytest.mark.parametrize("form", ["hugging face", "one module"])
def test_new_parameters_that_lose_their_memory(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate's init_empty_weights has it for a while."""
    model: Any = mixtral() if form == "hugging face" else GroupedExperts(E, H, F)
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
        register(module, name, p if p is None else nn.Parameter(p.to("meta"), p.requires_grad))

    monkeypatch.setattr(nn.Module, "register_parameter", on_meta)
    before = state_of(model)
    for weights in ("both", "fp8", "mxfp4"):
        refused = sentence(lambda w=weights: convert(model, weights=w))
        assert refused == (
            "convert: new parameters go to the meta device here, as inside of accelerate's "
            "init_empty_weights, and weights would be lost: call convert outside of it"
        )
    assert state_of(model) == before
