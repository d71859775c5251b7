"""MXFP4 beside what it stands for: every code, every scale, and other numbers quantized.

T rows, E groups, K in_features, N out_features.
"""

import pytest
import torch

from grouped_linear import ops
from support import reference
from support.compare import assert_same_bits
from support.devices import devices
from support.tensors import BF16, DTYPES

MXFP4 = ["quantize_mxfp4", "dequantize_mxfp4", "grouped_mm_mxfp4"]
DEVICES = pytest.mark.parametrize("device", devices(*MXFP4))


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """q [256, 16, 16] and scale [256, 16, 1]: each pair of codes beside each byte."""
    q = torch.arange(256).to(torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    return q, torch.arange(256).to(torch.uint8).view(256, 1, 1).repeat(1, 16, 1)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_beside_every_scale(device: str, dtype: torch.dtype) -> None:
    q, scale = every_code_and_scale()
    w = ops.dequantize_mxfp4(q.to(device), scale.to(device), dtype).cpu()
    expected = reference.dequantize_mxfp4(q, scale)
    known = ~expected.isnan()  # of a NaN the sign and the payload are unspecified
    assert torch.equal(w.isnan(), ~known)
    assert_same_bits(w[known], expected.float().to(dtype)[known])
    if dtype != torch.float16:  # exact up to the dtype's largest number
        held = expected.abs() <= torch.finfo(dtype).max
        assert torch.equal(w.double()[held], expected[held])


@DEVICES
@pytest.mark.parametrize("transpose_b", [True, False])
def test_e4m3_of_every_code_and_distance(device: str, transpose_b: bool) -> None:
    """A product with one 1 a row shows the e4m3 numbers: scales 0 to 20 below the largest."""
    N, K = 128, 128
    q = torch.arange(256).to(torch.uint8).repeat(N * K // 512).view(1, N, K // 2)
    scale = (100 - torch.arange(N).view(1, N, 1) % 21).expand(1, N, 4).to(torch.uint8).contiguous()
    ones = torch.eye(128).to(torch.float8_e4m3fn)
    w = ops.grouped_mm_mxfp4(
        ones.to(device),
        q.to(device),
        scale.to(device),
        torch.tensor([128], dtype=torch.int32, device=device),
        scale_a=torch.ones(1, 128, device=device),
        out_dtype=torch.float32,
        transpose_b=transpose_b,
    ).cpu()
    expected = reference.mxfp4_in_e4m3(q, scale)[0]
    assert torch.equal(w.double().T if transpose_b else w.double(), expected)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_the_format_are_kept(device: str, dtype: torch.dtype) -> None:
    q = torch.randint(256, (3, 32, 48), dtype=torch.uint8, device=device)
    scale = torch.randint(120, 125, (3, 32, 3), dtype=torch.uint8, device=device)
    w = ops.dequantize_mxfp4(q, scale, dtype)
    assert torch.equal(ops.dequantize_mxfp4(*ops.quantize_mxfp4(w), dtype), w)


@DEVICES
def test_error_of_normal_numbers(device: str) -> None:
    """11.2% of the norm, as the docstring says: a scale without saturation has 11.9%."""
    w = torch.randn(1, 512, 512, device=device)
    error = ops.dequantize_mxfp4(*ops.quantize_mxfp4(w), torch.float32) - w
    assert 0.110 < error.norm() / w.norm() < 0.114


@DEVICES
def test_nan_and_infinity_make_a_block_nan(device: str) -> None:
    w = torch.ones(1, 16, 64, dtype=BF16, device=device)
    w[0, 0, 3], w[0, 1, 40] = torch.nan, torch.inf
    numbers = ops.dequantize_mxfp4(*ops.quantize_mxfp4(w))
    assert numbers[0, 0, :32].isnan().all()
    assert numbers[0, 1, 32:].isnan().all()
    assert numbers.isnan().sum() == 64
