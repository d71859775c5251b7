# SPDX-License-Identifier: Apache-2.0
"""Four processes, with experts spread, sharded and replicated, have one process's model.

E experts, T tokens a process, C experts chosen for a token, H and F features.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from grouped_linear import Float8BlockScaling, GroupedMLP, Lora
from grouped_linear.parallel import ExpertParallel
from support.documents import example
from support.processes import Checks, device, on_cpu, on_gpus

PROCESSES = 4
E, T, C, H, F = 8, 24, 2, 32, 64
QUANTIZED: dict[str, Any] = {"recipe": Float8BlockScaling(), "weights": "fp8"}


class Model(nn.Module):
    def __init__(self, on: Any = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        on = device() if on is None else on
        self.router = nn.Linear(H, E, bias=False, device=on)
        self.experts = GroupedMLP(E, H, F, device=on, **options)
        self.shared = nn.Linear(H, H, device=on)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, *self.router(x).softmax(dim=-1).topk(C)) + self.shared(x)
        return y


def meshes() -> DeviceMesh:
    return init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "experts"))


def sum_on_a_cpu(sharded: Any) -> None:
    """Gloo cannot divide while it sums."""
    if device().type == "cpu":
        sharded.set_force_sum_reduction_for_comms(True)


def spread(model: Model, dispatch: str) -> Model:
    """As the documentation has it: experts over one dimension of the mesh, FSDP2 over the rest."""
    mesh = meshes()
    parallelize_module(model.experts, mesh["experts"], ExpertParallel(dispatch))
    experts: Any = fully_shard(model.experts, mesh=mesh["data"])
    experts.set_gradient_divide_factor(mesh.size())
    sum_on_a_cpu(experts)
    fully_shard(model, mesh=init_device_mesh(device().type, (PROCESSES,)))
    return model


def spread_beside_tensor_parallel(model: Model, dispatch: str) -> Model:
    """Each shared expert split over the processes that share the others' tokens."""
    mesh = meshes()
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    parallelize_module(model.shared, mesh["experts"], style)
    parallelize_module(model.experts, mesh["experts"], ExpertParallel(dispatch))
    for module in (model.experts, model.shared):  # gradients of both are sums over mesh["experts"]
        sharded: Any = fully_shard(module, mesh=mesh["data"])
        sharded.set_gradient_divide_factor(mesh.size())
        sum_on_a_cpu(sharded)
    fully_shard(model, mesh=init_device_mesh(device().type, (PROCESSES,)))
    return model


def spread_over_all(model: Model, dispatch: str) -> Model:
    """As the documentation has it, too: experts over all processes, FSDP2 of everything else."""
    mesh = init_device_mesh(device().type, (PROCESSES,))
    parallelize_module(model.experts, mesh, ExpertParallel(dispatch))
    for p in model.experts.parameters():
        p.register_hook(lambda grad: grad / mesh.size())
    fully_shard(model, mesh=mesh, ignored_params=set(model.experts.parameters()))
    return model


def replicate(model: Model, dispatch: str) -> Model:
    """Hybrid sharding: two copies of the model, each sharded over two processes."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (model.experts, model):
        sum_on_a_cpu(fully_shard(module, mesh=mesh))
    return model


def replicate_spread(model: Model, dispatch: str) -> Model:
    """Two copies of experts, each spread over two processes; hybrid sharding of the rest."""
    kind, names = device().type, ("replicate", "shard", "experts")
    # First: DTensor keeps plans by mesh, with names of process groups, from check to check.
    of_rest = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh(kind, (2, 1, 2), mesh_dim_names=names)
    parallelize_module(model.experts, mesh["experts"], ExpertParallel(dispatch))
    experts: Any = fully_shard(model.experts, mesh=mesh["replicate", "shard"])
    experts.set_gradient_divide_factor(mesh.size())
    # Not set_force_sum_reduction_for_comms: torch 2.13 divides twice then where shard is 1.
    sum_on_a_cpu(fully_shard(model, mesh=of_rest))
    return model


def train(model: Model, rank: int | None, clip: Any, steps: int = 3) -> list[Tensor]:
    """Losses and norms of steps on all processes' tokens, or on those of one; two batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, numbers = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(PROCESSES * T, H, generator=generator).to(device())
        if rank is not None:
            x = x[rank * T : (rank + 1) * T]
        losses = [(model(part) - part.sin()).square().mean() / 2 for part in x.chunk(2)]
        for loss in losses:
            loss.backward()
        loss = torch.stack(losses).sum()
        norm = clip(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        if rank is not None:
            torch.distributed.all_reduce(loss)
            loss /= PROCESSES
        numbers += [loss, norm]
    return numbers


def check_training(
    parallelize: Any, dispatch: str, options: dict[str, Any], rank: int, directory: Path
) -> None:
    """Losses, norms of gradients and parameters of an optimizer that is told to clip."""
    whole = Model(**options)
    want = train(whole, None, nn.utils.clip_grad_norm_)
    model = parallelize(Model(**options), dispatch)
    got = train(model, rank, example("fsdp2_expert_parallel").clip_grad_norm_)
    # One sum an element is in another order; quantized weights may then round to a neighbour.
    torch.testing.assert_close(got, want, rtol=1e-2 if options else 1e-5, atol=0)
    if not options:
        for p, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
            full: Any = p
            torch.testing.assert_close(full.full_tensor(), of_whole.detach(), rtol=0, atol=1e-4)


def check_checkpoint(options: dict[str, Any], rank: int, directory: Path) -> None:
    """Saved by 2 x 2 processes, loaded by one, by experts over all four, and by 2 x 2 again.

    The last model was on the meta device, as a run is that starts again. A save in the background
    has copied all before the next step.
    """
    saved = spread(Model(**options), "all_gather")
    train(saved, rank, example("fsdp2_expert_parallel").clip_grad_norm_, steps=1)
    state = get_model_state_dict(saved)
    if options:
        # A group of its own: the thread that saves talks while a step does.
        group = dist.new_group(backend="gloo")
        saving: Any = dcp.async_save(state, checkpoint_id=directory, process_group=group)
        before = {name: copy.deepcopy(p) for name, p in saved.named_parameters()}
        train(saved, rank, example("fsdp2_expert_parallel").clip_grad_norm_, steps=1)
        saving.result()
        with torch.no_grad():
            for name, p in saved.named_parameters():
                p.copy_(before[name])
    else:
        dcp.save(state, checkpoint_id=directory)
    alone, over_all, again = Model(**options), Model(**options), Model("meta", **options)
    parallelize_module(
        over_all.experts, init_device_mesh(device().type, (PROCESSES,)), ExpertParallel()
    )
    spread(again, "all_to_all").to_empty(device=device())
    again.experts.reset_parameters()  # a frozen weight is quantized where its experts lie
    for model in (alone, over_all, again):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=directory)
        set_model_state_dict(model, state)
    for name, p in saved.experts.named_parameters():
        whole: Any = alone.experts.get_parameter(name).detach()
        for model in (saved, over_all, again):
            sharded: Any = model.experts.get_parameter(name)
            local = sharded.to_local()
            first = experts_before(model, saved, again, rank)
            part = whole[first : first + local.size(0)]
            assert torch.equal(local, part)
        assert p.shape == whole.shape


def experts_before(model: Model, saved: Model, again: Model, rank: int) -> int:
    """The first expert of this process: by pairs first where FSDP2 shards what was spread."""
    if model is saved or model is again:
        data, experts = divmod(rank, 2)
        return experts * E // 2 + data * E // 4
    return rank * E // PROCESSES


CHECKS: Checks = {
    "all_gather": partial(check_training, spread, "all_gather", {}),
    "all_to_all": partial(check_training, spread, "all_to_all", {}),
    "tensor_parallel": partial(check_training, spread_beside_tensor_parallel, "all_gather", {}),
    "over_all": partial(check_training, spread_over_all, "all_to_all", {}),
    "quantized": partial(check_training, spread, "all_gather", QUANTIZED),
    "quantized_mxfp4": partial(
        check_training, spread, "all_gather", {**QUANTIZED, "weights": "mxfp4"}
    ),
    "adapters": partial(check_training, spread, "all_to_all", {**QUANTIZED, "lora": Lora(4)}),
    "checkpoint_mxfp4": partial(check_checkpoint, {**QUANTIZED, "weights": "mxfp4"}),
    "replicated": partial(check_training, replicate, "", {}),
    "replicated_quantized": partial(check_training, replicate, "", QUANTIZED),
    "replicated_experts": partial(check_training, replicate_spread, "all_to_all", {}),
    "replicated_experts_quantized": partial(
        check_training, replicate_spread, "all_gather", QUANTIZED
    ),
    "checkpoint": partial(check_checkpoint, {}),
    "checkpoint_quantized": partial(check_checkpoint, QUANTIZED),
}

test_four_processes, test_four_gpus = on_cpu(CHECKS), on_gpus(CHECKS, PROCESSES)
