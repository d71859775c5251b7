# SPDX-License-Identifier: Apache-2.0
"""Comparisons of tensors: bit for bit, and within a bound on rounding errors."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from support.groups import Groups


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor: unlike numbers, they tell NaNs and signed zeros apart."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def assert_all_same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        assert_same_bits(actual[name], t)


def outcome(y: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
    """y, and the gradients of the sum of its squares."""
    return [y, *torch.autograd.grad(y.float().square().sum(), [*leaves])]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference beside that of the tensor, which may be zero."""
    a, e = (t.detach().double() for t in (actual, expected))
    return float((a - e).norm() / e.norm().clamp(1e-30))


def within(actual: Tensor, expected: Tensor, tolerance: Tensor) -> bool:
    return bool(((actual.double() - expected).abs() <= tolerance).all())  # NaN is not


def tail_is_zero(y_TN: Tensor, groups: Groups) -> bool:
    return not bits(y_TN[groups.valid :]).any()


def assert_shows_cold(y: Tensor, x: Tensor) -> None:
    """The output and the gradient of x are NaN in the rows of groups."""
    assert y[:35].isnan().all()
    assert not y[35:].any()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[:35].isnan().all()
