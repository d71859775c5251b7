# SPDX-License-Identifier: Apache-2.0
"""Where GroupedMLP adds its weights' gradients up: main_grad. test_training.py has its steps.

T tokens, C experts chosen for a token, E experts, H features of a token, F features of an expert.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from grouped_linear import Recipe
from support.compare import assert_same_bits, outcome
from support.errors import sentence
from support.pairs import in_turn
from support.recipes import MORE_RECIPES, RECIPES
from support.tensors import BF16, FP32
from support.training import FEATURES, Routed, batches, give_main_grads, make_mlp

TRAINED = RECIPES | {"block_bf16_wgrad": MORE_RECIPES["block_bf16_wgrad"]}


def inputs(device: str) -> tuple[Tensor, Tensor]:
    x, m_splits, _ = batches(FP32, device, 1)[0]
    return x, m_splits


def kept_in_caches(layer: Routed) -> list[Tensor]:
    caches = layer.mlp.gate_up_proj_cache, layer.mlp.down_proj_cache
    return [t for cache in caches for t in cache.quantized_weight() if t is not None]


# --- main_grad -----------------------------------------------------------------------------------


def fused(recipe: Recipe | None, device: str, dtype: torch.dtype = FP32, **options: Any) -> Routed:
    layer = make_mlp(recipe, dtype, device, fuse_wgrad_accumulation=True, **options)
    give_main_grads(layer, FEATURES["fused"])
    return layer


@pytest.mark.parametrize(
    ("recipe", "how"), in_turn(TRAINED, {"compiled": "compiled", "eager": "eager"})
)
def test_attributes_of_main_grad(how: str, recipe: Recipe | None, device: str) -> None:
    """Of each parameter: a gradient of zeros for who waits for one, and overwriting."""
    layer, plain = fused(recipe, device), make_mlp(recipe, FP32, device)
    x, m_splits = inputs(device)
    gate_up, down = layer.weights
    gate_up.overwrite_main_grad = True  # what is there is NaN
    down.main_grad.fill_(1)
    down.grad_added_to_main_grad = False
    call = layer
    if how == "compiled":
        call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError):
        layer(x[:, :16], m_splits)
    assert not down.grad_added_to_main_grad
    call(x, m_splits).square().sum().backward()
    _, d_gate_up, d_down = outcome(plain(x, m_splits), plain.weights)
    assert_same_bits(gate_up.main_grad, d_gate_up)
    assert_same_bits(down.main_grad, 1 + d_down)
    assert gate_up.grad is None
    assert not hasattr(gate_up, "grad_added_to_main_grad")
    assert down.grad_added_to_main_grad
    assert_same_bits(down.grad, torch.zeros_like(down))
    down.grad_added_to_main_grad = False
    layer.mlp.forward_sorted(x, m_splits)
    assert down.grad_added_to_main_grad


@pytest.mark.parametrize("frozen", [0, 1], ids=["gate_up_proj", "down_proj"])
def test_a_frozen_weight_needs_no_main_grad(frozen: int, device: str) -> None:
    layer, (x, m_splits) = fused(RECIPES["block"], device), inputs(device)
    plain = make_mlp(RECIPES["block"], FP32, device)
    layer.weights[frozen].requires_grad_(False)
    del layer.weights[frozen].main_grad
    learning = layer.weights[1 - frozen]
    learning.main_grad.zero_()
    layer(x, m_splits).square().sum().backward()
    expected = outcome(plain(x, m_splits), plain.weights)
    assert_same_bits(learning.main_grad, expected[2 - frozen])


@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["none", "block"])
def test_autocast(recipe: Recipe | None, device: str) -> None:
    """float32 weights get unrounded gradients, of products in bfloat16."""
    layer, half = fused(recipe, device), fused(recipe, device, BF16)
    half.load_state_dict(layer.state_dict())
    x, m_splits = inputs(device)
    for w in (*layer.weights, *half.weights):
        w.main_grad.zero_()
    with torch.autocast(device, dtype=BF16):
        layer(x, m_splits).float().square().sum().backward()
    half(x.detach().to(BF16), m_splits).float().square().sum().backward()
    for w, other in zip(layer.weights, half.weights, strict=True):
        assert w.grad is None
        assert other.dtype == (FP32 if recipe else BF16)
        assert_same_bits(w.main_grad, other.main_grad)


@pytest.mark.parametrize("recipe", [RECIPES[name] for name in ("delayed", "mxfp8")])
def test_inductor_clones_neither_main_grads_nor_caches(recipe: Recipe | None) -> None:
    layer, plain = fused(recipe, "cpu", cache_weights=True), make_mlp(recipe, FP32, "cpu")
    call, (x, m_splits) = torch.compile(layer, fullgraph=True), inputs("cpu")

    def step() -> None:
        call(x, m_splits, torch.tensor(True)).square().sum().backward()

    _, codes = run_and_get_code(step)
    code = "\n".join(codes)
    assert ".copy_(" not in code
    for shape in {tuple(t.shape) for t in [*layer.weights, *kept_in_caches(layer)] if t.dim() == 3}:
        assert not re.search(rf"= empty_strided\w*\(\({', '.join(map(str, shape))}\)", code)
    _, d_gate_up, d_down = outcome(plain(x, m_splits), plain.weights)
    assert_same_bits(layer.mlp.gate_up_proj.main_grad, d_gate_up)
    assert_same_bits(layer.mlp.down_proj.main_grad, d_down)


def test_mistakes() -> None:
    x, m_splits = inputs("cpu")
    layer = fused(None, "cpu")
    del layer.mlp.down_proj.main_grad
    assert sentence(lambda: layer(x, m_splits)) == (
        "GroupedMLP: fuse_wgrad_accumulation adds to down_proj.main_grad, which is not set"
    )
    with torch.no_grad():  # nothing is asked of main_grad
        layer(x, m_splits)
