# SPDX-License-Identifier: Apache-2.0
"""Paired timings, and the reports they end in.

Clocks, power and neighbours drift while a benchmark runs: the same product can differ by a tenth
from one minute to the next. So candidates take turns, and what is compared is each round's ratio to
the first candidate (the roof, or the plain way), never two medians from different minutes.
"""

import argparse
import csv
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 256 << 20  # several times any L2 cache there is
PAGE = 2 << 20
STEADY = 1.2  # upper quartile over lower quartile; beyond it a row is marked as unsteady

Call = Callable[[], Any]


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def steady(self) -> bool:
        return self.high <= STEADY * self.low


@dataclass(frozen=True)
class Timing:
    """One candidate's times, and its speed as a share of the roof's, paired by round."""

    microseconds: Spread
    share: Spread


def time_paired(
    candidates: Mapping[str, Call],
    device: torch.device,
    rounds: int = 20,
    capture: bool = True,
    roofs: int = 1,
) -> dict[str, Timing]:
    """Time candidates in turn, a round each, after a warm-up.

    On CPU a sample is one call. On a GPU it is one replay of a CUDA graph of the call (of the call
    itself where capture is false), between two events, with the L2 cache overwritten before it.

    Args:
        candidates: what to time, by name. Each allocates its own outputs.
        device: the candidates' device.
        rounds: samples a candidate.
        capture: whether the calls can be, and shall be, captured in CUDA graphs.
        roofs: so many of the first candidates bound the others: what they are compared with is the
            slowest of these in each round.
    """
    timed = _rounds_on_gpu if device.type == "cuda" else _rounds_on_cpu
    return _beside_roofs(timed(candidates, rounds, capture), roofs)


def time_sustained(
    candidates: Mapping[str, Call], seconds: float, rounds: int = 3, roofs: int = 1
) -> dict[str, Timing]:
    """Time candidates on a GPU in turn, each back to back for so long, in every round.

    After a fraction of a second the power limit, not the highest clock, sets the speed. The L2
    cache keeps what a call leaves in it, as it does in training.
    """
    replays = {name: _captured(call).replay for name, call in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in _turns(candidates, rounds):
        few = _back_to_back(replays[name], 5)
        samples[name].append(_back_to_back(replays[name], math.ceil(1e6 * seconds / few)))
    return _beside_roofs(samples, roofs)


def time_nodes(candidates: Mapping[str, Call], rounds: int = 20) -> dict[str, Timing]:
    """Time candidates on a GPU in turn, each by what one more call adds to a CUDA graph of many.

    What launching a graph costs is not in it, and every call finds in the L2 cache what the one
    before left there.
    """
    few, many = 10, 50
    for call in candidates.values():
        call()
    graphs = {name: [_captured(call, n) for n in (few, many)] for name, call in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in _turns(candidates, rounds):
        less, more = (_back_to_back(graph.replay, 1) for graph in graphs[name])
        samples[name].append((more - less) / (many - few))
    return _beside_roofs(samples, roofs=1)


class Turn:
    """Times are taken within it, by one process at a time, while all of a batch do nothing else."""

    def __init__(self, together: Any, lock: Any) -> None:
        self.together, self.lock = together, lock

    def __enter__(self) -> None:
        self.together.wait()
        self.lock.acquire()

    def __exit__(self, *failure: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.lock.release()
        self.together.wait()


def side_by_side(
    measure: Callable[[str, Turn], list[Any]], names: Sequence[str], at_once: int
) -> list[Any]:
    """The rows of each name, from a process of its own; so many compile and tune at once."""
    context = torch.multiprocessing.get_context("spawn")
    rows: list[Any] = []
    with context.Manager() as manager:
        for first in range(0, len(names), at_once):
            batch = names[first : first + at_once]
            turn = Turn(manager.Barrier(len(batch)), manager.Lock())
            with ProcessPoolExecutor(len(batch), mp_context=context) as pool:
                for measured in pool.map(partial(_in_turn, measure, turn), batch):
                    rows += measured
    return rows


def _in_turn(measure: Callable[[str, Turn], list[Any]], turn: Turn, name: str) -> list[Any]:
    try:
        return measure(name, turn)
    except BaseException:
        turn.together.abort()  # the others wait for nobody
        raise


def _back_to_back(call: Call, times: int) -> float:
    """Microseconds a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / times


def _beside_roofs(samples: Mapping[str, Sequence[float]], roofs: int) -> dict[str, Timing]:
    bound = [max(round_) for round_ in zip(*list(samples.values())[:roofs], strict=True)]
    return {
        name: Timing(Spread.of(own), Spread.of([a / b for a, b in zip(bound, own, strict=True)]))
        for name, own in samples.items()
    }


def _turns(candidates: Mapping[str, Call], rounds: int) -> list[str]:
    """Every candidate once a round; every other round backwards, so that neighbours change."""
    names = list(candidates)
    return [name for r in range(rounds) for name in (names if r % 2 == 0 else names[::-1])]


def _rounds_on_cpu(
    candidates: Mapping[str, Call], rounds: int, capture: bool
) -> dict[str, list[float]]:
    for call in candidates.values():
        for _ in range(2):
            call()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in _turns(candidates, rounds):
        call = candidates[name]
        start = time.perf_counter_ns()
        call()
        samples[name].append((time.perf_counter_ns() - start) / 1e3)
    return samples


def _captured(call: Call, times: int = 1) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def _rounds_on_gpu(
    candidates: Mapping[str, Call], rounds: int, capture: bool
) -> dict[str, list[float]]:
    for call in candidates.values():
        for _ in range(3):
            call()
    calls = dict(candidates)
    if capture:
        # Each graph has a memory pool of its own, so no candidate writes what another one did.
        calls = {name: _captured(call).replay for name, call in candidates.items()}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    torch.cuda.synchronize()
    for name in _turns(calls, rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()  # also hides the launch from the clock
        begin.record()
        calls[name]()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: [1e3 * begin.elapsed_time(end) for begin, end in pairs]
        for name, pairs in events.items()
    }


def _bytes_to_copy(moved: int, device: torch.device) -> torch.Tensor:
    """Half of what a copy moves, on a GPU rounded up to whole 2 MiB pages.

    Copies of other sizes are slower there at times (H200, torch 2.11: 2.7 against 4.2 TB/s) and
    would be too low a roof. So would a page more be in the caches of a CPU.
    """
    page = PAGE if device.type == "cuda" else 1
    return torch.randint(256, (-(-moved // 2 // page) * page,), dtype=torch.uint8, device=device)


def copy_of(moved: int, device: torch.device) -> Call:
    """A copy that reads and writes so many bytes in all."""
    source = _bytes_to_copy(moved, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def clone_of(moved: int, device: torch.device) -> Call:
    """The same into memory that is allocated in each call, as the outputs of an op are."""
    return _bytes_to_copy(moved, device).clone


def supported(candidates: Mapping[str, Call], report: "Report") -> dict[str, Call]:
    """The alternatives that run here; the report says which do not, and why."""
    running: dict[str, Call] = {}
    for name, call in candidates.items():
        try:
            call()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            report.note(f"{name} left out: {str(error).splitlines()[0]}")
        else:
            running[name] = call
    return running


def arguments_of_one_case(description: str | None, rounds: int = 20) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=rounds, help="samples a candidate")
    write = argparse.BooleanOptionalAction
    parser.add_argument("--write", action=write, default=True, help="the table to results/, too")
    return parser


def arguments(description: str | None, rounds: int = 20) -> argparse.ArgumentParser:
    """Those, and the ones of a benchmark with many cases."""
    parser = arguments_of_one_case(description, rounds)
    parser.add_argument("--quick", action="store_true", help="a few telling cases only")
    parser.add_argument(
        "--merge", action="store_true", help="keep the rows of results/ for cases not run now"
    )
    return parser


def command(benchmark: str) -> str:
    """The line of a report that says how it was made."""
    return f"command: python -m {shlex.join([f'benchmarks.{benchmark}', *sys.argv[1:]])}"


def device_for(name: str, needs_kernel: Callable[[torch.device], object]) -> torch.device:
    """The device, or the end of the program in one line where our ops do not run on it."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is visible to torch")
    if device.index is not None:
        torch.cuda.set_device(device)
    try:
        needs_kernel(device)
    except RuntimeError as error:
        sys.exit(f"not on {name}: {str(error).splitlines()[0]}")
    return device


@dataclass(frozen=True)
class Row:
    """One candidate of one case, measured at a commit.

    work: the FLOPs or bytes of a call. record: the best share that public implementations reached.
    """

    case: Mapping[str, str | int]
    candidate: str
    work: float
    timing: Timing
    commit: str
    record: float | None = None


@dataclass
class Report:
    """Collects rows, prints them as a table and writes them to results/ as Markdown and CSV.

    Args:
        name: of the benchmark's module, and of the files.
        module: the former, where a benchmark has several reports.
        question: what the table answers, one sentence.
        unit: "TFLOP/s" (work in FLOPs) or "GB/s" (work in bytes).
    """

    name: str
    question: str
    unit: str
    device: torch.device
    rounds: int
    module: str | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        case: Mapping[str, str | int],
        timings: Mapping[str, Timing],
        work: float,
        record: float | None = None,
    ) -> None:
        commit = git_commit()
        self.rows += [
            Row(case, name, work, timing, commit, record) for name, timing in timings.items()
        ]

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def finish(
        self,
        write: bool,
        mean_by: Sequence[str] = (),
        in_mean: Callable[[Mapping[str, str | int]], bool] = lambda case: True,
        merge: bool = False,
    ) -> None:
        """Print, and write if asked.

        mean_by: the columns that geometric means are taken by. merge: keep the written rows of all
        cases that were not measured now.
        """
        stem = f"{self.name}_{slug(self.device)}"
        if merge:
            self._merge(RESULTS / f"{stem}.csv")
        header = "\n".join(f"- {line}" for line in self._header())
        parts = [f"# {self.name}", self.question, header, markdown(self._cells())]
        if mean_by:
            title = "Geometric means of the shares"
            parts += [f"## {title}", markdown(self._mean_cells(mean_by, in_mean))]
        text = "\n\n".join(parts) + "\n"
        print(text)
        if not write:
            return
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{stem}.md").write_text(text)
        with (RESULTS / f"{stem}.csv").open("w", newline="") as file:
            file.writelines(f"# {line}\n" for line in self._header())
            csv.writer(file, lineterminator="\n").writerows(self._numbers())
        print(f"written: benchmarks/results/{stem}.md and .csv")

    def _merge(self, path: Path) -> None:
        """Put this run's cases in the place of the same ones in a file, and new ones after them."""
        by_case: dict[tuple[str, ...], list[Row]] = {}
        for rows in (self._written(path), self.rows):
            cases: dict[tuple[str, ...], list[Row]] = {}
            for row in rows:
                cases.setdefault(tuple(map(str, row.case.values())), []).append(row)
            by_case |= cases
        self.rows = [row for rows in by_case.values() for row in rows]

    def _written(self, path: Path) -> list[Row]:
        if not path.exists():
            return []
        with path.open(newline="") as file:
            head, *lines = csv.reader(line for line in file if not line.startswith("#"))
        case_columns = list(self.rows[0].case)
        if head != [*case_columns, *self._number_columns()]:
            raise SystemExit(f"{path.name} has other columns: measure again without --merge")
        rows = []
        for line in lines:
            values = dict(zip(head, line, strict=True))
            us, share = (
                Spread(*(float(values[column]) for column in (name, f"{name}_low", f"{name}_high")))
                for name in ("us", "share")
            )
            case = {column: values[column] for column in case_columns}
            work = float(values[self.unit]) * us.median * self._per
            record = float(values["record"]) if values["record"] else None
            timing = Timing(us, share)
            rows.append(Row(case, values["candidate"], work, timing, values["commit"], record))
        return rows

    @property
    def _per(self) -> float:
        """Work a microsecond in one of the unit."""
        return 1e6 if self.unit == "TFLOP/s" else 1e3

    def _rate(self, row: Row) -> float:
        return row.work / row.timing.microseconds.median / self._per

    def _header(self) -> list[str]:
        how = f"{self.rounds} interleaved rounds, medians with (quartiles)"
        unsteady = sum(not row.timing.microseconds.steady for row in self.rows)
        cold = "CUDA graph replays, cold L2" if self.device.type == "cuda" else "warm caches"
        return [
            *machine(self.device),
            f"{_of_rows(self.rows)}, {date.today().isoformat()}",
            command(self.module or self.name),
            f"{how}; {cold}; share: speed beside each case's first row, paired by round",
            f"{unsteady} of {len(self.rows)} rows are unsteady (~): quartiles over {STEADY} apart",
            *self.notes,
        ]

    @property
    def _has_records(self) -> bool:
        return any(row.record is not None for row in self.rows)

    def _cells(self) -> list[list[str]]:
        case_columns = list(self.rows[0].case)
        record = ["record"] if self._has_records else []
        times = ["us", "(quartiles)", self.unit, "share", "(quartiles)", *record]
        cells = [[*case_columns, "candidate", *times]]
        for row in self.rows:
            us, share = row.timing.microseconds, row.timing.share
            cells.append(
                [
                    *(str(row.case[column]) for column in case_columns),
                    row.candidate,
                    f"{us.median:.1f}" + ("" if us.steady else " ~"),
                    f"({us.low:.1f} {us.high:.1f})",
                    f"{self._rate(row):.3g}",
                    f"{share.median:.3f}",
                    f"({share.low:.3f} {share.high:.3f})",
                ]
                + ([_or_blank(row.record)] if record else [])
            )
        return cells

    def _number_columns(self) -> list[str]:
        times = ["us", "us_low", "us_high", self.unit, "share", "share_low", "share_high"]
        return ["candidate", *times, "record", "commit"]

    def _numbers(self) -> list[list[Any]]:
        case_columns = list(self.rows[0].case)
        numbers: list[list[Any]] = [[*case_columns, *self._number_columns()]]
        for row in self.rows:
            us, share = row.timing.microseconds, row.timing.share
            values = [us.median, us.low, us.high, self._rate(row)]
            values += [share.median, share.low, share.high]
            case = [row.case[column] for column in case_columns]
            measured = [f"{value:.5g}" for value in values]
            numbers.append([*case, row.candidate, *measured, _or_blank(row.record), row.commit])
        return numbers

    def _mean_cells(
        self, by: Sequence[str], in_mean: Callable[[Mapping[str, str | int]], bool]
    ) -> list[list[str]]:
        means: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            if in_mean(row.case):
                key = (*(str(row.case[column]) for column in by), row.candidate)
                means.setdefault(key, []).append(row)
        beside = ["cases", "share / record", "the least"] if self._has_records else []
        cells = [[*by, "candidate", "cases", "share", *beside]]
        for key, rows in means.items():
            share = _geometric_mean([row.timing.share.median for row in rows])
            cells.append(
                [*key, str(len(rows)), f"{share:.3f}", *(_of_record(rows) if beside else [])]
            )
        return cells


def page(title: str, about: str, benchmark: str, device: torch.device, table: str) -> str:
    """A report of one table, with how it was made."""
    made = (*machine(device), command(benchmark), f"commit {git_commit()}, date {date.today()}")
    return "\n".join([f"# {title}", "", about, "", *(f"- {line}" for line in made), "", table, ""])


def replace_rows(
    benchmark: str, columns: Sequence[str], rows: Sequence[Sequence[str]], how: str, same: int = 1
) -> None:
    """Replace a record's rows of the same first cells; Markdown shows all that it has then."""
    device = torch.device("cuda")
    path = RESULTS / f"{benchmark}_{slug(device)}.csv"
    measured, kept = {tuple(row[:same]) for row in rows}, []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in [*csv.reader(file)][1:] if tuple(row[:same]) not in measured]
    cells = [columns, *kept, *rows]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(cells)
    header = "\n".join(f"- {line}" for line in [*machine(device), command(benchmark)])
    title = f"# {benchmark} on {torch.cuda.get_device_name(device)}"
    path.with_suffix(".md").write_text("\n\n".join([title, header, how, markdown(cells)]) + "\n")
    print(f"written: {path} and .md")


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def _of_record(rows: Sequence[Row]) -> list[str]:
    """How many rows have a record, their mean share of it, and the least with its first column."""
    by_row = [(row.timing.share.median / row.record, row) for row in rows if row.record]
    if not by_row:
        return ["", "", ""]
    least, row = min(by_row, key=lambda pair: pair[0])
    mean = _geometric_mean([share for share, _ in by_row])
    return [str(len(by_row)), f"{mean:.3f}", f"{least:.3f} {next(iter(row.case.values()))}"]


def _or_blank(record: float | None) -> str:
    return "" if record is None else f"{record:.3f}"


def _of_rows(rows: Sequence[Row]) -> str:
    commits = list(dict.fromkeys(row.commit for row in rows))
    if len(commits) == 1:
        return f"commit {commits[0]}"
    return f"commits {', '.join(commits)} (each row's is in the CSV); below, the last run"


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as plain text too. The first row is its head."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (cells[0], rule, *cells[1:])
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def machine(device: torch.device) -> list[str]:
    busy = os.getloadavg()[0]
    wait = os.environ.get("OMP_WAIT_POLICY", "default")
    cpu = (
        f"CPU: {_cpu_model()}, {torch.get_num_threads()} threads, OMP_WAIT_POLICY {wait}, "
        f"load average {busy:.1f}"
    )
    torch_version = f"torch {torch.__version__}"
    if device.type == "cpu":
        return [cpu, torch_version]
    gpu = f"GPU: {torch.cuda.get_device_name(device)}"
    return [gpu, cpu, f"{torch_version}, CUDA {torch.version.cuda}"]


def slug(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def _git(*words: str) -> str | None:
    """What git prints, or None where there is no git or no repository."""
    try:
        run = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


@cache
def git_commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    # Results that this very run replaces do not make the measured code another one.
    changes = _git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
    return f"{commit}-dirty" if changes else commit
