# SPDX-License-Identifier: Apache-2.0
"""Weights that learn in MXFP4, and readers of published bytes that share no code with the package.

E experts, N out_features, K in_features.
"""

import torch
from torch import Tensor

from grouped_linear import Float8BlockScaling, Format, Recipe

E4M3 = torch.float8_e4m3fn
#: The numbers of E2M1's codes: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def learns_in_mxfp4(fp8: bool = False) -> Recipe:
    """Weights that are multiplied in MXFP4 while they learn, beside activations in 16 bits or FP8.

    In FP8 they may be kept in both precisions.
    """
    return Float8BlockScaling(qat="mxfp4") if fp8 else Recipe(weight=Format(qat="mxfp4"))


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [..., K] of codes [..., K / 2], low nibble first, and E8M0 bytes [..., K / 32]."""
    packed, exponents = codes.view(torch.uint8).int(), scales.view(torch.uint8).double() - 127
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    numbers = torch.cat([E2M1, -E2M1]).double()[nibbles]
    return numbers * torch.exp2(exponents).repeat_interleave(32, dim=-1)


def decoded_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Of GPT-OSS's blocks [E, N, K / 32, 16]."""
    return decoded(blocks.flatten(-2), scales)


def cast_to_blocks(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The cast to FP8 with power-of-two scales of stacks that train in 16 bits.

    Each 128 x 128 block has the least power of two ``scale`` with amax / scale <= 448.
    """
    N, K = w_NK.shape
    q, scale = torch.empty(N, K, dtype=E4M3), torch.empty(-(-N // 128), -(-K // 128))
    for i in range(scale.size(0)):
        for j in range(scale.size(1)):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            amax = w_NK[block].double().abs().max()
            scale[i, j] = torch.exp2(torch.ceil(torch.log2(amax / 448)))
            q[block] = (w_NK[block].double() / scale[i, j].double()).float().to(E4M3)
    return q, scale
