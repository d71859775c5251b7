# SPDX-License-Identifier: Apache-2.0
"""The README's table and picture, and a table of docs/performance.md, from records of one GPU.

    python -m benchmarks.front_page  # anywhere: prints two tables, draws the picture

They are made of benchmarks/results/, written on the GPU by

    python -m benchmarks.bench_training_step --write  # steps of an expert layer
    python -m benchmarks.compiled_vs_eager --write    # steps of a model
    python -m benchmarks.bench_lora --compile         # steps of adapters

Speed is torch's time over a layer's, the median of the rounds of one run.
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks import timing
from benchmarks.plots import SERIES, fit_numbers, grouped_bars, label

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "layers.png"
MODELS = ("qwen3_30b", "dsv3_ep8", "sonic_7b")
WHOLE_MODEL = "hf_qwen3_30b_step"
TORCH = "torch bf16, compiled"
SONIC_MOE, HUB = "SonicMoE bf16, eager", "SonicMoE (hub) bf16, eager"
# By the name of a row: a series of pictures.
LAYERS = {
    TORCH: "torch bf16",
    SONIC_MOE: "SonicMoE bf16",
    "ours bf16, compiled": "ours bf16",
    "ours block, compiled": "ours block",
    "ours block, cached weight, compiled": "ours block, cached weight",
}
HEADS = [SERIES[series][0] for series in LAYERS.values()]
HEADS[1] += ", eager"
HEADS[-1] = 'ours, FP8, `weights="both"`'
Rows = dict[tuple[str, str], dict[str, str]]  # by model and layer
Row = tuple[str, str, *tuple[tuple[float, float], ...]]  # weights; of torch and of ours: ms, GiB


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps(gpu: str) -> Rows:
    """By model and layer; SonicMoE's is the faster of its two packages."""
    rows = read(timing.RESULTS / f"bench_training_step_{gpu}.csv")
    found = {(row["shape"], row["layer"]): row for row in rows}
    for shape in {shape for shape, layer in found if layer == HUB}:
        both = (found[shape, SONIC_MOE], found[shape, HUB])
        found[shape, SONIC_MOE] = min(both, key=lambda row: float(row["forward_backward_ms"]))
    return found


def table(gpu: str) -> str:
    """The README's: torch's time and ours, of adapters, a whole model, and layers."""
    cells = [["a training step", "torch, BF16", "ours", "`weights=`"]]
    rows = (
        _adapters("", "qwen3_30b", "ours, FP8", "fp8", gpu),
        _adapters("gpt_oss_20b_", "gpt_oss_20b", "ours, MXFP4", "mxfp4", gpu),
        _whole_model(gpu),
        *_layers(gpu),
    )
    for what, weights, *pair in rows:
        times = (f"{ms:.1f} ms, {gib:.1f} GiB" for ms, gib in pair)
        cells.append([what, *times, f'`"{weights}"`'])
    return timing.markdown(cells)


def _layers(gpu: str) -> list[Row]:
    """Steps of an expert layer with AdamW; ours with weights that the optimizer writes in FP8."""
    rows, ours = steps(gpu), [*LAYERS][-1]
    pairs = ([rows[name, layer] for layer in (TORCH, ours)] for name in MODELS)
    times = (((float(row["ms"]), float(row["peak_gib"])) for row in pair) for pair in pairs)
    return [
        (f"an expert layer of {label(name)}", "both", *pair)
        for name, pair in zip(MODELS, times, strict=True)
    ]


def _whole_model(gpu: str) -> Row:
    """The same of a model."""
    record = json.loads((timing.RESULTS / f"compiled_vs_eager_{gpu}.json").read_text())
    found = {
        tuple(row["candidate"].values())[:3]: row
        for row in record["rows"]
        if row["case"] == WHOLE_MODEL
    }
    by = ("torch", "bf16"), ("ours", "block, cached weight")
    pair = (found[*one, "compiled"] for one in by)
    times = ((row["microseconds"]["median"] / 1e3, row["peak_bytes"] / 2**30) for row in pair)
    return f"{label(WHOLE_MODEL)}, four layers: all of their weights", "both", *times


def _adapters(record: str, model: str, ours: str, weights: str, gpu: str) -> Row:
    """A step of PEFT's adapters over BF16, and of ours over frozen experts."""
    text = (timing.RESULTS / f"bench_lora_{record}compiled_{gpu}.md").read_text()
    lines = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("|"))
    found = {tuple(map(str.strip, line[:2])): line for line in lines}
    pair = (found["attention and experts", by] for by in ("PEFT, BF16", ours))
    times = ((float(row[2]), float(row[5])) for row in pair)
    return f"{label(model)}, four layers: LoRA on attention and experts", weights, *times


def whole_table(rows: Rows) -> str:
    """Every layer of a run, for docs/performance.md."""
    cells = [["a training step of an expert layer", *HEADS]]
    for name in MODELS:
        of_layers = [rows[name, layer] for layer in LAYERS]
        peaks = [f"{float(row['peak_gib']):.1f} GiB" for row in of_layers]
        whole = _speeds(of_layers, "ms", "times_torch")
        cells.append([label(name), *map(", ".join, zip(whole, peaks, strict=True))])
        parts = _speeds(of_layers, "forward_backward_ms", "forward_backward_times_torch")
        cells.append(["its forward and backward", *parts])
    return timing.markdown(cells)


def _speeds(of_layers: Sequence[Mapping[str, str]], ms: str, times: str) -> list[str]:
    torchs, *others = of_layers
    return [f"{float(torchs[ms]):.2f} ms", *(f"{float(row[times]):.2f}x" for row in others)]


def plot(rows: Rows, title: str, path: Path) -> None:
    """Bars of each model: how fast a whole step is, and its forward and backward."""
    mpl.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axes, column in ((left, "times_torch"), (right, "forward_backward_times_torch")):
        bars = {
            series: {name: float(rows[name, layer][column]) for name in MODELS}
            for layer, series in LAYERS.items()
        }
        grouped_bars(axes, MODELS, bars)
    left.set_title("whole steps with AdamW, times compiled torch's grouped_mm", fontsize=10)
    right.set_title("forward and backward, times compiled torch's grouped_mm", fontsize=10)
    figure.suptitle(f"{title} (more is better)", fontsize=11)
    handles, _ = left.get_legend_handles_labels()
    names = [head.replace("`", "") for head in HEADS]
    figure.legend(handles, names, loc="outside lower center", ncols=len(LAYERS), frameon=False)
    fit_numbers(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="nvidia_h200", help="the end of files' names")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    rows = steps(options.gpu)
    print(f"{table(options.gpu)}\n\n{whole_table(rows)}")
    print(f"\nsteps: {', '.join(sorted({row['commit'] for row in rows.values()}))}")
    card = options.gpu.split("_")[1].upper()
    plot(rows, f"A training step of an expert layer on one {card}", options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
