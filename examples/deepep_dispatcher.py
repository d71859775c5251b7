# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2 sends the tokens of experts that are on several GPUs: run it by torchrun.

    torchrun --nproc-per-node 8 examples/deepep_dispatcher.py

`DeepEP` below is a token dispatcher on DeepEP's `ElasticBuffer`. A dispatch of DeepEP
is a combine's gradient, and the other way round.

As of 2026-07-14 (https://github.com/deepseek-ai/DeepEP, dd758ca) DeepEP V2 needs
Hopper GPUs, CUDA 12.3, torch 2.10, NCCL 2.30.4 (`pip install
"nvidia-nccl-cu13>=2.30.4" --no-deps`), NVLink in a node and RDMA between nodes. It
sends bfloat16. The host waits for the numbers of rows, so it is not for CUDA graphs.
tests/test_other_dispatchers.py runs this class with a stand-in of the buffer; with
DeepEP itself it has not run.
"""

import argparse
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from grouped_linear import Float8BlockScaling, GroupedMLP
from grouped_linear.parallel import Dispatched, ExpertParallel, TokenDispatcher

WIDTH, INNER, EXPERTS, CHOSEN, TOKENS = 2048, 768, 128, 8, 8192


class Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any, buffer: Any, E: int, x: Tensor, weights: Tensor, experts: Tensor
    ) -> tuple[Any, ...]:
        """Rows that came, their weights and this process's experts of them, or -1."""
        came, of_here, weights_there, handle, _ = buffer.dispatch(
            x.contiguous(), topk_idx=experts, topk_weights=weights, num_experts=E
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(of_here)
        return came, weights_there, of_here, handle

    @staticmethod
    def backward(ctx: Any, dx: Tensor, d_weights: Tensor, *_: Any) -> tuple[Any, ...]:
        dx, d_weights, _ = ctx.buffer.combine(
            dx.contiguous(), handle=ctx.handle, topk_weights=d_weights.contiguous()
        )
        return None, None, dx, d_weights, None


class Combine(Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, handle: Any, y: Tensor) -> Tensor:
        """Sum each token's rows."""
        ctx.buffer, ctx.handle = buffer, handle
        combined: Tensor = buffer.combine(y.contiguous(), handle=handle)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        sms = ctx.handle.num_sms  # which DeepEP derives from num_experts otherwise
        dy = ctx.buffer.dispatch(dy.contiguous(), handle=ctx.handle, num_sms=sms)[0]
        return None, None, dy


class DeepEP(TokenDispatcher):
    """Processes may have different numbers of tokens, up to the buffer's."""

    def __init__(self, buffer: Any, num_experts: int) -> None:
        super().__init__()
        self.buffer, self.num_experts = buffer, num_experts

    def dispatch(
        self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor
    ) -> Dispatched:
        given = x, top_k_weights.float(), top_k_index.long()
        x, weights, experts, handle = Dispatch.apply(
            self.buffer, self.num_experts, *given
        )
        return Dispatched(x, weights, experts, handle=handle)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        combined: Tensor = Combine.apply(self.buffer, dispatched.handle, y)
        return combined


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    try:
        from deep_ep import ElasticBuffer
    except ImportError:
        sys.exit("DeepEP V2 is not installed: https://github.com/deepseek-ai/DeepEP")
    if "LOCAL_RANK" not in os.environ:
        sys.exit("run it as: torchrun --nproc-per-node 8 examples/deepep_dispatcher.py")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffer = ElasticBuffer(
        mesh.get_group(),
        num_max_tokens_per_rank=TOKENS,
        hidden=WIDTH,
        num_topk=CHOSEN,
    )
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    mlp = GroupedMLP(EXPERTS, WIDTH, INNER, recipe=Float8BlockScaling(), **options)
    parallelize_module(
        mlp, mesh, ExpertParallel(lambda mesh, experts: DeepEP(buffer, experts))
    )
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(TOKENS, WIDTH, requires_grad=True, **options)
    weights, experts = torch.rand(TOKENS, EXPERTS, device="cuda").topk(CHOSEN)
    for i in range(1 + steps):
        if i == 1:
            torch.cuda.synchronize()
            start = time.perf_counter()
        mlp(x, weights, experts).square().mean().backward()
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"{'processes':32}{mesh.size():12}")
        print(f"{'ms a step':32}{1e3 * (time.perf_counter() - start) / steps:12.2f}")
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
