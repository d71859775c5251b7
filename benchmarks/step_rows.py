"""What benchmarks.compiled_vs_eager found out: rows, as a table, as JSON and in plots."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from benchmarks import timing
from benchmarks.shapes import LAUNCH_BOUND
from benchmarks.step_cases import BASELINE, CACHED, Candidate

QUESTION = "What do torch.compile, CUDA graphs, FP8 and our ops gain in forward and backward?"
VARIED = 4  # steps with other group sizes, in which nothing may be compiled again


@dataclass(frozen=True)
class Row:
    """What one candidate of one case came to. failure: the sentence that says why there is less.

    share: speed beside the baseline's in the same rounds. On CPU the host is the device and torch
    counts no memory, so host time, launches and peak memory are None there.
    """

    kind: str
    case: str
    tokens: int
    candidate: Candidate
    commit: str
    microseconds: timing.Spread | None = None
    share: timing.Spread | None = None
    host_microseconds: float | None = None
    launches: int | None = None
    peak_bytes: int | None = None
    compile_seconds: float | None = None
    recompiles: int | None = None
    graph_breaks: int | None = None
    failure: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        us = self.microseconds
        return None if us is None else 1e6 * self.tokens / us.median

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Row":
        fields.pop("tokens_per_second")
        for name in ("microseconds", "share"):
            fields[name] = fields[name] and timing.Spread(**fields[name])
        return cls(**(fields | {"candidate": Candidate(**fields["candidate"])}))


TITLES = ["case", "tokens", "candidate", "step us", "(quartiles)", "tokens/s", "speed"]
TITLES += ["(quartiles)", "host us", "launches", "peak GiB", "compile s", "recompiles", "breaks"]


def cells(row: Row) -> list[str]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def spread(value: timing.Spread | None, form: str) -> list[str]:
        if value is None:
            return ["", ""]
        return [f"{value.median:{form}}", f"({value.low:{form}} {value.high:{form}})"]

    return [
        row.case,
        str(row.tokens),
        str(row.candidate),
        *spread(row.microseconds, ".1f"),
        text(row.tokens_per_second, ",.0f"),
        *spread(row.share, ".2f"),
        text(row.host_microseconds, ".0f"),
        text(row.launches, "d"),
        text(row.peak_bytes and row.peak_bytes / 2**30, ".2f"),
        text(row.compile_seconds, ".1f"),
        text(row.recompiles, "d"),
        text(row.graph_breaks, "d"),
        row.failure or "",
    ]


def table(rows: Sequence[Row]) -> str:
    return timing.markdown([[*TITLES, "what failed"], *map(cells, rows)])


# Okabe and Ito's colours, told apart by all kinds of eyes; the mode is told by the mark.
COLOURS = {
    "torch bf16": "#56B4E9",
    "loop bf16": "#000000",
    "ours bf16": "#0072B2",
    "ours block": "#D55E00",
    "ours own": "#999999",
    "ours current": "#009E73",
    "ours delayed": "#CC79A7",
    "ours mxfp8": "#E69F00",
}
MARKS = {"eager": "o", "compiled": "s", "graphs": "^", "one graph": "D", "eager graph": "v"}


def plot(
    rows: Sequence[Row], of: Callable[[Row], timing.Spread | None], label: str, path: Path
) -> bool:
    """One line a case, one mark a candidate. False where no row has such a value."""
    values = [(row, spread) for row in rows if (spread := of(row)) is not None]
    if not values:
        return False
    mpl.use("Agg")
    names = list(dict.fromkeys(row.case for row, _ in values))
    series = list(dict.fromkeys(series_of(row) for row, _ in values))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.75 * len(names)), layout="constrained")
    for row, spread in values:
        offset = 0.7 * ((series.index(series_of(row)) + 0.5) / len(series) - 0.5)
        axes.errorbar(
            spread.median,
            names.index(row.case) + offset,
            xerr=[[spread.median - spread.low], [spread.high - spread.median]],
            color=colour_of(series_of(row)),
            marker=MARKS[row.candidate.mode],
            markerfacecolor="white" if row.candidate.mode == "eager" else None,
            markeredgecolor="black" if row.candidate.cached else None,
            markersize=7,
            linewidth=1,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9) if high < 4 * low else (1, 2, 5)
    axes.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=subs, numticks=20))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xlabel(label)
    axes.grid(alpha=0.3, axis="x")
    for i in range(len(names) - 1):
        axes.axhline(i + 0.5, color="0.8", linewidth=1)
    line = mpl.lines.Line2D
    kinds = dict.fromkeys(name.removesuffix(CACHED) for name in series)
    handles = [line([], [], color=colour_of(kind), linewidth=4, label=kind) for kind in kinds]
    if len(kinds) < len(series):
        edge = {"color": "white", "linestyle": "", "marker": "s", "markeredgecolor": "black"}
        handles.append(line([], [], label=CACHED.strip(", "), **edge))
    for mode in dict.fromkeys(row.candidate.mode for row, _ in values):
        face = "white" if mode == "eager" else None
        look = {"color": "0.3", "linestyle": "", "marker": MARKS[mode], "markerfacecolor": face}
        handles.append(line([], [], label=mode, **look))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def colour_of(series: str) -> str:
    return COLOURS[series.removesuffix(CACHED)]


def series_of(row: Row) -> str:
    return f"{row.candidate.implementation} {row.candidate.precision}"


def exactly(value: float | None) -> timing.Spread | None:
    return None if value is None else timing.Spread(value, value, value)


PLOTS: dict[str, tuple[Callable[[Row], timing.Spread | None], str]] = {
    # The launch-bound shape is up to 15 times as fast in one graph: see host time instead.
    "speed": (
        lambda row: None if row.case.startswith(LAUNCH_BOUND.name) else row.share,
        f"speed beside {BASELINE} (log scale)",
    ),
    "memory": (
        lambda row: exactly(row.peak_bytes and row.peak_bytes / 2**30),
        "peak memory, GiB (log scale)",
    ),
    "host": (
        lambda row: exactly(row.host_microseconds),
        "host time of a step, us (log scale)",
    ),
}


def header(device: torch.device, rounds: int, rows: Sequence[Row]) -> list[str]:
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    cold = "cold L2" if device.type == "cuda" else "warm caches"
    return [
        *timing.machine(device),
        f"commit {commits}, {date.today().isoformat()}",
        timing.command("compiled_vs_eager"),
        "forward + backward (prompts and tokens: forward)",
        f"{rounds} interleaved rounds, medians with (quartiles), {cold}; "
        f"speed: beside {BASELINE}, paired by round",
        f"recompiles: in {VARIED} more steps with other group sizes; compile s: without caches",
        'peak GiB: the cache of "cached weight" is among it; '
        "models of Hugging Face's keep no other weight for inference, and refresh it in each step "
        "of training",
    ]


def with_other_cases(rows: list[Row], path: Path) -> list[Row]:
    """These rows, after those of other cases that were written before."""
    if not path.exists():
        return rows
    measured = {row.case for row in rows}
    written = [Row.from_json(fields) for fields in json.loads(path.read_text())["rows"]]
    return [row for row in written if row.case not in measured] + rows


def write(rows: Sequence[Row], lines: list[str], stem: Path) -> None:
    """JSON with every number, Markdown with the table, and the plots."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    as_json = {"about": lines, "rows": [row.to_json() for row in rows]}
    written = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    written[0].write_text(json.dumps(as_json, indent=1) + "\n")
    about = "\n".join(f"- {line}" for line in lines)
    written[1].write_text(f"# compiled_vs_eager\n\n{QUESTION}\n\n{about}\n\n{table(rows)}\n")
    for name, (of, label) in PLOTS.items():
        path = stem.with_name(f"{stem.name}_{name}.png")
        if plot(rows, of, label, path):
            written.append(path)
    print("written:", *written)
