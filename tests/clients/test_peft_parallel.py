"""Grouped adapters on two processes: DistributedDataParallel, and FSDP2 a layer at a time."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from grouped_linear import Float8BlockScaling
from support.processes import Checks, Passes, device, needs_two_gpus

pytest.importorskip("peft")
from grouped_linear.integrations.peft import use_grouped_adapters
from support.adapters import IDS, config_of, grouped, model_of


def check_gradients(sharded: bool, weights: Any, rank: int, directory: Path) -> None:
    """Those of both processes' batches on one."""
    model, alone = (
        grouped(model_of().to(device()), config_of(), Float8BlockScaling(), weights) for _ in (0, 1)
    )
    ids = IDS.to(device())
    for row in ids:
        (alone(input_ids=row[None], labels=row[None], use_cache=False).loss / len(ids)).backward()
    call = model
    if sharded:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        for refused in (lambda: use_grouped_adapters(model), model.merge_adapter):
            with pytest.raises(ValueError, match="down_proj is sharded"):
                refused()
    else:
        call = DistributedDataParallel(model)
    row = ids[rank : rank + 1]
    call(input_ids=row, labels=row, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        whole = found[name].full_tensor() if sharded else found[name]
        assert (whole - grad).norm() < 1e-4 * grad.norm(), name


CHECKS: Checks = {
    f"{name}, weights={weights!r}": partial(check_gradients, name == "FSDP2", weights)
    for name in ("DDP", "FSDP2")
    for weights in (None, "fp8", "both")
}


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, passes: Passes) -> None:
    passes(check)


@needs_two_gpus
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str, passes_on_gpus: Passes) -> None:
    passes_on_gpus(check)
