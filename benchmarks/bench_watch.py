# SPDX-License-Identifier: Apache-2.0
"""What it costs to watch an expert layer: beside the same layer unwatched, the flag off and on.

    python -m benchmarks.bench_watch

A GroupedMLP in BF16 under Float8BlockScaling, compiled; forward and backward as one CUDA graph,
with a cold L2 cache, in turns (on a CPU, one call). The share is the median of the rounds' own
ratios. Then each call of watch_operand_ that the layer makes, alone, with the flag on.
"""

import argparse
import copy
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import timing
from benchmarks.bench_expert_layer import TOKENS_AND_SIZES
from grouped_linear import Float8BlockScaling, GroupedMLP, ops, watch
from grouped_linear.nn.watched import PARTS

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


def operands(name: str, device: torch.device) -> Mapping[str, timing.Call]:
    """The op on what the layer gives it, and on the first of them with the flag off."""
    tokens, H, F, E, C = SIZES[name]
    R, like = tokens * C, {"dtype": torch.bfloat16, "device": device}
    offs = torch.full((E,), R // E, device=device).cumsum(0).int()
    x, gate_up, dh = (
        torch.randn(R, H, **like),
        torch.randn(R, 2 * F, **like),
        torch.randn(R, F, **like),
    )
    w, weight = torch.randn(E, 2 * F, H, **like), torch.rand(R, device=device)
    stats = torch.zeros(4, PARTS, E, 14, dtype=torch.float64, device=device)
    off, on = torch.zeros(2, dtype=torch.int32, device=device).unbind()
    on.fill_(1)
    of_x = ops.group_quantize(x, offs, columnwise=True, share_scales=True)
    of_h = ops.group_quantize_swiglu(gate_up, offs)
    of_gradient = ops.group_quantize_swiglu_grad(
        dh, gate_up, weight, offs, h_columnwise=True, share_h_scales=True
    )
    q_w, scale_w, _ = ops.quantize_weight(w)
    both = {"gate_up": gate_up, "weight": weight}
    t = ops.watch_operand_
    return {
        "x": lambda: t(stats, on, 0, x, of_x.q, of_x.scale, offs),
        "x, flag off": lambda: t(stats, off, 0, x, of_x.q, of_x.scale, offs),
        "x, scales of columns": lambda: t(stats, on, 0, None, offs=offs, scale_t=of_x.scale_t),
        "gate_up_proj": lambda: t(stats, on, 1, w, q_w, scale_w),
        "h": lambda: t(stats, on, 2, None, of_h.q, of_h.scale, offs, gate_up=gate_up),
        "d_gate_up": lambda: t(stats, on, 3, dh, of_gradient.q, of_gradient.scale, offs, **both),
        "h, scales of columns": lambda: t(
            stats, on, 2, None, offs=offs, scale_t=of_gradient.scale_h_t
        ),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_watch")
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["qwen3_30b", "dsv3_ep8"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(*timing.machine(device), sep="\n", end="\n\n")
    rows = [["shape", "layer", "us", "time / unwatched"]]
    alone = [["shape", "watch_operand_ of", "us"]]
    for name in options.shapes:
        torch._dynamo.reset()
        times = timing.time_paired(layers(name, device), device, options.rounds)
        for candidate, t in times.items():
            share = f"{1 / t.share.median:.4f}"
            rows.append([name, candidate, f"{t.microseconds.median:,.1f}", share])
        with torch.no_grad():
            of_ops = timing.time_paired(operands(name, device), device, options.rounds)
        alone += [[name, n, f"{t.microseconds.median:,.1f}"] for n, t in of_ops.items()]
    print(timing.markdown(rows), timing.markdown(alone), sep="\n\n")


if __name__ == "__main__":
    main()
