# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the grouped GEMMs that go on with SwiGLU or its gradient.

T rows, E groups, K features of a, F features of h.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.matmul import check_operands, row_count
from grouped_linear.meta_kernels.rules import Rules, fake


@fake
def grouped_mm_swiglu(rules: Rules, c: Any) -> tuple[Tensor, Tensor]:
    """a [T, K], b [E, K, 2 F] -> gate_up [T, 2 F] or empty, h [T, F]."""
    E, N = check_operands(rules, c)
    rules.bias(E, N, c.a.dtype)
    T = row_count(rules, c)
    rules.features("N / 2", N // 2)
    rules.swiglu_form()
    return c.a.new_empty((T, N) if c.keep_gate_up else (0,)), c.a.new_empty((T, N // 2))


@fake
def grouped_mm_swiglu_grad(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """a [T, K], b [E, F, K], weight [T] -> d_gate_up [T, 2 F], h [T, F], d_weight [T]."""
    _, F = check_operands(rules, c)
    T, name = row_count(rules, c), "a" if c.rows is None else "rows"
    rules.tensor("gate_up", 2, c.a.dtype, "a")
    rules.same("T", "gate_up", c.gate_up.size(0), name, T)
    rules.same("2 * N", "gate_up", c.gate_up.size(1), "b", 2 * F)
    rules.tensor("weight", 1, torch.float32, "a")
    rules.same("T", "weight", c.weight.size(0), name, T)
    rules.swiglu_form()
    return c.a.new_empty((T, 2 * F)), c.a.new_empty((T, F)), c.weight.new_empty((T,))
