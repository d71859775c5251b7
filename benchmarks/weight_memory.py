# SPDX-License-Identifier: Apache-2.0
"""Memory of a layer whose weight is in bf16, in bf16 with a cache, and frozen in FP8.

Bytes of parameters and buffers and, on a GPU, the peak in a forward and backward, without what was
there before::

    python -m benchmarks.weight_memory
    python -m benchmarks.weight_memory --experts 32 --in-features 7168 --out-features 4096
"""

import argparse
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from grouped_linear import Float8BlockScaling, GroupedLinear

WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, cached": {"cache_weights": True},
    "frozen in FP8": {"weights": "fp8"},
}


def peak(work: Callable[[], Any], device: torch.device) -> float:
    """MiB that are allocated at most during some work, past those before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def measure(weight: str, sizes: argparse.Namespace, device: torch.device) -> list[str]:
    options = WEIGHTS[weight]
    layer = GroupedLinear(
        sizes.experts,
        sizes.in_features,
        sizes.out_features,
        bias=False,
        recipe=Float8BlockScaling(),
        dtype=torch.bfloat16,
        device=device,
        **options,
    )
    held = sum(t.nbytes for t in chain(layer.parameters(), layer.buffers())) / 2**20
    cells = [weight, f"{held:,.0f}"]
    if device.type != "cuda":
        return cells
    x = torch.randn(sizes.rows, sizes.in_features, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    m_splits = torch.full((sizes.experts,), sizes.rows // sizes.experts, device=device)
    first = True if "cache_weights" in options else None

    def gradients() -> None:
        layer(x, m_splits, first).sum().backward()

    for _ in range(2):  # the first makes what stays
        layer.zero_grad()
        x.grad = None
        of_gradients = peak(gradients, device)
    return [*cells, f"{of_gradients:,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_memory")
    for name, size in (
        ("experts", 8),
        ("in-features", 4096),
        ("out-features", 7168),
        ("rows", 16384),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = parser.parse_args()
    device = torch.device(sizes.device)
    titles = ["MiB", "parameters and buffers", "peak of forward + backward"]
    titles = titles if device.type == "cuda" else titles[:2]
    print("| " + " | ".join(titles) + " |")
    print("| " + " | ".join("---" for _ in titles) + " |")
    for weight in WEIGHTS:
        print("| " + " | ".join(measure(weight, sizes, device)) + " |")


if __name__ == "__main__":
    main()
