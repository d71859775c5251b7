# SPDX-License-Identifier: Apache-2.0
"""A router's product, and the gradient by what it shares with the experts.

T tokens, H features of a token, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.ops.gradients import refuse_transforms


class RouterLogitsFunction(torch.autograd.Function):
    """``linear(x, weight, bias)``, and x, whose gradient the router's GEMM adds to its own."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [T, E] and x."""
        refuse_transforms("router_logits")
        ctx.set_materialize_grads(False)
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_TH if need_weight else None, weight_EH if need_x else None)
        return linear(x_TH, weight_EH, bias_E), x_TH.view_as(x_TH)

    @staticmethod
    @strictly_once_differentiable
    def backward(
        ctx: Any, d_logits_TE: Tensor | None, dx_TH: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, the weight and the bias; either gradient may be missing."""
        x_TH, weight_EH = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        d_weight_EH = d_bias_E = None
        if d_logits_TE is None:
            return dx_TH, None, None
        if need_weight:
            d_weight_EH = d_logits_TE.mT @ x_TH
        if need_bias:
            d_bias_E = d_logits_TE.sum(0)
        if not need_x:
            dx_TH = None
        elif dx_TH is None:
            dx_TH = d_logits_TE @ weight_EH
        elif dx_TH.itemsize == 2 and dx_TH.size(1) % 16 == 0:
            dx_TH = ops.addmm(dx_TH, d_logits_TE, weight_EH)
        else:
            dx_TH = torch.addmm(dx_TH, d_logits_TE, weight_EH)
        return dx_TH, d_weight_EH, d_bias_E
