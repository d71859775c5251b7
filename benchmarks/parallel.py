# SPDX-License-Identifier: Apache-2.0
"""A layer of experts on one GPU and spread over several: time, communication, memory.

    torchrun --nproc-per-node 2 -m benchmarks.parallel --write
    python -m benchmarks.parallel --plot                  # what was written, as bars
    python -m benchmarks.parallel --predict 8 64 512      # more GPUs, see parallel_model.py

A step is the forward and backward of the experts with the tokens' routing given, by the layer as it
is, captured in one CUDA graph; on a CPU one eager call. Candidates take turns. A sample is the
longest time of any process. Every process has its own tokens:

- weak scaling: as many tokens on each process as on one GPU alone, which is the first row;
- strong scaling: as many tokens on all processes together as on one GPU alone.

Efficiency is the time of one GPU alone for all the tokens there are, over that of all GPUs, divided
by their number: 1 is perfect. Communication is the time of dispatch and combine, forward and
backward, without the experts; a step hides some of it. Sent is what one GPU sends to others in all
of that.

T tokens of a process, D processes, E experts, C chosen for a token, H and F features.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import parallel_run, timing
from benchmarks.parallel_model import (
    MIB,
    SHAPES,
    WAYS,
    Machine,
    Shape,
    page,
    recorded,
    sent_bytes,
)
from benchmarks.parallel_run import RECIPES, time_in_turns
from benchmarks.plots import SERIES, label
from grouped_linear import GroupedMLP
from grouped_linear.parallel import Dispatched, ExpertParallel, TokenDispatcher

SCALINGS = "weak", "strong"
QUICK = ("qwen3_30b", "dsv3_32_experts")
HOW = (
    "Experts spread over GPUs, beside one GPU with all of them (`benchmarks/parallel.py` says what "
    "the columns are)."
)


@dataclass
class Row:
    """One candidate's results; times in milliseconds."""

    shape: str
    recipe: str
    scaling: str
    way: str
    tokens: int
    ms: float
    spread: float
    efficiency: float
    communication: float
    sent: float
    peak: float
    dropped: int


class Candidate:
    """A layer and its tokens, and a step of both."""

    def __init__(self, layer: nn.Module, shape: Shape, tokens: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        dtype = torch.bfloat16
        self.layer = layer
        self.x = torch.randn(tokens, shape.H, generator=generator).to(device, dtype)
        scores = torch.randn(tokens, shape.E, generator=generator).softmax(-1).to(device)
        weights, self.index = scores.topk(shape.C)
        self.weights = weights.contiguous()
        self.dy = torch.randn(tokens, shape.H, generator=generator).to(device, dtype)
        self.leaves = [self.x.requires_grad_(), self.weights.requires_grad_()]
        self.first: bool | None = None

    def step(self) -> Any:
        """Forward and backward."""
        y = self.layer(self.x, self.weights, self.index, self.first)
        return torch.autograd.grad(y, [*self.leaves, *self.layer.parameters()], self.dy)

    def communicate(self) -> Any:
        """Forward and backward of dispatch and combine alone."""
        dispatcher: Any = self.layer.dispatcher
        dispatched: Dispatched = dispatcher.dispatch(self.x, self.weights, self.index)
        y = dispatcher.combine(dispatched.x, dispatched)
        loss = dispatched.top_k_weights.sum()
        return torch.autograd.grad((y, loss), self.leaves, (self.dy, torch.ones_like(loss)))


def experts(shape: Shape, recipe: str, device: torch.device) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(
        shape.E,
        shape.H,
        shape.F,
        recipe=RECIPES[recipe],
        cache_weights=True,
        dtype=torch.bfloat16,
        device=device,
    )


def warm(candidate: Candidate, device: torch.device) -> float:
    """Fill the weight caches, run a few steps, return the most that one allocates, in MiB."""
    if candidate.layer.recipe is not None:
        candidate.layer(candidate.x, candidate.weights, candidate.index, True)
        candidate.first = False
    candidate.step()
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    candidate.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (1 << 20)


def captured(call: Callable[[], Any], device: torch.device, pool: Any) -> Callable[[], Any]:
    """The call as a CUDA graph's replay; on a CPU the call itself.

    All graphs share the memory of their intermediate results and outputs, which nobody reads.
    """
    if device.type == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog may call CUDA meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        call()
    return graph.replay


def measure(
    name: str,
    recipe: str,
    mesh: DeviceMesh,
    rounds: int,
    *,
    ways: Sequence[str] = tuple(WAYS),
    scalings: Sequence[str] = SCALINGS,
) -> list[Row]:
    """All rows of one shape and recipe."""
    shape, D = SHAPES[name], mesh.size()
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    whole = experts(shape, recipe, device)
    alone = Candidate(whole, shape, shape.T, device)
    candidates = {("one GPU", "-"): alone}
    for way in ways:
        spread = parallelize_module(
            experts(shape, recipe, device), mesh, ExpertParallel(**WAYS[way])
        )
        for scaling in scalings:
            tokens = shape.T if scaling == "weak" else shape.T // D
            candidates[scaling, way] = Candidate(spread, shape, tokens, device)
    pool = torch.cuda.graph_pool_handle() if on_gpu else None
    peaks, dropped = {}, {}
    steps: dict[Any, Callable[[], Any]] = {}
    talks: dict[Any, Callable[[], Any]] = {}
    for key, candidate in candidates.items():
        peaks[key] = warm(candidate, device)
        dispatcher: TokenDispatcher | None = candidate.layer.dispatcher
        dropped[key] = torch.zeros((), dtype=torch.int64, device=device)
        if dispatcher is not None:
            dispatcher.dropped.zero_()
            candidate.step()
            dropped[key] = dispatcher.dropped.clone()
            talks[key] = captured(candidate.communicate, device, pool)
        dist.all_reduce(dropped[key])
        steps[key] = captured(candidate.step, device, pool)
    times = time_in_turns(steps, device, rounds)
    of_talk = time_in_turns(talks, device, rounds)
    base = statistics.median(times["one GPU", "-"])
    rows = []
    for (scaling, way), samples in times.items():
        ms = statistics.median(samples)
        tokens = len(candidates[scaling, way].x)
        perfect = base * tokens / shape.T  # of one GPU for one process's tokens
        talk = statistics.median(of_talk[scaling, way]) if way in WAYS else 0.0
        sent = sent_bytes(shape, tokens, D, WAYS[way]) / MIB if way in WAYS else 0.0
        spread_of = (max(samples) - min(samples)) / ms
        rows.append(
            Row(
                name,
                recipe,
                scaling,
                way,
                tokens,
                ms,
                spread_of,
                perfect / ms,
                talk,
                sent,
                peaks[scaling, way],
                int(dropped[scaling, way]),
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    head = [
        "shape",
        "recipe",
        "scaling",
        "way",
        "tokens a GPU",
        "ms",
        "range",
        "efficiency",
        "communication, ms",
        "of the step",
        "sent, MiB",
        "GB/s",
        "peak, MiB",
        "dropped",
    ]
    cells = [head]
    for r in rows:
        rate = r.sent * (1 << 20) / r.communication / 1e6 if r.communication else 0.0
        cells.append(
            [
                r.shape,
                r.recipe,
                r.scaling,
                r.way,
                str(r.tokens),
                f"{r.ms:.3f}",
                f"{r.spread:.0%}",
                f"{r.efficiency:.2f}",
                f"{r.communication:.3f}",
                f"{r.communication / r.ms:.0%}",
                f"{r.sent:.1f}",
                f"{rate:.0f}",
                f"{r.peak:.0f}",
                str(r.dropped),
            ]
        )
    return timing.markdown(cells)


SCALING = {
    "weak": "a GPU has as many tokens as one alone",
    "strong": "the GPUs share the tokens of one alone",
}


def plot(result: Mapping[str, Any], path: Path) -> None:
    """A step's time by way, and the part of it that is communication: a panel for each layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, D = result["rows"], result["processes"]
    layers = list(dict.fromkeys((r["shape"], r["recipe"]) for r in rows))
    scalings = [s for s in SCALINGS if any(r["scaling"] == s for r in rows)]
    size = 4.5 * len(layers), 0.5 + 2.75 * len(scalings)
    figure, panels = pyplot.subplots(
        len(scalings), len(layers), squeeze=False, figsize=size, constrained_layout=True
    )
    for column, layer in enumerate(layers):
        own = [r for r in rows if (r["shape"], r["recipe"]) == layer]
        (alone,) = (r["ms"] for r in own if r["scaling"] == "one GPU")
        for panel, scaling in zip(panels[:, column], scalings, strict=True):
            shown = [r for r in own if r["scaling"] == scaling]
            names = [f"{r['way']} limit" if "no capacity" in r["way"] else r["way"] for r in shown]
            rest = [max(0.0, r["ms"] - r["communication"]) for r in shown]
            talk = [min(r["ms"], r["communication"]) for r in shown]
            panel.barh(names, rest, color="C0", label="experts and the rest")
            panel.barh(names, talk, left=rest, color="C1", label="communication")
            perfect = alone if scaling == "weak" else alone / D
            panel.axvline(
                perfect,
                color="black",
                linestyle="--",
                label="efficiency 100%",
            )
            for i, r in enumerate(shown):
                panel.text(r["ms"], i, f" {r['efficiency']:.0%}", va="center")
            panel.set_xlim(0, 1.2 * max(perfect, *(r["ms"] for r in shown)))
            panel.invert_yaxis()
            recipe = SERIES[f"ours {layer[1]}"][0].removeprefix("ours, ")
            panel.set_title(f"{label(layer[0])}, {recipe}\n{SCALING[scaling]}", fontsize=10)
            panel.set_xlabel("ms a step; beside the bar: efficiency")
            if column:
                panel.set_yticklabels([])
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    gpu = result["about"][0].removeprefix("GPU: ")
    figure.suptitle(f"An expert layer, its experts over {D} GPUs: {gpu}, commit {result['commit']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = parallel_run.arguments(__doc__, "shapes", SHAPES, QUICK)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--scalings", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    parser.add_argument("--plot", action="store_true", help="the results that were written")
    parser.add_argument("--predict", nargs="+", type=int, metavar="GPUS", help="measure nothing")
    nominal = Machine()
    for name in ("nvlink", "network", "memory"):
        parser.add_argument(
            f"--{name}",
            type=float,
            default=getattr(nominal, name),
            help="for --predict, nominal GB/s of a GPU in one direction, default %(default)s",
        )
    parser.add_argument("--node", type=int, default=nominal.node, help="GPUs of one")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if not (options.predict or options.plot):
        chosen = partial(measure, ways=options.ways, scalings=options.scalings)
        parallel_run.run("parallel", HOW, options, options.shapes, chosen, table)
        return
    results = recorded()
    if options.predict:
        machine = Machine(options.node, options.nvlink, options.network, options.memory)
        text = page(options.predict, machine, results)
        print(text)
        if options.write:
            (timing.RESULTS / "parallel_predicted.md").write_text(text + "\n")
    if options.plot:
        assert results, "nothing is recorded: --write does it"
        for result in results:
            path = timing.RESULTS / f"parallel_{result['processes']}_{result['device']}.png"
            plot(result, path)
            print(f"written: {path.relative_to(timing.RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
