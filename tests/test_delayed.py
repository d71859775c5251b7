# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: what is remembered, when, and that nothing else is.

T rows, E groups, K in_features, N out_features.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    update_scales,
)
from support import reference
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits
from support.layers import call_of
from support.tensors import BF16, FP32

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
E, K, N = 3, 32, 48
RECIPE = DelayedScaling(amax_history_len=3)


def make_layer(device: str, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(E, K, N, recipe=RECIPE, device=device, **options)


def rows(device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, K, generator=generator).to(device)
    return x.requires_grad_(), torch.tensor([10, 0, 25], device=device)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in module.named_buffers()}


@COMPILED
def test_amax_is_of_each_operand_and_group(compiled: bool, device: str) -> None:
    layer = make_layer(device)
    x, m_splits = rows(device)
    y = call_of(layer, compiled)(x, m_splits)
    dy = torch.randn_like(y) * 1e-3
    y.backward(dy)
    offs = torch.tensor([10, 10, 35])
    state = layer.weight_state
    for slot, expected in (
        (state.x, reference.amax_of_groups(x.detach().cpu(), offs)),
        (state.weight, layer.weight.detach().abs().amax((1, 2)).cpu()),
        (state.dy, reference.amax_of_groups(dy.cpu(), offs)),
    ):
        assert_same_bits(slot.amax.cpu(), expected)
        assert not slot.scale.any()
        assert not slot.amax_history.any()
    update_scales(layer)
    for slot, largest in ((state.x, 448.0), (state.weight, 448.0), (state.dy, 57344.0)):
        latest = slot.amax_history[0].cpu()
        assert not slot.amax.any()
        expected = reference.update_scales(torch.zeros(E), latest, torch.zeros(3, E), largest)
        assert_same_bits(slot.scale.cpu(), expected.scale)
        assert_same_bits(slot.amax_history.cpu(), expected.amax_history)


@COMPILED
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_learnt_without_gradients(mode: Any, compiled: bool, device: str) -> None:
    layer = make_layer(device)
    before = buffers(layer)
    versions = [b._version for b in layer.buffers()]
    with mode():
        call_of(layer, compiled)(*rows(device))
    assert versions == [b._version for b in layer.buffers()]
    for name, b in layer.named_buffers():
        assert_same_bits(b, before[name])


@COMPILED
def test_two_forwards_before_their_backwards(compiled: bool, device: str) -> None:
    one_by_one, interleaved = make_layer(device), make_layer(device)
    batches = [rows(device, seed) for seed in (1, 2)]
    for batch in batches:
        call_of(one_by_one, compiled)(*batch).square().sum().backward()
    torch._dynamo.reset()
    function = call_of(interleaved, compiled)
    for loss in [function(*batch).square().sum() for batch in batches]:
        loss.backward()
    assert_all_same_bits(one_by_one.buffers(), interleaved.buffers())
    assert_same_bits(one_by_one.weight.grad, interleaved.weight.grad)


def test_a_step_that_diverged_keeps_its_scales() -> None:
    layer = make_layer("cpu")
    x, m_splits = rows("cpu")
    layer(x, m_splits).sum().backward()
    update_scales(layer)
    before = layer.weight_state.x.scale.clone()
    x = x.detach().clone()
    x[0, 0] = torch.inf
    layer(x, m_splits)
    assert layer.weight_state.x.amax.isinf().tolist() == [True, False, False]
    update_scales(layer)
    assert layer.weight_state.x.scale[0] == before[0]
    assert layer.weight_state.x.amax_history.isfinite().all()
    layer(*rows("cpu", 5))  # and learns again from the next
    update_scales(layer)
    assert layer.weight_state.x.amax_history[0, 0] > 0


def test_one_op_updates_a_whole_model() -> None:
    def layer(**options: Any) -> GroupedLinear:
        return GroupedLinear(E, K, K, recipe=DelayedScaling(**options))

    model = nn.Sequential(*(layer() for _ in range(5)), nn.Linear(4, 4))
    with Calls() as calls:
        update_scales(model)
    assert calls.counts == {"update_scales_": 1}
    model.append(layer(margin=1))
    model.append(layer(amax_compute_algo="most_recent"))
    with Calls() as calls:
        update_scales(model)
    assert calls.counts == {"update_scales_": 3}
    with Calls() as calls:
        update_scales(GroupedLinear(E, K, N, recipe=Float8BlockScaling()))
    assert not calls.counts
    with pytest.raises(TypeError, match=r"^update_scales: model must be a torch\.nn\.Module"):
        update_scales([layer()])  # type: ignore[arg-type]


def test_scales_stay_float32() -> None:
    layer = make_layer("cpu")
    layer.weight_state.x.scale.fill_(1.0001)
    for converted in (layer.to(BF16), layer.half(), layer.double(), copy.deepcopy(layer)):
        assert {b.dtype for b in converted.buffers()} == {FP32}
        assert (converted.weight_state.x.scale == 1.0001).all()
    assert layer.weight.dtype == torch.float64


def test_off_the_meta_device_it_begins_anew() -> None:
    """Whose checkpoint may have no scales."""
    layer = make_layer("cpu").to("meta").to_empty(device="cpu")
    layer.load_state_dict({"weight": make_layer("cpu").weight}, strict=False)
    for name, t in make_layer("cpu").weight_state.named_buffers():
        assert_same_bits(layer.weight_state.get_buffer(name), t)


@pytest.mark.parametrize("first", ["_state.", "amax", "scale"])
def test_scales_that_are_assigned_before_the_weight(first: str) -> None:
    """As from a checkpoint of several files, of which one may end within a state."""
    saved = make_layer("cpu")
    saved(*rows("cpu")).sum().backward()
    update_scales(saved)
    saved(*rows("cpu")).sum().backward()  # an amax that is not zero
    layer, state = make_layer("meta"), copy.deepcopy(saved.state_dict())
    scales = {name: t for name, t in state.items() if first in name}
    for part in (scales, {name: t for name, t in state.items() if name not in scales}):
        layer.load_state_dict(part, strict=False, assign=True)
    assert_all_same_bits(layer.buffers(), saved.buffers())


def test_a_layer_without_parameters_is_loaded() -> None:
    """FullyShardedDataParallel leaves views in place of parameters."""
    layer, saved = make_layer("cpu", bias=False), make_layer("cpu", bias=False)
    saved(*rows("cpu")).sum().backward()
    update_scales(saved)
    del layer.weight, saved.weight
    layer.load_state_dict(saved.state_dict())
    assert_all_same_bits(layer.buffers(), saved.buffers())


def test_reset_parameters_forgets() -> None:
    layer = make_layer("cpu")
    layer(*rows("cpu")).sum().backward()
    update_scales(layer)
    layer.reset_parameters()
    fresh = make_layer("cpu")
    assert_all_same_bits(layer.buffers(), fresh.buffers())


def a_step(layer: Any, function: Any, x: Tensor, m_splits: Tensor, size: float) -> list[Tensor]:
    """Output and gradients of inputs and gradients of that size, in float64."""
    generator = torch.Generator().manual_seed(1)
    dy = (torch.randn(len(x), N, generator=generator) * size).to(x.device)
    y = function(x, m_splits)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    return [t.double().cpu() for t in (y, dx, dw)]


@pytest.mark.parametrize(
    ("size", "compiled"), [(1e4, False), (1e-4, False), (1e-12, False), (1e-4, True)]
)
def test_the_first_step_is_right_without_scales(size: float, compiled: bool, device: str) -> None:
    """By each group's own amax, and so is every step without ``update_scales``."""
    layer, plain = make_layer(device, bias=False), GroupedLinear(E, K, N, bias=False).to(device)
    plain.load_state_dict({"weight": layer.weight})
    x, m_splits = rows(device)
    x = (x.detach() * size).requires_grad_()
    expected, function = a_step(plain, plain, x, m_splits, size), call_of(layer, compiled)
    for _ in range(2):
        step = a_step(layer, function, x, m_splits, size)
        for got, e in zip(step, expected, strict=True):
            assert (got - e).norm() < 0.1 * e.norm()  # e5m2 has two bits of mantissa
    with torch.no_grad():
        y = function(x, m_splits).double().cpu()
    assert (y - expected[0]).norm() < 0.1 * expected[0].norm()


@COMPILED
def test_a_group_takes_its_own_scale_until_it_has_had_rows(compiled: bool, device: str) -> None:
    layer = make_layer(device, bias=False)
    x, m_splits = rows(device)
    function = call_of(layer, compiled)
    function(x, m_splits).sum().backward()  # none of group 1
    update_scales(layer)
    state = layer.weight_state
    assert (state.x.scale == 0).tolist() == (state.dy.scale == 0).tolist() == [False, True, False]
    assert (state.weight.scale > 0).all()
    x = x.detach().clone()
    x[10:20] *= 1e4  # now of group 1
    plain = GroupedLinear(E, K, N, bias=False).to(device)
    plain.load_state_dict({"weight": layer.weight})
    m_splits = torch.tensor([10, 10, 20], device=device)
    y, expected = function(x, m_splits), plain(x, m_splits)
    for group in (slice(0, 10), slice(10, 20), slice(20, 40)):
        assert (y[group] - expected[group]).norm() < 0.1 * expected[group].norm()


def test_inductor_records_in_place(device: str) -> None:
    """The op writes the layer's own amax: no clone before, no copy after."""
    layer = make_layer(device)
    x, m_splits = rows(device)

    def step() -> None:
        compiled(x, m_splits).sum().backward()

    compiled = torch.compile(layer, fullgraph=True)
    _, codes = run_and_get_code(step)
    assert layer.weight_state.x.amax[0] == x[:10].abs().max()
    assert layer.weight_state.dy.amax.tolist() == [1, 0, 1]
    code = "\n".join(codes)
    assert code.count("grouped_linear.group_quantize_delayed.default(") == 2
    assert code.count("grouped_linear.quantize_weight_delayed.default(") == 1
    assert ".copy_(" not in code


@pytest.mark.parametrize("layer", [GroupedLinear, GroupedMLP])
def test_weights_that_fill_caches_are_recorded(layer: Any, device: str) -> None:
    """Each in its own state, and nothing else: calls with gradients read the cache."""
    made = layer(E, K, N, recipe=DelayedScaling(), cache_weights=True, device=device)
    call = made if layer is GroupedLinear else made.forward_sorted
    with torch.no_grad():
        call(*rows(device), is_first_microbatch=True)
    for name, w in made.named_parameters():
        if w.dim() == 3:
            state = getattr(made, f"{name}_state")
            assert_same_bits(state.weight.amax, w.detach().abs().amax((1, 2)))
            assert not state.x.amax.any()
