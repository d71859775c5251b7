"""FLOP formulas of the ops: two FLOPs for each multiply-add, as in ``torch.mm``.

``torch.utils.flop_counter.FlopCounterMode`` calls these formulas. They only see shapes, so rows
past the last group count like others. Biases, quantizing and gathering are not counted.

T rows, E groups, K in_features, N out_features, B = 128.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from grouped_linear.meta_kernels.rules import BLOCK

Shape = Sequence[int]
_ops = torch.ops.grouped_linear


@register_flop_formula([_ops.grouped_mm_list])
def _gemm_list(a: Shape, *others: Any, out_shape: Shape, **options: Any) -> int:
    """a [T, K] -> [T, N]."""
    return 2 * math.prod(out_shape) * a[1]


def _products(a: Shape, a_low: Shape | None, out_shape: Shape) -> int:
    r = 0 if a_low is None else a_low[1]
    return 2 * math.prod(out_shape) * (a[1] + r)


@register_flop_formula([_ops.grouped_mm])
def _gemm(
    a: Shape,
    b: Shape,
    offs: Shape,
    bias: Shape | None = None,
    out_dtype: Any = None,
    rows: Shape | None = None,
    a_low: Shape | None = None,
    b_low: Shape | None = None,
    *,
    out_shape: Shape,
) -> int:
    """a [T, K] -> [T, N], and a_low [T, r]."""
    return _products(a, a_low, out_shape)


@register_flop_formula([_ops.grouped_scaled_mm])
def _scaled_gemm(
    a: Shape,
    b: Shape,
    scale_a: Shape,
    scale_b: Shape,
    offs: Shape,
    bias: Shape | None = None,
    out_dtype: Any = None,
    rows: Shape | None = None,
    a_low: Shape | None = None,
    b_low: Shape | None = None,
    *,
    out_shape: Shape,
) -> int:
    """The same."""
    return _products(a, a_low, out_shape)


@register_flop_formula([_ops.grouped_mm_swiglu, _ops.grouped_mm_swiglu_grad])
def _gemm_swiglu(
    a: Shape, b: Shape, *others: Any, out_shape: Sequence[Shape], **options: Any
) -> int:
    """a [T, K], b [E, K, N]."""
    T = out_shape[1][0]  # of h, the second output
    return 2 * T * math.prod(b[1:])


@register_flop_formula([_ops.grouped_mm_wgrad])
def _wgrad(
    dy: Shape,
    x: Shape,
    offs: Shape,
    out_dtype: Any = None,
    dy_rows: Shape | None = None,
    *others: Any,
    **options: Any,
) -> int:
    """dy [T, N] or with dy_rows [T], x [T, K]."""
    rows = dy[0] if dy_rows is None else dy_rows[0]
    return 2 * rows * dy[1] * x[1]


@register_flop_formula([_ops.grouped_mm_wgrad_, _ops.grouped_mm_wgrad_list_])
def _added_wgrad(
    main_grad: Any,
    dy: Shape,
    x: Shape,
    offs: Shape,
    overwrite: Any = None,
    dy_rows: Shape | None = None,
    *others: Any,
    **options: Any,
) -> int:
    """The same."""
    return _wgrad(dy, x, offs, dy_rows=dy_rows)


@register_flop_formula([_ops.grouped_scaled_mm_wgrad])
def _scaled_wgrad(
    dy_t: Shape,
    x_t: Shape,
    scale_dy_t: Shape,
    scale_x_t: Shape,
    offs: Shape,
    *others: Any,
    **options: Any,
) -> int:
    """dy_t [Tp/B, N, B], x_t [Tp/B, K, B]. To within 64 rows: B rows and more have the same Tp."""
    blocks, N = dy_t[:2]
    rows = BLOCK * blocks - (BLOCK - 1) * min(offs[0], blocks) + BLOCK // 2
    return 2 * rows * N * x_t[1] if blocks else 0


@register_flop_formula([_ops.grouped_scaled_mm_wgrad_, _ops.grouped_scaled_mm_wgrad_list_])
def _added_scaled_wgrad(main_grad: Any, *operands: Any, **options: Any) -> int:
    """The same."""
    return _scaled_wgrad(*operands)


@register_flop_formula([_ops.block_scaled_linear])
def _layer(x: Shape, w: Shape, *others: Any, **options: Any) -> int:
    """x [T, K], w [E, N, K]."""
    return 2 * math.prod(x) * w[1]


@register_flop_formula([_ops.block_scaled_linear_grad])
def _layer_grad(
    dy: Shape,
    offs: Shape,
    x_t: Shape | None,
    scale_x_t: Shape | None,
    w_t: Shape | None,
    *others: Any,
    **options: Any,
) -> int:
    """dy [T, N], x_t [Tp/B, K, B] for dw, w_t [E, K, N] for dx."""
    of_dw = 0 if x_t is None else x_t[1]
    of_dx = 0 if w_t is None else w_t[1]
    return 2 * math.prod(dy) * (of_dw + of_dx)
