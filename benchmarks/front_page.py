"""The table and the picture of the README, from what benchmarks/results/ has of one GPU.

    python -m benchmarks.bench_expert_layer --write  # on the GPU
    python -m benchmarks.demo --write                # on the GPU: the losses
    python -m benchmarks.front_page                  # anywhere: prints the table, draws the picture

Layers of others come from benchmarks/public_record_h100_layer.csv. Speed is torch's time of our own
run over a layer's time, for these too: torch launched without a CUDA graph would flatter them.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks import timing
from benchmarks.plots import SERIES, grouped_bars, label

RECORD = Path(__file__).parent / "public_record_h100_layer.csv"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "h100_layers.png"
MODELS = ("qwen3_30b", "dsv3_ep8", "mixtral", "sonic_7b", "sonic_30b")
TORCH, SONIC = "torch bf16, compiled", "SonicMoE bf16"
OURS = ("ours bf16, compiled", "ours block, compiled", "ours block, cached weight, compiled")
LAYERS = {layer: layer.removesuffix(", compiled") for layer in (TORCH, SONIC, *OURS)}
LOSSES = {"ours bf16, compiled": "BF16", "ours block, compiled": "FP8"}
MODES = ("eager", "compiled", "compiled + graphs")  # a run of the demo in each
Rows = dict[tuple[str, str], dict[str, str]]  # by model and layer


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def layers(gpu: str) -> tuple[list[str], Rows]:
    """The models that were measured, in the order of MODELS, and what was measured of them."""
    ours = read(timing.RESULTS / f"bench_expert_layer_{gpu}.csv")
    measured = {row["shape"] for row in ours}
    others = [row for row in read(RECORD) if row["layer"] == SONIC and row["shape"] in measured]
    rows = {(row["shape"], row["layer"]): row for row in ours + others}
    for (name, _), row in rows.items():
        row["speed"] = str(float(rows[name, TORCH]["ms"]) / float(row["ms"]))
        row["kept_gib"] = str(float(row["kept_mib"]) / 1024)
    return [name for name in MODELS if name in measured], rows


def demos(gpu: str) -> list[Path]:
    """Where the losses may be: of this GPU, else of an H200."""
    return [timing.RESULTS / f"demo_{name}.csv" for name in (gpu, "nvidia_h200")]


def cell(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    return f"{float(row['speed']):.2f}x, {float(row['kept_gib']):.2f} GiB"


def table(names: Sequence[str], rows: Rows, losses: Sequence[dict[str, str]]) -> str:
    heads = [SERIES[series][0] for series in LAYERS.values()]
    cells = [["an expert layer, forward and backward", *heads]]
    for name in names:
        first = rows[name, TORCH]
        values = [f"{float(first['ms']):.2f} ms, {float(first['kept_gib']):.2f} GiB"]
        values += [cell(rows.get((name, layer))) for layer in LAYERS if layer != TORCH]
        cells.append([label(name), *values])
    steps = losses[0]["steps"]
    cells.append([f"held-out loss of a language model after {steps} steps"])
    cells[-1] += [held_out(LOSSES.get(layer), losses) for layer in LAYERS]
    return timing.markdown(cells)


def held_out(precision: str | None, losses: Sequence[dict[str, str]]) -> str:
    """The range over the demo's runs, or nothing."""
    runs = {f"{precision} {mode}" for mode in MODES}
    found = sorted(row["held_out"] for row in losses if row["run"] in runs)
    return f"{found[0]} to {found[-1]}" if found else ""


def plot(names: Sequence[str], rows: Rows, title: str, path: Path) -> None:
    """Bars of each model: how fast a layer is, and what it keeps."""
    mpl.use("Agg")
    size = 2.5 + 2.5 * max(3, len(names)), 3.6
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    for axes, column in ((left, "speed"), (right, "kept_gib")):
        bars = {
            series: {
                name: float(rows[name, layer][column]) for name in names if (name, layer) in rows
            }
            for layer, series in LAYERS.items()
        }
        grouped_bars(axes, names, bars)
    left.set_title("speed, times compiled torch's grouped_mm (more is better)", fontsize=10)
    right.set_title("memory kept for the backward, GiB (less is better)", fontsize=10)
    figure.suptitle(title, fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LAYERS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="nvidia_h100_80gb_hbm3", help="the end of files' names")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    names, rows = layers(options.gpu)
    demo = next(path for path in demos(options.gpu) if path.exists())
    losses = read(demo)
    print(table(names, rows, losses))
    commits = sorted({row["commit"] for row in rows.values() if "commit" in row})
    print(f"\nlayers: {options.gpu}, commit {', '.join(commits)}")
    print(f"losses: {demo.stem.removeprefix('demo_')}, commit {losses[0]['commit']}")
    card = options.gpu.split("_")[1].upper()
    title = f"An expert layer on one {card}, forward and backward"
    plot(names[:4], rows, title, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
