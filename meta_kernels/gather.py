"""Fake kernels of the ops that choose experts, sort rows by them, move rows, sum or multiply them.

T tokens, C rows gathered for each, R rows of y, H features.
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import ACTIVATIONS, Rules


def _check_gathered(rules: Rules, y: Tensor, rows: Tensor) -> None:
    rules.dim("y", y, 2)
    rules.dtype("y", y.dtype, ACTIVATIONS)
    rules.features("H", y.size(1))
    rules.rows(rows, 2, "y", y)


@torch.library.register_fake("grouped_linear::topk_experts")
def topk_experts(scores: Tensor, k: int) -> Tensor:
    """Scores [T, E] -> experts [T, k]."""
    rules = Rules("topk_experts")
    rules.dim("scores", scores, 2)
    rules.dtype("scores", scores.dtype, ACTIVATIONS)
    T, E = scores.shape
    rules.groups(E)
    rules.check(1 <= k <= E, lambda: f"k must be between 1 and E, which is {E}, got {k}")
    rules.count("scores", "rows", T)
    return scores.new_empty((T, k), dtype=torch.int64)


@torch.library.register_fake("grouped_linear::sort_by_expert")
def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Experts [T, C] -> choice [R], token [R], row [T, C], offs [E]."""
    rules = Rules("sort_by_expert")
    rules.dim("experts", experts, 2)
    rules.dtype("experts", experts.dtype, (torch.int32, torch.int64))
    rules.groups(num_experts)
    R = experts.numel()
    rules.count("experts", "choices", R)

    def new(*shape: int) -> Tensor:
        return experts.new_empty(shape, dtype=torch.int32)

    return new(R), new(R), new(*experts.shape), new(num_experts)


@torch.library.register_fake("grouped_linear::gather_sum")
def gather_sum(y: Tensor, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """y [R, H], rows and weight [T, C] -> [T, H]."""
    rules = Rules("gather_sum")
    _check_gathered(rules, y, rows)
    if weight is not None:
        rules.dim("weight", weight, 2)
        rules.dtype("weight", weight.dtype, (torch.float32,))
        rules.device("weight", weight, "y", y)
        rules.same("T", "weight", weight.size(0), "rows", rows.size(0))
        rules.same("C", "weight", weight.size(1), "rows", rows.size(1))
    return y.new_empty((rows.size(0), y.size(1)))


@torch.library.register_fake("grouped_linear::gather_dot")
def gather_dot(a: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """a [T, H], y [R, H], rows [T, C] -> [T, C]."""
    rules = Rules("gather_dot")
    _check_gathered(rules, y, rows)
    rules.dim("a", a, 2)
    rules.dtype("a", a.dtype, (y.dtype,))
    rules.device("a", a, "y", y)
    rules.same("T", "a", a.size(0), "rows", rows.size(0))
    rules.same("H", "a", a.size(1), "y", y.size(1))
    return y.new_empty(rows.shape, dtype=torch.float32)


@torch.library.register_fake("grouped_linear::scatter_rows")
def scatter_rows(x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """x [T, H], rows [T, C] -> [num_rows, H]."""
    rules = Rules("scatter_rows")
    rules.dim("x", x, 2)
    rules.dtype("x", x.dtype, ACTIVATIONS)
    rules.features("H", x.size(1))
    rules.rows(rows, 2, "x", x)
    rules.same("T", "rows", rows.size(0), "x", x.size(0))
    rules.check(num_rows >= 0, lambda: f"num_rows must not be negative, got {num_rows}")
    return x.new_empty((num_rows, x.size(1)))
