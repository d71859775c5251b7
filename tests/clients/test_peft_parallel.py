# SPDX-License-Identifier: Apache-2.0
"""Adapters, and checkpoints in FP8, on two processes: by DDP, and by FSDP2 a layer at a time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import finegrained_fp8

from grouped_linear import Float8BlockScaling
from support.processes import Checks, device, on_cpu, on_gpus

pytest.importorskip("accelerate")  # what loads in FP8 needs it
pytest.importorskip("peft")

from grouped_linear.integrations.peft import use_grouped_adapters
from support.adapters import (
    IDS,
    config_of,
    fp8_linear,
    from_fp8_checkpoint,
    grouped,
    make_fp8_checkpoint,
    model_of,
)


def converted(weights: Any, directory: Path) -> Any:
    return grouped(model_of().to(device()), config_of(), Float8BlockScaling(), weights)


def loaded_in_fp8(weights: Any, directory: Path) -> Any:
    """Of a checkpoint whose linear layers are in FP8, too."""
    folder = directory / "checkpoint"
    if dist.get_rank() == 0 and not folder.exists():  # transformers saves in one process
        make_fp8_checkpoint(folder)
    dist.barrier()
    model = from_fp8_checkpoint(folder).to(device())
    return grouped(model, config_of(), Float8BlockScaling(), weights)


def check_gradients(
    make: Callable[[Any, Path], Any], sharded: bool, weights: Any, rank: int, directory: Path
) -> None:
    """Those of both processes' batches on one, and the next step's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
        _check_gradients(make, sharded, weights, rank, directory)


def _check_gradients(
    make: Callable[[Any, Path], Any], sharded: bool, weights: Any, rank: int, directory: Path
) -> None:
    model, alone = (make(weights, directory) for _ in range(2))
    ids, call = IDS.to(device()), model
    if sharded:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:  # gloo cannot send e4m3 when DDP asks whether processes have the same weights
        call = DistributedDataParallel(model, init_sync=make is converted)
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-3, fused=True)
        for one in (model, alone)
    ]
    for _ in range(2):
        for row in ids:
            loss = alone(input_ids=row[None], labels=row[None], use_cache=False).loss
            (loss / len(ids)).backward()
        row = ids[rank : rank + 1]
        call(input_ids=row, labels=row, use_cache=False).loss.backward()
        found, expected = (
            {name: p.grad for name, p in one.named_parameters() if p.requires_grad}
            for one in (model, alone)
        )
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            whole = found[name].full_tensor() if sharded else found[name]
            assert (whole - grad).norm() <= 1e-4 * grad.norm(), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if sharded:
        for refused in (lambda: use_grouped_adapters(model), model.merge_adapter):
            with pytest.raises(ValueError, match="is sharded"):
                refused()


WAYS: dict[str, tuple[Callable[[Any, Path], Any], tuple[Any, ...]]] = {
    "adapters": (converted, (None, "fp8", "mxfp4", "both")),
    "adapters on a checkpoint in FP8": (loaded_in_fp8, (None, "fp8")),
}
CHECKS: Checks = {
    f"{way}, {name}, weights={weights!r}": partial(check_gradients, make, name == "FSDP2", weights)
    for way, (make, kept) in WAYS.items()
    for name in ("DDP", "FSDP2")
    for weights in kept
}

test_two_processes, test_two_gpus = on_cpu(CHECKS), on_gpus(CHECKS)
