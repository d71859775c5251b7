# SPDX-License-Identifier: Apache-2.0
"""Experts as other libraries have them, which convert and the layers' constructors recognize.

E experts, H features of a token, F features of an expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

W = "w1", "w3", "w2"


class Expert(nn.Module):
    """One of a list: three linear layers."""

    def __init__(
        self,
        H: int = 32,
        F: int = 48,
        names: tuple[str, str, str] = W,
        act: Any = silu,
        **options: Any,
    ) -> None:
        super().__init__()
        self.names, self.act = names, act
        for name, sizes in zip(names, ((H, F), (H, F), (F, H)), strict=True):
            self.add_module(name, nn.Linear(*sizes, **({"bias": False} | options)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(self.act(gate(x)) * up(x))


def one_by_one(
    x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Any = silu
) -> Tensor:
    """Rows sorted by expert, each expert's multiplied apart."""
    rows = x.split(counts.int().tolist())
    weights = zip(gate, up, down, rows, strict=True)
    return torch.cat([(act(r @ g.T) * (r @ u.T)) @ d.T for g, u, d, r in weights])


class GroupedExperts(nn.Module):
    """Three parameters with torchtitan's names."""

    def __init__(self, E: int = 4, H: int = 32, F: int = 48, act: Any = silu) -> None:
        super().__init__()
        self.act = act
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, F, H) / H**0.5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return one_by_one(x, num_tokens_per_expert, self.w1, self.w3, self.w2, self.act)


class FusedExperts(nn.Module):
    """As torchtitan's override that fuses gate and up."""

    def __init__(self, E: int = 4, H: int = 32, F: int = 48) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(E, F, 2, H) / H**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        gate, up = self.w13.unbind(2)
        return one_by_one(x_RD, num_tokens_per_expert_E, gate, up, self.w2_EDF)
