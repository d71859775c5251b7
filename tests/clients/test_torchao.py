# SPDX-License-Identifier: Apache-2.0
"""torchao's optimizers, which keep their states in 8 or 4 bits and write weights by copy_."""

import pytest
import torch
from torch import nn

from grouped_linear.quantized.with_master import GroupedTensorWithMaster

optim = pytest.importorskip("torchao.optim")


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"])
def test_small_steps(name: str) -> None:
    """Weights in both precisions go where plain ones go."""
    means = []
    for make in (torch.clone, GroupedTensorWithMaster.quantize):
        p = nn.Parameter(make(torch.ones(1, 128, 128)))
        optimizer = getattr(optim, name)([p], lr=1e-3, weight_decay=0.0)
        for _ in range(40):
            p.grad = torch.ones(p.shape)
            optimizer.step()
        means.append(p.detach().mean().item())
    plain, with_master = means
    assert with_master == plain < 0.97
