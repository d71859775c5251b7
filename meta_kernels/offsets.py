"""Fake kernel of splits_to_offsets."""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import Rules, dtype_name


@torch.library.register_fake("grouped_linear::splits_to_offsets")
def splits_to_offsets(
    m_splits: Tensor,
    num_rows: int,
    alignment: int = 1,
    stride: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """m_splits [E] -> offs [E]."""
    dtype = out_dtype or torch.int32
    rules = Rules("splits_to_offsets")
    rules.dim("m_splits", m_splits, 1)
    rules.dtype("m_splits", m_splits.dtype, (torch.int32, torch.int64))
    rules.groups(m_splits.size(0))
    rules.dtype("out_dtype", dtype, (torch.int32, torch.int64))
    rules.not_negative("num_rows", num_rows)
    rules.check(alignment >= 1, lambda: f"alignment must be positive, got {alignment}")
    rules.check(stride >= 1, lambda: f"stride must be positive, got {stride}")
    rules.check(
        num_rows <= torch.iinfo(dtype).max // stride,
        lambda: f"num_rows * stride does not fit in {dtype_name(dtype)}, got {num_rows} * {stride}",
    )
    return m_splits.new_empty(m_splits.shape, dtype=dtype)
