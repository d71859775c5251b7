# SPDX-License-Identifier: Apache-2.0
"""What grouped_linear.te has besides the plain layer.

Options that send gradients elsewhere are tested with every other in test_gradients.py,
test_training.py and test_any_options.py.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grouped_linear import GroupedLinear, Recipe, te
from support.compare import assert_all_same_bits, assert_same_bits
from support.layers import call_of, linear_of, through_pickle, through_torch_save
from support.pairs import in_turn
from support.recipes import RECIPES as EVERY_RECIPE
from support.tensors import BF16

RECIPES = pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=EVERY_RECIPE)


def call(layer: nn.Module) -> Any:
    dtype = next(layer.parameters()).dtype
    return layer(torch.linspace(-1, 1, 7 * 16).view(7, 16).to(dtype), [3, 0, 4])


def make_layer(**options: Any) -> GroupedLinear:
    return linear_of(3, 16, 32, **options)


def test_arguments_have_the_order_of_transformer_engine() -> None:
    """Those that a program passes by position, as 2.20 has them."""
    names = [*inspect.signature(te.GroupedLinear).parameters]
    assert names[3:13] == [
        "sequence_parallel",
        "fuse_wgrad_accumulation",
        "tp_group",
        "tp_size",
        "get_rng_state_tracker",
        "rng_tracker_name",
        "init_method",
        "bias",
        "return_bias",
        "params_dtype",
    ]
    layer = te.GroupedLinear(3, 16, 32, False, True, None, 1, None, None, None, False, False, BF16)
    assert [(n, p.dtype) for n, p in layer.named_parameters()] == [
        (f"weight{e}", BF16) for e in range(3)
    ]


def test_init_method_fills_every_expert() -> None:
    shapes = []

    class Init(nn.Module):  # as any other function
        def forward(self, w: Tensor) -> None:
            shapes.append(w.shape)
            w.fill_(len(shapes))

    layer = make_layer(init_method=Init())
    assert not [*layer.children()]
    assert shapes == 3 * [(32, 16)]
    assert layer.weight[:, 0, 0].tolist() == [1, 2, 3]
    layer.reset_parameters()
    assert layer.weight[:, 0, 0].tolist() == [4, 5, 6]


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


@pytest.mark.parametrize(("recipe", "single"), in_turn(EVERY_RECIPE, {"one": True, "apart": False}))
def test_return_bias(single: bool, recipe: Recipe | None) -> None:
    layer = make_layer(recipe=recipe, return_bias=True, single_grouped_bias=single)
    y, bias = call(layer)
    alone = make_layer(recipe=recipe, bias=False)
    alone.weight = layer.weight
    assert_same_bits(y, call(alone))
    assert_same_bits(bias, layer.bias if single else torch.stack([*layer.parameters()][1:]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.linspace(-1, 1, 7 * 16).view(7, 16)
    assert_all_same_bits(compiled(x, [3, 0, 4]), (y, bias))
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
    x = torch.ones(7, 16, requires_grad=True)
    y, bias = checkpoint(layer, x, [3, 0, 4], use_reentrant=True)
    assert layer.bias.is_leaf
    (y + bias[0]).sum().backward()
    assert layer.bias.grad[0].tolist() == 32 * [14.0]


# --- a parameter an expert -----------------------------------------------------------------------

APART = {"single_grouped_weight": False, "single_grouped_bias": False}


def apart(**options: Any) -> GroupedLinear:
    return make_layer(**APART, **options)


def is_tied(layer: GroupedLinear) -> bool:
    """Whether the experts' weights lie one after the other, so that products read them in place."""
    weights = [getattr(layer, f"weight{e}") for e in range(3)]
    size = weights[0].numel() * weights[0].element_size()
    return all(w.data_ptr() == weights[0].data_ptr() + e * size for e, w in enumerate(weights))


def test_parameters_apart() -> None:
    assert [(n, tuple(p.shape)) for n, p in apart().named_parameters()] == [
        *((f"weight{e}", (32, 16)) for e in range(3)),
        *((f"bias{e}", (32,)) for e in range(3)),
    ]
    names = [n for n, _ in te.GroupedLinear(3, 16, 32, bias=False).named_parameters()]
    assert names == ["weight0", "weight1", "weight2"]
    assert repr(apart()) == repr(make_layer())
    torch.manual_seed(3)
    one = make_layer()
    torch.manual_seed(3)
    assert_same_bits(call(apart()), call(one))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_an_expert_without_a_parameter(name: str) -> None:
    layer = te.GroupedLinear(3, 16, 32, delay_wgrad_compute=True)
    setattr(layer, f"{name}1", None)
    with pytest.raises(TypeError, match=f"^GroupedLinear: {name}1 is None: give each expert a"):
        call(layer)


def test_checkpoints_that_do_not_fit() -> None:
    state = apart().state_dict()
    del state["weight1"]
    with pytest.raises(RuntimeError, match=r"Missing.*\"weight\"[\s\S]*Unexpected.*\"weight0\""):
        make_layer(single_grouped_weight=True).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing.*\"weight0\"[\s\S]*Unexpected.*\"weight\""):
        apart().load_state_dict(GroupedLinear(4, 16, 32).state_dict())
    state = apart().state_dict() | {"weight2": torch.zeros(32, 32)}
    with pytest.raises(RuntimeError, match="Missing key"):
        make_layer(single_grouped_weight=True).load_state_dict(state)


TRAVELS: dict[str, Any] = {
    "born": lambda layer: layer,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "older file": partial(through_torch_save, zipped=False),
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
    call(there).sum().backward()
    assert all(p.grad is not None for p in there.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "older file"])
def test_experts_that_lie_apart_are_kept(how: str) -> None:
    layer = apart()
    layer.weight1.data = layer.weight1.data.clone()
    assert_same_bits(call(TRAVELS[how](layer)), call(layer))


def test_assigned_parameters_are_tied() -> None:
    layer, saved = apart(), {n: t.clone() for n, t in apart().state_dict().items()}
    layer.load_state_dict(saved, assign=True)
    assert is_tied(layer)
    one = make_layer(single_grouped_weight=True)
    one.load_state_dict(saved)
    assert_same_bits(call(layer), call(one))
    again = apart()
    again.load_state_dict(one.state_dict())
    assert_same_bits(call(again), call(one))


@pytest.mark.parametrize(
    ("recipe", "compiled"), in_turn(EVERY_RECIPE, {"eager": False, "compiled": True})
)
def test_a_buffer_of_somebody_else_is_read_where_it_is(
    compiled: bool, recipe: Recipe | None
) -> None:
    """As distributed optimizers keep parameters: backwards in one buffer that they write."""
    layer, one = apart(recipe=recipe), make_layer(single_grouped_weight=True, recipe=recipe)
    call = call_of(layer, compiled)
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


def test_of_a_list_by_the_other_class() -> None:
    linears = [nn.Linear(16, 32) for _ in range(2)]
    with pytest.raises(
        NotImplementedError, match=r"^te\.GroupedLinear has no from_linears: make a g"
    ):
        te.GroupedLinear.from_linears(linears)
    layer = te.GroupedLinear(2, 16, 32)
    layer.load_state_dict(GroupedLinear.from_linears(linears).state_dict())
    assert torch.equal(layer.weight1, linears[1].weight)


def test_defaults_of_what_is_out_of_scope() -> None:
    make_layer(sequence_parallel=False, tp_group=None, tp_size=1, parallel_mode=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'experts'"):
        make_layer(experts=3)
