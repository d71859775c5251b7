# SPDX-License-Identifier: Apache-2.0
"""What it costs to watch an expert layer: beside the same layer unwatched, the flag off and on.

    python -m benchmarks.bench_watch

A GroupedMLP in BF16 under Float8BlockScaling, compiled; forward and backward as one CUDA graph,
with a cold L2 cache, in turns (on a CPU, one call). The share is the median of the rounds' own
ratios. With the flag off the counts are computed as well, and not kept.
"""

import argparse
import copy
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import timing
from benchmarks.bench_expert_layer import TOKENS_AND_SIZES
from grouped_linear import Float8BlockScaling, GroupedMLP
from grouped_linear.contrib import watch

SIZES = {**TOKENS_AND_SIZES, "small": (256, 256, 128, 8, 2)}
UNWATCHED, OFF, ON = "unwatched", "watched, flag off", "watched, flag on"


def layers(name: str, device: torch.device) -> Mapping[str, timing.Call]:
    """A forward and a backward of each layer."""
    tokens, hidden, intermediate, experts, chosen = SIZES[name]
    torch.manual_seed(0)
    plain = GroupedMLP(
        experts,
        hidden,
        intermediate,
        recipe=Float8BlockScaling(),
        dtype=torch.bfloat16,
        device=device,
    )
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    scores = torch.randn(tokens, experts, device=device).softmax(dim=-1)
    routed = scores.topk(chosen)
    dy = torch.randn_like(x)
    calls = {}
    for candidate in (UNWATCHED, OFF, ON):
        layer = copy.deepcopy(plain)
        if candidate != UNWATCHED:
            watch(layer).switch(candidate == ON)
        compiled = torch.compile(layer, fullgraph=True)
        leaves = [x, *layer.parameters()]

        def step(compiled: Any = compiled, leaves: Any = leaves) -> Any:
            return torch.autograd.grad(compiled(x, *routed), leaves, dy)

        calls[candidate] = step
    return calls


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_watch")
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["qwen3_30b", "dsv3_ep8"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(*timing.machine(device), sep="\n", end="\n\n")
    rows = [["shape", "layer", "us", "time / unwatched"]]
    for name in options.shapes:
        torch._dynamo.reset()
        times = timing.time_paired(layers(name, device), device, options.rounds)
        for candidate, t in times.items():
            share = f"{1 / t.share.median:.4f}"
            rows.append([name, candidate, f"{t.microseconds.median:,.1f}", share])
    print(timing.markdown(rows))


if __name__ == "__main__":
    main()
