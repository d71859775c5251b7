"""The weight cache: when it is read, when it is written, and that neither ever happens in silence.

T rows, E groups, K in_features, N out_features.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from grouped_linear import GroupedLinear, Recipe, update_scales
from support.calls import Calls
from support.compare import assert_same_bits, assert_shows_cold
from support.devices import devices
from support.errors import sentence
from support.ops import OPS
from support.pairs import pairwise
from support.recipes import RECIPES

T, E, K, N = 40, 3, 32, 48
QUANTIZING = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
EVERY_RECIPE = pytest.mark.parametrize("recipe", QUANTIZING.values(), ids=QUANTIZING)
COMPILING = {"eager": False, "compiled": True}
COMPILED = pytest.mark.parametrize("compiled", COMPILING.values(), ids=COMPILING)
FLAG = {"bool": bool, "tensor": torch.tensor}
FLAGS = pytest.mark.parametrize("flag", FLAG.values(), ids=FLAG)
BACKENDS = {name: name for name in ("eager", "aot_eager", "inductor")}


def make_layer(recipe: Recipe | None, device: str, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(E, K, N, recipe=recipe, device=device, cache_weights=True, **options)


def kept(layer: GroupedLinear) -> list[Tensor]:
    return [t for t in layer.weight_cache.quantized_weight() if t is not None]


def call_of(layer: GroupedLinear, compiled: bool) -> Any:
    return torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer


def inputs(device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).to(device).requires_grad_()
    return x, torch.tensor([10, 0, 25], device=device)


def on(device: str, flag: Callable[[bool], Any]) -> Callable[[bool], Any]:
    return lambda value: flag(value).to(device) if flag is torch.tensor else value


def change(layer: GroupedLinear) -> None:
    """As programs do that have weights of their own: torch counts no such write."""
    for p in layer.parameters():
        p.data.mul_(3)


@DEVICES
@pytest.mark.parametrize(("flag", "compiled", "recipe"), pairwise(FLAG, COMPILING, QUANTIZING))
def test_reads_what_it_wrote(flag: Any, compiled: bool, recipe: Recipe | None, device: str) -> None:
    layer, first = make_layer(recipe, device, bias=False), on(device, flag)
    call, (x, m_splits) = call_of(layer, compiled), inputs(device)
    before, plain_before = call(x, m_splits, first(True)), layer(x, m_splits)
    assert_same_bits(before, plain_before)
    change(layer)
    y = call(x, m_splits, first(False))
    assert_same_bits(y, before)
    dx, dw = torch.autograd.grad(y.square().sum(), (x, layer.weight))
    plain = copy.deepcopy(layer)  # whose weights are those of before
    with torch.no_grad():
        plain.weight.div_(3)
    expected = plain(x, m_splits)
    for a, e in zip(
        (dx, dw),
        torch.autograd.grad(expected.square().sum(), (x, plain.weight)),
        strict=True,
    ):
        assert_same_bits(a, e)
    after = call(x, m_splits, first(True))
    assert_same_bits(after, layer(x, m_splits))
    assert not torch.equal(after, before)


@DEVICES
@EVERY_RECIPE
@FLAGS
def test_no_tensor_is_ever_replaced(flag: Any, recipe: Recipe | None, device: str) -> None:
    layer, first = make_layer(recipe, device), on(device, flag)
    x, m_splits = inputs(device)
    before = [t.data_ptr() for t in kept(layer)]
    layer(x, m_splits, first(True))
    layer.load_state_dict(make_layer(recipe, device).state_dict())
    layer.reset_parameters()
    layer.to(device)
    layer.float()
    layer(x, m_splits, first(True))
    assert [t.data_ptr() for t in kept(layer)] == before
    assert not any(name.startswith("weight_cache") for name in layer.state_dict())


MADE_COLD: dict[str, Callable[[GroupedLinear], Any]] = {
    "born": lambda layer: layer,
    "load_state_dict": lambda layer: layer.load_state_dict(layer.state_dict()),
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "to_empty": lambda layer: layer.to_empty(device=layer.weight.device),
    "moved": lambda layer: layer.bfloat16().float(),
    "of another dtype": lambda layer: layer.bfloat16(),
}


@DEVICES
@EVERY_RECIPE
@pytest.mark.parametrize("how", MADE_COLD)
def test_cold(how: str, recipe: Recipe | None, device: str) -> None:
    """A bool raises; a flag on the device, and a graph, compute NaN."""
    layer, (x, m_splits) = make_layer(recipe, device), inputs(device)
    if how != "born":
        layer(x, m_splits, True)
        layer(x, m_splits, False)
    MADE_COLD[how](layer)
    with pytest.raises(RuntimeError, match="reads the weight cache, which holds no weight yet"):
        layer(x, m_splits, False)
    if how == "to_empty":  # the state of delayed scaling is empty, too
        return
    for call, first in (
        (layer, torch.tensor(False, device=device)),
        (call_of(layer, compiled=True), False),
    ):
        assert_shows_cold(call(x, m_splits, first), x)


@EVERY_RECIPE
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_graph_wrote_is_there_without_one(backend: str, recipe: Recipe | None) -> None:
    layer, (x, m_splits) = make_layer(recipe, "cpu"), inputs("cpu")
    assert not layer.weight_cache.warm
    y = torch.compile(layer, fullgraph=True, backend=backend)(x, m_splits, True)
    assert layer.weight_cache.warm
    assert_same_bits(layer(x, m_splits, False), y)


@DEVICES
@pytest.mark.parametrize(("backend", "flag", "recipe"), pairwise(BACKENDS, FLAG, QUANTIZING))
def test_a_refresh_before_the_backward(
    backend: str, flag: Any, recipe: Recipe | None, device: str
) -> None:
    """Raises; a backend that copies what it writes (aot_eager) may have the right numbers too."""
    layer, first = make_layer(recipe, device, bias=False), on(device, flag)
    call = torch.compile(layer, fullgraph=True, backend=backend) if backend != "eager" else layer
    x, m_splits = inputs(device)
    (expected,) = torch.autograd.grad(layer(x, m_splits).sum(), x)
    y = call(x, m_splits, first(True))
    change(layer)
    call(x, m_splits, first(flag is bool))  # a flag that skips raises, too: the host cannot know
    if backend == "aot_eager":
        assert_same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@DEVICES
@pytest.mark.parametrize(
    ("fused", "compiled", "recipe"),
    pairwise({"grad": False, "main_grad": True}, COMPILING, QUANTIZING),
)
def test_two_forwards_before_their_backwards(
    fused: bool, compiled: bool, recipe: Recipe | None, device: str
) -> None:
    """As pipelines interleave micro-batches: with bools the numbers are those of a plain order."""
    results = []
    for interleaved in (False, True):
        torch._dynamo.reset()
        layer = make_layer(recipe, device, fuse_wgrad_accumulation=fused)
        if fused:
            layer.weight.main_grad = torch.full((E, N, K), torch.nan, device=device)
        call = call_of(layer, compiled)
        losses, xs = [], []
        for i in range(3):
            x, m_splits = inputs(device, seed=i)
            losses.append(call(x, m_splits, i == 0).square().sum())
            xs.append(x)
            if not interleaved:
                losses[-1].backward()
        if interleaved:
            for loss in losses:
                loss.backward()
        results.append([x.grad for x in xs])
        results[-1] += [layer.weight.main_grad if fused else layer.weight.grad, layer.bias.grad]
    for a, e in zip(*results, strict=True):
        assert_same_bits(a, e)


@DEVICES
@COMPILED
def test_a_flag_may_be_refilled_before_the_backward(compiled: bool, device: str) -> None:
    layer = make_layer(QUANTIZING["block"], device, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((E, N, K), torch.nan, device=device)
    call, (x, m_splits) = call_of(layer, compiled), inputs(device)
    flag = torch.tensor(True, device=device)
    y = call(x, m_splits, flag)
    flag.fill_(False)
    y.sum().backward()
    assert layer.weight.main_grad.isfinite().all()


@DEVICES
@EVERY_RECIPE
def test_none_leaves_it_alone(recipe: Recipe | None, device: str) -> None:
    layer, (x, m_splits) = make_layer(recipe, device), inputs(device)
    layer(x, m_splits, True)
    before = [t._version for t in kept(layer)]
    change(layer)
    plain = GroupedLinear(E, K, N, recipe=recipe, device=device)
    plain.load_state_dict(layer.state_dict())
    assert_same_bits(layer(x, m_splits), plain(x, m_splits))
    assert [t._version for t in kept(layer)] == before


@EVERY_RECIPE
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_filled_without_gradients(mode: Any, recipe: Recipe | None) -> None:
    """What validation leaves in it serves training: both layouts are there."""
    layer, (x, m_splits) = make_layer(recipe, "cpu"), inputs("cpu")
    with mode():
        y = layer(x, m_splits, True)
    again = layer(x, m_splits, False)
    assert_same_bits(again, y)
    (dx,) = torch.autograd.grad(again.sum(), x)
    assert dx.isfinite().all()


def emptied(layer: GroupedLinear) -> GroupedLinear:
    layer.to_empty(device=layer.weight.device)
    torch.manual_seed(0)
    layer.reset_parameters()
    return layer


MADE: dict[str, Callable[[Recipe, str], GroupedLinear]] = {
    "born": make_layer,
    "to_empty": lambda recipe, device: emptied(make_layer(recipe, device)),
    "deepcopy": lambda recipe, device: copy.deepcopy(make_layer(recipe, device)),
    "pickle": lambda recipe, device: through_pickle(make_layer(recipe, device)),
}


@DEVICES
@EVERY_RECIPE
@pytest.mark.parametrize("how", MADE)
def test_made_in_inference_mode(how: str, recipe: Recipe | None, device: str) -> None:
    """A cold cache is known for one, and what is written there serves training."""
    (x, m_splits), right = inputs(device), make_layer(recipe, device)
    expected = right(x, m_splits)
    with torch.inference_mode():
        layer = MADE[how](recipe, device)
        with pytest.raises(RuntimeError, match="reads the weight cache, which holds no weight yet"):
            layer(x, m_splits, False)
        assert_same_bits(layer(x, m_splits, True), expected)
        assert_same_bits(layer(x, m_splits, False), expected)
        twin = copy.deepcopy(layer)
    if layer.weight_state is not None:  # which was made there as well, as torch will say
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            layer(x, m_splits, False)
        return
    dx = torch.autograd.grad(expected.sum(), x)[0]
    twin(x, m_splits, True)
    for filled in (layer, twin):
        y = filled(x, m_splits, False)
        assert_same_bits(y, expected)
        assert_same_bits(torch.autograd.grad(y.sum(), x)[0], dx)


def test_work() -> None:
    """Quantized once a step, not once a micro-batch."""
    layer, (x, m_splits) = make_layer(QUANTIZING["block"], "cpu"), inputs("cpu")
    with Calls() as calls:
        for i in range(4):
            layer(x, m_splits, i == 0).sum().backward()
    assert calls.counts["refresh_weight_"] == 1
    assert not any(op.startswith("quantize_weight") for op in calls.counts)


@DEVICES
def test_delayed_scales_stay_with_their_weight(device: str) -> None:
    layer, (x, m_splits) = make_layer(QUANTIZING["delayed"], device, bias=False), inputs(device)
    state, cache = layer.weight_state, layer.weight_cache
    for operand in state.operands:
        operand.scale.fill_(1)  # as after steps with other numbers
    layer(x, m_splits, True).sum().backward()
    amax = state.weight.amax.clone()
    change(layer)
    layer(x, m_splits, False).sum().backward()
    assert_same_bits(state.weight.amax, amax)  # the tripled weight was not looked at
    before = cache.scale.clone()
    update_scales(layer)
    assert_same_bits(cache.scale, before)
    assert not torch.equal(state.weight.scale, before)
    y, reference = layer(x, m_splits, False), copy.deepcopy(layer)
    with torch.no_grad():
        reference.weight.div_(3)
        reference.weight_state.weight.scale.copy_(before)
    assert_same_bits(y, reference(x, m_splits))
    layer(x, m_splits, True)
    assert_same_bits(cache.scale, state.weight.scale)
    assert (state.weight.amax > 2 * amax).all()


@EVERY_RECIPE
def test_reads_no_other_weight_than_it_was_filled_from(recipe: Recipe | None) -> None:
    layer, (x, m_splits) = make_layer(recipe, "cpu"), inputs("cpu")
    other = {"weight": torch.nn.Parameter(layer.weight.detach() * 3)}
    y, reads = layer(x, m_splits, True), "is_first_microbatch=False reads the weight cache"
    assert sentence(lambda: functional_call(layer, other, (x, m_splits, False))) == (
        f"GroupedLinear: {reads}, and the weight that filled it is another tensor in this call: "
        "call with True"
    )
    assert_same_bits(layer(x, m_splits, False), y)
    torch.optim.SGD(layer.parameters(), lr=1.0).zero_grad()
    assert_same_bits(layer(x, m_splits, False), y)
    with torch.no_grad():
        layer.weight.mul_(3)
    assert sentence(lambda: layer(x, m_splits, False)) == (
        f"GroupedLinear: {reads}, and the weight that filled it was written since, as by an "
        "optimizer: call with True"
    )
    layer(x, m_splits, torch.tensor(False))  # the host cannot know what is in it from now on
    assert_same_bits(layer(x, m_splits, False), y)


@FLAGS
def test_a_checkpointed_first_micro_batch(flag: Any) -> None:
    """Its recompute fills the cache again, which a backward that reads it must precede."""
    layer, (x, m_splits) = make_layer(QUANTIZING["block"], "cpu"), inputs("cpu")

    def forwards() -> tuple[Tensor, Tensor]:
        first = checkpoint(layer, x, m_splits, flag(True), use_reentrant=False)
        return first.sum(), layer(x, m_splits, flag(False)).square().sum()

    first, second = forwards()
    grads = [torch.autograd.grad(loss, (x, layer.weight)) for loss in (second, first)]
    losses = layer(x, m_splits).square().sum(), layer(x, m_splits).sum()
    for actual, loss in zip(grads, losses, strict=True):
        for a, e in zip(actual, torch.autograd.grad(loss, (x, layer.weight)), strict=True):
            assert_same_bits(a, e)
    first, second = forwards()
    first.backward()
    says = "fill weight caches only after the last backward that reads them"
    assert says in sentence(second.backward)


@EVERY_RECIPE
def test_cold_when_the_dtype_changes(recipe: Recipe | None) -> None:
    """Also to the dtype that is torch's default."""
    layer, (x, m_splits) = make_layer(recipe, "cpu"), inputs("cpu")
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
            layer(x, m_splits, True)
            torch.set_default_dtype(dtype)
            layer.to(dtype)
            assert not layer.weight_cache.warm
    finally:
        torch.set_default_dtype(default)


def test_mistakes() -> None:
    layer, (x, m_splits) = make_layer(QUANTIZING["block"], "cpu"), inputs("cpu")
    uncached = GroupedLinear(E, K, N, recipe=QUANTIZING["block"])
    assert sentence(lambda: uncached(x, m_splits, True)) == (
        "GroupedLinear: is_first_microbatch needs cache_weights=True under the recipe "
        "Float8BlockScaling"
    )
    for flag, said in (
        (torch.tensor([True]), "1-D bool on cpu"),
        (torch.tensor(1), "0-D int64 on cpu"),
        (torch.tensor(True, device="meta"), "0-D bool on meta"),
    ):
        assert sentence(lambda flag=flag: layer(x, m_splits, flag)) == (
            "GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, "
            f"got {said}"
        )


def test_without_a_recipe_there_is_nothing_to_keep() -> None:
    layer, (x, m_splits) = make_layer(None, "cpu"), inputs("cpu")
    assert layer.weight_cache is None
    assert_same_bits(layer(x, m_splits, True), layer(x, m_splits))
    assert_same_bits(layer(x, m_splits, False), layer(x, m_splits))


def through_pickle(layer: GroupedLinear) -> GroupedLinear:
    return pickle.loads(pickle.dumps(layer))


@EVERY_RECIPE
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_copies_are_apart(copied: Any, recipe: Recipe | None) -> None:
    layer, (x, m_splits) = make_layer(recipe, "cpu"), inputs("cpu")
    y = layer(x, m_splits, True)
    twin = copied(layer)
    assert not twin.weight_cache.warm
    assert "holds no weight yet" in sentence(lambda: twin(x, m_splits, False))
    assert_same_bits(twin(x, m_splits, True), y)
    change(twin)
    assert not torch.equal(twin(x, m_splits, True), y)
    assert_same_bits(layer(x, m_splits, False), y)


@EVERY_RECIPE
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_have_no_part_of_it(use_buffers: bool, recipe: Recipe | None) -> None:
    layer, (x, m_splits) = make_layer(recipe, "cpu", bias=False), inputs("cpu")
    average, weights = AveragedModel(layer, use_buffers=use_buffers), []
    for _ in range(3):
        layer(x, m_splits, True)
        with torch.no_grad():
            layer.weight.mul_(3)
        weights.append(layer.weight.detach().clone())
        average.update_parameters(layer)
    torch.testing.assert_close(average.module.weight.detach(), torch.stack(weights).mean(dim=0))
    assert not average.module.weight_cache.warm
    assert "holds no weight yet" in sentence(lambda: average(x, m_splits, False))
    assert_same_bits(average(x, m_splits, True), average(x, m_splits))
    assert_same_bits(average(x, m_splits, False), average(x, m_splits))
    assert not [name for name, _ in layer.named_buffers() if "cache" in name]


@EVERY_RECIPE
def test_a_pickle_has_the_weight_alone(recipe: Recipe | None) -> None:
    """Loading makes the cache anew."""
    layer = make_layer(recipe, "cpu", bias=False)
    assert len(pickle.dumps(layer)) < layer.weight.nbytes + 8000


@EVERY_RECIPE
def test_meta_device(recipe: Recipe | None) -> None:
    layer = make_layer(recipe, "meta")
    layer.to_empty(device="cpu")
    assert {t.device.type for t in kept(layer)} == {"cpu"}
    torch.manual_seed(0)
    layer.reset_parameters()
    assert_same_bits(layer(*inputs("cpu"), True), make_layer(recipe, "cpu")(*inputs("cpu")))
