"""Fake kernels of MXFP8.

T rows, E groups, K features of x, B = 128, Tp = padded_rows(T, E).
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    BLOCK,
    E4M3,
    MX_BLOCK,
    Rules,
    ceil_div,
    output_if,
    padded_rows,
)

E8M0 = torch.float8_e8m0fnu


@torch.library.register_fake("grouped_linear::group_quantize_mx")
def group_quantize_mx(
    x: Tensor, offs: Tensor, rowwise: bool = True, columnwise: bool = False, bias_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, K] -> q, scale [T, ceil(K/32)], q_t [Tp/B, K, B], scale_t [Tp/B, K, 4], bias_grad."""
    rules = Rules("group_quantize_mx")
    rules.grouped_rows(x, offs, rowwise, columnwise)
    (T, K), E = x.shape, offs.size(0)
    blocks = padded_rows(T, E) // BLOCK

    return (
        output_if(rowwise, x, (T, K), E4M3),
        output_if(rowwise, x, (T, ceil_div(K, MX_BLOCK)), E8M0),
        output_if(columnwise, x, (blocks, K, BLOCK), E4M3),
        output_if(columnwise, x, (blocks, K, BLOCK // MX_BLOCK), E8M0),
        output_if(bias_grad, x, (E, K), torch.float32),
    )


@torch.library.register_fake("grouped_linear::group_round_mx")
def group_round_mx(
    x: Tensor, offs: Tensor, rowwise: bool = True, columnwise: bool = False, bias_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] -> x_rowwise [T, K], x_columnwise [T, K], bias_grad."""
    rules = Rules("group_round_mx")
    rules.grouped_rows(x, offs, rowwise, columnwise)
    (T, K), E = x.shape, offs.size(0)
    return (
        output_if(rowwise, x, (T, K), torch.bfloat16),
        output_if(columnwise, x, (T, K), torch.bfloat16),
        output_if(bias_grad, x, (E, K), torch.float32),
    )
