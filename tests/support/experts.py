"""Experts in one module, as torchtitan has them, which convert recognizes."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class GroupedExperts(nn.Module):
    """Three parameters with torchtitan's names; the rows of each expert are multiplied apart.

    E experts, H features of a token, F features of an expert.
    """

    def __init__(self, E: int, H: int, F: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, F, H) / H**0.5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, F) / F**0.5)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        rows = x.split(num_tokens_per_expert.int().tolist())
        weights = zip(self.w1, self.w3, self.w2, rows, strict=True)
        return torch.cat([(silu(r @ w1.T) * (r @ w3.T)) @ w2.T for w1, w3, w2, r in weights])
