"""From tokens and the experts chosen for them to rows sorted by expert, and back.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features.

Every shape is static and nothing is read by the host. Rows are only ever gathered, never added to
one place by many threads, so sums have a fixed order in the gradients too: each token's C rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.once import differentiable_once


class Routing(NamedTuple):
    """Where the rows of experts come from, and where they go."""

    choice_R: Tensor
    """[R] int32, which entry of [T, C], flattened, each row is; rows are sorted by expert."""
    token_R: Tensor
    """[R] int32, which token each row is."""
    row_TC: Tensor
    """[T, C] int32, the row of each choice."""
    offs_E: Tensor
    """[E] int32, the end of each expert's rows."""


def sort_by_expert(expert_TC: Tensor, num_experts: int) -> Routing:
    """Sort a token's choices by expert; an expert's rows stay in the order of their tokens.

    Args:
        expert_TC: [T, C] int32 or int64. Any number outside [0, E) means no expert: its rows come
            last, past the end of every group.
        num_experts: E.

    >>> routing = sort_by_expert(torch.tensor([[1, 0], [2, 1], [-1, 2]]), 3)
    >>> routing.offs_E, routing.token_R
    (tensor([1, 3, 5], dtype=torch.int32), tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32))
    >>> routing.row_TC
    tensor([[1, 0],
            [3, 2],
            [5, 4]], dtype=torch.int32)
    """
    return Routing(*ops.sort_by_expert(expert_TC, num_experts))


def sum_of_rows(y_RH: Tensor, row_TC: Tensor, weight_TC: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, weighted or not, in float32 and rounded once to y's dtype."""
    return ops.gather_sum(y_RH, row_TC, None if weight_TC is None else weight_TC.float())


def weight_of_rows(weight_TC: Tensor, routing: Routing) -> Tensor:
    """[R] float32, the weight of the choice that each row is."""
    return weight_TC.flatten()[routing.choice_R].float()


def gradient_of_rows(d_out_TH: Tensor, weight_TC: Tensor, routing: Routing) -> Tensor:
    """The gradient of ``sum_of_rows(y, row, weight)`` by y: in float32, rounded once."""
    weight_R = weight_of_rows(weight_TC, routing)
    return (d_out_TH[routing.token_R] * weight_R[:, None]).to(d_out_TH.dtype)


def gradient_of_weights(
    d_out_TH: Tensor, weight_TC: Tensor, y_RH: Tensor | None, routing: Routing
) -> Tensor | None:
    """And by the weights, where y is given."""
    if y_RH is None:
        return None
    return ops.gather_dot(d_out_TH, y_RH, routing.row_TC).to(weight_TC.dtype)


class GatherFunction(torch.autograd.Function):
    """``x[token_R]``: each row its token."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_R: Tensor, row_TC: Tensor) -> Tensor:
        """Rows sorted by expert."""
        ctx.save_for_backward(row_TC)
        return x_TH[token_R]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dx_RH: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of each token's rows."""
        return sum_of_rows(dx_RH, *ctx.saved_tensors), None, None


class CombineFunction(torch.autograd.Function):
    """``out[t] = sum over c of weight[t, c] * y[row[t, c]]``."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weight_TC: Tensor, *routing: Tensor) -> Tensor:
        """Each token's weighted sum of its experts' rows."""
        _, need_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(weight_TC, y_RH if need_weight else None, *routing)
        return sum_of_rows(y_RH, Routing(*routing).row_TC, weight_TC)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of y and of the weights."""
        weight_TC, y_RH, *tensors = ctx.saved_tensors
        routing = Routing(*tensors)
        d_weight_TC = gradient_of_weights(d_out_TH, weight_TC, y_RH, routing)
        return gradient_of_rows(d_out_TH, weight_TC, routing), d_weight_TC, *(None,) * 4
