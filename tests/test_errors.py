"""What ops refuse: by one sentence, from fake tensors, meta tensors, CPU and CUDA."""

import pytest
import torch

from grouped_linear import ops
from support.changes import changes
from support.devices import devices
from support.errors import GROUPS_3, assert_alike
from support.ops import OPS, PAGES
from support.samples import of_every_kind
from support.tensors import BF16


@pytest.mark.parametrize("op", OPS)
def test_what_is_refused(op: str) -> None:
    samples = of_every_kind(op, GROUPS_3, BF16)
    assert_alike(changes(samples))
    for mistake in PAGES[op].mistakes:
        assert_alike([(samples[0], mistake)])


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
