# SPDX-License-Identifier: Apache-2.0
"""The weight cache: when it is read, when it is written, and that neither ever happens in silence.

Of GroupedLinear and of GroupedMLP, which has one for each of its two weights.

T rows, E groups, K in_features, N out_features.
"""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from grouped_linear import GroupedLinear, GroupedMLP, Recipe, update_scales
from grouped_linear.quantized.weight_cache import WeightCache
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits, assert_shows_cold, outcome
from support.errors import sentence
from support.layers import call_of, through_pickle
from support.pairs import in_turn, pairwise
from support.recipes import RECIPES
from support.training import E, K, N, Routed, T

QUANTIZING = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}
EVERY_RECIPE = pytest.mark.parametrize("recipe", QUANTIZING.values(), ids=QUANTIZING)
COMPILING = {"eager": False, "compiled": True}
COMPILED = pytest.mark.parametrize("compiled", COMPILING.values(), ids=COMPILING)
FLAG = {"bool": bool, "tensor": torch.tensor}
FLAGS = pytest.mark.parametrize("flag", FLAG.values(), ids=FLAG)
BACKENDS = {name: name for name in ("eager", "aot_eager", "inductor")}


def make_layer(recipe: Recipe | None, device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"cache_weights": True, "bias": False} | options
    return GroupedLinear(E, K, N, recipe=recipe, device=device, **options)


def make_mlp(recipe: Recipe | None, device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"cache_weights": True} | options
    return Routed(GroupedMLP(E, K, N, recipe=recipe, device=device, **options))


Make = Callable[..., Any]
LAYERS: dict[str, Make] = {"linear": make_layer, "mlp": make_mlp}
EVERY_LAYER = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
EVERY_LAYER_AND_RECIPE = pytest.mark.parametrize(("make", "recipe"), pairwise(LAYERS, QUANTIZING))


def grouped(layer: Any) -> Any:
    return layer.mlp if isinstance(layer, Routed) else layer


def name_of(layer: Any) -> str:
    return type(grouped(layer)).__name__


def caches_of(layer: Any) -> list[WeightCache]:
    return [module for module in layer.modules() if isinstance(module, WeightCache)]


def weights_of(layer: Any) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if p.dim() == 3}


def kept(layer: Any) -> list[Tensor]:
    weights = (cache.quantized_weight() for cache in caches_of(layer))
    return [t for weight in weights for t in weight if t is not None]


def inputs(device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).to(device).requires_grad_()
    return x, torch.tensor([10, 0, 25], device=device)


def on(device: str, flag: Callable[[bool], Any]) -> Callable[[bool], Any]:
    return lambda value: flag(value).to(device) if flag is torch.tensor else value


def change(*weights: Tensor) -> None:
    """As programs do that have weights of their own: torch counts no such write."""
    for w in weights:
        w.data.mul_(3)


@pytest.mark.parametrize(
    ("make", "flag", "compiled", "recipe"), pairwise(LAYERS, FLAG, COMPILING, QUANTIZING)
)
def test_reads_what_it_wrote(
    make: Make, flag: Any, compiled: bool, recipe: Recipe, device: str
) -> None:
    """Each weight of its own cache, which a call without a flag leaves alone."""
    layer, first = make(recipe, device), on(device, flag)
    call, (x, m_splits) = call_of(layer, compiled), inputs(device)

    def result(flag: Any) -> list[Tensor]:
        return outcome(call(x, m_splits, flag), (x, *layer.parameters()))

    def plain() -> list[Tensor]:
        return outcome(layer(x, m_splits), (x, *layer.parameters()))

    written = result(first(True))
    for w in weights_of(layer).values():
        change(w)
        quantized = plain()
        assert_all_same_bits(result(first(False)), written)
        assert not torch.equal(quantized[0], written[0])
        written = result(first(True))
        assert_all_same_bits(written, quantized)


MADE_COLD: dict[str, Callable[[Any], Any]] = {
    "born": lambda layer: layer,
    "load_state_dict": lambda layer: layer.load_state_dict(layer.state_dict()),
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "to_empty": lambda layer: layer.to_empty(device=next(layer.parameters()).device),
    "moved": lambda layer: layer.bfloat16().float(),
    "of another dtype": lambda layer: layer.bfloat16(),
}


@pytest.mark.parametrize(
    ("make", "how", "recipe"), pairwise(LAYERS, {how: how for how in MADE_COLD}, QUANTIZING)
)
def test_cold(make: Make, how: str, recipe: Recipe, device: str) -> None:
    """A bool raises; a flag on the device, and a graph, compute NaN. No tensor is replaced."""
    layer, (x, m_splits) = make(recipe, device), inputs(device)
    addresses = [t.data_ptr() for t in kept(layer)]
    if how != "born":
        layer(x, m_splits, True)
        layer(x, m_splits, False)
    MADE_COLD[how](grouped(layer))
    assert not any(cache.warm for cache in caches_of(layer))
    reads = f"{name_of(layer)}: is_first_microbatch=False reads the weight cache, which holds no "
    with pytest.raises(RuntimeError, match=f"{reads}weight yet"):
        layer(x, m_splits, False)
    if how == "to_empty":  # what it holds is anything
        return
    assert_shows_cold(layer(x, m_splits, torch.tensor(False, device=device)), x)
    if how in ("born", "load_state_dict"):
        assert_shows_cold(call_of(layer, compiled=True)(x, m_splits, False), x)
    assert_same_bits(layer(x, m_splits, True), layer(x, m_splits))
    assert [t.data_ptr() for t in kept(layer)] == addresses


def test_one_cold_cache_is_enough(device: str) -> None:
    layer, (x, m_splits) = make_mlp(QUANTIZING["block"], device), inputs(device)
    for cache in caches_of(layer):
        layer(x, m_splits, True)
        cache.reset()
        with pytest.raises(RuntimeError, match="reads the weight cache, which holds no weight yet"):
            layer(x, m_splits, False)


@pytest.mark.parametrize(
    ("make", "backend", "recipe"),
    in_turn(LAYERS, {name: name for name in ("aot_eager", "inductor")}, QUANTIZING),
)
def test_what_a_graph_wrote_is_there_without_one(make: Make, backend: str, recipe: Recipe) -> None:
    layer, (x, m_splits) = make(recipe), inputs()
    assert not any(cache.warm for cache in caches_of(layer))
    y = torch.compile(layer, fullgraph=True, backend=backend)(x, m_splits, True)
    assert all(cache.warm for cache in caches_of(layer))
    assert_same_bits(layer(x, m_splits, False), y)


@pytest.mark.parametrize(
    ("make", "backend", "flag", "recipe"), pairwise(LAYERS, BACKENDS, FLAG, QUANTIZING)
)
def test_a_refresh_before_the_backward(
    make: Make, backend: str, flag: Any, recipe: Recipe, device: str
) -> None:
    """Raises; a backend that copies what it writes (aot_eager) may have the right numbers too."""
    layer, first = make(recipe, device), on(device, flag)
    call = torch.compile(layer, fullgraph=True, backend=backend) if backend != "eager" else layer
    x, m_splits = inputs(device)
    (expected,) = torch.autograd.grad(layer(x, m_splits).sum(), x)
    y = call(x, m_splits, first(True))
    change(*weights_of(layer).values())
    call(x, m_splits, first(flag is bool))  # a flag that skips raises, too: the host cannot know
    if backend == "aot_eager":
        assert_same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("flag", "recipe"), in_turn(FLAG, QUANTIZING))
def test_a_refresh_that_no_gradient_reads(flag: Any, recipe: Recipe, device: str) -> None:
    """The gradient of the second weight alone reads no quantized weight."""
    layer, first, (x, m_splits) = make_mlp(recipe, device), on(device, flag), inputs(device)
    for parameter in (layer.mlp.gate_up_proj, layer.score):
        parameter.requires_grad_(False)
    down = layer.mlp.down_proj
    y = layer(x.detach(), m_splits, first(True))
    (expected,) = torch.autograd.grad(y.sum(), down, retain_graph=True)
    change(*weights_of(layer).values())
    layer(x.detach(), m_splits, first(True))
    assert_same_bits(torch.autograd.grad(y.sum(), down)[0], expected)


@COMPILED
def test_a_flag_may_be_refilled_before_the_backward(compiled: bool, device: str) -> None:
    layer = make_layer(QUANTIZING["block"], device, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((E, N, K), torch.nan, device=device)
    call, (x, m_splits) = call_of(layer, compiled), inputs(device)
    flag = torch.tensor(True, device=device)
    plain = make_layer(QUANTIZING["block"], device)
    plain(x, m_splits).sum().backward()
    y = call(x, m_splits, flag)
    flag.fill_(False)
    y.sum().backward()
    assert_same_bits(layer.weight.main_grad, plain.weight.grad)


@pytest.mark.parametrize(
    ("make", "mode", "recipe"),
    pairwise(
        LAYERS, {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}, QUANTIZING
    ),
)
def test_filled_without_gradients(make: Make, mode: Any, recipe: Recipe, device: str) -> None:
    """What validation leaves in it serves training: both layouts are there."""
    layer, (x, m_splits) = make(recipe, device), inputs(device)
    with mode():
        y = layer(x, m_splits, True)
    leaves = [x, *layer.parameters()]
    filled, expected = (outcome(layer(x, m_splits, first), leaves) for first in (False, None))
    assert_same_bits(filled[0], y)
    assert_all_same_bits(filled, expected)


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


@EVERY_LAYER
def test_work(make: Make) -> None:
    """Quantized once a step, not once a micro-batch; products write main_grad themselves."""
    layer, (x, m_splits) = make(QUANTIZING["block"], fuse_wgrad_accumulation=True), inputs()
    weights = weights_of(layer).values()
    for w in weights:
        w.main_grad = torch.empty_like(w, requires_grad=False)  # type: ignore[attr-defined]
    with Calls() as calls:
        for i in range(4):
            layer(x, m_splits, i == 0).sum().backward()
    assert calls.counts["refresh_weight_"] == len(weights)
    assert calls.counts["grouped_scaled_mm_wgrad_"] == 4 * len(weights)
    assert calls.counts["grouped_scaled_mm_wgrad"] == 0
    assert not any(op.startswith("quantize_weight") for op in calls.counts)


def test_delayed_scales_stay_with_their_weight(device: str) -> None:
    layer, (x, m_splits) = make_layer(QUANTIZING["delayed"], device), inputs(device)
    state, cache = layer.weight_state, layer.weight_cache
    for operand in state.operands:
        operand.scale.fill_(1)  # as after steps with other numbers
    layer(x, m_splits, True).sum().backward()
    amax = state.weight.amax.clone()
    change(layer.weight)
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


@EVERY_LAYER_AND_RECIPE
def test_reads_no_other_weight_than_it_was_filled_from(make: Make, recipe: Recipe) -> None:
    """Neither one that is given in its place, nor what was written since."""
    layer, (x, m_splits) = make(recipe), inputs()
    reads = f"{name_of(layer)}: is_first_microbatch=False reads the weight cache"
    for name, w in weights_of(layer).items():
        y, other = layer(x, m_splits, True), {name: nn.Parameter(w.detach() * 3)}
        assert sentence(
            lambda other=other: functional_call(layer, other, (x, m_splits, False))
        ) == (  # type: ignore[misc]
            f"{reads}, and the weight that filled it is another tensor in this call: call with True"
        )
        assert_same_bits(layer(x, m_splits, False), y)
        torch.optim.SGD(layer.parameters(), lr=1.0).zero_grad()
        assert_same_bits(layer(x, m_splits, False), y)
        with torch.no_grad():
            w.mul_(3)
        assert sentence(lambda: layer(x, m_splits, False)) == (
            f"{reads}, and the weight that filled it was written since, as by an optimizer: call "
            "with True"
        )
        layer(x, m_splits, torch.tensor(False))  # the host cannot know what is in it from now on
        assert_same_bits(layer(x, m_splits, False), y)


def test_one_tensor_in_the_place_of_the_weight() -> None:
    """Several calls may substitute it; none of them keeps it."""
    layer, (x, m_splits) = make_layer(QUANTIZING["block"]), inputs()
    given = {"weight": layer.weight.detach() * 3}
    y = functional_call(layer, given, (x, m_splits, True))
    assert_same_bits(functional_call(layer, given, (x, m_splits, False)), y)
    held = weakref.ref(given.pop("weight"))
    assert held() is None


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.clone])
def test_a_tensor_that_has_the_place_of_a_dead_one(kind: Any) -> None:
    """Python gives a new object the id of a dead one, as of a weight that a call substitutes."""
    layer, (x, m_splits) = make_layer(QUANTIZING["block"]), inputs()
    ids = set()
    for factor in range(2, 22):
        weight = kind(layer.weight.detach() * factor)
        ids.add(id(weight))
        if factor % 2 == 0:
            functional_call(layer, {"weight": weight}, (x, m_splits, True))
        else:
            with pytest.raises(RuntimeError, match="is another tensor in this call"):
                functional_call(layer, {"weight": weight}, (x, m_splits, False))
        del weight
    assert kind is nn.Parameter or len(ids) < 20  # or the test shows nothing


@FLAGS
@EVERY_LAYER_AND_RECIPE
def test_a_call_that_raised_has_filled_nothing(make: Make, recipe: Recipe, flag: Any) -> None:
    """It leaves the cache as it was, and what is known of it."""
    layer, (x, m_splits) = make(recipe), inputs()
    y = layer(x, m_splits, True)
    for scale, says in ((1, "no error"), (3, "the weight that filled it was written since")):
        with torch.no_grad():
            for w in weights_of(layer).values():
                if scale != 1:
                    w.mul_(scale)
        assert "float64" in sentence(lambda: layer(x.double(), m_splits, flag(True)))
        assert says in sentence(lambda: layer(x, m_splits, False))
        if scale == 1:
            assert_same_bits(layer(x, m_splits, False), y)
    layer(x, m_splits, flag(True))
    assert_same_bits(layer(x, m_splits, False), layer(x, m_splits))


@FLAGS
def test_a_checkpointed_first_micro_batch(flag: Any) -> None:
    """Its recompute fills the cache again, which a backward that reads it must precede."""
    layer, (x, m_splits) = make_layer(QUANTIZING["block"]), inputs()

    def forwards() -> tuple[Tensor, Tensor]:
        first = checkpoint(layer, x, m_splits, flag(True), use_reentrant=False)
        return first.sum(), layer(x, m_splits, flag(False)).square().sum()

    first, second = forwards()
    grads = [torch.autograd.grad(loss, (x, layer.weight)) for loss in (second, first)]
    losses = layer(x, m_splits).square().sum(), layer(x, m_splits).sum()
    for actual, loss in zip(grads, losses, strict=True):
        assert_all_same_bits(actual, torch.autograd.grad(loss, (x, layer.weight)))
    first, second = forwards()
    first.backward()
    says = "fill weight caches only after the last backward that reads them"
    assert says in sentence(second.backward)


@EVERY_RECIPE
def test_cold_when_the_dtype_changes(recipe: Recipe | None) -> None:
    """Also to the dtype that is torch's default."""
    layer, (x, m_splits) = make_layer(recipe), inputs()
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
            layer(x, m_splits, True)
            torch.set_default_dtype(dtype)
            layer.to(dtype)
            assert not layer.weight_cache.warm
    finally:
        torch.set_default_dtype(default)


@EVERY_LAYER
def test_without_a_recipe_there_is_nothing_to_keep(make: Make) -> None:
    layer, (x, m_splits) = make(None), inputs()
    assert not caches_of(layer)
    for first in (True, False, torch.tensor(False)):
        assert_same_bits(layer(x, m_splits, first), layer(x, m_splits))


@pytest.mark.parametrize(
    ("make", "copied", "recipe"),
    pairwise(LAYERS, {"deepcopy": copy.deepcopy, "pickle": through_pickle}, QUANTIZING),
)
def test_copies_are_apart(make: Make, copied: Any, recipe: Recipe) -> None:
    layer, (x, m_splits) = make(recipe), inputs()
    y = layer(x, m_splits, True)
    twin = copied(layer)
    assert "holds no weight yet" in sentence(lambda: twin(x, m_splits, False))
    assert_same_bits(twin(x, m_splits, True), y)
    change(*weights_of(twin).values())
    assert not torch.equal(twin(x, m_splits, True), y)
    assert_same_bits(layer(x, m_splits, False), y)


@EVERY_RECIPE
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_have_no_part_of_it(use_buffers: bool, recipe: Recipe | None) -> None:
    layer, (x, m_splits) = make_layer(recipe), inputs()
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


@EVERY_RECIPE
def test_a_pickle_has_the_weight_alone(recipe: Recipe | None) -> None:
    """Loading makes the cache anew."""
    layer = make_layer(recipe)
    assert len(pickle.dumps(layer)) < layer.weight.nbytes + 8000


@pytest.mark.parametrize("way", ["to_empty", "assign", "swap", "attributes"])
@EVERY_LAYER_AND_RECIPE
def test_meta_device(make: Make, recipe: Recipe, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No state dict has the cache, and a checkpoint may have no scales."""
    layer, right = make(recipe, "meta"), make(recipe)
    state = {name: t for name, t in right.state_dict().items() if "_state." not in name}
    if way in ("assign", "swap"):
        monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", way == "swap")
        layer.load_state_dict(state, strict=False, assign=True)
    elif way == "attributes":  # as transformers' from_pretrained sets them
        for name, t in state.items():
            module, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(module), attribute, nn.Parameter(t))
    else:
        layer.to_empty(device="cpu")
        grouped(layer).reset_parameters()
    assert {t.device.type for t in kept(layer)} == {"cpu"}
    assert "holds no weight yet" in sentence(lambda: layer(*inputs(), False))
    layer.load_state_dict(right.state_dict())
    assert_same_bits(layer(*inputs(), True), right(*inputs()))


@EVERY_LAYER_AND_RECIPE
def test_a_cache_follows_a_weight_that_is_not_registered(make: Make, recipe: Recipe) -> None:
    """accelerate's set_module_tensor_to_device writes the dicts of a module's tensors."""
    layer, right = make(recipe, "meta"), make(recipe)

    def take(tensors: Any) -> None:
        for name, module in layer.named_modules():
            of_other = tensors.get_submodule(name)
            module._parameters.update(of_other._parameters)
            module._buffers.update(of_other._buffers)

    take(right)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="an eager call moves the cache"):
        compiled(*inputs(), True)
    assert_same_bits(layer(*inputs(), True), right(*inputs()))
    assert_same_bits(layer(*inputs(), False), right(*inputs()))
    take(make(recipe, "meta"))  # where it stands for another device: weights may leave any
    assert layer(*inputs("meta"), True).is_meta
