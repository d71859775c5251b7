"""Mistakes that no page holds: other forms of an op's arguments, lists without a tensor."""

import pytest
import torch

from grouped_linear import ops
from support.devices import devices
from support.errors import GROUPS_3, assert_refused
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
    assert_refused(good, mistakes)


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
    assert_refused(good.but(x_t=x_t.view(E4M3)), mistakes)
