# SPDX-License-Identifier: Apache-2.0
"""What an expert layer keeps between its forward and its backward, to the byte.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F features
inside an expert. Of its rows the layer keeps gate_up [R, 2 F] and the routing alone, under every
recipe: no gathered x, no output of the activation, no output of an expert.
"""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GeGLU,
    GroupedLinear,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    Recipe,
    SquaredReLU,
    SwiGLU,
)
from grouped_linear.meta_kernels.rules import ceil_div
from support.compare import assert_all_same_bits, outcome
from support.layers import call_of, linear_of
from support.pairs import in_turn, pairwise
from support.saved import saved_tensors

T, C, E, H, F = 96, 2, 4, 64, 80
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "block": Float8BlockScaling(),
    "block_bf16_wgrad": Float8BlockScaling(wgrad=torch.bfloat16),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "mx": MXFP8BlockScaling(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "interleaved": {"activation": SwiGLU(1.702, 1.0, 7.0, True)},
}
# What does not depend on how SwiGLU is fused.
MORE_OPTIONS: dict[str, dict[str, Any]] = {
    "gelu": {"activation": GeGLU()},
    "no_gate": {"activation": SquaredReLU()},
    "in_fp8": {"save_gate_up_in_fp8": True},
    "again": {"recompute_gate_up": True},
}
WAYS = {"eager": False, "compiled": True}
# Of which a backward that computes gate_up again reads other tensors.
STORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "cached": {"cache_weights": True},
    "both": {"weights": "both"},
    "frozen": {"weights": "fp8", "lora": Lora(8, dropout=0.25)},
    "four_bits": {"weights": "mxfp4", "lora": {"down_proj": Lora(8)}},
}
SOME_RECIPES = {name: RECIPES[name] for name in ("bf16", "block")}


def bytes_of(tensors: list[Tensor]) -> int:
    """Of distinct memory."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def saved_by(call: Any, *given: Tensor) -> list[Tensor]:
    """What a call saves for its backward besides the memory of what it is given."""
    known = {t.untyped_storage().data_ptr() for t in given}
    with saved_tensors() as saved:
        call()
    return [t for t in saved if t.numel() > 0 and t.untyped_storage().data_ptr() not in known]


@pytest.mark.parametrize(
    ("recipe", "options", "compiled"),
    [
        *pairwise(RECIPES, OPTIONS, {"eager": False}),
        *pairwise(SOME_RECIPES, MORE_OPTIONS, {"eager": False}),
        *in_turn(RECIPES, OPTIONS | MORE_OPTIONS, {"compiled": True}),
    ],
)
def test_rows_of_gate_up_alone(
    recipe: Recipe | None, options: dict[str, Any], compiled: bool, device: str
) -> None:
    layer = GroupedMLP(E, H, F, recipe=recipe, dtype=torch.bfloat16, device=device, **options)
    call = call_of(layer, compiled)
    x = torch.randn(T, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    scores = torch.rand(T, C, device=device, requires_grad=True)
    chosen = torch.stack([torch.randperm(E)[:C] for _ in range(T)]).to(device)
    given = [x, scores, chosen, *layer.parameters(), *layer.buffers()]
    # What begins with E is of weights and groups: columnwise weights, their scales, group ends.
    of_rows = [t for t in saved_by(lambda: call(x, scores, chosen), *given) if t.size(0) != E]
    R, routing_bytes = T * C, 20  # a choice's weight, row, token and whether there is an expert
    G = layer.gate_up_proj.size(1)
    gate_up = R * G * x.element_size()
    if layer.save_gate_up_in_fp8:  # a byte each, and four for 128 of a row
        gate_up = R * G + ceil_div(G, 128) * R * 4
    if layer.recompute_gate_up:  # a graph may keep tokens that were quantized once each
        gate_up = 0
        routing_bytes += compiled * ceil_div(T * (H + 4), R)
    assert gate_up <= bytes_of(of_rows) <= gate_up + R * routing_bytes


@pytest.mark.parametrize(("options", "compiled"), pairwise(STORED, WAYS))
def test_gate_up_again_for_more_rows_than_came(
    options: dict[str, Any], compiled: bool, device: str
) -> None:
    """No bit changes, and of max_rows rows the routing is kept, and what adapters keep."""
    E, F, bound = 4, 96, 4 * T * C
    options = {"recipe": Float8BlockScaling(), "dtype": torch.bfloat16, **options}
    layers = [
        GroupedMLP(E, H, F, bias=True, device=device, recompute_gate_up=again, **options)
        for again in (False, True)
    ]
    if "lora" in options:
        for p in layers[0].parameters():
            if p.requires_grad:
                nn.init.normal_(p, std=0.1)
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(T, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    scores = torch.rand(T, C, device=device, requires_grad=True)
    chosen = torch.stack([torch.randperm(E)[:C] for _ in range(T)]).to(device)
    chosen[::7] = -1
    spare = torch.full((3 * T, C), -1, device=device)  # of tokens that have no expert
    first = True if options.get("cache_weights") else None
    results, kept = [], []
    for layer in layers:
        call = call_of(layer, compiled)
        given = torch.cat([x, x.detach().repeat(3, 1)]), torch.cat([scores, spare.float()])
        torch.manual_seed(0)
        with saved_tensors() as saved:
            y = call(*given, torch.cat([chosen, spare]), first, max_rows=bound - 1)
        kept.append(bytes_of([t for t in saved if t.dim() and t.size(0) in (bound - 1, bound)]))
        leaves = [x, scores, *(p for p in layer.parameters() if p.requires_grad)]
        results.append(outcome(y, leaves))
    assert_all_same_bits(*results)
    assert kept[0] - kept[1] == bound * 2 * F * x.element_size()
    if "lora" not in options:
        assert kept[1] <= bound * 8


@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_copied_rows_of_a_gradient_live_as_long_as_dgrad(weights: str | None, device: str) -> None:
    """The largest moment of a backward over frozen weights is SwiGLU's gradient, without them."""
    F, lora = 576, Lora(8)  # more columns than a GEMM gathers rows for
    layer = GroupedMLP(E, H, F, weights=weights, lora=lora, dtype=torch.bfloat16, device=device)
    ops, copies, alive = torch.ops.grouped_linear, [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, _: Any, given: Any = (), options: Any = None) -> Any:
            if op is ops.swiglu_grad.default:
                alive.extend(copy() is not None for copy in copies)
            result = op(*given, **(options or {}))
            if op is ops.scatter_rows.default:
                copies.append(weakref.ref(result.untyped_storage()))
            return result

    x = torch.randn(T, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = layer(x, *torch.rand(T, E, device=device).topk(C))
    with Watch():
        y.backward(torch.ones_like(y))
    assert alive == [False]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_a_linear_layer_with_wgrad_in_bf16_keeps_x_itself(
    cached: bool, compiled: bool, device: str
) -> None:
    recipe = Float8BlockScaling(wgrad=torch.bfloat16)
    options = {"recipe": recipe, "cache_weights": cached, "dtype": torch.bfloat16}
    layer = GroupedLinear(E, H, F, False, device=device, **options)
    call = call_of(layer, compiled)
    x = torch.randn(T, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    m_splits = torch.tensor([40, 0, 30, 20], device=device)
    first = True if cached else None
    given = [m_splits, *layer.parameters(), *layer.buffers()]
    saved = saved_by(lambda: call(x, m_splits, first), *given)
    [kept] = [t for t in saved if t.size(0) != E]
    assert kept.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("kind", "recipe", "compiled"),
    pairwise(
        {kind: kind for kind in ("mlp", "linear", "list")},
        {
            "block": Float8BlockScaling(requantize_weights=True),
            "current": Float8CurrentScaling(requantize_weights=True),
        },
        WAYS,
    ),
)
def test_nothing_of_weights(kind: str, recipe: Recipe, compiled: bool, device: str) -> None:
    """Where the backward quantizes them again; every number has the bits that it has otherwise."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    apart = {"bias": False, "single_grouped_weight": kind != "list"}

    def layer_of(recipe: Recipe) -> nn.Module:
        torch.manual_seed(0)
        if kind == "mlp":
            return GroupedMLP(E, H, F, recipe=recipe, **options)
        return linear_of(E, H, F, recipe=recipe, **apart, **options)

    x = torch.randn(T, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    scores, m_splits = torch.rand(T, E, device=device), torch.tensor([40, 0, 30, 20]).to(device)
    inputs = (x, *scores.topk(C)) if kind == "mlp" else (x, m_splits)
    results, kept = [], []
    for one in (recipe, type(recipe)()):
        layer = layer_of(one)
        call = call_of(layer, compiled and one is recipe)
        known = [*inputs, *layer.parameters()]
        outputs: list[Tensor] = []
        saved = saved_by(lambda: outputs.append(call(*inputs)), *known)  # noqa: B023
        kept.append(
            sum(t.nbytes for t in saved if t.dim() == 3 and t.size(0) == E and t.size(2) != 128)
        )
        results.append([*outputs, *torch.autograd.grad(outputs[0].sum(), [x, *layer.parameters()])])
    assert_all_same_bits(*results)
    scales = 0 if isinstance(recipe, Float8CurrentScaling) else 64
    weights = 3 * E * F * H if kind == "mlp" else E * F * H
    assert kept[0] == 0
    if not compiled:  # whose graph keeps views, which hooks do not see
        assert weights <= kept[1] <= weights + scales
