# SPDX-License-Identifier: Apache-2.0
"""Frozen weights (weights="fp8"): bytes in plain parameters, read as they are.

T rows, E groups, K in_features, N out_features; of GroupedMLP, K features of a token and N of an
expert.
"""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from grouped_linear import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    grouped_linear,
    ops,
    te,
)
from grouped_linear.quantized.frozen import FrozenBytes, KeepsFrozen
from support import reference
from support.calls import Calls
from support.compare import assert_same_bits, assert_same_tensors, bits
from support.devices import needs_gpu
from support.errors import sentence
from support.graphs import captured
from support.groups import experts_of
from support.layers import linear_of, through_pickle, through_torch_save
from support.pairs import pairwise
from support.tensors import BF16, DTYPES, FP32

E, T, K, N = 4, 147, 160, 288
SPLITS = ([3, 0, 130, 7], [0, 140, 0, 0], [0, 0, 0, 0], [37, 37, 37, 36])
RECIPES = {
    "default": Float8BlockScaling(),
    "any_scale": Float8BlockScaling(power_of_two_scales=False),
    "bf16_wgrad": Float8BlockScaling(wgrad=BF16),
}
E4M3 = torch.float8_e4m3fn


class MLP(GroupedMLP):
    """Called as a GroupedLinear is, with scores for each of T tokens, which learn, too."""

    def __init__(self, *sizes: int, dtype: Any = None, device: Any = None, **options: Any) -> None:
        super().__init__(*sizes, dtype=dtype, device=device, **options)
        self.score = nn.Parameter(torch.rand(T, 2, dtype=dtype, device=device))

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        return super().forward(x, self.score, experts_of(m_splits, T))


KINDS = {"linear": linear_of, "mlp": MLP}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def make_layer(
    kind: Any = linear_of, device: str = "cpu", *, weights: str | None = "fp8", **options: Any
) -> Any:
    torch.manual_seed(0)
    kept: dict[str, Any] = {"recipe": Float8BlockScaling(), "dtype": BF16, "device": device}
    return kind(E, K, N, weights=weights, **(kept | options))


def names_of(layer: nn.Module) -> list[str]:
    return [name for name in ("weight", "gate_up_proj", "down_proj") if hasattr(layer, name)]


def inputs(device: str, m_splits: list[int], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """x with NaN past the last group, and m_splits."""
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(sum(m_splits))).to(dtype)
    x[sum(m_splits) :] = torch.nan
    return x.to(device).requires_grad_(), torch.tensor(m_splits, device=device)


def call(layer: Any, x: Tensor, m_splits: Tensor) -> dict[str, Tensor]:
    """y, dx, and the gradients of parameters but the experts' weights."""
    y = layer(x, m_splits)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    learns = {
        name: p
        for name, p in getattr(layer, "_orig_mod", layer).named_parameters()
        if p.dim() < 3 and p.requires_grad
    }
    return {"y": y.detach()} | dict(
        zip(("x", *learns), torch.autograd.grad(y, (x, *learns.values()), dy), strict=True)
    )


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    assert_same_tensors(actual.state_dict(), expected.state_dict())


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "recipe", "dtype"), pairwise(KINDS, RECIPES, {str(d): d for d in DTYPES})
)
def test_bits_of_a_weight_quantized_in_each_call(
    device: str, kind: Any, recipe: Float8BlockScaling, dtype: torch.dtype
) -> None:
    """Drawn as a plain weight is, then quantized once; only a backward transposes it."""
    frozen = make_layer(kind, device, recipe=recipe, dtype=dtype)
    plain = make_layer(kind, device, recipe=recipe, dtype=dtype, weights=None)
    for m_splits in SPLITS:
        x, splits = inputs(device, m_splits, dtype)
        results = call(frozen, x, splits)
        assert_same_tensors(results, call(plain, x, splits))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), Calls() as forward:
                assert_same_bits(frozen(x, splits), results["y"])
            assert not forward.counts.keys() & {"transpose_weight", "quantize_weight"}
    for name in names_of(frozen):
        w = plain.get_parameter(name)
        q, scale, _ = ops.quantize_weight(w, columnwise=False, **recipe.weight.scale_options)
        assert_same_bits(bits(frozen.frozen_weight(name).values), bits(q))
        numbers = reference.dequantize_weight(q, scale).float()
        assert_same_bits(frozen.dequantize(name), numbers.to(dtype))


@EVERY_KIND
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_activations_of_another_dtype(autocast: bool, kind: Any) -> None:
    frozen, plain = (make_layer(kind, dtype=FP32, weights=kept) for kept in ("fp8", None))
    with torch.autocast("cpu", BF16, enabled=autocast):
        arguments = inputs("cpu", SPLITS[0], FP32 if autocast else torch.float16)
        results = call(frozen, *arguments)
        assert_same_tensors(results, call(plain, *arguments))
    assert results["y"].dtype == (BF16 if autocast else torch.float16)


def test_errors() -> None:
    layer, other = make_layer(), torch.zeros(E, N, K)

    def substituted() -> None:
        torch.func.functional_call(layer, {"weight": other}, inputs("cpu", SPLITS[0]))

    cases: list[Callable[[], Any]] = [
        lambda: make_layer(recipe=MXFP8BlockScaling()),
        lambda: make_layer(cache_weights=True),
        lambda: make_layer(fuse_wgrad_accumulation=True),
        lambda: make_layer(single_grouped_weight=False),
        lambda: make_layer(single_grouped_weight=False, weights="int8"),
        lambda: make_layer(MLP, recipe=MXFP8BlockScaling()),
        lambda: make_layer(MLP, fuse_wgrad_accumulation=True),
        lambda: make_layer(recipe=Float8CurrentScaling(), weights="mxfp4"),
        lambda: make_layer(MLP, fuse_wgrad_accumulation=True, weights="mxfp4"),
        lambda: GroupedLinear(2, 48, 32, weights="mxfp4"),
        lambda: GroupedMLP(2, 32, 48, weights="mxfp4"),
        lambda: layer.requires_grad_(True),
        substituted,
        lambda: layer.freeze("weight", (other, other), Float8BlockScaling()),
        lambda: layer.freeze("weight", (other.to(E4M3), other), Float8BlockScaling()),
        lambda: layer.dequantize("down_proj"),
        lambda: make_layer(weights="both").dequantize("weight"),
    ]
    before, sentences = copy.deepcopy(layer), []
    for case in cases:
        with pytest.raises((ValueError, RuntimeError)) as error:
            case()
        sentences.append(str(error.value))
    before.other_scale_inv = layer.other_scale_inv = None
    for name, taken in (("forward", "forward"), ("other", "other_scale_inv")):
        with pytest.raises(KeyError, match=f"attribute '{taken}' already exists"):
            layer.freeze(name, other, Float8BlockScaling())
        assert layer.frozen_weight(name) is None
    assert_same_state(layer, before)
    assert_expected_inline(
        "\n".join(sentences),
        """\
GroupedLinear: weights='fp8' needs the recipe Float8BlockScaling, got MXFP8BlockScaling()
GroupedLinear: cache_weights keeps what weights='fp8' has already: choose one of them
GroupedLinear: weights='fp8' is frozen and has no gradient: leave fuse_wgrad_accumulation out
GroupedLinear: weights='fp8' needs single_grouped_weight=True
GroupedLinear: weights must be None, 'both', 'fp8' or 'mxfp4', got 'int8'
GroupedMLP: weights='fp8' needs the recipe Float8BlockScaling, got MXFP8BlockScaling()
GroupedMLP: weights='fp8' is frozen and has no gradient: leave fuse_wgrad_accumulation out
GroupedLinear: weights='mxfp4' needs no recipe, Float8BlockScaling or MXFP8BlockScaling, got Float8CurrentScaling()
GroupedMLP: weights='mxfp4' is frozen and has no gradient: leave fuse_wgrad_accumulation out
GroupedLinear: in_features must be a multiple of 32 with weights='mxfp4', got 48
GroupedMLP: intermediate_size must be a multiple of 32 with weights='mxfp4', got 48
FrozenBytes: a frozen weight cannot learn: call requires_grad_() of parameters of floating point alone, or take weights='both' or None in place of 'fp8' or 'mxfp4'
GroupedLinear: weight is frozen in uint8, got float32: load_state_dict quantizes
frozen weight: numbers must be float8_e4m3fn, got float32
frozen weight: scale must be [4, 3, 2], got [4, 288, 160]
GroupedLinear: dequantize reads frozen weights, and 'down_proj' is none: read it directly; frozen here: weight
GroupedLinear: dequantize reads frozen weights, and 'weight' is none: read it directly; frozen here: nothing""",  # noqa: E501
    )


@pytest.mark.parametrize("weights", ["fp8", "both"])
def test_the_recipe_that_is_taken_as_convert_takes_it(weights: Any) -> None:
    assert GroupedMLP(E, 32, 64, weights=weights).recipe == Float8BlockScaling()
    assert te.GroupedLinear(E, 32, 64, weights=weights, single_grouped_weight=True).recipe
    assert GroupedLinear(E, 32, 64, weights="mxfp4").recipe is None


AVERAGES: dict[str, Any] = {
    "equal weights": {},
    "avg_fn": {"avg_fn": get_ema_avg_fn(0.75)},
    "multi_avg_fn": {"multi_avg_fn": get_ema_multi_avg_fn(0.75)},
}


@pytest.mark.parametrize("how", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_averages_of_adapters(weights: str, how: Any, device: str) -> None:
    """Frozen weights stay as they are, whatever averages parameters and buffers."""
    recipe = Float8BlockScaling()
    layer = GroupedLinear(E, 64, N, recipe=recipe, weights=weights, lora=Lora(8), device=device)
    averaged = AveragedModel(layer, use_buffers=True, **how)
    if device == "cuda" and not how:  # on a GPU torch averages all parameters by one division
        averaged.update_parameters(layer)
        with pytest.raises(RuntimeError, match="Integer division"):
            averaged.update_parameters(layer)
        return
    a = layer.weight_lora_a.detach().clone()
    for _ in range(2):
        averaged.update_parameters(layer)
        nn.init.ones_(layer.weight_lora_a)
    share = 0.25 if how else 0.5
    torch.testing.assert_close(averaged.module.weight_lora_a, a.lerp(torch.ones_like(a), share))
    for name in ("weight", "weight_scale_inv"):
        assert_same_bits(averaged.module.get_parameter(name), layer.get_parameter(name))


def test_bytes_take_no_numbers() -> None:
    """By copy_, by data, nor by an average of two models; what is the same is taken."""
    layer, w = make_layer(), make_layer(weights=None).weight.detach()
    before, bytes_of = copy.deepcopy(layer), layer.weight
    other = (bytes_of + 1).to(torch.uint8)
    averaged = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(layer)
    averaged_with_another = copy.deepcopy(layer)
    averaged_with_another.load_state_dict({"weight": -w}, strict=False)
    half_way = bytes_of.data.clone()
    cases: dict[str, Callable[[], Any]] = {
        "bfloat16": lambda: bytes_of.detach().copy_(w),
        "float8_e4m3fn": lambda: bytes_of.detach().copy_(w.to(E4M3)),
        "float32": lambda: averaged.update_parameters(averaged_with_another),
        "int8": lambda: setattr(bytes_of, "data", bytes_of.data.view(torch.int8)),
        "other bytes": lambda: setattr(bytes_of, "data", other),
    }
    for got, case in cases.items():
        assert sentence(case) == (
            f"FrozenBytes: bytes of a frozen weight stay as they are, got {got}: load_state_dict "
            "quantizes, adapters stay beside the weight, and averages leave out parameters that "
            "require no gradient"
        )
    bytes_of.detach().copy_(bytes_of.data * (1 - 2**-20))  # an average that was rounded down
    assert_same_state(layer, before)
    assert_same_state(averaged.module, before)
    bytes_of.data = half_way  # the same ones


def test_bytes_that_are_assigned_take_no_numbers() -> None:
    """As transformers' from_pretrained assigns them; and those of a pickle."""
    layer = make_layer()
    for name in ("weight", "weight_scale_inv"):
        setattr(layer, name, nn.Parameter(layer.get_parameter(name).data, requires_grad=False))
        assert type(layer.get_parameter(name)) is FrozenBytes
        assert type(through_pickle(layer).get_parameter(name)) is FrozenBytes


# --- state dicts ---------------------------------------------------------------------------------


def kept_as(state: str, like: Any) -> dict[str, Tensor]:
    """A state of a layer in high precision, in bytes or in FP8 with scales of some dtype."""
    if state == "bytes":
        return dict(like.state_dict())
    if state.startswith("scales in"):
        scales = getattr(torch, state.removeprefix("scales in "))
        return {
            n: t.to(scales) if n.endswith("_scale_inv") else t for n, t in numbers_of(like).items()
        }
    dtype = getattr(torch, state)
    return {n: t.to(dtype) for n, t in make_layer(type_of(like), weights=None).state_dict().items()}


def numbers_of(layer: Any) -> dict[str, Tensor]:
    """A state as a checkpoint in FP8 or MXFP4 has it, in the layer's memory."""
    state = dict(layer.state_dict())
    for name in names_of(layer):
        weight = layer.frozen_weight(name)
        state[name], state[f"{name}_scale_inv"] = weight.values.detach(), weight.scale.detach()
    return state


def type_of(layer: Any) -> Any:
    return MLP if isinstance(layer, MLP) else linear_of


@pytest.mark.parametrize(
    ("kind", "assign", "state", "weights"),
    pairwise(
        KINDS,
        {"copy": False, "assign": True},
        {
            name: name
            for name in (
                "bfloat16",
                "float64",
                "bytes",
                "scales in float32",
                "scales in bfloat16",
                "scales in float8_e8m0fnu",
            )
        },
        {"fp8": "fp8", "both": "both", "plain": None},
    ),
)
def test_loads(kind: Any, state: str, weights: Any, assign: bool) -> None:
    """Numbers and scales as they are, high precision rounded to nearest, into any layer."""
    expected, target = make_layer(kind), make_layer(kind, weights=weights)
    loaded = kept_as(state, expected)
    for p in target.parameters():
        nn.init.zeros_(p)
    addresses = [p.data_ptr() for p in target.parameters()]
    target.load_state_dict(loaded, assign=assign)
    if not assign:  # CUDA graphs read there
        assert addresses == [p.data_ptr() for p in target.parameters()]
    for name in names_of(target):
        if weights == "fp8":
            for part in (name, f"{name}_scale_inv"):
                assert_same_bits(target.get_parameter(part), expected.get_parameter(part))
                assert not target.get_parameter(part).requires_grad
        elif state == "bytes" or state.startswith("scales"):
            assert_same_bits(target.get_parameter(name) * 1, expected.dequantize(name))
    arguments = inputs("cpu", SPLITS[0])
    assert_same_bits(target.to(BF16)(*arguments), expected(*arguments))


def test_e8m0_scales_are_exact() -> None:
    """2^-127, which float32 has as a subnormal number, to 2^127; the last one is NaN."""
    module = KeepsFrozen()
    numbers = torch.ones(256, 16, 16).to(E4M3)
    module.freeze("w", (numbers, torch.ones(256, 1, 1)), Float8BlockScaling())
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(256, 1, 1)
    module.load_state_dict({"w": numbers, "w_scale_inv": scales})
    loaded = module.frozen_weight("w").scale.flatten().double()
    assert_same_bits(loaded[:-1], 2.0 ** torch.arange(-127, 128).double())
    assert loaded[-1].isnan()


@EVERY_KIND
def test_state_dicts_are_plain_tensors(kind: Any, tmp_path: Path) -> None:
    """The parameters' own bytes: a write there is not missed."""
    layer, arguments = make_layer(kind), inputs("cpu", SPLITS[0])
    for state in (layer.state_dict(), layer.state_dict(keep_vars=True)):
        for name in names_of(layer):
            assert state[name].dtype == state[f"{name}_scale_inv"].dtype == torch.uint8
            assert state[name].data_ptr() == layer.get_parameter(name).data_ptr()
    state = layer.state_dict()
    assert {type(t) for t in state.values()} == {Tensor}
    save_file(state, tmp_path / "model.safetensors")
    other = make_layer(kind)
    for p in other.parameters():
        nn.init.zeros_(p)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same_state(other, layer)
    y = layer(*arguments)
    substituted = torch.func.functional_call(layer, dict(state), arguments)
    assert_same_bits(substituted, y)
    for name in names_of(layer):
        state[f"{name}_scale_inv"].view(FP32).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    doubled = make_layer(kind, weights=None)
    for name in names_of(layer):
        doubled.get_parameter(name).data.mul_(2)
    assert_same_tensors(call(layer, *arguments), call(doubled, *arguments))


@pytest.mark.parametrize("weights", ["fp8", "both", None])
@EVERY_KIND
def test_state_dicts_that_mean_something_else(kind: Any, weights: Any) -> None:
    target, fits = make_layer(kind, weights=weights), numbers_of(make_layer(kind))
    for p in target.parameters():
        nn.init.zeros_(p)  # a part that is loaded would show
    before, name = copy.deepcopy(target), names_of(target)[0]
    scale = fits.pop(f"{name}_scale_inv")
    plain = make_layer(kind, weights=None).state_dict()[name]
    said = rf"{name}: it must be in high precision, or float8_e4m3fn with scales, got "
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8, torch.int8):
        with pytest.raises(RuntimeError, match=said + str(dtype).removeprefix("torch.")):
            target.load_state_dict(fits | {name: plain.to(dtype)})
    cases = {
        f"needs scales, {name}_scale_inv, which are missing": fits,
        r"must be scales in float or float8_e8m0fnu, got uint8": fits
        | {f"{name}_scale_inv": scale.to(torch.float8_e8m0fnu).view(torch.uint8)},
        r"scales in float or float8_e8m0fnu, got int32": fits
        | {f"{name}_scale_inv": scale.view(torch.int32)},
        r"scale(_inv)? must be \[": fits | {f"{name}_scale_inv": scale[:1]},
    }
    if weights == "fp8":
        cases["in high precision, or float8_e4m3fn with scales, got int32"] = {name: plain.int()}
        alone = fits | {f"{name}_scale_inv": scale}
        del alone[name]
        cases["scales come without their numbers"] = alone
        cases["bfloat16 comes with scales.*: leave them out, or"] = alone | {name: plain}
        narrower = plain[..., 16:]  # as many scales
        cases[rf"{name} must be \["] = {name: narrower}
        cases["one is on the meta device"] = fits | {f"{name}_scale_inv": scale.to("meta")}
    for words, state in cases.items():
        with pytest.raises(RuntimeError, match=words):
            target.load_state_dict(state, strict=False)
    for part in (name, f"{name}_scale_inv"):
        if part in target.state_dict():
            assert_same_bits(bits(target.state_dict()[part]), bits(before.state_dict()[part]))


@pytest.mark.parametrize(("own", "other"), [("fp8", "mxfp4"), ("mxfp4", "fp8")])
def test_bytes_of_the_other_format_are_named(own: Any, other: Any) -> None:
    """And what the state has is not said to be missing."""
    layer, source = (GroupedLinear(E, 64, N, bias=False, weights=w) for w in (own, other))
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(source.state_dict())
    assert str(error.value).splitlines()[1:] == [
        f"\tweight: it must be in high precision, or {own.upper()} with scales, got "
        f"{other.upper()}: load what dequantize(name) of its layer returns."
    ]
    layer.load_state_dict({"weight": source.dequantize("weight")})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("from_frozen", "to_frozen"), [("fp8", "fp8"), ("fp8", None), (None, "fp8"), (None, None)]
)
def test_state_dicts_with_an_expert_a_key(from_frozen: Any, to_frozen: Any, assign: bool) -> None:
    """weight0, weight1, ... of either kind into one weight; one weight of either kind into them."""
    source = make_layer(weights=from_frozen)
    numbers = source.dequantize("weight") if from_frozen else source.weight
    apart = source.state_dict()
    for name in ("weight", "weight_scale_inv"):
        if name in apart:
            parts = enumerate(apart.pop(name))
            apart |= {name.replace("weight", f"weight{e}", 1): part for e, part in parts}
    target = make_layer(weights=to_frozen, single_grouped_weight=True)
    for p in target.parameters():
        nn.init.zeros_(p)
    target.load_state_dict(apart, assign=assign)
    if to_frozen:
        assert_same_state(target, make_layer(weights=to_frozen))
    else:
        assert_same_bits(target.weight, numbers)
    discrete = make_layer(weights=None, single_grouped_weight=False)
    discrete.load_state_dict(source.state_dict(), assign=assign)
    for e, expert in enumerate(numbers):
        assert_same_bits(getattr(discrete, f"weight{e}"), expert)


@pytest.mark.parametrize("published", [False, True])
def test_an_expert_a_key_of_four_bits(published: bool) -> None:
    """One weight in MXFP4, as bytes or as a checkpoint has it, into a parameter for each expert."""
    source = GroupedLinear(E, 64, N, weights="mxfp4")
    target = te.GroupedLinear(E, 64, N)
    target.load_state_dict(numbers_of(source) if published else source.state_dict())
    for e, expert in enumerate(source.dequantize("weight")):
        assert_same_bits(target.get_parameter(f"weight{e}"), expert)


def test_tied_layers_of_one_file(tmp_path: Path) -> None:
    """safetensors writes a shared weight once, and loads it into both."""

    def tied() -> nn.ModuleDict:
        layers = nn.ModuleDict({"a": make_layer(), "b": make_layer()})
        for name, p in list(layers["a"].named_parameters()):
            layers["b"].register_parameter(name, p)
        return layers

    source, target = tied(), tied()
    for p in target.parameters():
        nn.init.zeros_(p)
    save_model(source, str(tmp_path / "model.safetensors"))
    load_model(target, str(tmp_path / "model.safetensors"))
    assert_same_state(target, source)


TOKENS = torch.randn(T, 64), torch.tensor(SPLITS[0])


def exported(unflatten: bool) -> Callable[[Any], Any]:
    def program_of(layer: Any) -> Any:
        program = torch.export.export(layer, TOKENS)
        return torch.export.unflatten(program) if unflatten else program.module()

    return program_of


def checkpointed(to: Any, state: dict[str, Tensor]) -> None:
    """torch.distributed.checkpoint, in the memory of a state alone."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        dcp.load(to.state_dict(), checkpoint_id=folder, no_dist=True)


PROGRAMS = {"layer": lambda layer: layer, "module": exported(False), "unflatten": exported(True)}
LOADERS: dict[str, Callable[[Any, Any], Any]] = {
    "load_state_dict": lambda to, state: to.load_state_dict(state),
    "assign": lambda to, state: to.load_state_dict(state, assign=True),
    "checkpoint": checkpointed,
}


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("source", PROGRAMS)
@pytest.mark.parametrize("target", PROGRAMS)
@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_reads_the_bytes(loader: str, target: str, source: str, weights: str) -> None:
    """Parameters, state dicts and programs hold one thing, so copies by name are right."""
    layers = [GroupedLinear(E, 64, N, recipe=Float8BlockScaling(), weights=weights) for _ in "ab"]
    to, other = (PROGRAMS[kind](one) for kind, one in zip((target, source), layers, strict=True))
    y = other(*TOKENS)
    LOADERS[loader](to, other.state_dict())
    assert_same_bits(to(*TOKENS), y)


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@pytest.mark.parametrize("way", ["to frozen", "from frozen"])
def test_loaders_that_know_no_bytes_notice_numbers(way: str, weights: str) -> None:
    """A state in the dtypes of a checkpoint has scales of another shape."""
    layer = GroupedLinear(E, 64, N, recipe=Float8BlockScaling(), weights=weights)
    before = copy.deepcopy(layer.state_dict())
    numbers = {name: t.clone() for name, t in numbers_of(layer).items()}
    if weights == "mxfp4":
        numbers["weight_scale_inv"] = numbers["weight_scale_inv"].view(torch.float8_e8m0fnu)
    published = nn.Module()
    for name, t in numbers.items():
        published.register_parameter(name, nn.Parameter(t, requires_grad=False))
    state, to = (numbers, exported(False)(layer)) if way == "to frozen" else (before, published)
    for load in (checkpointed, LOADERS["load_state_dict"]):
        with pytest.raises(BaseException, match=r"(?i)size mismatch[\s\S]*scale_inv"):
            load(to, state)
    with pytest.raises(BaseException, match=r"(?i)size mismatch[\s\S]*scale_inv"):
        checkpointed(layer, numbers)
    assert_same_tensors(layer.state_dict(), before)


# --- birth and travels ---------------------------------------------------------------------------


def test_initialisation_of_the_users() -> None:
    assert (make_layer(init_method=lambda w: w.fill_(3)).dequantize("weight") == 3).all()


@pytest.mark.parametrize("assign", [False, True])
@EVERY_KIND
def test_meta_device(kind: Any, assign: bool) -> None:
    layer, expected = make_layer(kind, "meta"), make_layer(kind)
    assert all(p.is_meta for p in layer.parameters())
    layer.reset_parameters()  # nothing to draw yet
    if not assign:
        layer.to_empty(device="cpu")
    layer.load_state_dict(expected.state_dict(), assign=assign)
    assert_same_state(layer, expected)
    expected = copy.deepcopy(expected)
    before = [p.data_ptr() for p in layer.parameters()]
    for seed in (1, 0):  # drawn again in place
        torch.manual_seed(seed)
        layer.reset_parameters()
        for name in names_of(layer):
            same = torch.equal(layer.get_parameter(name), expected.get_parameter(name))
            assert same == (seed == 0)
    assert before == [p.data_ptr() for p in layer.parameters()]


TRAVELS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "older file": partial(through_torch_save, zipped=False),
    "half": lambda layer: copy.deepcopy(layer).half(),
    "to": lambda layer: copy.deepcopy(layer).to("cpu", FP32),
    "inference": torch.inference_mode()(lambda layer: copy.deepcopy(layer).cpu().to(BF16)),
}


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
@EVERY_KIND
def test_travels_keep_every_byte(kind: Any, weights: str, travel: Callable[[Any], Any]) -> None:
    layer = make_layer(kind, weights=weights)
    twin, arguments = travel(layer), inputs("cpu", SPLITS[0])
    for name in names_of(layer):
        for part in (name, f"{name}_scale_inv"):
            assert_same_bits(twin.get_parameter(part), layer.get_parameter(part))
            assert twin.get_parameter(part).data_ptr() != layer.get_parameter(part).data_ptr()
    with torch.no_grad():
        assert_same_bits(twin.to(BF16)(*arguments), layer(*arguments))


@pytest.mark.parametrize("weights", ["fp8", "mxfp4"])
def test_no_adapters_are_merged(weights: Any) -> None:
    """As PEFT's are not. The sentence says where they can be."""
    options: dict[str, Any] = {"recipe": Float8BlockScaling(), "lora": Lora(8, 16)}
    layer = GroupedLinear(2, 64, 32, weights=weights, **options)
    nn.init.normal_(layer.weight_lora_b)
    before = {name: t.clone() for name, t in layer.named_parameters()}
    assert sentence(layer.merge_lora) == (
        f"merge_lora: weight is frozen with weights={weights!r} and stays as it is: keep the "
        "adapter beside it, or merge in a layer with weights=None into which you copy "
        "dequantize('weight')"
    )
    for name, p in layer.named_parameters():
        assert_same_bits(p, before[name])


class Other(nn.Module):
    """Another library's module."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 32, 16))
        self.w2 = nn.Parameter(torch.randn(2, 16, 32))


class Converted(KeepsFrozen, Other):
    """Its class after a conversion."""


def test_modules_of_others() -> None:
    module: Any = Other()
    module.__class__ = Converted
    w2 = module.w2.detach().clone()
    module.freeze("w1", module.w1, Float8BlockScaling())
    q, scale, _ = ops.quantize_weight(w2, columnwise=False)
    module.freeze("w2", (q, scale), Float8BlockScaling(), BF16)
    assert module.w2.data_ptr() == q.data_ptr()  # not copied
    assert module.frozen_weight("w1").columnwise is None
    assert (module.dequantize("w1").dtype, module.dequantize("w2").dtype) == (FP32, BF16)
    assert [n for n, _ in module.named_parameters()] == ["w1", "w2", "w1_scale_inv", "w2_scale_inv"]
    other: Any = Converted()
    assert other.frozen_weight("w1") is None
    other.load_state_dict(module.state_dict())
    assert_same_bits(other.w1, module.dequantize("w1"))
    assert_same_bits(other.w2, module.dequantize("w2", FP32))


# --- graphs --------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, kind: Any) -> None:
    """One graph for all group sizes, also after a load of other bytes; it quantizes nothing."""
    layer, counter = make_layer(kind), CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for m_splits in SPLITS:
        arguments = inputs("cpu", m_splits)
        assert_same_tensors(call(compiled, *arguments), call(layer, *arguments))
        layer.load_state_dict(make_layer(kind, weights=None).state_dict())
    assert counter.frame_count == 1
    recorded = AotEagerAndRecordGraphs()
    call(torch.compile(layer, fullgraph=True, backend=recorded), *inputs("cpu", SPLITS[0]))
    graphs = recorded.fw_graphs + recorded.bw_graphs
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert "grouped_linear.grouped_scaled_mm.default" in called
    assert not [name for name in called if "weight" in name and "quantize" in name]


@needs_gpu
@EVERY_KIND
def test_cuda_graph_reads_what_is_loaded(kind: Any) -> None:
    layer, (x, m_splits) = make_layer(kind, "cuda"), inputs("cuda", SPLITS[0])
    other = make_layer(kind, "cuda")
    for name in names_of(other):
        other.overwrite_frozen(name, torch.randn_like(other.dequantize(name)))
    with torch.no_grad():
        graph, y = captured(partial(layer, x, m_splits))
        layer.load_state_dict(other.state_dict())
        graph.replay()
        assert_same_bits(y, other(x, m_splits))


def test_bytes_as_a_weight() -> None:
    """A function has no scales of them, and a cast would make numbers of bytes."""
    layer, (x, m_splits) = make_layer(), inputs("cpu", SPLITS[0])
    assert sentence(lambda: grouped_linear(x, layer.weight, m_splits)) == (
        "grouped_linear: weight must be bfloat16, float16 or float32, got uint8: give a frozen "
        "weight's numbers, as layer.dequantize(name) returns them"
    )
    grouped_linear(x, layer.dequantize("weight"), m_splits)


@EVERY_KIND
def test_parametrized(kind: Any) -> None:
    """As PEFT's adapters on a parameter are, which would add to bytes."""
    layer, x_and_splits = make_layer(kind), inputs("cpu", SPLITS[0])
    name = names_of(layer)[0]
    torch.nn.utils.parametrize.register_parametrization(layer, name, nn.Identity())
    with pytest.raises(RuntimeError, match=f"{name} is frozen, and a parametrization, as PEFT"):
        layer(*x_and_splits)


@EVERY_KIND
def test_traced_for_torchscript(kind: Any) -> None:
    with pytest.raises(RuntimeError, match="trace records no frozen weight: use torch"):
        torch.jit.trace(make_layer(kind), inputs("cpu", SPLITS[0]))
