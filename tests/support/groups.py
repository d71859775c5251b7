# SPDX-License-Identifier: Apache-2.0
"""Group sizes to test with: m_splits, the number of rows, K and N.

T rows, E groups, K in_features, N out_features, Tp = padded_rows(T, E).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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


GROUPS = {
    "unaligned": Groups((3, 130, 40), 173),
    "empty_first": Groups((0, 5, 9), 17),
    "empty_middle": Groups((130, 0, 0, 9), 150),
    "empty_last": Groups((7, 6, 0), 13),
    "all_empty": Groups((0, 0, 0), 6),
    "no_rows": Groups((0, 0), 0),
    "one_takes_all": Groups((0, 257, 0), 257),
    "capacity": Groups((10, 0, 131), 202),
    "one_group": Groups((129,), 140),
    "two_groups": Groups((128, 256), 390),
    "17_groups": Groups(tuple(e * 7 % 13 for e in range(17)), 120, K=48, N=32),
    "200_groups": Groups(tuple(e % 3 for e in range(200)), 210, K=16, N=32),
}
SHAPES = ("unaligned", "one_group", "200_groups", "capacity")
WIDE = {
    "wide_in": Groups((5, 0, 12), 20, K=2880, N=144),
    "wide_out": Groups((5, 0, 12), 20, K=144, N=2880),
}
# Groups that end anywhere, of 172 rows on average: see takes_swapped in sm90/operands_16bit.h.
SWAPPED = Groups(
    (1000, 0, 1, 700, 129, 128, 0, 193, 15, 16, 17, 385, 192, 191, 0, 0, 9, 0), 3100, K=528, N=2048
)


def experts_of(m_splits: Tensor, T: int) -> Tensor:
    """Two experts per token: its group and one derived from it. -1 past the last group."""
    E = m_splits.size(0)
    group = torch.searchsorted(
        m_splits.cumsum(0), torch.arange(T, device=m_splits.device), right=True
    )
    return torch.stack([group, torch.where(group < E, 2 * group % E, -1)], dim=1)
