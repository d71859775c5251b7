# SPDX-License-Identifier: Apache-2.0
"""Steps of training with everything the layer can do, against the layer that can do none of it.

Each feature, alone and with others, in every mode and recipe, gives the bits of a plain run: no
cache, no fusion, nothing deferred, eager. T rows, E groups, K in_features, N out_features.
"""

import copy
import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from grouped_linear import GroupedLinear, Recipe
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import needs_gpu
from support.layers import linear_of, through_pickle, through_torch_save
from support.pairs import pairwise
from support.recipes import MORE_RECIPES, RECIPES
from support.tensors import BF16, DTYPES, FP32
from support.training import (
    FEATURES,
    E,
    Feature,
    K,
    Make,
    Mode,
    N,
    batches,
    captured,
    check,
    checkpointed,
    checkpointed_reentrant,
    compiled,
    cudagraph_trees,
    eager,
    give_main_grads,
    gradients_of,
    graphed,
    interleaved,
    make_mlp,
    offloaded,
    optimizer_step,
    plain_run,
    refused,
)

TRAINED = RECIPES | {"block_bf16_wgrad": MORE_RECIPES["block_bf16_wgrad"]}
EVERY_RECIPE = pytest.mark.parametrize("recipe", TRAINED.values(), ids=TRAINED)


def make_layer(
    recipe: Recipe | None, dtype: torch.dtype, device: str, **options: Any
) -> GroupedLinear:
    torch.manual_seed(0)
    # Under a recipe weights are float32, so that gradients are, as main_grad is.
    weight_dtype = FP32 if recipe else dtype
    return linear_of(E, K, N, recipe=recipe, dtype=weight_dtype, device=device, **options)


# GroupedMLP has fewer of the features.
OF_MLP = ("cached", "cached_flag", "fused", "fused_bf16", "cached_fused", "cached_fused_flag")
OF_LAYERS = (
    {name: (make_layer, feature) for name, feature in FEATURES.items()},
    {f"mlp_{name}": (make_mlp, FEATURES[name]) for name in OF_MLP},
)
MODES = (eager, compiled, checkpointed, checkpointed_reentrant, offloaded, interleaved)
MODES_IN_GRAPHS = {"captured": captured, "graphed": graphed}
# What a mode does with a call is the same for every dtype: one for all but the plainest mode.
MODES_AND_DTYPES = {f"eager-{dtype}": (eager, dtype) for dtype in DTYPES}
MODES_AND_DTYPES |= {mode.__name__: (mode, BF16) for mode in MODES if mode is not eager}


@pytest.mark.parametrize(
    ("layer", "mode", "recipe"),
    [row for layers in OF_LAYERS for row in pairwise(layers, MODES_AND_DTYPES, TRAINED)],
)
def test_features(
    layer: tuple[Make, Feature], mode: tuple[Mode, torch.dtype], recipe: Recipe | None, device: str
) -> None:
    check(*layer, mode[0], recipe, mode[1], device)


@needs_gpu
@pytest.mark.parametrize(
    ("layer", "mode", "recipe", "dtype"),
    [
        row
        for layers in OF_LAYERS
        for row in pairwise(layers, MODES_IN_GRAPHS, TRAINED, {str(d): d for d in DTYPES})
    ],
)
def test_features_captured(
    layer: tuple[Make, Feature], mode: Mode, recipe: Recipe | None, dtype: torch.dtype
) -> None:
    check(*layer, eager, recipe, dtype, "cuda")  # loads the kernels
    check(*layer, mode, recipe, dtype, "cuda")


@needs_gpu
@EVERY_RECIPE
@pytest.mark.parametrize(
    ("make", "name"),
    [
        *product((make_layer, make_mlp), ("cached", "cached_flag", "cached_fused_flag")),
        (make_layer, "per_expert_cached_fused"),
    ],
)
def test_features_under_cudagraph_trees(make: Make, name: str, recipe: Recipe | None) -> None:
    check(make, FEATURES[name], cudagraph_trees, recipe, BF16, "cuda")


# --- besides steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "mode", "recipe"),
    pairwise(FEATURES, {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}, RECIPES),
)
def test_without_gradients(feature: Feature, mode: Any, recipe: Recipe | None, device: str) -> None:
    """The numbers of training, and nothing is left behind."""
    if refused(feature, eager, recipe):
        return
    layer = make_layer(recipe, FP32, device, **feature.options)
    main_grads = give_main_grads(layer, feature)
    expected = plain_run(make_layer, recipe, FP32, device)[0]
    x, m_splits, _ = batches(FP32, device, 1)[0]
    with mode():
        for first in {"none": (None,), "bool": (True, False)}.get(
            feature.flag, tuple(torch.tensor([True, False], device=device))
        ):
            assert_same_bits(layer(x, m_splits, first), expected)
    assert all(main_grad.isnan().all() for main_grad in main_grads)
    if feature.deferred:
        with pytest.raises(RuntimeError, match="no backward has left anything to do"):
            layer.backward_dw()


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


TRAVELS: dict[str, Callable[..., GroupedLinear]] = {
    "deepcopy": lambda layer, *_: copy.deepcopy(layer),
    "pickle": lambda layer, *_: through_pickle(layer),
    "torch_save": lambda layer, *_: through_torch_save(layer),
    "checkpoints": through_checkpoints,
}


@pytest.mark.parametrize(("feature", "travel", "recipe"), pairwise(FEATURES, TRAVELS, RECIPES))
def test_a_layer_that_travelled(feature: Feature, travel: Any, recipe: Recipe | None) -> None:
    """Trains on as the one that stayed at home; the two are apart."""
    if refused(feature, eager, recipe):
        return
    layer = make_layer(recipe, FP32, "cpu", **feature.options)
    first = {"none": None, "bool": True, "tensor": torch.tensor(True)}[feature.flag]
    (x, m_splits, dy), (x2, m_splits2, dy2) = batches(FP32, "cpu", 2)
    for main_grad in give_main_grads(layer, feature):
        main_grad.zero_()
    eager(layer, feature, FP32)([(x, m_splits, dy, first)])
    optimizer_step(layer, [torch.ones(E, N, K)])
    layer.zero_grad()
    results = []
    for trained in (travel(layer, feature, recipe), layer):
        for main_grad in give_main_grads(trained, feature):
            main_grad.zero_()
        x2.grad = None
        step = eager(trained, feature, FP32)
        results.append([*step([(x2, m_splits2, dy2, first)])[0]])
        gradients = gradients_of(trained, feature)
        results[-1] += gradients
        optimizer_step(trained, gradients)  # the other one does not see it
    assert_all_same_bits(*results)
