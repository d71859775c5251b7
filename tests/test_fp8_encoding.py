# SPDX-License-Identifier: Apache-2.0
"""FP8 encoding, compared with the conversions of torch where these are defined."""

import pytest
import torch
from torch import Tensor

from grouped_linear import ops
from support.compare import assert_same_bits
from support.reference import E4M3, E5M2
from support.tensors import BF16, FP16, FP32


def numbers(dtype: torch.dtype, fp8: torch.dtype) -> Tensor:
    """[T, 128]: numbers that torch converts to a finite number of the format.

    All of them in 16 bits. In float32: all numbers of the format, the ties between neighbours, the
    float32 numbers beside both, and random bits.
    """
    if dtype.itemsize == 2:
        x = torch.arange(2**16).to(torch.int16).view(dtype)
    else:
        codes = torch.arange(127, dtype=torch.uint8).view(fp8).float()
        codes = codes[codes.isfinite()]
        x = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
        beside = (x.nextafter(torch.tensor(y)) for y in (torch.inf, -torch.inf))
        random = torch.randint(-(2**31), 2**31, (2**20,)).to(torch.int32).view(FP32)
        x = torch.cat([x, *beside, random])
        x = torch.cat([x, -x])
    x = x[x.abs() <= torch.finfo(fp8).max]
    return torch.nn.functional.pad(x, (0, -x.numel() % 128)).view(-1, 128)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_encoding_without_a_scale_is_torchs(
    dtype: torch.dtype, fp8: torch.dtype, device: str
) -> None:
    x = numbers(dtype, fp8).to(device)
    offs = torch.tensor([x.size(0)], dtype=torch.int32, device=device)
    scale = torch.ones(1, device=device)
    q, *_ = torch.ops.grouped_linear.group_quantize_delayed(x, offs, scale, None, fp8)
    assert_same_bits(q, x.to(fp8))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_encoding_with_powers_of_two_is_torchs(dtype: torch.dtype, device: str) -> None:
    """With an amax of 448 * 2^n the factor is 2^-n, which torch can multiply by exactly."""
    for n in (-7, 0, 5):
        x = numbers(dtype, E4M3).to(device)
        x[:, 0] = 448
        scaled = (x.double() * 2.0**n).to(dtype)
        offs = torch.tensor([x.size(0)], dtype=torch.int32, device=device)
        out = ops.group_quantize(scaled, offs)
        assert out.q is not None
        assert_same_bits(out.q, (scaled.double() * 2.0**-n).float().to(E4M3))
