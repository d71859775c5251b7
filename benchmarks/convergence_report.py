# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.convergence has recorded: intervals of paired differences, a page, a picture.

A difference is that of two runs of one seed. Its interval is Student's, at 95%, over the seeds that
both modes have.
"""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import timing

# What a reader calls a mode, and the colours of those that are drawn: Okabe and Ito's. The first of
# a corpus' modes is what the others stand beside.
LABELS = {
    "bf16": "BF16",
    "fp8": "FP8",
    "both": 'FP8, `weights="both"`',
    "qat": "MXFP4 from the start",
    "qat_last": "FP8, then MXFP4 for the last tenth",
    "qat_after": "FP8, rounded to MXFP4 after training",
    "nudged": "BF16, initial weights times 1 + 2^-20",
    "again": "FP8, trained once more",
    "bf16_wgrad": "FP8, wgrad in BF16",
    "bf16_ends": "FP8, first and last layer in BF16",
    "bf16_input": "FP8, x in BF16",
    "bf16_weight": "FP8, weights in BF16",
    "bf16_grad_output": "FP8, gradients in BF16",
    "e5m2_grad_output": "FP8, gradients in e5m2",
    "bf16_restarted": "BF16, stopped at half and restarted",
    "fp8_restarted": "FP8, stopped at half and restarted",
    "both_restarted": 'FP8, `weights="both"`, stopped at half and restarted',
}
RESTARTED = {f"{mode}_restarted": mode for mode in ("bf16", "fp8", "both")}
COLOURS = {"bf16": "#56B4E9", "fp8": "#D55E00", "both": "#882255", "nudged": "#009E73"}
COLOURS |= {"qat": "#0072B2", "qat_last": "#E69F00", "qat_after": "#CC79A7"}
# Student's t: 97.5% lie below it with 1, 2, ... degrees of freedom.
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


class Record(NamedTuple):
    """A row: the mean loss of the last steps, and what is known of the held-out text then."""

    corpus: str
    tokens: int
    mode: str
    seed: int
    step: int
    loss: float
    held_out: float = math.nan
    accuracy: float = math.nan
    lines: float = math.nan
    tokens_per_second: int = 0

    def cells(self) -> list[str]:
        measures = (self.held_out, self.accuracy, self.lines)
        known = ["" if math.isnan(x) else repr(x) for x in measures]  # all digits
        speed = str(self.tokens_per_second or "")
        return [*map(str, self[:5]), f"{self.loss:.5f}", *known, speed]


class Interval(NamedTuple):
    """A mean, and how far from it the true one may lie."""

    mean: float
    half: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Interval":
        """Of at least two samples; of one nothing is known.

        >>> Interval.of([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.484...)
        """
        n = len(samples)
        if n == 1:
            return cls(samples[0], math.nan)
        t = T_975[min(n - 1, len(T_975)) - 1]
        return cls(statistics.mean(samples), t * statistics.stdev(samples) / math.sqrt(n))

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


Runs = Mapping[str, Mapping[int, list[Record]]]
"""Rows by mode and seed."""


def recorded(path: Path) -> list[Record]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        head, *lines = csv.reader(line for line in file if not line.startswith("#"))
    assert tuple(head) == Record._fields, path
    return [
        Record(
            *(corpus, int(tokens), mode, int(seed), int(step), float(loss)),
            *(float(x or math.nan) for x in measures),
            tokens_per_second=int(speed or 0),
        )
        for corpus, tokens, mode, seed, step, loss, *measures, speed in lines
    ]


def made_by(path: Path) -> list[str]:
    """The lines about machines and corpora, each once."""
    with path.open() as file:
        return list(dict.fromkeys(line[2:].strip() for line in file if line.startswith("#")))


def runs_of(rows: Sequence[Record]) -> Runs:
    runs: dict[str, dict[int, list[Record]]] = {}
    for row in rows:
        runs.setdefault(row.mode, {}).setdefault(row.seed, []).append(row)
    return {mode: runs[mode] for mode in LABELS if mode in runs}


def write(path: Path) -> str:
    """The page of a CSV, and its pictures, beside it; the page's text."""
    rows = recorded(path)
    parts = ["# Losses of FP8 beside BF16", "\n".join(f"- {line}" for line in made_by(path))]
    for corpus, tokens in sorted({(row.corpus, row.tokens) for row in rows}):
        runs = runs_of([row for row in rows if (row.corpus, row.tokens) == (corpus, tokens)])
        name = f"{path.stem}_{tokens / 1e6:g}M"
        if "bf16" not in runs:
            name += f"_beside_{next(iter(runs))}"
        parts += [f"## {tokens / 1e6:g} M tokens a run", timing.markdown(table(runs))]
        parts += [*restarts(runs), spread(runs), f"![Losses]({name}.png)"]
        plot(runs, path.with_name(f"{name}.png"))
    text = "\n\n".join(parts) + "\n"
    path.with_suffix(".md").write_text(text)
    return text


def differences(runs: Runs, mode: str, measure: str, relative: bool) -> Interval:
    """Of the last row's measure from the first mode's: in percent of it, or in points of 100."""
    found, first = [], next(iter(runs.values()))
    for seed, rows in runs[mode].items():
        if seed in first:
            a, b = (getattr(r[-1], measure) for r in (rows, first[seed]))
            found.append(100 * (a / b - 1) if relative else 100 * (a - b))
    return Interval.of(found) if found else Interval(math.nan, math.nan)


def table(runs: Runs) -> list[list[str]]:
    first = next(iter(runs))
    head = (
        f"|seeds|held-out loss|beside {LABELS[first]}, %|tokens right, %|points|lines right, %|"
        "points|tokens/s"
    )
    cells = [head.split("|")]
    for mode, of_seeds in runs.items():
        last = [rows[-1] for rows in of_seeds.values()]
        row = [LABELS[mode], str(len(last)), f"{statistics.mean(r.held_out for r in last):.4f}"]
        beside = mode != first
        row.append(str(differences(runs, mode, "held_out", True)) if beside else "")
        for measure in ("accuracy", "lines"):
            row.append(f"{100 * statistics.mean(getattr(r, measure) for r in last):.2f}")
            row.append(str(differences(runs, mode, measure, False)) if beside else "")
        speeds = [r.tokens_per_second for r in last if r.tokens_per_second]
        row.append(f"{statistics.median(speeds):,.0f}" if speeds else "")
        cells.append(row)
    return cells


def spread(runs: Runs) -> str:
    """A sentence on what pairing is worth, where there is a spread."""
    first = next(iter(runs))
    last = [rows[-1].held_out for rows in runs[first].values()]
    if len(last) < 2:
        return "One seed: nothing is known of the spread."
    deviation = 100 * statistics.stdev(last) / statistics.mean(last)
    return (
        f"± is Student's 95% interval over paired seeds. Unpaired, {LABELS[first]}'s held-out "
        f"losses of {len(last)} seeds have a standard deviation of {deviation:.2f}%."
    )


def restarts(runs: Runs) -> list[str]:
    """A sentence of each mode that was restarted, where its runs were also made in one piece."""
    sentences = []
    for restarted, mode in RESTARTED.items():
        seeds = sorted(runs.get(restarted, {}).keys() & runs.get(mode, {}).keys())
        if seeds:
            curves = [
                [[row.cells()[4:-1] for row in runs[name][seed]] for name in (restarted, mode)]
                for seed in seeds
            ]
            equal = sum(a == b for a, b in curves)
            sentences.append(
                f"{LABELS[restarted]}: {equal} of {len(seeds)} runs have the losses of the run in "
                "one piece, to the last digit recorded."
            )
    return sentences


def plot(runs: Runs, path: Path) -> None:
    """Training losses above; below held-out losses beside the first mode's, with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    first = next(iter(runs))
    alone = len(runs[first]) == 1  # else one seed of a mode would look as sure as a mean
    drawn = {m: r for m, r in runs.items() if m in COLOURS and (len(r) > 1 or alone)}
    for i, (mode, of_seeds) in enumerate(drawn.items()):
        label = LABELS[mode].replace("`", "")
        look = {"color": COLOURS[mode], "label": label}
        curves = list(of_seeds.values())
        millions = [row.tokens * row.step / curves[0][-1].step / 1e6 for row in curves[0]]
        means = [statistics.mean(row.loss for row in step) for step in zip(*curves, strict=True)]
        above.plot(millions, means, linewidth=3.5 - i, **look)
        if mode == first:
            continue
        known = [n for n, row in enumerate(curves[0]) if not math.isnan(row.held_out)]
        steps = [curves[0][n].step for n in known]
        apart = [differences(at_step(runs, step), mode, "held_out", True) for step in steps]
        # Side by side, or their bars would hide each other.
        places = [millions[n] + 0.008 * millions[-1] * (i - 2) for n in known]
        halves = [0.0 if math.isnan(d.half) else d.half for d in apart]
        look |= {"marker": "o", "capsize": 3, "linewidth": 1, "markersize": 4}
        below.errorbar(places, [d.mean for d in apart], yerr=halves, **look)
    seeds = " to ".join(str(n) for n in sorted({len(of_seeds) for of_seeds in drawn.values()}))
    above.set(ylabel="training loss", title="One seed" if alone else f"Means of {seeds} seeds")
    losses = [row.loss for row in next(iter(runs[first].values()))]
    above.set_ylim(0.9 * min(losses), statistics.quantiles(losses, n=20)[-1])
    below.axhline(0, color="0.5", linewidth=1)
    below.set(xlabel="million tokens", ylabel=f"held-out loss\nabove {LABELS[first]}'s, %")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def at_step(runs: Runs, step: int) -> Runs:
    """The runs as if they had ended there."""
    return {
        mode: {seed: [r for r in rows if r.step <= step] for seed, rows in of_seeds.items()}
        for mode, of_seeds in runs.items()
    }
