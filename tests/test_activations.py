# SPDX-License-Identifier: Apache-2.0
"""Activations other than SwiGLU between an expert's layers, and gate_up saved in FP8.

T tokens, C experts chosen for a token, E experts, H features of a token, F features of an expert.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs

from grouped_linear import Float8BlockScaling, GeGLU, GroupedMLP, Recipe, SwiGLU, ops
from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.ops.activation import GELU_TANH
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import needs_gpu
from support.graphs import STRICT_GRAPHS
from support.mlp import KINDS, OTHERS, E, F, H, Sine, near, ours, run, states_of
from support.mlp import leaves_of as drawn_leaves
from support.pairs import in_turn
from support.recipes import RECIPES
from support.tensors import BF16, FP16, FP32

T, C = 90, 2


def chosen_experts(device: str) -> Tensor:
    """[T, C]: the last expert has no token, and some choices are of none."""
    torch.manual_seed(0)
    experts = torch.stack([torch.randperm(E - 1)[:C] for _ in range(T)])
    experts[::7, 1] = -1
    return experts.to(device)


def leaves_of(kind: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    return drawn_leaves((T, C), *KINDS[kind], device, dtype)


def call_of(
    kind: str, recipe: Recipe | None, device: str, saved: bool = False
) -> Callable[..., Tensor]:
    states = states_of(recipe, device)
    return ours(chosen_experts(device), recipe, states, kind, save_gate_up_in_fp8=saved)


@pytest.mark.parametrize("kind", OTHERS)
def test_gradient_of_an_activation_alone(kind: str) -> None:
    activation, function = KINDS[kind][0], OTHERS[kind]
    x = 3 * torch.randn(40, 2 * F, dtype=torch.float64)
    x[0] = 0
    x.requires_grad_()
    h = function(x)
    torch.testing.assert_close(activation.forward(x), h)
    dh = torch.randn_like(h)
    (expected,) = torch.autograd.grad(h, x, dh)
    torch.testing.assert_close(activation.backward(dh, x.detach()), expected)
    assert not activation.forward(torch.zeros(1, 2 * F)).any()  # as rows of no expert need


@pytest.mark.parametrize(
    ("recipe", "in_order"), in_turn(RECIPES, {"tokens": False, "sorted-in_fp8": True})
)
def test_gelu_with_tanh_is_fused(recipe: Recipe | None, in_order: bool, device: str) -> None:
    """In eager mode and compiled: the ops of SwiGLU, with the bits of the form that it is."""
    options: dict[str, Any] = {"recipe": recipe, "save_gate_up_in_fp8": in_order, "device": device}
    results, calls = [], []
    for activation in (GeGLU("tanh"), GELU_TANH):
        torch.manual_seed(0)
        mlp = GroupedMLP(E, H, F, activation=activation, dtype=BF16, **options)
        assert mlp.activation is activation
        x = torch.randn(T, H, device=device, dtype=BF16, requires_grad=True)
        scores, experts = torch.rand(T, E, device=device).topk(C)
        splits = torch.tensor([20, 30, 0, 30, 10], device=device)
        inputs = (x, splits) if in_order else (x, scores, experts)

        def step(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
            y = call(*inputs)
            leaves = [inputs[0], *mlp.parameters()]  # noqa: B023
            return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

        with Calls() as counted:
            results.append(step(mlp.forward_sorted if in_order else mlp, *inputs))
        calls.append(counted.counts)
        if activation is not GELU_TANH:
            backend = AotEagerAndRecordGraphs()
            call = mlp.forward_sorted if in_order else mlp
            step(torch.compile(call, fullgraph=True, backend=backend), *inputs)
            graphs = backend.fw_graphs + backend.bw_graphs
            compiled = [str(n.target) for g in graphs for n in g.graph.nodes]
    assert_all_same_bits(*results)
    assert calls[0] == calls[1]
    assert any("swiglu_grad" in op for op in calls[0])
    assert any("swiglu_grad" in target for target in compiled)
    assert not any("gelu" in target for target in compiled)


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", *OTHERS])
def test_in_a_cuda_graph(kind: str) -> None:
    mlp = GroupedMLP(
        E, H, F, activation=KINDS[kind][0], device="cuda", dtype=BF16, save_gate_up_in_fp8=True
    )
    call = torch.compile(mlp, fullgraph=True, options=STRICT_GRAPHS)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(T, H, device="cuda", dtype=BF16, requires_grad=True)
        scores, experts = torch.rand(T, E, device="cuda").topk(C)
        found = []
        for one in (call, mlp):
            torch.compiler.cudagraph_mark_step_begin()
            y = one(x, scores, experts)
            gradients = torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])
            found.append([t.detach().clone() for t in (y, *gradients)])
        for a, e in zip(*found, strict=True):
            assert (a.double() - e.double()).norm() < 2.0**-6 * e.double().norm()


# --- gate_up saved in FP8 ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bias", *OTHERS])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_saved_in_fp8(kind: str, recipe: Recipe | None, device: str) -> None:
    """Outputs have the same bits; gradients are off by what e4m3 with 1x128 blocks rounds."""
    leaves = leaves_of(kind, device, BF16)
    y, *gradients = run(call_of(kind, recipe, device), leaves)
    y_saved, *of_saved = run(call_of(kind, recipe, device, saved=True), leaves)
    assert_same_bits(y_saved, y)
    near(of_saved, [g.double().cpu() for g in gradients], 0.12 if kind == "own" else 0.08)
    assert not torch.equal(of_saved[3], gradients[3])  # of down_proj, from h made again
    if recipe is None and KINDS[kind][1]:
        assert_same_bits(of_saved[5], gradients[5])  # down's bias needs no gate_up


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("limit", [7.0, 7.03, 1.8125, 0.93])
def test_a_limit_is_decided_before_rounding(
    limit: float, dtype: torch.dtype, compiled: bool, device: str
) -> None:
    """Where it clamps, gradients are zero exactly where they are without rounding."""
    torch.manual_seed(0)
    form = SwiGLU(alpha=0.5, beta=1.0, limit=limit, interleaved=limit == 7.0)
    near_it = limit * (1 + torch.arange(-200, 200) * 2.0**-11)
    far = torch.tensor([0.0, 3 * limit, -3 * limit, -100 * limit, 1e-3 * limit, float("inf")])
    values = torch.cat([near_it, -near_it, far])
    R = 64
    gate_up = values[torch.randint(len(values), (R, 2 * F))].to(device, dtype)
    offs = torch.tensor([R], dtype=torch.int32, device=device)
    config = MLPConfig(form, save_in_fp8=True)
    save = (
        torch.compile(config.save, fullgraph=True, backend="aot_eager") if compiled else config.save
    )
    q, scale = save(gate_up.clone(), offs)
    assert q is not None
    assert scale is not None
    rounded = ops.group_dequantize(q, scale, offs, dtype)
    dh = torch.ones(R, F, device=device, dtype=dtype)
    ones = torch.ones(R, device=device)
    exact, given = (ops.swiglu_grad(dh, t, ones, offs, form)[0] for t in (gate_up, rounded))
    assert_same_bits(given == 0, exact == 0)
    inside = (gate_up.abs() <= limit) & (gate_up.abs() > limit / 1000)
    # e4m3 rounds by up to 2^-4; what would round past the limit by twice that
    off = (rounded.double() - gate_up.double()).abs() / gate_up.abs().double()
    assert off[inside].max() <= 2.0**-3


def test_its_gradients_are_those_of_rounded_gate_up(device: str) -> None:
    """To the bit: the gradients of an expert whose first layer gave what FP8 holds of gate_up."""
    leaves = leaves_of("plain", device, FP32)
    x, weights, gate_up_proj, _ = leaves
    _, _, d_weights, _, d_down = run(call_of("plain", None, device, True), leaves)
    routing = ops.sort_by_expert(chosen_experts(device), E)
    gate_up = ops.grouped_mm(
        x.detach()[routing.token.long()], gate_up_proj.detach().mT, routing.offs
    )
    quantized = ops.group_quantize(gate_up, routing.offs)
    assert quantized.q is not None
    assert quantized.scale is not None
    gate_up = ops.group_dequantize(quantized.q, quantized.scale, routing.offs, FP32)
    weight_R = weights.detach().flatten()[routing.choice.long()]
    torch.manual_seed(2)
    dy = torch.randn(T, H).to(device)[routing.token.long()]
    dh = ops.grouped_mm(dy, leaves[3].detach(), routing.offs)
    grads = ops.swiglu_grad(dh, gate_up, weight_R, routing.offs)
    assert_same_bits(d_down, ops.grouped_mm_wgrad(dy, grads.h, routing.offs))
    expected = grads.d_weight[routing.row.long()].masked_fill(chosen_experts(device) < 0, 0)
    torch.testing.assert_close(d_weights, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
def test_infinities_stay_in_their_rows(recipe: Recipe | None, device: str) -> None:
    leaves = leaves_of("gelu", device, BF16)
    results = []
    for spoilt in (False, True):
        with torch.no_grad():
            leaves[0][3] = torch.inf if spoilt else 1.0
        results.append(run(call_of("gelu", recipe, device, True), leaves))
    others = torch.arange(T) != 3
    for a, e in zip(results[1][:3], results[0][:3], strict=True):  # y, dx, d_weights
        assert_same_bits(a[others], e[others])


# --- what does not fit ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SineInPlace(Sine):
    """Which writes the layer's tensor."""

    method: str = "forward"

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        if self.method == "forward":
            return gate_up_RG.mul_(self.factor).sin_()
        return super().forward(gate_up_RG)

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        if self.method == "backward":
            return gate_up_RG.mul_(self.factor).cos_().mul_(dh_RF).mul_(self.factor)
        return super().backward(dh_RF, gate_up_RG)


@pytest.mark.parametrize(("method", "dtype"), [("forward", FP32), ("backward", BF16)])
def test_one_that_writes_gate_up(method: str, dtype: torch.dtype) -> None:
    """It is refused; in a graph it writes a copy."""
    options: dict[str, Any] = {"dtype": dtype, "bias": True}
    inputs = torch.rand(T, C), chosen_experts("cpu")
    results = []
    for activation in (Sine(), SineInPlace(method=method)):
        torch.manual_seed(0)
        mlp = GroupedMLP(E, H, F, activation=activation, **options)
        x = torch.randn(T, H, dtype=dtype, requires_grad=True)
        call: Any = mlp
        if isinstance(activation, SineInPlace):
            call = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        call(x, *inputs).square().sum().backward()
        results.append([x.grad, *(p.grad for p in mlp.parameters())])
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)
    expected = f"SineInPlace.{method} has written its argument in place"
    with pytest.raises(RuntimeError, match=expected):
        mlp(x, *inputs).sum().backward()
    with torch.inference_mode():
        mlp(x, *inputs)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, "Wrong.forward must return a tensor, got NoneType"),
        (torch.zeros(3, 2), "Wrong.forward must return [180, 48] float32, of gate_up [180, 48]"),
        (torch.zeros(180, 48).int(), "Wrong.forward must return [180, 48] float32, of gate_up"),
    ],
)
def test_what_is_said_of_what_one_returns(returned: Any, expected: str) -> None:
    class Wrong(Sine):
        def forward(self, gate_up_RG: Tensor) -> Any:
            return returned

    mlp = GroupedMLP(E, H, 48, activation=Wrong())
    with pytest.raises((RuntimeError, TypeError), match=re.escape(expected)):
        mlp(torch.randn(T, H), torch.rand(T, C), chosen_experts("cpu"))


def test_printed_layer_says_what_it_saves() -> None:
    for name in ("save_gate_up_in_fp8", "recompute_gate_up"):
        assert f"{name}=True" in repr(GroupedMLP(2, 16, 16, **{name: True}))
        assert name not in repr(GroupedMLP(2, 16, 16))
