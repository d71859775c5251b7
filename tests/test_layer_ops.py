# SPDX-License-Identifier: Apache-2.0
"""A layer's forward and backward as one op each: the bits of the ops inside.

T rows, E groups, K in_features, N out_features.
"""

import pytest
import torch

from grouped_linear import Float8BlockScaling, GroupedLinear, ops
from grouped_linear.nn import functional
from support.compare import assert_same_bits
from support.groups import GROUPS
from support.tensors import BF16, FP32


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, FP32), (FP32, BF16)], ids=str)
def test_x_and_weight_of_two_dtypes(
    x_dtype: torch.dtype, w_dtype: torch.dtype, device: str
) -> None:
    """Of one dtype they are quantized together on a GPU, of two one after the other."""
    groups = GROUPS["unaligned"]
    x = torch.randn(groups.T, groups.K, device=device)
    w = torch.randn(groups.E, groups.N, groups.K, device=device)
    m_splits = torch.tensor(groups.m_splits, device=device)
    y, offs, *_ = ops.block_scaled_linear(x.to(x_dtype), w.to(w_dtype), m_splits)
    q_x = ops.group_quantize(x.to(x_dtype), offs)
    q_w = ops.quantize_weight(w.to(w_dtype))
    product = ops.grouped_scaled_mm(q_x.q, q_w.q.mT, q_x.scale, q_w.scale.mT, offs, None, x_dtype)
    assert_same_bits(y, product)


def test_what_is_not_asked_for_has_no_place_in_memory(device: str) -> None:
    """Scratch of 10 MiB, which torch maps on a GPU as they are: past them is no address."""
    if device == "cuda":
        torch.cuda.empty_cache()
    x, w = torch.ones(4096, 2048, device=device), torch.ones(1, 896, 2048, device=device)
    m_splits = torch.tensor([4096], device=device)
    scratch = x.numel() + 16 * 4096 * 4 + w.numel()
    assert scratch == 10 * 2**20
    y, *_ = ops.block_scaled_linear(x, w, m_splits, columnwise_x=False, columnwise_w=False)
    assert (y == 2048).all()


def test_one_op_or_several_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Dynamo traces the layer and breaks its graph at the gradient, which runs eagerly."""
    layer = GroupedLinear(3, 32, 48, recipe=Float8BlockScaling())
    x, m_splits = torch.randn(9, 32), torch.tensor([2, 0, 5])
    expected = layer(x, m_splits)

    class Eager:
        apply = torch._dynamo.disable(functional.GroupedLinearFunction.apply)

    monkeypatch.setattr(functional, "GroupedLinearFunction", Eager)
    assert_same_bits(torch.compile(layer, backend="eager")(x, m_splits), expected)
