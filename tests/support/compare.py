"""Comparisons of tensors: bit for bit, and within a bound on rounding errors."""

import math

import torch
from torch import Tensor

from grouped_linear import GroupedTensor
from support import reference
from support.groups import Groups
from support.tensors import BF16, FP16, FP32


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor: unlike numbers, they tell NaNs and signed zeros apart."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def bias_grad_tolerance(dy_TN: Tensor, offs_E: Tensor) -> Tensor:
    """float32 sums of 128 rows, then of those sums: every addition rounds by at most 2^-24."""
    additions = min(dy_TN.size(0), 128) + dy_TN.size(0) // 128
    return additions * 2.0**-24 * reference.grouped_bias_grad(dy_TN.double().abs(), offs_E)


def assert_bias_grad(actual: Tensor, dy_TN: Tensor, offs_E: Tensor) -> None:
    assert actual.dtype == FP32
    error = (actual.double() - reference.grouped_bias_grad(dy_TN, offs_E)).abs()
    assert (error <= bias_grad_tolerance(dy_TN, offs_E)).all()


# Half a unit in the last place, relative: what one rounding to the dtype costs at most.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}


def rounded(expected: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """The error bound after rounding to dtype, from the bound before it.

    float16 subnormals are 2^-24 apart.
    """
    return error + ROUNDING[dtype] * (expected.abs() + error) + (2.0**-25 if dtype == FP16 else 0)


def tolerance(expected: Tensor, magnitude: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """The error bound of float32 accumulation and one rounding. magnitude is the sum of |a * b|.

    `depth` additions in float32 each round by 2^-24, or by 2^-23 where a tensor core truncates. The
    errors add like a random walk, and 2 leaves room for its tails: 4 * sqrt(depth) * 2^-24.
    """
    walk = 4 * math.sqrt(max(depth, 1)) * 2.0**-24 * magnitude
    return rounded(expected, walk, dtype)


def within(actual: Tensor, expected: Tensor, tolerance: Tensor) -> bool:
    return bool(((actual.double() - expected).abs() <= tolerance).all())  # NaN is not


def tail_is_zero(y_TN: Tensor, groups: Groups) -> bool:
    return not bits(y_TN[groups.valid :]).any()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Both are quantized to the same bytes, and q_t is the transpose of q."""
    assert isinstance(actual, GroupedTensor)
    assert isinstance(expected, GroupedTensor)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert_same_bits(actual.q, expected.q)
    assert_same_bits(actual.scale, expected.scale)
    if actual.q_t is not None:
        assert_same_bits(actual.q_t, actual.q.transpose(-2, -1))


def assert_shows_cold(y: Tensor, x: Tensor) -> None:
    """The output and the gradient of x are NaN in the rows of groups."""
    assert y[:35].isnan().all()
    assert not y[35:].any()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[:35].isnan().all()
