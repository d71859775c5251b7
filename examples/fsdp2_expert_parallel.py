"""Experts spread over processes, everything else under FSDP2: run it by torchrun.

    torchrun --nproc-per-node 2 examples/fsdp2_expert_parallel.py

`ExpertParallel` gives each process half of the experts and sends tokens to them;
`fully_shard` divides all other parameters. The learned function is random; every
process draws its own inputs.

On GPUs it takes one a process and NCCL, with FP8 on the wires by `fp8=True`. On a CPU
it takes gloo.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from grouped_linear import Float8BlockScaling, GroupedMLP
from grouped_linear.parallel import ExpertParallel

WIDTH, EXPERTS, TOKENS = 128, 8, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = GroupedMLP(EXPERTS, WIDTH, WIDTH, recipe=Float8BlockScaling())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.experts(x, *self.router(x).softmax(dim=-1).topk(2))


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

    def mean_of_processes(
        p: Tensor,
    ) -> None:  # other parameters' gradients are means already
        p.grad.div_(processes)

    for p in experts:
        p.register_post_accumulate_grad_hook(mean_of_processes)
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
