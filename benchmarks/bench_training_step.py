"""A whole training step of an expert layer: forward, backward and AdamW, and its peak memory.

    python -m benchmarks.bench_training_step

Router, top-k, experts, weighted sum; BF16 weights, gradients and moments; compiled; the step is one
CUDA graph with AdamW(fused=True) in it, with a cold L2 cache, in turns with torch's grouped_mm.
Peak is all that is allocated at once: weights and their FP8 numbers, gradients, moments, what the
backward needs, x and the output.
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import timing
from benchmarks.bench_expert_layer import TOKENS_AND_SIZES, layer_of, step_of
from benchmarks.step_cases import CACHED, Candidate

GIB = 1 << 30
CANDIDATES = {
    "torch, BF16": Candidate("torch", "bf16", "compiled"),
    "ours, BF16": Candidate("ours", "bf16", "compiled"),
    "ours, FP8": Candidate("ours", "block", "compiled"),
    'ours, FP8, weights="both"': Candidate("ours", "block" + CACHED, "compiled"),
}
SHAPES = ("qwen3_30b", "dsv3_ep8", "sonic_7b")
FORWARD_AND_BACKWARD, ADAM = "torch's forward and backward", "torch's AdamW"


def parts_of(layer: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    """Forward and backward, which set gradients; and the optimizer's step."""
    _, both = step_of(layer, x)
    parameters = list(layer.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)

    def forward_and_backward() -> None:
        for p, grad in zip(parameters, both()[1:], strict=True):
            p.grad = grad

    return forward_and_backward, optimizer.step


def whole(forward_and_backward: Any, adam: Any, layer: nn.Module) -> None:
    forward_and_backward()
    adam()
    layer.zero_grad()


def measure(name: str, rounds: int) -> list[list[str]]:
    """Rows of one shape, and of what torch's step is made of."""
    calls: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    torch._dynamo.reset()
    for label, candidate in CANDIDATES.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        layer, x = layer_of(candidate, name)
        parts = parts_of(layer, x)
        step = partial(whole, *parts, layer)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[label] = (torch.cuda.max_memory_allocated() - before) / GIB
        calls[label] = step
        if label == next(iter(CANDIDATES)):
            torchs = parts
            torchs[0]()  # gradients for the optimizer alone
    calls |= dict(zip((FORWARD_AND_BACKWARD, ADAM), torchs, strict=True))
    timings = timing.time_paired(calls, torch.device("cuda"), rounds=rounds)
    rows = []
    for label, measured in timings.items():
        peak = f"{peaks[label]:.2f}" if label in peaks else ""
        ms = f"{measured.microseconds.median / 1000:.2f}"
        share = f"{measured.share.median:.2f}"
        rows.append([name, label, ms, share, peak])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_training_step")
    parser.add_argument("--shapes", nargs="+", choices=TOKENS_AND_SIZES, default=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = [["shape", "a step", "ms", "times torch", "peak, GiB"]]
    for name in options.shapes:
        rows += measure(name, options.rounds)
    title = "A whole training step of an expert layer"
    about = (
        "Router, top-k, experts, weighted sum, and AdamW(fused=True) over BF16 weights, gradients "
        "and moments, as one CUDA graph, cold L2, in turns.\nPeak: all that is allocated at once, "
        "weights, their FP8 numbers, gradients and moments among it."
    )
    text = timing.page(title, about, "bench_training_step", device, timing.markdown(rows))
    print(text)
    if options.write:
        (timing.RESULTS / f"bench_training_step_{timing.slug(device)}.md").write_text(text)


if __name__ == "__main__":
    main()
