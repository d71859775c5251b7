# SPDX-License-Identifier: Apache-2.0
"""Experts spread over processes, everything else under FSDP2: run it by torchrun.

    torchrun --nproc-per-node 2 examples/fsdp2_expert_parallel.py

`ExpertParallel` gives each process half of the experts and sends tokens to them;
`fully_shard` divides all other parameters. A shared expert computes on a stream of its
own while tokens travel. The learned function is random; every process draws its own
inputs.

On GPUs it takes one a process and NCCL, with FP8 on the wires by `fp8=True`. On a CPU
it takes gloo.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from grouped_linear import Float8BlockScaling, GroupedMLP
from grouped_linear.parallel import ExpertParallel

WIDTH, EXPERTS, TOKENS = 128, 8, 256


def beside(
    side: torch.cuda.Stream | None,
    shared: Callable[[Tensor], Tensor],
    experts: Callable[..., Tensor],
    x: Tensor,
    *routing: Tensor,
) -> Tensor:
    """shared(x) + experts(x, *routing), where shared runs on the stream `side`.

    A shared expert needs no other process's tokens: it computes while they travel,
    forward and backward.
    """
    if side is None:
        return experts(x, *routing) + shared(x)
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        of_shared = shared(x)
    y = experts(x, *routing)
    current.wait_stream(side)
    for t, reader in ((x, side), (of_shared, current)):
        t.record_stream(reader)  # keeps its memory until that stream has read it
    return y + of_shared


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """torch's, which takes DTensors of one mesh, for those of several."""
    of_mesh: dict[object, list[Tensor]] = {}
    for p in (p for p in parameters if p.grad is not None):
        of_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [get_total_norm([p.grad for p in group]) for group in of_mesh.values()]
    norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in of_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = GroupedMLP(EXPERTS, WIDTH, WIDTH, recipe=Float8BlockScaling())
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream() if torch.cuda.is_available() else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        routing = self.router(x).softmax(dim=-1).topk(2)
        return x + beside(self.side, self.shared, self.experts, x, *routing)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    if "LOCAL_RANK" not in os.environ:
        sys.exit(
            "run it as: torchrun --nproc-per-node 2 examples/fsdp2_expert_parallel.py"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    processes = dist.get_world_size()
    mesh = init_device_mesh(device, (processes,))

    torch.manual_seed(0)
    target = nn.Linear(WIDTH, WIDTH, device=device)
    model = nn.Sequential(Block(), Block()).to(device)
    for block in model:
        parallelize_module(
            block.experts, mesh, ExpertParallel(capacity_factor=2.0, fp8=True)
        )
    experts = [p for block in model for p in block.experts.parameters()]
    for p in experts:  # other parameters' gradients are means already
        p.register_hook(lambda grad: grad / processes)
    fully_shard(model, mesh=mesh, ignored_params=set(experts))
    if device == "cpu":  # gloo cannot scale while it reduces
        model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    torch.manual_seed(dist.get_rank())
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        x = torch.randn(TOKENS, WIDTH, device=device)
        loss = (model(x) - target(x).detach().tanh()).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        losses.append(loss.item() / processes)
    seconds = (time.perf_counter() - start) / steps
    dropped = sum(block.experts.dispatcher.dropped for block in model)
    if dist.get_rank() == 0:
        own = [p.to_local().numel() for p in model.parameters()]
        print(f"{'processes':32}{processes:12}")
        print(f"{'parameters':32}{sum(p.numel() for p in model.parameters()):12,}")
        print(f"{'parameters of this process':32}{sum(own):12,}")
        print(f"{'choices dropped':32}{int(dropped):12}")
        print(f"{'ms a step':32}{1e3 * seconds:12.1f}")
        print(f"{'first loss':32}{losses[0]:12.4f}")
        print(f"{'last loss':32}{losses[-1]:12.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
