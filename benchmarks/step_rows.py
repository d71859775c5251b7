# SPDX-License-Identifier: Apache-2.0
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
from benchmarks.plots import SERIES, fit_numbers, grouped_bars
from benchmarks.step_cases import BASELINE, Candidate

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


def series_of(row: Row) -> str:
    return f"{row.candidate.implementation} {row.candidate.precision}"


def beside_torch(
    rows: Sequence[Row], of: Callable[[Row], float | None]
) -> dict[str, dict[str, float]]:
    """Series -> case -> its value over torch's, compiled, or in a mode that torch has there."""
    of_torch: dict[str, Row] = {}
    for row in rows:
        preferred = row.candidate.mode == BASELINE.mode or row.case not in of_torch
        if series_of(row) == "torch bf16" and of(row) and preferred:
            of_torch[row.case] = row
    series: dict[str, dict[str, float]] = {name: {} for name in SERIES}
    for row in rows:
        torch_row = of_torch.get(row.case)
        if torch_row is None or row.candidate.mode != torch_row.candidate.mode:
            continue
        value, unit = of(row), of(torch_row)
        if value and unit and series_of(row) in series:
            series[series_of(row)][row.case] = value / unit
    return {name: values for name, values in series.items() if values}


def plotted_bytes(row: Row) -> int | None:
    """Peak memory where it is much: of some rows less than 0.1 GiB was recorded to a hundredth."""
    return row.peak_bytes if row.peak_bytes and row.peak_bytes > 2**30 / 10 else None


PANELS: dict[str, Callable[[Row], float | None]] = {
    "speed, times torch's grouped_mm\n(more is better)": lambda row: row.tokens_per_second,
    "peak memory, times torch's\n(less is better)": plotted_bytes,
}
SECTIONS = {
    "layer": "One grouped linear layer, forward and backward",
    "block": "An expert layer with its router, forward and backward",
    "model": "A small language model, forward and backward",
    "step": "Hugging Face's models, 2 to 4 layers: forward, backward and AdamW",
    "training": "Hugging Face's models, 2 to 4 layers: forward and backward",
    "prompt": "Hugging Face's models, 2 to 4 layers: reading a prompt",
    "token": "Hugging Face's models, 2 to 4 layers: a token of 64 sequences",
}


def section_of(row: Row) -> str:
    return row.case.rpartition("_")[2] if row.kind == "hugging face" else row.kind


def plot(rows: Sequence[Row], about: Sequence[str], path: Path) -> bool:
    """Bars of each case, time and memory side by side. False where nothing can be compared."""
    panels = {title: beside_torch(rows, of) for title, of in PANELS.items()}
    panels = {title: series for title, series in panels.items() if series}
    if not panels:
        return False
    mpl.use("Agg")
    drawn = next(iter(panels.values()))
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    for case, section in {row.case: section_of(row) for row in rows}.items():
        if case in drawn["torch bf16"]:
            sections[section].append(case)
    sections = {name: cases for name, cases in sections.items() if cases}
    heights = [len(cases) + 0.6 for cases in sections.values()]
    figure, all_axes = plt.subplots(
        len(sections),
        len(panels),
        figsize=(3 + 4 * len(panels), 1.8 + 0.13 * sum(heights) * (len(drawn) + 0.5)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
        sharex="col",
        sharey="row",
    )
    for row_of_axes, (section, cases) in zip(all_axes, sections.items(), strict=True):
        for axes, series in zip(row_of_axes, panels.values(), strict=True):
            here = {
                name: {c: v for c, v in of.items() if c in cases} for name, of in series.items()
            }
            grouped_bars(axes, cases, here, horizontal=True)
            axes.axvline(1, color="0.6", linewidth=0.8, zorder=0)
        row_of_axes[0].set_title(SECTIONS[section], loc="left", fontsize=10, fontweight="bold")
    for axes, title in zip(all_axes[-1], panels, strict=True):
        axes.set_xlabel(title)
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    machine = about[0].partition(": ")[2].partition(", OMP")[0]
    look = {"loc": "outside upper center", "ncols": 3, "frameon": False, "title_fontsize": 12}
    figure.legend(handles, labels, title=machine, **look)
    fit_numbers(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def header(device: torch.device, rounds: int, rows: Sequence[Row]) -> list[str]:
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    cold = "cold L2" if device.type == "cuda" else "warm caches"
    return [
        *timing.machine(device),
        f"commit {commits}, {date.today().isoformat()}",
        timing.command("compiled_vs_eager"),
        "forward + backward (prompts and tokens: forward; a step: and AdamW(fused=True))",
        f"{rounds} interleaved rounds, medians with (quartiles), {cold}; "
        f"speed: beside {BASELINE}, paired by round",
        f"recompiles: in {VARIED} more steps with other group sizes; compile s: without caches",
        'peak GiB: the cache of "cached weight" and a step\'s moments are among it; '
        "models of Hugging Face's keep no other weight for inference; rows named training, older, "
        "are steps without AdamW, which refresh the cache",
    ]


def with_other_cases(rows: list[Row], path: Path) -> list[Row]:
    """These rows, after those of other cases that were written before."""
    if not path.exists():
        return rows
    measured = {row.case for row in rows}
    written, _ = read(path)
    return [row for row in written if row.case not in measured] + rows


def read(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a JSON file, and the lines about them."""
    written = json.loads(path.read_text())
    return [Row.from_json(fields) for fields in written["rows"]], written["about"]


def write(rows: Sequence[Row], lines: list[str], stem: Path) -> None:
    """JSON with every number, Markdown with the table, and the plot."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    as_json = {"about": lines, "rows": [row.to_json() for row in rows]}
    written = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    written[0].write_text(json.dumps(as_json, indent=1) + "\n")
    about = "\n".join(f"- {line}" for line in lines)
    written[1].write_text(f"# compiled_vs_eager\n\n{QUESTION}\n\n{about}\n\n{table(rows)}\n")
    if plot(rows, lines, stem.with_suffix(".png")):
        written.append(stem.with_suffix(".png"))
    print("written:", *written)
