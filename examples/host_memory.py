# SPDX-License-Identifier: Apache-2.0
"""Frozen experts in the host's memory: a block's bytes travel while another computes.

    python examples/host_memory.py
    python examples/finetune_experts.py --model gpt_oss_120b --compile --host

`keep_on_host` below is all of it. Checkpoint the blocks, as here: a backward computes
them again, for which their bytes come once more.

FSDP2's CPUOffloadPolicy on one process takes integers from torch 2.13 on. It computes
the same, and copies while nothing else runs
(https://github.com/pytorch/pytorch/pull/178861).
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grouped_linear import GroupedMLP, Lora

Frozen = list[tuple[nn.Module, str, nn.Parameter]]


def frozen_bytes(module: nn.Module) -> Frozen:
    """Its parameters of frozen bytes: whose, their names and these."""
    owners = [(m, *named) for m in module.modules() for named in m._parameters.items()]
    return [own for own in owners if own[2] is not None and own[2].dtype == torch.uint8]


def to_host(module: nn.Module) -> None:
    """Move frozen bytes to memory of the host, pinned where there is a GPU."""
    pin = torch.cuda.is_available()
    for *_, p in frozen_bytes(module):
        if not (p.is_pinned() if pin else p.is_cpu):
            host = torch.empty(p.shape, dtype=p.dtype, pin_memory=pin)
            p.data = host.copy_(p.data)


def keep_on_host(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Keep blocks' frozen bytes on the host; each computes with a copy on the device.

    Give the blocks in their order, `[layer.mlp for layer in model.model.layers]`. Call
    them inside of what is checkpointed, or copies stay until the backward. Compile them
    as `block.forward = torch.compile(block.forward)`, without CUDA graphs.

    While a block computes, the bytes of the next one travel: in a backward of the one
    before. Copies are parameters of their own, which take the host's place for one
    forward of the block. What a backward saves of them nothing overwrites.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    coming: dict[tuple[int, int], list[Tensor]] = {}
    on_host: dict[nn.Module, Frozen] = {}

    def bring(block: nn.Module) -> list[Tensor]:
        hosts = [p.data for *_, p in frozen_bytes(block)]
        here = [torch.empty_like(host, device=device) for host in hosts]
        if copies is not None:  # kernels so far may read the memory that is reused
            copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):  # None changes nothing
            for copy, host in zip(here, hosts, strict=True):
                copy.copy_(host, non_blocking=True)
        return here

    def before(i: int, block: nn.Module, _: Any) -> None:
        backward = torch._C._current_graph_task_id()  # -1 in a forward
        here = coming.pop((backward, i), None) or bring(block)
        if copies is not None:  # also for copies that nobody came for
            torch.cuda.current_stream(device).wait_stream(copies)
        coming.clear()
        on_host[block] = frozen_bytes(block)
        for (owner, name, p), copy in zip(on_host[block], here, strict=True):
            owner._parameters[name] = type(p)(copy, requires_grad=False)
        following = i + 1 if backward == -1 else i - 1
        if 0 <= following < len(blocks):
            coming[backward, following] = bring(blocks[following])

    def after(block: nn.Module, *_: Any) -> None:
        for owner, name, p in on_host.pop(block, ()):  # none if `before` raised
            owner._parameters[name] = p

    for i, block in enumerate(blocks):
        if block._compiled_call_impl is not None:
            raise ValueError(f"block {i}: compile its forward, not the module")
        to_host(block)
        block.register_forward_pre_hook(partial(before, i))
        block.register_forward_hook(after, always_call=True)


def train(host: bool, steps: int) -> tuple[float, float, float]:
    """Milliseconds of a step, MiB at its peak, and the last loss."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = {"num_experts": 64, "hidden_size": 2048, "intermediate_size": 1024}
    if device.type == "cpu":
        size = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 128}
    tokens = 8192 if device.type == "cuda" else 64
    H, E = size["hidden_size"], size["num_experts"]
    options = {"weights": "mxfp4", "lora": Lora(rank=16), "dtype": torch.bfloat16}
    blocks = [GroupedMLP(*size.values(), device=device, **options) for _ in range(8)]
    learn = [p for block in blocks for p in block.parameters() if p.requires_grad]
    if host:
        keep_on_host(blocks, device)
    x = torch.randn(tokens, H, device=device, dtype=torch.bfloat16)
    scores = torch.randn(tokens, E, device=device, dtype=x.dtype).softmax(-1)
    weights, chosen = scores.topk(2)
    optimizer = torch.optim.AdamW(learn, lr=1e-3)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        y = x
        for block in blocks:
            y = y + checkpoint(block, y, weights, chosen, use_reentrant=False)
        loss = (y - x.roll(1, 0)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return sorted(times)[len(times) // 2], peak, last


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    for name, host in {"on the host": True, "on the device": False}.items():
        row = train(host, steps)
        print("{:16}{:8.1f} ms{:9.0f} MiB at the peak, loss {:.6f}".format(name, *row))


if __name__ == "__main__":
    main()
