# SPDX-License-Identifier: Apache-2.0
"""Calls of GroupedMLP and of its functions, compared with others of the same tensors.

T tokens, C experts chosen for a token, E experts, H features of a token, F features of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import gelu, relu

from grouped_linear import (
    Activation,
    DelayedScaling,
    GeGLU,
    GroupedMLP,
    Recipe,
    SquaredReLU,
    SwiGLU,
    grouped_mlp,
)
from grouped_linear.recipes import DelayedScalingState
from support import reference
from support.compare import assert_all_same_bits, outcome

E, H, F = 5, 144, 80


@dataclass(frozen=True)
class Sine(Activation):
    """One of a user's own, without a gate."""

    gated: ClassVar[bool] = False
    factor: float = 2.0

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        return (self.factor * gate_up_RG).sin()

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        return dh_RF * self.factor * (self.factor * gate_up_RG).cos()


# What experts have between their layers, and whether they have biases.
KINDS: dict[str, tuple[Activation, bool]] = {
    "plain": (SwiGLU(), False),
    "bias": (SwiGLU(), True),
    "limit": (SwiGLU(limit=0.75), False),
    "gpt_oss": (SwiGLU(alpha=1.702, beta=1.0, limit=1.5, interleaved=True), True),
    "gelu": (GeGLU(), True),
    "gelu_tanh": (GeGLU("tanh"), True),
    "relu2": (SquaredReLU(), False),
    "own": (Sine(), True),
}


def gated(gate_up: Tensor, **options: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, **options) * up


# What torch computes for those that are not SwiGLU.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gated,
    "gelu_tanh": lambda gate_up: gated(gate_up, approximate="tanh"),
    "relu2": lambda up: relu(up).square(),
    "own": lambda up: (2 * up).sin(),
}


def function_of(kind: str) -> Callable[[Tensor], Tensor]:
    """An activation in torch's operations."""
    if kind in OTHERS:
        return OTHERS[kind]
    form = asdict(KINDS[kind][0])  # type: ignore[call-overload]
    return lambda gate_up: reference.swiglu(gate_up, **form)


def ours(
    experts_TC: Tensor, recipe: Recipe | None, states: Any = None, kind: str = "plain", **more: Any
) -> Callable[..., Tensor]:
    """grouped_mlp of leaves, with options of its own."""

    def mlp(
        x_TH: Tensor, weight_TC: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor
    ) -> Tensor:
        options = {**biases_of(biases), "activation": KINDS[kind][0], **more}
        return grouped_mlp(x_TH, weight_TC, experts_TC, gate_up, down, recipe, states, **options)

    return mlp


def leaves_of(
    weights: Sequence[int],
    activation: Activation,
    bias: bool,
    device: str,
    dtype: torch.dtype,
    F: int = F,
) -> list[Tensor]:
    """x, routing weights of the shape `weights`, gate_up_proj and down_proj, and their biases."""
    torch.manual_seed(1)
    G = 2 * F if activation.gated else F
    drawn = [
        torch.randn(weights[0], H).to(dtype),
        torch.rand(*weights),
        (torch.randn(E, G, H) / H**0.5).to(dtype),
        (torch.randn(E, H, F) / F**0.5).to(dtype),
    ]
    if bias:
        drawn += [torch.randn(E, G).to(dtype), torch.randn(E, H).to(dtype)]
    return [t.to(device).requires_grad_() for t in drawn]


def states_of(recipe: Recipe | None, device: str) -> Any:
    """The states of both layers, new; None under a recipe without."""
    if not isinstance(recipe, DelayedScaling):
        return None
    return DelayedScalingState(recipe, E, device), DelayedScalingState(recipe, E, device)


def biases_of(biases: Sequence[Tensor]) -> dict[str, Any]:
    """The arguments that pass these biases, both or none."""
    return dict(zip(("gate_up_proj_bias", "down_proj_bias"), biases, strict=False))


def run(call: Callable[..., Tensor], leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """The output, and the gradients of all leaves that there are."""
    y = call(*leaves)
    torch.manual_seed(2)
    dy = torch.randn(y.shape).to(y)
    learning = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(y, learning, dy, allow_unused=True, materialize_grads=True)
    return [y.detach(), *gradients]


def near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Assert that each tensor is off by at most this share of its norm."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a.double().cpu() - e).norm() <= tolerance * e.norm()


def assert_one_graph(mlp: GroupedMLP, device: str, seeds: int) -> None:
    """Assert that it compiles once, whole, and has the bits of eager for any tokens and routing."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, fullgraph=True, backend=counter)
    dtype = mlp.down_proj.dtype
    for seed in range(seeds):
        torch.manual_seed(seed)
        x = torch.randn(40, H, device=device, dtype=dtype, requires_grad=True)
        scores, experts = torch.rand(40, E, device=device, requires_grad=True).topk(2)
        leaves = [x, scores, *mlp.parameters()]
        results = [outcome(call(x, scores, experts), leaves) for call in (compiled, mlp)]
        assert_all_same_bits(*results)
    assert counter.frame_count == 1


def truth(experts_TC: Tensor, activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An expert layer in torch, one expert after the other, of leaves on the CPU."""

    def mlp(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        y = 0 * x
        for e in range(len(gate_up)):
            first, second = (b[e] for b in biases) if biases else (0, 0)
            y_e = activation(x @ gate_up[e].mT + first) @ down[e].mT + second
            y = y + ((experts_TC == e) * weights).sum(dim=1, keepdim=True) * y_e
        return y

    return mlp


def exact(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Leaves in float64 on the CPU."""
    return [t.detach().cpu().double().requires_grad_() for t in leaves]
