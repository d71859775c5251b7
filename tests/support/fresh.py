# SPDX-License-Identifier: Apache-2.0
"""Weights in high precision with their FP8 numbers beside them, and a format of a user's own."""

from typing import Any

from torch import Tensor

from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Layouts
from support.compare import assert_same_bits


def assert_fresh(p: Any) -> None:
    """Its quantized numbers are what quantizing its high-precision ones gives."""
    w = p.to_local() if hasattr(p, "to_local") else p
    assert isinstance(w, GroupedTensorWithMaster)
    made = GroupedTensorWithMaster.quantize(w.detach().clone().dequantize(), w.recipe)
    for part, expected in zip(w.parts, made.parts, strict=True):
        if part is not None and expected is not None:
            assert_same_bits(part, expected)
        else:  # a shard keeps no transposed numbers
            assert part is None
            assert expected is None or w is not p


def rounded(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Tensor:
    return (16 * t).round() / 16
