"""What an expert layer keeps between its forward and its backward, to the byte.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F features
inside an expert. Of its rows the layer keeps gate_up [R, 2 F] and the routing alone, under every
recipe: no gathered x, no output of the activation, no output of an expert.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GeGLU,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    SquaredReLU,
    SwiGLU,
)
from grouped_linear.meta_kernels.rules import ceil_div
from support.compare import assert_all_same_bits
from support.devices import devices
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
}
WAYS = {"eager": False, "compiled": True}
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


@pytest.mark.parametrize("device", devices("swiglu_grad", "group_quantize_swiglu_grad"))
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
    assert gate_up <= bytes_of(of_rows) <= gate_up + R * routing_bytes


@pytest.mark.parametrize("device", devices("block_scaled_linear", "group_quantize"))
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


@pytest.mark.parametrize("device", devices("block_scaled_linear", "group_quantize"))
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
