"""GroupedLinear as a module: parameters, their birth and their travels."""

import copy
import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, GroupedLinear, GroupedMLP, Recipe
from support.compare import assert_same_bits
from support.errors import sentence
from support.recipes import RECIPES as EVERY_RECIPE
from support.tensors import BF16, FP16, FP32

RECIPES = pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=EVERY_RECIPE)


def call(layer: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 7 * layer.weight.size(2)).view(7, -1).to(layer.weight.dtype)
    return layer(x, [3, 0, 4])


def make_layer(**options: Any) -> GroupedLinear:
    return GroupedLinear(3, 16, 32, **options)


def test_parameters() -> None:
    layer = make_layer()
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "weight": (3, 32, 16),
        "bias": (3, 32),
    }
    assert [n for n, _ in make_layer(bias=False).named_parameters()] == ["weight"]
    assert not list(layer.buffers())


def test_initialisation_is_that_of_linear() -> None:
    layer = GroupedLinear(4, 64, 256)
    bound = 1 / math.sqrt(64)
    for p in layer.parameters():
        assert p.abs().max() <= bound
        # 1024 or more draws come within 1% of the bound, and their mean within a few errors of 0
        assert p.abs().max() > 0.99 * bound
        assert p.mean().abs() < 4 * bound / math.sqrt(3 * p.numel())
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_init_method_fills_every_expert() -> None:
    shapes = []

    def init(w: Tensor) -> None:
        shapes.append(w.shape)
        w.fill_(len(shapes))

    layer = make_layer(init_method=init)
    assert shapes == 3 * [(32, 16)]
    assert layer.weight[:, 0, 0].tolist() == [1, 2, 3]
    layer.reset_parameters()
    assert layer.weight[:, 0, 0].tolist() == [4, 5, 6]


def test_configuration_is_read_only() -> None:
    layer = make_layer(recipe=Float8BlockScaling())
    assert (layer.num_gemms, layer.in_features, layer.out_features) == (3, 16, 32)
    assert layer.recipe == Float8BlockScaling()
    with pytest.raises(AttributeError, match="recipe"):
        layer.recipe = None
    mlp = GroupedMLP(3, 16, 32)
    assert (mlp.num_experts, mlp.hidden_size, mlp.intermediate_size) == (3, 16, 32)
    with pytest.raises(AttributeError, match="recipe"):
        mlp.recipe = Float8BlockScaling()


def test_a_recipe_in_bias_place() -> None:
    assert sentence(lambda: GroupedLinear(3, 16, 32, Float8BlockScaling())) == (
        f"GroupedLinear: bias must be True or False, got {Float8BlockScaling()!r}"
    )


class Tracker:
    """A named random state, as Megatron keeps them."""

    def __init__(self) -> None:
        self.forks: list[tuple[str, ...]] = []

    @contextmanager
    def fork(self, *names: str) -> Iterator[None]:
        self.forks.append(names)
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            yield


@pytest.mark.parametrize(("name", "names"), [(None, ()), ("expert-parallel", ("expert-parallel",))])
def test_rng_tracker(name: str | None, names: tuple[str, ...]) -> None:
    tracker = Tracker()
    options = {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": name}
    torch.manual_seed(1)
    first = make_layer(**options)
    undisturbed = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), undisturbed)
    torch.manual_seed(2)
    second = make_layer(**options)
    assert tracker.forks == [names, names]
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["dtype", "params_dtype"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_dtype(name: str, dtype: torch.dtype) -> None:
    layer = make_layer(**{name: dtype})
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert call(layer).dtype == dtype


@RECIPES
@pytest.mark.parametrize("single", [True, False], ids=["one", "apart"])
def test_return_bias(single: bool, recipe: Recipe | None) -> None:
    layer = make_layer(recipe=recipe, return_bias=True, single_grouped_bias=single)
    y, bias = call(layer)
    alone = make_layer(recipe=recipe, bias=False)
    alone.weight = layer.weight
    assert_same_bits(y, call(alone))
    assert_same_bits(bias, layer.bias if single else torch.stack([*layer.parameters()][1:]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.linspace(-1, 1, 7 * 16).view(7, 16)
    for actual, expected in zip(compiled(x, [3, 0, 4]), (y, bias), strict=True):
        assert_same_bits(actual, expected)
    with torch.autocast("cpu", dtype=BF16):
        y, bias = call(layer)
    assert y.dtype == bias.dtype == BF16
    y, bias = call(make_layer(recipe=recipe, bias=False, return_bias=True))
    assert bias is None


def test_bias_that_is_returned_still_learns() -> None:
    layer = make_layer(return_bias=True)
    y, bias = call(layer)
    (y + bias[0]).sum().backward()
    assert layer.bias.grad[0].tolist() == 32 * [7.0]
    assert not layer.bias.grad[1:].any()


@RECIPES
def test_meta_device(recipe: Recipe | None) -> None:
    torch.manual_seed(5)
    expected = make_layer(recipe=recipe)
    layer = make_layer(recipe=recipe, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert layer(
        torch.empty(7, 16, device="meta"), torch.empty(3, dtype=int, device="meta")
    ).is_meta
    layer.reset_parameters()  # nothing to draw yet
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    assert_same_bits(call(layer), call(expected))
    assert all(p.requires_grad for p in layer.parameters())


def through_pickle(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


def through_torch_save(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@RECIPES
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies(copied: Any, recipe: Recipe | None) -> None:
    layer = make_layer(recipe=recipe, dtype=BF16)
    twin = copied(layer)
    assert repr(twin) == repr(layer)
    assert_same_bits(call(twin), call(layer))
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.any()


@RECIPES
def test_state_dict(recipe: Recipe | None) -> None:
    layer, other = make_layer(recipe=recipe), make_layer(recipe=recipe)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kept = ["scale", "amax", "amax_history"] if layer.weight_state else []
    names = [f"weight_state.{of}.{name}" for of in ("x", "weight", "dy") for name in kept]
    assert [*state] == ["weight", "bias", *names]
    other.load_state_dict(state, strict=True)
    assert_same_bits(call(other), call(layer))
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        other.load_state_dict({"weight": state["weight"]}, strict=True)


def test_module_moves_dtype() -> None:
    layer = make_layer().to(BF16)
    assert call(layer).dtype == BF16
    assert {p.dtype for p in layer.half().parameters()} == {FP16}


def test_repr() -> None:
    recipe = Float8BlockScaling(amax_epsilon=1e-4, wgrad=BF16)
    assert repr(make_layer(bias=False, recipe=recipe)) == (
        "GroupedLinear(num_gemms=3, in_features=16, out_features=32, bias=False, "
        "recipe=Float8BlockScaling(amax_epsilon=0.0001, wgrad=torch.bfloat16))"
    )


# --- a parameter an expert -----------------------------------------------------------------------

APART = {"single_grouped_weight": False, "single_grouped_bias": False}


def apart(**options: Any) -> GroupedLinear:
    return make_layer(**APART, **options)


def is_tied(layer: GroupedLinear) -> bool:
    """Whether the experts' weights lie one after the other, so that products read them in place."""
    weights = [getattr(layer, f"weight{e}") for e in range(3)]
    size = weights[0].numel() * weights[0].element_size()
    return all(w.data_ptr() == weights[0].data_ptr() + e * size for e, w in enumerate(weights))


def called(layer: nn.Module) -> Tensor:
    dtype = next(layer.parameters()).dtype
    return layer(torch.linspace(-1, 1, 7 * 16).view(7, 16).to(dtype), [3, 0, 4])


def test_parameters_apart() -> None:
    assert [(n, tuple(p.shape)) for n, p in apart().named_parameters()] == [
        *((f"weight{e}", (32, 16)) for e in range(3)),
        *((f"bias{e}", (32,)) for e in range(3)),
    ]
    names = [n for n, _ in make_layer(single_grouped_weight=False, bias=False).named_parameters()]
    assert names == ["weight0", "weight1", "weight2"]
    assert repr(apart()) == repr(make_layer())
    torch.manual_seed(3)
    one = make_layer()
    torch.manual_seed(3)
    assert_same_bits(called(apart()), called(one))


@RECIPES
@pytest.mark.parametrize("to", ["separate", "packed"])
def test_checkpoints_of_either_form(to: str, recipe: Recipe | None) -> None:
    """Strictly, both ways, inside a model too; the dict that was given is left as it was."""
    packed, separate = make_layer(recipe=recipe), apart(recipe=recipe)
    source, target = (packed, separate) if to == "separate" else (separate, packed)
    saved = nn.Sequential(source).state_dict()
    names = [*saved]
    nn.Sequential(target).load_state_dict(saved, strict=True)
    assert [*saved] == names
    assert_same_bits(called(target), called(source))


def test_checkpoints_that_do_not_fit() -> None:
    state = apart().state_dict()
    del state["weight1"]
    with pytest.raises(RuntimeError, match=r"Missing.*\"weight\"[\s\S]*Unexpected.*\"weight0\""):
        make_layer().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing.*\"weight0\"[\s\S]*Unexpected.*\"weight\""):
        apart().load_state_dict(GroupedLinear(4, 16, 32).state_dict())
    state = apart().state_dict() | {"weight2": torch.zeros(32, 32)}
    with pytest.raises(RuntimeError, match="Missing key"):
        make_layer().load_state_dict(state)


TRAVELS: dict[str, Any] = {
    "born": lambda layer: layer,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "bfloat16": lambda layer: layer.bfloat16(),
    "to_empty": lambda layer: layer.to_empty(device="cpu"),
    "meta": lambda layer: layer.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("how", TRAVELS)
def test_experts_stay_side_by_side(how: str) -> None:
    layer = apart()
    before = [p.detach().clone() for p in layer.parameters()]
    there = TRAVELS[how](layer)
    assert is_tied(there)
    if how not in ("to_empty", "meta"):
        for p, old in zip(there.parameters(), before, strict=True):
            assert_same_bits(p.detach(), old.to(p.dtype))
    called(there).sum().backward()
    assert all(p.grad is not None for p in there.parameters())


def test_assigned_parameters_are_tied() -> None:
    layer, saved = apart(), {n: t.clone() for n, t in apart().state_dict().items()}
    layer.load_state_dict(saved, assign=True)
    assert is_tied(layer)
    one = make_layer()
    one.load_state_dict(saved)
    assert_same_bits(called(layer), called(one))


@RECIPES
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_buffer_of_somebody_else_is_read_where_it_is(
    compiled: bool, recipe: Recipe | None
) -> None:
    """As distributed optimizers keep parameters: backwards in one buffer that they write."""
    layer, one = apart(recipe=recipe), make_layer(recipe=recipe)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x = torch.linspace(-1, 1, 7 * 16).view(7, 16)
    call(x, [3, 0, 4])  # traced while they were side by side
    flat = torch.randn(3, 32, 16)
    for e in range(3):
        getattr(layer, f"weight{e}").data = flat[2 - e]
    layer.to(torch.float32)  # moves nothing, so takes nothing away
    one.load_state_dict(layer.state_dict())
    assert_same_bits(call(x, [3, 0, 4]), one(x, [3, 0, 4]))
    with torch.no_grad():
        flat.mul_(2)
        one.weight.mul_(2)
    y, right = call(x, [3, 0, 4]), one(x, [3, 0, 4])
    assert_same_bits(y, right)
    y.square().sum().backward()
    right.square().sum().backward()
    grads = torch.stack([getattr(layer, f"weight{e}").grad for e in range(3)])
    assert_same_bits(grads, one.weight.grad)


@pytest.mark.parametrize(
    ("name", "value"), [("tp_size", 2), ("sequence_parallel", True), ("ub_name", "fc1")]
)
def test_out_of_scope(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"out of scope, got {name}={value!r}$"):
        make_layer(**{name: value})


def test_defaults_of_what_is_out_of_scope() -> None:
    make_layer(sequence_parallel=False, tp_group=None, tp_size=1, parallel_mode=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_experts'"):
        make_layer(num_experts=3)
