"""How long does an eager forward and backward of a small layer keep the host busy?

The layer is small enough for a GPU to wait for the host; a CPU's own work counts too. Autograd
runs on the calling thread: a thread of its own costs as much again, and varies.
"""

import time
from collections.abc import Callable
from datetime import date

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.alternatives import TorchGroupedLinear
from benchmarks.step_cases import RECIPES
from grouped_linear import GroupedLinear, ops

E, M, N, K = 8, 32, 256, 256  # groups, rows a group, out_features, in_features
STEPS = 50  # a sample
BF16 = torch.bfloat16


def step_of(layer: nn.Module, device: torch.device, *m_splits: torch.Tensor) -> Callable[[], None]:
    layer.to(device=device, dtype=BF16)
    x = torch.randn(E * M, K, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(E * M, N, device=device, dtype=BF16)
    parameters = [x, *layer.parameters()]

    def step() -> None:
        layer(x, *m_splits).backward(dy)
        for p in parameters:
            p.grad = None

    return step


def microseconds_a_step(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(STEPS):
        step()
    return (time.perf_counter_ns() - start) / 1e3 / STEPS


def table(samples: dict[str, list[float]]) -> str:
    first = next(iter(samples.values()))
    rows = [["layer", "us", "(quartiles)", "times nn.Linear", "(quartiles)"]]
    for name, own in samples.items():
        us = timing.Spread.of(own)
        beside = timing.Spread.of([a / b for a, b in zip(own, first, strict=True)])
        rows.append(
            [
                name,
                f"{us.median:.1f}",
                f"({us.low:.1f} {us.high:.1f})",
                f"{beside.median:.2f}",
                f"({beside.low:.2f} {beside.high:.2f})",
            ]
        )
    return timing.markdown(rows)


def probe(device: torch.device) -> None:
    ops.group_quantize(torch.ones(1, 16, device=device), torch.ones(1, device=device).int())


def main() -> None:
    args = timing.arguments_of_one_case(__doc__, rounds=40).parse_args()
    device = timing.device_for(args.device, probe)
    m_splits = torch.full((E,), M, device=device)
    steps = {
        "nn.Linear": step_of(nn.Linear(K, N, bias=False), device),
        "torch grouped_mm": step_of(TorchGroupedLinear(E, K, N), device, m_splits),
    }
    for name, recipe in {"none": None, **RECIPES}.items():
        layer = GroupedLinear(E, K, N, bias=False, recipe=recipe)
        steps[f"GroupedLinear, recipe {name}"] = step_of(layer, device, m_splits)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    with torch.autograd.set_multithreading_enabled(False):
        for step in steps.values():
            microseconds_a_step(step, device)
        for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
            for name, step in steps.items():
                samples[name].append(microseconds_a_step(step, device))
    header = [
        *timing.machine(device),
        f"commit {timing.git_commit()}, {date.today().isoformat()}",
        timing.command("bench_host"),
        f"{E} groups of {M} rows, N {N}, K {K}, bf16; {args.rounds} interleaved rounds of {STEPS} "
        "steps, medians with (quartiles), beside nn.Linear paired by round",
    ]
    parts = ["# bench_host", (__doc__ or "").split("\n\n")[0], "\n".join(f"- {h}" for h in header)]
    text = "\n\n".join([*parts, table(samples)]) + "\n"
    print(text)
    if args.write:
        (timing.RESULTS / f"bench_host_{timing.slug(device)}.md").write_text(text)


if __name__ == "__main__":
    main()
