"""Steps of training with what GroupedMLP keeps and adds up, against one that does neither.

Steps of 1, 2 and 8 micro-batches, an optimizer's step after each, give the bits of a plain run:
both weights quantized in every call, gradients returned, eager.

T tokens, C experts chosen for a token, E experts, H features of a token, F features of an expert.
"""

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from grouped_linear import GroupedMLP, Recipe, ops, update_scales
from support import training
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import devices, needs_gpu
from support.errors import sentence
from support.ops import OPS
from support.pairs import in_turn, pairwise
from support.recipes import MORE_RECIPES, RECIPES
from support.tensors import BF16, DTYPES, FP32
from support.training import (
    CUDA_MODES,
    FEATURES,
    Feature,
    Mode,
    Routed,
    captured,
    checkpointed,
    compiled,
    cudagraph_trees,
    eager,
    graphed,
    interleaved,
)

E, H, F = training.E, training.K, 48
STEPS, LEARNING_RATE = (1, 2, 8), 0.01
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
TRAINED = RECIPES | {"block_bf16_wgrad": MORE_RECIPES["block_bf16_wgrad"]}
EVERY_RECIPE = pytest.mark.parametrize("recipe", TRAINED.values(), ids=TRAINED)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OURS = ("cached", "cached_flag", "fused", "fused_bf16", "cached_fused", "cached_fused_flag")
EVERY_FEATURE = pytest.mark.parametrize("feature", [FEATURES[name] for name in OURS], ids=OURS)


def make(recipe: Recipe | None, dtype: torch.dtype, device: str, **options: Any) -> Routed:
    torch.manual_seed(0)
    # Under a recipe weights are float32, so that gradients are, as main_grad is.
    like: dict[str, Any] = {"dtype": FP32 if recipe else dtype, "device": device}
    return Routed(GroupedMLP(E, H, F, recipe=recipe, **options, **like))


def batches(dtype: torch.dtype, device: str, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    made = training.batches(dtype, device, count)
    return [(x, m_splits, dy[:, :H]) for x, m_splits, dy in made]


def give_main_grads(layer: Routed, feature: Feature) -> list[Tensor]:
    for w in layer.weights if feature.fused else ():
        w.main_grad = torch.full(w.shape, torch.nan, dtype=feature.main_grad, device=w.device)
    return [w.main_grad for w in layer.weights if feature.fused]


def gradients_of(layer: Routed, feature: Feature) -> list[Tensor]:
    return [(w.main_grad if feature.fused else w.grad).clone() for w in layer.weights]


@torch.no_grad()
def optimizer_step(layer: Routed, gradients: list[Tensor]) -> None:
    for w, grad in zip(layer.weights, gradients, strict=True):
        w -= (LEARNING_RATE * grad).to(w.dtype)
    layer.score -= LEARNING_RATE * layer.score.grad
    update_scales(layer)


class WgradOperands(TorchDispatchMode):
    """What every weight gradient of unquantized operands is the product of."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.grouped_linear.grouped_mm_wgrad.default:
            dy, x, offs, _, *rows = (*args, *(None,) * 3)[:6]
            self.operands.append((dy, x, offs, None, *rows))  # as grouped_mm_wgrad_ takes them
        return func(*args, **(kwargs or {}))


@functools.cache
def plain_run(
    recipe: Recipe | None, dtype: torch.dtype, device: str, main_grad: torch.dtype | None
) -> list[Tensor]:
    """y and dx of every micro-batch; gradients of both weights and the scores of every step.

    main_grad: what weight gradients are added up in, unrounded ones; None for the weight's grad.
    """
    layer, results = make(recipe, dtype, device), []
    made = iter(batches(dtype, device, sum(STEPS)))
    totals = [torch.empty_like(w, dtype=main_grad, requires_grad=False) for w in layer.weights]
    for count in STEPS:
        for total in totals:
            total.zero_()
        for _, (x, m_splits, dy) in zip(range(count), made, strict=False):
            y = layer(x, m_splits)
            with WgradOperands() as products:
                y.backward(dy)
            if main_grad and recipe is None:
                down, gate_up = products.operands
                with torch.no_grad():
                    for total, operands in zip(totals, (gate_up, down), strict=True):
                        ops.grouped_mm_wgrad_(total, *operands)
            else:
                for total, w in zip(totals, layer.weights, strict=True):
                    total.copy_(total + w.grad)
            for w in layer.weights:
                w.grad = None
            results += [y.detach(), x.grad]
        results += [*(total.clone() for total in totals), layer.score.grad.clone()]
        optimizer_step(layer, totals)
        layer.score.grad = None
    assert all(t.isfinite().all() for t in results)
    return results


def run(
    feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype, device: str
) -> list[Any]:
    """What plain_run gives, by a layer with the feature."""
    layer, results = make(recipe, dtype, device, **feature.options), []
    main_grads = give_main_grads(layer, feature)
    if mode in CUDA_MODES:  # what a graph adds to stays where it is
        for p in [layer.score] if feature.fused else layer.parameters():
            p.grad = torch.zeros_like(p)
    step = mode(layer, feature, dtype)
    # A mode may have run the layer.
    for state in (layer.mlp.gate_up_proj_state, layer.mlp.down_proj_state):
        if state is not None:
            state.reset()
    for main_grad in main_grads:  # neither zero nor what a graph was recorded with
        main_grad.fill_(torch.nan)
    made = iter(batches(dtype, device, sum(STEPS)))
    for count in STEPS:
        for main_grad in main_grads if feature.flag == "none" else ():
            main_grad.zero_()
        micro_batches = []
        for i, batch in zip(range(count), made, strict=False):
            micro_batches.append((*batch, flag_of(feature.flag, i == 0, device)))
        for result in step(micro_batches):
            results += result
        gradients = gradients_of(layer, feature)
        results += [*gradients, layer.score.grad.clone()]
        optimizer_step(layer, gradients)
        if feature.fused:
            assert all(w.grad is None for w in layer.weights)
        for p in layer.parameters():
            if mode not in CUDA_MODES:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
    return results


def flag_of(kind: str, first: bool, device: str) -> Any:
    return {"none": None, "bool": first}.get(kind, torch.tensor(first, device=device))


def check(
    feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype, device: str
) -> None:
    if feature.flag == "tensor" and recipe is not None and mode is interleaved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(feature, mode, recipe, dtype, device)
        return
    actual = run(feature, mode, recipe, dtype, device)
    expected = plain_run(recipe, dtype, device, feature.main_grad if feature.fused else None)
    assert_all_same_bits(actual, expected)


# A compile is slow, so one dtype for all but the plainest mode.
MODES = {f"eager-{dtype}": (eager, dtype) for dtype in DTYPES}
MODES |= {m.__name__: (m, BF16) for m in (compiled, checkpointed, interleaved)}


@DEVICES
@pytest.mark.parametrize(
    ("feature", "mode", "recipe"),
    pairwise({name: FEATURES[name] for name in OURS}, MODES, TRAINED),
)
def test_features(
    feature: Feature, mode: tuple[Mode, torch.dtype], recipe: Recipe | None, device: str
) -> None:
    check(feature, mode[0], recipe, mode[1], device)


@needs_gpu
@EVERY_RECIPE
@pytest.mark.parametrize("mode", [captured, graphed])
@EVERY_FEATURE
def test_features_captured(feature: Feature, mode: Mode, recipe: Recipe | None) -> None:
    check(feature, eager, recipe, BF16, "cuda")  # loads the kernels
    check(feature, mode, recipe, BF16, "cuda")


@needs_gpu
@EVERY_RECIPE
@pytest.mark.parametrize("name", ["cached", "cached_flag", "cached_fused_flag"])
def test_features_under_cudagraph_trees(name: str, recipe: Recipe | None) -> None:
    check(FEATURES[name], cudagraph_trees, recipe, BF16, "cuda")


def inputs(device: str) -> tuple[Tensor, Tensor]:
    x, m_splits, _ = batches(FP32, device, 1)[0]
    return x, m_splits


def kept_in_caches(layer: Routed) -> list[Tensor]:
    caches = layer.mlp.gate_up_proj_cache, layer.mlp.down_proj_cache
    return [t for cache in caches for t in cache.quantized_weight() if t is not None]


def outcome(layer: Routed, y: Tensor, x: Tensor) -> list[Tensor]:
    """y, and every gradient."""
    return [y, *torch.autograd.grad(y.square().sum(), (x, layer.score, *layer.weights))]


# --- main_grad -----------------------------------------------------------------------------------


def fused(recipe: Recipe | None, device: str, dtype: torch.dtype = FP32, **options: Any) -> Routed:
    layer = make(recipe, dtype, device, fuse_wgrad_accumulation=True, **options)
    give_main_grads(layer, FEATURES["fused"])
    return layer


@DEVICES
@pytest.mark.parametrize(
    ("recipe", "how"), in_turn(TRAINED, {"compiled": "compiled", "eager": "eager"})
)
def test_attributes_of_main_grad(how: str, recipe: Recipe | None, device: str) -> None:
    """Of each parameter: a gradient of zeros for who waits for one, and overwriting."""
    layer, plain, (x, m_splits) = fused(recipe, device), make(recipe, FP32, device), inputs(device)
    gate_up, down = layer.weights
    gate_up.overwrite_main_grad = True  # what is there is NaN
    down.main_grad.fill_(1)
    down.grad_added_to_main_grad = False
    call = layer
    if how == "compiled":
        call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    call(x, m_splits).square().sum().backward()
    *_, d_gate_up, d_down = outcome(plain, plain(x, m_splits), x)
    assert_same_bits(gate_up.main_grad, d_gate_up)
    assert_same_bits(down.main_grad, 1 + d_down)
    assert gate_up.grad is None
    assert not hasattr(gate_up, "grad_added_to_main_grad")
    assert down.grad_added_to_main_grad
    assert_same_bits(down.grad, torch.zeros_like(down))


@DEVICES
@pytest.mark.parametrize("frozen", [0, 1], ids=["gate_up_proj", "down_proj"])
def test_a_frozen_weight_needs_no_main_grad(frozen: int, device: str) -> None:
    layer, (x, m_splits) = fused(RECIPES["block"], device), inputs(device)
    plain = make(RECIPES["block"], FP32, device)
    layer.weights[frozen].requires_grad_(False)
    del layer.weights[frozen].main_grad
    learning = layer.weights[1 - frozen]
    learning.main_grad.zero_()
    layer(x, m_splits).square().sum().backward()
    expected = outcome(plain, plain(x, m_splits), x)[3:]
    assert_same_bits(learning.main_grad, expected[1 - frozen])


@DEVICES
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
    layer, plain = fused(recipe, "cpu", cache_weights=True), make(recipe, FP32, "cpu")
    call, (x, m_splits) = torch.compile(layer, fullgraph=True), inputs("cpu")

    def step() -> None:
        call(x, m_splits, torch.tensor(True)).square().sum().backward()

    _, codes = run_and_get_code(step)
    code = "\n".join(codes)
    assert ".copy_(" not in code
    for shape in {tuple(t.shape) for t in [*layer.weights, *kept_in_caches(layer)] if t.dim() == 3}:
        assert not re.search(rf"= empty_strided\w*\(\({', '.join(map(str, shape))}\)", code)
    *_, d_gate_up, d_down = outcome(plain, plain(x, m_splits), x)
    assert_same_bits(layer.mlp.gate_up_proj.main_grad, d_gate_up)
    assert_same_bits(layer.mlp.down_proj.main_grad, d_down)


def test_mistakes() -> None:
    x, m_splits = inputs("cpu")
    layer = fused(None, "cpu")
    layer.mlp.down_proj.main_grad = torch.zeros(E, F, H)
    assert sentence(lambda: layer(x, m_splits)) == (
        f"GroupedMLP: down_proj.main_grad must be [{E}, {H}, {F}] float32 or bfloat16 on cpu, as "
        f"down_proj is, got [{E}, {F}, {H}] float32 on cpu"
    )
    del layer.mlp.down_proj.main_grad
    assert sentence(lambda: layer(x, m_splits)) == (
        "GroupedMLP: fuse_wgrad_accumulation adds to down_proj.main_grad, which is not set"
    )
    with torch.no_grad():  # nothing is asked of main_grad
        layer(x, m_splits)
