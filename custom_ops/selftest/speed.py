"""The speed of the GEMMs of a layer beside torch's, in one glance: no benchmark.

T rows, E groups, K in_features, N out_features.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_linear import ops

Call = Callable[[], object]
SECONDS = 0.3  # for each call


class Shape(NamedTuple):
    """Group sizes of 0.5 to 1.5 of the mean."""

    E: int
    m: int
    N: int
    K: int

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [self.m * (2 * e + self.E) // (2 * self.E) for e in range(self.E)]


SHAPES = {"cuda": Shape(E=8, m=1024, N=4096, K=4096), "cpu": Shape(E=4, m=128, N=512, K=512)}


class Row(NamedTuple):
    """TFLOP/s of one kind of GEMM."""

    gemm: str
    bf16: float
    fp8: float
    theirs: float


def median_seconds(call: Call, device: torch.device) -> float:
    """Of one call after a warm-up, the caches as they are."""
    samples: list[float] = []
    for _ in range(3):
        call()
    stop = time.perf_counter() + SECONDS
    while len(samples) < 3 or (time.perf_counter() < stop and len(samples) < 100):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples.append(1e-3 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def in_a_loop(call: Call, loop: Call) -> tuple[Call, bool]:
    """torch's grouped_mm where it runs here, else a loop of mm over the groups."""
    try:
        call()
    except (RuntimeError, NotImplementedError, ValueError):
        return loop, True
    return call, False


def measured(device: torch.device) -> tuple[str, list[Row]]:
    """What stands beside ours, and a row each for fprop, dgrad and wgrad."""
    shape = SHAPES[device.type]
    sizes, (E, _, N, K) = shape.sizes, shape
    T = sum(sizes)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    x, dy, w = draw(T, K), draw(T, N), draw(E, N, K)
    offs = ops.splits_to_offsets(torch.tensor(sizes, device=device), T)
    q: Any = ops.group_quantize(x, offs, columnwise=True, share_scales=True)
    d: Any = ops.group_quantize(dy, offs, columnwise=True)
    w_q: Any = ops.quantize_weight(w)
    columns = d.q_t, q.q_t, d.scale_t, q.scale_t, offs
    xs, dys = x.split(sizes), dy.split(sizes)
    calls: dict[str, tuple[Call, Call, Call, Call]] = {
        "fprop": (
            lambda: ops.grouped_mm(x, w.mT, offs),
            lambda: ops.grouped_scaled_mm(q.q, w_q.q.mT, q.scale, w_q.scale.mT, offs),
            lambda: F.grouped_mm(x, w.mT, offs=offs),
            lambda: [a @ b.t() for a, b in zip(xs, w, strict=True)],
        ),
        "dgrad": (
            lambda: ops.grouped_mm(dy, w, offs),
            lambda: ops.grouped_scaled_mm(d.q, w_q.q_t.mT, d.scale, w_q.scale, offs),
            lambda: F.grouped_mm(dy, w, offs=offs),
            lambda: [a @ b for a, b in zip(dys, w, strict=True)],
        ),
        "wgrad": (
            lambda: ops.grouped_mm_wgrad(dy, x, offs),
            lambda: ops.grouped_scaled_mm_wgrad(*columns),
            lambda: F.grouped_mm(dy.t(), x, offs=offs),
            lambda: [a.t() @ b for a, b in zip(dys, xs, strict=True)],
        ),
    }
    found, looped = [], False
    for gemm, (bf16, fp8, theirs, loop) in calls.items():
        beside, is_loop = in_a_loop(theirs, loop)
        looped |= is_loop
        times = (median_seconds(call, device) for call in (bf16, fp8, beside))
        found.append(Row(gemm, *(2e-12 * T * N * K / seconds for seconds in times)))
    sizes_said = f"{E} groups of {min(sizes)} to {max(sizes)} rows, {N} x {K}"
    name = "a loop of torch's mm over the groups" if looped else "torch's grouped_mm"
    return f"{sizes_said}; beside: {name}, BF16", found
