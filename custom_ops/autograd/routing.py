# SPDX-License-Identifier: Apache-2.0
"""A router's product; from tokens and the experts chosen for them to rows by expert, and back.

T tokens, C experts chosen for a token, R rows (T * C, or a bound plus one), E experts, H features.

Every shape is static and the host reads nothing. Rows are copied or gathered; no two threads add to
one element. Every sum, in the gradients too, therefore adds a token's C rows in a fixed order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import strictly_once_differentiable
from grouped_linear.ops.gradients import refuse_transforms
from grouped_linear.recipes.quantize import Gathered


def sum_of_rows(
    y_RH: Tensor, row_TC: Tensor, weight_TC: Tensor | None = None, offs_E: Tensor | None = None
) -> Tensor:
    """Sum each token's rows, weighted or not, in float32 and rounded once to y's dtype.

    With ``offs_E`` rows past the last group add nothing, whatever their weights hold.
    """
    return ops.gather_sum(y_RH, row_TC, None if weight_TC is None else weight_TC.float(), offs_E)


def truncate_routing(routing: ops.SortedByExpert, max_rows: int) -> "ChosenRows":
    """Keep the first `max_rows` rows and one row of no expert, to which all other choices point.

    A row of no expert is zero, so the other choices add nothing.
    """
    choice_R, token_R, row_TC, offs_E = routing
    choice_R, token_R = choice_R[: max_rows + 1], token_R[: max_rows + 1]
    kept_E = offs_E.clamp(max=max_rows)
    return ChosenRows(choice_R, token_R, row_TC.clamp(max=max_rows), kept_E, offs_E)


def _numbers(rows_RH: Tensor) -> Tensor:
    """[R, 1] int32: the number of each row."""
    return torch.arange(rows_RH.size(0), dtype=torch.int32, device=rows_RH.device)[:, None]


def _dot_of_biases(d_out_TH: Tensor, bias_EH: Tensor, row_TC: Tensor, offs_E: Tensor) -> Tensor:
    """[T, C] float32: d_out times the bias of each row's expert; unspecified for no expert."""
    experts_TC = torch.searchsorted(offs_E, row_TC, right=True).clamp(max=len(bias_EH) - 1)
    return ops.gather_dot(d_out_TH, bias_EH, experts_TC)


class ChosenRows(NamedTuple):
    """The rows of an expert layer: each token's, once for every expert chosen for it."""

    choice: Tensor
    token: Tensor
    row: Tensor
    offs: Tensor
    routed: Tensor | None = None  # [E] int32 group ends before rows were dropped, for observers

    def tokens(self, x: Tensor, *, again: bool = False) -> Tensor:
        """Each row's token; see :meth:`grouped_linear.ops.SortedByExpert.tokens`."""
        return ops.SortedByExpert(*self[:4]).tokens(x, again=again)

    @property
    def without_row(self) -> Tensor:
        """[T, C] bool: whether a choice has no row, because it is of no expert or was dropped."""
        return self.row >= self.offs[-1]

    def source(self, x_TH: Tensor) -> Gathered:
        """The rows of tokens or of their gradients, not gathered yet: a kernel may do it."""
        return Gathered(x_TH, self)

    def combine(self, y_RH: Tensor, weight_TC: Tensor | None) -> Tensor:
        """Sum each token's rows, weighted or not."""
        offs_E = None if weight_TC is None else self.offs
        return sum_of_rows(y_RH, self.row, weight_TC, offs_E)

    def weights(self, weight_TC: Tensor | None, d_out_TH: Tensor) -> Tensor:
        """[R] float32: the routing weight of each row."""
        assert weight_TC is not None
        return weight_TC.flatten()[self.choice].float()

    def weighted_gradient(self, d_out_TH: Tensor, weight_TC: Tensor | None) -> Tensor:
        """The gradient of each row's output [R, H], in float32 and rounded once."""
        weight_R = self.weights(weight_TC, d_out_TH)
        return sum_of_rows(d_out_TH, self.token[:, None], weight_R[:, None])

    def gradient_of_weights(
        self, d_weight_R: Tensor, d_out_TH: Tensor, bias_EH: Tensor | None
    ) -> Tensor:
        """[T, C] float32: the gradient through the rows, and through the bias in their outputs."""
        d_weight_TC = d_weight_R[self.row]
        if bias_EH is None:
            return d_weight_TC
        bias_EH = bias_EH.to(d_out_TH.dtype)
        return d_weight_TC + _dot_of_biases(d_out_TH, bias_EH, self.row, self.offs)


class SortedRows(NamedTuple):
    """The rows of an expert layer that come sorted by expert, from a dispatcher of the caller's.

    Its methods are those of :class:`ChosenRows`, with R rows for tokens, and one choice for each.
    """

    offs: Tensor  # [E] int32

    @property
    def token(self) -> None:
        """No row is gathered."""
        return None

    def source(self, x_RH: Tensor) -> Tensor:
        """The rows, unchanged."""
        return x_RH

    def combine(self, y_RH: Tensor, weight_R: Tensor | None) -> Tensor:
        """The rows, weighted or not."""
        if weight_R is None:
            return y_RH
        return sum_of_rows(y_RH, _numbers(y_RH), weight_R[:, None], self.offs)

    def weights(self, weight_R: Tensor | None, d_out_RH: Tensor) -> Tensor:
        """[R] float32: the routing weight of each row."""
        if weight_R is not None:
            return weight_R.float()
        return torch.ones(d_out_RH.size(0), dtype=torch.float32, device=d_out_RH.device)

    def weighted_gradient(self, d_out_RH: Tensor, weight_R: Tensor | None) -> Tensor:
        """The gradient of each row's output [R, H]."""
        return self.combine(d_out_RH, weight_R)

    def gradient_of_weights(
        self, d_weight_R: Tensor, d_out_RH: Tensor, bias_EH: Tensor | None
    ) -> Tensor:
        """[R] float32: the gradient through the rows, and through the bias in their outputs."""
        if bias_EH is None:
            return d_weight_R
        bias_EH = bias_EH.to(d_out_RH.dtype)
        return d_weight_R + _dot_of_biases(d_out_RH, bias_EH, _numbers(d_out_RH), self.offs)[:, 0]


class GatherFunction(torch.autograd.Function):
    """``x[token_R]``: each row's token."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, *tensors: Tensor) -> Tensor:
        """Return rows sorted by expert."""
        refuse_transforms("grouped_linear")
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
        refuse_transforms("grouped_linear")
        _, need_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(weight_TC, y_RH if need_weight else None, *routing)
        return sum_of_rows(y_RH, ops.SortedByExpert(*routing).row, weight_TC)

    @staticmethod
    @strictly_once_differentiable
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of y and of the weights."""
        weight_TC, y_RH, *tensors = ctx.saved_tensors
        rows, d_weight_TC = ChosenRows(*tensors), None
        if y_RH is not None:
            d_weight_TC = ops.gather_dot(d_out_TH, y_RH, rows.row).to(weight_TC.dtype)
        return rows.weighted_gradient(d_out_TH, weight_TC), d_weight_TC, *(None,) * 4


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
