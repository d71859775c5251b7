# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from float64, with the reason of each bound.

T rows, E groups, N out_features.
"""

import math

import torch
from torch import Tensor

from support import op_reference as reference

# Half a unit in the last place, relative: what one rounding to the dtype costs at most.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

# The c of |error| <= 2^-8 |y| + c * 2^-13 * (the sum of |a * b|), for FP8 and BF16 operands and y
# in BF16. FP8 tensor cores keep about 13 bits below a sum's largest addend, and truncate every
# product of a step to them. On sums that only grow, the worst case, an H200 was measured to lose
# 5.9 * 2^-13 of what was summed; 8 leaves room. Without promotion every 128 it would be 30
# (K = 4096).
C = 8


def rounded(expected: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """The error bound after rounding to dtype, from the bound before it.

    Subnormal numbers are tiny * eps apart. What is too large may become infinite.
    """
    info = torch.finfo(dtype)
    allowed = error + ROUNDING[dtype] * (expected.abs() + error) + info.tiny * info.eps / 2
    return allowed.masked_fill(expected.abs() > info.max * (1 - 2.0**-20), torch.inf)


def tolerance(expected: Tensor, magnitude: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """The error bound of float32 accumulation and one rounding. magnitude is the sum of |a * b|.

    `depth` additions in float32 each round by 2^-24, or by 2^-23 where a tensor core truncates. The
    errors add like a random walk, and 2 leaves room for its tails: 4 * sqrt(depth) * 2^-24.
    """
    walk = 4 * math.sqrt(max(depth, 1)) * 2.0**-24 * magnitude
    return rounded(expected, walk, dtype)


def scaled_tolerance(expected: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """What FP8 tensor cores and one rounding may cost; magnitude: the sum of |a * b|."""
    return rounded(expected, C * 2.0**-13 * magnitude, dtype)


def bias_grad_tolerance(dy_TN: Tensor, offs_E: Tensor) -> Tensor:
    """float32 sums of 128 rows, then of those sums: every addition rounds by at most 2^-24."""
    additions = min(dy_TN.size(0), 128) + dy_TN.size(0) // 128
    return additions * 2.0**-24 * reference.grouped_bias_grad(dy_TN.double().abs(), offs_E)
