# SPDX-License-Identifier: Apache-2.0
"""Four processes whose experts are spread, and what goes wrong: right numbers or an error, no hang.

The experts are over all four, or two pairs have them. E experts, T tokens a process, H and F
features.
"""

import copy
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from grouped_linear import Float8BlockScaling, GroupedMLP
from grouped_linear.parallel import ExpertParallel
from grouped_linear.parallel.expert_parallel import DISPATCHERS
from support.devices import needs_four_gpus, needs_two_gpus
from support.processes import Checks, choose_device, device, on_cpu, on_gpus, started, synchronize

PROCESSES = 4
E, T, H, F = 8, 12, 32, 48
BLOCK = Float8BlockScaling()
PATIENCE = 15  # seconds that a process waits for another


def meshes() -> list[DeviceMesh]:
    """All processes, and the pair of this one."""
    of_pairs = init_device_mesh(device().type, (2, 2), mesh_dim_names=("pairs", "experts"))
    return [init_device_mesh(device().type, (PROCESSES,)), of_pairs["experts"]]


def step(model: Any, *data: Tensor) -> list[Tensor]:
    """The output, the gradients of x and of the routing weights, and those of parameters."""
    x, weights, experts, dy = data
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = model(leaves[0], leaves[1], experts)
    gradients = torch.autograd.grad(y, [*leaves, *model.parameters()], dy)
    return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


def of_process(t: Tensor, mesh: DeviceMesh) -> Tensor:
    return t.chunk(mesh.size())[mesh.get_local_rank()]


def compare(got: list[Tensor], want: list[Tensor], mesh: DeviceMesh, exact: bool) -> None:
    """The same numbers, and NaN in the same places: of this process's tokens and experts."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        # A GPU cuts wgrad's long sums in pieces. Rows sent in FP8 are rounded before.
        tolerance = 0 if i < 3 or (exact and device().type == "cpu") else 1e-5
        scale = float(w.nan_to_num().abs().max())
        torch.testing.assert_close(
            g, of_process(w, mesh), rtol=0, atol=tolerance * scale, equal_nan=True
        )


def routings() -> dict[str, Tensor]:
    """[4 T, 2]: for four processes, and for two of twice as many tokens."""
    everywhere = torch.arange(2 * PROCESSES * T).view(-1, 2) % E
    nothing = torch.full_like(everywhere, -1)
    return {
        "all to the last": torch.full_like(everywhere, E - 1),
        "none to the first": everywhere.clamp(min=E // 2),
        "none of the last": torch.where(
            torch.arange(len(everywhere))[:, None] < len(everywhere) // 2, everywhere, nothing
        ),
        "none at all": nothing,
        "some to none": torch.where(everywhere % 3 == 0, -1, everywhere),
        "no experts": torch.where(everywhere % 2 == 0, -(2**63), 2**32 + everywhere),
        "everywhere": everywhere,
    }


def check_routing(recipe: Any, how: dict[str, Any], rank: int, directory: Path) -> None:
    """Whoever gets everything or nothing; rows of NaN and infinity touch nobody else's.

    Tokens of no expert are zero, whatever they hold.
    """
    torch.manual_seed(0)
    whole = GroupedMLP(E, H, F, recipe=recipe, device=device())
    for mesh in meshes():
        spread = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(**how))
        for bad in (None, torch.nan, torch.inf):
            for name, experts in routings().items():
                if bad is not None and name != "everywhere":
                    continue
                torch.manual_seed(1)
                x, dy = torch.randn(2, PROCESSES * T, H)
                weights = torch.rand(PROCESSES * T, 2)
                x[(experts == -1).all(1)] = torch.nan
                if bad is not None:  # of each process one token of two experts
                    x[::T], dy[1::T, 3], weights[2::T] = bad, bad, bad
                    experts = experts.clone()
                    experts[: 3 * T] //= 2
                data = [t.to(device()) for t in (x, weights, experts, dy)]
                got = step(spread, *(of_process(t, mesh) for t in data))
                compare(got, step(whole, *data), mesh, exact=not how.get("fp8"))


def check_overflow(way: str, rank: int, directory: Path) -> None:
    """All tokens go to one process: those past the capacity are zero, and all are counted."""
    torch.manual_seed(0)
    whole = GroupedMLP(E, H, F, device=device())
    for mesh in meshes():
        style = ExpertParallel(way, capacity_factor=1.5)
        spread = parallelize_module(copy.deepcopy(whole), mesh, style)
        torch.manual_seed(1)
        x, dy = torch.randn(2, PROCESSES * T, H, device=device())
        weights = torch.rand(PROCESSES * T, 1, device=device())
        for expert in (0, E - 1):
            experts = torch.full_like(weights, expert, dtype=torch.int64)
            data = x, weights, experts, dy
            assert spread.dispatcher is not None
            dropped: Any = spread.dispatcher.dropped.zero_()
            got = step(spread, *(of_process(t, mesh) for t in data))
            is_zero = (got[0] == 0).all(dim=1)
            zeros = torch.empty(len(x), dtype=torch.bool, device=device())
            dist.all_gather_into_tensor(zeros, is_zero, mesh.get_group())
            dist.all_reduce(dropped, group=mesh.get_group())
            assert 0 < dropped == zeros.sum() < len(x)
            experts[zeros] = -1
            compare(got, step(whole, *data), mesh, exact=True)


def check_no_tokens(way: str, rank: int, directory: Path) -> None:
    """A batch that is empty everywhere."""
    for mesh in meshes():
        mlp = GroupedMLP(E, H, F, recipe=BLOCK, device=device())
        spread = parallelize_module(mlp, mesh, ExpertParallel(way, capacity_factor=1.5))
        x, index = torch.randn(0, H, device=device()), torch.empty(0, 2, dtype=torch.int64)
        y, dx, d_weights, *grads = step(spread, x, x[:, :2], index.to(device()), x)
        assert y.shape == dx.shape == (0, H)
        assert d_weights.shape == (0, 2)
        assert not any(g.any() for g in grads)


CHECKS: Checks = {
    **{f"routing_{way}": partial(check_routing, None, {"dispatch": way}) for way in DISPATCHERS},
    **{
        f"routing_{way}_fp8": partial(check_routing, BLOCK, {"dispatch": way, "fp8": True})
        for way in ("all_gather", "all_to_all")
    },
    **{f"overflow_{way}": partial(check_overflow, way) for way in DISPATCHERS},
    **{f"no_tokens_{way}": partial(check_no_tokens, way) for way in DISPATCHERS},
}

test_four_processes, test_four_gpus = on_cpu(CHECKS), on_gpus(CHECKS, PROCESSES)


def step_in_which_one_dies(rank: int, directory: Path, backend: str, processes: int) -> None:
    """The last process is killed between its forward and its backward; the others say an error."""
    choose_device(rank, backend)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    dist.init_process_group(
        backend,
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=PATIENCE),
    )
    mlp = GroupedMLP(E, H, F, device=device())
    parallelize_module(mlp, init_device_mesh(device().type, (processes,)), ExpertParallel())
    x = torch.randn(T, H, device=device())
    y = mlp(x, *torch.rand(T, E, device=device()).topk(2))
    synchronize()
    if rank == processes - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        y.sum().backward()
        synchronize()
    except RuntimeError as error:
        (directory / f"{rank}").write_text(str(error))
    os._exit(3)  # nobody is left to destroy a group with


def check_killed(backend: str, processes: int, directory: Path) -> None:
    arguments = directory, backend, processes
    with started(step_in_which_one_dies, arguments, backend, processes) as context:
        for process in context.processes:
            # A process of GPUs takes long to start, and torch 2.11 another minute for its dump.
            process.join(PATIENCE + 120)
        codes = [process.exitcode for process in context.processes]
        for process in context.processes:
            process.kill()
    assert codes[-1] == -signal.SIGKILL
    for rank, code in enumerate(codes[:-1]):
        if backend == "nccl" and code == -signal.SIGABRT:
            continue  # NCCL's watchdog, which has said why, ends a process that waits for the GPU
        assert code == 3
        assert (directory / f"{rank}").read_text()


@pytest.mark.parametrize("processes", [2, PROCESSES])
def test_a_process_dies(processes: int, tmp_path: Path) -> None:
    check_killed("gloo", processes, tmp_path)


@needs_two_gpus
def test_a_process_of_two_gpus_dies(tmp_path: Path) -> None:
    check_killed("nccl", 2, tmp_path)


@needs_four_gpus
def test_a_process_of_four_gpus_dies(tmp_path: Path) -> None:
    check_killed("nccl", PROCESSES, tmp_path)
