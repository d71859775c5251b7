# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of several processes share: options, times in turns, a run and its page."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import timing
from benchmarks.parallel_model import CAPACITY
from grouped_linear import Float8BlockScaling, Recipe

REPEATS = 3  # replays a sample: processes start one after another, by some 10 us
RECIPES: dict[str, Recipe | None] = {"bf16": None, "block": Float8BlockScaling()}
# Rows, which are dataclasses, of a case and a recipe on a mesh, in so many rounds.
Measure = Callable[[str, str, DeviceMesh, int], list[Any]]


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one of several calls in a row, begun at the same time on every process."""
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    for _ in range(REPEATS):
        call()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / REPEATS


def time_in_turns(
    calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Samples of each call; the longest of any process."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(milliseconds(call, device))
    longest: Tensor = torch.tensor(list(samples.values()), device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return dict(zip(samples, longest.tolist(), strict=True))


def arguments(
    description: str | None, cases: str, names: Iterable[str], default: Sequence[str]
) -> argparse.ArgumentParser:
    """The options of every such benchmark; `cases` is what it calls its own."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(f"--{cases}", nargs="+", choices=list(names), default=list(default))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results, too")
    return parser


def run(
    name: str,
    how: str,
    options: argparse.Namespace,
    cases: Sequence[str],
    measure: Measure,
    table: Callable[[list[Any]], str],
) -> None:
    """Measure on all processes; the first prints a page, and writes it and its numbers if asked."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rows = []
    for case in cases:
        for recipe in options.recipes:
            rows += measure(case, recipe, mesh, options.rounds)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        result: dict[str, Any] = {
            "device": timing.slug(device),
            "about": timing.machine(device),
            "processes": mesh.size(),
            "commit": timing.git_commit(),
            "rounds": options.rounds,
            "rows": [asdict(row) for row in rows],
        }
        program = shlex.join([f"benchmarks.{name}", *sys.argv[1:]])
        lines = (
            *result["about"],
            f"{mesh.size()} processes, commit {result['commit']}, date {date.today()}",
            f"command: torchrun --nproc-per-node {mesh.size()} -m {program}",
            f"{options.rounds} rounds, medians; range: slowest less fastest round; capacity factor "
            f"{CAPACITY} where there is one",
        )
        header = "\n".join(f"- {line}" for line in lines)
        text = "\n\n".join([f"# {name}", how, header, table(rows)])
        print(text)
        if options.write:
            path = timing.RESULTS / f"{name}_{mesh.size()}_{timing.slug(device)}.md"
            path.write_text(text + "\n")
            path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            print(f"written: {path.relative_to(timing.RESULTS.parent.parent)} and .json")
    dist.barrier()  # a process that ends may take the first with it, which writes
    dist.destroy_process_group()
