# SPDX-License-Identifier: Apache-2.0
"""Does a model learn on several GPUs what it learns on one? Losses of the same batches.

    torchrun --nproc-per-node 4 -m benchmarks.parallel_losses --write
    torchrun --nproc-per-node 2 -m benchmarks.parallel_losses --case tiny --device cpu --steps 20

The byte-level model of benchmarks.moe_model learns the Python source that is installed. One GPU
computes the gradients of all processes' batches, one after the other; several compute one each. All
begin with equal weights and read equal batches, so curves differ by rounding: sums have another
order, and FSDP2 rounds to bf16 before it gathers. Experts over GPUs drop no token.
"""

import argparse
import csv
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import parallel_training, timing
from benchmarks.moe_model import LanguageModel
from benchmarks.parallel_run import RECIPES
from benchmarks.plots import losses_beside_the_first
from benchmarks.python_source import distinct

ALONE = "one GPU"
Spread = Callable[[LanguageModel, DeviceMesh], None]
WAYS: dict[str, Spread | None] = {
    ALONE: None,
    "FSDP2": lambda model, mesh: parallel_training.shard(model, mesh, set()),
    "experts over GPUs, FSDP2 for the rest": parallel_training.spread,
    "the same, tokens sent by all-to-all": lambda model, mesh: parallel_training.spread(
        model, mesh, dispatch="all_to_all"
    ),
}
CASES = {name: parallel_training.CASES[name] for name in ("small", "tiny")}
RATE = 3e-4
CHARACTERS = 20_000_000


def learn(case: parallel_training.Case, recipe: str, way: str, text: Tensor, steps: int) -> Tensor:
    """The loss of each step, in nats a byte: the mean of all processes' batches."""
    device, rank, D = text.device, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with device:
        model = LanguageModel(
            case.size,
            lambda size: parallel_training.experts(size, recipe, None),
            dtype=torch.bfloat16,
        )
    if (spread := WAYS[way]) is not None:
        spread(model, init_device_mesh(device.type, (D,)))
    of_experts = parallel_training.experts_of(model)
    rest = [p for p in model.parameters() if p not in of_experts]
    groups: Any = [{"params": rest}, {"params": list(of_experts)}]  # DTensors of two meshes
    optimizer = torch.optim.AdamW(groups, RATE, fused=True)
    random, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / (0.1 * steps))
        begin_DB = torch.randint(
            len(text) - case.size.context, (D, case.sequences), generator=random
        )
        computed_here = begin_DB if way == ALONE else begin_DB[rank : rank + 1]
        entropies = []
        for begin_B in computed_here.to(device):
            position = begin_B[:, None] + torch.arange(case.size.context + 1, device=device)
            objective, entropy = model(text[position].long())
            (objective / len(computed_here)).backward()
            entropies.append(entropy)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(entropies).mean())
    found = torch.stack(losses)
    dist.all_reduce(found)
    return found.cpu() / D


def table(curves: dict[tuple[str, str], Tensor]) -> str:
    steps = len(next(iter(curves.values())))
    shown = [s for s in (1, 10, 50, 100, 200, 500, 1000, 2000) if s < steps] + [steps]
    head = ["recipe", "way", *(f"step {s}" for s in shown)]
    cells = [[*head, "farthest from one GPU, %", "mean of the last fifth, %"]]
    for (recipe, way), losses in curves.items():
        apart = 100 * (losses / curves[recipe, ALONE] - 1)
        last = apart[-(steps // 5) :].mean()
        values = [f"{losses[s - 1]:.4f}" for s in shown]
        cells.append([recipe, way, *values, f"{apart.abs().max():.2f}", f"{last:+.2f}"])
    return timing.markdown(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="small")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # Processes start one after another; what is installed is the same for all.
    text = "".join(document.text for document in distinct(CHARACTERS)).encode()
    bytes_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    case, curves = CASES[options.case], {}
    for recipe in options.recipes:
        for way in WAYS:
            curves[recipe, way] = learn(case, recipe, way, bytes_N, options.steps)
            if dist.get_rank() == 0:
                print(f"{recipe}, {way}: {curves[recipe, way][-1]:.4f}", flush=True)
    if dist.get_rank() == 0:
        D = dist.get_world_size()
        about = (
            f"{D} processes, {options.steps} steps of {D} x {case.sequences} sequences of "
            f"{case.size.context} bytes; {case.size}."
        )
        title = "Losses of experts over GPUs and of FSDP2 beside one GPU"
        text_page = timing.page(title, about, "parallel_losses", device, table(curves))
        text_page = text_page.replace("python -m", f"torchrun --nproc-per-node {D} -m")
        print(text_page)
        if options.write:
            path = timing.RESULTS / f"parallel_losses_{D}_{timing.slug(device)}.md"
            names = [f"{recipe}, {way}" for recipe, way in curves]
            path.write_text(f"{text_page}\n![Losses]({path.with_suffix('.png').name})\n")
            with path.with_suffix(".csv").open("w", newline="") as file:
                rows = zip(
                    *([f"{x:.5f}" for x in losses] for losses in curves.values()), strict=True
                )
                csv.writer(file, lineterminator="\n").writerows([names, *rows])
            recipe = options.recipes[-1]
            drawn = {way: curves[recipe, way].tolist() for way in WAYS}
            losses_beside_the_first(drawn, f"{recipe}: {title}", path.with_suffix(".png"))
    dist.barrier()  # a process that ends may take the first with it, which writes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
