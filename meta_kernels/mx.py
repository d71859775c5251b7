# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of MXFP8.

T rows, E groups, K features of x, B = 128, Tp = padded_rows(T, E).
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    BLOCK,
    E4M3,
    MX_BLOCK,
    Rules,
    ceil_div,
    fake,
    output_if,
    padded_rows,
)

E8M0 = torch.float8_e8m0fnu


@fake
def group_quantize_mx(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, K] -> q, scale [T, ceil(K/32)], q_t [Tp/B, K, B], scale_t [Tp/B, K, 4], bias_grad."""
    rules.grouped_rows()
    (T, K), E = c.x.shape, c.offs.size(0)
    blocks = padded_rows(T, E) // BLOCK
    return (
        output_if(c.rowwise, c.x, (T, K), E4M3),
        output_if(c.rowwise, c.x, (T, ceil_div(K, MX_BLOCK)), E8M0),
        output_if(c.columnwise, c.x, (blocks, K, BLOCK), E4M3),
        output_if(c.columnwise, c.x, (blocks, K, BLOCK // MX_BLOCK), E8M0),
        output_if(c.bias_grad, c.x, (E, K), torch.float32),
    )


@fake
def group_round_mx(rules: Rules, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] -> x_rowwise [T, K], x_columnwise [T, K], bias_grad."""
    rules.grouped_rows()
    (T, K), E = c.x.shape, c.offs.size(0)
    return (
        output_if(c.rowwise, c.x, (T, K), torch.bfloat16),
        output_if(c.columnwise, c.x, (T, K), torch.bfloat16),
        output_if(c.bias_grad, c.x, (E, K), torch.float32),
    )
