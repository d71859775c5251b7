"""Steps of training with everything the layer can do, against the layer that can do none of it.

Each feature, alone and with others, in every mode, recipe and activation dtype, gives the bits of a
plain run: no cache, no fusion, nothing put off, eager. T rows, E groups, K in_features, N
out_features.
"""

import copy
import functools
import gc
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from samples import BF16, FP16, FP32, OPS, RECIPES, assert_same_bits, devices, needs_hopper
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from grouped_linear import GroupedLinear, Recipe, ops, update_scales

T, E, K, N = 40, 3, 32, 48
STEPS, LEARNING_RATE = 2, 0.1
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
MICRO_BATCHES = {BF16: 2, FP16: 1, FP32: 8}
EVERY_DTYPE = pytest.mark.parametrize("dtype", MICRO_BATCHES, ids=str)


@dataclass(frozen=True)
class Feature:
    """Options of the layer, and how it is told which micro-batch is the first."""

    options: dict[str, Any] = field(default_factory=dict)
    flag: str = "none"
    """none, bool or tensor."""
    main_grad: torch.dtype = FP32

    @property
    def fused(self) -> bool:
        return "fuse_wgrad_accumulation" in self.options

    @property
    def later(self) -> bool:
        return "delay_wgrad_compute" in self.options


APART = {"single_grouped_weight": False, "single_grouped_bias": False}
FUSED = {"fuse_wgrad_accumulation": True}
LATER = {"delay_wgrad_compute": True}
CACHED = {"cache_weights": True}
FEATURES = {
    "cached": Feature(CACHED, "bool"),
    "cached_flag": Feature(CACHED, "tensor"),
    "fused": Feature(FUSED),
    "fused_bf16": Feature(FUSED, main_grad=BF16),
    "cached_fused": Feature(CACHED | FUSED, "bool"),
    "cached_fused_flag": Feature(CACHED | FUSED, "tensor"),
    "input_saved": Feature({"save_original_input": True}),
    "apart": Feature(APART),
    "apart_cached_fused": Feature(APART | CACHED | FUSED, "tensor"),
    "later": Feature(LATER),
    "later_apart_cached_fused": Feature(LATER | APART | CACHED | FUSED, "bool"),
}
EVERY_FEATURE = pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)


def make_layer(recipe: Recipe, dtype: torch.dtype, device: str, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    # Under a recipe weights are float32, so that gradients are, as main_grad is.
    weight_dtype = FP32 if recipe else dtype
    return GroupedLinear(E, K, N, recipe=recipe, dtype=weight_dtype, device=device, **options)


# x, m_splits, dy and is_first_microbatch; y and dx
MicroBatch = tuple[Tensor, Tensor, Tensor, Any]
Result = tuple[Tensor, Tensor]
Step = Callable[[Sequence[MicroBatch]], list[Result]]


def batches(dtype: torch.dtype, device: str, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, m_splits and dy, with an empty group, and NaN past the last row."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        m_splits = torch.tensor([[10, 0, 25], [0, 7, 30], [40, 0, 0]][i % 3])
        x, dy = (torch.randn(T, size, generator=generator) for size in (K, N))
        x[int(m_splits.sum()) :] = torch.nan
        x, dy = x.to(device, dtype), dy.to(device, dtype)
        made.append((x.requires_grad_(), m_splits.to(device), dy))
    return made


def weights_of(layer: nn.Module) -> list[Any]:
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def biases_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.startswith("bias")]


def give_main_grads(layer: nn.Module, feature: Feature) -> Tensor:
    """Parts of one buffer, which is returned, after a gap; where the feature has any."""
    weights = weights_of(layer)
    flat = torch.full(
        (E * N * K + 8,), torch.nan, dtype=feature.main_grad, device=weights[0].device
    )
    if feature.fused:
        for w, part in zip(weights, flat[8:].view(len(weights), -1), strict=True):
            w.main_grad = part.view(w.shape)
    return flat


def whole(parts: list[Tensor]) -> Tensor:
    """One tensor of one an expert."""
    return (parts[0] if len(parts) == 1 else torch.stack(parts)).detach().clone()


@torch.no_grad()
def optimizer_step(layer: nn.Module, weight_grad: Tensor) -> None:
    """The same arithmetic for every form of the parameters."""
    weights = weights_of(layer)
    grads = [weight_grad] if len(weights) == 1 else list(weight_grad)
    for w, grad in zip(weights, grads, strict=True):
        w -= (LEARNING_RATE * grad).to(w.dtype)
    for b in biases_of(layer):
        b -= LEARNING_RATE * b.grad
    update_scales(layer)


@functools.cache
def plain_run(
    recipe: Recipe, dtype: torch.dtype, device: str, main_grad: torch.dtype | None
) -> list[Tensor]:
    """y and dx of every micro-batch, and weight and bias gradients of every step.

    main_grad: what weight gradients are added up in, unrounded ones; None for the weight's grad.
    """
    layer, count, results = make_layer(recipe, dtype, device), MICRO_BATCHES[dtype], []
    made = iter(batches(dtype, device, STEPS * count))
    total = torch.empty(E, N, K, dtype=main_grad or layer.weight.dtype, device=device)
    for _ in range(STEPS):
        total.zero_()
        for _, (x, m_splits, dy) in zip(range(count), made, strict=False):
            y = layer(x, m_splits)
            y.backward(dy)
            if main_grad and recipe is None:
                offs = ops.splits_to_offsets(m_splits, T)
                ops.grouped_mm_wgrad_(total, dy, x.detach(), offs)
            else:
                total.copy_(total + layer.weight.grad)
            layer.weight.grad = None
            results += [y.detach(), x.grad]
        results += [total.clone(), layer.bias.grad.clone()]
        optimizer_step(layer, total)
        layer.bias.grad = None
    return results


# --- modes ---------------------------------------------------------------------------------------


def one_by_one(call: Callable[..., Tensor], layer: GroupedLinear, feature: Feature) -> Step:
    """Each micro-batch forward and backward, and what that put off."""

    def step(micro_batches: Sequence[MicroBatch]) -> list[Result]:
        results = []
        for x, m_splits, dy, first in micro_batches:
            y = call(x, m_splits, first)
            y.backward(dy)
            if feature.later:
                layer.backward_dw()
            results.append((y.detach().clone(), x.grad.clone()))
        return results

    return step


def eager(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    return one_by_one(layer, layer, feature)


def compiled(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    return one_by_one(call, layer, feature)


def checkpointed(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """Each forward is computed once more in its backward."""
    call = functools.partial(checkpoint, layer, use_reentrant=False)
    return one_by_one(call, layer, feature)


def checkpointed_reentrant(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """The same, and the first time without gradients."""
    call = functools.partial(checkpoint, layer, use_reentrant=True)
    return one_by_one(call, layer, feature)


def offloaded(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """What is saved for a backward waits in other memory, and comes back in a new place."""

    def pack(t: Tensor) -> tuple[torch.device, Tensor]:
        return t.device, t.detach().cpu().clone(memory_format=torch.contiguous_format)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0], copy=True)

    def call(*arguments: Any) -> Tensor:
        with saved_tensors_hooks(pack, unpack):
            return layer(*arguments)

    return one_by_one(call, layer, feature)


def interleaved(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """Every forward before the first backward, as pipelines do."""

    def step(micro_batches: Sequence[MicroBatch]) -> list[Result]:
        ys = [layer(x, m_splits, first) for x, m_splits, _, first in micro_batches]
        for y, (_, _, dy, _) in zip(ys, micro_batches, strict=True):
            y.backward(dy)
        for _ in ys if feature.later else ():
            layer.backward_dw()
        return [(y.detach(), x.grad) for y, (x, *_) in zip(ys, micro_batches, strict=True)]

    return step


def captured(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """A CUDA graph of forward, backward and what that put off; a graph for each bool."""
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, MicroBatch, Result]] = {}

    def capture(micro_batch: MicroBatch) -> None:
        x, m_splits, dy, first = micro_batch
        static_first = first.clone() if isinstance(first, Tensor) else first
        static = x.detach().clone().requires_grad_(), m_splits.clone(), dy.clone(), static_first
        gc.collect()  # a graph that is freed while another is recorded spoils it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(static[0], static[1], static_first)
            y.backward(static[2])
            if feature.later:
                layer.backward_dw()
            result = y.detach(), static[0].grad
        graphs[key_of(first)] = graph, static, result

    def key_of(first: Any) -> Any:
        return "tensor" if isinstance(first, Tensor) else first

    def step(micro_batches: Sequence[MicroBatch]) -> list[Result]:
        results = []
        for micro_batch in micro_batches:
            key = key_of(micro_batch[3])
            if key not in graphs:
                capture(micro_batch)
            graph, static, (y, dx) = graphs[key]
            with torch.no_grad():
                for old, new in zip(static, micro_batch, strict=True):
                    if isinstance(new, Tensor):
                        old.copy_(new)
            graph.replay()
            results.append((y.clone(), dx.clone()))
        return results

    return step


class WithFlag(nn.Module):
    """A layer whose bool is settled: make_graphed_callables takes tensors alone."""

    def __init__(self, layer: GroupedLinear, first: bool) -> None:
        super().__init__()
        self.layer, self.first = layer, first

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        return self.layer(x, m_splits, self.first)


def graphed(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """torch.cuda.make_graphed_callables; it runs the layer before, so its state starts anew."""
    x, m_splits, _ = batches(dtype, "cuda", 1)[0]
    gc.collect()
    make = functools.partial(torch.cuda.make_graphed_callables, allow_unused_input=True)
    call: Callable[..., Tensor]
    if feature.flag == "bool":
        calls = {f: make(WithFlag(layer, f), (x, m_splits)) for f in (True, False)}

        def call(x: Tensor, m_splits: Tensor, first: bool) -> Tensor:
            return calls[first](x, m_splits)

    elif feature.flag == "tensor":
        call = make(layer, (x, m_splits, torch.tensor(True, device="cuda")))
    else:
        one = make(layer, (x, m_splits))

        def call(x: Tensor, m_splits: Tensor, first: None) -> Tensor:
            return one(x, m_splits)

    return one_by_one(call, layer, feature)


def cudagraph_trees(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """Reduce-overhead mode, which here may not give up in silence."""
    strict = {
        "triton.cudagraphs": True,
        "triton.cudagraph_or_error": True,
        "graph_partition": False,
        "fx_graph_cache": False,  # a graph from there gives up unheard
    }
    graph = torch.compile(layer, fullgraph=True, options=strict)

    def call(*arguments: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return graph(*arguments)

    return one_by_one(call, layer, feature)


MODES = (eager, compiled, checkpointed, checkpointed_reentrant, offloaded, interleaved)
CUDA_MODES = (captured, graphed, cudagraph_trees)
Mode = Callable[[GroupedLinear, Feature, torch.dtype], Step]


def run(feature: Feature, mode: Mode, recipe: Recipe, dtype: torch.dtype, device: str) -> list[Any]:
    """What plain_run gives, by a layer with the feature."""
    layer = make_layer(recipe, dtype, device, **feature.options)
    count, results = MICRO_BATCHES[dtype], []
    weights, biases, flat = weights_of(layer), biases_of(layer), give_main_grads(layer, feature)
    if mode in CUDA_MODES:  # what a graph adds to stays where it is
        for p in biases if feature.fused else layer.parameters():
            p.grad = torch.zeros_like(p)
    step = mode(layer, feature, dtype)
    if layer.scaling_state is not None:
        layer.scaling_state.reset()
    flat.fill_(torch.nan)  # neither zero nor what a graph was recorded with
    made = iter(batches(dtype, device, STEPS * count))
    for _ in range(STEPS):
        if feature.flag == "none":
            flat.zero_()
        micro_batches: list[MicroBatch] = []
        for i, (x, m_splits, dy) in zip(range(count), made, strict=False):
            first: Any = {"none": None, "bool": i == 0}.get(feature.flag)
            if feature.flag == "tensor":
                first = torch.tensor(i == 0, device=device)
            micro_batches.append((x, m_splits, dy, first))
        for result in step(micro_batches):
            results += result
        total = whole([w.main_grad if feature.fused else w.grad for w in weights])
        results += [total, whole([b.grad for b in biases])]
        optimizer_step(layer, total)
        for p in layer.parameters():
            if mode not in CUDA_MODES:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        if feature.fused:
            assert all(w.grad is None for w in weights)
    return results


def refused(feature: Feature, mode: Mode, recipe: Recipe, dtype: torch.dtype) -> str | None:
    """The beginning of the sentence that a combination earns."""
    if "save_original_input" in feature.options and recipe is RECIPES["delayed"]:
        return "GroupedLinear: save_original_input quantizes the input once more"
    if feature.later and mode in (compiled, cudagraph_trees):
        return "GroupedLinear: delay_wgrad_compute keeps operands"
    if feature.later and mode is graphed:
        return "GroupedLinear: backward_dw: "
    several_flags = feature.flag == "tensor" and MICRO_BATCHES[dtype] > 1
    if several_flags and recipe is not None and mode is interleaved:
        return "one of the variables needed for gradient computation has been modified"
    return None


def check(feature: Feature, mode: Mode, recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    sentence = refused(feature, mode, recipe, dtype)
    if sentence is not None:
        with pytest.raises(Exception, match=sentence):
            run(feature, mode, recipe, dtype, device)
        return
    actual = run(feature, mode, recipe, dtype, device)
    expected = plain_run(recipe, dtype, device, feature.main_grad if feature.fused else None)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@DEVICES
@EVERY_DTYPE
@EVERY_RECIPE
@pytest.mark.parametrize("mode", MODES)
@EVERY_FEATURE
def test_features(
    feature: Feature, mode: Mode, recipe: Recipe, dtype: torch.dtype, device: str
) -> None:
    check(feature, mode, recipe, dtype, device)


@needs_hopper
@EVERY_DTYPE
@EVERY_RECIPE
@pytest.mark.parametrize("mode", [captured, graphed])
@EVERY_FEATURE
def test_features_captured(
    feature: Feature, mode: Mode, recipe: Recipe, dtype: torch.dtype
) -> None:
    check(feature, eager, recipe, dtype, "cuda")  # loads the kernels
    check(feature, mode, recipe, dtype, "cuda")


@needs_hopper
@EVERY_RECIPE
@pytest.mark.parametrize(
    "name", ["cached", "cached_flag", "cached_fused_flag", "apart_cached_fused"]
)
def test_features_under_cudagraph_trees(name: str, recipe: Recipe) -> None:
    check(FEATURES[name], cudagraph_trees, recipe, BF16, "cuda")


# --- besides steps -------------------------------------------------------------------------------


def refuses(feature: Feature, recipe: Recipe) -> bool:
    return refused(feature, eager, recipe, BF16) is not None


@DEVICES
@EVERY_RECIPE
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@EVERY_FEATURE
def test_without_gradients(feature: Feature, mode: Any, recipe: Recipe, device: str) -> None:
    """The numbers of training, and nothing is left behind."""
    if refuses(feature, recipe):
        return
    layer = make_layer(recipe, FP32, device, **feature.options)
    flat, expected = give_main_grads(layer, feature), plain_run(recipe, FP32, device, None)[0]
    x, m_splits, _ = batches(FP32, device, 1)[0]
    with mode():
        for first in {"none": (None,), "bool": (True, False)}.get(
            feature.flag, tuple(torch.tensor([True, False], device=device))
        ):
            assert_same_bits(layer(x, m_splits, first), expected)
    assert flat.isnan().all()
    if feature.later:
        with pytest.raises(RuntimeError, match="no backward has left anything to do"):
            layer.backward_dw()


def through_pickle(layer: GroupedLinear, feature: Feature, recipe: Recipe) -> GroupedLinear:
    return pickle.loads(pickle.dumps(layer))


def through_deepcopy(layer: GroupedLinear, feature: Feature, recipe: Recipe) -> GroupedLinear:
    return copy.deepcopy(layer)


def through_torch_save(layer: GroupedLinear, feature: Feature, recipe: Recipe) -> GroupedLinear:
    file = io.BytesIO()
    torch.save(layer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def through_checkpoints(layer: GroupedLinear, feature: Feature, recipe: Recipe) -> GroupedLinear:
    """Into a plain layer's parameters and back, strictly."""
    plain, twin = (
        make_layer(recipe, FP32, "cpu"),
        make_layer(recipe, FP32, "cpu", **feature.options),
    )
    for source, target in ((layer, plain), (plain, twin)):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        target.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return twin


@EVERY_RECIPE
@pytest.mark.parametrize(
    "travel", [through_deepcopy, through_pickle, through_torch_save, through_checkpoints]
)
@EVERY_FEATURE
def test_a_layer_that_travelled(feature: Feature, travel: Any, recipe: Recipe) -> None:
    """Trains on as the one that stayed at home; the two are apart."""
    if refuses(feature, recipe):
        return
    layer = make_layer(recipe, FP32, "cpu", **feature.options)
    first = {"none": None, "bool": True, "tensor": torch.tensor(True)}[feature.flag]
    (x, m_splits, dy), (x2, m_splits2, dy2) = batches(FP32, "cpu", 2)
    give_main_grads(layer, feature).zero_()
    eager(layer, feature, FP32)([(x, m_splits, dy, first)])
    optimizer_step(layer, torch.ones(E, N, K))
    layer.zero_grad()
    results = []
    for trained in (travel(layer, feature, recipe), layer):
        give_main_grads(trained, feature).zero_()
        x2.grad = None
        step = eager(trained, feature, FP32)
        results.append([*step([(x2, m_splits2, dy2, first)])[0]])
        weights = weights_of(trained)
        total = whole([w.main_grad if feature.fused else w.grad for w in weights])
        results[-1] += [total, whole([b.grad for b in biases_of(trained)])]
        optimizer_step(trained, total)  # the other one does not see it
    for a, e in zip(*results, strict=True):
        assert_same_bits(a, e)
