# SPDX-License-Identifier: Apache-2.0
"""accelerate's FSDP2 on two processes: it finds the optimizer's parameters again by data_ptr."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grouped_linear import Float8BlockScaling, GroupedMLP
from support.devices import HAS_GPU
from support.processes import PROCESSES, Checks, on_cpu

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, DistributedType  # noqa: E402


class TwoLayers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"recipe": Float8BlockScaling(), "weights": "both", "dtype": dtype}
        self.first, self.second = (GroupedMLP(4, 32, 64, **options) for _ in range(2))

    def forward(self, x: Any, weights: Any, experts: Any) -> Any:
        return self.second(self.first(x, weights, experts), weights, experts)


def check_weights_move(fused: bool, rank: int, directory: Path) -> None:
    """All four of two layers, as they do without accelerate."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(PROCESSES)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(PROCESSES), **local)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    # accelerate offers FSDP on GPUs alone; what it does there is the same on two CPUs.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = TwoLayers(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    parameters = dict(model.named_parameters())
    assert len(parameters) == 4
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in parameters.values()
    }
    before = {name: p.to_local().clone() for name, p in parameters.items()}
    x = torch.randn(16, 32)
    weights, experts = torch.rand(16, 4).topk(2)
    accelerator.backward(model(x, weights, experts).square().mean())
    optimizer.step()
    moved = {name: (p.to_local() != before[name]).double().mean() for name, p in parameters.items()}
    assert all(share > 0.5 for share in moved.values()), moved


CHECKS: Checks = {
    "fused": partial(check_weights_move, True),
    "foreach": partial(check_weights_move, False),
}

no_gpu = pytest.mark.skipif(HAS_GPU, reason="accelerate takes the GPU")
test_two_processes = no_gpu(on_cpu(CHECKS))
