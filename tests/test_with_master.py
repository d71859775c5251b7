# SPDX-License-Identifier: Apache-2.0
"""Weights with their high-precision numbers: no write makes the FP8 ones beside them disagree.

Each way of writing a weight is done to a layer whose weights are kept so, and to a plain layer.
Both must then have the same parameters and compute the same bits, eager, compiled and in CUDA
graphs.

E experts, N out_features, K in_features.
"""

import copy
import io
import pickle
import re
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from grouped_linear import Float8BlockScaling, Float8CurrentScaling, Format, GroupedLinear, Recipe
from grouped_linear.quantized import with_master
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Layouts, Operands
from grouped_linear.recipes.quantize_weight import refresh_weight_
from support.compare import assert_all_same_bits, assert_same_bits, outcome
from support.devices import needs_gpu
from support.errors import sentence
from support.fresh import assert_fresh, rounded
from support.graphs import captured
from support.pairs import pairwise
from support.processes import one_process

E, N, K = 3, 144, 288
aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
RECIPES = {
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "qat": Float8BlockScaling(qat="mxfp4"),
    "qat_16_bits": Recipe(weight=Format(qat="mxfp4")),
}
DTYPES = {"bf16": BF16, "fp32": FP32, "fp16": torch.float16}


def make_layer(
    weights: str | None, recipe: Recipe, dtype: torch.dtype, device: str
) -> GroupedLinear:
    torch.manual_seed(0)
    options: dict[str, Any] = {"recipe": recipe, "dtype": dtype, "device": device}
    layer = GroupedLinear(E, K, N, **options)
    if weights == "both":
        layer.weight = nn.Parameter(GroupedTensorWithMaster.quantize(layer.weight.detach(), recipe))
    return layer


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return x.requires_grad_(), torch.tensor([10, 0, 25], device=device)


def step_of(cls: Any, **options: Any) -> Callable[[Any], None]:
    """Two steps of an optimizer that is made for them."""

    def step(layer: Any) -> None:
        optimizer = cls(layer.parameters(), lr=0.05, **options)
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            for p in layer.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            optimizer.step()
            optimizer.zero_grad()

    return step


def muon_step(layer: Any) -> None:
    """As docs/quantized_weights.md has it: torch's, by matrices that share the weight's memory."""
    matrices = [nn.Parameter(w) for w in layer.weight.detach()]
    muon = torch.optim.Muon(matrices, lr=0.05)
    for seed, w in enumerate(matrices):
        generator = torch.Generator().manual_seed(seed)
        w.grad = torch.randn(w.shape, generator=generator).to(w.device, w.dtype)
    muon.step()


def schedule_free_steps(layer: Any) -> None:
    """Two steps of schedule-free SGD, then its average: the parameter is moved by lerp_."""
    zs = [
        p.detach().clone().dequantize() if is_kept(p) else p.detach().clone()
        for p in layer.parameters()
    ]
    with torch.no_grad():
        for step in (1, 2):
            for p, z in zip(layer.parameters(), zs, strict=True):
                generator = torch.Generator().manual_seed(step)
                grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.lerp_(z, weight=1 / step)
                p.add_(grad, alpha=0.05 * (0.9 * (1 - 1 / step) - 1))
                z.sub_(grad, alpha=0.05)
        for p, z in zip(layer.parameters(), zs, strict=True):
            p.lerp_(z, weight=1 - 1 / 0.9)


def compiled_step(layer: Any) -> None:
    """Of an optimizer, as one graph."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=torch.tensor(0.05), fused=True)
    torch.compile(step_with(optimizer, layer), backend="aot_eager")()


def step_with(optimizer: Any, layer: Any) -> Callable[[], None]:
    for p in layer.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(6)).to(p)

    def step() -> None:
        optimizer.step()

    return step


def saved(module: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file)
    return state


def load_other(assign: bool) -> Callable[[Any], None]:
    def load(layer: Any) -> None:
        state = saved(layer)
        assert not any(isinstance(t, GroupedTensorWithMaster) for t in state.values())
        layer.load_state_dict({name: t * 1.25 for name, t in state.items()}, assign=assign)

    return load


def load_checkpoint_in_place(layer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"layer": layer.state_dict()}, checkpoint_id=folder, no_dist=True)
        with torch.no_grad():
            layer.weight.zero_()
        state = {"layer": layer.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)  # and nothing else


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w

    def right_inverse(self, w: Tensor) -> Tensor:
        return w


def parametrized(leave: bool) -> Callable[[Any], None]:
    def there_and_back(layer: Any) -> None:
        parametrize.register_parametrization(layer, "weight", Doubled())
        layer(*inputs(layer.bias.device.type, layer.bias.dtype))
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=leave)

    return there_and_back


def normalized(layer: Any) -> None:
    weight_norm(layer, "weight")
    layer(*inputs(layer.bias.device.type, layer.bias.dtype)).sum().backward()
    layer.zero_grad()
    parametrize.remove_parametrizations(layer, "weight")


def swapped(layer: Any) -> None:
    other = copy.deepcopy(layer.weight)
    with torch.no_grad():
        other.mul_(-2)
    torch.utils.swap_tensors(layer.weight, other)


def averaged(layer: Any) -> None:
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for _ in range(2):
        layer.weight.data.mul_(1.5)
        average.update_parameters(layer)
    layer.load_state_dict(average.module.state_dict())


def through_vector(layer: Any) -> None:
    vector_to_parameters(parameters_to_vector(layer.parameters()) * 0.75, layer.parameters())


def assign(layer: Any, name: str, value: Any) -> None:
    setattr(layer.weight, name, value)


no_grad = torch.no_grad()


def half_way(write: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    """A write that raises after it has written something, on CPUs, and is caught."""

    @no_grad
    def caught(layer: Any) -> None:
        if layer.weight.device.type == "cpu":
            with pytest.raises((RuntimeError, IndexError)):
                write(layer.weight)

    return caught


def foreach_half_way(name: str) -> Callable[[Any], None]:
    """The second tensors do not fit."""

    def write(w: Tensor) -> None:
        more = [0.5] if "lerp" in name else []
        other = [torch.full_like(w, 0.5), torch.ones(5)]
        getattr(torch, name)([w, torch.ones(3)], other, *more)

    return half_way(write)


BEYOND = torch.tensor([0, 1, 99])
WRITES: dict[str, Callable[[Any], Any]] = {
    "sgd": step_of(torch.optim.SGD, momentum=0.9),
    "adamw": step_of(torch.optim.AdamW, foreach=False),
    "foreach": step_of(torch.optim.AdamW, foreach=True),
    "fused": step_of(torch.optim.AdamW, fused=True),
    "amsgrad": step_of(torch.optim.Adam, fused=True, amsgrad=True, weight_decay=0.1),
    "rmsprop": step_of(torch.optim.RMSprop, foreach=True),
    "adafactor": step_of(torch.optim.Adafactor),
    "compiled": compiled_step,
    "muon": muon_step,
    "schedule-free": schedule_free_steps,
    "copy_": no_grad(lambda m: m.weight.copy_(torch.linspace(-1, 1, K).expand(E, N, K))),
    "uniform_": no_grad(
        lambda m: m.weight.uniform_(generator=torch.Generator(m.weight.device).manual_seed(3))
    ),
    "data.mul_": lambda m: m.weight.data.mul_(1.25),
    "data +=": lambda m: assign(m, "data", m.weight.data.__iadd__(0.5)),
    "data =": lambda m: assign(m, "data", m.weight.data * 3),
    "data of": lambda m: assign(m, "data", copy.deepcopy(m.weight).data),
    "expert": no_grad(lambda m: m.weight[1].mul_(-2)),
    "experts": no_grad(lambda m: m.weight[1:].mul_(-2)),
    "rows": no_grad(lambda m: m.weight[:, 7:130].add_(1)),
    "element": no_grad(lambda m: m.weight.__setitem__((2, 143, 271), 99.0)),
    "mask": no_grad(lambda m: m.weight.__setitem__(m.weight < 0, 0.0)),
    "transposed": no_grad(lambda m: m.weight.mT[0].add_(0.25)),
    "flat": no_grad(lambda m: m.weight.view(-1)[1000:2000].zero_()),
    "across experts": no_grad(lambda m: m.weight.view(-1)[K : K + N * K].view(N, K).mul_(2)),
    "view of data": lambda m: m.weight.data.view(E, -1).t()[100:200].fill_(5),
    "unbind": no_grad(lambda m: [w.mul_(i + 1) for i, w in enumerate(m.weight)]),
    "foreach views": no_grad(lambda m: torch._foreach_mul_(list(m.weight.unbind()), 1.5)),
    "index_copy_": no_grad(
        lambda m: m.weight.index_copy_(
            0, torch.tensor([2], device=m.weight.device), m.weight[:1].clone()
        )
    ),
    "addcmul_": no_grad(lambda m: m.weight.addcmul_(m.weight, m.weight, value=0.1)),
    "out=": no_grad(lambda m: torch.mul(m.weight.clone(), 2, out=m.weight)),
    "clip": lambda m: nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, torch.tensor(1.0)),
    "vector": through_vector,
    "load": load_other(assign=False),
    "load assign": load_other(assign=True),
    "load own": lambda m: m.load_state_dict(m.state_dict()),
    "write state": lambda m: [t.mul_(0.5) for t in m.state_dict().values()],
    "checkpoint": load_checkpoint_in_place,
    "parametrize": parametrized(leave=True),
    "parametrize away": parametrized(leave=False),
    "weight_norm": normalized,
    "swap": swapped,
    "average": averaged,
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "reset": lambda m: (torch.manual_seed(5), m.reset_parameters()),
    "replace": lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach() * 2)),
    "set_": no_grad(lambda m: m.weight.set_(m.weight * 2)),
    "data.set_": lambda m: m.weight.data.set_(m.weight.detach() * 2),
    "unsafe_chunk": no_grad(lambda m: m.weight.unsafe_chunk(2)[1].mul_(2)),
    "unsafe_split": no_grad(lambda m: m.weight.unsafe_split(2)[1].mul_(2)),
    "unsafe_split_with_sizes": no_grad(
        lambda m: m.weight.unsafe_split_with_sizes([1, 2])[0].neg_()
    ),
    "_unsafe_view": no_grad(lambda m: aten._unsafe_view(m.weight, [E * N, K])[7:150].mul_(2)),
    "reshape": no_grad(lambda m: m.weight.reshape(-1, K)[150].zero_()),
    "inference": torch.inference_mode()(lambda m: m.weight.detach().flatten().mul_(1.5)),
    "as_strided": no_grad(lambda m: m.weight[1].as_strided((N, K), (K, 1), 0).mul_(2)),
    "another dtype": no_grad(
        lambda m: m.weight.view(torch.uint8).view(-1)[2 * N * K :][:K].zero_()
    ),
    "_foreach_mul_ half way": foreach_half_way("_foreach_mul_"),
    "_foreach_add_ half way": foreach_half_way("_foreach_add_"),
    "_foreach_copy_ half way": foreach_half_way("_foreach_copy_"),
    "_foreach_lerp_ half way": foreach_half_way("_foreach_lerp_"),
    "index_put_ half way": half_way(
        lambda w: w.view(-1).index_put_((BEYOND + w.numel() - 2,), w.new_ones(3))
    ),
    "index_copy_ half way": half_way(
        lambda w: w.view(-1).index_copy_(0, BEYOND + w.numel() - 2, w.new_ones(3))
    ),
    "scatter_ half way": half_way(
        lambda w: w.view(-1).scatter_(0, BEYOND + w.numel() - 2, w.new_ones(3))
    ),
    "put_ half way": half_way(lambda w: w.put_(BEYOND + w.numel() - 2, w.new_ones(3))),
    "masked_scatter_ half way": half_way(
        lambda w: w.masked_scatter_(torch.ones_like(w, dtype=torch.bool), w.new_zeros(500))
    ),
}


def pickled(layer: Any) -> Any:
    if layer._forward_pre_hooks or layer._load_state_dict_pre_hooks:
        return copy.deepcopy(layer)  # torch's weight_norm leaves a hook that no pickle takes
    return pickle.loads(pickle.dumps(layer))


@torch.compile(fullgraph=True, backend="aot_eager")
def compiled_call(layer: nn.Module, x: Tensor, m_splits: Tensor) -> Any:
    return layer(x, m_splits)


class Pair:
    """A layer with both kinds of numbers and a plain one, which must not be told apart."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, device: str) -> None:
        self.layers = [make_layer(weights, recipe, dtype, device) for weights in ("both", None)]
        self.device, self.graph = device, None

    def do(self, write: Callable[[Any], Any]) -> None:
        try:
            for layer in self.layers:
                write(layer)
        except RuntimeError as refusal:
            # A compiled call, or a compiled optimizer's step on a GPU, holds a parameter weakly.
            # torch then refuses to swap it, as a change of dtype would: nothing has changed.
            if not re.search("Couldn't swap|Cannot swap", str(refusal)):
                raise

    def check(self) -> None:
        kept, plain = self.layers
        for (name, p), q in zip(kept.named_parameters(), plain.parameters(), strict=True):
            assert_same_bits(p.detach().clone().dequantize() if is_kept(p) else p, q)
            assert p.dtype == q.dtype, name
        dtype = plain.weight.dtype
        results = []
        for layer in self.layers:
            x, m_splits = inputs(self.device, dtype)
            results.append(outcome(layer(x, m_splits), (x, *layer.parameters())))
        assert_all_same_bits(*results)
        self.check_graphs(results[1][0], dtype)

    def check_graphs(self, expected: Tensor, dtype: torch.dtype) -> None:
        layer = self.layers[0]
        if self.device != "cuda":
            return
        key = [layer.weight.data_ptr(), dtype, is_kept(layer.weight) and layer.weight.q.data_ptr()]
        if self.graph is None or self.graph[0] != key:
            x, m_splits = inputs(self.device, dtype)
            with torch.no_grad():
                graph, y = captured(partial(layer, x, m_splits))
            self.graph = key, graph, y, x, m_splits
        _, graph, y, *_ = self.graph
        graph.replay()
        assert_same_bits(y, expected)

    @torch._dynamo.config.patch(recompile_limit=256)  # for each recipe, dtype and parametrization
    def check_compiled(self) -> None:
        results = []
        for layer in self.layers:
            x, m_splits = inputs(self.device, self.layers[1].weight.dtype)
            results.append(outcome(compiled_call(layer, x, m_splits), (x, layer.weight)))
        assert_all_same_bits(*results)


def is_kept(p: Tensor) -> bool:
    return isinstance(p, GroupedTensorWithMaster)


def through_file(t: Any, zipped: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(t, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file)


COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": torch.clone,
    "to": lambda w: w.to(w.device, copy=True),
    "deepcopy": copy.deepcopy,
    "file": through_file,
    "older file": partial(through_file, zipped=False),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("how", COPIES)
def test_copies_have_memory_of_their_own(how: str, requires_grad: bool, device: str) -> None:
    """Those of a parameter are parameters, with the attributes that others set."""
    p: Any = make_layer("both", RECIPES["block"], BF16, device).weight
    p.requires_grad_(requires_grad).note = "kept"
    w, before = p.detach(), [part.clone() for part in (p.master, p.q, p.scale, p.q_t)]
    copied = COPIES[how](w if how in ("clone", "to") else p)
    if isinstance(copied, nn.Parameter):
        assert (copied.requires_grad, copied.note) == (requires_grad, "kept")
    else:
        assert how in ("clone", "to")
    copied.detach().mul_(-1)
    assert_all_same_bits((w.master, w.q, w.scale, w.q_t), before)
    assert_same_bits(copied.q.float(), -w.q.float())
    assert_fresh(copied)


def test_a_file_with_other_numbers_is_refused() -> None:
    """Kernels would read outside of them."""
    make, (state,) = nn.Parameter(small()).__reduce_ex__(2)
    q, scale, q_t = state["parts"]
    others = (q[:1], scale, q_t), (q, scale[:, :0], q_t), (q, scale, q), (q.int(), scale, q_t)
    for parts in others:
        assert sentence(partial(make, state | {"parts": parts})) == (
            "GroupedTensorWithMaster: the file has FP8 numbers that are not those of a weight "
            "[2, 32, 16]"
        )


@pytest.mark.parametrize(
    ("how", "shares"), [("deepcopy", True), ("file", False), ("older file", False)]
)
def test_copies_of_what_shares_memory(how: str, shares: bool) -> None:
    """A deepcopy shares it too, with its quantized numbers. A file does not."""
    w = nn.Parameter(GroupedTensorWithMaster.quantize(torch.randn(2, 32, 16)), False)
    whole, expert = COPIES[how]([w, w[1]])
    expert.zero_()
    assert_fresh(whole)
    assert bool(whole[1].any()) != shares


@pytest.mark.parametrize(
    ("how", "dtype", "recipe"), pairwise({how: how for how in WRITES}, DTYPES, RECIPES)
)
def test_a_write_leaves_it_fresh(how: str, dtype: torch.dtype, recipe: Recipe, device: str) -> None:
    pair = Pair(recipe, dtype, device)
    pair.check()
    pair.do(WRITES[how])
    pair.check()


FORMATS = RECIPES | {
    "any_scale": Float8BlockScaling(power_of_two_scales=False),
    "own": Recipe(weight=Format(quantize=rounded)),
}


def kept(weights: Any, recipe: Recipe, dtype: torch.dtype = FP32) -> GroupedLinear:
    return GroupedLinear(E, K, N, recipe=recipe, weights=weights, bias=False, dtype=dtype)


def small() -> Any:
    return GroupedTensorWithMaster.quantize(torch.randn(2, 32, 16))


def test_out_of_another_shape_is_refused() -> None:
    """Before anything is written: torch would resize the weight."""
    w = small()
    before = w.dequantize()
    said = sentence(lambda: torch.add(torch.ones(3, 32, 16), 1, out=w))
    assert said == (
        "GroupedTensorWithMaster: out= of aten.add.out must be [3, 32, 16], got [2, 32, 16], whose "
        "shape does not change"
    )
    assert_same_bits(w.dequantize(), before)
    assert torch.add(w, w, out=w) is w
    assert_same_bits(w.dequantize(), before + before)
    assert_fresh(w)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupt_waits_for_the_fp8_numbers(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between a write and what quantizes it."""
    weights, calls = [small(), small()], []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise error
        refresh_weight_(*args)

    monkeypatch.setattr(with_master, "refresh_weight_", interrupted)
    with pytest.raises(error):
        torch._foreach_mul_(weights, -2)
    for w in weights:
        assert_fresh(w)


@torch.inference_mode()
def test_inference_mode_changes_no_class() -> None:
    """There operations arrive that are made of others, as ``to`` is."""
    w = small()
    for t in (w.half(), w.cpu(), w.reshape(2, 32, 16), w.contiguous(), w.chunk(2)[0]):
        assert isinstance(t, GroupedTensorWithMaster)
        assert_fresh(t)


def test_a_set_alias_leaves_the_parameter_alone() -> None:
    """As in torch: ``p.data`` is a tensor of its own, which then has other memory."""
    w, other = small(), torch.randn(2, 32, 16)
    before, alias = w.dequantize(), w.data
    alias.set_(other)
    assert_same_bits(alias.dequantize(), other)
    assert_fresh(alias)
    assert_same_bits(w.dequantize(), before)
    with pytest.raises(RuntimeError, match="cannot change the shape"):
        alias.set_(torch.ones(3, 32, 16))


@pytest.mark.parametrize("of", ["parameter", "state", "view"])
def test_arrays_are_copies_of_the_high_precision_numbers(of: str) -> None:
    layer = make_layer("both", RECIPES["block"], FP32, "cpu")
    w: Any = layer.weight.detach()
    t: Any = {"parameter": w, "state": layer.state_dict()["weight"], "view": w[1, 5:]}[of]
    right = t.clone().dequantize() if is_kept(t.clone()) else t.clone()
    assert t.tolist() == right.tolist()
    for array in (t.numpy(), numpy.asarray(t), numpy.array(t)):
        assert_same_bits(torch.from_numpy(array), right)
        array[:] = 0
    assert t.any()
    assert_same_bits(t.clone(), right)
    with pytest.raises(RuntimeError, match="requires grad"):
        layer.weight.numpy()


@pytest.mark.parametrize("name", ["q", "refresh_", "master"])
def test_a_file_plants_no_attribute_of_the_class(name: str) -> None:
    """With ``weights_only=True`` a crafted file could have the GEMMs read other numbers."""
    make, (state,) = nn.Parameter(small()).__reduce_ex__(2)
    state["attributes"][name] = torch.zeros(2, 32, 16)

    class Crafted:
        def __reduce__(self) -> Any:
            return make, (state,)

    assert sentence(lambda: through_file(Crafted())) == (
        f"GroupedTensorWithMaster: the file has an attribute {name!r} of the class itself"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_that_are_no_parameters_are_saved_as_plain_ones(name: str) -> None:
    """A format that is a function would not load by ``weights_only=True``."""
    w = kept("both", FORMATS[name]).weight
    for t in (w.detach(), w.clone(), w[0], kept("both", FORMATS[name]).state_dict()["weight"]):
        loaded = through_file(t.detach())
        assert type(loaded) is Tensor
        assert_same_bits(loaded, t.detach().clone().dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_a_view_has_its_numbers_or_none(name: str) -> None:
    """Of FP8: those of whole experts. All else is that of a plain view."""
    plain = torch.randn(4, N, K, dtype=BF16)[1:]
    w = GroupedTensorWithMaster.quantize(plain, RECIPES[name])
    for view in (w, w.detach(), w.data, w[1], w[1:], w[1:][1], w[1][None], w.view(E, N, K)):
        q, scale, q_t = view.quantized_weight()
        if name != "qat_16_bits":  # codes of MXFP4 are two a byte, in one layout
            assert q.shape == view.shape
            assert_same_bits(q_t, q.mT)
            assert view.element_size() == 4
        twin = GroupedTensorWithMaster.quantize(view.dequantize().view(-1, N, K), RECIPES[name])
        assert_all_same_bits((q, scale), (twin.q.view_as(q), twin.scale.view_as(scale)))
        parts = (view.numbers, q, scale, q_t)
        assert view.nbytes == sum(t.nbytes for t in parts if t is not None)
    views: list[Callable[[Any], Any]] = [
        lambda t: t.mT,
        lambda t: t[:, :128],
        lambda t: t[1, :128],
        lambda t: t[1, 3],
        lambda t: t.flatten(),
        lambda t: t.view(E, K, N),
        lambda t: t[:0],
        lambda t: t[:1].expand(E, N, K),
        lambda t: t.view(torch.int16),
        lambda t: t.view(torch.uint8),
        lambda t: t.as_strided(t.shape, t.stride(), 0),  # begins before it
        lambda t: t.data.mT.detach(),
    ]
    for make in views:
        view, expected = make(w), make(plain)
        assert sentence(view.quantized_weight) == (
            f"GroupedTensorWithMaster: a view {list(view.shape)} of experts "
            f"{list(view.master.shape)} has no FP8 numbers: take those of the weight, or of a view "
            "of whole experts"
        )
        assert (view.nbytes, view.element_size()) == (expected.nbytes, expected.element_size())
        for own in (view.dequantize(), view.clone(), copy.deepcopy(view), through_file(view)):
            assert_same_bits(getattr(own, "numbers", own), expected)
        assert view.tolist() == expected.tolist()
        assert type(torch.empty_like(view)) is Tensor


def test_a_parameter_that_is_a_view_is_saved_as_one() -> None:
    """As of a layer whose features were pruned: a plain parameter, which learns."""
    p = nn.Parameter(kept("both", RECIPES["block"]).weight.detach()[:, :128])
    loaded = pickle.loads(pickle.dumps(p))
    assert type(loaded) is nn.Parameter
    assert loaded.requires_grad
    assert_same_bits(loaded.detach(), p.detach().dequantize())


def load_from(assign: bool) -> Callable[[Any, Any], Any]:
    return lambda to, source: to.load_state_dict(source.state_dict(), assign=assign)


TAKES: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": no_grad(lambda to, source: to.weight.copy_(source.weight)),
    "foreach": no_grad(lambda to, source: torch._foreach_copy_([to.weight], [source.weight])),
    "data": lambda to, source: assign(to, "data", source.weight.data),
    "load": load_from(assign=False),
    "load assign": load_from(assign=True),
    "replace": lambda to, source: setattr(to, "weight", source.weight),
}


@pytest.mark.parametrize(
    ("how", "of", "source", "dtype"),
    pairwise(
        {how: how for how in TAKES},
        FORMATS,
        {name: ("both", recipe) for name, recipe in FORMATS.items()},
        {"bf16": BF16, "fp32": FP32},
    ),
)
def test_takes_numbers_of_a_weight_that_is_kept_otherwise(
    how: str, of: Recipe, source: tuple[str, Recipe], dtype: torch.dtype
) -> None:
    """In another format or in another dtype."""
    to, other = kept("both", of), kept(*source, dtype)
    expected = other.weight.detach().clone().dequantize()
    TAKES[how](to, other)
    if not is_kept(to.weight):
        assert to.weight is other.weight
        return
    assert_same_bits(to.weight.detach().clone().dequantize(), expected.to(to.weight.dtype))
    assert_fresh(to.weight)
    x, m_splits = inputs("cpu", to.weight.dtype)
    plain = kept(None, of, to.weight.dtype)
    plain.load_state_dict({"weight": expected})
    assert_same_bits(to(x, m_splits), plain(x, m_splits))
    with torch.no_grad():
        to.weight.mul_(3)
    if is_kept(other.weight):
        assert_fresh(other.weight)


@pytest.mark.parametrize("other", ["any_scale", "current", "own"])
def test_a_layer_quantizes_a_weight_of_another_format(other: str) -> None:
    layer = kept("both", RECIPES["block"])
    layer.weight = kept("both", FORMATS[other]).weight
    plain = kept(None, RECIPES["block"])
    plain.load_state_dict(layer.state_dict())
    x, m_splits = inputs("cpu", FP32)
    assert_same_bits(layer(x, m_splits), plain(x, m_splits))


def test_a_format_with_a_scale_for_each_layout_is_refused() -> None:
    def quantize(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands:
        q = t.to(torch.float8_e4m3fn)
        return Operands(q, t.new_ones(()), q, t.new_full((), 2.0))

    recipe = Recipe(weight=Format(quantize=quantize))
    assert sentence(lambda: kept("both", recipe)) == (
        "Recipe: weight: both layouts of a weight that is stored must have one scale tensor, the "
        "function returned two"
    )


@pytest.mark.parametrize("call", [lambda w: w.transpose_(1, 2), lambda w: w.unsqueeze_(0)])
def test_its_shape_cannot_be_changed_in_place(call: Callable[[Tensor], Any]) -> None:
    w = GroupedTensorWithMaster.quantize(torch.ones(2, 32, 16))
    with pytest.raises(RuntimeError, match="cannot change the shape of a quantized tensor"):
        call(w)
    assert w.shape == w.master.shape == w.q.shape == (2, 32, 16)


def test_compiled_writes_of_experts_scatter_no_fp8() -> None:
    """Which Inductor could not (torch 2.13): the graph quantizes the whole weight."""
    backend = AotEagerAndRecordGraphs()

    @torch.no_grad()
    def write(w: Tensor) -> None:
        w[1].mul_(-2)
        w[1:][0].add_(1)

    w = GroupedTensorWithMaster.quantize(torch.randn(3, 32, 16))
    expected = w.clone().dequantize()
    write(expected)
    torch.compile(write, fullgraph=True, backend=backend)(w)
    assert_same_bits(w.master, expected)
    assert_fresh(w)
    [graph] = backend.fw_graphs
    scattered = [n.meta["val"].dtype for n in graph.graph.nodes if "scatter" in n.name]
    assert set(scattered) == {FP32}


@pytest.mark.parametrize("name", FORMATS)
def test_a_write_before_the_backward_raises(name: str) -> None:
    """What a forward saved of the quantized numbers is not what its backward would read."""
    layer = kept("both", FORMATS[name])
    y = layer(*inputs("cpu", FP32))
    with torch.no_grad():
        layer.weight[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", [*RECIPES, "own"])
def test_meta_device(name: str) -> None:
    recipe = FORMATS[name]
    layer = GroupedLinear(E, K, N, recipe=recipe, weights="both", device="meta")
    layer.to_empty(device="cpu")
    q, scale, _ = layer.weight.parts  # NaN until the weight is drawn or loaded; E8M0's is 255
    scale = q if scale is None else scale
    assert (scale == 255 if scale.dtype == torch.uint8 else scale.isnan()).all()
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    drawn = GroupedLinear(E, K, N, recipe=recipe, weights="both")
    for a, e in zip(layer.weight.parts, drawn.weight.parts, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            assert_same_bits(a, e)
    assert_same_bits(layer.weight.master, drawn.weight.master)


@pytest.mark.parametrize("name", [*RECIPES, "own"])
def test_a_plain_weight_that_is_assigned_on_the_meta_device(name: str) -> None:
    """As transformers' from_pretrained assigns it, with an attribute of its own."""
    layer = GroupedLinear(E, K, N, recipe=FORMATS[name], weights="both", device="meta")
    given: Any = nn.Parameter(torch.randn(E, N, K), requires_grad=False)
    given.is_loaded = True
    layer.weight = given
    assert isinstance(layer.weight, GroupedTensorWithMaster)
    assert not layer.weight.requires_grad
    assert layer.weight.is_loaded  # type: ignore[attr-defined]
    assert_fresh(layer.weight)
    assert_same_bits(layer.weight.master, given.detach())


@pytest.mark.parametrize("way", ["attributes", "load", "load parameters"])
def test_weights_tied_on_the_meta_device_stay_tied(way: str) -> None:
    """Where one tensor is assigned to both, as a state dict of the tied model has it."""
    models: list[Any] = []
    for options in ({}, {"weights": "both", "device": "meta"}):
        models.append(nn.ModuleList(GroupedLinear(E, K, N, **options) for _ in range(2)))
        models[-1][1].weight = models[-1][0].weight
    source, model = models
    if way == "attributes":
        for layer in model:
            layer.weight = source[0].weight
    else:
        model.load_state_dict(source.state_dict(keep_vars=way != "load"), assign=True)
    assert model[1].weight is model[0].weight
    assert_fresh(model[0].weight)
    assert_same_bits(model[0].weight.master, source[0].weight.detach())
    one, other = map(nn.Parameter, torch.randn(2, E, N, K))  # of one storage
    for another in (other, one):  # and the same one, written since
        model = copy.deepcopy(models[1]).to("meta")
        model[0].weight = one
        if another is one:
            one.detach().add_(1)
        model[1].weight = another
        assert_same_bits(model[1].weight.master, another.detach())


def test_a_parameter_of_the_meta_device_keeps_no_memory() -> None:
    """Not that of the weight that took its place, where an optimizer or an offloader keeps it."""
    layer = GroupedLinear(E, K, N, weights="both", device="meta")
    meta = layer.weight
    layer.weight = nn.Parameter(torch.ones(E, N, K))
    taken = weakref.ref(layer.weight)
    layer.weight = meta
    assert taken() is None


def test_a_weight_of_another_shape_that_is_assigned_on_the_meta_device() -> None:
    """It stays what it is, and a call says what is wrong."""
    layer = GroupedLinear(E, K, N, weights="both", device="meta", bias=False)
    given = nn.Parameter(torch.ones(E, N, 2 * K))
    layer.weight = given
    assert layer.weight is given
    with pytest.raises(RuntimeError, match="K differs: x has"):
        layer(torch.ones(E, K), [1] * E)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_bytes_that_are_assigned_on_the_meta_device_are_no_master(dtype: torch.dtype) -> None:
    """Their scales are elsewhere, so their numbers are not the weight's."""
    layer = GroupedLinear(E, K, N, weights="both", device="meta", bias=False)
    layer.weight = nn.Parameter(torch.ones(E, N, K).to(dtype), requires_grad=False)
    with pytest.raises(RuntimeError, match="weight must be bfloat16, float16 or float32, got"):
        layer(torch.ones(E, K), [1] * E)


class Writes(RuleBasedStateMachine):
    """Sequences of writes, with forwards, backwards, compiled calls and graphs between them."""

    device = "cpu"

    @initialize(
        recipe=st.sampled_from(list(RECIPES)),
        dtype=st.sampled_from([BF16, FP32]),
        compiles=st.booleans(),
    )
    def start(self, recipe: str, dtype: torch.dtype, compiles: bool) -> None:
        self.pair = Pair(RECIPES[recipe], dtype, self.device)
        self.compiles = compiles  # after a compiled call torch swaps no parameter

    @rule(how=st.sampled_from(list(WRITES)))
    def write(self, how: str) -> None:
        self.pair.do(WRITES[how])

    @rule(copied=st.sampled_from([copy.deepcopy, pickled]))
    def copied(self, copied: Callable[[Any], Any]) -> None:
        self.pair.layers = [copied(layer) for layer in self.pair.layers]

    @rule()
    def call_with_another(self) -> None:
        x, m_splits = inputs(self.pair.device, self.pair.layers[1].weight.dtype)
        results = []
        for layer in self.pair.layers:
            other = {"weight": layer.weight.detach() * 3}
            results.append(functional_call(layer, other, (x, m_splits)))
        assert_same_bits(*results)

    @precondition(lambda self: self.compiles)
    @rule()
    def call_compiled(self) -> None:
        self.pair.check_compiled()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


class WritesOnGpu(Writes):
    device = "cuda"


few = settings(suppress_health_check=list(HealthCheck), deadline=None, stateful_step_count=12)
TestWrites = Writes.TestCase
TestWrites.settings = settings(few, max_examples=max(5, settings.default.max_examples // 3))
TestWritesOnGpu = needs_gpu(WritesOnGpu.TestCase)
TestWritesOnGpu.settings = TestWrites.settings


def test_an_assigned_tensor_is_copied(device: str) -> None:
    """It stays its owner's, whose later writes do not show here."""
    layer = make_layer("both", RECIPES["block"], BF16, device)
    loaded = {name: t * 2 for name, t in saved(layer).items()}
    layer.load_state_dict(loaded, assign=True)
    expected = loaded["weight"].clone()
    loaded["weight"].mul_(3)
    weight: Any = layer.weight
    assert_same_bits(weight.dequantize(), expected)
    assert_fresh(weight)


def test_copies_of_a_state_are_plain(device: str) -> None:
    """What distributed checkpoints and torch.save(t.cpu()) write needs no package to be read."""
    weight = make_layer("both", RECIPES["block"], BF16, device).state_dict()["weight"]
    assert isinstance(weight, GroupedTensorWithMaster)
    for copied in (weight.clone(), weight.to("cpu", copy=True), weight.float()):
        assert type(copied) is Tensor
        assert_same_bits(copied.to("cpu", BF16), weight.master.cpu())


def test_record_stream_is_of_all_memory() -> None:
    """And writes nothing. CPUs have no such operation: here it is a list's ``append``."""
    w: Any = GroupedTensorWithMaster.quantize(torch.randn(2, 32, 16))
    recorded: list[int] = []
    parts = [part for part in (w.master, w.q, w.scale, w.q_t) if part is not None]
    versions = [part._version for part in parts]
    func = torch.ops.aten.record_stream.default
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("record_stream", lambda t, _: recorded.append(t.data_ptr()), "CPU")
        func(w, torch.Stream(device="cpu"))
    assert set(recorded) == {part.data_ptr() for part in parts}
    assert [part._version for part in parts] == versions


def test_collectives_are_waited_for() -> None:
    """NCCL has no work to wait for where it is not asked for one: q_t is made after the others."""
    asked = []

    def broadcast(
        tensors: list[Tensor], group: Any, root: int, tensor: int, async_op: bool = True, *_: int
    ) -> Any:
        asked.append(async_op)
        return tensors, FakeWork().boxed()

    with torch.library._scoped_library("c10d", "IMPL") as library, one_process():
        library.impl("broadcast_", broadcast, "CPU", allow_override=True)
        dist.broadcast(GroupedTensorWithMaster.quantize(torch.ones(2, 32, 16)), 0)
    assert asked
    assert all(asked)
