# SPDX-License-Identifier: Apache-2.0
"""Incoming gradients of any strides: torch.library and autograd promise none.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, GeGLU, GroupedLinear, GroupedMLP, Lora, ops, te
from grouped_linear.nn.router import router_logits
from support.pairs import in_turn
from support.recipes import RECIPES
from support.tensors import FP32, lay_out

T, E, K, N = 40, 3, 32, 48
OFFS = torch.tensor([10, 10, 35], dtype=torch.int32)
CHOSEN = torch.tensor([[0, 1], [2, 2], [1, 0], [-1, 2]]).repeat(T // 4, 1)


class Call(nn.Module):
    """A function of x and of parameters with these shapes, as a layer."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters())


class Linear(nn.Module):
    def __init__(self, layer: type[GroupedLinear] = GroupedLinear, **options: Any) -> None:
        super().__init__()
        self.layer = layer(E, K, N, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, OFFS.diff(prepend=OFFS.new_zeros(1)).to(x.device))


class Experts(nn.Module):
    def __init__(self, routes: bool = True, **options: Any) -> None:
        super().__init__()
        self.layer, self.routes = GroupedMLP(E, K, N, **options), routes
        self.scores = nn.Parameter(torch.rand(CHOSEN.shape if routes else (T,)))

    def forward(self, x: Tensor) -> Tensor:
        if self.routes:
            return self.layer(x, self.scores, CHOSEN.to(x.device))
        splits = OFFS.diff(prepend=OFFS.new_zeros(1)).to(x.device)
        return self.layer.forward_sorted(x, splits, self.scores)


def product(x: Tensor, b: Tensor, bias: Tensor, low_a: Tensor, low_b: Tensor) -> Tensor:
    return ops.grouped_mm(x, b, OFFS.to(x.device), bias, None, None, low_a, low_b)


def gathered(x: Tensor, b: Tensor) -> Tensor:
    return ops.grouped_mm(x, b, OFFS.to(x.device), rows=torch.arange(T, device=x.device) % 7)


def chosen(x: Tensor) -> Tensor:
    return ops.topk_experts(x, 6, score_function="softmax", normalize=True)[0]


FROZEN: dict[str, Any] = {"recipe": Float8BlockScaling(), "lora": Lora(16)}
#: Each op that has a gradient, and each kind of layer, by what its backward reads dy with.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "grouped_mm": lambda: Call(product, (E, K, N), (E, N), (T, 16), (E, 16, N)),
    "grouped_mm of rows": lambda: Call(gathered, (E, K, N)),
    "topk_experts": lambda: Call(chosen),
    "router_logits": lambda: Call(lambda x, w: router_logits(x, w)[0], (E, K)),
    "router_logits, x": lambda: Call(lambda x, w: router_logits(x, w)[1], (E, K)),
    **{f"linear, {name}": lambda r=r: Linear(recipe=r) for name, r in RECIPES.items()},
    "linear, experts apart": lambda: Linear(te.GroupedLinear, recipe=RECIPES["block"]),
    "linear, frozen": lambda: Linear(weights="fp8", **FROZEN),
    "linear, four bits": lambda: Linear(weights="mxfp4", lora=Lora(16)),
    **{f"mlp, {name}": lambda r=r: Experts(recipe=r) for name, r in RECIPES.items()},
    "mlp, biases": lambda: Experts(recipe=RECIPES["block"], bias=True),
    "mlp, frozen": lambda: Experts(weights="fp8", **FROZEN),
    "mlp, activation": lambda: Experts(activation=GeGLU()),
    "mlp, sorted": lambda: Experts(routes=False),
    "mlp, sorted, block": lambda: Experts(routes=False, recipe=RECIPES["block"]),
}
#: Of each function with a gradient one.
COMPILED = (
    *("grouped_mm", "topk_experts", "router_logits", "linear, block", "linear, four bits"),
    *("mlp, block", "mlp, activation", "mlp, sorted"),
)
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: lambda dy, n=name: lay_out(dy, n) for name in ("strided", "odd", "transposed")},
    "expanded rows": lambda dy: dy[:1].expand_as(dy),
    "expanded": lambda dy: dy[:1, :1].expand_as(dy),
}


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        *in_turn(LAYERS, {"eager": False}),
        *in_turn({name: LAYERS[name] for name in COMPILED}, {"compiled": True}),
    ],
)
def test_gradients_of_any_strides(
    make: Callable[[], nn.Module], compiled: bool, device: str
) -> None:
    torch.manual_seed(0)
    layer = make().to(device)
    for name, p in layer.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(p)  # zero at first
    x = torch.randn(T, K, device=device, requires_grad=True)

    def turned(x: Tensor) -> Tensor:
        """So that dy is transposed inside of the graph, at whose edge torch makes it contiguous."""
        return layer(x).mT.contiguous().mT

    call = torch.compile(turned, fullgraph=True, backend="aot_eager") if compiled else layer
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def gradients(y: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)

    dy = torch.randn_like(call(x), dtype=FP32)
    for strides in STRIDES.values():
        other = strides(dy)
        assert not other.is_contiguous()
        expected = gradients(layer(x), other.contiguous())
        # Where torch multiplies, on CPUs, the strides decide in which order it adds.
        torch.testing.assert_close(gradients(call(x), other), expected, rtol=1e-4, atol=1e-3)
        assert all(t.isfinite().all() for t in expected)
