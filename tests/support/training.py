# SPDX-License-Identifier: Apache-2.0
"""Features of layers, modes to train them in, and steps, against those of a plain layer.

T rows, E groups, K in_features, N out_features.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from grouped_linear import DelayedScaling, GroupedLinear, GroupedMLP, Recipe, ops, update_scales
from grouped_linear.recipes import DelayedScalingState
from support.compare import assert_all_same_bits
from support.groups import experts_of
from support.tensors import BF16, FP16, FP32

T, E, K, N = 40, 3, 32, 48


@dataclass(frozen=True)
class Feature:
    """Options of the layer, and the kind of is_first_microbatch that it gets."""

    options: dict[str, Any] = field(default_factory=dict)
    flag: str = "none"
    """none, bool or tensor."""
    main_grad: torch.dtype = FP32

    @property
    def fused(self) -> bool:
        return "fuse_wgrad_accumulation" in self.options

    @property
    def deferred(self) -> bool:
        return "delay_wgrad_compute" in self.options


PER_EXPERT = {"single_grouped_weight": False, "single_grouped_bias": False}
FUSED = {"fuse_wgrad_accumulation": True}
DEFERRED = {"delay_wgrad_compute": True}
CACHED = {"cache_weights": True}
FEATURES = {
    "plain": Feature(),
    "cached": Feature(CACHED, "bool"),
    "cached_flag": Feature(CACHED, "tensor"),
    "fused": Feature(FUSED),
    "fused_bf16": Feature(FUSED, main_grad=BF16),
    "cached_fused": Feature(CACHED | FUSED, "bool"),
    "cached_fused_flag": Feature(CACHED | FUSED, "tensor"),
    "input_saved": Feature({"save_original_input": True}),
    "per_expert": Feature(PER_EXPERT),
    "per_expert_cached_fused": Feature(PER_EXPERT | CACHED | FUSED, "tensor"),
    "deferred": Feature(DEFERRED),
    "deferred_per_expert_cached_fused": Feature(DEFERRED | PER_EXPERT | CACHED | FUSED, "bool"),
}
# x, m_splits, dy and is_first_microbatch; y and dx
MicroBatch = tuple[Tensor, Tensor, Tensor, Any]
Result = tuple[Tensor, Tensor]
Step = Callable[[Sequence[MicroBatch]], list[Result]]


class Routed(nn.Module):
    """A GroupedMLP that is called as the modes below call a layer.

    Which experts a token goes to follows from m_splits; past their sum, where x is NaN, to none.
    Some experts have no tokens.
    """

    def __init__(self, mlp: GroupedMLP) -> None:
        super().__init__()
        self.mlp = mlp
        self.score = nn.Parameter(torch.rand(T, 2, device=mlp.down_proj.device))

    @property
    def weights(self) -> list[Any]:
        return [self.mlp.gate_up_proj, self.mlp.down_proj]

    def forward(self, x: Tensor, m_splits: Tensor, first: Tensor | bool | None = None) -> Tensor:
        return self.mlp(x, self.score, experts_of(m_splits, T), first)


def make_mlp(recipe: Recipe | None, dtype: torch.dtype, device: str, **options: Any) -> Routed:
    torch.manual_seed(0)
    # Under a recipe weights are float32, so that gradients are, as main_grad is.
    like: dict[str, Any] = {"dtype": FP32 if recipe else dtype, "device": device}
    return Routed(GroupedMLP(E, K, N, recipe=recipe, **options, **like))


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


def one_by_one(call: Callable[..., Tensor], layer: GroupedLinear, feature: Feature) -> Step:
    """Runs the forward and backward of each micro-batch in turn, then its deferred wgrad."""

    def step(micro_batches: Sequence[MicroBatch]) -> list[Result]:
        results = []
        for x, m_splits, dy, first in micro_batches:
            y = call(x, m_splits, first)
            y.backward(dy)
            if feature.deferred:
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
    """Activation checkpointing: each backward recomputes its forward."""
    call = functools.partial(checkpoint, layer, use_reentrant=False)
    return one_by_one(call, layer, feature)


def checkpointed_reentrant(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """Reentrant checkpointing, whose first forward runs without gradients."""
    call = functools.partial(checkpoint, layer, use_reentrant=True)
    return one_by_one(call, layer, feature)


def offloaded(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """Saved tensors are offloaded to the CPU and come back at another address."""

    def pack(t: Tensor) -> tuple[torch.device, Tensor]:
        return t.device, t.detach().cpu().clone(memory_format=torch.contiguous_format)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0], copy=True)

    def call(*arguments: Any) -> Tensor:
        with saved_tensors_hooks(pack, unpack):
            return layer(*arguments)

    return one_by_one(call, layer, feature)


def interleaved(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """All forwards run before the first backward, as in pipeline parallelism."""

    def step(micro_batches: Sequence[MicroBatch]) -> list[Result]:
        ys = [layer(x, m_splits, first) for x, m_splits, _, first in micro_batches]
        for y, (_, _, dy, _) in zip(ys, micro_batches, strict=True):
            y.backward(dy)
        for _ in ys if feature.deferred else ():
            layer.backward_dw()
        return [(y.detach(), x.grad) for y, (x, *_) in zip(ys, micro_batches, strict=True)]

    return step


def captured(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """A CUDA graph of forward, backward and deferred wgrad, one for each value of a bool."""
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
            if feature.deferred:
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
    """A layer with a fixed is_first_microbatch: make_graphed_callables takes only tensors."""

    def __init__(self, layer: GroupedLinear, first: bool) -> None:
        super().__init__()
        self.layer, self.first = layer, first

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        return self.layer(x, m_splits, self.first)


def graphed(layer: GroupedLinear, feature: Feature, dtype: torch.dtype) -> Step:
    """make_graphed_callables runs the layer to warm up, so the caller resets the state."""
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
    """Reduce-overhead mode that raises where it would fall back to eager."""
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


CUDA_MODES = (captured, graphed, cudagraph_trees)
Mode = Callable[[GroupedLinear, Feature, torch.dtype], Step]


# --- steps ---------------------------------------------------------------------------------------

LEARNING_RATE = 0.01
# Micro-batches of each step.
STEPS: dict[torch.dtype, tuple[int, ...]] = {BF16: (1, 2), FP16: (2, 1), FP32: (1, 8)}
Make = Callable[..., Any]  # a layer of a recipe, a dtype, a device and options


def weights_of(layer: Any) -> list[list[Any]]:
    """The parameters of each weight: one, or one for each expert."""
    if isinstance(layer, Routed):
        return [[w] for w in layer.weights]
    return [[p for name, p in layer.named_parameters() if name.startswith("weight")]]


def others_of(layer: Any) -> list[nn.Parameter]:
    """The scores of a routed layer, or all biases."""
    weights = {id(w) for parts in weights_of(layer) for w in parts}
    return [p for p in layer.parameters() if id(p) not in weights]


def whole(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of one an expert."""
    return (parts[0] if len(parts) == 1 else torch.stack([*parts])).detach().clone()


def give_main_grads(layer: Any, feature: Feature) -> list[Tensor]:
    """Of each weight parts of one buffer, after a gap; the buffers, where the feature has any."""
    buffers = []
    for parts in weights_of(layer) if feature.fused else ():
        size = sum(w.numel() for w in parts)
        kind = {"dtype": feature.main_grad, "device": parts[0].device}
        buffers.append(torch.full((size + 8,), torch.nan, **kind))
        for w, part in zip(parts, buffers[-1][8:].view(len(parts), -1), strict=True):
            w.main_grad = part.view(w.shape)
    return buffers


def gradients_of(layer: Any, feature: Feature) -> list[Tensor]:
    """Of each weight, and of the others."""
    weights = [
        whole([w.main_grad if feature.fused else w.grad for w in parts])
        for parts in weights_of(layer)
    ]
    return [*weights, whole([p.grad for p in others_of(layer)])]


@torch.no_grad()
def optimizer_step(layer: Any, gradients: Sequence[Tensor]) -> None:
    """The same arithmetic for every form of the parameters; gradients of the weights alone."""
    for parts, whole_gradient in zip(weights_of(layer), gradients, strict=False):
        of_parts = [whole_gradient] if len(parts) == 1 else [*whole_gradient]
        for w, gradient in zip(parts, of_parts, strict=True):
            w -= (LEARNING_RATE * gradient).to(w.dtype)
    for p in others_of(layer):
        p -= LEARNING_RATE * p.grad
    update_scales(layer)


class WgradOperands(TorchDispatchMode):
    """What every weight gradient of unquantized operands is the product of."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.grouped_linear.grouped_mm_wgrad.default:
            dy, x, offs, _, *rows = (*args, *(None,) * 3)[:6]
            self.operands.append((dy, x, offs, None, *rows))  # as grouped_mm_wgrad_ takes them
        return func(*args, **(kwargs or {}))


@functools.cache
def plain_run(
    make: Make,
    recipe: Recipe | None,
    dtype: torch.dtype,
    device: str,
    main_grad: torch.dtype | None = None,
) -> list[Tensor]:
    """y and dx of every micro-batch; gradients of the weights and of the others of every step.

    main_grad: what weight gradients are added up in, unrounded ones; None for the weight's grad.
    """
    layer, results = make(recipe, dtype, device), []
    made = iter(batches(dtype, device, sum(STEPS[dtype])))
    weights = [w for (w,) in weights_of(layer)]
    totals = [torch.empty_like(w, dtype=main_grad, requires_grad=False) for w in weights]
    for count in STEPS[dtype]:
        for total in totals:
            total.zero_()
        for _, (x, m_splits, dy) in zip(range(count), made, strict=False):
            y, products = layer(x, m_splits), WgradOperands()
            unrounded = main_grad is not None and recipe is None
            with products if unrounded else nullcontext():
                y.backward(dy[:, : y.size(1)])
            with torch.no_grad():
                for total, w in zip(totals, weights, strict=True):
                    if unrounded:  # the last weight's product is the first
                        ops.grouped_mm_wgrad_(total, *products.operands.pop())
                    else:
                        total.copy_(total + w.grad)
                    w.grad = None
            results += [y.detach(), x.grad]
        results += [*(t.clone() for t in totals), whole([p.grad for p in others_of(layer)])]
        optimizer_step(layer, totals)
        for p in others_of(layer):
            p.grad = None
    assert all(t.isfinite().all() for t in results)
    return results


def flag_of(kind: str, first: bool, device: str) -> Any:
    return {"none": None, "bool": first}.get(kind, torch.tensor(first, device=device))


def run(
    make: Make, feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype, device: str
) -> list[Any]:
    """What plain_run gives, by a layer with the feature."""
    layer, results = make(recipe, dtype, device, **feature.options), []
    main_grads = give_main_grads(layer, feature)
    if mode in CUDA_MODES:  # what a graph adds to stays where it is
        for p in others_of(layer) if feature.fused else layer.parameters():
            p.grad = torch.zeros_like(p)
    step = mode(layer, feature, dtype)
    for module in layer.modules():  # a mode may have run the layer
        if isinstance(module, DelayedScalingState):
            module.reset()
    for main_grad in main_grads:  # neither zero nor what a graph was recorded with
        main_grad.fill_(torch.nan)
    made = iter(batches(dtype, device, sum(STEPS[dtype])))
    for count in STEPS[dtype]:
        for main_grad in main_grads if feature.flag == "none" else ():
            main_grad.zero_()
        features = K if isinstance(layer, Routed) else N
        micro_batches = [
            (x, m_splits, dy[:, :features], flag_of(feature.flag, i == 0, device))
            for i, (x, m_splits, dy) in zip(range(count), made, strict=False)
        ]
        for result in step(micro_batches):
            results += result
        gradients = gradients_of(layer, feature)
        results += gradients
        optimizer_step(layer, gradients)
        for parts in weights_of(layer) if feature.fused else ():
            assert all(w.grad is None for w in parts)
        for p in layer.parameters():
            if mode not in CUDA_MODES:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
    return results


def refused(feature: Feature, mode: Mode, recipe: Recipe | None) -> str | None:
    """The beginning of the sentence that a combination earns."""
    if "save_original_input" in feature.options and isinstance(recipe, DelayedScaling):
        return "GroupedLinear: save_original_input quantizes the input once more"
    if feature.deferred and mode in (compiled, cudagraph_trees):
        return "GroupedLinear: delay_wgrad_compute keeps operands"
    if feature.deferred and mode is graphed:
        return "GroupedLinear: backward_dw: "
    if feature.flag == "tensor" and recipe is not None and mode is interleaved:
        return "a tensor that the forward saved has been modified by an inplace operation"
    return None


def check(
    make: Make, feature: Feature, mode: Mode, recipe: Recipe | None, dtype: torch.dtype, device: str
) -> None:
    """The feature in the mode has the bits of a plain run, or is refused."""
    sentence = refused(feature, mode, recipe)
    if sentence is not None:
        with pytest.raises(Exception, match=sentence):
            run(make, feature, mode, recipe, dtype, device)
        return
    actual = run(make, feature, mode, recipe, dtype, device)
    main_grad = feature.main_grad if feature.fused else None
    assert_all_same_bits(actual, plain_run(make, recipe, dtype, device, main_grad))
