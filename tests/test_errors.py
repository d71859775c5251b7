# SPDX-License-Identifier: Apache-2.0
"""What ops refuse: by one sentence, from fake tensors, meta tensors, CPU and CUDA."""

import pytest
import torch

from grouped_linear import ops
from support.changes import changes
from support.devices import HERE
from support.errors import GROUPS_3, assert_alike
from support.ops import OPS, PAGES
from support.samples import of_every_kind
from support.tensors import BF16

# How many rules of each op the changes break. A rule that is gone from Python and C++ alike is seen
# by this alone: whoever adds or drops one changes the number.
NUMBERS = """
adam_weight_ 49, addmm 12, block_scaled_linear 18, block_scaled_linear_grad 30, dequantize_mxfp4
12, gather_dot 10, gather_sum 12, group_dequantize 11, group_dequantize_t 14, group_quantize 10,
group_quantize_current 9, group_quantize_delayed 15, group_quantize_mx 7, group_quantize_swiglu
13, group_quantize_swiglu_grad 20, group_round_mx 7, grouped_bias_grad 6, grouped_mm 31,
grouped_mm_list 22, grouped_mm_mxfp4 42, grouped_mm_swiglu 23, grouped_mm_swiglu_grad 27,
grouped_mm_wgrad 19, grouped_mm_wgrad_ 26, grouped_mm_wgrad_list_ 29, grouped_scaled_mm 43,
grouped_scaled_mm_wgrad 23, grouped_scaled_mm_wgrad_ 30, grouped_scaled_mm_wgrad_list_ 31,
quantize_mxfp4 5, quantize_weight 9, quantize_weight_current 6, quantize_weight_delayed 12,
quantize_weight_list 9, refresh_weight_ 25, refresh_weight_current_ 23, refresh_weight_delayed_
29, refresh_weight_mx_ 18, scatter_rows 7, sort_by_expert 3, splits_to_offsets 8, swiglu 11,
swiglu_grad 18, topk_experts 9, topk_experts_grad 13, transpose_weight 5, update_scales_ 17
"""
RULES = {op: int(n) for op, n in (pair.split() for pair in NUMBERS.split(","))}


@pytest.mark.parametrize("op", OPS)
def test_what_is_refused(op: str) -> None:
    samples = of_every_kind(op, GROUPS_3, BF16)
    rules = assert_alike(changes(samples))
    for mistake in PAGES[op].mistakes:
        rules |= assert_alike([(samples[0], mistake)])
    assert len(rules) == RULES[op], sorted(rules)


@pytest.mark.parametrize("op", OPS)
def test_none_in_the_place_of_a_tensor(op: str) -> None:
    """The rule that it breaks, from a fake too."""
    samples = of_every_kind(op, GROUPS_3, BF16)
    required = [a.name for a in samples[0].schema.arguments if str(a.type) == "Tensor"]
    others = [n for n, value in samples[0].arguments.items() if isinstance(value, torch.Tensor)]
    calls = [(s, {name: None}) for s in samples for name in required if others != [name]]
    rules = assert_alike(calls) if calls else set()
    assert len(rules) == len(required) * bool(calls)


def test_lists_without_a_tensor() -> None:
    with pytest.raises(RuntimeError, match=r"^quantize_weight_list: E must be .* 1024, got 0$"):
        ops.quantize_weight_list([])
    with pytest.raises(RuntimeError, match=r"^update_scales_: scale must not be empty$"):
        ops.update_scales_([], [], [], [])


@pytest.mark.parametrize("device", [*HERE, "meta"])
def test_sort_of_too_many_choices(device: str) -> None:
    experts = torch.zeros(1, dtype=torch.int64, device=device).expand(2**16, 2**15)
    with pytest.raises(RuntimeError) as error:
        torch.ops.grouped_linear.sort_by_expert(experts, 8)
    assert str(error.value) == (
        "sort_by_expert: experts must have at most 2147483519 choices, got 2147483648"
    )
