# SPDX-License-Identifier: Apache-2.0
"""Experts as other libraries have them, which convert and the layers' constructors recognize.

E experts, H features of a token, F features of an expert.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from grouped_linear.quantized.keep import local_part
from support.tensors import BF16

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


class GroupedExperts(nn.Module):
    """As torchtitan 0.3 has them: its code multiplies by a method that others may override."""

    def __init__(self, E: int = 4, H: int = 32, F: int = 48) -> None:
        super().__init__()
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.randn(E, F, H) / H**0.5) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w1, w3, w2 = map(local_part, (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        h = silu(self._grouped_mm(A=x_RD.bfloat16(), B_t=w1.bfloat16().mT, offs=offs))
        h = h * self._grouped_mm(A=x_RD.bfloat16(), B_t=w3.bfloat16().mT, offs=offs)
        return self._grouped_mm(A=h, B_t=w2.bfloat16().mT, offs=offs).type_as(x_RD)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(A, B_t, offs=offs)


class FusedGroupedExperts(GroupedExperts):
    """As torchtitan's override that fuses gate and up."""

    def __init__(self, E: int = 4, H: int = 32, F: int = 48) -> None:
        nn.Module.__init__(self)
        self.w13 = nn.Parameter(torch.randn(E, F, 2, H) / H**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        w13 = self.w13.bfloat16().flatten(1, 2)
        gate_up = self._grouped_mm(A=x_RD.bfloat16(), B_t=w13.mT, offs=offs)
        h = silu(gate_up[:, 0::2]) * gate_up[:, 1::2]
        return self._grouped_mm(A=h, B_t=self.w2_EDF.bfloat16().mT, offs=offs).type_as(x_RD)


class GptOssGroupedExperts(GroupedExperts):
    """As torchtitan's, with a SwiGLU of its own between matrices that have biases."""

    def __init__(self, E: int = 4, H: int = 32, F: int = 48) -> None:
        nn.Module.__init__(self)
        self.swiglu_limit = 7.0
        self.mlp1_weight_EGD = nn.Parameter(torch.randn(E, 2 * F, H) / H**0.5)
        self.mlp1_bias_EG = nn.Parameter(torch.randn(E, 2 * F))
        self.mlp2_weight_EDF = nn.Parameter(torch.randn(E, H, F) / F**0.5)
        self.mlp2_bias_ED = nn.Parameter(torch.randn(E, H))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        rows = num_tokens_per_expert_E.long()
        bias1, bias2 = (
            b.to(BF16).repeat_interleave(rows, dim=0)
            for b in (self.mlp1_bias_EG, self.mlp2_bias_ED)
        )
        w1, w2 = self.mlp1_weight_EGD.bfloat16(), self.mlp2_weight_EDF.bfloat16()
        h = self._grouped_mm(A=x_RD.bfloat16(), B_t=w1.mT, offs=offs) + bias1
        gate, up = h[:, 0::2].clamp(max=self.swiglu_limit), h[:, 1::2]
        up = up.clamp(-self.swiglu_limit, self.swiglu_limit)
        h = gate * (1.702 * gate).sigmoid() * (up + 1)
        return (self._grouped_mm(A=h, B_t=w2.mT, offs=offs) + bias2).to(x_RD.dtype)


def _as_of_torchtitan(*classes: type[nn.Module]) -> None:
    """Put classes where convert looks for torchtitan's, and where pickles find them."""
    name = "torchtitan_stand_ins"
    module = sys.modules.setdefault(name, ModuleType(name))
    for cls in classes:
        cls.__module__ = name
        setattr(module, cls.__name__, cls)


_as_of_torchtitan(GroupedExperts, FusedGroupedExperts, GptOssGroupedExperts)
