# SPDX-License-Identifier: Apache-2.0
"""What do torch.compile, CUDA graphs, FP8 and our ops gain in forward and backward?

Three kinds of cases: one grouped linear layer (benchmarks/shapes.py), a whole expert layer (route,
gather, gate_up, SwiGLU, down, combine) and a small transformer; and where they are named, models of
Hugging Face's (benchmarks/hugging_face.py). Each is run eager, compiled, with CUDA graphs, through
our ops, torch's grouped_mm and a loop of F.linear, and each of these is a row:

    python -m benchmarks.compiled_vs_eager --quick --budget 300
    python -m benchmarks.compiled_vs_eager --cases dsv3_like tiny --recipes block current
    python -m benchmarks.compiled_vs_eager --plot  # measures nothing: what was written, as bars

A candidate that fails, or that there was no time for, is a row that says why. The inputs stay in
place, as a layer inside a compiled model finds them; CUDA graphs copy the output's gradient.

T tokens or rows, E groups, K in_features, N out_features, D width.
"""

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.alternatives import LoopedLinear
from benchmarks.hugging_face import HuggingFaceCase
from benchmarks.step_cases import (
    BASELINE,
    BF16,
    IMPLEMENTATIONS,
    MODES,
    RECIPES,
    Candidate,
    Case,
    candidates_for,
    chosen_cases,
)
from benchmarks.step_rows import VARIED, Row, header, plot, read, table, with_other_cases, write
from grouped_linear import DelayedScaling, update_scales

CLOSE = 0.2  # distance (Frobenius) between results, relative: a wrong product, not e5m2's rounding
LOOP_LIMIT = 32  # weights; with 128, a layer takes 12 s to compile and a minute for other sizes
WARM_UP = 4  # steps in which torch.compile compiles, and records CUDA graphs
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class MeasurementError(Exception):
    """Why a candidate has no numbers, in a sentence."""


def sentence(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return first if isinstance(error, MeasurementError) else f"{type(error).__name__}: {first}"


@dataclass
class Step:
    """A forward and backward that leaves no gradient behind, or a forward where there is no dy.

    An optimizer, if any, steps with that gradient first. Returns what candidates agree on.
    """

    forward: Callable[..., Any]
    module: nn.Module
    inputs: tuple[Tensor, ...]
    dy: list[Tensor]
    rolls_scales: bool
    optimizer: torch.optim.Optimizer | None = None

    def __call__(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        if not self.dy:
            with torch.no_grad():
                return outputs_of(self.forward, self.inputs)[0]
        outputs = outputs_of(self.forward, self.inputs)[: len(self.dy)]
        torch.autograd.backward(
            outputs, [dy.to(y.dtype) for dy, y in zip(self.dy, outputs, strict=True)]
        )
        result = self.inputs[0].grad if self.inputs[0].requires_grad else outputs[0].detach()
        assert result is not None
        if self.optimizer is not None:
            self.optimizer.step()
        for leaf in (*self.inputs, *self.module.parameters()):
            leaf.grad = None
        if self.rolls_scales:
            update_scales(self.module)
        return result


def outputs_of(forward: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs = forward(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_since_reset(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """For warm-ups and captures alike: the default stream cannot be captured.

    autograd adds up a leaf's gradients on the stream that the leaf was first used on. Where that
    is another one than is captured, the capture fails.
    """
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def one_graph(step: Step) -> timing.Call:
    """The whole step as one CUDA graph, captured now.

    With a cuBLAS workspace of its own: cudagraph trees free the one that is there, in later
    candidates, and the graph would go on writing to it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def matrices(module: nn.Module) -> Iterator[Tensor]:
    """The parameters, an expert a matrix: stacked or not, they come in the same order."""
    for parameter in module.parameters():
        yield from parameter if parameter.dim() == 3 else [parameter]


def adamw_of(module: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with its moments."""
    on_gpu = next(module.parameters()).is_cuda
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True, capturable=on_gpu)
    for p in module.parameters():
        p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def recompiled() -> int:
    return int(counters["stats"]["unique_graphs"])


@dataclass
class Bench:
    """Runs the candidates of one case until a time.monotonic() of `deadline`."""

    case: Case
    device: torch.device
    rounds: int
    deadline: float
    progress: Callable[[str], None] = lambda what: None
    rows: dict[Candidate, Row] = field(default_factory=dict)
    modules: dict[tuple[str, str], nn.Module] = field(default_factory=dict)
    optimizers: dict[tuple[str, str], torch.optim.Optimizer] = field(default_factory=dict)
    # Of modules, cached copies, and optimizers' moments.
    held_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    calls: dict[Candidate, timing.Call] = field(default_factory=dict)
    warm_up_seconds: dict[Candidate, float] = field(default_factory=dict)
    dy: list[Tensor] = field(default_factory=list)
    expected: Tensor | None = None

    def run(self, candidates: Sequence[Candidate]) -> list[Row]:
        case = self.case
        commit = timing.git_commit()
        for candidate in candidates:
            self.rows[candidate] = Row(case.kind, case.name, case.tokens, candidate, commit)
        self.inputs = case.inputs(self.device)
        for x in self.inputs:
            # Where a layer stands in a model, its input is the graph's own: nothing copies it.
            torch._dynamo.mark_static_address(x, guard=False)
        for candidate in candidates:
            self.progress(f"{case.name}: {candidate}")
            self.attempt(self.prepare, candidate)
        if self.calls:
            self.progress(f"{case.name}: timing")
            self.time()
        for candidate in self.calls:
            self.attempt(self.inspect, candidate)
        return list(self.rows.values())

    def attempt(self, phase: Callable[[Candidate], None], candidate: Candidate) -> None:
        """Turn whatever goes wrong, also out of memory, into the candidate's row."""
        try:
            if time.monotonic() > self.deadline:
                raise MeasurementError(f"no time was left to {phase.__name__} it")
            phase(candidate)
        except Exception as error:
            self.note(candidate, failure=sentence(error))

    def note(self, candidate: Candidate, **fields: Any) -> None:
        self.rows[candidate] = replace(self.rows[candidate], **fields)

    def module(self, candidate: Candidate) -> nn.Module:
        """One module for all modes, with the first one's weights."""
        key = (candidate.implementation, candidate.precision)
        if key not in self.modules:
            before = allocated(self.device)
            previous = torch.get_default_dtype()
            torch.set_default_dtype(previous if self.case.kind == "model" else BF16)
            try:
                with self.device:
                    self.modules[key] = self.case.module(candidate)
            finally:
                torch.set_default_dtype(previous)
            first = next(iter(self.modules.values()))
            if isinstance(self.case, HuggingFaceCase):  # frozen experts quantize what they load
                self.modules[key].load_state_dict(first.state_dict())
                if self.case.learns:
                    self.optimizers[key] = adamw_of(self.modules[key])
            else:
                with torch.no_grad():
                    both = zip(matrices(self.modules[key]), matrices(first), strict=True)
                    for own, other in both:
                        own.copy_(other)
            self.held_bytes[key] = allocated(self.device) - before
        return self.modules[key]

    def prepare(self, candidate: Candidate) -> None:
        """Build, compile, warm up, check the result; note peak memory and graph breaks."""
        mode, captured = MODES[candidate.mode]
        looped = candidate.implementation == "loop"
        if captured and self.device.type != "cuda":
            raise MeasurementError("a CUDA graph holds no step of a CPU")
        if captured and looped:
            raise MeasurementError("the host reads the group sizes, which no CUDA graph can hold")
        module = self.module(candidate)
        weights = [len(m.weights) for m in module.modules() if isinstance(m, LoopedLinear)]
        if mode is not None and max(weights, default=0) > LOOP_LIMIT:
            raise MeasurementError(f"a loop over {max(weights)} weights takes minutes to compile")
        if self.case.roots and not self.dy:
            with torch.no_grad():
                outputs = outputs_of(module, self.inputs)[: self.case.roots]
            self.dy = [torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in outputs]

        gc.collect()
        before = allocated(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        counters.clear()
        forward: Callable[..., Any] = module
        if mode is not None:

            def forward(*inputs: Tensor) -> Any:
                return module(*inputs)

            # Dynamo keeps what it compiled with the code: with a code of its own no candidate
            # searches what it compiled for the others, nor counts toward their recompile limit.
            forward.__code__ = forward.__code__.replace(co_name=candidate.implementation)
            forward = torch.compile(forward, fullgraph=not looped, mode=mode)
        rolls_scales = isinstance(candidate.recipe, DelayedScaling)
        optimizer = self.optimizers.get((candidate.implementation, candidate.precision))
        step = Step(forward, module, self.inputs, self.dy, rolls_scales, optimizer)
        call: timing.Call = step
        start = time.perf_counter()
        for _ in range(WARM_UP):
            call()
        synchronize(self.device)
        self.warm_up_seconds[candidate] = time.perf_counter() - start
        if captured:
            call = one_graph(step)
        result = call().float().clone()
        peak = peak_since_reset(self.device)
        if peak is not None:
            held = self.held_bytes[candidate.implementation, candidate.precision]
            self.note(candidate, peak_bytes=peak - before + held)
        if mode is not None:
            self.note(candidate, graph_breaks=sum(counters["graph_break"].values()))
        if self.expected is None:
            self.expected = result
        norm = torch.linalg.vector_norm
        distance = float(norm(result - self.expected) / norm(self.expected))
        if not distance < CLOSE:
            raise MeasurementError(f"its result is {distance:.3g} away from the first candidate's")
        self.calls[candidate] = call

    def time(self) -> None:
        try:
            timings = timing.time_paired(
                {str(candidate): call for candidate, call in self.calls.items()},
                self.device,
                self.rounds,
                capture=False,
            )
        except Exception as error:
            for candidate in self.calls:
                self.note(candidate, failure=f"timing: {sentence(error)}")
            self.calls.clear()
            return
        for candidate, measured in zip(self.calls, timings.values(), strict=True):
            us = measured.microseconds
            paired = measured.share if BASELINE in self.calls else None
            self.note(candidate, microseconds=us, share=paired)
            if MODES[candidate.mode][0] is not None:
                seconds = self.warm_up_seconds[candidate] - 1e-6 * WARM_UP * us.median
                self.note(candidate, compile_seconds=max(0.0, seconds))

    def inspect(self, candidate: Candidate) -> None:
        """Host time and launches of a step; then recompiles with other group sizes."""
        call = self.calls[candidate]
        seconds = []
        for _ in range(self.rounds):
            synchronize(self.device)
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        synchronize(self.device)
        with torch.profiler.profile(acc_events=True) as profile:
            call()
            synchronize(self.device)
        launches = sum(event.name.startswith(LAUNCHES) for event in profile.events())
        if self.device.type == "cuda":
            host = 1e6 * statistics.median(seconds)
            self.note(candidate, host_microseconds=host, launches=launches)
        if MODES[candidate.mode][0] is None:
            return
        before = recompiled()
        for step in range(1, VARIED + 1):
            with torch.no_grad():
                self.case.vary(self.inputs, step)
            call()
            self.note(candidate, recompiles=recompiled() - before)
            if time.monotonic() > self.deadline:
                raise MeasurementError(
                    f"no time was left after {step} steps with other group sizes"
                )


def measure(
    case: Case,
    candidates: Sequence[Candidate],
    device: torch.device,
    rounds: int,
    deadline: float,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """The rows of one case. Compiles from nothing, so that compile times are true."""
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        torch._inductor.config.patch(force_disable_caches=True),
        own_stream(device),
    ):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        rows = Bench(case, device, rounds, deadline, progress).run(candidates)
    torch._dynamo.reset()  # frees what CUDA graphs hold
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def compile_something(device: torch.device) -> None:
    """Start torch.compile once, so that the first candidate's compile time is its own."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    torch.compile(double)(torch.ones(3, device=device, requires_grad=True)).sum().backward()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = timing.arguments(__doc__, rounds=10)
    option = parser.add_argument
    option("--cases", nargs="+", help="names of cases (an unknown one lists them)")
    option("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    option("--recipes", nargs="*", choices=RECIPES, default=["block"], help="beside bf16, of ours")
    option("--cached", action="store_true", help="also with the weights in the cache")
    option("--modes", nargs="+", choices=MODES, help="default: all that the device has")
    option("--budget", type=float, help="seconds after which nothing more is started")
    option("--output-dir", type=Path, default=timing.RESULTS, help="for JSON, table and plots")
    option("--plot", action="store_true", help="draw all that was written, and measure nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    args = parse(arguments)
    if args.plot:
        for path in sorted(args.output_dir.glob("compiled_vs_eager_*.json")):
            plot(*read(path), path.with_suffix(".png"))
            print("written:", path.with_suffix(".png"))
        return []
    deadline = time.monotonic() + (args.budget or float("inf"))
    device = timing.device_for(args.device, compile_something)
    graphs = device.type == "cuda"
    modes = args.modes or [mode for mode in MODES if graphs or mode in ("eager", "compiled")]
    candidates = candidates_for(args.implementations, args.recipes, modes, args.cached)
    cases = chosen_cases(args.cases, device, args.quick)
    rows: list[Row] = []
    with tqdm(total=len(cases) * (len(candidates) + 1), disable=None, file=sys.stderr) as bar:

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        for case in cases:
            rows += measure(case, candidates, device, args.rounds, deadline, progress)
    stem = args.output_dir / f"compiled_vs_eager_{timing.slug(device)}"
    if args.merge:
        rows = with_other_cases(rows, stem.with_suffix(".json"))
    lines = header(device, args.rounds, rows)
    print(*(f"- {line}" for line in lines), "", table(rows), sep="\n")
    if args.write:
        write(rows, lines, stem)
    return rows


if __name__ == "__main__":
    main()
