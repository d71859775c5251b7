# SPDX-License-Identifier: Apache-2.0
"""The speed of the GEMMs of a layer beside torch's grouped_mm, in one glance: no benchmark.

T rows, E groups, K in_features, N out_features.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_linear import ops

SECONDS = 0.3  # for each call
# E, the rows of a group on average, N and K. Groups have 0.5 to 1.5 of the mean.
SHAPES = {"cuda": (8, 1024, 4096, 4096), "cpu": (4, 64, 256, 256)}


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call after a warm-up, the caches as they are; NaN where the call raises."""

    def synchronize() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    samples: list[float] = []
    try:
        call()
    except (RuntimeError, ValueError):  # torch's grouped_mm does not run on every device
        return math.nan
    stop = synchronize() + SECONDS
    while len(samples) < 3 or (time.perf_counter() < stop and len(samples) < 100):
        start = synchronize()
        call()
        samples.append(synchronize() - start)
    return statistics.median(samples)


def rows_on(device: torch.device) -> Iterator[str]:
    """A heading, and a row each for fprop, dgrad and wgrad."""
    E, m, N, K = SHAPES[device.type]
    sizes = [m * (2 * e + E) // (2 * E) for e in range(E)]
    T = sum(sizes)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    x, dy, w = draw(T, K), draw(T, N), draw(E, N, K)
    offs = ops.splits_to_offsets(torch.tensor(sizes, device=device), T)
    q: Any = ops.group_quantize(x, offs, columnwise=True, share_scales=True)
    d: Any = ops.group_quantize(dy, offs, columnwise=True)
    w_q: Any = ops.quantize_weight(w)
    columns = d.q_t, q.q_t, d.scale_t, q.scale_t, offs
    calls: dict[str, tuple[Callable[[], object], ...]] = {
        "fprop": (
            lambda: ops.grouped_mm(x, w.mT, offs),
            lambda: ops.grouped_scaled_mm(q.q, w_q.q.mT, q.scale, w_q.scale.mT, offs),
            lambda: F.grouped_mm(x, w.mT, offs=offs),
        ),
        "dgrad": (
            lambda: ops.grouped_mm(dy, w, offs),
            lambda: ops.grouped_scaled_mm(d.q, w_q.q_t.mT, d.scale, w_q.scale, offs),
            lambda: F.grouped_mm(dy, w, offs=offs),
        ),
        "wgrad": (
            lambda: ops.grouped_mm_wgrad(dy, x, offs),
            lambda: ops.grouped_scaled_mm_wgrad(*columns),
            lambda: F.grouped_mm(dy.t(), x, offs=offs),
        ),
    }
    yield f"TFLOP/s: {E} groups of {min(sizes)} to {max(sizes)} rows, {N} x {K}"
    yield f"  {'':<8}{'BF16':>10}{'FP8':>10}{'torch BF16':>12}"
    for gemm, of_three in calls.items():
        bf16, fp8, theirs = (2e-12 * T * N * K / median_seconds(call, device) for call in of_three)
        yield f"  {gemm:<8}{bf16:>10.4g}{fp8:>10.4g}{theirs:>12.4g}"
