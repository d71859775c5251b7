# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of the unfused ops, as one differentiable function."""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import SwiGLU, ops


class Swiglu(torch.autograd.Function):
    """ops.swiglu and ops.swiglu_grad as one autograd function."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, offs: Tensor, activation: SwiGLU) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up, offs)
        return ops.swiglu(gate_up, offs, activation)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        gate_up, offs = ctx.saved_tensors
        weight = dh.new_ones(len(dh), dtype=torch.float32)
        return ops.swiglu_grad(dh, gate_up, weight, offs, ctx.activation).d_gate_up, None, None
