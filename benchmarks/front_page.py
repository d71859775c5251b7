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
from benchmarks.plots import grouped_bars

RECORD = Path(__file__).parent / "public_record_h100_layer.csv"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "h100_layers.png"
MODELS = {
    "qwen3_30b": "Qwen3-30B",
    "dsv3_ep8": "DeepSeek-V3, 32 experts",
    "mixtral": "Mixtral 8x7B",
    "sonic_7b": "128 experts of 256",
    "sonic_30b": "128 experts of 1024",
}
TORCH, SONIC = "torch bf16, compiled", "SonicMoE bf16"
# Colours of Okabe and Ito, told apart by all kinds of eyes.
LAYERS = {
    TORCH: ("torch, BF16", "#999999"),
    SONIC: ("SonicMoE, BF16", "#E69F00"),
    "ours bf16, compiled": ("ours, BF16", "#56B4E9"),
    "ours block, compiled": ("ours, FP8", "#D55E00"),
    "ours block, cached weight, compiled": ("ours, FP8, weights cached", "#882255"),
}
LOSSES = {"ours bf16, compiled": "BF16 compiled", "ours block, compiled": "FP8 compiled"}
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
    heads = [name for name, _ in LAYERS.values()]
    cells = [["an expert layer, forward and backward", *heads]]
    for name in names:
        first = rows[name, TORCH]
        values = [f"{float(first['ms']):.2f} ms, {float(first['kept_gib']):.2f} GiB"]
        values += [cell(rows.get((name, layer))) for layer in LAYERS if layer != TORCH]
        cells.append([MODELS[name], *values])
    held_out = {row["run"]: row["held_out"] for row in losses}
    steps = losses[0]["steps"]
    cells.append([f"held-out loss of a language model after {steps} steps"])
    cells[-1] += [held_out.get(LOSSES.get(layer, ""), "") for layer in LAYERS]
    return timing.markdown(cells)


def plot(names: Sequence[str], rows: Rows, title: str, path: Path) -> None:
    """Bars of each model: how fast a layer is, and what it keeps."""
    mpl.use("Agg")
    size = 2.5 + 2.5 * max(3, len(names)), 3.6
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    colours = dict(LAYERS.values())
    models = [MODELS[name].replace(", ", "\n") for name in names]
    for axes, column in ((left, "speed"), (right, "kept_gib")):
        series = {
            label: {
                model: float(rows[name, layer][column])
                for name, model in zip(names, models, strict=True)
                if (name, layer) in rows
            }
            for layer, (label, _) in LAYERS.items()
        }
        grouped_bars(axes, models, series, colours)
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
