# SPDX-License-Identifier: Apache-2.0
"""Formats: the package's own and a user's, in every role, layer and way to call.

T rows, E groups, K in_features, N out_features; of the MLP: H features of a token, F features
inside an expert.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    grouped_linear,
    ops,
)
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Layouts, Operands
from support import reference
from support.compare import assert_same_bits
from support.formats import composed, with_function
from support.layers import call_of, linear_of
from support.pairs import in_turn

BF16, FP16 = torch.bfloat16, torch.float16
T, E, K, N = 200, 3, 160, 144
F = 272  # of an expert; with up to 256 a recipe of blocks in all roles has down's wgrad in 16 bits
SPLITS = (70, 0, 110)  # an empty group, groups that end inside a block, and rows of no group


def fp8_or_bf16(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands:
    """FP8 in fprop, BF16 in the backward."""
    if offs_E is None:
        q, scale, _ = ops.quantize_weight(t, columnwise=False)
    else:
        q, scale, *_ = ops.group_quantize(t, offs_E) if layouts.rowwise else (None, None)
    return Operands(q, scale, t.to(BF16) if layouts.columnwise else None)


def to_64ths(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Tensor:
    """Of torch operations alone, one tensor for both layouts."""
    return (t * 64).round() / 64


FLOAT8_FORWARD = Recipe(
    input=Format(quantize=fp8_or_bf16),
    weight=Format(quantize=fp8_or_bf16),
    grad_output=Format(dtype=BF16),
)
ROUNDED_WEIGHTS = Recipe(weight=Format(quantize=to_64ths))


def layer_of(recipe: Recipe | None, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return linear_of(E, K, N, recipe=recipe, dtype=BF16, **options)


def mlp_of(recipe: Recipe | None, bias: bool = True) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(E, K, F, recipe=recipe, bias=bias, dtype=BF16)


def rows(*size: int) -> Tensor:
    return torch.randn(size, dtype=BF16)


def routing_of(num_tokens: int) -> tuple[Tensor, Tensor]:
    weights, experts = torch.randn(num_tokens, E).softmax(dim=1).topk(2)
    return weights.to(BF16), experts


def gradients(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(module.named_parameters())}
    return dict(zip(named, torch.autograd.grad(y, list(named.values()), dy), strict=True))


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_input", [False, True])
@pytest.mark.parametrize("single", [True, False])
def test_layer_is_what_the_recipe_says(single: bool, save_input: bool) -> None:
    """Against float64 of the operands that the recipe made.

    Sums are float32 and results are rounded to bfloat16 once: half of its last place is 2**-9 of a
    result, 2**-8 leaves room for the sums. Where a result is near 0 the sums' own error shows:
    some 2**-24 of up to 160 terms near 1, far below 1e-3.
    """
    layer = layer_of(FLOAT8_FORWARD, single_grouped_weight=single, save_original_input=save_input)
    x, dy, m_splits = rows(T, K).requires_grad_(), rows(T, N), torch.tensor(SPLITS)
    w = torch.stack([p for name, p in layer.named_parameters() if "weight" in name]).view(E, N, K)
    assert layer.bias is not None

    offs_E = m_splits.cumsum(0).int()
    q, scale, *_ = ops.group_quantize(x.detach(), offs_E)
    assert q is not None
    assert scale is not None
    x_of_fprop = ops.group_dequantize(q, scale, offs_E, torch.float32).double()
    w_of_fprop = reference.dequantize_weight(*ops.quantize_weight(w.detach(), columnwise=False)[:2])
    expected: dict[str, Tensor] = {
        "y": torch.zeros(T, N, dtype=torch.float64),
        "x": torch.zeros(T, K, dtype=torch.float64),
        "weight": torch.zeros(E, N, K, dtype=torch.float64),
        "bias": torch.zeros(E, N, dtype=torch.float64),
    }
    first = 0
    for e, size in enumerate(SPLITS):
        of_group = slice(first, first + size)
        first += size
        expected["y"][of_group] = x_of_fprop[of_group] @ w_of_fprop[e].T + layer.bias[e].double()
        expected["x"][of_group] = dy[of_group].double() @ w[e].double()
        expected["weight"][e] = dy[of_group].double().T @ x[of_group].double()
        expected["bias"][e] = dy[of_group].double().sum(0)

    y = layer(x, m_splits)
    actual = gradients(layer, x, y, dy)
    if not single:
        actual["weight"] = torch.stack([actual.pop(f"weight{e}") for e in range(E)])
    for name, t in {"y": y, **actual}.items():
        torch.testing.assert_close(t.double(), expected[name], rtol=2**-8, atol=1e-3, msg=name)


# --- training ------------------------------------------------------------------------------------


def losses(module: nn.Module, call: Callable[..., Tensor], inputs: tuple[Any, ...]) -> list[float]:
    """Of AdamW steps toward a target."""
    target = rows(*inputs[0].shape[:1], N if isinstance(module, GroupedLinear) else K)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    values = []
    for _ in range(8):
        loss = (call(*inputs) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


@pytest.mark.parametrize(
    ("kind", "recipe"),
    in_turn(
        {kind: kind for kind in ("packed", "per_expert", "mlp")},
        {"int": ROUNDED_WEIGHTS, "fp8": FLOAT8_FORWARD},
    ),
)
def test_training(kind: str, recipe: Recipe) -> None:
    """The loss falls, and compiled training has the bits of eager training."""
    module: nn.Module
    if kind == "mlp":
        module, inputs = mlp_of(recipe), (rows(T, K), *routing_of(T))
    else:
        module = layer_of(recipe, single_grouped_weight=kind == "packed")
        inputs = rows(T, K), torch.tensor([60, 20, T - 80])
    twin = copy.deepcopy(module)
    torch.manual_seed(1)
    eager = losses(module, module, inputs)
    assert eager[-1] < 0.8 * eager[0]
    torch.manual_seed(1)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    assert losses(twin, compiled, inputs) == eager


def test_training_under_inductor() -> None:
    module = mlp_of(FLOAT8_FORWARD)
    compiled = torch.compile(module, fullgraph=True)
    values = losses(module, compiled, (rows(T, K), *routing_of(T)))
    assert values[-1] < 0.8 * values[0]


# --- what a layer does --------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_the_default_is_no_recipe(compiled: bool) -> None:
    results = []
    for recipe in (None, Recipe()):
        torch.manual_seed(1)
        layer, x, dy = layer_of(recipe), rows(T, K).requires_grad_(), rows(T, N)
        call = call_of(layer, compiled)
        y = call(x, torch.tensor(SPLITS))
        results.append({"y": y, **gradients(layer, x, y, dy)})
    for name, t in results[0].items():
        assert torch.equal(t, results[1][name]), name


def test_options_of_the_layer() -> None:
    """Those that need nothing of a recipe: main_grad, deferred gradients, micro-batches, pickle."""
    m_splits, x, dy = torch.tensor(SPLITS), rows(T, K), rows(T, N)
    plain = layer_of(FLOAT8_FORWARD)
    plain(x, m_splits).backward(dy)
    layer = layer_of(FLOAT8_FORWARD, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    layer.weight.main_grad = torch.full((E, N, K), torch.nan)
    layer = pickle.loads(pickle.dumps(layer))
    layer.weight.main_grad = torch.full((E, N, K), torch.nan)
    layer(x, m_splits, is_first_microbatch=True).backward(dy)
    layer.backward_dw()
    # main_grad is float32, grad bfloat16; torch multiplies, and may add in another order for each.
    torch.testing.assert_close(
        layer.weight.main_grad.to(BF16), plain.weight.grad, rtol=2**-7, atol=1e-3
    )


def test_dtypes() -> None:
    """A format of one's own is given a weight of x's dtype; a layer is told so."""
    w, m_splits = torch.randn(E, N, K), torch.tensor(SPLITS)
    y = grouped_linear(rows(T, K), w, m_splits, recipe=Float8BlockScaling())
    assert y.dtype == BF16
    with pytest.raises(RuntimeError, match="x is bfloat16, weight float32: cast one of them"):
        grouped_linear(rows(T, K), w, m_splits, recipe=ROUNDED_WEIGHTS)
    x, both = rows(T, K), GroupedTensorWithMaster.quantize(w, ROUNDED_WEIGHTS)
    with torch.autocast("cpu", BF16):
        y = grouped_linear(x, w, m_splits, recipe=ROUNDED_WEIGHTS)
        assert_same_bits(grouped_linear(x, both, m_splits, recipe=ROUNDED_WEIGHTS), y)
    assert y.dtype == BF16


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("single", [True, False])
def test_a_16_bit_dtype(single: bool, dtype: torch.dtype) -> None:
    """Every operand is rounded to it, and float32 results are sums of these: rounded no more."""
    recipe = Recipe(*(Format(dtype=dtype) for _ in range(3)))
    torch.manual_seed(0)
    layer = linear_of(E, K, N, False, recipe=recipe, single_grouped_weight=single)
    x, dy, size = torch.randn(20, K, requires_grad=True), torch.randn(20, N), [0] * (E - 1) + [20]
    y = layer(x, torch.tensor(size))
    parameters = list(layer.parameters())
    d_x, *d_w = torch.autograd.grad(y, (x, *parameters), dy)
    w = parameters[-1].view(-1, N, K)[-1]
    x64, w64, dy64 = (t.detach().to(dtype).double() for t in (x, w, dy))
    for actual, expected in (
        (y, x64 @ w64.T),
        (d_x, dy64 @ w64),
        (d_w[-1].view(-1, N, K)[-1], dy64.T @ x64),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


# --- one numbers, however they are computed ------------------------------------------------------

PACKAGE = {
    "none": Recipe(),
    "block": Float8BlockScaling(),
    "exact": Float8BlockScaling(
        power_of_two_scales=False, amax_epsilon=2.0, share_x_scales=False, requantize_weights=True
    ),
    "bf16_wgrad": Float8BlockScaling(wgrad=BF16),
    "current": Float8CurrentScaling(amax_epsilon=4.0, gradient_dtype=torch.float8_e5m2),
    "mx": MXFP8BlockScaling(),
}
LAYERS = "packed", "per_expert", "chosen", "sorted"


def results(
    recipe: Recipe, layer: str, compiled: bool = False, bias: bool = True
) -> dict[str, Tensor]:
    """Output and gradients of one call."""
    torch.manual_seed(0)
    module: nn.Module
    x = rows(50, K).requires_grad_()
    if layer in ("packed", "per_expert"):
        packed = layer == "packed"
        module = linear_of(E, K, N, bias, recipe=recipe, single_grouped_weight=packed, dtype=BF16)
        inputs: tuple[Any, ...] = (x, torch.tensor([20, 0, 25]))
    else:
        module = mlp_of(recipe, bias)
        inputs = (x, *routing_of(50))
    call: Callable[..., Tensor] = module
    if layer == "sorted":
        inputs = (x, torch.tensor([20, 0, 25]))
        assert isinstance(module, GroupedMLP)
        call = module.forward_sorted
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    y = call(*inputs)
    return {"y": y, **gradients(module, x, y, torch.randn_like(y))}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, t in expected.items():
        assert_same_bits(actual[name], t)


PAIRS = [  # every format with every role and with every layer; those of COMPILED compile
    ("none", "input", "packed"), ("none", "weight", "chosen"), ("none", "grad_output", "sorted"),
    ("none", "all", "per_expert"), ("block", "input", "chosen"), ("block", "weight", "per_expert"),
    ("block", "grad_output", "packed"), ("block", "all", "sorted"), ("exact", "input", "sorted"),
    ("exact", "weight", "packed"), ("exact", "grad_output", "chosen"),
    ("exact", "all", "per_expert"), ("bf16_wgrad", "input", "per_expert"),
    ("bf16_wgrad", "weight", "sorted"), ("bf16_wgrad", "grad_output", "chosen"),
    ("bf16_wgrad", "all", "packed"), ("current", "input", "packed"),
    ("current", "weight", "chosen"), ("current", "grad_output", "per_expert"),
    ("current", "all", "sorted"), ("mx", "input", "chosen"), ("mx", "weight", "per_expert"),
    ("mx", "grad_output", "sorted"), ("mx", "all", "packed"),
]  # fmt: skip
COMPILED = (0, 5, 7, 10, 13, 18, 20, 23)  # two of each role and of each layer, every format


@pytest.mark.parametrize(
    ("name", "role", "layer", "compiled"), [(*pair, i in COMPILED) for i, pair in enumerate(PAIRS)]
)
def test_a_function_in_a_role(name: str, role: str, layer: str, compiled: bool) -> None:
    """The package's format, the same as a function, eager and compiled: the same bits."""
    recipe = PACKAGE[name]
    own = composed(recipe, *(() if role == "all" else (role,)))
    expected = results(recipe, layer)
    assert_same(results(own, layer), expected)
    if compiled:
        assert_same(results(own, layer, compiled=True), expected)


@pytest.mark.parametrize(
    "options", [{"amax_epsilon": 64.0}, {"power_of_two_scales": False}, {"share_scales": True}]
)
def test_gradients_in_blocks_of_other_options(options: dict[str, Any]) -> None:
    """One op quantizes h and the gradient by it only where both formats have the same options."""
    block = Float8BlockScaling()
    recipe = Recipe(block.input, block.weight, replace(block.grad_output, **options))
    expected = results(composed(recipe), "chosen")
    assert_same(results(recipe, "chosen"), expected)
    d_w = "gate_up_proj"
    assert not torch.equal(expected[d_w], results(block, "chosen")[d_w])


@pytest.mark.parametrize(
    ("name", "role"), [("block", "input"), ("current", "weight"), ("block", "grad_output")]
)
def test_no_layer_passes_a_function_by(name: str, role: str) -> None:
    """A function that gives zeros makes zeros of its products, in every way to call."""
    recipe = with_function(PACKAGE[name], role, lambda t: t * 0)
    of_role = {
        "input": ("y", "weight", "gate_up_proj", "down_proj"),
        "weight": ("y", "x"),
        "grad_output": ("x", "weight", "gate_up_proj", "down_proj"),
    }
    for layer in LAYERS:
        for key, t in results(recipe, layer, bias=False).items():
            if key.rstrip("012") in of_role[role]:
                assert not t.any(), (layer, key)


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [GroupedLinear, GroupedMLP])
@pytest.mark.parametrize("recipe", [FLOAT8_FORWARD, Recipe()], ids=["own", "none"])
def test_what_a_cache_stores(recipe: Recipe, layer: Any) -> None:
    sentence = "Recipe: cache_weights=True stores weights in this package's formats, got Fo"
    with pytest.raises(ValueError, match=sentence):
        layer(E, K, N, recipe=recipe, cache_weights=True)


@pytest.mark.parametrize(
    ("of", "options", "sentence"),
    [
        (Recipe, {"input": BF16}, "Recipe: input must be a Format, got torch.bfloat16"),
        (
            Recipe,
            {"input": Float8BlockScaling().input},
            "Recipe: fprop cannot multiply input with scales of blocks and weight with the "
            "activations' dtype",
        ),
        (
            Recipe,
            {"input": Float8BlockScaling().input, "weight": Float8CurrentScaling().weight},
            "Recipe: fprop cannot multiply input with scales of blocks and weight with scales of",
        ),
        (
            Recipe,
            {
                "input": Float8BlockScaling(wgrad=BF16).input,
                "weight": Float8BlockScaling().weight,
                "grad_output": Float8BlockScaling().grad_output,
            },
            "Recipe: wgrad cannot multiply grad_output with scales of blocks and input with bf",
        ),
        (
            Recipe,
            {"weight": Format(wgrad_dtype=BF16)},
            "Recipe: wgrad_dtype is for input and grad_output, not for weight",
        ),
        (Recipe, {"requantize_weights": "no"}, "requantize_weights must be True or False, got 'n"),
        (Format, {"scaling": "blocks"}, "must be None, 'block', 'group', 'delayed' or 'mx', got"),
        (
            Format,
            {"dtype": torch.float8_e5m2, "scaling": "block"},
            "with scaling 'block' dtype must be float8_e4m3fn, got float8_e5m2",
        ),
        (
            Format,
            {"dtype": torch.float8_e4m3fn},
            "with scaling None dtype must be None or bfloat16 or float16, got float8_e4m3fn",
        ),
        (Format, {"wgrad_dtype": torch.float32}, "must be None, bfloat16 or float16, got float32"),
        (Format, {"quantize": "mine"}, "quantize must be a function, got 'mine'"),
        (Format, {"quantize": to_64ths, "dtype": BF16}, "takes the place of dtype and scaling"),
        (Format, {"amax_epsilon": -1.0}, "amax_epsilon must be finite and not negative, got -1"),
        (Format, {"share_scales": "no"}, "share_scales must be True or False, got 'no'"),
    ],
)
def test_what_is_said(of: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        of(**options)


def in_place(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Tensor:
    return t.mul_(64).round_().div_(64)


def sizes_in_place(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Tensor:
    if offs_E is not None:
        offs_E[1:] -= offs_E[:-1].clone()
    return to_64ths(t, offs_E, layouts)


@pytest.mark.parametrize(
    ("role", "wrong"),
    [
        *((role, in_place) for role in ("input", "weight", "grad_output")),
        *((role, sizes_in_place) for role in ("input", "grad_output")),
    ],
)
def test_a_function_that_writes_an_argument(role: str, wrong: Any) -> None:
    """It is refused; a compiled layer and inference hand it copies."""
    name = f"Recipe: {role}: {wrong.__name__} has written its argument in place"
    recipe, right = (Recipe(**{role: Format(quantize=f)}) for f in (wrong, to_64ths))
    if role == "weight":
        with pytest.raises(RuntimeError, match=name):
            layer_of(recipe, weights="both")
    results = []
    for one, compiled in ((right, False), (recipe, False), (recipe, True)):
        layer, m_splits = layer_of(one), torch.tensor(SPLITS)
        mlp = mlp_of(one)
        for module, arguments in ((layer, (m_splits,)), (mlp, (*routing_of(T),))):
            call: Any = torch.compile(module, backend="aot_eager") if compiled else module
            x = rows(T, K).requires_grad_()
            if one is recipe and not compiled:
                with torch.inference_mode():
                    if role != "weight":
                        module(x.detach().clone(), *arguments)
                with pytest.raises(RuntimeError, match=name):
                    module(x, *arguments).square().sum().backward()
                continue
            torch.manual_seed(1)
            x = rows(T, K).requires_grad_()
            before = [t.clone() for t in (x, *module.parameters())]
            call(x, *arguments).square().sum().backward()
            for t, was in zip((x, *module.parameters()), before, strict=True):
                assert_same_bits(t, was)
            results.append([x.grad, *(p.grad for p in module.parameters())])
    for a, e in zip(results[:2], results[2:], strict=True):
        for actual, expected in zip(a, e, strict=True):
            assert actual is not None
            assert expected is not None
            assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda t: None, "{}: f must return a tensor or Operands, got NoneType"),
        (lambda t: t.double(), "{}: f: rowwise must be {} in bfloat16, float16 or float32, of t"),
        (lambda t: t[:-1], "{}: f: rowwise must be {} in bfloat16"),
        (lambda t: Operands(None, None, t), "{}: f: rowwise must be {} in bf"),
        (lambda t: Operands(t, None, None), "{}: f: columnwise must be {} in bf"),
        (lambda t: Operands(t, t, t, t), "{}: f: rowwise must be {} in FP8 numbers for its scal"),
    ],
    ids=["none", "dtype", "rows", "no_rowwise", "no_columnwise", "scales"],
)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_what_is_said_of_what_a_function_returns(role: str, returned: Any, expected: str) -> None:
    def f(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Any:
        return returned(t)

    layer = layer_of(Recipe(**{role: Format(quantize=f)}))
    shape = {"input": [T, K], "weight": [E, N, K], "grad_output": [T, N]}[role]
    with pytest.raises((RuntimeError, TypeError)) as raised:
        layer(rows(T, K).requires_grad_(), torch.tensor(SPLITS)).sum().backward()
    assert str(raised.value).startswith(expected.format(f"Recipe: {role}", shape)[:60])


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("input", "fprop cannot multiply input in float32 without scales and weight in bfloat16"),
        ("weight", "fprop cannot multiply input in bfloat16 without scales and weight in float32"),
        ("grad_output", "dgrad cannot multiply grad_output in float32 without scales and weight"),
    ],
)
@pytest.mark.parametrize("kind", ["layer", "mlp"])
def test_operands_of_two_dtypes(kind: str, role: str, expected: str) -> None:
    recipe = Recipe(**{role: Format(quantize=lambda t, offs, layouts: t.float())})
    module = layer_of(recipe) if kind == "layer" else mlp_of(recipe)
    arguments = (torch.tensor(SPLITS),) if kind == "layer" else routing_of(T)
    with pytest.raises(RuntimeError, match=f"Recipe: {expected}"):
        module(rows(T, K).requires_grad_(), *arguments).float().sum().backward()


def test_two_recipes_of_one_name() -> None:
    """Equal options do not make them one: not in a comparison, and not in a compiled graph."""

    def make() -> Any:
        @dataclass(frozen=True, repr=False)
        class Mine(Recipe):
            pass

        return Mine

    one, other = make()(), make()(weight=Format(quantize=to_64ths))
    assert one != make()()
    assert one != other
    torch.manual_seed(0)
    layers = [layer_of(one), layer_of(other)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, call = rows(T, K), call_of(lambda layer, x: layer(x, torch.tensor(SPLITS)), compiled=True)
    for layer in layers:
        assert_same_bits(call(layer, x), layer(x, torch.tensor(SPLITS)))


def test_a_state_for_delayed_formats() -> None:
    delayed = DelayedScaling()
    own = Recipe(delayed.input, delayed.weight, delayed.grad_output)
    with pytest.raises(ValueError, match="only the recipe DelayedScaling says how the scales"):
        layer_of(own)


@pytest.mark.parametrize("scaled", [True, False])
def test_columnwise_in_the_wrong_order(device: str, scaled: bool) -> None:
    """It is noticed where the weight is square, too, and every layer goes on after that."""

    def turned(w: Tensor, offs: Tensor | None, layouts: Layouts) -> Operands:
        if not scaled:
            return Operands(w, None, w.mT.contiguous())
        q, scale, q_t = ops.quantize_weight(w)
        return Operands(q, scale, q_t, scale)

    def right(w: Tensor, offs: Tensor | None, layouts: Layouts) -> Operands:
        made = turned(w, offs, layouts)
        assert isinstance(made.columnwise, Tensor)
        return made._replace(columnwise=made.columnwise.mT)

    given = Float8BlockScaling() if scaled else Recipe()
    x, splits = torch.randn(8, 64, device=device, requires_grad=True), [3, 5]
    for function, is_right in ((turned, False), (right, True)):
        recipe = Recipe(given.input, Format(quantize=function), given.grad_output)
        layer = GroupedLinear(2, 64, 64, recipe=recipe).to(device)
        if is_right:
            layer(x, splits).sum().backward()
        else:
            with pytest.raises(RuntimeError, match=r"turned: columnwise must be \[E, N, K\]"):
                layer(x, splits)
    flat = GroupedLinear(2, 64, 64, recipe=recipe).to(device)
    nn.init.zeros_(flat.weight)  # says nothing about the order
    flat(x, splits).sum().backward()
