# SPDX-License-Identifier: Apache-2.0
"""FLOP formulas of the ops: two FLOPs for each multiply-add, as in ``torch.mm``.

``torch.utils.flop_counter.FlopCounterMode`` calls these formulas. They only see shapes, so rows
past the last group count like others. Biases, quantizing and gathering are not counted.

T rows, E groups, K in_features, N out_features, B = 128.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from grouped_linear.meta_kernels.rules import BLOCK, arguments_of

Formula = Callable[[Any], int]


def flops(*ops: str) -> Callable[[Formula], Formula]:
    """Register a formula of these ops, of shapes by the schema's names and ``out_shape``."""

    def register(formula: Formula) -> Formula:
        for op in (getattr(torch.ops.grouped_linear, name) for name in ops):

            def count(*given: Any, out_shape: Any, op: Any = op, **named: Any) -> int:
                arguments = arguments_of(op.default, given, named)
                return formula(SimpleNamespace(**arguments, out_shape=out_shape))

            register_flop_formula([op])(count)
        return formula

    return register


def _gathered(t: Sequence[int], rows: Sequence[int] | None) -> int:
    """The rows of an operand that is gathered or not."""
    return t[0] if rows is None else rows[0]


@flops("addmm")
def _addmm(c: Any) -> int:
    """a [M, K] -> [M, N]."""
    return 2 * math.prod(c.out_shape) * c.a[1]


@flops("grouped_mm", "grouped_mm_mxfp4", "grouped_scaled_mm")
def _gemm(c: Any) -> int:
    """a [T, K] -> [T, N], and a_low [T, r]."""
    r = 0 if c.a_low is None else c.a_low[1]
    return 2 * math.prod(c.out_shape) * (c.a[1] + r)


@flops("grouped_mm_list")
def _gemm_list(c: Any) -> int:
    """a [T, K] -> [T, N]."""
    return 2 * math.prod(c.out_shape) * c.a[1]


@flops("grouped_mm_swiglu", "grouped_mm_swiglu_grad")
def _gemm_swiglu(c: Any) -> int:
    """a [T, K], b [E, K, N]."""
    return 2 * _gathered(c.a, c.rows) * math.prod(c.b[1:])


@flops("grouped_mm_wgrad", "grouped_mm_wgrad_", "grouped_mm_wgrad_list_")
def _wgrad(c: Any) -> int:
    """dy [T, N] or with dy_rows [T], x [T, K]."""
    return 2 * _gathered(c.dy, c.dy_rows) * c.dy[1] * c.x[1]


@flops("grouped_scaled_mm_wgrad", "grouped_scaled_mm_wgrad_", "grouped_scaled_mm_wgrad_list_")
def _scaled_wgrad(c: Any) -> int:
    """dy_t [Tp/B, N, B], x_t [Tp/B, K, B]. To within 64 rows: B rows and more have the same Tp."""
    blocks, N = c.dy_t[:2]
    rows = BLOCK * blocks - (BLOCK - 1) * min(c.offs[0], blocks) + BLOCK // 2
    return 2 * rows * N * c.x_t[1] if blocks else 0


@flops("block_scaled_linear")
def _layer(c: Any) -> int:
    """x [T, K], w [E, N, K]."""
    return 2 * math.prod(c.x) * c.w[1]


@flops("block_scaled_linear_grad")
def _layer_grad(c: Any) -> int:
    """dy [T, N], x_t [Tp/B, K, B] for dw, w_t [E, K, N] for dx."""
    products = sum(t[1] for t in (c.x_t, c.w_t) if t is not None)
    return 2 * math.prod(c.dy) * products
