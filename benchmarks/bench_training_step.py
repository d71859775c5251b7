# SPDX-License-Identifier: Apache-2.0
"""A whole training step of an expert layer: forward, backward and AdamW, and its peak memory.

    python -m benchmarks.bench_training_step --at-once 3  # 70 GB: all shapes compile side by side

Router, top-k, experts, weighted sum; BF16 weights, gradients and moments; compiled; the step is one
CUDA graph with AdamW(fused=True) in it, with a cold L2 cache, in turns with torch's grouped_mm, and
with SonicMoE's layers where they are installed, which are not compiled. Peak is all that is
allocated at once: weights and their FP8 numbers, gradients, moments, what the backward needs, x and
the output.

With --write the rows replace those of the same shapes in benchmarks/results/, of which
benchmarks.front_page makes the README's table and picture.
"""

import argparse
import gc
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import timing
from benchmarks.bench_expert_layer import SONIC_MOES, TOKENS_AND_SIZES, layer_of, step_of
from benchmarks.step_cases import CACHED, Candidate

GIB = 1 << 30
TORCH = Candidate("torch", "bf16", "compiled")
# Beside torch, so many in memory at a time.
GROUPS = (
    (TORCH, *SONIC_MOES, Candidate("ours", "bf16", "compiled")),
    (TORCH, *(Candidate("ours", name, "compiled") for name in ("block", "block" + CACHED))),
)
ADAM = f"{TORCH}: AdamW"
SHAPES = ("qwen3_30b", "dsv3_ep8", "sonic_7b")
COLUMNS = (
    "shape",
    "layer",
    "ms",
    "times_torch",
    "peak_gib",
    "forward_backward_ms",
    "forward_backward_times_torch",
    "commit",
)
HOW = (
    "Router, top-k, experts, weighted sum, and AdamW(fused=True) over BF16 weights, gradients and "
    "moments, as one CUDA graph, cold\nL2, in turns, medians; then forward and backward alone. "
    "Peak: all that is allocated at once in a step, weights, their FP8\nnumbers, gradients and "
    "moments among it. times_torch: the median of the rounds' own ratios."
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
    """Rows of one shape: of each layer, and of torch's optimizer."""
    rows = []
    for candidates in GROUPS:
        measured = _beside_torch(candidates, name, rounds, turn)
        rows += measured if candidates == GROUPS[0] else measured[1:-1]
    return rows


def _beside_torch(
    candidates: Sequence[Candidate], name: str, rounds: int, turn: timing.Turn
) -> list[tuple[str, ...]]:
    steps: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    peaks = {ADAM: ""}
    torch.compiler.reset()
    for candidate in candidates:
        label = str(candidate)
        gc.collect()  # of what was compiled before, which would count as held
        before = torch.cuda.memory_allocated()
        layer, x = layer_of(candidate, name)
        parts[label], adam = parts_of(layer, x)
        steps[label] = partial(whole, parts[label], adam, layer)
        if candidate == TORCH:
            torchs_adam = adam
        steps[label]()
        torch.cuda.reset_peak_memory_stats()
        steps[label]()
        peaks[label] = f"{(torch.cuda.max_memory_allocated() - before) / GIB:.2f}"
    device = torch.device("cuda")
    with turn:
        torch.cuda.empty_cache()
        of_steps = timing.time_paired(steps, device, rounds=rounds)
        parts[str(TORCH)]()  # gradients for the optimizer alone
        of_parts = timing.time_paired(parts | {ADAM: torchs_adam}, device, rounds=rounds)
    rows = []
    for label, part in of_parts.items():
        cells = [_times(of_steps.get(label, part)), (peaks[label],)]
        cells.append(_times(part) if label in of_steps else ("", ""))
        rows.append((name, label, *itertools.chain(*cells), timing.git_commit()))
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return rows


def _times(measured: timing.Timing) -> tuple[str, str]:
    return f"{measured.microseconds.median / 1000:.3f}", f"{measured.share.median:.2f}"


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
