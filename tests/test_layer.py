# SPDX-License-Identifier: Apache-2.0
"""The layer's forward and backward against the reference.

T rows, E groups, K in_features, N out_features.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    grouped_linear,
    ops,
)
from support import reference
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits, bits, tail_is_zero, within
from support.groups import GROUPS, Groups
from support.recipes import MORE_RECIPES, scheme_of, state_for
from support.saved import saved_tensors
from support.tensors import BF16, DTYPES, FP16, FP32, rows, weight
from support.tolerances import rounded, tolerance

RECIPES = pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
SMALL = Groups((3, 0, 130, 7), 147, K=144, N=80)  # an empty group, and a tail of 7 rows


def run(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    m_splits: Any,
    dy: Tensor,
    recipe: Recipe | None,
    device: str,
) -> list[Tensor]:
    """y, dx, dw, and db where there is a bias, on CPU."""
    leaves = [t.detach().to(device).requires_grad_() for t in (x, w, b) if t is not None]
    bias = leaves[2] if b is not None else None
    state = state_for(recipe, len(w), device)
    y = grouped_linear(leaves[0], leaves[1], m_splits, bias, recipe, state)
    return [t.cpu() for t in (y.detach(), *torch.autograd.grad(y, leaves, dy.to(device)))]


def check_layer(
    groups: Groups, dtype: torch.dtype, recipe: Recipe | None, device: str, has_bias: bool
) -> None:
    """Forward and backward are products of the quantized operands, summed in float32."""
    x, dy = rows(groups, groups.K, dtype), rows(groups, groups.N, dtype)
    w = weight(groups, dtype)
    b = torch.randn(groups.E, groups.N).to(dtype) if has_bias else None
    offs = groups.offs()
    actual = run(x, w, b, torch.tensor(groups.m_splits, device=device), dy, recipe, device)

    operands = reference.operands(x, w, offs, dy, scheme_of(recipe, groups.E))
    magnitudes = reference.Operands(*(t.abs() for t in operands))
    expected = reference.layer(operands, b, offs, dy)
    magnitude = reference.layer(magnitudes, None if b is None else b.abs(), offs, dy.abs())
    depths = (groups.K, groups.N, max(groups.m_splits), max(groups.m_splits))
    names = ("y", "dx", "dw", "db")
    for name, a, e, m, depth in zip(names, actual, expected, magnitude, depths, strict=False):
        assert a.dtype == dtype
        # FP8 tensor cores truncate sums: see test_mm.scaled_tolerance
        scaled = name != "db" and not isinstance(recipe, MXFP8BlockScaling | None)
        allowed = rounded(e, 2.0**-11 * m, dtype) if scaled else tolerance(e, m, depth, dtype)
        assert within(a, e, allowed), name
    assert tail_is_zero(actual[0], groups)
    assert tail_is_zero(actual[1], groups)
    for e, size in enumerate(groups.m_splits):
        for gradient in actual[2:]:
            assert size or not bits(gradient[e]).any()


@RECIPES
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_layer(groups: Groups, recipe: Recipe | None, device: str) -> None:
    check_layer(groups, BF16, recipe, device, has_bias=True)


@RECIPES
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_dtypes(dtype: torch.dtype, recipe: Recipe | None, device: str) -> None:
    check_layer(SMALL, dtype, recipe, device, has_bias=True)
    check_layer(SMALL, dtype, recipe, device, has_bias=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["block", "current", "current_e5m2", "mxfp8"])
def test_recipes_are_near_the_exact_product(name: str, dtype: torch.dtype, device: str) -> None:
    """Normal numbers in e4m3 are off by at most 2^-4 each; over a sum that is 4% of its norm.

    In e5m2, which gradients may have, they are off by at most 2^-3.
    """
    groups = Groups((100, 0, 120, 80), 300, K=256, N=384)
    x, dy, w = rows(groups, 256, dtype), rows(groups, 384, dtype), weight(groups, dtype)
    actual = run(x, w, None, list(groups.m_splits), dy, MORE_RECIPES[name], device)
    expected = reference.layer(reference.Operands(x, x, w, dy, dy, w), None, groups.offs(), dy)
    for a, e in zip(actual, expected, strict=False):
        assert (a.double() - e).norm() < (0.07 if name == "current_e5m2" else 0.04) * e.norm()


@RECIPES
@pytest.mark.parametrize(("dtype", "other"), [(BF16, FP32), (FP32, BF16)], ids=str)
def test_bias_of_another_dtype(
    dtype: torch.dtype, other: torch.dtype, recipe: Recipe | None, device: str
) -> None:
    x, dy = rows(SMALL, SMALL.K, dtype), rows(SMALL, SMALL.N, dtype)
    w, b = weight(SMALL, dtype), torch.randn(SMALL.E, SMALL.N).to(other)
    *actual, db = run(x, w, b, list(SMALL.m_splits), dy, recipe, device)
    *expected, db_cast = run(x, w, b.to(dtype), list(SMALL.m_splits), dy, recipe, device)
    assert_all_same_bits(actual, expected)
    assert db.dtype == other
    assert_same_bits(db.to(BF16), db_cast.to(BF16))  # one float32 sum, rounded once to each


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_recipe_is_a_loop_of_linears(dtype: torch.dtype) -> None:
    layer = GroupedLinear(SMALL.E, SMALL.K, SMALL.N, dtype=dtype)
    x = rows(SMALL, SMALL.K, dtype)
    y = layer(x, torch.tensor(SMALL.m_splits))
    for e, group in enumerate(reference.groups(SMALL.offs(), SMALL.T)):
        if group.stop > group.start:
            assert_same_bits(y[group], linear(x[group], layer.weight[e], layer.bias[e]))


@RECIPES
def test_leading_dimensions(recipe: Recipe | None, device: str) -> None:
    layer = GroupedLinear(2, 16, 32, recipe=recipe, device=device)
    x, m_splits = torch.randn(3, 4, 16, device=device), torch.tensor([5, 6], device=device)
    flat = layer(x.flatten(0, 1), m_splits)
    assert_same_bits(layer(x, m_splits), flat.reshape(3, 4, 32))
    assert_same_bits(layer(x.transpose(0, 1), m_splits), layer(x.transpose(0, 1).clone(), m_splits))
    assert_same_bits(
        layer(x[0, 0], torch.tensor([1, 0], device=device)), layer(x[0, :1], [1, 0])[0]
    )


FORMS_OF_M_SPLITS: dict[str, Callable[[str], Any]] = {
    "list": lambda device: [4, 0, 3],
    "tuple": lambda device: (4, 0, 3),
    "on_cpu": lambda device: torch.tensor([4, 0, 3]),
    "int32": lambda device: torch.tensor([4, 0, 3], dtype=torch.int32, device=device),
    "strided": lambda device: torch.tensor([[4, 1], [0, 1], [3, 1]], device=device)[:, 0],
}


@RECIPES
@pytest.mark.parametrize("form", FORMS_OF_M_SPLITS)
def test_every_form_of_m_splits(form: str, recipe: Recipe | None, device: str) -> None:
    layer = GroupedLinear(3, 16, 32, recipe=recipe, device=device)
    x = torch.randn(9, 16, device=device)
    expected = layer(x, torch.tensor([4, 0, 3], device=device))
    assert_same_bits(layer(x, FORMS_OF_M_SPLITS[form](device)), expected)


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        *(pytest.param(recipe, False, id=name) for name, recipe in MORE_RECIPES.items()),
        *(
            pytest.param(MORE_RECIPES[name], True, id=f"{name}-compiled")
            for name in ("none", "block_exact", "current_e5m2", "delayed")
        ),
    ],
)
def test_a_weight_stored_as_its_transpose(
    compiled: bool, recipe: Recipe | None, device: str
) -> None:
    """The same numbers; where scales are of squares it is read as it is stored.

    Its gradient comes out in its own layout, so that nothing copies it, except in e5m2: the product
    takes that on one side only.
    """
    E, T, N, K = 3, 40, 144, 208
    x = torch.randn(T, K, dtype=BF16, device=device)
    stored = torch.randn(E, K, N, dtype=BF16, device=device)
    m_splits = torch.tensor([10, 0, 25], device=device)
    delayed = isinstance(recipe, DelayedScaling)
    dy_dtype = torch.float8_e5m2 if delayed else getattr(recipe, "gradient_dtype", None)
    call = torch.compile(grouped_linear, backend="aot_eager") if compiled else grouped_linear
    results, calls = [], Calls()
    for transposed in (True, False):
        x_, w = x.clone().requires_grad_(), stored.clone().requires_grad_()
        w_ENK = w.transpose(1, 2) if transposed else w.transpose(1, 2).contiguous()
        layouts: list[tuple[int, ...]] = []
        w_ENK.register_hook(lambda dw, layouts=layouts: layouts.append(dw.stride()))
        with calls if transposed and not compiled else nullcontext():
            y = call(x_, w_ENK, m_splits, None, recipe, state_for(recipe, E, device))
        y.backward(x[:, :N])
        assert (layouts == [w_ENK.stride()]) == (not transposed or dy_dtype != torch.float8_e5m2)
        results.append((y, x_.grad, w.grad))
        with torch.no_grad():
            y = grouped_linear(x, w_ENK, m_splits, None, recipe, state_for(recipe, E, device))
        assert_same_bits(y, results[-1][0])
        with saved_tensors() as kept:  # for wgrad alone
            grouped_linear(x, w_ENK, m_splits, None, recipe, state_for(recipe, E, device))
        assert not any(t.dim() == 3 and t.numel() == stored.numel() for t in kept)
    (*transposed, transposed_dw), (*copied, copied_dw) = results
    torch_multiplies = recipe is None and device == "cpu"  # some CPUs add in another order then
    for actual, expected in zip(transposed, copied, strict=True):
        if torch_multiplies:
            torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=0.1)
        else:
            assert_same_bits(actual, expected)
    if torch_multiplies:
        torch.testing.assert_close(transposed_dw, copied_dw, rtol=2.0**-7, atol=0.1)
    elif delayed or getattr(recipe, "power_of_two_scales", True):
        assert_same_bits(transposed_dw, copied_dw)
    else:  # a sum is scaled by one side and then the other
        torch.testing.assert_close(transposed_dw, copied_dw, rtol=2.0**-7, atol=1e-3)
    if not compiled and isinstance(recipe, Float8BlockScaling):
        assert calls.counts["quantize_weight rowwise columnwise"] == 1


def test_a_transposed_operand_gets_its_gradient_transposed(device: str) -> None:
    """That of the op which is differentiable by itself."""
    x, stored = torch.randn(9, 32, dtype=BF16), torch.randn(2, 32, 48, dtype=BF16)
    offs = torch.tensor([4, 7], dtype=torch.int32)
    gradients = []
    for w in (stored.mT, stored.mT.contiguous()):
        w_ENK = w.to(device).requires_grad_()
        y = ops.grouped_mm(x.to(device), w_ENK.mT, offs.to(device))
        gradients += torch.autograd.grad(y, w_ENK, y.detach())
        assert gradients[-1].stride() == w_ENK.stride()
    assert_same_bits(*gradients)


@RECIPES
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_diverging_row_shows(bad: float, recipe: Recipe | None, device: str) -> None:
    """A number that is not finite surfaces in its row's output, and in no other row's."""
    x, w = rows(SMALL, SMALL.K, FP32), weight(SMALL, FP32)
    dy = torch.randn(SMALL.T, SMALL.N)
    x[5, 3] = bad
    dy[1, 2] = bad
    y, dx, dw = run(x, w, None, SMALL.m_splits, dy, recipe, device)
    for t, row in ((y, 5), (dx, 1)):
        spoiled = ~t.isfinite().all(1)
        assert spoiled.nonzero().flatten().tolist() == [row]
        kept = t is dx and recipe in (MORE_RECIPES["delayed"], MORE_RECIPES["current_e5m2"])
        assert recipe is None or kept or t[row].isnan().all()  # e5m2 keeps an infinity
    assert not dw[0, 2].isfinite().any()  # row 1 is of group 0
    assert not dw[2, :, 3].isfinite().any()  # row 5 is of group 2
    dw[0, 2], dw[2, :, 3] = 0, 0
    assert dw.isfinite().all()


# --- what is computed and kept -------------------------------------------------------------------


def work(recipe: Recipe | None, needed: str, backward: bool = True) -> dict[str, int]:
    x, w, b = torch.randn(7, 16), torch.randn(2, 32, 16), torch.randn(2, 32)
    for name, t in (("x", x), ("w", w), ("b", b)):
        t.requires_grad_(name in needed)
    with Calls() as calls:
        y = grouped_linear(x, w, [3, 4], b, recipe, state_for(recipe, 2, "cpu"))
        if backward:
            y.backward(torch.randn_like(y))
    for name, t in (("x", x), ("w", w), ("b", b)):
        assert (t.grad is not None) == (backward and name in needed)
    calls.counts.pop("splits_to_offsets", None)
    return dict(calls.counts)


def work_of_per_group_scaling(op: str, weight_op: str) -> dict[str, int]:
    return {
        f"{op} rowwise columnwise": 1,
        f"{weight_op} columnwise": 1,
        "grouped_scaled_mm": 2,
        f"{op} rowwise columnwise bias_grad": 1,
        "grouped_scaled_mm_wgrad": 1,
    }


# recipe, the inputs that need a gradient, and the ops that run
WORK: list[tuple[str, str, dict[str, int]]] = [
    ("none", "xwb", {"grouped_mm": 2, "grouped_mm_wgrad": 1, "grouped_bias_grad": 1}),
    ("none", "x", {"grouped_mm": 2}),
    ("none", "w", {"grouped_mm": 1, "grouped_mm_wgrad": 1}),
    ("none", "b", {"grouped_mm": 1, "grouped_bias_grad": 1}),
    (
        "block",
        "xwb",
        {
            "block_scaled_linear columnwise_x columnwise_w": 1,
            "block_scaled_linear_grad x_t w_t bias_grad": 1,
        },
    ),
    ("block", "x", {"block_scaled_linear columnwise_w": 1, "block_scaled_linear_grad w_t": 1}),
    ("block", "w", {"block_scaled_linear columnwise_x": 1, "block_scaled_linear_grad x_t": 1}),
    ("block", "b", {"block_scaled_linear": 1, "grouped_bias_grad": 1}),
    (
        "block_bf16_wgrad",
        "xwb",
        {
            "block_scaled_linear columnwise_w": 1,
            "group_quantize rowwise bias_grad": 1,
            "grouped_scaled_mm": 1,
            "grouped_mm_wgrad": 1,
        },
    ),
    ("block_bf16_wgrad", "w", {"block_scaled_linear": 1, "grouped_mm_wgrad": 1}),
    (
        "current",
        "xwb",
        work_of_per_group_scaling("group_quantize_current", "quantize_weight_current"),
    ),
    (
        "delayed",
        "xwb",
        work_of_per_group_scaling("group_quantize_delayed", "quantize_weight_delayed"),
    ),
    (
        "mxfp8",
        "xwb",
        {
            "group_round_mx rowwise columnwise": 2,  # a weight's, where a mode looks
            "grouped_mm": 2,
            "group_round_mx rowwise columnwise bias_grad": 1,
            "grouped_mm_wgrad": 1,
        },
    ),
]


@pytest.mark.parametrize(("recipe", "needed", "ops"), WORK)
def test_only_what_is_needed_is_computed(recipe: str, needed: str, ops: dict[str, int]) -> None:
    assert work(MORE_RECIPES[recipe], needed) == ops


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_quantizes_rowwise_only(mode: Any) -> None:
    with mode():
        assert work(None, "xwb", backward=False) == {"grouped_mm": 1}
        assert work(Float8BlockScaling(), "xwb", backward=False) == {"block_scaled_linear": 1}
        assert work(MORE_RECIPES["current"], "xwb", backward=False) == {
            "group_quantize_current rowwise": 1,
            "quantize_weight_current": 1,
            "grouped_scaled_mm": 1,
        }


@RECIPES
def test_inference_equals_training_and_saves_nothing(recipe: Recipe | None) -> None:
    layer = GroupedLinear(2, 16, 32, recipe=recipe)
    x = torch.randn(7, 16)
    with saved_tensors() as saved:
        training = layer(x, [3, 4])
        assert saved
        saved.clear()
        with torch.no_grad():
            assert_same_bits(layer(x, [3, 4]), training)
        with torch.inference_mode():
            assert_same_bits(layer(x, [3, 4]), training)
    assert not saved


@RECIPES
def test_saved_tensors_are_few(recipe: Recipe | None) -> None:
    """In FP8 the input is kept as columns only, each group padded to 128 rows."""
    groups = Groups((128, 128), 256, K=256, N=16)
    layer = GroupedLinear(2, 256, 16, bias=False, recipe=recipe)
    x = rows(groups, 256, FP32).requires_grad_()
    with saved_tensors() as saved:
        layer(x, groups.m_splits)
    largest = max(t.nbytes for t in saved)
    high, low = x.nbytes, x.numel()
    if recipe is None:
        assert largest == high
    elif isinstance(recipe, MXFP8BlockScaling) or recipe is MORE_RECIPES["block_bf16_wgrad"]:
        assert largest == 2 * low  # as bfloat16
    else:
        assert largest <= low * (256 + 127 * 2) / 256


# --- autocast ------------------------------------------------------------------------------------


@RECIPES
def test_autocast(recipe: Recipe | None, device: str) -> None:
    """As nn.Linear: computes in the autocast dtype, gradients arrive in the parameters' dtypes."""
    layer = GroupedLinear(SMALL.E, SMALL.K, SMALL.N, recipe=recipe, device=device)
    layer.weight_state = state_for(recipe, SMALL.E, device)
    x = rows(SMALL, SMALL.K, FP32).to(device).requires_grad_()
    dy = torch.randn(SMALL.T, SMALL.N, device=device).bfloat16()
    with torch.autocast(device, dtype=BF16):
        y = layer(x, SMALL.m_splits)
    assert y.dtype == BF16
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    w = layer.weight if recipe else layer.weight.bfloat16()  # a quantizer reads any dtype
    by_hand = run(x.bfloat16(), w, layer.bias.bfloat16(), SMALL.m_splits, dy, recipe, device)
    for actual, expected in zip((y.detach(), dx, dw, db), by_hand, strict=True):
        assert_same_bits(actual.cpu().to(expected.dtype), expected)
    assert {t.dtype for t in (dx, dw, db)} == {FP32}


def test_autocast_leaves_float64_alone() -> None:
    layer = GroupedLinear(SMALL.E, SMALL.K, SMALL.N)
    with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="got float64"):
        layer(torch.randn(SMALL.T, SMALL.K, dtype=torch.float64), SMALL.m_splits)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_of_low_precision_inputs(dtype: torch.dtype) -> None:
    layer, x = GroupedLinear(2, 16, 32), torch.randn(7, 16)
    expected = copy.deepcopy(layer).to(dtype)(x.to(dtype), [3, 4])
    with torch.autocast("cpu", dtype=dtype):
        for given in (x.to(dtype), x):
            assert_same_bits(layer(given, [3, 4]), expected)
        with torch.autocast("cpu", enabled=False):
            inside = layer(x, [3, 4])
    assert_same_bits(inside, layer(x, [3, 4]))


@pytest.mark.parametrize("name", ["block", "current", "delayed", "mxfp8"])
def test_weight_dtype_may_differ_under_a_recipe(name: str) -> None:
    """Master weights in float32 with bf16 activations: gradients in float32, rounded never."""
    x, w, dy = rows(SMALL, SMALL.K, BF16), weight(SMALL, FP32), rows(SMALL, SMALL.N, BF16)
    recipe = MORE_RECIPES[name]
    y, dx, dw = run(x, w, None, SMALL.m_splits, dy, recipe, "cpu")
    assert (y.dtype, dx.dtype, dw.dtype) == (BF16, BF16, FP32)
    operands = reference.operands(x, w, SMALL.offs(), dy, scheme_of(recipe, SMALL.E))
    expected = reference.layer(operands, None, SMALL.offs(), dy)
    magnitudes = reference.Operands(*(t.abs() for t in operands))
    magnitude = reference.layer(magnitudes, None, SMALL.offs(), dy.abs())
    assert within(dw, expected.dw, rounded(expected.dw, 2.0**-11 * magnitude.dw, FP32))


# --- its module ----------------------------------------------------------------------------------


def test_initialisation_is_that_of_linear() -> None:
    layer = GroupedLinear(4, 64, 256)
    bound = 64**-0.5
    for p in layer.parameters():
        assert p.abs().max() <= bound
        # 1024 or more draws come within 1% of the bound, and their mean within a few errors of 0
        assert p.abs().max() > 0.99 * bound
        assert p.mean().abs() < 4 * bound / (3 * p.numel()) ** 0.5
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_configuration_is_read_only() -> None:
    layer, mlp = GroupedLinear(3, 16, 32, recipe=Float8BlockScaling()), GroupedMLP(3, 16, 32)
    assert (layer.num_experts, layer.in_features, layer.out_features) == (3, 16, 32)
    assert layer.recipe == Float8BlockScaling()
    assert (mlp.num_experts, mlp.hidden_size, mlp.intermediate_size) == (3, 16, 32)
    for one in (layer, mlp):
        with pytest.raises(AttributeError, match="recipe"):
            one.recipe = None


@RECIPES
def test_meta_device(recipe: Recipe | None) -> None:
    torch.manual_seed(5)
    expected = GroupedLinear(3, 16, 32, recipe=recipe)
    layer = GroupedLinear(3, 16, 32, recipe=recipe, device="meta")
    x, m_splits = torch.randn(7, 16), torch.tensor([3, 0, 4])
    assert layer(x.to("meta"), m_splits.to("meta")).is_meta
    layer.reset_parameters()  # nothing to draw yet
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    assert_same_bits(layer(x, m_splits), expected(x, m_splits))
    assert all(p.requires_grad for p in layer.parameters())
