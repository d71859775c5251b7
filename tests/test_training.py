"""Steps of training with everything the layer can do, against the layer that can do none of it.

Each feature, alone and with others, in every mode and recipe, gives the bits of a plain run: no
cache, no fusion, nothing put off, eager. T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from samples import BF16, FP32, OPS, RECIPES, assert_same_bits, devices
from torch import Tensor, nn

from grouped_linear import GroupedLinear, Recipe, ops, update_scales

T, E, K, N = 40, 3, 32, 48
STEPS, LEARNING_RATE = 2, 0.1
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@dataclass(frozen=True)
class Feature:
    """Options of the layer, and how it is told which micro-batch is the first."""

    options: dict[str, Any] = field(default_factory=dict)
    flag: str = "none"
    """none, bool or tensor."""
    grad_dtype: torch.dtype = FP32


APART = {"single_grouped_weight": False, "single_grouped_bias": False}
FUSED = {"fuse_wgrad_accumulation": True}
LATER = {"delay_wgrad_compute": True}
CACHED = {"cache_weights": True}
FEATURES = {
    "cached": Feature(CACHED, "bool"),
    "cached_flag": Feature(CACHED, "tensor"),
    "fused": Feature(FUSED),
    "cached_fused": Feature(CACHED | FUSED, "bool"),
    "cached_fused_flag": Feature(CACHED | FUSED, "tensor"),
    "input_saved": Feature({"save_original_input": True}),
    "apart": Feature(APART),
    "apart_cached_fused": Feature(APART | CACHED | FUSED, "tensor"),
    "later": Feature(LATER),
    "later_apart_cached_fused": Feature(LATER | APART | CACHED | FUSED, "bool"),
}


def make_layer(recipe: Recipe, dtype: torch.dtype, device: str, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    # Under a recipe weights are float32, so that gradients are, as main_grad is.
    weight_dtype = FP32 if recipe else dtype
    return GroupedLinear(E, K, N, recipe=recipe, dtype=weight_dtype, device=device, **options)


def batches(dtype: torch.dtype, device: str, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, m_splits and dy, with an empty group, and NaN past the last row."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        m_splits = torch.tensor([[10, 0, 25], [0, 7, 30], [40, 0, 0]][i % 3])
        x, dy = (torch.randn(T, size, generator=generator) for size in (K, N))
        x[int(m_splits.sum()) :] = torch.nan
        made.append((x.to(device, dtype), m_splits.to(device), dy.to(device, dtype)))
    return made


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def biases_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.startswith("bias")]


def whole(parts: list[Tensor]) -> Tensor:
    """One tensor of one an expert."""
    return (parts[0] if len(parts) == 1 and E > 1 else torch.stack(parts)).detach().clone()


@torch.no_grad()
def optimizer_step(layer: nn.Module, weight_grad: Tensor) -> None:
    """The same arithmetic for every form of the parameters."""
    weights = weights_of(layer)
    grads = [weight_grad] if len(weights) == 1 else list(weight_grad)
    for w, grad in zip(weights, grads, strict=True):
        w -= (LEARNING_RATE * grad).to(w.dtype)
    for b in biases_of(layer):
        b -= LEARNING_RATE * b.grad
        b.grad = None
    update_scales(layer)


def plain_run(recipe: Recipe, dtype: torch.dtype, device: str, micro_batches: int) -> list[Tensor]:
    """y and dx of every micro-batch, and weight and bias gradients of every step."""
    layer, results = make_layer(recipe, dtype, device), []
    made = iter(batches(dtype, device, STEPS * micro_batches))
    for _ in range(STEPS):
        total = torch.zeros(E, N, K, device=device)
        for _, (x, m_splits, dy) in zip(range(micro_batches), made, strict=False):
            y = layer(x.requires_grad_(), m_splits)
            y.backward(dy)
            if recipe is None:  # unrounded, as into main_grad
                offs = ops.splits_to_offsets(m_splits, T)
                ops.grouped_mm_wgrad_(total, dy, x.detach(), offs)
            else:
                total += layer.weight.grad
            layer.weight.grad = None
            results += [y.detach(), x.grad]
        results += [total, layer.bias.grad.clone()]
        optimizer_step(layer, total)
    return results


def run(
    feature: Feature,
    recipe: Recipe,
    dtype: torch.dtype,
    device: str,
    micro_batches: int,
    wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda layer: layer,
) -> list[Tensor]:
    """What plain_run gives, by a layer with the feature."""
    layer, results = make_layer(recipe, dtype, device, **feature.options), []
    weights, fused = weights_of(layer), "fuse_wgrad_accumulation" in feature.options
    if fused:
        flat = torch.full((E * N * K + 8,), torch.nan, dtype=feature.grad_dtype, device=device)
        for w, part in zip(weights, flat[8:].view(len(weights), -1), strict=True):
            w.main_grad = part.view(w.shape)
    call, made = wrap(layer), iter(batches(dtype, device, STEPS * micro_batches))
    for _ in range(STEPS):
        if fused and feature.flag == "none":
            for w in weights:
                w.main_grad.zero_()
        for i, (x, m_splits, dy) in zip(range(micro_batches), made, strict=False):
            first: Any = {"none": None, "bool": i == 0}.get(feature.flag)
            if feature.flag == "tensor":
                first = torch.tensor(i == 0, device=device)
            y = call(x.requires_grad_(), m_splits, first)
            y.backward(dy)
            if "delay_wgrad_compute" in feature.options:
                assert all(w.grad is None for w in weights) or i > 0
                layer.backward_dw()
            results += [y.detach(), x.grad]
        total = whole([w.main_grad if fused else w.grad for w in weights])
        results += [total, whole([b.grad for b in biases_of(layer)])]
        optimizer_step(layer, total)
        for w in weights:
            assert (w.grad is None) == fused
            w.grad = None
    return results


def compiled(layer: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


MODES: dict[str, Any] = {"eager": lambda layer: layer, "compiled": compiled}


@DEVICES
@EVERY_RECIPE
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, mode: str, recipe: Recipe, device: str) -> None:
    feature = FEATURES[name]
    if recipe is RECIPES["delayed"] and name == "input_saved":
        with pytest.raises(ValueError, match="save_original_input"):
            make_layer(recipe, BF16, device, **feature.options)
        return
    # Without main_grad gradients are rounded to the weights' dtype, which follows x without a
    # recipe: float32 then.
    low = recipe is not None or "fuse_wgrad_accumulation" in feature.options
    dtype = BF16 if low else FP32
    if mode == "compiled" and "delay_wgrad_compute" in feature.options:
        with pytest.raises(Exception, match="delay_wgrad_compute keeps operands"):
            run(feature, recipe, dtype, device, 1, MODES[mode])
        return
    actual = run(feature, recipe, dtype, device, 2, MODES[mode])
    for a, e in zip(actual, plain_run(recipe, dtype, device, 2), strict=True):
        assert_same_bits(a, e)
