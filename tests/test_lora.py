# SPDX-License-Identifier: Apache-2.0
"""Adapters beside frozen and learning weights, compared with the same layer composed of its parts.

T tokens or rows, C experts chosen for a token, R rows sorted by expert, E experts, H features of a
token, F features inside an expert, G = 2 F or F, K in_features, N out_features, r the rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from grouped_linear import (
    Activation,
    Float8BlockScaling,
    GeGLU,
    GroupedLinear,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    Recipe,
    SquaredReLU,
    SwiGLU,
    grouped_linear,
    grouped_mlp,
    grouped_mlp_sorted,
)
from grouped_linear.autograd.low_rank import padded_factors
from grouped_linear.nn.lora import LoraWeights
from grouped_linear.ops import sort_by_expert
from grouped_linear.quantized.frozen import dequantize_blocks
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from support import reference
from support.compare import assert_all_same_bits, assert_same_bits, outcome
from support.devices import needs_gpu
from support.errors import said
from support.layers import with_numbers_in_adapters
from support.mlp import E, F, H, near, run, truth
from support.recipes import MORE_RECIPES, RECIPES, scheme_of
from support.saved import saved_tensors
from support.tensors import BF16, DTYPES, FP16, FP32

STATELESS = {name: recipe for name, recipe in MORE_RECIPES.items() if name != "delayed"}
SCALING = 0.5
KINDS: dict[str, tuple[Activation, bool]] = {
    "plain": (SwiGLU(), False),
    "gpt_oss": (SwiGLU(alpha=1.702, beta=1.0, limit=1.5, interleaved=True), True),
    "gelu": (GeGLU(), True),
    "no_gate": (SquaredReLU(), False),
}
# Which projections have adapters.
ADAPTED = {"both": (True, True), "gate_up": (True, False), "down": (False, True)}
# Rows of the experts: none of the first, an unaligned last one.
SPLITS = [0, 37, 130, 1, 62]
EXPERTS = torch.tensor([[1, 2], [4, 4], [-1, 3], [E, 1], [2, 3]]).repeat(25, 1)

Leaves = list[Tensor | None]


def of_group(x_TK: Tensor, w_ENK: Tensor, splits: list[int]) -> Tensor:
    """y[t] = x[t] @ w[e].T in torch's operations; rows of no group are zero."""
    parts = x_TK.split([*splits, len(x_TK) - sum(splits)])
    products = [x @ w.T for x, w in zip(parts, w_ENK, strict=False)]
    return torch.cat([*products, parts[-1].new_zeros(len(parts[-1]), w_ENK.size(1))])


def adapted(x: Tensor, lora: LoraWeights | None, splits: list[int]) -> Tensor | float:
    """What an adapter adds, in the dtype of x."""
    if lora is None:
        return 0.0
    x = dropout(x, lora.dropout) if lora.dropout else x
    low = of_group(x, lora.a.to(x.dtype), splits)
    return lora.scaling * of_group(low, lora.b.to(x.dtype), splits)


def adapter(E: int, N: int, K: int, rank: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """A and B."""
    a, b = torch.randn(E, rank, K) / K**0.5, torch.randn(E, N, rank) / rank**0.5
    return [t.to(device, dtype).requires_grad_() for t in (a, b)]


def mlp_leaves(
    T: int, kind: str, which: str, device: str, dtype: torch.dtype, rank: int = 24
) -> Leaves:
    """x, gate_up_proj, down_proj, their biases or None, and the adapters' tensors or None."""
    torch.manual_seed(3)
    activation, bias = KINDS[kind]
    G = 2 * F if activation.gated else F
    shapes: list[Any] = [(T, H), (E, G, H), (E, H, F), *([(E, G), (E, H)] if bias else [None] * 2)]
    scales = (1, H**-0.5, F**-0.5, 1, 1)
    leaves: Leaves = [
        None if shape is None else (torch.randn(shape) * s).to(device, dtype).requires_grad_()
        for shape, s in zip(shapes, scales, strict=True)
    ]
    for has, (N, K) in zip(ADAPTED[which], ((G, H), (H, F)), strict=True):
        leaves += adapter(E, N, K, rank, device, dtype) if has else [None, None]
    return leaves


def adapters_of(tensors: tuple[Tensor | None, ...], drop: float = 0.0) -> dict[str, Any]:
    """The arguments that pass these."""
    names = "gate_up_lora", "down_lora"
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return {
        name: None if a is None or b is None else LoraWeights(a, b, SCALING, drop)
        for name, (a, b) in zip(names, pairs, strict=True)
    }


def composed_sorted(
    kind: str, recipe: Recipe | None, splits: list[int], drop: float = 0.0
) -> Callable[..., Tensor]:
    """The expert layer of sorted rows, one operation after the other."""
    activation, _ = KINDS[kind]

    def call(x: Tensor, w: Tensor, w2: Tensor, b: Tensor, b2: Tensor, *tensors: Tensor) -> Tensor:
        lora = adapters_of(tensors, drop)
        if lora["down_lora"] is not None and drop:  # drawn first
            factor = dropout(x.new_ones(len(x), F), drop)
        gate_up = grouped_linear(x, w, torch.tensor(splits), b, recipe)
        gate_up = gate_up + adapted(x, lora["gate_up_lora"], splits)
        h = activation.forward(gate_up.float()).to(x.dtype)
        y = grouped_linear(h, w2, torch.tensor(splits), b2, recipe)
        down = lora["down_lora"]
        if down is not None and drop:
            return y + adapted(h * factor, replace(down, dropout=0), splits)
        return y + adapted(h, down, splits)

    return call


def fused_sorted(
    kind: str, recipe: Recipe | None, splits: list[int], drop: float = 0.0, **options: Any
) -> Callable[..., Tensor]:
    """The same in one call."""
    activation, _ = KINDS[kind]

    def call(x: Tensor, w: Tensor, w2: Tensor, b: Tensor, b2: Tensor, *tensors: Tensor) -> Tensor:
        return grouped_mlp_sorted(
            x,
            splits,
            w,
            w2,
            recipe=recipe,
            gate_up_proj_bias=b,
            down_proj_bias=b2,
            activation=activation,
            **adapters_of(tensors, drop),
            **options,
        )

    return call


def in_double(results: list[Tensor]) -> list[Tensor]:
    return [t.double().cpu() for t in results]


@pytest.mark.parametrize(
    ("recipe", "kind", "which", "drop"),
    [
        *product(STATELESS, KINDS, ADAPTED, [0.0]),
        *((recipe, "plain", "both", 0.3) for recipe in ("none", "block")),
    ],
)
def test_expert_layer(recipe: str, kind: str, which: str, drop: float, device: str) -> None:
    """Outputs and every gradient are those of the parts, in float32, for every recipe.

    Rows of no expert may hold NaN. Both adapters drop features of their own input.
    """
    leaves = mlp_leaves(sum(SPLITS) + 20, kind, which, device, FP32)
    with torch.no_grad():
        leaves[0][sum(SPLITS) :] = torch.nan
    # A sum that is rounded another way may become a neighbouring FP8 number. MXFP8 multiplies in
    # bf16, the adapter's factors too.
    tolerance = {"none": 1e-5, "mxfp8": 6e-2}.get(recipe, 2e-2)
    results = []
    for make in (fused_sorted, composed_sorted):
        torch.manual_seed(5)
        results.append(run(make(kind, STATELESS[recipe], SPLITS, drop), leaves))
    near(results[0], in_double(results[1]), tolerance)
    y, dx, *_ = results[0]
    assert not y[sum(SPLITS) :].any()
    assert not dx[sum(SPLITS) :].any()


@pytest.mark.parametrize("rank", [1, 16, 40, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_materialized_weight(dtype: torch.dtype, rank: int, device: str) -> None:
    """Without a recipe: the layer of weight + scaling * B @ A in float64, tokens routed."""
    leaves = mlp_leaves(len(EXPERTS), "plain", "both", device, dtype, rank)
    scores = torch.rand(EXPERTS.shape, device=device).requires_grad_()
    experts = EXPERTS.to(device)

    def call(scores: Tensor, x: Tensor, *rest: Any) -> Tensor:
        w, w2, _, _, *tensors = rest
        return grouped_mlp(x, scores, experts, w, w2, **adapters_of(tuple(tensors)))

    def exact_call(scores: Tensor, x: Tensor, *rest: Any) -> Tensor:
        w, w2, _, _, a, b, a2, b2 = rest
        mlp = truth(EXPERTS, reference.swiglu)
        return mlp(x, scores, w + SCALING * b @ a, w2 + SCALING * b2 @ a2)

    actual = run(call, [scores, *leaves])
    of_double = [
        None if t is None else t.detach().double().cpu().requires_grad_() for t in (scores, *leaves)
    ]
    expected = run(exact_call, of_double)
    near(actual, expected, {FP32: 1e-5, BF16: 2e-2, FP16: 3e-3}[dtype])


def grads_over_quantized_base(leaves: Leaves, dy_RH: Tensor) -> list[Tensor]:
    """Outputs and gradients of x and of the adapters in float64.

    The base multiplies what the reference quantizes, the adapters what it does not. Rounded to bf16
    is what the layer writes in bf16 between its GEMMs.
    """
    x, w, w2, _, _, a, b, a2, b2 = (None if t is None else t.detach().cpu() for t in leaves)
    dy_RH = dy_RH.cpu()
    offs_E = torch.tensor(SPLITS).cumsum(0)

    def written(t: Tensor) -> Tensor:
        return t.to(BF16)

    def product(t: Tensor, w: Tensor, scheme: Any = None) -> Tensor:
        operands = reference.operands(t, w, offs_E, t, scheme)
        return of_group(operands.x_rowwise.double(), operands.weight.double(), SPLITS)

    def low(t: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled product of rank r, and what the adapter adds."""
        of_rank = written(SCALING * product(t, down))
        return of_rank, product(of_rank, up)

    scheme = scheme_of(Float8BlockScaling(), E)
    h_r, added = low(x, a, b)
    gate_up = written(product(x, w, scheme) + added)
    h = written(reference.swiglu(gate_up.double()))
    h2_r, added = low(h, a2, b2)
    y = product(h, w2, scheme) + added
    dh2_r, added = low(dy_RH, b2.mT, a2.mT)
    dh = written(product(dy_RH, w2.mT, scheme) + added)
    d_gate_up = written(reference.swiglu_grad(dh, gate_up, torch.ones(len(dh))).d_gate_up)
    dh_r, added = low(d_gate_up, b.mT, a.mT)
    dx = product(d_gate_up, w.mT, scheme) + added
    wgrad = reference.grouped_mm_wgrad
    da, db = wgrad(dh_r, x, offs_E), wgrad(d_gate_up, h_r, offs_E)
    return [y, dx, da, db, wgrad(dh2_r, h, offs_E), wgrad(dy_RH, h2_r, offs_E)]


def dequantized(t: GroupedTensorWithMaster) -> Tensor:
    return dequantize_blocks(t.q, t.scale, t.dtype)


@pytest.mark.parametrize("rank", [1, 16, 40])
def test_over_quantized_base(rank: int, device: str) -> None:
    """Over frozen FP8 weights: outputs and gradients within bf16's rounding of float64's."""
    leaves = mlp_leaves(sum(SPLITS), "plain", "both", device, BF16, rank)
    for i in (1, 2):
        leaves[i] = GroupedTensorWithMaster.quantize(leaves[i], columnwise=rank == 16)
    call = fused_sorted("plain", Float8BlockScaling(), SPLITS)
    y = call(*leaves)
    dy = torch.randn_like(y)
    learning = [t for t in leaves if t is not None and t.requires_grad]
    actual = [y, *torch.autograd.grad(y, learning, dy)]
    plain = [dequantized(t) if isinstance(t, GroupedTensorWithMaster) else t for t in leaves]
    # Rounding to bf16's 8 bits gives 1.7e-3 of the norm. Tensor cores add FP8 products with fewer
    # bits than float32 has: where bf16 then rounds otherwise, some of SwiGLU's numbers become the
    # next ones in FP8, 2^-4 of them away. On an H100 that came to 3.2e-3 to 4.9e-3.
    near(actual, grads_over_quantized_base(plain, dy), 2.5e-3 if device == "cpu" else 7e-3)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_linear_layer(drop: float, recipe: Recipe | None, device: str) -> None:
    """A layer's outputs and gradients are its base's and its adapter's, dropout included."""
    K, N, splits = 144, 80, SPLITS
    torch.manual_seed(0)
    layer = GroupedLinear(E, K, N, recipe=recipe, lora=Lora(20, 10, dropout=drop), device=device)
    with_numbers_in_adapters(layer)
    base = GroupedLinear(E, K, N, recipe=recipe, device=device)
    base.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(sum(splits) + 9, K, device=device, requires_grad=True)

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(7)
        y: Tensor = layer(x, splits)
        return y

    def parts(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(7)
        y: Tensor = base(x, splits) + adapted(x, LoraWeights(a, b, SCALING, drop), splits)
        return y

    leaves = [x, layer.weight_lora_a, layer.weight_lora_b]
    # MXFP8 multiplies in bf16, the adapter's factors too.
    tolerance = 5e-3 if isinstance(recipe, MXFP8BlockScaling) else 1e-5
    near(run(call, leaves), in_double(run(parts, leaves)), tolerance)


def test_dropout_is_of_training() -> None:
    """In evaluation nothing is dropped."""
    mlp = with_numbers_in_adapters(GroupedMLP(E, H, F, lora=Lora(8, dropout=0.5)))
    x, chosen = torch.randn(9, H), torch.rand(9, E).topk(2)
    assert not torch.equal(mlp(x, *chosen), mlp(x, *chosen))
    mlp.eval()
    assert_same_bits(mlp(x, *chosen), mlp(x, *chosen))


def learning(mlp: GroupedMLP) -> list[str]:
    return [name for name, p in mlp.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("weights", [None, "fp8", "both"])
def test_frozen_base_costs_nothing(weights: Any, device: str) -> None:
    """Only adapters learn, no weight gradient is computed, and nothing is kept for one."""
    recipe, r = Float8BlockScaling(), 8
    mlp = GroupedMLP(
        E, H, F, recipe=recipe, weights=weights, lora=Lora(r), dtype=BF16, device=device
    )
    names = [f"{w}_lora_{part}" for w in ("gate_up_proj", "down_proj") for part in "ab"]
    assert learning(mlp) == names
    x = torch.randn(50, H, device=device, dtype=BF16, requires_grad=True)
    chosen = torch.rand(50, E, device=device).topk(2)
    with saved_tensors() as kept:
        y = mlp(x, *chosen)
    of_rows = [tuple(t.shape) for t in kept if t.dim() == 2 and t.size(0) == 100]
    assert sorted(of_rows) == [(100, 16), (100, 16), (100, 2 * F)]  # h of both adapters, gate_up
    y.sum().backward()
    assert mlp.gate_up_proj.grad is None
    assert mlp.down_proj.grad is None
    assert x.grad is not None
    assert all(getattr(mlp, name).grad is not None for name in names)


# The features of what an expert layer keeps of its rows where this alone learns.
KEPT_OF_ADAPTERS = {
    "gate_up_proj_lora_a": [H, 2 * F],  # x, gate_up
    "gate_up_proj_lora_b": [16, 2 * F],  # h of rank 8, padded
    "down_proj_lora_a": [2 * F],
    "down_proj_lora_b": [16],
}
KEPT = {
    "x": [2 * F],
    "scores": [2 * F],
    "gate_up_proj": [H, 2 * F],
    "down_proj": [2 * F],
    **KEPT_OF_ADAPTERS,
}
KEPT_OF_LINEAR = {"x": [], "bias": [], "weight": [H], "weight_lora_a": [H], "weight_lora_b": [16]}
Layer = TypeVar("Layer", GroupedLinear, GroupedMLP)


def learned(layer: Layer) -> Layer:
    """The layer, with the same adapters at every call, as if they had learned."""
    torch.manual_seed(2)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.1)
    return layer


def alone(
    name: str, leaves: dict[str, Tensor], call: Callable[[], Tensor]
) -> tuple[list[Tensor], list[int], int]:
    """One's gradient, with all others and alone; the features of rows and the tensors [E, _, _]
    that are kept where it is alone.
    """
    grads: list[Tensor] = []
    for names in (leaves, [name]):
        for own, leaf in leaves.items():
            leaf.requires_grad_(own in names)
        with saved_tensors() as kept:
            y = call()
        grads += torch.autograd.grad(y.square().sum(), leaves[name])
    widths = sorted(t.size(1) for t in kept if t.dim() == 2 and t.size(1) > 2)
    return grads, widths, sum(t.dim() == 3 for t in kept)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
@pytest.mark.parametrize("name", KEPT)
def test_one_learns(name: str, recipe: Recipe | None, device: str) -> None:
    """Alone it has the gradient that it has among others, and nothing is kept for the others."""
    mlp = learned(GroupedMLP(E, H, F, recipe=recipe, lora=Lora(8, 12), device=device))
    x = torch.randn(50, H, device=device)
    scores, experts = torch.rand(50, E, device=device).topk(2)
    leaves = {"x": x, "scores": scores, **dict(mlp.named_parameters())}
    grads, kept, _ = alone(name, leaves, lambda: mlp(x, scores, experts))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
    assert kept == KEPT[name]


@pytest.mark.parametrize("name", KEPT_OF_LINEAR)
def test_one_learns_in_linear_layer(name: str, device: str) -> None:
    """The same of one layer. For a bias alone no adapter is kept."""
    layer = learned(GroupedLinear(E, H, F, lora=Lora(8, 12), device=device))
    x = torch.randn(sum(SPLITS), H, device=device)
    leaves = {"x": x, **dict(layer.named_parameters())}
    grads, kept, of_weights = alone(name, leaves, lambda: layer(x, SPLITS))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
    assert kept == KEPT_OF_LINEAR[name]
    assert of_weights == {"x": 3, "bias": 0, "weight": 0}.get(name, 2)  # W, A and B for dx


def test_gradients_in_float32(device: str) -> None:
    """Gradients of adapters in float32 are not rounded to the activations' bfloat16."""
    mlp = learned(GroupedMLP(E, H, F, lora=Lora(8, dtype=FP32), dtype=BF16, device=device))
    x, chosen = torch.randn(50, H, device=device), torch.rand(50, E, device=device).topk(2)
    mlp(x.bfloat16(), *chosen).sum().backward()
    for name in KEPT_OF_ADAPTERS:
        p = mlp.get_parameter(name)
        assert p.dtype == FP32
        assert p.grad is not None
        assert not torch.equal(p.grad, p.grad.bfloat16().float())


def test_factors_are_dense(device: str) -> None:
    """Several GEMMs read A and B: other strides are copied once."""
    a, b = torch.randn(E, H, 16).mT.to(device), torch.randn(F, 16, E).permute(2, 0, 1).to(device)
    assert all(factor.is_contiguous() for factor in padded_factors(a, b, FP32))


def test_scaling_in_graph() -> None:
    """Other scalings need no more than one graph for all of them."""
    counter = CompileCounterWithBackend("aot_eager")
    a, x = torch.randn(2, 4, 16), torch.randn(2, 16)

    def call(x: Tensor, scaling: float) -> Tensor:
        return with_adapter(a, scaling=scaling) * x

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for scaling in (1.0, 0.5, 0.25, 2.0):
        torch.testing.assert_close(compiled(x, scaling), call(x, scaling))
    assert counter.frame_count == 2  # torch makes a float a variable once it has changed


@pytest.mark.parametrize("max_rows", [None, 60])
def test_dropout_of_routed_rows(max_rows: int | None, device: str) -> None:
    """Tokens' rows drop features of h as rows that come sorted, where memory is bounded, too."""
    lora = {"down_proj": Lora(8, 12, dropout=0.4)}
    mlp = learned(GroupedMLP(E, H, F, lora=lora, device=device))
    x = torch.randn(50, H, device=device, requires_grad=True)
    scores, experts = torch.rand(50, E, device=device).topk(2)

    def routed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(4)
        y: Tensor = mlp(x, scores, experts, max_rows=max_rows)
        return y

    def composed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(4)
        bound = 100 if max_rows is None else max_rows
        choice_R, token_R, _, offs_E = (t[: bound + 1] for t in sort_by_expert(experts, E))
        splits = offs_E.clamp(max=bound).diff(prepend=offs_E.new_zeros(1))
        y_RH = scores.flatten()[choice_R, None] * mlp.forward_sorted(x[token_R], splits)
        return torch.zeros_like(x).index_add(0, token_R, y_RH)

    leaves = [x, mlp.down_proj_lora_a, mlp.down_proj_lora_b]
    near(run(routed, leaves), in_double(run(composed, leaves)), 1e-5)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
def test_ways_to_call(recipe: Recipe | None, device: str) -> None:
    """Compiled whole once for any routing, checkpointed, and in eager mode: the same bits."""
    mlp = GroupedMLP(E, H, F, recipe=recipe, lora=Lora(8, 12), dtype=BF16, device=device)
    with_numbers_in_adapters(mlp)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, fullgraph=True, backend=counter)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(40, H, device=device, dtype=BF16, requires_grad=True)
        scores, experts = torch.rand(40, E, device=device, requires_grad=True).topk(2)
        leaves = [x, scores, *(mlp.get_parameter(name) for name in learning(mlp))]
        expected = outcome(mlp(x, scores, experts), leaves)
        for call in (compiled, partial(checkpoint, mlp, use_reentrant=False)):
            assert_all_same_bits(outcome(call(x, scores, experts), leaves), expected)
    assert counter.frame_count == 1


@needs_gpu
@pytest.mark.parametrize("weights", [None, "fp8", "both"])
def test_cuda_graph(weights: Any) -> None:
    """One graph serves any routing, with the bits of eager calls."""
    mlp = GroupedMLP(
        E, H, F, recipe=Float8BlockScaling(), weights=weights, lora=Lora(8), dtype=BF16,
        device="cuda",
    )  # fmt: skip
    with_numbers_in_adapters(mlp)
    step = torch.compile(mlp, fullgraph=True, mode="reduce-overhead")
    leaves = [mlp.get_parameter(name) for name in learning(mlp)]
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(40, H, device="cuda", dtype=BF16)
        scores, experts = torch.rand(40, E, device="cuda").topk(2)
        results = []
        for call in (step, mlp):
            results.append([t.clone() for t in outcome(call(x, scores, experts), leaves)])
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)


def test_autocast(device: str) -> None:
    """Under autocast the adapter computes in its dtype, and its gradient has its own."""
    options: dict[str, Any] = {"weights": "fp8", "lora": Lora(8), "device": device}
    linear, mlp = (kind(E, H, F, **options) for kind in (GroupedLinear, GroupedMLP))
    x = torch.randn(sum(SPLITS), H, device=device)
    for layer, *given in ((linear, SPLITS), (mlp, *torch.rand(len(x), E).to(x).topk(2))):
        with_numbers_in_adapters(layer)
        with torch.autocast(device, BF16):
            y = layer(x, *given)
        assert_same_bits(y, layer(x.to(BF16), *given))
        y.sum().backward()
        for name, p in layer.named_parameters():
            assert (p.grad is not None) == ("lora" in name)
            assert p.grad is None or p.grad.dtype == FP32


def test_without_gradient() -> None:
    """Nothing is kept under no_grad, and the output is the same."""
    linear, mlp = (learned(kind(E, H, F, lora=Lora(8))) for kind in (GroupedLinear, GroupedMLP))
    x = torch.randn(sum(SPLITS), H)
    for layer, *given in ((linear, SPLITS), (mlp, *torch.rand(len(x), E).topk(2))):
        y = layer(x, *given)
        with torch.no_grad(), saved_tensors() as kept:
            assert_same_bits(layer(x, *given), y.detach())
        assert not kept


@pytest.mark.parametrize(
    ("weights", "dtype", "tolerance"),
    # In FP8 both layers' weights are rounded anew, to 4 bits: 3.6% each.
    [(None, FP32, 1e-5), (None, BF16, 2e-2), ("both", BF16, 0.1)],
)
def test_merge(weights: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Merged weights give the outputs of before, and the adapter starts anew."""
    torch.manual_seed(0)
    recipe = None if weights is None else Float8BlockScaling()
    mlp = GroupedMLP(E, H, F, recipe=recipe, weights=weights, lora=Lora(8, 16), dtype=dtype)
    with_numbers_in_adapters(mlp, std=0.1)
    x, chosen = torch.randn(90, H, dtype=dtype), torch.rand(90, E).topk(2)
    before = mlp(x, *chosen)
    mlp.merge_lora()
    assert not mlp.down_proj_lora_b.any()
    near([mlp(x, *chosen)], [before.detach().double()], tolerance)


def test_scaling_of_each() -> None:
    """Each projection's adapter has its own: the merged layer's output and gradient of x."""
    lora = {"gate_up_proj": Lora(8, 4), "down_proj": Lora(8, 24)}
    mlp = learned(GroupedMLP(E, H, F, lora=lora))
    x, chosen = torch.randn(50, H, requires_grad=True), torch.rand(50, E).topk(2)
    before = run(lambda x: mlp(x, *chosen), [x])
    mlp.merge_lora()
    near(run(lambda x: mlp(x, *chosen), [x]), in_double(before), 1e-5)


def test_merge_under_autocast() -> None:
    """The product is in float32 there, too."""
    layers = [learned(GroupedLinear(E, 64, 32, lora=Lora(8))) for _ in range(2)]
    layers[0].merge_lora()
    with torch.autocast("cpu", BF16):
        layers[1].merge_lora()
    assert_same_bits(layers[1].weight.detach(), layers[0].weight.detach())


def test_meta() -> None:
    """A layer on meta merges nothing, and starts as any other where it is then drawn."""
    mlp = GroupedMLP(E, H, F, lora=Lora(8), device="meta")
    mlp.merge_lora()
    mlp.to_empty(device="cpu")
    mlp.reset_parameters()
    assert learning(mlp) == list(KEPT_OF_ADAPTERS)
    for name, K in (("gate_up_proj", H), ("down_proj", F)):
        a = mlp.get_parameter(f"{name}_lora_a").abs()
        assert 0.9 * K**-0.5 < a.max() <= K**-0.5
        assert not mlp.get_parameter(f"{name}_lora_b").any()


@pytest.mark.parametrize("weights", [None, "both"])
def test_weights_assigned_on_the_meta_device_stay_frozen(weights: Any) -> None:
    """As by load_state_dict: transformers' from_pretrained lets what it assigns require grad."""
    options: dict[str, Any] = {"weights": weights, "lora": Lora(4)}
    layer, saved = (GroupedLinear(2, 16, 32, device=d, **options) for d in ("meta", "cpu"))
    for name, p in saved.named_parameters():
        setattr(layer, name, nn.Parameter(p.detach().clone()))
    learning = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert learning == {"weight_lora_a", "weight_lora_b"}


def test_scaling() -> None:
    """By alpha over the rank, or its root; without alpha a factor of 1."""
    assert Lora(16, 32).scaling == 2
    assert Lora(16, 32, rslora=True).scaling == 8
    assert Lora(16).scaling == 1


def test_one_projection() -> None:
    """A mapping names the projections that have adapters."""
    mlp = GroupedMLP(E, H, F, lora={"down_proj": Lora(4)})
    assert learning(mlp) == ["down_proj_lora_a", "down_proj_lora_b"]
    mlp(torch.randn(9, H), *torch.rand(9, E).topk(2)).sum().backward()
    assert mlp.down_proj_lora_b.grad is not None


def with_adapter(a: Any, b: Tensor | None = None, N: int = 16, **options: Any) -> Tensor:
    """A call with an adapter, whose B fits if none is given."""
    lora = LoraWeights(a, torch.ones(2, N, 4) if b is None else b, **options)
    return grouped_linear(torch.ones(2, 16), torch.ones(2, N, 16), [1, 1], lora=lora)


def mlp_with_adapter(a: Tensor, b: Tensor) -> Tensor:
    routed = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    weights = torch.ones(2, 64, 16), torch.ones(2, 16, 32)
    return grouped_mlp(torch.ones(2, 16), *routed, *weights, down_lora=LoraWeights(a, b))


FITTING: Any = torch.ones(2, 4, 16)
WRONG: Any = (1, 2)
MISTAKES: list[Callable[[], Any]] = [
    lambda: Lora(0),
    lambda: Lora(4, float("nan")),
    lambda: Lora(4, dropout=1),
    lambda: Lora(4, dtype=torch.float64),
    lambda: GroupedLinear(2, 16, 16, lora=WRONG),
    lambda: GroupedMLP(2, 16, 16, lora={"up_proj": Lora(4)}),
    lambda: grouped_linear(FITTING[:, 0], FITTING, [1, 1], lora=WRONG),
    lambda: with_adapter(FITTING, torch.ones(2, 16, 4), N=32),
    lambda: with_adapter(None),
    lambda: with_adapter(FITTING.to("meta")),
    lambda: with_adapter(FITTING, scaling=None),
    lambda: with_adapter(FITTING, scaling=float("nan")),
    lambda: with_adapter(FITTING, dropout="0.1"),
    lambda: mlp_with_adapter(FITTING, torch.ones(2, 64, 4)),
    lambda: with_adapter(FITTING.double()),
]


def test_mistakes() -> None:
    assert_expected_inline(
        said(MISTAKES),
        """\
ValueError: Lora: rank must be an integer from 1 to 256, got 0
ValueError: Lora: alpha must be None or a finite number, got nan
ValueError: Lora: dropout must be at least 0 and less than 1, got 1
ValueError: Lora: dtype must be None, bfloat16, float16 or float32, got torch.float64
ValueError: GroupedLinear: lora must be None or a grouped_linear.Lora, got (1, 2)
ValueError: GroupedMLP: lora may have adapters for gate_up_proj and down_proj, got 'up_proj'
TypeError: grouped_linear: lora must be None or a LoraWeights, got tuple
RuntimeError: grouped_linear: lora must be a [2, r, 16] and b [2, 32, r] with r from 1 to 256, as weight is [2, 32, 16], got [2, 4, 16] and [2, 16, 4]
TypeError: grouped_linear: lora.a must be a tensor, got NoneType
RuntimeError: grouped_linear: lora.a is on meta, x is on cpu
ValueError: grouped_linear: lora.scaling must be a finite number, got None
ValueError: grouped_linear: lora.scaling must be a finite number, got nan
ValueError: grouped_linear: lora.dropout must be at least 0 and less than 1, got '0.1'
RuntimeError: grouped_mlp: down_lora must be a [2, r, 32] and b [2, 16, r] with r from 1 to 256, as down_proj is [2, 16, 32], got [2, 4, 16] and [2, 64, 4]
RuntimeError: grouped_linear: lora.a must be bfloat16, float16 or float32, got float64: cast it, or the layer, as layer.float() does""",  # noqa: E501
    )
