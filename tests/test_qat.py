# SPDX-License-Identifier: Apache-2.0
"""Weights that learn in MXFP4: multiplied as the same weight that is frozen in MXFP4.

T rows, E groups, K in_features, N out_features.
"""

import copy
import io
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grouped_linear import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    Recipe,
    SwiGLU,
    convert,
    grouped_linear,
    ops,
    te,
)
from grouped_linear.contrib import fake_quantize, watch
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Format
from support import gpt_oss, reference
from support.compare import assert_same_bits
from support.hugging_face import tiny
from support.layers import through_pickle
from support.tensors import BF16, DTYPES, FP32

#: A recipe that learns in MXFP4, and the recipe of a layer that is frozen in it.
RECIPES: dict[str, tuple[Recipe, Recipe | None]] = {
    "fp8": (Float8BlockScaling(qat="mxfp4"), Float8BlockScaling()),
    "fp8_exact": (
        Float8BlockScaling(False, 0.5, wgrad=BF16, qat="mxfp4"),
        Float8BlockScaling(False, 0.5, wgrad=BF16),
    ),
    "fp8_requantized": (
        Float8BlockScaling(requantize_weights=True, qat="mxfp4"),
        Float8BlockScaling(),
    ),
    "16_bits": (Recipe(weight=Format(qat="mxfp4")), None),
}


QAT = Float8BlockScaling(qat="mxfp4")
GPT_OSS = SwiGLU(1.702, 1.0, 7.0, interleaved=True)


def pairs(device: str, dtype: torch.dtype, of: str, **options: Any) -> tuple[Any, Any]:
    """A layer that learns, and one that is frozen in MXFP4 with the same numbers."""
    learns, frozen = RECIPES[of]
    kind = options.pop("kind", GroupedLinear)
    torch.manual_seed(3)
    layer: nn.Module = kind(3, 96, 160, recipe=learns, dtype=dtype, **options).to(device)
    for name in ("weights", "cache_weights"):
        options.pop(name, None)
    other = kind(3, 96, 160, recipe=frozen, dtype=dtype, weights="mxfp4", **options).to(device)
    with torch.no_grad():
        for p in layer.parameters():  # scales of several powers of two in a block
            if p.dim() == 3:
                p.mul_(torch.exp2(torch.arange(p.size(1), device=device) % 7 - 3)[:, None])
    state = {name: t.detach().clone() for name, t in layer.state_dict().items()}
    other.load_state_dict(state)
    return layer, other


def results(layer: nn.Module, device: str, dtype: torch.dtype, **arguments: Any) -> list[Tensor]:
    """y and dx of a call."""
    torch.manual_seed(4)
    T, in_features, out_features = 300, 96, 160 if isinstance(layer, GroupedLinear) else 96
    x = torch.randn(T, in_features).to(dtype).to(device).requires_grad_()
    dy = torch.randn(T, out_features).to(dtype).to(device)
    if isinstance(layer, GroupedLinear):
        y = layer(x, torch.tensor([170, 0, 130], device=device), **arguments)
    else:
        weights, experts = torch.rand(T, 3).topk(2)
        y = layer(x, weights.to(device), experts.to(device))
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad]


STORED: list[dict[str, Any]] = [{}, {"weights": "both"}, {"cache_weights": True}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("of", "options"), [*itertools.product(RECIPES, STORED)], ids=str)
def test_as_frozen(device: str, dtype: torch.dtype, of: str, options: dict[str, Any]) -> None:
    layer, frozen = pairs(device, dtype, of, **options)
    first = {"is_first_microbatch": True} if "cache_weights" in options else {}
    actual = results(layer, device, dtype, **first)
    for a, e in zip(actual, results(frozen, device, dtype), strict=True):
        assert_same_bits(a, e)
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("of", RECIPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "activation": GPT_OSS}, {"lora": Lora(4)}],
    ids=["plain", "gpt_oss", "lora"],
)
def test_experts_as_frozen(device: str, of: str, options: dict[str, Any]) -> None:
    layer, frozen = pairs(device, BF16, of, kind=GroupedMLP, **options)
    actual = results(layer, device, BF16)
    for a, e in zip(actual, results(frozen, device, BF16), strict=True):
        assert_same_bits(a, e)


@pytest.mark.parametrize("of", ["fp8", "16_bits"])
def test_compiled(device: str, of: str) -> None:
    layer, _ = pairs(device, BF16, of, kind=GroupedMLP)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    expected = results(layer, device, BF16)
    for a, e in zip(results(compiled, device, BF16), expected, strict=True):
        assert_same_bits(a, e)


@pytest.mark.parametrize("of", ["fp8", "16_bits"])
def test_gradient_is_straight_through(device: str, of: str) -> None:
    """The weight's gradient is that of the layer without qat: wgrad does not read the weight."""
    layer, _ = pairs(device, BF16, of)
    plain = GroupedLinear(3, 96, 160, recipe=RECIPES[of][1], dtype=BF16).to(device)
    plain.load_state_dict(layer.state_dict())
    for each in (layer, plain):
        results(each, device, BF16)
    assert_same_bits(layer.weight.grad, plain.weight.grad)


def turned(w: Tensor) -> Tensor:
    return w.mT.contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_weight(device: str, dtype: torch.dtype) -> None:
    """A weight that is stored as [E, K, N] has the numbers of one that is not."""
    w = torch.randn(3, 272, 160).to(dtype).to(device)
    made = ops.quantize_weight(w, mxfp4_dim=-1)
    of_turned = ops.quantize_weight(turned(w), mxfp4_dim=-2)
    assert made.q is not None
    assert made.q_t is not None
    for a, e in zip(of_turned, (made.q_t, turned(made.scale), made.q), strict=True):
        assert a is not None
        assert_same_bits(a, e)
    options = {"recipe": RECIPES["fp8"][0], "bias": False, "dtype": dtype}
    layer = GroupedLinear(3, 160, 272, **options).to(device)
    x, splits = torch.randn(40, 160).to(dtype).to(device), [10, 20, 10]
    ys = []
    for weight in (w, turned(w).mT):
        layer.weight = nn.Parameter(weight)
        ys.append(layer(x, splits))
    assert_same_bits(*ys)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_special(device: str, dtype: torch.dtype, dim: int) -> None:
    """Blocks that are not finite, of zeros, with every tie, far below others, at the limits."""
    w = torch.randn(2, 160, 160).to(dtype)
    flat = w.view(-1)
    flat[3], flat[330], flat[1000:1064] = torch.inf, -torch.nan, -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 6.5, 7.5])
    flat[4000:4400] = torch.cat([ties, -ties]).repeat(20).to(dtype)
    w[1, :, 32:64] *= torch.exp2(-torch.arange(160.0) / 6).to(dtype)[:, None]
    w[1, 128:, :] = 0
    w[1, 128, 5], w[1, 129, 7] = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    expected = reference.quantize_weight_in_mxfp4(w, dim)
    for a, e in zip(ops.quantize_weight(w.to(device), mxfp4_dim=dim), expected, strict=True):
        assert a is not None
        if a.dtype == reference.E4M3:
            nan = e.float().isnan()
            assert torch.equal(a.cpu().float().isnan(), nan)
            assert_same_bits(a.cpu()[~nan], e[~nan])
        else:
            assert_same_bits(a.cpu(), e)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("transposed", [False, True])
def test_adam_writes_what_it_reads(device: str, dtype: torch.dtype, transposed: bool) -> None:
    """The optimizer's step leaves the numbers that quantizing its result gives."""
    recipe = RECIPES["fp8"][0]
    recipe = recipe.transposed if transposed else recipe
    w = torch.randn(2, 160, 288).to(dtype).to(device)
    p = nn.Parameter(GroupedTensorWithMaster.quantize(w.clone(), recipe))
    plain = nn.Parameter(w.clone())
    optimizers = [torch.optim.AdamW([q], lr=0.05, fused=True) for q in (p, plain)]
    for _ in range(3):
        grad = torch.randn_like(w)
        for q, optimizer in zip((p, plain), optimizers, strict=True):
            q.grad = grad.clone()
            optimizer.step()
    assert_same_bits(p.dequantize(), plain.detach())
    expected = ops.quantize_weight(plain.detach(), mxfp4_dim=-2 if transposed else -1)
    for a, e in zip((p.q, p.scale, p.q_t), expected, strict=True):
        assert e is not None
        assert_same_bits(a, e)


def test_other_ways_to_a_layer(device: str) -> None:
    """A copy, a pickle, checkpointing, a weight of each expert, autocast."""
    layer, frozen = pairs(device, FP32, "fp8", weights="both")
    y, dx = results(layer, device, FP32)
    for other in (copy.deepcopy(layer), through_pickle(layer)):
        for a, e in zip(results(other, device, FP32), (y, dx), strict=True):
            assert_same_bits(a, e)
    x = torch.randn(300, 96, device=device, requires_grad=True)
    splits = torch.tensor([170, 0, 130], device=device)
    again = checkpoint(layer, x, splits, use_reentrant=False)
    assert_same_bits(again, layer(x, splits))
    one = te.GroupedLinear(3, 96, 160, params_dtype=FP32, recipe=RECIPES["fp8"][0]).to(device)
    state = {f"weight{e}": w for e, w in enumerate(layer.weight.dequantize())}
    one.load_state_dict(state | {f"bias{e}": b for e, b in enumerate(layer.bias.detach())})
    assert_same_bits(one(x, [170, 0, 130]), again)
    with torch.autocast(torch.device(device).type, BF16):
        a, e = (each(x, splits) for each in (layer, frozen))
    assert_same_bits(a, e)


def test_fake_quantize(device: str) -> None:
    """In 16 bits a fake-quantized weight is the numbers in MXFP4."""
    _, frozen = pairs(device, FP32, "16_bits")
    for of in ("fp8", "16_bits"):
        fake = fake_quantize(RECIPES[of][0], roles=("weight",))
        layer = GroupedLinear(3, 96, 160, recipe=fake).to(device)
        layer.load_state_dict(pairs(device, FP32, of)[0].state_dict())
        for a, e in zip(results(layer, device, FP32), results(frozen, device, FP32), strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Format(qat="fp4"), "Format: qat must be None or 'mxfp4'"),
        (lambda: Format(qat="mxfp4", qat_dim=0), "qat_dim is -1, or with qat -2, got 0"),
        (lambda: Format(qat_dim=-2), "qat_dim is -1, or with qat -2, got -2"),
        (
            lambda: GroupedLinear(2, 64, 64, recipe=RECIPES["16_bits"][0].transposed),
            "GroupedLinear: qat_dim is convert's, for weights kept as [E, K, N]",
        ),
        (
            lambda: Recipe(Float8BlockScaling().input, Format(qat="mxfp4")),
            "Recipe: fprop cannot multiply input with scales of blocks and weight with codes of",
        ),
        (
            lambda: grouped_linear(torch.ones(3, 48), torch.ones(1, 16, 48), [3], recipe=QAT),
            "grouped_linear: in_features of weight must be a multiple of 32 with qat='mxfp4'",
        ),
        (lambda: Format(reference.E4M3, "group", qat="mxfp4"), "qat goes with scaling 'block'"),
        (lambda: Format(BF16, qat="mxfp4"), "qat goes with scaling 'block' or stands alone"),
        (lambda: Format(quantize=torch.neg, qat="mxfp4"), "without dtype and quantize"),
        (lambda: Recipe(input=Format(qat="mxfp4")), "Recipe: qat is for weight"),
        (
            lambda: GroupedLinear(2, 48, 32, recipe=Float8BlockScaling(qat="mxfp4")),
            "GroupedLinear: in_features must be a multiple of 32 with qat='mxfp4', got 48",
        ),
        (
            lambda: GroupedMLP(2, 64, 48, recipe=Recipe(weight=Format(qat="mxfp4"))),
            "GroupedMLP: intermediate_size must be a multiple of 32 with qat='mxfp4', got 48",
        ),
        (
            lambda: GroupedLinear(2, 64, 32, recipe=RECIPES["16_bits"][0], weights="mxfp4"),
            "weights='mxfp4' is frozen, so nothing learns in MXFP4",
        ),
        (
            lambda: GroupedLinear(2, 64, 32, recipe=RECIPES["fp8"][0], weights="fp8"),
            "weights='fp8' is frozen, so nothing learns in MXFP4: leave qat out of the recipe, or",
        ),
    ],
)
def test_what_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make()


def test_equal_recipes() -> None:
    recipes = [Float8BlockScaling(), Float8BlockScaling(qat="mxfp4"), Float8CurrentScaling()]
    for a, b in itertools.combinations(recipes, 2):
        assert a != b
    recipe = recipes[1]
    assert repr(recipe) == "Float8BlockScaling(qat='mxfp4')"
    assert through_pickle(recipe) == copy.deepcopy(recipe) == recipe
    assert recipe.transposed != recipe
    assert recipe.transposed.weight.qat_dim == -2
    assert recipes[0].transposed is recipes[0]


# --- models of transformers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Functions that make a model: a checkpoint in MXFP4, dequantized, or one of 16 bits."""
    of_gpt_oss = gpt_oss.write_checkpoint(tmp_path_factory.mktemp("gpt_oss"))
    return {
        "gpt_oss": partial(gpt_oss.dequantized, of_gpt_oss),
        "qwen3_moe": partial(tiny, "qwen3_moe", moe_intermediate_size=96, hidden_size=64),
    }


@pytest.mark.parametrize(("of", "weights"), itertools.product(["fp8", "16_bits"], [None, "both"]))
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_checkpoint_learns(
    checkpoints: dict[str, Any], name: str, of: str, weights: Any, device: str
) -> None:
    """The loss before the first step is that of the frozen model, to the last bit."""
    models = []
    for recipe, kept in zip(RECIPES[of], (weights, "mxfp4"), strict=True):
        torch.manual_seed(0)
        model = checkpoints[name]().to(device, BF16)
        convert(model, recipe, weights=kept)
        models.append(model)
    losses = []
    for model in models:
        ids = gpt_oss.IDS.to(device)
        found = model(input_ids=ids, labels=ids)
        found.loss.backward()
        losses.append(found.loss.detach())
    assert_same_bits(*losses)
    experts = [m for m in models[0].modules() if hasattr(m, "down_proj") and hasattr(m, "recipe")]
    assert experts
    before = [e.down_proj.detach().clone() for e in experts]
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=1e-2, fused=True)
    optimizer.step()
    with torch.no_grad():
        after = models[0](input_ids=ids, labels=ids).loss
    assert after < losses[0]
    assert not any(torch.equal(a, e.down_proj) for a, e in zip(before, experts, strict=True))


# --- beside other formats, tools and files -------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_codes_beside_any_16_bits(device: str, dtype: torch.dtype) -> None:
    """They are decoded to what they are multiplied with."""
    x = Format(dtype)
    layers = [GroupedLinear(3, 96, 160, recipe=Recipe(x, w, x)) for w in (Format(qat="mxfp4"), x)]
    with torch.no_grad():
        w = ops.dequantize_mxfp4(*ops.quantize_mxfp4(layers[0].weight), FP32)
    layers[1].load_state_dict(layers[0].state_dict() | {"weight": w})
    actual, expected = (results(layer.to(device), device, FP32) for layer in layers)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_copies_of_a_cache(device: str) -> None:
    layer, _ = pairs(device, FP32, "16_bits", cache_weights=True)
    expected = results(layer, device, FP32, is_first_microbatch=True)
    for other in (copy.deepcopy(layer), through_pickle(layer)):
        for a, e in zip(
            results(other, device, FP32, is_first_microbatch=True), expected, strict=True
        ):
            assert_same_bits(a, e)


@pytest.mark.parametrize("of", ["fp8", "16_bits"])
def test_file_of_a_parameter(of: str) -> None:
    """torch.load takes it, whatever its recipe."""
    for recipe in (RECIPES[of][0], RECIPES[of][0].transposed):
        w = nn.Parameter(GroupedTensorWithMaster.quantize(torch.randn(2, 64, 96), recipe))
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        loaded = torch.load(file)
        for a, e in zip(loaded.parts, w.parts, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                assert_same_bits(a, e)


@pytest.mark.parametrize("of", ["fp8", "16_bits"])
def test_watched(of: str) -> None:
    """Of a weight, how far its numbers in MXFP4 are from its own."""
    layer, _ = pairs("cpu", BF16, of, kind=GroupedMLP)
    watched = watch(layer)
    results(layer, "cpu", BF16)
    errors = [row.error for row in watched.read().operands if row.role == "weight"]
    assert len(errors) == 2
    assert all(0.08**2 < error < 0.14**2 for error in errors)


def test_frozen_models_learn_nothing(tmp_path: Path) -> None:
    model = gpt_oss.packed(gpt_oss.write_checkpoint(tmp_path / "gpt_oss"))
    with pytest.raises(ValueError, match=r"is frozen, so nothing learns .* \(dequantize=True\)"):
        convert(model, QAT)
