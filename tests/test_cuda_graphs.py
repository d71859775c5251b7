"""Captured once, replayed with any other splits: bit for bit what eager computes.

T rows, E groups, K in_features, N out_features.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from samples import RECIPES as EVERY_RECIPE
from samples import needs_hopper
from torch import Tensor
from torch._dynamo.utils import counters

from grouped_linear import GroupedLinear, Recipe

pytestmark = needs_hopper

E, T, K, N = 5, 300, 144, 272
RECIPES = pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=EVERY_RECIPE)
REPLAYS = 1000

# y, dx, dw, dbias
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def make_layer(recipe: Recipe) -> GroupedLinear:
    return GroupedLinear(E, K, N, recipe=recipe, device="cuda", dtype=torch.bfloat16)


def step_of(layer: GroupedLinear) -> Step:
    def step(x_TK: Tensor, m_splits_E: Tensor, dy_TN: Tensor) -> tuple[Tensor, ...]:
        y_TN = layer(x_TK, m_splits_E)
        return y_TN, *torch.autograd.grad(y_TN, (x_TK, layer.weight, layer.bias), dy_TN)

    return step


def draw_splits(generator: torch.Generator) -> Tensor:
    """Sizes that sum to at most T, some of them zero."""
    cuts = torch.randint(0, T + 1, (E,), generator=generator).sort().values
    cuts[torch.randint(0, E, (1,), generator=generator)] = cuts[0].clone()
    return torch.diff(cuts.sort().values, prepend=torch.zeros(1, dtype=cuts.dtype))


def draw_inputs(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x with NaN past the last group, m_splits and dy."""
    m_splits = draw_splits(generator)
    x = torch.randn(T, K, generator=generator).bfloat16()
    x[int(m_splits.sum()) :] = float("nan")
    dy = torch.randn(T, N, generator=generator).bfloat16()
    return x.cuda(), m_splits.cuda(), dy.cuda()


def disturb_allocator(i: int) -> None:
    """Leave freed blocks full of NaN behind, of sizes that differ from call to call."""
    blocks = [torch.full((1 << (8 + (i + j) % 14),), float("nan"), device="cuda") for j in range(4)]
    del blocks


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("y", "dx", "dw", "dbias"), got, want, strict=True):
        assert torch.equal(a, b), f"{name} differs"


@RECIPES
def test_raw_capture(recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(1)
    step = step_of(make_layer(recipe))
    x, m_splits, dy = draw_inputs(generator)
    x.requires_grad_()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, m_splits, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, m_splits, dy)

    for i in range(REPLAYS):
        inputs = draw_inputs(generator)
        with torch.no_grad():
            for static, new in zip((x, m_splits, dy), inputs, strict=True):
                static.copy_(new)
        disturb_allocator(i)
        graph.replay()
        assert_equal(captured, step(inputs[0].requires_grad_(), *inputs[1:]))


@RECIPES
def test_make_graphed_callables(recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(2)
    layer = make_layer(recipe)
    eager = step_of(layer)
    x, m_splits, dy = draw_inputs(generator)
    gc.collect()  # a graph or event that is freed while another graph is recorded spoils it
    graphed = torch.cuda.make_graphed_callables(layer, (x.requires_grad_(), m_splits))
    for i in range(20):
        x, m_splits, dy = draw_inputs(generator)
        x.requires_grad_()
        disturb_allocator(i)
        y = graphed(x, m_splits)
        # The graph owns its outputs: take copies before the next replay writes over them.
        grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
        got = tuple(t.clone() for t in (y, *grads))
        # make_graphed_callables patches the module's forward; the eager one is on its class.
        layer_forward = layer.forward
        del layer.forward
        want = eager(x, m_splits, dy)
        layer.forward = layer_forward
        assert_equal(got, want)


@RECIPES
def test_cudagraph_trees(recipe: Recipe) -> None:
    """Reduce-overhead mode: one graph launch forward, one backward, nothing recorded anew."""
    generator = torch.Generator().manual_seed(3)
    layer = make_layer(recipe)
    eager = step_of(layer)
    strict = {
        "triton.cudagraph_or_error": True,
        "graph_partition": False,
        "force_disable_caches": True,
    }
    counters.clear()
    with torch._inductor.config.patch(strict):
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")

        def step(x: Tensor, m_splits: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x, m_splits)
            grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
            return tuple(t.clone() for t in (y, *grads))

        for i in range(20):
            x, m_splits, dy = draw_inputs(generator)
            x.requires_grad_()
            disturb_allocator(i)
            assert_equal(step(x, m_splits, dy), eager(x, m_splits, dy))

        x, m_splits, dy = draw_inputs(generator)
        x.requires_grad_()
        steps = 3
        with torch.profiler.profile() as profile:
            for _ in range(steps):
                step(x, m_splits, dy)
            torch.cuda.synchronize()
    launches = sum(e.count for e in profile.key_averages() if e.key == "cudaGraphLaunch")
    assert launches == 2 * steps
    assert counters["stats"]["unique_graphs"] == 1
    skipped = [key for key in counters["inductor"] if key.startswith("cudagraph_")]
    assert not [key for key in skipped if "skip" in key or "partition" in key], skipped


@RECIPES
def test_determinism(recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(4)
    step = step_of(make_layer(recipe))
    x, m_splits, dy = draw_inputs(generator)
    x.requires_grad_()
    first = step(x, m_splits, dy)
    for i in range(100):
        disturb_allocator(i)
        assert_equal(step(x, m_splits, dy), first)
