# SPDX-License-Identifier: Apache-2.0
"""grouped_mlp_sorted and GroupedMLP.forward_sorted: rows that a dispatcher has sorted by expert.

R rows, E experts, H features of a token, F features of an expert.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedMLP,
    Recipe,
    grouped_mlp,
    grouped_mlp_sorted,
)
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits, outcome
from support.devices import needs_gpu
from support.errors import said
from support.graphs import STRICT_GRAPHS
from support.mlp import KINDS, E, F, H, biases_of, run, states_of
from support.mlp import leaves_of as drawn_leaves
from support.recipes import MORE_RECIPES
from support.saved import saved_tensors
from support.tensors import BF16, DTYPES, FP32

R = 150
SPLITS = [40, 0, 31, 1, 60]  # 18 rows belong to no expert
RECIPES = pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
EVERY_KIND = pytest.mark.parametrize("kind", ["plain", "gpt_oss", "gelu", "relu2"])


def leaves_of(kind: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    return drawn_leaves((R,), *KINDS[kind], device, dtype)


def ours(kind: str, recipe: Recipe | None, device: str, **more: Any) -> Callable[..., Tensor]:
    m_splits, states = torch.tensor(SPLITS, device=device), states_of(recipe, device)

    def mlp(x: Tensor, weights: Tensor | None, *parameters: Tensor) -> Tensor:
        gate_up, down, *biases = parameters
        call = x, m_splits, gate_up, down, weights, recipe, states
        return grouped_mlp_sorted(*call, activation=KINDS[kind][0], **biases_of(biases), **more)

    return mlp


def by_choice(kind: str, recipe: Recipe | None, device: str) -> Callable[..., Tensor]:
    """grouped_mlp, with the expert of each row chosen for it."""
    sizes = [*SPLITS, R - sum(SPLITS)]
    experts = torch.arange(E + 1).repeat_interleave(torch.tensor(sizes))[:, None].to(device)
    states = states_of(recipe, device)

    def mlp(x: Tensor, weights: Tensor | None, *parameters: Tensor) -> Tensor:
        gate_up, down, *biases = parameters
        weights = torch.ones(R, device=device) if weights is None else weights
        call = x, weights[:, None], experts, gate_up, down, recipe, states
        return grouped_mlp(*call, activation=KINDS[kind][0], **biases_of(biases))

    return mlp


@EVERY_KIND
@RECIPES
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_bits_of_grouped_mlp(weighted: bool, recipe: Recipe | None, kind: str, device: str) -> None:
    leaves: list[Any] = leaves_of(kind, device, BF16)
    leaves[4:] = [b.detach().float().requires_grad_() for b in leaves[4:]]  # biases
    if not weighted:
        leaves[1] = None
    actual, expected = (run(of(kind, recipe, device), leaves) for of in (ours, by_choice))
    assert_all_same_bits(actual, expected)
    with torch.no_grad():
        assert_same_bits(ours(kind, recipe, device)(*leaves), actual[0])
    again = ours(kind, recipe, device, recompute_gate_up=True)
    assert_all_same_bits(run(again, leaves), actual)
    assert not actual[0][sum(SPLITS) :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_what_no_expert_has(dtype: torch.dtype, device: str) -> None:
    """NaN in rows and weights of no expert reaches nothing."""
    leaves = leaves_of("plain", device, dtype)
    leaves[1] = leaves[1].detach().to(dtype).requires_grad_()
    clean = run(ours("plain", None, device), leaves)
    with torch.no_grad():
        leaves[0][sum(SPLITS) :] = torch.nan
        leaves[1][sum(SPLITS) :] = torch.nan
        assert_same_bits(ours("plain", None, device)(*leaves), clean[0])
    spoilt = run(ours("plain", None, device), leaves)
    assert_all_same_bits(spoilt, clean)


def test_nothing_is_gathered_or_summed(device: str) -> None:
    leaves: list[Any] = leaves_of("plain", device, BF16)
    leaves[1] = None
    with Calls() as calls:
        run(ours("plain", None, device), leaves)
    assert calls.counts == {
        "splits_to_offsets": 1,
        "grouped_mm_swiglu": 1,
        "grouped_mm_swiglu_grad": 1,
        "grouped_mm": 2,
        "grouped_mm_wgrad": 2,
    }


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
def test_keeps_x_and_gate_up(recipe: Recipe | None, device: str) -> None:
    leaves: list[Any] = leaves_of("plain", device, BF16)
    leaves[1] = None
    with saved_tensors() as kept:
        ours("plain", recipe, device)(*leaves)
    of_rows = [t for t in kept if t.size(0) == R]
    assert {t.data_ptr() for t in of_rows if t.size(1) == H} == {leaves[0].data_ptr()}
    assert [t.shape for t in of_rows if t.size(1) != H] == [(R, 2 * F)]


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
def test_the_module_compiled_in_one_graph(recipe: Recipe | None, device: str) -> None:
    """For any sizes, and any number of rows."""

    class Experts(GroupedMLP):
        def forward(self, x: Tensor, m_splits: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            return self.forward_sorted(x, m_splits, weights)

    mlp = Experts(E, H, F, recipe=recipe, device=device, dtype=BF16, bias=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, fullgraph=True, backend=counter)
    for rows in (0, 1, 90, 33):
        x = torch.randn(rows, H, device=device, dtype=BF16, requires_grad=True)
        weights = torch.rand(rows, device=device, requires_grad=True)
        m_splits = torch.full((E,), rows // E, device=device)
        for t in (x, weights):
            torch._dynamo.decorators.mark_unbacked(t, 0)
        leaves = [x, weights, *mlp.parameters()]
        results = [outcome(call(x, m_splits, weights), leaves) for call in (compiled, mlp)]
        assert_all_same_bits(*results)
    assert counter.frame_count == 1


@needs_gpu
@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
def test_in_a_cuda_graph(recipe: Recipe | None) -> None:
    mlp = GroupedMLP(E, H, F, recipe=recipe, device="cuda", dtype=BF16)
    call = torch.compile(mlp.forward_sorted, fullgraph=True, options=STRICT_GRAPHS)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(R, H, device="cuda", dtype=BF16, requires_grad=True)
        m_splits = torch.randint(R // E, (E,), device="cuda")
        found = []
        for one in (call, mlp.forward_sorted):
            torch.compiler.cudagraph_mark_step_begin()
            y = one(x, m_splits)
            gradients = torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])
            found.append([t.detach().clone() for t in (y, *gradients)])
        for a, e in zip(*found, strict=True):
            assert (a.double() - e.double()).norm() < 2.0**-6 * e.double().norm()


def test_caches_and_main_grad(device: str) -> None:
    """Two micro-batches into caches and main_grad, as forward has them."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"recipe": Float8BlockScaling(), "device": device}
    mlp = GroupedMLP(E, H, F, cache_weights=True, fuse_wgrad_accumulation=True, **options)
    plain = GroupedMLP(E, H, F, **options)
    plain.load_state_dict({n: p for n, p in mlp.state_dict().items() if n.endswith("proj")})
    for p in mlp.parameters():
        p.main_grad = torch.empty_like(p)
    m_splits = torch.tensor(SPLITS, device=device)
    for i in range(2):
        x = torch.randn(R, H, device=device)
        for one, first in ((mlp, i == 0), (plain, None)):
            one.forward_sorted(x, m_splits, None, first).square().mean().backward()
    for p, expected in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad, expected.grad)


def test_mistakes() -> None:
    mlp = GroupedMLP(E, H, F)
    x, m_splits = torch.randn(R, H), torch.tensor(SPLITS)
    mistakes = [
        lambda: mlp.forward_sorted(x.view(2, 75, H), m_splits),
        lambda: mlp.forward_sorted(x, m_splits[1:]),
        lambda: mlp.forward_sorted(x, 7),
        lambda: mlp.forward_sorted(x, m_splits, torch.ones(R - 1)),
        lambda: mlp.forward_sorted(x, m_splits, torch.ones(R).to(torch.float8_e4m3fn)),
        lambda: mlp.forward_sorted(x[:, :128], m_splits),
        lambda: mlp.forward_sorted(x.bfloat16(), m_splits),
        lambda: grouped_mlp_sorted(x, m_splits, *mlp.parameters(), activation=None),
        lambda: grouped_mlp_sorted(x, m_splits, *mlp.parameters(), recipe=DelayedScaling()),
    ]
    assert_expected_inline(
        said(mistakes),
        """\
RuntimeError: grouped_mlp_sorted: x must be [R, H], got shape [2, 75, 144]
RuntimeError: grouped_mlp_sorted: E differs: m_splits, the rows of each expert, has 4, gate_up_proj 5
TypeError: grouped_mlp_sorted: m_splits must be a tensor or a list, the rows of each group, got 7
RuntimeError: grouped_mlp_sorted: row_weights must be [150], one of each row, got [149]
RuntimeError: grouped_mlp_sorted: row_weights must be floating, of 16 bits or more, got float8_e4m3fn
RuntimeError: grouped_mlp_sorted: gate_up_proj must be [E, 2 F, 128], as x has 128 features, got [5, 160, 144]
RuntimeError: grouped_mlp_sorted: x is bfloat16, gate_up_proj float32: cast one of them, or use torch.autocast
ValueError: grouped_mlp_sorted: activation must be an Activation, as SwiGLU() or GeGLU(), got None
ValueError: grouped_mlp_sorted: DelayedScaling has a state: pass state, or use GroupedMLP""",  # noqa: E501
    )


def test_autocast_and_a_list_of_sizes(device: str) -> None:
    mlp = GroupedMLP(E, H, F, device=device)
    x = torch.randn(R, H, device=device, dtype=FP32, requires_grad=True)
    with torch.autocast(device, dtype=BF16):
        y = mlp.forward_sorted(x, SPLITS)
    parameters = [p.to(BF16) for p in mlp.parameters()]
    assert_same_bits(y, grouped_mlp_sorted(x.to(BF16), SPLITS, *parameters))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32


@pytest.mark.parametrize("weighted", [False, True])
def test_a_traced_graph_takes_any_number_of_rows(weighted: bool) -> None:
    """Traced by torch.export or make_fx, which read no Python: len(x) would be a constant there."""
    mlp = GroupedMLP(E, H, F, bias=True)

    def step(x: Tensor, m_splits: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        y = mlp.forward_sorted(x, m_splits, weights if weighted else None)
        return y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])

    def inputs(rows: int) -> tuple[Tensor, ...]:
        m_splits = torch.tensor([rows - 10, 0, 3, 1, 2])
        return torch.randn(rows, H, requires_grad=True), m_splits, torch.rand(rows)

    graph = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs(20))
    for rows in (20, 11):
        given = inputs(rows)
        assert_all_same_bits(graph(*given), step(*given))
