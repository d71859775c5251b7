# SPDX-License-Identifier: Apache-2.0
"""A token's expert output has the same bits alone, in any batch, trained, sampled or compiled.

docs/compile.md promises it; check_batch_invariant says where it holds.

T tokens, C experts chosen for a token, E experts, H features of a token, F inside an expert.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    GeGLU,
    GroupedLinear,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    Recipe,
    SquaredReLU,
    SwiGLU,
    convert,
    ops,
    te,
)
from grouped_linear.contrib import check_batch_invariant
from support.compare import assert_same_bits, bits
from support.devices import needs_gpu
from support.errors import sentence
from support.experts import GroupedExperts
from support.graphs import captured
from support.pairs import one_in_ci
from support.tensors import BF16, DTYPES
from support.versions import skipping_for_old_transformers

with skipping_for_old_transformers():
    from support.hugging_face import model_of, tokens

needs_bf16_units = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="needs a CPU with AVX-512 BF16"
)
ON_CPU = pytest.param("cpu", marks=needs_bf16_units)
WHERE_IT_HOLDS = pytest.mark.parametrize("device", [ON_CPU, pytest.param("cuda", marks=needs_gpu)])

IN_BLOCKS = [
    Float8BlockScaling(),
    Float8BlockScaling(power_of_two_scales=False, share_x_scales=False),
    Float8BlockScaling(requantize_weights=True, wgrad=BF16),
]
RECIPES: dict[str, list[Recipe | None]] = {
    "cpu": [*IN_BLOCKS],
    "cuda": [*IN_BLOCKS, MXFP8BlockScaling(), None],
}
FEATURES = strategies.sampled_from([16, 48, 128, 144, 272, 640])
ACTIVATIONS = [SwiGLU(), SwiGLU(1.702, 1.0, 7.0, interleaved=True), GeGLU("tanh"), SquaredReLU()]
# How many rows there are decides which tiles, and how many parts of a sum, a kernel would like.
SIZES = strategies.sampled_from([1, 2, 3, 7, 16, 31, 64, 65, 127, 128, 129, 300])
YES_OR_NO = strategies.booleans()
Draw = Callable[[strategies.SearchStrategy[Any]], Any]
Layer = Callable[..., Tensor]
# No shrinking: numbers are drawn anew for each example, so a smaller one says no more.
few = hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples // 10,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


def training(layer: nn.Module, *args: Any) -> Tensor:
    y: Tensor = layer(args[0].requires_grad_(), *args[1:])
    assert y.requires_grad
    return y.detach()


def sampling(layer: nn.Module, *args: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = layer(*args)
    return y


def compiled(layer: nn.Module, *args: Any) -> Tensor:
    torch._dynamo.reset()
    y: Tensor = torch.compile(layer, fullgraph=True, backend="aot_eager")(*args)
    return y.detach()


def compiled_sampling(layer: nn.Module, *args: Any) -> Tensor:
    with torch.no_grad():
        return compiled(layer, *args)


def recomputed(layer: nn.Module, *args: Any) -> Tensor:
    """What a backward under activation checkpointing computes again."""
    again: list[Tensor] = []

    def run(*args: Any) -> Tensor:
        y: Tensor = layer(*args)
        again.append(y.detach())
        return y

    checkpoint(run, args[0].requires_grad_(), *args[1:], use_reentrant=False).sum().backward()
    return again[-1]


def graphed(layer: nn.Module, *args: Any) -> Tensor:
    if not args[0].is_cuda:
        return sampling(layer, *args)
    graph, y = captured(partial(sampling, layer, *args))
    graph.replay()
    return y.clone()


WAYS = [training, sampling, compiled, compiled_sampling, recomputed, graphed]


def randomize(layer: nn.Module) -> nn.Module:
    """Give adapters and biases numbers: some are zero at first."""
    for name, p in layer.named_parameters():
        if "lora_" in name or "bias" in name:
            nn.init.normal_(p, std=0.3)
    return layer


def some_tokens(T: int, device: str, draw: Draw) -> Tensor:
    """Which of T tokens are in a batch, in which order; some of them twice."""
    n = draw(SIZES)
    if draw(YES_OR_NO):
        return torch.arange(min(n, T), device=device)
    return torch.randint(T, (n,), device=device)


def options_of_either_layer(device: str, draw: Draw) -> dict[str, Any]:
    form: dict[str, Any] = {"device": device, "bias": draw(YES_OR_NO)}
    form["recipe"] = draw(strategies.sampled_from(RECIPES[device]))
    form["dtype"] = draw(strategies.sampled_from(DTYPES))
    if device == "cuda" and draw(YES_OR_NO):
        form["lora"] = Lora(rank=draw(strategies.sampled_from([4, 16])))
    return form


def two_of(kind: Any, sizes: tuple[int, ...], form: dict[str, Any], draw: Draw) -> tuple[Any, Any]:
    """A layer, and it or one that keeps the same weights in another way."""
    layer = randomize(kind(*sizes, **form))
    if not isinstance(form["recipe"], Float8BlockScaling):
        return layer, layer
    other = kind(*sizes, **form, weights=draw(strategies.sampled_from([None, "both", "fp8"])))
    other.load_state_dict(layer.state_dict())
    return layer, other


@few
@hypothesis.given(data=strategies.data())
@WHERE_IT_HOLDS
@pytest.mark.parametrize("way", WAYS)
def test_mlp(way: Layer, device: str, data: strategies.DataObject) -> None:
    draw = data.draw
    E, H, F = draw(strategies.sampled_from([1, 2, 6, 24])), draw(FEATURES), draw(FEATURES)
    C, T = draw(strategies.integers(1, min(E, 3))), draw(SIZES)
    form = options_of_either_layer(device, draw)
    form["activation"] = draw(strategies.sampled_from(ACTIVATIONS))
    form["save_gate_up_in_fp8"] = draw(YES_OR_NO)
    layer, other = two_of(GroupedMLP, (E, H, F), form, draw)
    check_batch_invariant(layer)
    check_batch_invariant(other)

    x = torch.randn(T, H, device=device).to(form["dtype"])
    weights, chosen = torch.rand(T, E, device=device).topk(C)
    expected = training(layer, x.clone(), weights, chosen)
    places = some_tokens(T, device, draw)
    y = way(other, x[places], weights[places], chosen[places])
    assert_same_bits(y, expected[places])


@few
@hypothesis.given(data=strategies.data())
@WHERE_IT_HOLDS
@pytest.mark.parametrize("way", WAYS)
def test_linear(way: Layer, device: str, data: strategies.DataObject) -> None:
    """Rows of a group among others, NaN and infinities too, in other places of other groups."""
    draw = data.draw
    E, K, N = draw(strategies.sampled_from([1, 2, 6])), draw(FEATURES), draw(FEATURES)
    form = options_of_either_layer(device, draw)
    layer, other = two_of(GroupedLinear, (E, K, N), form, draw)

    e, n = draw(strategies.integers(0, E - 1)), draw(SIZES)
    rows = torch.randn(n, K, device=device).to(form["dtype"])

    def batch() -> tuple[Tensor, Tensor, slice]:
        """These rows in group e, behind and before others."""
        sizes = torch.tensor([draw(SIZES) * draw(YES_OR_NO) for _ in range(E)])
        before = int(sizes[: e + 1].sum())
        sizes[e] += n + (after := draw(SIZES) * draw(YES_OR_NO))
        x = torch.randn(int(sizes.sum()), K, device=device).to(form["dtype"])
        x[::3] = draw(strategies.sampled_from([0.0, 1e4, float("inf"), float("nan")]))
        x[before : before + n] = rows
        assert before + n + after <= len(x)
        return x, sizes.to(device), slice(before, before + n)

    x, sizes, places = batch()
    expected = training(layer, x, sizes)[places]
    x, sizes, places = batch()
    assert_same_bits(way(other, x, sizes)[places], expected)


@pytest.mark.parametrize("activation", one_in_ci([SwiGLU(), GeGLU("tanh")]), ids=str)
def test_inductor_has_the_bits_of_eager(activation: Any, device: str) -> None:
    """In the same batch; the other tests compile without Inductor, which takes its time."""
    form: dict[str, Any] = {"activation": activation, "device": device, "dtype": BF16}
    mlp = GroupedMLP(4, 64, 80, recipe=Float8BlockScaling(), **form)
    x, (weights, chosen) = torch.randn(40, 64), torch.rand(40, 4).topk(2)
    given = [x.to(device, BF16), weights.to(device), chosen.to(device)]
    torch._dynamo.reset()
    assert_same_bits(torch.compile(mlp, fullgraph=True)(*given), mlp(*given))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling(), None], ids=repr)
def test_wide_layers(recipe: Recipe | None, dtype: torch.dtype) -> None:
    """Long sums, which a kernel might like to split where there are few rows."""
    form: dict[str, Any] = {"recipe": recipe, "dtype": dtype, "device": "cuda"}
    mlp = GroupedMLP(8, 4096, 2048, **form)
    check_batch_invariant(mlp)
    x = torch.randn(3000, 4096, device="cuda").to(dtype)
    weights, chosen = torch.rand(3000, 8, device="cuda").topk(2)
    expected = training(mlp, x.clone(), weights, chosen)
    for n in (1, 2, 9, 33, 100, 250, 1000):
        y = sampling(mlp, x[:n], weights[:n], chosen[:n])
        assert_same_bits(y, expected[:n])
        assert torch.equal(graphed(mlp, x[:n], weights[:n], chosen[:n]), y)


@WHERE_IT_HOLDS
@pytest.mark.parametrize("kept", [None, "both", "fp8"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_generate_and_a_training_step(family: str, kept: Any, device: str) -> None:
    """What each token's experts gave in prefill and decode is what one training forward gives."""
    torch.manual_seed(0)
    model: Any = model_of(family, device, BF16).eval()
    convert(model, Float8BlockScaling(), weights=kept)
    check_batch_invariant(model)
    [experts] = [m for m in model.modules() if hasattr(m, "is_concatenated")]
    seen: list[tuple[Tensor, ...]] = []
    hook = experts.register_forward_hook(lambda _, given, y: seen.append((*given, y)))
    model.generate(tokens(device, 3, 7), max_new_tokens=6, do_sample=False)
    hook.remove()
    assert len(seen) == 6
    x, chosen, weights, expected = (torch.cat(parts) for parts in zip(*seen, strict=True))
    model.train()
    y = experts(x.requires_grad_(), chosen, weights)
    assert y.requires_grad
    assert_same_bits(y.detach(), expected)


class BaseTunerLayer(nn.ModuleDict):
    """The name of PEFT's base of layers with adapters."""


def test_what_is_refused() -> None:
    """Each refusal is true: tokens do differ, or somebody else computes them."""
    other_format = Recipe(
        weight=Format(quantize=lambda t, offs, layouts: t), input=Format(quantize=abs)
    )
    far = GroupedMLP(2, 16, 16, recipe=Float8BlockScaling())
    far.dispatcher = nn.Identity()  # type: ignore[assignment]
    models: list[Any] = [
        GroupedLinear(2, 16, 16, recipe=Float8CurrentScaling()),
        nn.Sequential(te.GroupedLinear(2, 16, 16, recipe=DelayedScaling())),
        GroupedMLP(2, 16, 16, recipe=other_format),
        GroupedMLP(2, 16, 16),
        GroupedMLP(2, 16, 16, recipe=MXFP8BlockScaling()),
        GroupedMLP(2, 16, 16, recipe=Float8BlockScaling(), lora=Lora(rank=4)),
        far,
        nn.Linear(16, 16),
        model_of("mixtral", "cpu"),
    ]
    said = [sentence(lambda m=model: check_batch_invariant(m)) for model in models]
    assert "Float8CurrentScaling() has scales that all rows" in said[0]
    assert said[1].startswith("check_batch_invariant: 0: DelayedScaling() has scales that all rows")
    assert "a function of your own quantizes" in said[2]
    for text in said[3:6]:
        assert text.endswith("torch multiplies on a CPU, and its sums follow the number of rows")
    assert "on several processes" in said[6]
    assert said[7] == "check_batch_invariant: Linear has no grouped layers"
    assert "mlp.experts: convert has not converted it" in said[8]
    # PEFT wraps a layer: its adapters are no parameters of it.
    wrapped = BaseTunerLayer({"base_layer": GroupedMLP(2, 16, 16, recipe=Float8BlockScaling())})
    assert sentence(lambda: check_batch_invariant(wrapped)).endswith("the number of rows")
    for model in (model_of("mixtral", "cpu"), nn.Sequential(GroupedExperts(2, 16, 32))):
        convert(model, Float8CurrentScaling())
        assert "Float8CurrentScaling()" in sentence(lambda m=model: check_batch_invariant(m))
    for model in (
        model_of("mixtral", "cpu"),
        nn.Sequential(GroupedExperts(2, 16, 32)),
    ):  # by its name alone
        convert(model, Float8BlockScaling(), recipes={"*": Float8CurrentScaling()})
        assert "Float8CurrentScaling()" in sentence(lambda m=model: check_batch_invariant(m))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=repr)
def test_scales_of_groups_follow_the_batch(recipe: Recipe, device: str) -> None:
    """Else refusing them would be idle. DelayedScaling takes a group's own amax at first."""
    mlp = GroupedMLP(4, 64, 64, recipe=recipe, dtype=BF16, device=device)
    x = torch.randn(100, 64, device=device, dtype=BF16)
    weights, chosen = torch.rand(100, 4, device=device).topk(2)
    alone = copy.deepcopy(mlp)(x[:1], weights[:1], chosen[:1])
    assert not torch.equal(alone, mlp(x, weights, chosen)[:1])


def test_a_cpu_in_float32_follows_the_batch() -> None:
    """Of torch's GEMM: with it the check would pass where it should not, if this ever fails."""
    mlp = GroupedMLP(8, 256, 128)
    x, (weights, chosen) = torch.randn(300, 256), torch.rand(300, 8).topk(2)
    alone = [mlp(x[t : t + 1], weights[t : t + 1], chosen[t : t + 1]) for t in range(20)]
    assert not torch.equal(torch.cat(alone), mlp(x, weights, chosen)[:20])


def tied_scores(T: int, E: int, dtype: torch.dtype) -> Tensor:
    """Few numbers, so that every token has ties; both zeros, infinities and NaN."""
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, float("inf"), -float("inf"), float("nan")])
    scores = numbers[torch.randint(len(numbers), (T, E))]
    scores[: T // 3] = 1.0  # all tied
    return scores.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("E", "k"), [(1, 1), (8, 2), (33, 33), (128, 8), (1000, 40)])
def test_exact_ties_come_in_the_order_of_experts(
    E: int, k: int, dtype: torch.dtype, device: str
) -> None:
    """NaN first, then the largest; among equal ones, and both zeros, the smaller number first."""
    scores = tied_scores(200, E, dtype)

    def order(row: list[float]) -> list[int]:
        return sorted(
            range(E), key=lambda e: (row[e] == row[e], -row[e] if row[e] == row[e] else 0, e)
        )

    expected = torch.tensor([order(row)[:k] for row in scores.tolist()])
    assert torch.equal(ops.topk_experts(scores.to(device), k)[1].cpu(), expected)
    few = ops.topk_experts(scores.to(device)[7:9], k)[1].cpu()
    assert torch.equal(few, expected[7:9])


class TiedLayer(nn.Module):
    """A router whose experts are tied for every token, and its experts."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.router = nn.Linear(64, 16, bias=False, device=device, dtype=BF16)
        nn.init.zeros_(self.router.weight)
        recipe = Float8BlockScaling()
        self.experts = GroupedMLP(16, 64, 64, recipe=recipe, device=device, dtype=BF16)
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = ops.topk_experts(self.router(x), 4, score_function="softmax")
        self.chosen.append(chosen)
        y: Tensor = self.experts(x, weights, chosen)
        return y


@pytest.mark.parametrize("reentrant", [False, True])
def test_exact_ties_under_activation_checkpointing(reentrant: bool, device: str) -> None:
    """The recompute chooses the same experts, so its gradients are those of no checkpointing."""
    layer = TiedLayer(device)
    x = torch.randn(50, 64, device=device, dtype=BF16)
    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(bits(plain), bits(checkpointed))
    assert len(layer.chosen) == 3
    for chosen in layer.chosen:
        assert torch.equal(chosen.cpu(), torch.arange(4).expand(50, 4))
