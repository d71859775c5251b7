"""Mistakes that no page holds: other forms of an op's arguments, lists without a tensor."""

import pytest
import torch
from expecttest import assert_expected_inline

from grouped_linear import ops
from support.devices import devices
from support.errors import GROUPS_3, sentences
from support.mistakes import offs
from support.reference import E4M3, E5M2
from support.samples import make
from support.tensors import BF16, FP32


def test_lists_without_a_tensor() -> None:
    with pytest.raises(RuntimeError, match=r"^quantize_weight_list: E must be .* 1024, got 0$"):
        ops.quantize_weight_list([])
    with pytest.raises(RuntimeError, match=r"^update_scales_: scale must not be empty$"):
        ops.update_scales_([], [], [], [])


@pytest.mark.parametrize("device", [*devices("sort_by_expert"), "meta"])
def test_sort_of_too_many_choices(device: str) -> None:
    experts = torch.zeros(1, dtype=torch.int64, device=device).expand(2**16, 2**15)
    with pytest.raises(RuntimeError) as error:
        torch.ops.grouped_linear.sort_by_expert(experts, 8)
    assert str(error.value) == (
        "sort_by_expert: experts must have at most 2147483519 choices, got 2147483648"
    )


def test_grouped_scaled_mm_per_group() -> None:
    good = make("grouped_scaled_mm", GROUPS_3, BF16, per_group=E5M2)
    a, b = good["a"], good["b"]
    mistakes = [
        {"a": a[0]},
        {"a": a.to(BF16)},
        {"a": a[:, :24], "b": b[:, :24]},
        {"b": b.to(E5M2)},
        {"b": b[:, :128]},
        {"scale_a": torch.ones(3, dtype=BF16)},
        {"scale_a": torch.ones(2)},
        {"scale_a": torch.ones(2, 12)},
        {"scale_b": torch.ones(3, 1, 2)},
        {"scale_b": torch.ones(3, dtype=torch.float64)},
        {"scale_b": torch.ones(4)},
        {"offs": offs(2)},
    ]
    assert_expected_inline(
        sentences(good, mistakes),
        """\
grouped_scaled_mm: a must be 2-D, got 1-D
grouped_scaled_mm: a must be float8_e4m3fn or float8_e5m2, got bfloat16
grouped_scaled_mm: K must be a positive multiple of 16, got 24
grouped_scaled_mm: b must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm: K differs: a has 144, b has 128
grouped_scaled_mm: scale_a must be float32, got bfloat16
grouped_scaled_mm: E differs: scale_a has 2, offs has 3
grouped_scaled_mm: a must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm: scale_b must be 1-D, got 3-D
grouped_scaled_mm: scale_b must be float32, got float64
grouped_scaled_mm: E differs: scale_b has 4, offs has 3
grouped_scaled_mm: E differs: b has 3, offs has 2""",
    )


def test_grouped_scaled_mm_wgrad_per_group() -> None:
    good = make("grouped_scaled_mm_wgrad", GROUPS_3, BF16, per_group=E5M2)
    dy_t, x_t = good["dy_t"], good["x_t"]
    mistakes = [
        {"dy_t": dy_t[0]},
        {"dy_t": dy_t.to(FP32)},
        {"dy_t": dy_t[:, :, :64]},
        {"dy_t": dy_t[:, :24]},
        {"x_t": x_t[0]},
        {"x_t": x_t.view(torch.uint8).view(E5M2)},
        {"x_t": x_t[:1]},
        {"scale_dy_t": torch.ones(3, dtype=BF16)},
        {"scale_dy_t": torch.ones(2)},
        {"scale_dy_t": torch.ones(dy_t.shape[:2])},
        {"scale_x_t": torch.ones(x_t.shape[:2])},
        {"scale_x_t": torch.ones(4)},
        {"offs": offs(2)},
    ]
    assert_expected_inline(
        sentences(good.but(x_t=x_t.view(E4M3)), mistakes),
        """\
grouped_scaled_mm_wgrad: dy_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad: dy_t must be float8_e4m3fn or float8_e5m2, got float32
grouped_scaled_mm_wgrad: dy_t must hold blocks of 128 rows, got 64
grouped_scaled_mm_wgrad: N must be a positive multiple of 16, got 24
grouped_scaled_mm_wgrad: x_t must be 3-D, got 2-D
grouped_scaled_mm_wgrad: x_t must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm_wgrad: the number of blocks differs: dy_t has 3, x_t has 1
grouped_scaled_mm_wgrad: scale_dy_t must be float32, got bfloat16
grouped_scaled_mm_wgrad: E differs: scale_dy_t has 2, offs has 3
grouped_scaled_mm_wgrad: dy_t must be float8_e4m3fn, got float8_e5m2
grouped_scaled_mm_wgrad: scale_x_t must be 1-D, got 2-D
grouped_scaled_mm_wgrad: E differs: scale_x_t has 4, offs has 3
grouped_scaled_mm_wgrad: E differs: scale_dy_t has 3, offs has 2""",
    )
