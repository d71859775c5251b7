# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the ops from group sizes to ends, and from tokens to experts' rows and back.

T tokens, E experts, C rows gathered for each token, R rows of y, H features.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import ACTIVATIONS, Rules, at_most, dtype_name, fake


@fake
def splits_to_offsets(rules: Rules, c: Any) -> Tensor:
    """m_splits [E] -> offs [E]."""
    dtype = c.out_dtype or torch.int32
    rules.dim("m_splits", 1, torch.int32, torch.int64)
    rules.groups(c.m_splits.size(0))
    rules.dtype("out_dtype", torch.int32, torch.int64)
    rules.not_negative("num_rows")
    rules.check(c.alignment >= 1, lambda: f"alignment must be positive, got {c.alignment}")
    rules.check(c.stride >= 1, lambda: f"stride must be positive, got {c.stride}")
    rules.check(
        at_most(c.num_rows, torch.iinfo(dtype).max // c.stride),
        lambda: (
            f"num_rows * stride does not fit in {dtype_name(dtype)}, got {c.num_rows} * {c.stride}"
        ),
    )
    return c.m_splits.new_empty(c.m_splits.shape, dtype=dtype)


def _check_gathered(rules: Rules, c: Any) -> None:
    rules.dim("y", 2, *ACTIVATIONS)
    rules.features("H", c.y.size(1))
    rules.rows(2, "y")


def _check_scoring(rules: Rules, c: Any, k: int) -> None:
    rules.dim("logits", 2, *ACTIVATIONS)
    T, E = c.logits.shape
    rules.groups(E)
    rules.check(1 <= k <= E, lambda: f"k must be between 1 and E, which is {E}, got {k}")
    rules.count("logits", "rows", T)
    rules.check(
        c.score_function in ("none", "softmax", "sigmoid"),
        lambda: f"score_function must be none, softmax or sigmoid, got {c.score_function}",
    )
    rules.finite("scaling_factor")


@fake
def topk_experts(rules: Rules, c: Any) -> tuple[Tensor, Tensor]:
    """Logits [T, E] -> weights and experts [T, k]."""
    _check_scoring(rules, c, c.k)
    T, E = c.logits.shape
    if c.expert_bias is not None:
        rules.tensor("expert_bias", 1, torch.float32, "logits")
        rules.same("E", "expert_bias", c.expert_bias.size(0), "logits", E)
    weights = c.logits.new_empty((T, c.k), dtype=torch.float32)
    return weights, c.logits.new_empty((T, c.k), dtype=torch.int64)


@fake
def topk_experts_grad(rules: Rules, c: Any) -> Tensor:
    """d_weights [T, k], logits [T, E], experts [T, k] -> d_logits [T, E]."""
    rules.dim("d_weights", 2, torch.float32)
    T, k = c.d_weights.shape
    _check_scoring(rules, c, k)
    rules.device("logits", "d_weights")
    rules.same("T", "logits", c.logits.size(0), "d_weights", T)
    rules.tensor("experts", 2, torch.int64, "d_weights")
    rules.same("T", "experts", c.experts.size(0), "d_weights", T)
    rules.same("k", "experts", c.experts.size(1), "d_weights", k)
    return c.logits.new_empty(c.logits.shape)


@fake
def sort_by_expert(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Experts [T, C] -> choice [R], token [R], row [T, C], offs [E]."""
    rules.dim("experts", 2, torch.int32, torch.int64)
    rules.groups(c.num_experts)
    R = c.experts.numel()
    rules.count("experts", "choices", R)

    def new(*shape: int) -> Tensor:
        return c.experts.new_empty(shape, dtype=torch.int32)

    return new(R), new(R), new(*c.experts.shape), new(c.num_experts)


@fake
def gather_sum(rules: Rules, c: Any) -> Tensor:
    """y [R, H], rows and weight [T, C], offs [E] -> [T, H]."""
    _check_gathered(rules, c)
    if c.offs is not None:
        rules.offs("y")
    if c.weight is not None:
        rules.tensor("weight", 2, torch.float32, "y")
        rules.same("T", "weight", c.weight.size(0), "rows", c.rows.size(0))
        rules.same("C", "weight", c.weight.size(1), "rows", c.rows.size(1))
    return c.y.new_empty((c.rows.size(0), c.y.size(1)))


@fake
def gather_dot(rules: Rules, c: Any) -> Tensor:
    """a [T, H], y [R, H], rows [T, C] -> [T, C]."""
    _check_gathered(rules, c)
    rules.tensor("a", 2, c.y.dtype, "y")
    rules.same("T", "a", c.a.size(0), "rows", c.rows.size(0))
    rules.same("H", "a", c.a.size(1), "y", c.y.size(1))
    return c.y.new_empty(c.rows.shape, dtype=torch.float32)


@fake
def scatter_rows(rules: Rules, c: Any) -> Tensor:
    """x [T, H], rows [T, C] -> [num_rows, H]."""
    rules.dim("x", 2, *ACTIVATIONS)
    rules.features("H", c.x.size(1))
    rules.rows(2, "x")
    rules.same("T", "rows", c.rows.size(0), "x", c.x.size(0))
    rules.not_negative("num_rows")
    return c.x.new_empty((c.num_rows, c.x.size(1)))
