"""Weight gradients: computed in the backward or later, returned or added to ``main_grad``.

E groups, K in_features, N out_features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.gemm import weight_grad
from grouped_linear.recipes import WeightList


class MainGrad(NamedTuple):
    """The tensors to which weight gradients are added instead of being returned."""

    tensors: WeightList
    """One [E, N, K], or E of [N, K], as the weight is."""
    overwrite: Tensor | bool = False
    """Whether they are overwritten instead; a tensor is read on the device."""
    returns_zeros: bool = False
    """Whether zeros are returned as gradients, too, for code that waits for a gradient."""


def edges_behind(before: Sequence[Any], count: int) -> slice:
    """Where ctx.next_functions has ``count`` tensors whose Function is given ``before`` first.

    Autograd makes an edge for each argument that is a tensor, and none for another.
    """
    first = sum(isinstance(argument, Tensor) for argument in before)
    return slice(first, first + count)


def needs_grad_now(ctx: Any, needed: Sequence[bool], edges: slice) -> Sequence[bool]:
    """Tell which of the needed gradients this run of the backward was asked for.

    ``ctx.needs_input_grad`` says what a backward may be asked for. torch.autograd.grad of x alone
    does not ask for the weight's gradient, which must then be neither added to main_grad nor
    deferred. Callers do not ask about gradients that are only returned: this takes 3 us. A compiled
    backward computes all gradients, and so does one that is run for some of several experts.
    ``edges`` are from :func:`edges_behind`.
    """
    if torch.compiler.is_compiling():
        return needed

    def runs(node: Any) -> bool:
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:  # a leaf, whose gradient torch.autograd.grad returns
            return True

    nodes = (node for node, _ in ctx.next_functions[edges])
    return [need and runs(node) for need, node in zip(needed, nodes, strict=True)]


class Wgrad(NamedTuple):
    """The gradient of a weight, not computed yet: ``dy.T @ x`` over each group's rows."""

    weights: WeightList
    """Whose shape, dtype and layout the gradient has; their values are not read."""
    main_grad: MainGrad | None
    dy: Tensor
    x: Tensor
    dy_scale: Tensor | None
    x_scale: Tensor | None
    offs: Tensor
    dy_rows: Tensor | None = None
    """With dy[dy_rows[t]] in place of dy[t]; None where each row is its own."""
    x_rows: Tensor | None = None
    """The same for x. At most one of dy_rows and x_rows is given."""

    def compute(self) -> tuple[Tensor | None, ...]:
        """The gradient of each weight, or None where it went into main_grad."""
        weights, main_grad = self.weights, self.main_grad
        if main_grad is None:
            dw_ENK = self._product(weights[0].dtype)
            return (dw_ENK,) if weights[0].dim() == 3 else dw_ENK.unbind()
        overwrite = main_grad.overwrite
        if isinstance(overwrite, bool):
            flag = main_grad.tensors[0].new_ones((), dtype=torch.bool) if overwrite else None
        else:
            flag = overwrite
        self._add_to(main_grad.tensors, flag)
        if main_grad.returns_zeros:
            return tuple(w.new_zeros((), device=self.dy.device).expand(w.shape) for w in weights)
        return (None,) * len(weights)

    def _product(self, dtype: torch.dtype) -> Tensor:
        return weight_grad(self.weights[0], dtype, *self[2:])

    def _add_to(self, main_grads: WeightList, overwrite: Tensor | None) -> None:
        dy, x, dy_scale, x_scale, offs = self.dy, self.x, self.dy_scale, self.x_scale, self.offs
        rows = self.dy_rows, self.x_rows
        per_expert = main_grads[0].dim() == 2
        if per_expert and torch.compiler.is_compiling():
            # Inductor clones every tensor of a list that an op writes if they share a buffer, as
            # main_grads do. It writes them in place if they are written one by one.
            for grad, dw_NK in zip(main_grads, self._product(torch.float32), strict=True):
                total = grad + dw_NK
                grad.copy_(total if overwrite is None else torch.where(overwrite, dw_NK, total))
        elif dy_scale is None or x_scale is None:
            if per_expert:
                ops.grouped_mm_wgrad_list_(main_grads, dy, x, offs, overwrite, *rows)
            else:
                ops.grouped_mm_wgrad_(main_grads[0], dy, x, offs, overwrite, *rows)
        else:
            operands = dy, x, dy_scale, x_scale, offs
            if per_expert:
                ops.grouped_scaled_mm_wgrad_list_(main_grads, *operands, overwrite)
            else:
                ops.grouped_scaled_mm_wgrad_(main_grads[0], *operands, overwrite)
