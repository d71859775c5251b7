"""A layer of experts on one GPU and spread over several: time, communication, memory.

    torchrun --nproc-per-node 2 -m benchmarks.parallel

A step is the forward and backward of the experts with the tokens' routing given, by the layer as it
is, captured in one CUDA graph; on a CPU one eager call. Candidates take turns. A sample is the
longest time of any process. Every process has its own tokens:

- weak scaling: as many tokens on each process as on one GPU alone, which is the first row;
- strong scaling: as many tokens on all processes together as on one GPU alone.

Efficiency is the time of one GPU alone for all the tokens there are, over that of all GPUs, divided
by their number: 1 is perfect. Communication is the time of dispatch and combine, forward and
backward, without the experts. Sent is what one GPU sends to others in all of that.

T tokens of a process, D processes, E experts, C chosen for a token, H and F features.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import timing
from grouped_linear import Float8BlockScaling, GroupedMLP, Recipe
from grouped_linear.parallel import Dispatched, ExpertParallel, TokenDispatcher

REPEATS = 3  # replays a sample: processes start one after another, by some 10 us


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, and the tokens of one GPU alone."""

    T: int
    H: int
    F: int
    E: int
    C: int


SHAPES = {
    "qwen3_30b": Shape(8192, 2048, 768, 128, 8),
    "dsv3_32_experts": Shape(4096, 7168, 2048, 32, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "tiny": Shape(64, 32, 48, 8, 2),
}
QUICK = ("qwen3_30b", "dsv3_32_experts")
RECIPES: dict[str, Recipe | None] = {"bf16": None, "block": Float8BlockScaling()}
CAPACITY = 1.25
WAYS: dict[str, dict[str, Any]] = {
    "all_gather, no capacity": {"dispatch": "all_gather"},
    "all_gather": {"dispatch": "all_gather", "capacity_factor": CAPACITY},
    "all_gather, FP8": {"dispatch": "all_gather", "capacity_factor": CAPACITY, "fp8": True},
    "all_to_all": {"dispatch": "all_to_all", "capacity_factor": CAPACITY},
    "all_to_all, FP8": {"dispatch": "all_to_all", "capacity_factor": CAPACITY, "fp8": True},
}


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


def sent_mib(shape: Shape, tokens: int, D: int, way: dict[str, Any]) -> float:
    """What a process sends to others in a step: x and dy out, y and dx back, and routing."""
    slots = tokens
    if way["dispatch"] == "all_to_all":
        slots = min(tokens, -(-int(CAPACITY * tokens * shape.C) // D)) + 1
    there = (1 + 4 / 128 if way.get("fp8") else 2) * shape.H  # and a scale for each 128
    routing = 12 * shape.C  # weight and number there, the weight's gradient back
    return (D - 1) * slots * (2 * there + 2 * 2 * shape.H + routing) / (1 << 20)


def measure(
    name: str, recipe: str, mesh: DeviceMesh, rounds: int, ways: list[str] | None = None
) -> list[Row]:
    """All rows of one shape and recipe."""
    shape, D = SHAPES[name], mesh.size()
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    whole = experts(shape, recipe, device)
    alone = Candidate(whole, shape, shape.T, device)
    candidates = {("one GPU", "-"): alone}
    for way in WAYS if ways is None else ways:
        spread = parallelize_module(
            experts(shape, recipe, device), mesh, ExpertParallel(**WAYS[way])
        )
        for scaling, tokens in (("weak", shape.T), ("strong", shape.T // D)):
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
        sent = sent_mib(shape, tokens, D, WAYS[way]) if way in WAYS else 0.0
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(QUICK))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results, too")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    rows = []
    for name in options.shapes:
        for recipe in options.recipes:
            rows += measure(name, recipe, mesh, options.rounds)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    device = torch.device(options.device)
    text = "\n\n".join(
        [
            "# parallel",
            "Experts spread over GPUs, beside one GPU with all of them (`benchmarks/parallel.py` "
            "says what the columns are).",
            "\n".join(
                f"- {line}"
                for line in (
                    *timing.machine(device),
                    f"{mesh.size()} processes, commit {timing.git_commit()}",
                    f"{options.rounds} rounds, medians; range: slowest less fastest round; "
                    f"capacity factor {CAPACITY} where there is one",
                )
            ),
            table(rows),
        ]
    )
    if dist.get_rank() == 0:
        print(text)
        if options.write:
            path = timing.RESULTS / f"parallel_{timing.slug(device)}.md"
            path.write_text(text + "\n")
            print(f"written: {path.relative_to(timing.RESULTS.parent.parent)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
