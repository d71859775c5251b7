"""Group sizes and operands to test with.

T rows, E groups, K in_features, N out_features, Tp = padded_rows(T, E). Quantized operands come
from the reference. Bytes that a layout leaves unspecified are NaN, so that a kernel which reads
them shows it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grouped_linear.selftest import reference


@dataclass(frozen=True)
class Groups:
    """m_splits, the number of rows T >= sum(m_splits), K and N."""

    m_splits: tuple[int, ...]
    T: int
    K: int = 144
    N: int = 272

    @property
    def E(self) -> int:
        """The number of groups."""
        return len(self.m_splits)

    @property
    def valid(self) -> int:
        """The rows that belong to a group."""
        return sum(self.m_splits)

    @property
    def blocks(self) -> int:
        """The number of blocks that columnwise data is allocated for: Tp / 128."""
        return (self.T + 127 * min(self.E, self.T)) // 128

    def offs(self) -> Tensor:
        """The end of each group's rows."""
        return torch.tensor(self.m_splits).cumsum(0).int()


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
    if layout == "dense":
        return x
    if layout == "strided":  # the row stride exceeds the row length
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 24), torch.nan)
        wide[..., 8:-16] = x
        return wide[..., 8:-16]
    if layout == "odd":  # rows that are not aligned
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 3), torch.nan)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "transposed":  # the inner dimension is not dense
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    raise ValueError(layout)


def rows(groups: Groups, features: int, dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Normal numbers for each group's rows, NaN after them."""
    if layout == "expanded":  # y.sum().backward() makes such a dy
        return torch.full((), 0.3, dtype=dtype).expand(groups.T, features)
    x = torch.randn(groups.T, features)
    x[groups.valid :] = torch.nan
    return lay_out(x.to(dtype), layout)


def per_row(groups: Groups, layout: str = "dense") -> Tensor:
    """A float32 number of either sign for each group's rows, NaN after them."""
    if layout == "expanded":
        return torch.tensor(-0.7).expand(groups.T)
    x = torch.randn(groups.T)
    x[groups.valid :] = torch.nan
    return torch.stack([x, x], dim=1)[:, 0] if layout == "strided" else x


def weight(groups: Groups, dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Normal numbers [E, N, K]."""
    return lay_out(torch.randn(groups.E, groups.N, groups.K).to(dtype), layout)


def quantized_rows(groups: Groups, features: int) -> tuple[Tensor, Tensor]:
    """q [T, features] and scale [blocks, round_up(T, 4)] in the op's layout."""
    q, scale_T = reference.quantize_rowwise(
        rows(groups, features, torch.float32), reference.Scaling(False)
    )
    scale = torch.full((scale_T.size(0), -(-groups.T // 4) * 4), torch.nan)
    scale[:, : groups.valid] = scale_T[:, : groups.valid]
    return q, scale


def per_group_rows(
    groups: Groups, features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, features], q_t [Tp / 128, features, 128] and scale [E] in the op's layout."""
    offs, scaling = groups.offs(), reference.Scaling(False)
    q, scale = reference.quantize_groups(
        rows(groups, features, torch.float32), offs, scaling, dtype
    )
    used = reference.in_column_blocks(q, offs)
    q_t = torch.full((groups.blocks, features, 128), reference.E4M3_NAN, dtype=torch.uint8)
    q_t[: len(used)] = used.view(torch.uint8)
    return q, q_t.view(dtype), scale


def per_group_weight(groups: Groups) -> tuple[Tensor, Tensor]:
    """q [E, N, K] and scale [E]."""
    w_ENK = weight(groups, torch.float32)
    q, scale = reference.quantize(w_ENK, (1, 2), reference.Scaling(False))
    return q, scale.flatten()


def quantized_columns(
    groups: Groups, features: int, share_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """q_t [Tp / 128, features, 128] and scale_t [Tp / 128, features] in the op's layout."""
    used, scales = reference.quantize_columnwise(
        rows(groups, features, torch.float32), groups.offs(), reference.Scaling(False), share_scales
    )
    q_t = torch.full((groups.blocks, features, 128), reference.E4M3_NAN, dtype=torch.uint8)
    scale_t = torch.full((groups.blocks, scales.size(1)), torch.nan)
    q_t[: len(used)], scale_t[: len(used)] = used.view(torch.uint8), scales
    return q_t.view(reference.E4M3), scale_t
