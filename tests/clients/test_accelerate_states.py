# SPDX-License-Identifier: Apache-2.0
"""accelerate's FSDP2 on two processes: what it saves of a Hugging Face model with FP8 experts."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from grouped_linear import Float8BlockScaling, convert
from support.compare import assert_same_tensors, bits
from support.devices import HAS_GPU
from support.hugging_face import tiny
from support.processes import PROCESSES, Checks, on_cpu

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, DistributedType  # noqa: E402


def mixtral() -> Any:
    torch.manual_seed(0)
    model = tiny("mixtral", num_hidden_layers=2, num_local_experts=4)
    convert(model, Float8BlockScaling(), weights="fp8")
    return model


def sharding_accelerator(rank: int) -> Any:
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(PROCESSES)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(PROCESSES), **local)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MixtralDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    offer_sharding(accelerator)
    return accelerator


def offer_sharding(accelerator: Any) -> None:
    """accelerate offers FSDP on GPUs alone; what it does there is the same on two CPUs."""
    accelerator.state.distributed_type = DistributedType.FSDP


def whole_state(model: Any) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def check_states(rank: int, directory: Path) -> None:
    accelerator, model = sharding_accelerator(rank), mixtral()
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    offer_sharding(accelerator)  # which it has forgotten
    assert_same_tensors(whole_state(model), expected)
    state = accelerator.get_state_dict(model)
    if rank == 0:
        assert_same_tensors(state, expected)
    accelerator.save_model(model, str(directory / "model"))
    dist.barrier()
    if rank == 0:
        assert_same_tensors(load_file(directory / "model" / "model.safetensors"), expected)
    accelerator.save_state(str(directory / "state"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    changed = whole_state(model)
    assert any(not torch.equal(bits(changed[n]), bits(t)) for n, t in expected.items())
    accelerator.load_state(str(directory / "state"))
    assert_same_tensors(whole_state(model), expected)


CHECKS: Checks = {"states": check_states}

no_gpu = pytest.mark.skipif(HAS_GPU, reason="accelerate takes the GPU")
test_two_processes = no_gpu(on_cpu(CHECKS))
