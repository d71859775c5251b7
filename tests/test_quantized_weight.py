"""GroupedLinear(quantized_weight=True): the numbers of quantizing in each call, without doing it.

T rows, E groups, K in_features, N out_features.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from samples import (
    BF16,
    DTYPES,
    FP32,
    OPS,
    STRICT_GRAPHS,
    assert_same_bits,
    devices,
    needs_hopper,
    sentence,
)
from test_grouped_tensor import assert_same
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._dynamo.utils import counters

from grouped_linear import (
    Float8BlockScaling,
    GroupedLinear,
    GroupedTensor,
    MXFP8BlockScaling,
    grouped_linear,
)
from grouped_linear.checkpoints import expert_tensors, load_experts

E, T, K, N = 4, 147, 144, 272
SPLITS = ([3, 0, 130, 7], [0, 140, 0, 0], [0, 0, 0, 0], [37, 37, 37, 36])
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
RECIPES = {
    "default": Float8BlockScaling(),
    "any_scale": Float8BlockScaling(power_of_two_scales=False),
}


def make_layer(device: str = "cpu", *, quantized_weight: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    kept: dict[str, Any] = {"recipe": Float8BlockScaling(), "dtype": BF16, "device": device}
    return GroupedLinear(E, K, N, quantized_weight=quantized_weight, **(kept | options))


def inputs(device: str, m_splits: list[int], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """x with NaN past the last group, m_splits and dy."""
    generator = torch.Generator().manual_seed(sum(m_splits))
    x, dy = (torch.randn(T, size, generator=generator).to(dtype) for size in (K, N))
    x[sum(m_splits) :] = torch.nan
    return x.to(device).requires_grad_(), torch.tensor(m_splits, device=device), dy.to(device)


def call(layer: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, ...]:
    """y, dx, dw, dbias."""
    x, m_splits, dy = arguments
    y = layer(x, m_splits)
    module = getattr(layer, "_orig_mod", layer)
    return y.detach(), *torch.autograd.grad(y, (x, module.weight, module.bias), dy)


def assert_all_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        assert_same_bits(a, b)


# --- numbers -------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_weight_quantized_in_each_call(
    device: str, recipe: Float8BlockScaling, dtype: torch.dtype
) -> None:
    quantized = make_layer(device, recipe=recipe, dtype=dtype)
    plain = make_layer(device, recipe=recipe, dtype=dtype, quantized_weight=False)
    without = GroupedTensor.from_parts(quantized.weight.q, quantized.weight.scale, columnwise=False)
    for m_splits in SPLITS:
        arguments = inputs(device, m_splits, dtype)
        results = call(quantized, *arguments)
        assert_all_same(results, call(plain, *arguments))
        x = arguments[0]
        assert_same_bits(
            torch.autograd.grad(
                grouped_linear(x, without, m_splits, quantized.bias, recipe), x, arguments[2]
            )[0],
            results[1],
        )
        with torch.no_grad():
            assert_same_bits(quantized(*arguments[:2]), results[0])


def test_activations_of_another_dtype() -> None:
    quantized, plain = make_layer(dtype=FP32), make_layer(dtype=FP32, quantized_weight=False)
    for autocast in (False, True):
        with torch.autocast("cpu", BF16, enabled=autocast):
            x, m_splits, dy = inputs("cpu", SPLITS[0], FP32 if autocast else torch.float16)
            dy = dy.to(BF16 if autocast else torch.float16)
            results = call(quantized, x, m_splits, dy)
            assert_all_same(results, call(plain, x, m_splits, dy))
        assert results[2].dtype == FP32


def test_errors() -> None:
    w, x = GroupedTensor.quantize(torch.ones(1, 16, 16)), torch.ones(2, 16)
    cases = [
        lambda: make_layer(recipe=None),
        lambda: make_layer(recipe=MXFP8BlockScaling()),
        lambda: make_layer(cache_weights=True),
        lambda: make_layer(single_grouped_weight=False),
        lambda: make_layer(quantized_weight=False, stochastic_rounding=True),
        lambda: make_layer(quantized_weight=False, preserve_high_precision_init=True),
        lambda: grouped_linear(x, w, [2]),
    ]
    sentences = []
    for case in cases:
        with pytest.raises(ValueError, match=r"^(GroupedLinear|grouped_linear): ") as error:
            case()
        sentences.append(str(error.value))
    assert_expected_inline(
        "\n".join(sentences),
        """\
GroupedLinear: quantized_weight needs the recipe Float8BlockScaling, got None
GroupedLinear: quantized_weight needs the recipe Float8BlockScaling, got MXFP8BlockScaling()
GroupedLinear: cache_weights keeps what quantized_weight has already: choose one of them
GroupedLinear: quantized_weight needs single_grouped_weight=True
GroupedLinear: stochastic_rounding needs quantized_weight=True
GroupedLinear: preserve_high_precision_init needs quantized_weight=True
grouped_linear: a quantized weight needs the recipe Float8BlockScaling, got None""",
    )


@DEVICES
@pytest.mark.parametrize("shape", [(E * N, K), (E, K, N), (2 * E, N // 2, K), (2, 2, N, K), (-1,)])
def test_a_view_of_another_shape(shape: tuple[int, ...], device: str) -> None:
    """Its blocks are those of the shape that was quantized, in which it would be read."""
    w, (x, _, _), m_splits = (
        make_layer(device).weight.detach(),
        inputs(device, SPLITS[0]),
        SPLITS[0],
    )
    view, recipe = w.view(shape), Float8BlockScaling()
    for read in (
        lambda: grouped_linear(x, view, m_splits, recipe=recipe),
        lambda: expert_tensors(view, "{}"),
        lambda: load_experts(view, "nowhere", "{}"),
    ):
        assert sentence(read) == (
            f"GroupedTensor: blocks are read in the shape [{E}, {N}, {K}] that was quantized, "
            f"got a view as {list(view.shape)}"
        )
    assert_same_bits(
        grouped_linear(x, view.view(E, N, K), m_splits, recipe=recipe),
        grouped_linear(x, w, m_splits, recipe=recipe),
    )


def test_update_between_forward_and_backward_raises() -> None:
    layer = make_layer()
    x, m_splits, dy = inputs("cpu", SPLITS[0])
    for write in (
        lambda w: w.mul_(2),
        lambda w: w[1].zero_(),
        lambda w: w.copy_(w.detach().clone()),
        lambda w: torch._foreach_add_([w, *w], 1.0),
        lambda w: w.detach()[1:].view(-1).fill_(0),
    ):
        y = layer(x, m_splits)
        with torch.no_grad():
            write(layer.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


# --- birth and travels ---------------------------------------------------------------------------


@DEVICES
def test_initialisation(device: str) -> None:
    """Drawn as a plain weight is, then quantized; what was drawn can be kept."""
    plain = make_layer(device, quantized_weight=False)
    layer = make_layer(device, preserve_high_precision_init=True)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, GroupedTensor)
    assert_same(layer.weight.detach(), GroupedTensor.quantize(plain.weight))
    assert_same_bits(layer.high_precision_init, plain.weight.detach().cpu())
    assert_same_bits(layer.bias, plain.bias)
    parameter, addresses = layer.weight, layer.weight.q.data_ptr()
    layer.reset_parameters()
    assert layer.weight is parameter
    assert layer.weight.q.data_ptr() == addresses
    assert not torch.equal(layer.weight, plain.weight)
    assert make_layer(device).high_precision_init is None
    filled = make_layer(device, init_method=lambda w: w.fill_(3))
    assert (filled.weight == 3).all()


def test_meta_device() -> None:
    layer = make_layer(device="meta", stochastic_rounding=True)
    assert layer.weight.is_meta
    layer.reset_parameters()  # nothing to draw yet
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, GroupedTensor)
    assert layer.weight.stochastic_rounding
    assert layer.weight.isnan().all()  # until it is drawn or loaded
    torch.manual_seed(0)
    layer.reset_parameters()
    assert_same(layer.weight.detach(), make_layer().weight.detach())
    again = make_layer(device="meta").to_empty(device="cpu")
    again.load_state_dict(layer.state_dict())
    assert_same(again.weight.detach(), layer.weight.detach())
    assigned = make_layer(device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    assert_same(assigned.weight.detach(), layer.weight.detach())


def through_torch_save(layer: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save]
)
def test_copies(copied: Callable[[Any], Any]) -> None:
    layer = make_layer()
    twin = copied(layer)
    assert isinstance(twin.weight, nn.Parameter)
    assert_all_same(call(twin, *inputs("cpu", SPLITS[0])), call(layer, *inputs("cpu", SPLITS[0])))
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.any()


def test_module_moves_dtype() -> None:
    layer = make_layer()
    q = layer.weight.q
    for moved in (layer.float(), layer.to("cpu", BF16)):
        assert isinstance(moved.weight, GroupedTensor)
        assert moved.weight.dtype == moved.bias.dtype
        assert_same_bits(moved.weight.q, q)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("to_quantized", [True, False])
@pytest.mark.parametrize("from_quantized", [True, False])
def test_state_dicts_of_either_kind(from_quantized: bool, to_quantized: bool, assign: bool) -> None:
    """Bit for bit between quantized layers, quantized or dequantized where they differ."""
    source = make_layer(quantized_weight=from_quantized)
    target = make_layer(quantized_weight=to_quantized)
    torch.nn.init.zeros_(target.weight)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), strict=True, assign=assign)
    if to_quantized:
        assert_same(target.weight.detach(), make_layer().weight.detach())
    else:
        expected = source.weight.detach()
        expected = expected.dequantize() if from_quantized else expected
        assert_same_bits(target.weight, expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("to_quantized", [True, False])
@pytest.mark.parametrize("from_quantized", [True, False])
def test_state_dicts_with_an_expert_a_key(
    from_quantized: bool, to_quantized: bool, assign: bool
) -> None:
    """weight0, weight1, ... of either kind into one weight; one weight of either kind into them."""
    source = make_layer(quantized_weight=from_quantized)
    state = source.state_dict()
    packed = state.pop("weight")
    apart = state | {f"weight{e}": expert for e, expert in enumerate(packed)}
    target = make_layer(quantized_weight=to_quantized)
    torch.nn.init.zeros_(target.weight)
    target.load_state_dict(apart, strict=True, assign=assign)
    expected = make_layer(quantized_weight=False).weight.detach()
    if to_quantized:
        assert_same(target.weight.detach(), GroupedTensor.quantize(expected))
    elif from_quantized:
        assert_same_bits(target.weight, packed.dequantize())
    else:
        assert_same_bits(target.weight, expected)
    discrete = make_layer(quantized_weight=False, single_grouped_weight=False)
    discrete.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert discrete(torch.ones(T, K, dtype=BF16), [T, 0, 0, 0]).isfinite().all()
    for e, expert in enumerate(packed):
        plain = expert.dequantize() if from_quantized else expert
        assert_same_bits(getattr(discrete, f"weight{e}"), plain)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_micro_batches(backend: str | None) -> None:
    """Gradients in main_grad, for which the quantized weight is the same in each micro-batch."""
    layers = []
    for quantized in (True, False):
        layer = make_layer(
            quantized_weight=quantized,
            cache_weights=not quantized,
            fuse_wgrad_accumulation=True,
        )
        layer.weight.main_grad = torch.full((E, N, K), torch.nan)
        call_of = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
        for i, m_splits in enumerate(SPLITS[:3]):
            x, splits, dy = inputs("cpu", m_splits)
            call_of(x, splits, is_first_microbatch=i == 0).backward(dy)
        assert layer.weight.grad is None
        layers.append(layer)
    assert_same_bits(layers[0].weight.main_grad, layers[1].weight.main_grad)
    assert_same_bits(layers[0].bias.grad, layers[1].bias.grad)


def test_delayed_weight_gradient() -> None:
    layers = [
        make_layer(quantized_weight=q, delay_wgrad_compute=True, save_original_input=True)
        for q in (True, False)
    ]
    for layer in layers:
        x, splits, dy = inputs("cpu", SPLITS[0])
        layer(x, splits).backward(dy)
        layer.backward_dw()
    assert type(layers[0].weight.grad) is Tensor
    assert_same_bits(layers[0].weight.grad, layers[1].weight.grad)


# --- torch.compile -------------------------------------------------------------------------------


def train(layer: Any, function: Callable[..., Tensor], device: str) -> list[Tensor]:
    """Results of a few steps of an optimizer, and the weight's parts in the end."""
    torch.manual_seed(1)  # of rounding by chance
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    results = []
    for m_splits in SPLITS:
        x, splits, dy = inputs(device, m_splits)
        y = function(x, splits)
        y.backward(dy)
        results += [t.clone() for t in (y.detach(), x.grad, layer.weight.grad)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, layer.weight.q, layer.weight.scale, layer.weight.q_t]


@DEVICES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training(backend: str, device: str) -> None:
    """One graph for all steps, and the numbers of eager."""
    layer, twin = (make_layer(device, stochastic_rounding=True) for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for a, b in zip(train(layer, compiled, device), train(twin, twin, device), strict=True):
        assert_same_bits(a, b)
    assert counter.frame_count == 1
    assert isinstance(layer.weight, GroupedTensor)


def test_graph_quantizes_no_weight() -> None:
    layer, backend = make_layer(), AotEagerAndRecordGraphs()
    call(torch.compile(layer, fullgraph=True, backend=backend), *inputs("cpu", SPLITS[0]))
    graphs = backend.fw_graphs + backend.bw_graphs
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert "grouped_linear.grouped_scaled_mm.default" in called
    assert not [name for name in called if "weight" in name and "quantize" in name]


def test_compiled_reading_and_writing() -> None:
    """Members, views and writes inside a graph."""
    w = make_layer().weight

    def read(w: Tensor) -> tuple[Tensor, ...]:
        return w[1], w.detach(), w.view(-1), w[2].t() * 2, w.dequantize(), w.sum()

    def write(w: Tensor) -> Tensor:
        with torch.no_grad():
            w[0] = 1.0
            w[1].mul_(3)
            w.add_(0.5)
        return w.sum()

    twin = copy.deepcopy(w)
    got = torch.compile(read, fullgraph=True, backend="aot_eager")(w)
    for a, b in zip(got, read(w), strict=True):
        assert type(a) is type(b)
        assert a.shape == b.shape
        assert_same_bits(a.float(), b.float())
    assert got[0].q.data_ptr() == w[1].q.data_ptr()
    total = torch.compile(write, fullgraph=True, backend="aot_eager")(w)
    assert_same_bits(total, write(twin))
    assert_same(w.detach(), twin.detach())


def test_compiled_optimizer() -> None:
    layer, twin = (make_layer(stochastic_rounding=True) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (layer, twin)]
    compiled = torch.compile(optimizers[0].step, backend="aot_eager")
    for step in range(3):
        for module, update in ((layer, compiled), (twin, optimizers[1].step)):
            torch.manual_seed(step)
            for p in module.parameters():
                p.grad = torch.randn(p.shape, dtype=BF16)
            update()
    assert_same(layer.weight.detach(), twin.weight.detach())


@needs_hopper
def test_cudagraph_trees() -> None:
    """Two graph launches a step, recorded once, while an optimizer writes the weight."""
    layer, twin = make_layer("cuda"), make_layer("cuda")
    counters.clear()
    with torch._inductor.config.patch(STRICT_GRAPHS):
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (layer, twin)]

        def step(i: int) -> None:
            x, m_splits, dy = inputs("cuda", SPLITS[i % len(SPLITS)])
            torch.compiler.cudagraph_mark_step_begin()
            results = tuple(t.clone() for t in call(compiled, x, m_splits, dy))
            assert_all_same(results, call(twin, x, m_splits, dy))
            for module, optimizer in zip((layer, twin), optimizers, strict=True):
                module.weight.grad, module.bias.grad = (t.clone() for t in results[2:])
                optimizer.step()

        for i in range(12):
            step(i)
        assert_same(layer.weight.detach(), twin.weight.detach())
        with torch.profiler.profile() as profile:
            for i in range(3):
                step(i)
            torch.cuda.synchronize()
    launches = sum(e.count for e in profile.key_averages() if e.key == "cudaGraphLaunch")
    assert launches == 2 * 3
    assert counters["stats"]["unique_graphs"] == 1
    skipped = [key for key in counters["inductor"] if key.startswith("cudagraph_")]
    assert not [key for key in skipped if "skip" in key or "partition" in key], skipped
