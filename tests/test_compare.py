# SPDX-License-Identifier: Apache-2.0
"""compare: layers beside themselves without a recipe, whole and one role at a time.

T rows, E groups, K in_features, N out_features, F features of h.
"""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    Recipe,
    te,
)
from grouped_linear.contrib import compare, watch
from grouped_linear.contrib.compare import _worst_block
from support import reference
from support.compare import assert_same_bits, relative_error
from support.experts import GroupedExperts
from support.pairs import one_in_ci
from support.recipes import RECIPES
from support.tensors import BF16, FP32
from support.watched import layers, loss_of, mixtral

E, K, N = 3, 128, 272
SPLITS = [40, 0, 93]


def linear(recipe: Recipe | None, **options: Any) -> Any:
    torch.manual_seed(1)
    return GroupedLinear(E, K, N, bias=False, recipe=recipe, dtype=FP32, **options)


def arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(sum(SPLITS), K, requires_grad=True), torch.randn(sum(SPLITS), N)


def test_differences_of_a_linear_layer_in_float64() -> None:
    """Output and gradients of operands that the reference quantizes, whole and one at a time."""
    layer, (x, dy) = linear(Float8BlockScaling(share_x_scales=False)), arguments()
    found = compare(layer, lambda: layer(x, SPLITS).backward(dy), roles=True)
    offs, scaling = torch.tensor(SPLITS).cumsum(0).int(), reference.Scaling()
    w = layer.weight.detach()

    def of_rows(t: Tensor) -> tuple[Tensor, Tensor]:
        rowwise = reference.dequantize_rowwise(*reference.quantize_rowwise(t, scaling), offs)
        columns = reference.quantize_columnwise(t, offs, scaling)
        return rowwise, reference.dequantize_columnwise(*columns, offs, len(t))

    q, scale, _ = reference.quantize_weight(w, scaling)
    rounded = {
        "input": of_rows(x.detach()),
        "weight": (reference.dequantize_weight(q, scale),) * 2,
        "grad_output": of_rows(dy),
    }
    plain = {"input": (x.detach(),) * 2, "weight": (w,) * 2, "grad_output": (dy,) * 2}

    def results(*roles: str) -> dict[str, Tensor]:
        of = {role: (rounded if role in roles else plain)[role] for role in plain}
        (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = (
            [t.double() for t in of[role]] for role in plain
        )
        return {
            "output": reference.grouped_mm(x_row, w_row.mT, offs),
            "x": reference.grouped_mm(dy_row, w_col, offs),
            "weight": reference.grouped_mm_wgrad(dy_col, x_col, offs),
        }

    expected = results()
    for found_one in found.differences:
        roles = tuple(plain) if found_one.quantized == "all" else (found_one.quantized,)
        must = relative_error(results(*roles)[found_one.tensor], expected[found_one.tensor])
        assert found_one.difference == pytest.approx(must, rel=0.02, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in RECIPES if name != "none"),
        *one_in_ci([("delayed", True), ("block", True)]),
    ],
)
def test_differences_of_an_mlp(name: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GroupedMLP(4, K, 144, recipe=RECIPES[name]))
    x, (weights, chosen) = torch.randn(50, K, requires_grad=True), torch.rand(50, 4).topk(2)
    roles = not isinstance(RECIPES[name], DelayedScaling) and not compiled
    found = compare(
        model,
        lambda: model[0](x, weights, chosen).square().sum().backward(),
        roles=roles,
        compiled=compiled,
    )
    whole = {d.tensor: d.difference for d in found.differences if d.quantized == "all"}
    assert set(whole) == {"output", "x", "gate_up_proj", "down_proj"}
    assert all(0.02 < d < 0.12 for d in whole.values())
    if roles:
        of_gradient = {d.tensor: d.difference for d in found.differences if d[1] == "grad_output"}
        assert of_gradient["output"] == 0
        assert 0.01 < of_gradient["x"] < whole["x"]
        assert str(found).split()[:5] == ["layer", "tensor", "all", "input", "weight"]


def test_weights_that_are_frozen() -> None:
    """By their numbers: of rounded operands the output, and of dy the gradient of x."""
    layer, (x, dy) = linear(Float8BlockScaling(), weights="fp8"), arguments()
    before, seen = {name: p.clone() for name, p in layer.named_parameters()}, watch(layer)
    found = compare(layer, lambda: layer(x, SPLITS).backward(dy), roles=True)
    assert all(math.isnan(row.moved) for row in seen.read().operands)  # none has to
    by_role = {(d.tensor, d.quantized): d.difference for d in found.differences}
    assert {tensor for tensor, _ in by_role} == {"output", "x"}
    assert 0.01 < by_role["output", "all"] < 0.06
    assert by_role["output", "input"] == pytest.approx(by_role["output", "all"], rel=0.05)
    assert by_role["output", "weight"] < 1e-6  # rounded already
    for name, p in layer.named_parameters():
        assert_same_bits(p, before[name])


@pytest.mark.parametrize("weights", [None, "fp8", "mxfp4", "one each"])
def test_weights_in_another_dtype_than_x(weights: Any) -> None:
    """Recipes in FP8 read any; without a recipe they are cast. Frozen ones remember theirs."""
    if weights == "one each":
        layer: Any = te.GroupedLinear(2, 128, 64, bias=False, recipe=Float8BlockScaling())
    else:
        layer = GroupedLinear(2, 128, 64, False, recipe=Float8BlockScaling(), weights=weights)
    if weights in ("fp8", "mxfp4"):
        layer.bfloat16()
    x = torch.randn(20, 128, dtype=torch.bfloat16, requires_grad=True)
    found = compare(layer, lambda: layer(x, [12, 8]).sum().backward(), roles=True)
    assert 0.01 < found.worst()[0].difference < 0.06


def test_layers_before_all_that_learns() -> None:
    """As those before the first adapter: they have an output and no gradient."""
    torch.manual_seed(0)
    recipe = Float8BlockScaling()
    model = nn.ModuleList(GroupedLinear(2, 64, 64, bias=False, recipe=recipe) for _ in range(2))
    model[0].requires_grad_(False)
    x = torch.randn(20, 64)
    found = compare(model, lambda: model[1](model[0](x, [12, 8]), [12, 8]).sum().backward())
    assert [d[:3] for d in found.differences] == [
        ("0", "all", "output"),
        ("1", "all", "output"),
        ("1", "all", "x"),
        ("1", "all", "weight"),
    ]
    assert all(0.01 < d.difference < 0.06 for d in found.differences)


def test_the_model_stays_as_it_is() -> None:
    layer, (x, dy) = linear(Float8BlockScaling(), weights="both"), arguments()
    seen = watch(layer)
    layer(x, SPLITS).backward(dy)
    (grad,), before = (layer.weight.grad.clone(),), seen.read()
    layer.zero_grad()
    found = compare(layer, lambda: layer(x, SPLITS).backward(dy))
    assert_same_bits(layer.weight.grad, grad)
    after = seen.read()
    assert after.loads[0].tokens == before.loads[0].tokens  # of the step alone
    assert layer.recipe == Float8BlockScaling()
    of_output = found.worst("output")[0].difference
    assert 0.02 < of_output < 0.05


def test_dropout_and_frozen_weights() -> None:
    """Both computations drop the same features, and the step goes on with its random numbers."""
    recipe, differences = Float8BlockScaling(), []
    for dropout in (0.0, 0.5):
        layer: Any = linear(recipe, lora=Lora(rank=16, dropout=dropout))
        nn.init.normal_(layer.weight_lora_b, std=0.1)
        x, dy = arguments()

        def step(layer: Any = layer, x: Tensor = x, dy: Tensor = dy) -> Tensor:
            torch.manual_seed(3)
            layer(x, SPLITS).backward(dy)
            return torch.rand(3)

        expected, drawn = step(), []
        found = compare(layer, lambda step=step, drawn=drawn: drawn.append(step()))
        assert torch.equal(drawn[0], expected)
        assert {d.tensor for d in found.differences} == {
            *("output", "x", "weight_lora_a", "weight_lora_b")
        }
        differences.append(max(d.difference for d in found.differences))
    assert 0.02 < differences[0] < 0.06
    assert differences[1] < 1.5 * differences[0]  # beside 0.5 of other masks


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"^compare: Linear has no GroupedLinear, no GroupedM"):
        compare(nn.Linear(3, 3), lambda: None)
    with pytest.raises(ValueError, match=r"^compare: 0 has no recipe, nor has another layer: make"):
        compare(nn.Sequential(linear(None)), lambda: None)
    layer, (x, dy) = linear(Float8BlockScaling()), arguments()
    with pytest.raises(ValueError, match=r"^compare: no backward of step reached GroupedLinear: "):
        compare(layer, lambda: layer(x, SPLITS))
    loss: Any = layer(x, SPLITS).sum()
    with pytest.raises(TypeError, match=r"^compare: step must be a function .*, got Tensor$"):
        compare(layer, loss)
    delayed = linear(DelayedScaling())
    with pytest.raises(ValueError, match=r"roles=True needs a recipe without state, got Delayed"):
        compare(delayed, lambda: delayed(x, SPLITS).backward(dy), roles=True)
    h = x.detach().clone()
    match = r"^compare: an input of GroupedLinear was written since: write a clone\(\)$"
    with pytest.raises(ValueError, match=match):
        compare(layer, lambda: [y.backward(dy) for y in [layer(h, SPLITS)] if h.zero_() is h])
    assert not layer._forward_hooks
    own, layer.forward = layer.forward, lambda *args: own(*args)  # as accelerate sets it
    with pytest.raises(ValueError, match=r"^compare: GroupedLinear has a forward of its own: "):
        compare(layer, lambda: layer(x, SPLITS).backward(dy))


def test_a_backward_after_compare() -> None:
    """A graph that a refused step has left behind is as any other."""
    layer, (x, dy), left = linear(Float8BlockScaling()), arguments(), []
    h = x.detach().clone()
    with pytest.raises(ValueError, match=r"^compare: no backward of step reached"):
        compare(layer, lambda: left.append(layer(h, SPLITS)))
    h.zero_()
    left[0].backward(dy)


def test_numbers_that_are_not_finite_come_first() -> None:
    model = nn.ModuleList(linear(Float8BlockScaling()) for _ in range(3))
    model[1].weight.data[0, 0, 0] = math.inf
    x, dy = arguments()
    found = compare(model, lambda: [layer(x, SPLITS).backward(dy) for layer in model])
    assert {d.layer for d in found.worst(n=2)} == {"1"}
    assert [d.layer for d in found.worst("weight")] == ["0", "1", "2"]


def test_a_step_in_autocast() -> None:
    """A layer is computed as the forward computed it, wherever the backward runs."""
    layer, (x, dy), found = linear(Float8BlockScaling()), arguments(), []

    def step(inside: bool) -> None:
        with torch.autocast("cpu", BF16):
            y = layer(x, SPLITS)
            if inside:
                y.backward(dy.to(BF16))
        if not inside:
            y.backward(dy.to(BF16))

    for inside in (True, False):
        found.append(compare(layer, partial(step, inside)).differences)
    assert found[0] == found[1]


def test_a_compiled_model_and_its_own_hooks() -> None:
    """Graphs that ran before call no hooks; a hook of the layer's owner may change its output."""
    model, (x, dy) = nn.Sequential(linear(Float8BlockScaling())), arguments()
    expected = compare(model, lambda: model[0](x, SPLITS).backward(dy)).differences
    call = torch.compile(lambda x: model[0](x, SPLITS), fullgraph=True)
    call(x).backward(dy)
    with pytest.raises(ValueError, match=r"compare inside of torch.compiler.set_stance"):
        compare(model, lambda: call(x).backward(dy))
    compiled = torch._dynamo.utils.counters["stats"]
    compiled.clear()
    with torch.compiler.set_stance("force_eager"):
        found = compare(model, lambda: call(x).backward(dy), compiled=True)
    assert compiled["unique_graphs"] == 2  # the copies with and without the recipe
    assert [d.tensor for d in found.differences] == [d.tensor for d in expected]
    model[0].register_forward_hook(lambda _module, _args, y: 2 * y)
    assert compare(model, lambda: (model[0](x, SPLITS) / 2).backward(dy)).differences == expected


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("mxfp8", False), ("delayed", False), *one_in_ci([("block", False), ("block", True)])],
)
def test_compare_experts_in_one_module(name: str, compiled: bool) -> None:
    model, x = layers(GroupedExperts, RECIPES[name])
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    roles = name == "block"
    found = compare(
        model, lambda: model(x).square().sum().backward(), roles=roles, compiled=compiled
    )
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
    whole = {(d.layer, d.tensor): d.difference for d in found.differences if d[1] == "all"}
    tensors = ("output", "x", "w1_EFD", "w2_EDF", "w3_EFD")
    assert set(whole) == {(f"layers.{i}", t) for i in range(2) for t in tensors}
    assert all(0.01 < d < 0.15 for d in whole.values())
    if roles:
        by_role = {d.quantized: d.difference for d in found.differences if d[2] == "output"}
        assert by_role["grad_output"] == 0
        assert 0.01 < by_role["weight"] < by_role["all"]
    assert type(model.layers[0]) is type(plain.layers[0])


def test_compare_hugging_face() -> None:
    model = mixtral(recipes={"model.layers.1.*": None})
    found = compare(model, lambda: loss_of(model).backward(), roles=True)
    assert {d.layer for d in found.differences} == {"model.layers.0.mlp.experts"}
    assert {d.tensor for d in found.differences} == {"output", "x", "gate_up_proj", "down_proj"}
    whole = [d.difference for d in found.differences if d.quantized == "all"]
    assert all(0.01 < d < 0.15 for d in whole)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_of(model).backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert_same_bits(p.grad, grad)


def mlp() -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(8, 256, 512, recipe=Float8BlockScaling())


def worst_of(layer: GroupedMLP, x: Tensor) -> Any:
    torch.manual_seed(1)
    routed = torch.randn(len(x), 8).softmax(dim=-1).topk(2)
    step = lambda: layer(x, *routed).square().mean().backward()  # noqa: E731
    return compare(layer, step).worst(n=1)[0]


def test_the_worst_block_shows_what_a_large_number_hides() -> None:
    """A number that is most of a tensor and exact hides those that it takes the scale of."""
    torch.manual_seed(2)
    x = torch.randn(512, 256, requires_grad=True)
    healthy = worst_of(mlp(), x)
    assert healthy.worst_block < 0.25
    outlier = mlp()
    outlier.down_proj.data[3, 5, 7] = 3000
    found = worst_of(outlier, x)
    assert found.worst_block > 0.5
    assert found.difference < 0.08  # as that of healthy tensors
    with torch.no_grad():
        x[7, 9] = 1e4
    assert worst_of(mlp(), x).worst_block > 0.5


def test_a_worst_block_in_float64() -> None:
    """Medians of 128 neighbours; of a block smaller than most, beside the median of all."""
    t = torch.arange(1, 385).double().view(1, 384).repeat(3, 1)  # medians 64, 192, 320
    off = torch.zeros_like(t)
    off[0, :128] = 6.4  # beside the typical 192
    off[1, 256:] = 32  # beside 320
    off[2, 0] = 1e9  # one number of a block
    assert _worst_block(off, t).item() == pytest.approx(32 / 320)
    assert _worst_block(off[:1], t[:1]).item() == pytest.approx(6.4 / 192)
    assert _worst_block(off * 0, t * 0).item() == 0
    assert _worst_block(torch.ones(1, 16), torch.zeros(1, 16)).item() == math.inf
    off[2, 0] = math.nan
    assert math.isnan(_worst_block(off, t).item())
    torch.manual_seed(0)
    off, t = torch.randn(2, 5, 300).double().unbind()  # blocks of 150
    medians = [x.view(5, 2, 150).abs().median(-1).values for x in (off, t)]
    expected = (medians[0] / medians[1].maximum(medians[1].median())).max()
    assert _worst_block(off, t) == expected


def test_deterministic_algorithms(device: str) -> None:
    """torch's own refuse some operations on CUDA, as a median that has indices."""
    torch.manual_seed(0)
    layer = GroupedMLP(4, 128, 128, recipe=Float8BlockScaling(), device=device)
    x, scores = torch.randn(20, 128, device=device), torch.rand(20, 4, device=device)
    seen = watch(layer)
    torch.use_deterministic_algorithms(True)
    try:
        found = compare(layer, lambda: layer(x, *scores.topk(2)).sum().backward(), roles=True)
        assert all(row.amax > 0 for row in seen.read().operands)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {d.tensor for d in found.differences} == {"output", "x", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("options", [{"cache_weights": True}, {"weights": "both"}], ids=str)
def test_micro_batches(options: dict[str, Any]) -> None:
    """Each is compared alone, whatever the cache holds."""
    layer, (x, dy) = linear(Float8BlockScaling(), **options), arguments()
    (plain,) = compare(layer, lambda: layer(x, SPLITS).backward(dy)).worst("output")
    found = compare(layer, lambda: [layer(x, SPLITS, i).backward(dy) for i in (True, False)])
    assert found.worst("output")[0].difference == pytest.approx(plain.difference)


def test_weight_gradients_that_a_step_delays() -> None:
    options: Any = {"bias": False, "params_dtype": FP32, "recipe": Float8BlockScaling()}
    layer = te.GroupedLinear(E, K, N, delay_wgrad_compute=True, **options)
    x, dy = arguments()
    found = compare(layer, lambda: [layer(x, SPLITS).backward(dy), layer.backward_dw()])  # type: ignore[union-attr]
    assert {d.tensor for d in found.differences} == {"output", "x", "weight0", "weight1", "weight2"}


def test_a_gradient_of_zeros() -> None:
    """That of A at the start of LoRA, where B is zero, is exact."""
    layer, (x, dy) = linear(Float8BlockScaling(), lora=Lora(4)), arguments()
    found = compare(layer, lambda: layer(x, SPLITS).backward(dy))
    by_tensor = {d.tensor: d for d in found.differences}
    assert by_tensor["weight_lora_a"].difference == by_tensor["weight_lora_a"].worst_block == 0
