"""refresh_weights: the bits of quantizing in each call, waited for, and never stale in silence.

T rows, E groups, K in_features, N out_features; of the MLP: C experts chosen for a token.
"""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from grouped_linear import (
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    Recipe,
    refresh_weights,
    update_scales,
)
from grouped_linear.quantized import refresh
from support.calls import Calls
from support.compare import assert_same_bits, assert_shows_cold
from support.devices import devices, needs_gpu
from support.errors import sentence
from support.graphs import STRICT_GRAPHS
from support.ops import OPS
from support.recipes import RECIPES

T, E, K, N, C = 40, 3, 32, 48, 2
QUANTIZING = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
FORMS: dict[str, Callable[..., nn.Module]] = {
    "one": lambda **options: GroupedLinear(E, K, N, False, **options),
    "apart": lambda **options: GroupedLinear(
        E, K, N, False, single_grouped_weight=False, **options
    ),
    "mlp": lambda **options: GroupedMLP(E, K, N, **options),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def make(form: str, recipe: Recipe, device: str = "cpu", cache_weights: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return FORMS[form](recipe=recipe, cache_weights=cache_weights, device=device)


def call_of(layer: nn.Module, compiled: bool) -> Any:
    return torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer


def inputs(form: str, device: str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).to(device).requires_grad_()
    if form != "mlp":
        return x, torch.tensor([10, 0, 25], device=device)
    scores = torch.rand(T, E, generator=generator).softmax(dim=-1).to(device)
    return x, *scores.topk(C)


@torch.no_grad()
def change(layer: nn.Module) -> None:
    for p in layer.parameters():
        p.mul_(3)


@DEVICES
@pytest.mark.parametrize(
    ("form", "recipe", "compiled"),
    [
        *(
            pytest.param(form, recipe, False, id=f"{form}-{name}-eager")
            for form in FORMS
            for name, recipe in QUANTIZING.items()
        ),
        *(
            pytest.param(form, RECIPES[name], True, id=f"{form}-{name}-compiled")
            for form, name in (("one", "delayed"), ("apart", "current"), ("mlp", "block"))
        ),
    ],
)
def test_trains_with_the_bits_of_quantizing_in_each_call(
    form: str, recipe: Recipe, compiled: bool, device: str
) -> None:
    """Two micro-batches a step; the hook of the optimizer refreshes, once a step."""
    results = []
    for cached in (True, False):
        layer = make(form, recipe, device, cached)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        if cached:
            # Scales are updated between a step and its refresh.
            optimizer.register_step_post_hook(lambda *_, m=layer: update_scales(m))
            optimizer.register_step_post_hook(lambda *_, m=layer: refresh_weights(m))
            refresh_weights(layer)
        flag = (False,) if cached else ()
        call, outputs = call_of(layer, compiled and cached), []
        for step in range(3):
            for micro_batch in range(2):
                x, *rest = inputs(form, device, 2 * step + micro_batch)
                y = call(x, *rest, *flag)
                y.square().sum().backward()
                outputs += [y.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
            if not cached:
                update_scales(layer)
        results.append(outputs)
    for a, e in zip(*results, strict=True):
        assert_same_bits(a, e)


def test_each_weight_is_quantized_once() -> None:
    model = nn.Sequential(*(make(form, RECIPES["block"]) for form in FORMS))
    with Calls() as calls:
        refresh_weights(model)
        for form, layer in zip(FORMS, model, strict=True):
            for _ in range(2):
                layer(*inputs(form), is_first_microbatch=False)
    assert calls.counts["refresh_weight_"] == 4
    assert not any(op.startswith("quantize_weight") for op in calls.counts)


@EVERY_FORM
@COMPILED
def test_a_stale_cache_raises(compiled: bool, form: str) -> None:
    """Until it is refreshed, by whichever way; a later change is its caller's affair then."""
    layer = make(form, RECIPES["block"])
    call, arguments = call_of(layer, compiled), inputs(form)
    refresh_weights(layer)
    call(*arguments, is_first_microbatch=False)
    change(layer)
    name = {"one": "weight", "apart": "weight0, weight1, weight2", "mlp": "gate_up_proj"}[form]
    assert sentence(lambda: call(*arguments, is_first_microbatch=False)) == (
        f"refresh_weights: {name} was written since, as by an optimizer: call refresh_weights "
        "again before the next forward"
    )
    refresh_weights(layer)
    plain = layer(*arguments)
    assert_same_bits(call(*arguments, is_first_microbatch=False), plain)
    change(layer)
    for first in (True, torch.tensor(True)):
        y = call(*arguments, is_first_microbatch=first)
        assert_same_bits(call(*arguments, is_first_microbatch=False), y)
        change(layer)
        assert_same_bits(call(*arguments, is_first_microbatch=False), y)


@EVERY_FORM
def test_a_cold_cache(form: str) -> None:
    """Loading makes it cold, also after a refresh."""
    layer, (x, *rest) = make(form, RECIPES["block"]), inputs(form)
    refresh_weights(layer)
    compiled = call_of(layer, compiled=True)
    compiled(x, *rest, is_first_microbatch=False)
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="reads the weight cache, which holds no weight yet"):
        layer(x, *rest, is_first_microbatch=False)


def test_a_graph_waits_only_where_something_refreshes() -> None:
    """Before the GEMM, and in a graph that was compiled before the first refresh as well."""
    torch._dynamo.reset()
    layer, (x, m_splits) = make("one", RECIPES["block"]), inputs("one")
    backend = AotEagerAndRecordGraphs()
    call = torch.compile(layer, fullgraph=True, backend=backend)

    def ops() -> list[str]:
        nodes = backend.fw_graphs[-1].graph.nodes
        return [str(node.target) for node in nodes if node.op == "call_function"]

    def holds_wait(names: list[str]) -> bool:
        return any("auto_functionalized" in name or "wait" in name for name in names)

    layer(x, m_splits, True)
    call(x, m_splits, False)
    assert not holds_wait(ops())
    refresh_weights(layer)
    call(x, m_splits, False)
    assert len(backend.fw_graphs) == 2
    names = ops()
    assert holds_wait(names)
    wait = next(i for i, name in enumerate(names) if holds_wait([name]))
    gemm = next(i for i, name in enumerate(names) if "grouped_scaled_mm" in name)
    assert wait < gemm


def test_inductor_copies_nothing_for_a_wait() -> None:
    layer, arguments = make("mlp", RECIPES["block"]), inputs("mlp")
    refresh_weights(layer)
    with torch.no_grad():
        _, [code] = run_and_get_code(torch.compile(layer, fullgraph=True), *arguments, False)
    body = code[code.index("def call(") :]
    quantized = re.findall(r"wait_for_refresh_.default\((\w+), \w+\)", body)
    assert re.findall(r"grouped_scaled_mm.default\((\w+),", body) == quantized
    assert len(quantized) == 2
    assert "clone" not in body


def test_an_exported_program_does_not_wait() -> None:
    """It runs where nothing refreshes, and without Python."""
    layer, (x, m_splits) = make("one", RECIPES["block"]), inputs("one")
    refresh_weights(layer)
    with torch.no_grad():
        program = torch.export.export(layer, (x.detach(), m_splits, False))
        assert_same_bits(program.module()(x, m_splits, False), layer(x, m_splits))
    assert "grouped_linear_host" not in str(program.graph)


def test_layers_share_a_graph() -> None:
    """Regional compilation: no recompile for each layer."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = nn.ModuleList(make("one", RECIPES["block"]) for _ in range(3))
    refresh_weights(layers)
    x, m_splits = inputs("one")
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
        layer(x, m_splits, is_first_microbatch=False)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_delayed_scaling_records_in_training_only(mode: Any) -> None:
    layer = make("one", RECIPES["delayed"])
    with mode():
        refresh_weights(layer)
    assert layer.weight_state.weight.amax.any() == (mode is torch.enable_grad)
    x, m_splits = inputs("one")
    assert_same_bits(layer(x, m_splits, False), layer(x, m_splits))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@EVERY_FORM
def test_copies_are_apart(copied: Any, form: str) -> None:
    layer, arguments = make(form, RECIPES["block"]), inputs(form)
    refresh_weights(layer)
    y = layer(*arguments, is_first_microbatch=False)
    twin = copied(layer)
    change(twin)
    refresh_weights(twin)
    assert_same_bits(layer(*arguments, is_first_microbatch=False), y)
    assert_same_bits(twin(*arguments, is_first_microbatch=False), twin(*arguments))


def test_modules_without_caches_are_left_alone() -> None:
    refresh_weights(nn.Linear(4, 4))
    refresh_weights(make("one", RECIPES["block"], cache_weights=False))
    refresh_weights(GroupedLinear(E, K, N, cache_weights=True))


def test_mistakes(tmp_path: Any) -> None:
    layer = make("one", RECIPES["block"])
    with pytest.raises(Exception, match="refresh_weights: call it outside of what is compiled"):
        torch.compile(refresh_weights, backend="eager", fullgraph=True)(layer)
    model = nn.Sequential(layer)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Replicate()]))
        assert sentence(lambda: refresh_weights(model)) == (
            "refresh_weights: the weights of 0 are sharded: call the layer with "
            "is_first_microbatch=True, which quantizes what was gathered"
        )
    finally:
        torch.distributed.destroy_process_group()


# --- on a GPU: what is not waited for is read too early ------------------------------------------

MODES = ("eager", "compiled", "cudagraph_trees", "captured", "captured compiled")
CUDA_GRAPHS = {"triton.cudagraphs": True, **STRICT_GRAPHS}


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
@EVERY_FORM
def test_a_late_refresh_is_waited_for(
    form: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of each refresh sleeps first, for 50 ms or more."""
    torch._dynamo.reset()
    layer, (x, *rest) = make(form, RECIPES["block"], "cuda"), inputs(form, "cuda")
    x.requires_grad_(False)
    stream_after_current = refresh._stream_after_current

    def late(device: torch.device) -> Any:
        stream = stream_after_current(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
        return stream

    def call() -> Tensor:
        with torch.no_grad():
            return forward(x, *rest, is_first_microbatch=False)

    refresh_weights(layer)
    forward: Any = layer
    if "compiled" in mode:
        forward = torch.compile(layer, fullgraph=True)
    elif mode == "cudagraph_trees":
        forward = torch.compile(layer, fullgraph=True, options=CUDA_GRAPHS)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        call()
    if "captured" in mode:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

    monkeypatch.setattr(refresh, "_stream_after_current", late)
    for _ in range(2):
        change(layer)
        expected = layer(x, *rest).detach()
        torch.cuda.synchronize()
        refresh_weights(layer)
        assert not layer_event(layer).query()  # the refresh has not ended yet
        torch.compiler.cudagraph_mark_step_begin()
        if "captured" in mode:
            graph.replay()
            y = result.clone()
        else:
            y = call().clone()
        assert_same_bits(y, expected)


def layer_event(layer: nn.Module) -> Any:
    cache = layer.down_proj_cache if isinstance(layer, GroupedMLP) else layer.weight_cache
    return cache._event


@needs_gpu
@EVERY_FORM
def test_a_step_that_is_captured_with_its_refresh(form: str) -> None:
    """Forward, backward, a step of SGD and the refresh in one graph."""
    results = []
    for captured in (True, False):
        layer, (x, *rest) = make(form, RECIPES["block"], "cuda"), inputs(form, "cuda")
        x.requires_grad_(False)
        refresh_weights(layer)

        def step(layer: nn.Module = layer, x: Tensor = x, rest: Any = rest) -> Tensor:
            y = layer(x, *rest, is_first_microbatch=False)
            weights = list(layer.parameters())
            gradients = torch.autograd.grad(y.square().mean(), weights)
            with torch.no_grad():
                for w, grad in zip(weights, gradients, strict=True):
                    w -= 0.1 * grad
            refresh_weights(layer)
            return y.detach()

        outputs = []
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                outputs.append(step().clone())
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = step()
            for _ in range(3):
                graph.replay()
                outputs.append(result.clone())
        else:
            outputs += [step().clone() for _ in range(4)]
        results.append(outputs)
    for a, e in zip(*results, strict=True):
        assert_same_bits(a, e)


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_cold_cache_is_nan_in_a_graph(compiled: bool) -> None:
    layer, (x, *rest) = make("one", Float8BlockScaling(), "cuda"), inputs("one", "cuda")
    refresh_weights(layer)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    call(x, *rest, is_first_microbatch=False)
    layer.weight_cache.reset()
    first = False if compiled else torch.tensor(False, device="cuda")
    assert_shows_cold(call(x, *rest, is_first_microbatch=first), x)
