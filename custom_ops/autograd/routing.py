"""From tokens and the experts chosen for them to rows sorted by expert, and back.

T tokens, C experts chosen for a token, R rows (T * C, or a bound plus one), E experts, H features.

Every shape is static and the host reads nothing. Rows are copied or gathered; no two threads add to
one element. Every sum, in the gradients too, therefore adds a token's C rows in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable


def sum_of_rows(y_RH: Tensor, row_TC: Tensor, weight_TC: Tensor | None = None) -> Tensor:
    """Sum each token's rows, weighted or not, in float32 and rounded once to y's dtype."""
    return ops.gather_sum(y_RH, row_TC, None if weight_TC is None else weight_TC.float())


def truncate_routing(routing: ops.SortedByExpert, max_rows: int) -> ops.SortedByExpert:
    """Keep the first `max_rows` rows and one row of no expert, to which all other choices point.

    A row of no expert is zero, so the other choices add nothing.
    """
    choice_R, token_R, row_TC, offs_E = routing
    return ops.SortedByExpert(
        choice_R[: max_rows + 1],
        token_R[: max_rows + 1],
        row_TC.clamp(max=max_rows),
        offs_E.clamp(max=max_rows),
    )


def weight_of_rows(weight_TC: Tensor, routing: ops.SortedByExpert) -> Tensor:
    """[R] float32: the routing weight of each row."""
    return weight_TC.flatten()[routing.choice].float()


def gradient_of_rows(d_out_TH: Tensor, weight_TC: Tensor, routing: ops.SortedByExpert) -> Tensor:
    """The gradient of ``sum_of_rows(y, row, weight)`` by y, in float32 and rounded once."""
    weight_R = weight_of_rows(weight_TC, routing)
    return sum_of_rows(d_out_TH, routing.token[:, None], weight_R[:, None])


def gradient_of_weights(
    d_out_TH: Tensor, weight_TC: Tensor, y_RH: Tensor | None, routing: ops.SortedByExpert
) -> Tensor | None:
    """The gradient of ``sum_of_rows(y, row, weight)`` by weight; None without y."""
    if y_RH is None:
        return None
    return ops.gather_dot(d_out_TH, y_RH, routing.row).to(weight_TC.dtype)


class GatherFunction(torch.autograd.Function):
    """``x[token_R]``: each row's token."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, *tensors: Tensor) -> Tensor:
        """Return rows sorted by expert."""
        routing = ops.SortedByExpert(*tensors)
        ctx.save_for_backward(routing.row)
        return routing.tokens(x_TH)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, dx_RH: Tensor) -> tuple[Tensor | None, ...]:
        """Sum each token's rows."""
        return sum_of_rows(dx_RH, *ctx.saved_tensors), *(None,) * 4


class CombineFunction(torch.autograd.Function):
    """``out[t] = sum over c of weight[t, c] * y[row[t, c]]``."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weight_TC: Tensor, *routing: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' rows."""
        _, need_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(weight_TC, y_RH if need_weight else None, *routing)
        return sum_of_rows(y_RH, ops.SortedByExpert(*routing).row, weight_TC)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of y and of the weights."""
        weight_TC, y_RH, *tensors = ctx.saved_tensors
        routing = ops.SortedByExpert(*tensors)
        d_weight_TC = gradient_of_weights(d_out_TH, weight_TC, y_RH, routing)
        return gradient_of_rows(d_out_TH, weight_TC, routing), d_weight_TC, *(None,) * 4
