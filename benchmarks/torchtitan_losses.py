# SPDX-License-Identifier: Apache-2.0
"""Loss curves of torchtitan's Trainer: its own experts beside ours, on two processes or more.

    torchrun --nproc-per-node 2 -m benchmarks.torchtitan_losses

DeepSeek-V3's debug model under FSDP2 of all processes and torchtitan's expert parallelism of two;
with NCCL where there are two GPUs, else on the CPU with gloo. ``make torchtitan`` makes the
environment for it, .venv-torchtitan. ``--write`` keeps table, numbers and plot in
benchmarks/results.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import timing
from benchmarks.plots import losses_beside_the_first
from grouped_linear import Float8BlockScaling, MXFP8BlockScaling

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.titan import losses, prepare

MODELS: dict[str, dict[str, Any] | None] = {
    "torchtitan's experts, bf16": None,
    "grouped_linear, bf16": {},
    "grouped_linear, Float8BlockScaling": {"recipe": Float8BlockScaling()},
    "grouped_linear, MXFP8BlockScaling": {"recipe": MXFP8BlockScaling()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--write", action="store_true", help="to benchmarks/results, too")
    options = parser.parse_args()
    kind = options.device or ("cuda" if torch.cuda.device_count() > 1 else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    prepare(kind)
    with tempfile.TemporaryDirectory() as directory:
        curves = {
            name: losses(how, options.layers, kind, directory, options.steps)
            for name, how in MODELS.items()
        }
    dist.barrier()
    if dist.get_rank() == 0:
        report(curves, options.layers, torch.device(kind), options.write)
    dist.destroy_process_group()


def report(curves: dict[str, list[float]], layers: int, device: torch.device, write: bool) -> None:
    first = next(iter(curves.values()))
    shown = sorted({0, 1, 3, 7, *range(9, len(first), 10), len(first) - 1})
    cells = [["experts", *(f"step {i + 1}" for i in shown), "farthest from torchtitan's"]]
    for name, curve in curves.items():
        apart = max(abs(a / b - 1) for a, b in zip(curve, first, strict=True))
        cells.append([name, *(f"{curve[i]:.4f}" for i in shown), f"{apart:.2%}"])
    processes = dist.get_world_size()
    sizes = f"DeepSeek-V3's debug model, {layers} layers, {processes} processes, FSDP2 and EP"
    lines = [*timing.machine(device), sizes, f"commit {timing.git_commit()}"]
    page = [
        "# torchtitan_losses",
        "Losses of torchtitan's Trainer with its own experts and with ours "
        "(`torchrun --nproc-per-node 2 -m benchmarks.torchtitan_losses`).",
        "\n".join(f"- {line}" for line in lines),
        timing.markdown(cells),
    ]
    print("\n\n".join(page))
    if write:
        path = timing.RESULTS / f"torchtitan_losses_{timing.slug(device)}"
        path.with_suffix(".json").write_text(json.dumps(curves) + "\n")
        title = f"{sizes}\n{timing.machine(device)[0]}"
        losses_beside_the_first(curves, title, path.with_suffix(".png"))
        page.append(f"![Loss curves]({path.name}.png)")
        path.with_suffix(".md").write_text("\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
