# SPDX-License-Identifier: Apache-2.0
"""Weight gradients: computed in the backward or later, returned or added to ``main_grad``.

E groups, K in_features, N out_features.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.recipes.format import WeightList
from grouped_linear.recipes.quantize_weight import is_transposed


class MainGrad(NamedTuple):
    """The tensors to which weight gradients are added instead of being returned."""

    tensors: WeightList  # one [E, N, K], or E of [N, K], as the weight is
    overwrite: Tensor | bool = False  # whether they are overwritten; the device reads a tensor
    returns_zeros: bool = False  # also as gradients, for code that waits for one


def edges_of(arguments: Sequence[Any], places: Iterable[int]) -> list[int]:
    """Where ctx.next_functions has the tensors at these places among a Function's arguments.

    Autograd makes an edge for each argument that is a tensor, and none for another.
    """
    return [sum(isinstance(t, Tensor) for t in arguments[:place]) for place in places]


def needs_grad_now(
    ctx: Any, needed: Sequence[bool], edges: Sequence[int]
) -> tuple[Sequence[bool], bool]:
    """Tell which of the needed gradients this run of the backward computes, and whether as results.

    ``ctx.needs_input_grad`` says what a backward may be asked for. torch.autograd.grad of x alone
    does not ask for the weight's gradient, which must then be neither added to main_grad nor
    deferred. Callers do not ask about gradients that are only returned: this takes 3 us. A compiled
    backward computes all gradients, and so does one that is run for some of several experts.
    ``edges`` are from :func:`edges_of`. Results are gradients that torch.autograd.grad returns, as
    the second half of a pipeline's backward asks it to.
    """
    if torch.compiler.is_compiling():
        return needed, False
    as_results = False

    def runs(node: Any) -> bool:
        nonlocal as_results
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:  # a leaf among the inputs of torch.autograd.grad
            as_results = True
            return True

    nodes = (ctx.next_functions[edge][0] for edge in edges)
    runs_now = [need and runs(node) for need, node in zip(needed, nodes, strict=True)]
    return runs_now, as_results


class Wgrad(NamedTuple):
    """The gradient of a weight, not computed yet: ``dy.T @ x`` over each group's rows."""

    weights: WeightList  # give the gradient's shape, dtype and layout; their values are not read
    main_grad: MainGrad | None
    dy: Tensor
    x: Tensor
    dy_scale: Tensor | None
    x_scale: Tensor | None
    offs: Tensor
    dy_rows: Tensor | None = None  # dy[dy_rows[t]] takes the place of dy[t]
    x_rows: Tensor | None = None  # x[x_rows[t]] that of x[t]; at most one of the two is given

    def compute(self, as_results: bool = False) -> tuple[Tensor | None, ...]:
        """The gradient of each weight, or None where it went into main_grad.

        ``as_results`` asks for zeros in place of None, which torch.autograd.grad refuses. Where a
        CUDA graph is captured it takes None, as in ``torch.cuda.make_graphed_callables``.
        """
        weights, main_grad = self.weights, self.main_grad
        if as_results and self.dy.is_cuda:
            as_results = not torch.cuda.is_current_stream_capturing()
        if main_grad is None:
            dw_ENK = self._product(weights[0].dtype)
            return (dw_ENK,) if weights[0].dim() == 3 else dw_ENK.unbind()
        overwrite = main_grad.overwrite
        if isinstance(overwrite, bool):
            flag = main_grad.tensors[0].new_ones((), dtype=torch.bool) if overwrite else None
        else:
            flag = overwrite
        self._add_to(main_grad.tensors, flag)
        if as_results:  # dense, because a pipeline adds to them
            return tuple(w.new_zeros(w.shape, device=self.dy.device) for w in weights)
        if main_grad.returns_zeros:
            return tuple(w.new_zeros((), device=self.dy.device).expand(w.shape) for w in weights)
        return (None,) * len(weights)

    def _product(self, dtype: torch.dtype) -> Tensor:
        """The gradient in the weight's memory layout.

        Autograd copies a gradient whose layout differs from its parameter's. For a weight that is
        stored as [E, K, N] the GEMM is therefore ``x.T @ dy``, except where dy is e5m2, which the
        kernel reads as the left operand only.
        """
        left, right = (self.dy, self.dy_scale, self.dy_rows), (self.x, self.x_scale, self.x_rows)
        swapped = is_transposed(self.weights[0]) and self.dy.dtype == self.x.dtype
        if swapped:
            left, right = right, left
        (a, a_scale, a_rows), (b, b_scale, b_rows) = left, right
        if a_scale is None or b_scale is None:
            dw = ops.grouped_mm_wgrad(a, b, self.offs, dtype, a_rows, b_rows)
        else:
            dw = ops.grouped_scaled_mm_wgrad(a, b, a_scale, b_scale, self.offs, dtype)
        return dw.mT if swapped else dw

    def _add_to(self, main_grads: WeightList, overwrite: Tensor | None) -> None:
        dy, x, dy_scale, x_scale, offs = self.dy, self.x, self.dy_scale, self.x_scale, self.offs
        per_expert = main_grads[0].dim() == 2
        if per_expert and torch.compiler.is_compiling():
            # Inductor clones every tensor of a list that an op writes if they share a buffer, as
            # main_grads do. It writes them in place if they are written one by one.
            for grad, dw_NK in zip(main_grads, self._product(torch.float32), strict=True):
                total = grad + dw_NK
                grad.copy_(total if overwrite is None else torch.where(overwrite, dw_NK, total))
            return
        to: Any = main_grads if per_expert else main_grads[0]
        if dy_scale is None or x_scale is None:
            add_: Any = ops.grouped_mm_wgrad_list_ if per_expert else ops.grouped_mm_wgrad_
            add_(to, dy, x, offs, overwrite, self.dy_rows, self.x_rows)
        else:
            add_ = ops.grouped_scaled_mm_wgrad_list_ if per_expert else ops.grouped_scaled_mm_wgrad_
            add_(to, dy, x, dy_scale, x_scale, offs, overwrite)
