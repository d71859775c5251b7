"""Plain torch models before and after convert_experts: the same outputs and gradients.

T tokens, E experts, H features of a token, F features of an expert.
"""

import inspect
import io
import pickle
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import gelu, grouped_mm, silu
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

from grouped_linear import (
    ConvertedExperts,
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    GroupedTensor,
    Recipe,
    convert_experts,
)
from grouped_linear.integrations import converted_class
from support.compare import assert_same_bits
from support.devices import devices
from support.errors import sentence
from support.ops import OPS
from support.processes import PROCESSES, Checks, Passes
from support.recipes import MORE_RECIPES
from support.tensors import BF16, DTYPES, FP32

DEVICES = pytest.mark.parametrize("device", devices(*OPS))
T, E, H, F = 50, 4, 32, 48


class SwigluExpert(nn.Module):
    """With the names of one convention or the other."""

    def __init__(self, names: tuple[str, str, str] = ("w1", "w3", "w2"), act: Any = silu) -> None:
        super().__init__()
        self.names, self.act = names, act
        for name, sizes in zip(names, ((H, F), (H, F), (F, H)), strict=True):
            self.add_module(name, nn.Linear(*sizes, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(self.act(gate(x)) * up(x))


class Routed(nn.Module):
    """A router, C experts for each token one after the other, and a shared one."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(H, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.shared = nn.Linear(H, H)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).softmax(dim=-1).topk(2)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        y = self.shared(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            y = y.index_add(0, token, weights[token, choice, None] * expert(x[token]))
        return y


def routed_mlp(self: Routed, x: Tensor) -> Tensor:
    return self.shared(x) + self.experts(x, *self.route(x))


def routed_linear(self: Routed, x: Tensor) -> Tensor:
    weights, chosen = self.route(x)
    expert, row = chosen.flatten().sort()
    m_splits = (expert[:, None] == torch.arange(E, device=x.device)).sum(dim=0)
    y = self.experts(x[row // 2], m_splits)[row.argsort()].view(-1, 2, H)
    return self.shared(x) + (weights[..., None] * y).sum(dim=1)


def swiglu_sorted(
    act: Callable[[Tensor], Tensor], weights: tuple[Tensor, ...], x: Tensor, counts: Tensor
) -> Tensor:
    """With torch's grouped_mm, of rows sorted by expert."""
    offs = counts.cumsum(0, dtype=torch.int32)
    gate, up, down = (w.to(BF16).mT for w in weights)
    h = act(grouped_mm(x.to(BF16), gate, offs=offs)) * grouped_mm(x.to(BF16), up, offs=offs)
    return grouped_mm(h, down, offs=offs).to(x.dtype)


class GroupedExperts(nn.Module):
    """Three parameters, with torchtitan's names."""

    def __init__(self, act: Callable[[Tensor], Tensor] = silu, features: int = F) -> None:
        super().__init__()
        self.act = act
        self.w1 = nn.Parameter(torch.randn(E, features, H) / H**0.5)
        self.w2 = nn.Parameter(torch.randn(E, H, features) / features**0.5)
        self.w3 = nn.Parameter(torch.randn(E, features, H) / H**0.5)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return swiglu_sorted(self.act, (self.w1, self.w3, self.w2), x, num_tokens_per_expert)


class SuffixedExperts(nn.Module):
    """With those of 2026-05."""

    def __init__(self) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(E, F, H) / H**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(E, H, F) / F**0.5)
        self.w3_EFD = nn.Parameter(torch.randn(E, F, H) / H**0.5)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        weights = self.w1_EFD, self.w3_EFD, self.w2_EDF
        return swiglu_sorted(silu, weights, x_RD, num_tokens_per_expert_E)


class FusedExperts(nn.Module):
    """As torchtitan's override that fuses gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(E, F, 2, H) / H**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        weights = self.w13[:, :, 0], self.w13[:, :, 1], self.w2_EDF
        return swiglu_sorted(silu, weights, x_RD, num_tokens_per_expert_E)


class GptOssExperts(nn.Module):
    """As torchtitan's, with a SwiGLU of its own between matrices that have biases."""

    def __init__(self, features: int = F) -> None:
        super().__init__()
        self.swiglu_limit = 7.0
        self.mlp1_weight_EGD = nn.Parameter(torch.randn(E, 2 * features, H) / H**0.5)
        self.mlp1_bias_EG = nn.Parameter(torch.randn(E, 2 * features))
        self.mlp2_weight_EDF = nn.Parameter(torch.randn(E, H, features) / features**0.5)
        self.mlp2_bias_ED = nn.Parameter(torch.randn(E, H))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offs = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        rows = num_tokens_per_expert_E.long()
        bias1, bias2 = (
            b.to(BF16).repeat_interleave(rows, dim=0)
            for b in (self.mlp1_bias_EG, self.mlp2_bias_ED)
        )
        h = grouped_mm(x_RD.to(BF16), self.mlp1_weight_EGD.to(BF16).mT, offs=offs) + bias1
        gate, up = h[:, 0::2].clamp(max=self.swiglu_limit), h[:, 1::2]
        up = up.clamp(-self.swiglu_limit, self.swiglu_limit)
        h = gate * (1.702 * gate).sigmoid() * (up + 1)
        y = grouped_mm(h, self.mlp2_weight_EDF.to(BF16).mT, offs=offs) + bias2
        return y.to(x_RD.dtype)


class HalfSuffixedExperts(SuffixedExperts):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return super().forward(x, num_tokens_per_expert)


class SizedExperts(GroupedExperts):
    """Remembers a size, which is wrong for other parameters."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return super().forward(x.view(7, -1, H), num_tokens_per_expert)


class Sorted(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.tensor([16.0, 0.0, 32.0, 2.0], device=x.device)  # as histc gives them
        return self.experts(x, counts)


SWIGLU_NAMES = {"w": ("w1", "w3", "w2"), "proj": ("gate_proj", "up_proj", "down_proj")}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, ConvertedExperts]] = {
    "linear": (
        lambda: Routed([nn.Linear(H, H) for _ in range(E)]),
        {Routed: routed_linear},
        ConvertedExperts("1", "Linear", E, E * H * (H + 1), "GroupedLinear"),
    ),
    **{
        f"swiglu_{kind}": (
            lambda names=names: Routed([SwigluExpert(names) for _ in range(E)]),
            {Routed: routed_mlp},
            ConvertedExperts("1", "SwiGLU", E, 3 * E * F * H, "GroupedMLP"),
        )
        for kind, names in SWIGLU_NAMES.items()
    },
    **{
        kind: (
            lambda experts=experts: Sorted(experts()),
            None,
            ConvertedExperts("1.experts", form, E, size, "grouped_linear"),
        )
        for kind, experts, form, size in (
            ("grouped", GroupedExperts, "grouped SwiGLU", 3 * E * F * H),
            ("suffixed", SuffixedExperts, "grouped SwiGLU", 3 * E * F * H),
            ("fused", FusedExperts, "grouped SwiGLU, w13", 3 * E * F * H),
            (
                "gpt_oss",
                GptOssExperts,
                "grouped SwiGLU of GPT-OSS",
                3 * E * F * H + E * (2 * F + H),
            ),
        )
    },
}
EVERY_MODEL = pytest.mark.parametrize("kind", MODELS)


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients, those of experts under one name whatever form they have."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "experts" not in name}
    experts = model[1].experts
    if isinstance(experts, nn.ModuleList):
        each = [[p.grad for p in expert.parameters()] for expert in experts]
        stacked = [torch.stack(list(same)) for same in zip(*each, strict=True)]
        if isinstance(experts[0], SwigluExpert):
            gate, up, down = stacked
            stacked = [torch.cat([gate, up], dim=1), down]
    else:
        stacked = [p.grad for p in experts.parameters()]
    gradients |= {f"expert {i}": gradient for i, gradient in enumerate(stacked)}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def check_near(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert (actual[name].double() - e.double()).norm() < tolerance * e.double().norm(), name


def model_of(kind: str, device: str, dtype: torch.dtype = FP32) -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), MODELS[kind][0]()).to(device, dtype)


@DEVICES
@EVERY_MODEL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients(kind: str, dtype: torch.dtype, device: str) -> None:
    model, x = model_of(kind, device, dtype), torch.randn(T, H, device=device, dtype=dtype)
    expected = run(model, x)
    _, forwards, converted = MODELS[kind]
    before = torch.get_rng_state()
    assert convert_experts(model, forwards) == [converted]
    assert torch.equal(torch.get_rng_state(), before)
    # float32 sums in another order, but grouped_mm's experts round to bf16 in any case
    tolerance = 1e-5 if dtype == FP32 and MODELS[kind][1] is not None else 2.0**-6
    check_near(run(model, x), expected, tolerance)


@DEVICES
@EVERY_MODEL
@pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
def test_recipes(kind: str, recipe: Recipe | None, device: str) -> None:
    """See test_mlp.py for the tolerance."""
    model, x = model_of(kind, device, BF16), torch.randn(T, H, device=device, dtype=BF16)
    expected = run(model, x)
    convert_experts(model, MODELS[kind][1], recipe)
    check_near(run(model, x), expected, 0.25)


@DEVICES
@pytest.mark.parametrize("kind", ["linear", "swiglu_w"])
def test_options(kind: str, device: str) -> None:
    x, forwards = torch.randn(T, H, device=device, dtype=BF16), MODELS[kind][1]
    model = model_of(kind, device, BF16)
    kept = deepcopy(model)
    convert_experts(model, forwards, Float8BlockScaling())
    convert_experts(kept, forwards, Float8BlockScaling(), weights="fp8")
    weights = [w for w in kept[1].experts.parameters() if w.dim() == 3]
    assert weights
    assert all(isinstance(w, GroupedTensor) for w in weights)
    expected = run(model, x)
    for name, result in run(kept, x).items():
        assert_same_bits(result, expected[name])


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("linear", "bias"),
        ("linear", "save_gate_up_in_fp8"),
        ("swiglu_w", "activation"),
    ],
)
def test_other_options(kind: str, option: str) -> None:
    of_mlp = ", save_gate_up_in_fp8" if kind == "swiglu_w" else ""
    sentence = (
        "convert_experts: 1.experts: options may be cache_weights, fuse_wgrad_accumulation, "
        f"weights, stochastic_rounding, columnwise{of_mlp}, got {option}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        convert_experts(model_of(kind, "cpu"), MODELS[kind][1], **{option: False})


def test_gate_up_saved_in_fp8() -> None:
    """Of a list; experts in one module have no such option."""
    model = model_of("swiglu_w", "cpu")
    convert_experts(model, forwards=MODELS["swiglu_w"][1], save_gate_up_in_fp8=True)
    assert model[1].experts.save_gate_up_in_fp8
    with pytest.raises(ValueError, match=r"there is nothing to give save_gate_up_in_fp8 to$"):
        convert_experts(model_of("grouped", "cpu"), save_gate_up_in_fp8=True)


def test_other_dtypes() -> None:
    sentence = (
        "convert_experts: 1.experts: weight must be bfloat16, float16 or float32, got float64"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        convert_experts(model_of("linear", "cpu", torch.float64), MODELS["linear"][1])


def test_experts_in_one_module_take_no_options_of_layers() -> None:
    sentence = (
        "convert_experts: 1.experts: experts in one module stay what they are, so there is nothing "
        "to give cache_weights to"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        convert_experts(model_of("grouped", "cpu"), recipe=Float8BlockScaling(), cache_weights=True)


# Those of SwiGLU experts and of sorted ones differ in names alone.
@pytest.mark.parametrize("kind", [k for k in MODELS if k not in ("swiglu_w", "suffixed")])
def test_compiled_copied_and_saved(kind: str) -> None:
    model, x = model_of(kind, "cpu"), torch.randn(T, H)
    convert_experts(model, MODELS[kind][1], Float8BlockScaling())
    expected = run(model, x)
    copied = deepcopy(model)
    model[1].load_state_dict(copied[1].state_dict())
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), expected["y"])
    for name, result in run(copied, x).items():
        assert_same_bits(result, expected[name])


@EVERY_MODEL
@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), DelayedScaling()], ids=["block", "delayed"]
)
def test_pickled(kind: str, recipe: Recipe | None) -> None:
    model, x = model_of(kind, "cpu"), torch.randn(T, H)
    name = convert_experts(model, MODELS[kind][1], recipe)[0].name
    expected, file = run(model, x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.get_submodule(name)) is type(model.get_submodule(name))
    assert type(deepcopy(model).get_submodule(name)) is type(model.get_submodule(name))
    for name, result in run(loaded, x).items():
        assert_same_bits(result, expected[name])


def test_refuses_a_pickle_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = GroupedExperts()
    convert_experts(experts)
    with monkeypatch.context() as newer:
        newer.setattr(converted_class, "PICKLE_VERSION", 2)
        saved = pickle.dumps(experts)
    assert sentence(lambda: pickle.loads(saved)) == (
        "convert: the pickle has version 2, this grouped_linear reads versions up to 1"
    )


def test_copied_as_a_subclass() -> None:
    """As FSDP2 makes one."""
    experts = GroupedExperts()
    convert_experts(experts)
    experts.__class__ = type("Sharded", (type(experts),), {})
    assert type(deepcopy(experts)) is type(experts)


@pytest.mark.parametrize("experts", [GroupedExperts, SuffixedExperts])
def test_called_by_names(experts: type[nn.Module]) -> None:
    converted, x, counts = experts(), torch.randn(T, H), torch.tensor([16, 0, 32, 2])
    convert_experts(converted)
    _, *inputs = inspect.signature(experts.forward).parameters  # all but self
    assert_same_bits(converted(**dict(zip(inputs, (x, counts), strict=True))), converted(x, counts))


@EVERY_MODEL
def test_on_the_meta_device(kind: str) -> None:
    """As torchtitan does: make, convert, give memory, load."""
    whole, x = model_of(kind, "cpu"), torch.randn(T, H)
    convert_experts(whole, MODELS[kind][1])
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(H, H), MODELS[kind][0]())
        assert convert_experts(model, MODELS[kind][1]) == [MODELS[kind][2]]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").load_state_dict(whole.state_dict())
    expected = run(whole, x)
    for name, result in run(model, x).items():
        assert_same_bits(result, expected[name])


def test_first_scales_are_not_lost_on_the_meta_device() -> None:
    sentence = (
        "convert_experts: 1.experts: the first scales of DelayedScaling would be lost on the meta "
        "device: convert when parameters have values"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        convert_experts(model_of("grouped", "meta"), recipe=DelayedScaling())


def test_what_is_converted_is_left_alone() -> None:
    model = nn.Sequential(model_of("grouped", "cpu"), model_of("grouped", "cpu"))
    convert_experts(model[0], recipe=DelayedScaling())
    first = type(model[0][1].experts)
    assert [c.name for c in convert_experts(model)] == ["1.1.experts"]
    assert type(model[0][1].experts) is first
    sentence = "^convert_experts: experts of Sequential are converted already$"
    with pytest.raises(ValueError, match=sentence):
        convert_experts(model, recipe=Float8BlockScaling())


def test_what_stays() -> None:
    grouped = model_of("grouped", "cpu")
    parameters = dict(grouped.named_parameters())
    convert_experts(grouped)
    assert all(p is parameters[name] for name, p in grouped.named_parameters())
    assert isinstance(grouped[1].experts, GroupedExperts)
    assert type(grouped[1].experts).__name__ == "GroupedGroupedExperts"

    model = model_of("swiglu_w", "cpu", BF16).eval()
    for p in model[1].experts.parameters():
        p.requires_grad_(False)
    layers = nn.ModuleList([model, deepcopy(model)])
    assert [c.name for c in convert_experts(layers, {Routed: routed_mlp})] == ["0.1", "1.1"]
    assert type(layers[0][1]) is type(layers[1][1])  # what is compiled for one serves both
    experts = model[1].experts
    assert isinstance(experts, GroupedMLP)
    assert not any(p.requires_grad for p in experts.parameters())
    assert not experts.training
    assert experts.down_proj.dtype == BF16


def unlike() -> nn.Module:
    return Routed([nn.Linear(H, H), nn.Linear(H, H, bias=False)])


def one_frozen() -> nn.Module:
    model = Routed([SwigluExpert() for _ in range(E)])
    model.experts[1].requires_grad_(False)
    return model


def halfway() -> nn.Module:
    model = Routed([SwigluExpert() for _ in range(E)])
    for expert in model.experts:
        next(expert.parameters()).requires_grad_(False)
    return model


def dropping(x: Tensor) -> Tensor:
    return nn.functional.dropout(silu(x), 0.1, training=True)


def clamped(x: Tensor) -> Tensor:
    return silu(x).clamp(max=7.0)


KNOWN = (
    "torch.nn.Linear, or of SwiGLU experts without biases whose layers gate, up, down are called "
    "w1, w3, w2 or gate_proj, up_proj, down_proj"
)
FORWARDS = {Routed: routed_mlp}
MISTAKES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "nothing": (
        lambda: nn.Sequential(nn.Linear(H, H)),
        None,
        "convert_experts: Sequential has no module with parameters w1, w2 and w3 [E, ...] that is "
        "called as (x, num_tokens_per_expert), and no class is in forwards",
    ),
    "no such block": (
        lambda: nn.Sequential(nn.Linear(H, H)),
        FORWARDS,
        "convert_experts: Sequential has no module of class Routed",
    ),
    "no list": (
        lambda: Routed([nn.Sequential(nn.Linear(H, H)) for _ in range(E)]),
        FORWARDS,
        f"convert_experts: Routed must hold one ModuleList of {KNOWN}; it has experts of "
        "Sequential with 0.weight, 0.bias",
    ),
    "unlike": (
        unlike,
        FORWARDS,
        "convert_experts: Routed.experts: experts differ in their parameters' names, shapes or "
        "dtypes",
    ),
    "one frozen": (
        one_frozen,
        FORWARDS,
        "convert_experts: Routed.experts: experts differ in their parameters' requires_grad",
    ),
    "down is w3": (
        lambda: Routed([SwigluExpert(("w1", "w2", "w3")) for _ in range(E)]),
        FORWARDS,
        "convert_experts: Routed.experts: experts are not SwiGLU by their shapes: w1.weight "
        "[48, 32], w3.weight [32, 48], w2.weight [48, 32]",
    ),
    "half of a parameter frozen": (
        halfway,
        FORWARDS,
        "convert_experts: Routed.experts: w1.weight and w3.weight become one parameter: let both "
        "require grad, or neither",
    ),
    "names of two conventions": (
        HalfSuffixedExperts,
        None,
        "convert_experts: HalfSuffixedExperts has no module with parameters w1, w2 and w3 "
        "[E, ...] that is called as (x, num_tokens_per_expert), and no class is in forwards",
    ),
    "meta": (
        lambda: SizedExperts().to("meta"),
        None,
        "convert_experts: SizedExperts: parameters are on the meta device, and small ones in their "
        "place do not run: convert when they have values",
    ),
}


def test_what_is_frozen_stays_frozen() -> None:
    model = Routed([nn.Linear(H, H) for _ in range(E)])
    for expert in model.experts:
        expert.weight.requires_grad_(False)
    convert_experts(model, {Routed: lambda self, x: x})
    assert not model.experts.weight.requires_grad
    assert model.experts.bias.requires_grad


def test_experts_that_do_not_run() -> None:
    """With values of their own, so the error is theirs."""
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        convert_experts(SizedExperts())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    model, forwards, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (compared in the next line)
        convert_experts(model(), forwards)
    assert str(raised.value) == sentence


def add_one(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    return y + 1


def patched(linear: nn.Linear) -> None:
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)


class NamedLinear(nn.Linear):
    pass


LOST: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "forward_hook": (lambda m: m.register_forward_hook(add_one), "2 has _forward_hooks"),
    "forward_pre_hook": (
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        "2 has _forward_pre_hooks",
    ),
    "backward_hook": (
        lambda m: m.register_full_backward_hook(lambda *_: None),
        "2 has _backward_hooks",
    ),
    "state_dict_hook": (
        lambda m: m.register_state_dict_post_hook(lambda *_: None),
        "2 has _state_dict_hooks",
    ),
    "gradient_hook": (lambda m: m.weight.register_hook(lambda g: 2 * g), "2.weight has hooks"),
    "step_in_backward": (
        lambda m: m.bias.register_post_accumulate_grad_hook(lambda p: None),
        "2.bias has hooks",
    ),
    "weight_norm": (nn.utils.weight_norm, "2 has _forward_pre_hooks"),
    "pruning": (
        lambda m: prune.random_unstructured(m, "weight", 0.5),
        "2 has _forward_pre_hooks",
    ),
    "buffer": (lambda m: m.register_buffer("steps", torch.zeros(1)), "2 has the buffer steps"),
    "patched": (patched, "2 has a forward of its own"),
}
ANOTHER_CLASS: dict[str, Callable[[nn.Linear], Any]] = {
    "ParametrizedLinear": parametrizations.weight_norm,
    "NamedLinear": lambda m: setattr(m, "__class__", NamedLinear),
}


def check_refused(model: nn.Module, sentence: str) -> None:
    x, modules = torch.randn(T, H), list(model.modules())
    expected = model(x)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (compared in the next line)
        convert_experts(model, {Routed: routed_linear})
    assert str(raised.value) == sentence
    assert list(model.modules()) == modules
    assert_same_bits(model(x), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", LOST)
def test_what_would_be_lost(kind: str) -> None:
    add, lost = LOST[kind]
    model = Routed([nn.Linear(H, H) for _ in range(E)])
    add(model.experts[2])
    check_refused(model, f"convert_experts: Routed.experts: {lost}, which would be lost")


@pytest.mark.parametrize("name", ANOTHER_CLASS)
def test_linears_that_are_more(name: str) -> None:
    model = Routed([nn.Linear(H, H) for _ in range(E)])
    ANOTHER_CLASS[name](model.experts[2])
    check_refused(
        model,
        f"convert_experts: Routed must hold one ModuleList of {KNOWN}; it has experts of Linear, "
        f"{name}",
    )


@pytest.mark.parametrize("owner", ["expert", "expert twice", "shared"])
def test_shared_parameters(owner: str) -> None:
    model = Routed([nn.Linear(H, H) for _ in range(E)])
    if owner == "expert twice":
        model.experts[2] = model.experts[0]
    else:
        other = model.experts[0] if owner == "expert" else model.shared
        model.experts[2].weight = other.weight
    check_refused(
        model,
        "convert_experts: Routed.experts: 2.weight has a second owner, which would be lost",
    )


def test_shared_modules() -> None:
    """One expert that is another's part too, one list in two blocks, one expert in two lists."""
    models = [Routed([nn.Linear(H, H) for _ in range(E)]) for _ in range(2)]
    models[0].shared = models[0].experts[1]
    check_refused(
        models[0],
        "convert_experts: Routed.experts: 1 has a second owner, which would be lost",
    )
    models[0].shared = models[1].shared
    models[0].experts = models[1].experts
    check_refused(
        nn.Sequential(*models),
        "convert_experts: 0.experts: the list has a second owner, which would be lost",
    )
    models[0].experts = nn.ModuleList([nn.Linear(H, H), models[1].experts[3]])
    models[0].router = nn.Linear(H, 2)
    check_refused(
        nn.Sequential(*models),
        "convert_experts: 0.experts: 1 has a second owner, which would be lost",
    )


def test_what_may_be_shared() -> None:
    """A block, which stays one; modules without parameters, of which nothing is lost."""
    act = nn.SiLU()
    block = Routed([SwigluExpert(act=act) for _ in range(E)])
    block.act = act
    model, x = nn.Sequential(block, block), torch.randn(T, H)
    expected = model(x)
    assert [c.name for c in convert_experts(model, FORWARDS)] == ["0"]
    assert model[0] is model[1]
    assert torch.allclose(model(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_forward_that_would_hide_the_new_one(kind: str) -> None:
    model = MODELS[kind][0]()
    module = model if kind == "linear" else model.experts
    module.forward = module.forward
    where = "Routed" if kind == "linear" else "experts"
    check_refused(
        model, f"convert_experts: {where} has a forward of its own, which would hide the new one"
    )


@pytest.mark.parametrize("act", [gelu, torch.relu, clamped, dropping])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["grouped", "lists"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_not_swiglu_is_refused(
    act: Callable[..., Tensor], dtype: torch.dtype, form: str, device: str
) -> None:
    if form == "grouped":
        model, forwards = nn.Sequential(Sorted(GroupedExperts(act))), None
    else:
        right, wrong = (Routed([SwigluExpert(act=a) for _ in range(E)]) for a in (silu, act))
        model, forwards = nn.Sequential(right, wrong), FORWARDS
    model.to(device, dtype).eval()
    sentence = r"experts do not compute down\(silu\(gate\(x\)\) \* up\(x\)\): they are .* off"
    with pytest.raises(ValueError, match=sentence):
        convert_experts(model, forwards)
    assert not any(isinstance(m, GroupedMLP | GroupedLinear) for m in model.modules())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("size", [1.0, 0.2])
def test_one_expert_of_many_is_not_swiglu(size: float) -> None:
    """However little it adds to what all give."""
    experts = [SwigluExpert() for _ in range(63)] + [SwigluExpert(act=gelu)]
    with torch.no_grad():
        for p in experts[-1].parameters():
            p.mul_(size)
    with pytest.raises(ValueError, match="experts do not compute"):
        convert_experts(Routed(experts), FORWARDS)


@pytest.mark.parametrize("value", [0.0, torch.nan])
@pytest.mark.parametrize("name", ["w1", "w2"])
@pytest.mark.parametrize("act", [silu, gelu])
def test_weights_that_show_nothing(act: Callable[..., Tensor], name: str, value: float) -> None:
    """A model may be initialised with zeros; others stand in for them while it is looked at."""
    experts = [SwigluExpert(act=act) for _ in range(E)]
    with torch.no_grad():
        experts[1].get_submodule(name).weight.fill_(value)
    model = Routed(experts)
    if act is silu:
        convert_experts(model, FORWARDS)
        assert_same_bits(model.experts.down_proj[1], experts[1].w2.weight)
    else:
        with pytest.raises(ValueError, match="experts do not compute"):
            convert_experts(model, FORWARDS)


def test_converted_in_inference_mode() -> None:
    model = Routed([SwigluExpert() for _ in range(E)])
    with torch.inference_mode():
        convert_experts(model, FORWARDS)
    model(torch.randn(T, H)).sum().backward()
    assert model.experts.down_proj.grad is not None


# --- two processes -------------------------------------------------------------------------------

COUNTS = [16, 0, 32, 2]


def step(experts: Callable[..., Tensor], x: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = experts(x, torch.tensor(counts))
    y.square().sum().backward()
    return y.detach(), x.grad


def distribute(experts: nn.Module, mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """As torchtitan's expert and tensor parallelism do."""
    for name, dim in dims.items():
        whole = experts.get_parameter(name).detach()
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        experts.register_parameter(name, nn.Parameter(sharded))


def check_gradients(sharded: nn.Module, whole: nn.Module, rank: int, dims: dict[str, int]) -> None:
    for name, dim in dims.items():
        gradient = sharded.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        expected = whole.get_parameter(name).grad.chunk(PROCESSES, dim)[rank]
        assert_same_bits(gradient.to_local(), expected)


def both_processes() -> DeviceMesh:
    return init_device_mesh("cpu", (PROCESSES,))


def check_expert_parallel(recipe: Recipe | None, rank: int, directory: Path) -> None:
    plain, dims = GroupedExperts(), {"w1": 0, "w2": 0, "w3": 0}
    x = torch.randn(sum(COUNTS), H)
    expected, _ = step(plain, x, COUNTS)
    whole, sharded = deepcopy(plain), deepcopy(plain)
    for experts in (whole, sharded):
        convert_experts(experts, recipe=recipe)
    distribute(sharded, both_processes(), dims)
    y, dx = step(whole, x, COUNTS)
    assert (y - expected).norm() < (2.0**-6 if recipe is None else 0.25) * expected.norm()
    own, rows = COUNTS[2 * rank :][:2], slice(16 * rank, 16 + 34 * rank)
    for call in (sharded, torch.compile(sharded, fullgraph=True, backend="aot_eager")):
        sharded.zero_grad()
        own_y, own_dx = step(call, x[rows], own)
        assert_same_bits(own_y, y[rows])
        assert_same_bits(own_dx, dx[rows])
        check_gradients(sharded, whole, rank, dims)


def check_tensor_parallel(rank: int, directory: Path) -> None:
    """Each process has half of the features inside an expert; outputs add up."""
    whole = GroupedExperts(features=64)
    convert_experts(whole)
    sharded, x = deepcopy(whole), torch.randn(sum(COUNTS), H)
    distribute(sharded, both_processes(), {"w1": 1, "w2": 2, "w3": 1})
    y = sharded(x, torch.tensor(COUNTS)).detach()
    dist.all_reduce(y)
    assert torch.allclose(y, whole(x, torch.tensor(COUNTS)), atol=1e-5)


def check_tensor_parallel_biases(rank: int, directory: Path) -> None:
    """What is added once is added once, and each copy of the last bias has all of its gradient."""
    whole, counts = GptOssExperts(features=64), torch.tensor(COUNTS)
    convert_experts(whole)
    sharded, x = deepcopy(whole), torch.randn(sum(COUNTS), H)
    dims = {"mlp1_weight_EGD": 1, "mlp1_bias_EG": 1, "mlp2_weight_EDF": 2}
    distribute(sharded, both_processes(), dims)
    y = sharded(x, counts)
    total = y.detach().clone()
    dist.all_reduce(total)
    expected = whole(x, counts)
    assert torch.allclose(total, expected, atol=1e-5)
    for result in (y, expected):
        result.sum().backward()
    assert torch.allclose(sharded.mlp2_bias_ED.grad, whole.mlp2_bias_ED.grad)


def check_fully_sharded(options: dict[str, bool], rank: int, directory: Path) -> None:
    """Converted and sharded before there are values, as torchtitan does it."""
    recipe, dims = Float8BlockScaling(), {"w1": 0, "w2": 0, "w3": 0}
    whole, x = GroupedExperts(), torch.randn(sum(COUNTS), H)
    convert_experts(whole, recipe=recipe, **options)
    with torch.device("meta"):
        sharded = GroupedExperts()
    convert_experts(sharded, recipe=recipe, **options)
    fully_shard(sharded, mesh=both_processes())
    sharded.to_empty(device="cpu")
    for name in dims:
        shard = whole.get_parameter(name).detach().chunk(PROCESSES)[rank]
        sharded.get_parameter(name).detach().to_local().copy_(shard)
    for actual, expected in zip(step(sharded, x, COUNTS), step(whole, x, COUNTS), strict=True):
        assert_same_bits(actual, expected)
    check_gradients(sharded, whole, rank, dims)


def check_already_sharded(form: str, rank: int, directory: Path) -> None:
    lists = form == "lists"
    model = Routed([SwigluExpert() for _ in range(E)]) if lists else GroupedExperts()
    late = fully_shard(nn.Sequential(model), mesh=both_processes())
    with pytest.raises(ValueError, match="parameters are sharded already: convert before"):
        convert_experts(late, FORWARDS if lists else None)


def check_replicated(rank: int, directory: Path) -> None:
    """DistributedDataParallel goes on with the parameters that it was made with."""
    model = nn.Sequential(Routed([SwigluExpert() for _ in range(E)]), Sorted(GroupedExperts()))
    replicated = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="DistributedDataParallel holds the parameters of lists"):
        convert_experts(replicated, FORWARDS)
    [converted] = convert_experts(DistributedDataParallel(model[1]))
    assert converted.form == "grouped SwiGLU"  # whose parameters stay


def check_delayed_scaling(rank: int, directory: Path) -> None:
    experts = GroupedExperts()
    convert_experts(experts, recipe=DelayedScaling())
    distribute(experts, both_processes(), {"w1": 0, "w2": 0, "w3": 0})
    sentence = (
        "GroupedGroupedExperts: DelayedScaling holds scales of 4 experts, 2 are on this process: "
        "shard in another way or take another recipe"
    )
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        experts(torch.randn(3, H), torch.tensor([1, 2]))


def check_weights_in_fp8(rank: int, directory: Path) -> None:
    """Experts that are spread stay in FP8; parts of their matrices cannot."""
    experts = GroupedExperts()
    convert_experts(experts, recipe=Float8BlockScaling(), weights="fp8")
    whole, x = deepcopy(experts), torch.randn(3, H)
    distribute(experts, both_processes(), {"w1": 0, "w2": 0, "w3": 0})
    parameters: list[Any] = list(experts.parameters())
    assert all(isinstance(p.to_local(), GroupedTensor) for p in parameters)
    counts = [0, 0, 1, 2] if rank else [1, 2, 0, 0]
    y, expected = experts(x, torch.tensor([1, 2])), whole(x, torch.tensor(counts))
    assert_same_bits(y, expected)
    for result in (y, expected):
        result.square().sum().backward()
    check_gradients(experts, whole, rank, {"w1": 0, "w2": 0, "w3": 0})

    experts = GroupedExperts().to("meta")
    convert_experts(experts, recipe=Float8BlockScaling(), weights="fp8")
    distribute(experts, both_processes(), {"w1": 1, "w2": 2, "w3": 1})
    experts.to_empty(device="cpu")
    refusal = (
        "GroupedGroupedExperts: w1 is not in FP8 any more: tensor parallelism makes parameters "
        "of high precision, so convert without weights in FP8"
    )
    assert sentence(lambda: experts(x, torch.tensor([1, 2, 0, 0]))) == refusal


CHECKS: Checks = {
    "weights_in_fp8": check_weights_in_fp8,
    "expert_parallel": partial(check_expert_parallel, None),
    "expert_parallel_block": partial(check_expert_parallel, Float8BlockScaling()),
    "tensor_parallel": check_tensor_parallel,
    "tensor_parallel_biases": check_tensor_parallel_biases,
    "fully_sharded": partial(check_fully_sharded, {}),
    "fully_sharded_fp8": partial(check_fully_sharded, {"weights": "fp8"}),
    "already_sharded_grouped": partial(check_already_sharded, "grouped"),
    "already_sharded_lists": partial(check_already_sharded, "lists"),
    "replicated": check_replicated,
    "delayed_scaling": check_delayed_scaling,
}


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, passes: Passes) -> None:
    passes(check)
