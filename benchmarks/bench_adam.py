# SPDX-License-Identifier: Apache-2.0
"""A step of AdamW over a weight in BF16 and FP8, beside torch's fused AdamW over that in BF16.

The FP8 numbers are those of BF16, or with qat="mxfp4" those of the weight in MXFP4.

    python -m benchmarks.bench_adam

Each is one replay of a CUDA graph with a cold L2 cache, in turns (on a CPU, one call). Gradients
and moments are BF16 for both. The ratio is the median of the rounds' own ratios.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import timing
from grouped_linear import Float8BlockScaling
from grouped_linear.quantized.keep import keep_weight

# E, N, K
SHAPES = {
    "qwen3_30b_gate_up": (128, 1536, 2048),
    "qwen3_30b_down": (128, 2048, 768),
    "mixtral_gate_up": (8, 28672, 4096),
    "dsv3_ep8_down": (32, 7168, 2048),
    "small": (8, 1024, 1024),
}
BF16 = "torch, bf16"
BOTH = "ours, bf16 and fp8"
QAT = "ours, bf16 and fp8, qat"


def step_of(w: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """An optimizer's step over one parameter, whose gradient stays."""
    p = nn.Parameter(w)
    p.grad = torch.randn(w.shape, device=device, dtype=torch.bfloat16).mul_(1e-3)
    optimizer = torch.optim.AdamW([p], lr=1e-4, fused=True, capturable=device.type == "cuda")
    optimizer.step()  # makes the state
    return optimizer.step


def candidates(E: int, N: int, K: int, device: torch.device) -> dict[str, timing.Call]:
    w = torch.randn(E, N, K, device=device, dtype=torch.bfloat16).mul_(0.02)
    return {
        BF16: step_of(w, device),
        BOTH: step_of(keep_weight(w.clone(), "both", Float8BlockScaling()), device),
        QAT: step_of(keep_weight(w.clone(), "both", Float8BlockScaling(qat="mxfp4")), device),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_adam")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(*timing.machine(device), sep="\n", end="\n\n")
    rows = [["shape", "E x N x K", "AdamW over", "us", "GB/s", "time / torch's"]]
    for name in options.shapes:
        E, N, K = SHAPES[name]
        times = timing.time_paired(candidates(E, N, K, device), device, options.rounds)
        for candidate, t in times.items():
            moved = (14 if candidate == BF16 else 16) * E * N * K  # bytes
            cells = [name, f"{E} x {N} x {K}", candidate, f"{t.microseconds.median:,.1f}"]
            rate = moved / t.microseconds.median / 1e3
            rows.append([*cells, f"{rate:,.0f}", f"{1 / t.share.median:.2f}"])
    print(timing.markdown(rows))


if __name__ == "__main__":
    main()
