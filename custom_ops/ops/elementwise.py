"""Activations between an expert's two layers in torch's own operations.

R rows, F features inside an expert, G features that the first layer computes: 2 F with a gate.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grouped_linear.ops.activation import GELU_TANH, Activation, SwiGLU


@dataclass(frozen=True)
class GeGLU(Activation):
    """``gelu(gate) * up``, gate the first half and up the second, as Gemma 4 has it.

    Args:
        approximate: ``"none"`` or ``"tanh"``, as torch.nn.functional.gelu takes it. Gemma 4's is
            ``"tanh"``, which is a form of :class:`grouped_linear.SwiGLU`: the layer computes it as
            such, fused with what is before or after it. In float32 the result may differ by
            rounding from that of the methods here, which are torch's operations.

    Raises:
        ValueError: for another ``approximate``.

    >>> GeGLU("tanh").forward(torch.tensor([[1.0, 2.0]]))  # gelu(1) * 2
    tensor([[1.6824]])
    """

    approximate: Literal["none", "tanh"] = "none"

    def __post_init__(self) -> None:
        """Check the option."""
        if self.approximate not in ("none", "tanh"):
            raise ValueError(
                f"GeGLU: approximate must be 'none' or 'tanh', got {self.approximate!r}"
            )

    @property
    def swiglu(self) -> SwiGLU | None:
        """With tanh a form of SwiGLU."""
        return GELU_TANH if type(self) is GeGLU and self.approximate == "tanh" else None

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """``gelu(gate) * up``."""
        gate, up = gate_up_RG.chunk(2, dim=1)
        return torch.nn.functional.gelu(gate, approximate=self.approximate) * up

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        """``dh * up * gelu'(gate)``, then ``dh * gelu(gate)``."""
        gate, up = gate_up_RG.chunk(2, dim=1)
        d_gate = torch.ops.aten.gelu_backward(dh_RF * up, gate, approximate=self.approximate)
        d_up = dh_RF * torch.nn.functional.gelu(gate, approximate=self.approximate)
        return torch.cat([d_gate, d_up], dim=1)


@dataclass(frozen=True)
class SquaredReLU(Activation):
    """``relu(up) ** 2``, without a gate, as Nemotron-H has it.

    >>> SquaredReLU().forward(torch.tensor([[-1.0, 3.0]]))
    tensor([[0., 9.]])
    """

    gated = False

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """``relu(up) ** 2``."""
        return gate_up_RG.relu().square()

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        """``2 * dh * relu(up)``."""
        return 2 * dh_RF * gate_up_RG.relu()
