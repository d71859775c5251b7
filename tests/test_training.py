"""Steps of training with everything the layer can do, against the layer that can do none of it.

Each feature, alone and with others, in every mode and recipe, gives the bits of a plain run: no
cache, no fusion, nothing deferred, eager. T rows, E groups, K in_features, N out_features.
"""

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import GroupedLinear, Recipe, ops, update_scales
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import devices, needs_gpu
from support.layers import linear_of
from support.ops import OPS
from support.pairs import pairwise
from support.recipes import MORE_RECIPES, RECIPES
from support.tensors import BF16, FP16, FP32
from support.training import (
    CUDA_MODES,
    FEATURES,
    E,
    Feature,
    K,
    MicroBatch,
    Mode,
    N,
    T,
    batches,
    captured,
    checkpointed,
    checkpointed_reentrant,
    compiled,
    cudagraph_trees,
    eager,
    graphed,
    interleaved,
    offloaded,
)

STEPS, LEARNING_RATE = 2, 0.1
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
MICRO_BATCHES = {BF16: 2, FP16: 1, FP32: 8}


EVERY_FEATURE = pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)


def make_layer(
    recipe: Recipe | None, dtype: torch.dtype, device: str, **options: Any
) -> GroupedLinear:
    torch.manual_seed(0)
    # Under a recipe weights are float32, so that gradients are, as main_grad is.
    weight_dtype = FP32 if recipe else dtype
    return linear_of(E, K, N, recipe=recipe, dtype=weight_dtype, device=device, **options)


def weights_of(layer: nn.Module) -> list[Any]:
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def biases_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.startswith("bias")]


def give_main_grads(layer: nn.Module, feature: Feature) -> Tensor:
    """Parts of one buffer, which is returned, after a gap; where the feature has any."""
    weights = weights_of(layer)
    flat = torch.full(
        (E * N * K + 8,), torch.nan, dtype=feature.main_grad, device=weights[0].device
    )
    if feature.fused:
        for w, part in zip(weights, flat[8:].view(len(weights), -1), strict=True):
            w.main_grad = part.view(w.shape)
    return flat


def whole(parts: list[Tensor]) -> Tensor:
    """One tensor of one an expert."""
    return (parts[0] if len(parts) == 1 else torch.stack(parts)).detach().clone()


@torch.no_grad()
def optimizer_step(layer: nn.Module, weight_grad: Tensor) -> None:
    """The same arithmetic for every form of the parameters."""
    weights = weights_of(layer)
    grads = [weight_grad] if len(weights) == 1 else list(weight_grad)
    for w, grad in zip(weights, grads, strict=True):
        w -= (LEARNING_RATE * grad).to(w.dtype)
    for b in biases_of(layer):
        b -= LEARNING_RATE * b.grad
    update_scales(layer)


@functools.cache
def plain_run(
    recipe: Recipe | None, dtype: torch.dtype, device: str, main_grad: torch.dtype | None
) -> list[Tensor]:
    """y and dx of every micro-batch, and weight and bias gradients of every step.

    main_grad: what weight gradients are added up in, unrounded ones; None for the weight's grad.
    """
    layer, count, results = make_layer(recipe, dtype, device), MICRO_BATCHES[dtype], []
    made = iter(batches(dtype, device, STEPS * count))
    total = torch.empty(E, N, K, dtype=main_grad or layer.weight.dtype, device=device)
    for _ in range(STEPS):
        total.zero_()
        for _, (x, m_splits, dy) in zip(range(count), made, strict=False):
            y = layer(x, m_splits)
            y.backward(dy)
            if main_grad and recipe is None:
                offs = ops.splits_to_offsets(m_splits, T)
                ops.grouped_mm_wgrad_(total, dy, x.detach(), offs)
            else:
                total.copy_(total + layer.weight.grad)
            layer.weight.grad = None
            results += [y.detach(), x.grad]
        results += [total.clone(), layer.bias.grad.clone()]
        optimizer_step(layer, total)
        layer.bias.grad = None
    return results


MODES = (eager, compiled, checkpointed, checkpointed_reentrant, offloaded, interleaved)
# What a mode does with a call is the same for every dtype: one for all but the plainest mode.
MODES_AND_DTYPES = {f"eager-{dtype}": (eager, dtype) for dtype in MICRO_BATCHES}
MODES_AND_DTYPES |= {mode.__name__: (mode, BF16) for mode in MODES if mode is not eager}
TRAINED = RECIPES | {"block_bf16_wgrad": MORE_RECIPES["block_bf16_wgrad"]}


def run(
    feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype, device: str
) -> list[Any]:
    """What plain_run gives, by a layer with the feature."""
    layer = make_layer(recipe, dtype, device, **feature.options)
    count, results = MICRO_BATCHES[dtype], []
    weights, biases, flat = weights_of(layer), biases_of(layer), give_main_grads(layer, feature)
    if mode in CUDA_MODES:  # what a graph adds to stays where it is
        for p in biases if feature.fused else layer.parameters():
            p.grad = torch.zeros_like(p)
    step = mode(layer, feature, dtype)
    if layer.weight_state is not None:
        layer.weight_state.reset()
    flat.fill_(torch.nan)  # neither zero nor what a graph was recorded with
    made = iter(batches(dtype, device, STEPS * count))
    for _ in range(STEPS):
        if feature.flag == "none":
            flat.zero_()
        micro_batches: list[MicroBatch] = []
        for i, (x, m_splits, dy) in zip(range(count), made, strict=False):
            first: Any = {"none": None, "bool": i == 0}.get(feature.flag)
            if feature.flag == "tensor":
                first = torch.tensor(i == 0, device=device)
            micro_batches.append((x, m_splits, dy, first))
        for result in step(micro_batches):
            results += result
        total = whole([w.main_grad if feature.fused else w.grad for w in weights])
        results += [total, whole([b.grad for b in biases])]
        optimizer_step(layer, total)
        for p in layer.parameters():
            if mode not in CUDA_MODES:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        if feature.fused:
            assert all(w.grad is None for w in weights)
    return results


def refused(feature: Feature, mode: Mode, recipe: Recipe | None) -> str | None:
    """The beginning of the sentence that a combination earns."""
    if "save_original_input" in feature.options and recipe is RECIPES["delayed"]:
        return "GroupedLinear: save_original_input quantizes the input once more"
    if feature.deferred and mode in (compiled, cudagraph_trees):
        return "GroupedLinear: delay_wgrad_compute keeps operands"
    if feature.deferred and mode is graphed:
        return "GroupedLinear: backward_dw: "
    if feature.flag == "tensor" and recipe is not None and mode is interleaved:
        return "a tensor that the forward saved has been modified by an inplace operation"
    return None


def check(
    feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype, device: str
) -> None:
    sentence = refused(feature, mode, recipe)
    if sentence is not None:
        with pytest.raises(Exception, match=sentence):
            run(feature, mode, recipe, dtype, device)
        return
    actual = run(feature, mode, recipe, dtype, device)
    expected = plain_run(recipe, dtype, device, feature.main_grad if feature.fused else None)
    assert_all_same_bits(actual, expected)


@DEVICES
@pytest.mark.parametrize(
    ("feature", "mode", "recipe"), pairwise(FEATURES, MODES_AND_DTYPES, TRAINED)
)
def test_features(
    feature: Feature, mode: tuple[Mode, torch.dtype], recipe: Recipe | None, device: str
) -> None:
    check(feature, mode[0], recipe, mode[1], device)


@needs_gpu
@pytest.mark.parametrize(
    ("feature", "mode", "recipe", "dtype"),
    pairwise(
        FEATURES,
        {"captured": captured, "graphed": graphed},
        RECIPES,
        {str(dtype): dtype for dtype in MICRO_BATCHES},
    ),
)
def test_features_captured(
    feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype
) -> None:
    check(feature, eager, recipe, dtype, "cuda")  # loads the kernels
    check(feature, mode, recipe, dtype, "cuda")


@needs_gpu
@EVERY_RECIPE
@pytest.mark.parametrize(
    "name", ["cached", "cached_flag", "cached_fused_flag", "per_expert_cached_fused"]
)
def test_features_under_cudagraph_trees(name: str, recipe: Recipe | None) -> None:
    check(FEATURES[name], cudagraph_trees, recipe, BF16, "cuda")


# --- besides steps -------------------------------------------------------------------------------


def refuses(feature: Feature, recipe: Recipe | None) -> bool:
    return refused(feature, eager, recipe) is not None


@DEVICES
@pytest.mark.parametrize(
    ("feature", "mode", "recipe"),
    pairwise(
        FEATURES,
        {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode},
        RECIPES,
    ),
)
def test_without_gradients(feature: Feature, mode: Any, recipe: Recipe | None, device: str) -> None:
    """The numbers of training, and nothing is left behind."""
    if refuses(feature, recipe):
        return
    layer = make_layer(recipe, FP32, device, **feature.options)
    flat, expected = give_main_grads(layer, feature), plain_run(recipe, FP32, device, None)[0]
    x, m_splits, _ = batches(FP32, device, 1)[0]
    with mode():
        for first in {"none": (None,), "bool": (True, False)}.get(
            feature.flag, tuple(torch.tensor([True, False], device=device))
        ):
            assert_same_bits(layer(x, m_splits, first), expected)
    assert flat.isnan().all()
    if feature.deferred:
        with pytest.raises(RuntimeError, match="no backward has left anything to do"):
            layer.backward_dw()


def through_pickle(layer: GroupedLinear, feature: Feature, recipe: Recipe | None) -> GroupedLinear:
    return pickle.loads(pickle.dumps(layer))


def through_deepcopy(
    layer: GroupedLinear, feature: Feature, recipe: Recipe | None
) -> GroupedLinear:
    return copy.deepcopy(layer)


def through_torch_save(
    layer: GroupedLinear, feature: Feature, recipe: Recipe | None
) -> GroupedLinear:
    file = io.BytesIO()
    torch.save(layer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def through_checkpoints(
    layer: GroupedLinear, feature: Feature, recipe: Recipe | None
) -> GroupedLinear:
    """Into a plain layer's parameters and back, strictly."""
    plain, twin = (
        make_layer(recipe, FP32, "cpu", single_grouped_weight=True),  # of te's layer
        make_layer(recipe, FP32, "cpu", **feature.options),
    )
    for source, target in ((layer, plain), (plain, twin)):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        target.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return twin


TRAVELS = (through_deepcopy, through_pickle, through_torch_save, through_checkpoints)


@pytest.mark.parametrize(
    ("feature", "travel", "recipe"),
    pairwise(FEATURES, {travel.__name__: travel for travel in TRAVELS}, RECIPES),
)
def test_a_layer_that_travelled(feature: Feature, travel: Any, recipe: Recipe | None) -> None:
    """Trains on as the one that stayed at home; the two are apart."""
    if refuses(feature, recipe):
        return
    layer = make_layer(recipe, FP32, "cpu", **feature.options)
    first = {"none": None, "bool": True, "tensor": torch.tensor(True)}[feature.flag]
    (x, m_splits, dy), (x2, m_splits2, dy2) = batches(FP32, "cpu", 2)
    give_main_grads(layer, feature).zero_()
    eager(layer, feature, FP32)([(x, m_splits, dy, first)])
    optimizer_step(layer, torch.ones(E, N, K))
    layer.zero_grad()
    results = []
    for trained in (travel(layer, feature, recipe), layer):
        give_main_grads(trained, feature).zero_()
        x2.grad = None
        step = eager(trained, feature, FP32)
        results.append([*step([(x2, m_splits2, dy2, first)])[0]])
        weights = weights_of(trained)
        total = whole([w.main_grad if feature.fused else w.grad for w in weights])
        results[-1] += [total, whole([b.grad for b in biases_of(trained)])]
        optimizer_step(trained, total)  # the other one does not see it
    assert_all_same_bits(*results)
