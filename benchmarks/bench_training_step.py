"""A whole training step of an expert layer: forward, backward and AdamW, and its peak memory.

    python -m benchmarks.bench_training_step

Router, top-k, experts, weighted sum; BF16 weights, gradients and moments; compiled; the step is one
CUDA graph with AdamW(fused=True) in it, with a cold L2 cache, in turns with torch's grouped_mm, and
with SonicMoE's released layer where it is installed, which is not compiled. Peak is all that is
allocated at once: weights and their FP8 numbers, gradients, moments, what the backward needs, x and
the output.

With --write the rows replace those of the same shapes in benchmarks/results/, of which
benchmarks.front_page makes the README's table and picture.
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import timing
from benchmarks.alternatives import HAS_SONIC_MOE
from benchmarks.bench_expert_layer import SONIC_MOE, TOKENS_AND_SIZES, layer_of, step_of
from benchmarks.step_cases import CACHED, Candidate

GIB = 1 << 30
TORCH = Candidate("torch", "bf16", "compiled")
CANDIDATES = (
    TORCH,
    *((SONIC_MOE,) if HAS_SONIC_MOE else ()),
    Candidate("ours", "bf16", "compiled"),
    Candidate("ours", "block", "compiled"),
    Candidate("ours", "block" + CACHED, "compiled"),
)
# What torch's step is made of, in the same run.
FORWARD_AND_BACKWARD, ADAM = f"{TORCH}: forward and backward", f"{TORCH}: AdamW"
SHAPES = ("qwen3_30b", "dsv3_ep8", "sonic_7b")
COLUMNS = ("shape", "layer", "ms", "times_torch", "peak_gib", "commit")
HOW = (
    "Router, top-k, experts, weighted sum, and AdamW(fused=True) over BF16 weights, gradients and "
    "moments, as one CUDA graph, cold\nL2, in turns, medians. Peak: all that is allocated at once, "
    "weights, their FP8 numbers, gradients and moments among it.\ntimes_torch: the median of the "
    "rounds' own ratios."
)


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


def measure(rounds: int, name: str, turn: timing.Turn) -> list[tuple[str, ...]]:
    """Rows of one shape, and of what torch's step is made of."""
    calls: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    for candidate in CANDIDATES:
        before = torch.cuda.memory_allocated()
        layer, x = layer_of(candidate, name)
        parts = parts_of(layer, x)
        step = partial(whole, *parts, layer)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[str(candidate)] = (torch.cuda.max_memory_allocated() - before) / GIB
        calls[str(candidate)] = step
        if candidate == TORCH:
            torchs = parts
    torchs[0]()  # gradients for the optimizer alone
    calls |= dict(zip((FORWARD_AND_BACKWARD, ADAM), torchs, strict=True))
    torch.cuda.empty_cache()
    with turn:
        timings = timing.time_paired(calls, torch.device("cuda"), rounds=rounds)
    rows = []
    for label, measured in timings.items():
        peak = f"{peaks[label]:.2f}" if label in peaks else ""
        ms, share = f"{measured.microseconds.median / 1000:.3f}", f"{measured.share.median:.2f}"
        rows.append((name, label, ms, share, peak, timing.git_commit()))
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=TOKENS_AND_SIZES, default=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="shapes that compile side by side")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    of_shape = partial(measure, options.rounds)
    rows = timing.side_by_side(of_shape, list(options.shapes), options.at_once)
    if options.write:
        timing.replace_rows("bench_training_step", COLUMNS, rows, HOW)


if __name__ == "__main__":
    main()
