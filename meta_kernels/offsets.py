"""Fake kernel of splits_to_offsets."""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import Rules, dtype_name, fake


@fake
def splits_to_offsets(rules: Rules, c: Any) -> Tensor:
    """m_splits [E] -> offs [E]."""
    dtype = c.out_dtype or torch.int32
    rules.dim("m_splits", 1)
    rules.dtype("m_splits", torch.int32, torch.int64)
    rules.groups(c.m_splits.size(0))
    rules.dtype("out_dtype", torch.int32, torch.int64)
    rules.not_negative("num_rows")
    rules.check(c.alignment >= 1, lambda: f"alignment must be positive, got {c.alignment}")
    rules.check(c.stride >= 1, lambda: f"stride must be positive, got {c.stride}")
    rules.check(
        c.num_rows <= torch.iinfo(dtype).max // c.stride,
        lambda: (
            f"num_rows * stride does not fit in {dtype_name(dtype)}, got {c.num_rows} * {c.stride}"
        ),
    )
    return c.m_splits.new_empty(c.m_splits.shape, dtype=dtype)
