# SPDX-License-Identifier: Apache-2.0
"""Whatever a layer's options are, and however it is called: to the bit what a plain one computes.

Options meet here that no other test brings together. The first run of such a test found that two
experts of a parameter each did not compile where nothing needs a gradient.

Each test draws 3 layers for each way to call them, compiled ones by night: these take a second or
two each, and test_training.py compiles every option in turn.
`pytest --nightly --hypothesis-profile=many tests/test_any_options.py` draws 30.

T rows, E groups, K in_features, N out_features.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GeGLU,
    GroupedLinear,
    GroupedMLP,
    Recipe,
    SquaredReLU,
    SwiGLU,
)
from support.compare import assert_same_bits
from support.layers import linear_of
from support.recipes import RECIPES
from support.tensors import DTYPES

FEATURES = strategies.sampled_from([16, 48, 128, 144, 272])
RECIPE = strategies.sampled_from([*RECIPES.values()])
DTYPE = strategies.sampled_from(DTYPES)
ACTIVATION = strategies.sampled_from(
    [SwiGLU(), SwiGLU(1.702, 1.0, 7.0, interleaved=True), GeGLU("tanh"), SquaredReLU()]
)
YES_OR_NO = strategies.booleans()
EVERY_WAY = pytest.mark.parametrize(
    "way", ["eager", "checkpoint", pytest.param("compiled", marks=pytest.mark.nightly)]
)
few = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 10)
Draw = Callable[[strategies.SearchStrategy[Any]], Any]


def rarely(draw: Draw) -> bool:
    return bool(draw(strategies.sampled_from([False, False, False, True])))


def sometimes_requantizing(recipe: Recipe | None, draw: Draw) -> Recipe | None:
    if isinstance(recipe, Float8BlockScaling | Float8CurrentScaling) and draw(YES_OR_NO):
        return replace(recipe, requantize_weights=True)
    return recipe


def called(layer: nn.Module, way: str, draw: Draw) -> Callable[..., Tensor]:
    """The layer as a function: eager, under activation checkpointing, or compiled."""
    if way == "eager":
        return layer
    if way == "checkpoint":
        return lambda *args, **kwargs: checkpoint(layer, *args, use_reentrant=False, **kwargs)
    torch._dynamo.reset()
    dynamic = True if draw(YES_OR_NO) else None
    compiled: Callable[..., Tensor] = torch.compile(
        layer, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    return compiled


def give_main_grads(layer: nn.Module, written_over: bool) -> None:
    """To the weights that learn, of NaN where the first micro-batch writes over them."""
    for name, p in layer.named_parameters():
        if "bias" not in name:
            number = float("nan") if written_over and p.requires_grad else 0.0
            p.main_grad = torch.full(p.shape, number, device=p.device)  # type: ignore[attr-defined]


def assert_same(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert_same_bits(actual, expected)


def assert_accumulated(main_grad: Tensor, grad: Tensor | None) -> None:
    """What was added in float32, beside what was rounded, and then added."""
    if grad is None:
        assert not main_grad.any()
        return
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 20}[grad.dtype]
    largest = max(1.0, main_grad.abs().max().item()) if main_grad.numel() else 1.0
    torch.testing.assert_close(main_grad, grad.float(), rtol=0, atol=4 * largest * 2**-bits)


@few
@hypothesis.given(data=strategies.data())
@EVERY_WAY
def test_layer(way: str, device: str, data: strategies.DataObject) -> None:
    draw = data.draw
    experts, K, N = draw(strategies.sampled_from([1, 2, 5])), draw(FEATURES), draw(FEATURES)
    recipe, dtype = draw(RECIPE), draw(DTYPE)
    bias = draw(YES_OR_NO)
    apart = draw(YES_OR_NO)
    cached, fused = draw(YES_OR_NO), draw(YES_OR_NO)
    later = way != "compiled" and rarely(draw)  # delayed ones do not compile
    options = {
        "single_grouped_weight": not apart,
        "single_grouped_bias": not apart,
        "cache_weights": cached,
        "fuse_wgrad_accumulation": fused,
        "delay_wgrad_compute": later,
        "save_original_input": rarely(draw) and not isinstance(recipe, DelayedScaling),
    }
    form: dict[str, Any] = {"bias": bias, "recipe": recipe, "dtype": dtype, "device": device}
    plain = GroupedLinear(experts, K, N, **form)
    form["recipe"] = sometimes_requantizing(recipe, draw)
    layer = linear_of(experts, K, N, **form, **options)
    layer.load_state_dict(plain.state_dict())
    if rarely(draw):
        layer = copy.deepcopy(layer)
    frozen = rarely(draw)
    for model in (plain, layer):
        for name, p in model.named_parameters():
            p.requires_grad_(not (frozen and "weight" in name))
    give_main_grads(layer, written_over=cached)
    call = called(layer, way, draw)
    x_needs_grad = not rarely(draw)
    for step in range(draw(strategies.integers(1, 3))):
        sizes = draw(
            strategies.lists(strategies.integers(0, 90), min_size=experts, max_size=experts)
        )
        T = sum(sizes) + draw(strategies.integers(0, 9))
        wide = torch.randn(T, 2 * K, device=device).to(dtype)
        x = wide[:, :K] if draw(YES_OR_NO) else wide[:, :K].contiguous()
        x[sum(sizes) :] = float("nan")
        dy = torch.randn(T, N, device=device).to(dtype)
        m_splits = torch.tensor(sizes, device=device)
        results = []
        for model, function, first in ((plain, plain, {}), (layer, call, {})):
            if model is layer and cached:
                first = {"is_first_microbatch": step == 0}
            leaf = x.detach().requires_grad_(x_needs_grad)
            y = function(leaf, m_splits, **first)
            if y.requires_grad:
                y.backward(dy)
            results.append((y.detach(), leaf.grad))
        if later and not frozen:
            layer.backward_dw()
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_same(actual, expected)
    for name in ("weight", *(["bias"] if bias else [])):
        expected = getattr(plain, name).grad
        parts = (
            [getattr(layer, f"{name}{e}") for e in range(experts)]
            if apart
            else [getattr(layer, name)]
        )
        if name == "weight" and fused:
            main_grads = [p.main_grad for p in parts]
            total = torch.stack(main_grads) if apart else main_grads[0]
            assert_accumulated(total, expected)
            continue
        for e, p in enumerate(parts):
            assert_same(p.grad, expected[e] if apart and expected is not None else expected)


@few
@hypothesis.given(data=strategies.data())
@EVERY_WAY
def test_mlp(way: str, device: str, data: strategies.DataObject) -> None:
    draw = data.draw
    E, H, F = draw(strategies.sampled_from([1, 2, 6, 40])), draw(FEATURES), draw(FEATURES)
    C = draw(strategies.integers(1, 3))
    recipe, dtype = draw(RECIPE), draw(DTYPE)
    cached, fused = draw(YES_OR_NO), draw(YES_OR_NO)
    form: dict[str, Any] = {"dtype": dtype, "device": device, "activation": draw(ACTIVATION)}
    form |= {"bias": draw(YES_OR_NO), "save_gate_up_in_fp8": draw(YES_OR_NO)}
    plain = GroupedMLP(E, H, F, recipe=recipe, **form)
    form |= {"cache_weights": cached, "fuse_wgrad_accumulation": fused}
    form |= {"recompute_gate_up": not form["save_gate_up_in_fp8"] and draw(YES_OR_NO)}
    mlp = GroupedMLP(E, H, F, recipe=sometimes_requantizing(recipe, draw), **form)
    mlp.load_state_dict(plain.state_dict())
    frozen = [rarely(draw) for _ in plain.parameters()]
    for model in (plain, mlp):
        for p, is_frozen in zip(model.parameters(), frozen, strict=True):
            p.requires_grad_(not is_frozen)
    give_main_grads(mlp, written_over=cached)
    call = called(mlp, way, draw)
    needs_grad = not rarely(draw), not rarely(draw)
    for step in range(draw(strategies.integers(1, 3))):
        T = draw(strategies.integers(0, 90))
        x, weights = torch.randn(T, H, device=device).to(dtype), torch.rand(T, C, device=device)
        experts = torch.randint(-1, E + 1, (T, C), device=device)  # of none, too
        d_out = torch.randn(T, H, device=device).to(dtype)
        results = []
        for model, function, first in ((plain, plain, {}), (mlp, call, {})):
            if model is mlp and cached:
                flag = step == 0
                first = {"is_first_microbatch": torch.tensor(flag, device=device)}
            leaves = [
                t.detach().requires_grad_(needs)
                for t, needs in zip((x, weights), needs_grad, strict=True)
            ]
            out = function(*leaves, experts, **first)
            if out.requires_grad:
                out.backward(d_out)
            results.append((out.detach(), *(leaf.grad for leaf in leaves)))
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_same(actual, expected)
    for p, expected in zip(mlp.parameters(), plain.parameters(), strict=True):
        if fused and p.dim() == 3:
            assert_accumulated(p.main_grad, expected.grad)  # type: ignore[attr-defined]
        else:
            assert_same(p.grad, expected.grad)
