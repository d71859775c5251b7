"""The table, its lines and the picture of the README, from what is recorded of one GPU.

    python -m benchmarks.front_page  # anywhere: prints the table and lines, draws the picture

A model that benchmarks/public_record_h100_layer.csv has is shown from there: torch, SonicMoE and
ours side by side in one run. Others are from benchmarks/results/, made on the GPU by

    python -m benchmarks.bench_expert_layer --write
    python -m benchmarks.demo --write                # the losses

Speed is torch's time over a layer's, the median of the rounds of one run.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks import timing
from benchmarks.bench_expert_layer import TOKENS_AND_SIZES
from benchmarks.plots import SERIES, fit_numbers, grouped_bars, label

RECORD = Path(__file__).parent / "public_record_h100_layer.csv"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "h100_layers.png"
MODELS = ("qwen3_30b", "dsv3_ep8", "mixtral", "sonic_7b", "sonic_30b")
TORCH, SONIC = "torch bf16, compiled", "SonicMoE bf16"
CACHED = "ours block, cached weight, compiled"
OURS = ("ours bf16, compiled", "ours block, compiled", CACHED)
REQUANTIZED = "ours requantized, compiled"
LAYERS = {layer: layer.removesuffix(", compiled") for layer in (TORCH, SONIC, *OURS)}
LOSSES = ("BF16", "FP8")
MODES = ("eager", "compiled", "compiled + graphs")  # a run of the demo in each
Rows = dict[tuple[str, str], dict[str, str]]  # by model and layer


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def layers(gpu: str) -> tuple[list[str], Rows]:
    """The models that were measured, in the order of MODELS, and what was measured of them."""
    record = read(RECORD)
    recorded = {row["shape"] for row in record}
    others = [row for row in bench(gpu) if row["shape"] not in recorded]
    rows = {(row["shape"], row["layer"]): row for row in record + others}
    for (name, layer), row in rows.items():
        row["speed"] = row["times_torch"]
        row["kept_gib"] = str(float(row["kept_mib"]) / 1024)
        cached = cache_gib(name) if layer == CACHED else 0.0
        row["memory_gib"] = str(float(row["kept_gib"]) + cached)
    measured = {name for name, _ in rows}
    return [name for name in MODELS if name in measured], rows


def bench(gpu: str) -> list[dict[str, str]]:
    return read(timing.RESULTS / f"bench_expert_layer_{gpu}.csv")


def cache_gib(name: str) -> float:
    """An expert layer's weights in FP8, [E, N, K] and [E, K, N], with scales of 128 x 128."""
    _, hidden, intermediate, experts, _ = TOKENS_AND_SIZES[name]
    numbers = experts * 3 * intermediate * hidden
    return (2 * numbers + 4 * numbers / 128**2) / 2**30


def demos(gpu: str) -> list[Path]:
    """Where the losses may be: of this GPU, else of an H200."""
    return [timing.RESULTS / f"demo_{name}.csv" for name in (gpu, "nvidia_h200")]


def cell(name: str, layer: str, row: dict[str, str] | None) -> str:
    if row is None:
        return "not run"
    kept = f"{float(row['kept_gib']):.2f}"
    if layer == CACHED:
        kept += f" + {cache_gib(name):.2f}"
    return f"{float(row['speed']):.2f}x, {kept} GiB"


def table(names: Sequence[str], rows: Rows) -> str:
    heads = [SERIES[series][0] for series in LAYERS.values()]
    heads[-1] = 'ours, FP8, `weights="both"`'
    cells = [["an expert layer, forward and backward", *heads]]
    for name in names:
        first = rows[name, TORCH]
        values = [f"{float(first['ms']):.2f} ms, {float(first['kept_gib']):.2f} GiB"]
        values += [cell(name, layer, rows.get((name, layer))) for layer in LAYERS if layer != TORCH]
        cells.append([label(name), *values])
    return timing.markdown(cells)


def requantized_line(names: Sequence[str], gpu: str) -> str:
    """FP8 that keeps no weights for the backward, beside BF16 in the same run."""
    times = {(row["shape"], row["layer"]): float(row["times_torch"]) for row in bench(gpu)}
    commits = ", ".join(sorted({row["commit"] for row in bench(gpu)}))

    def of(layer: str) -> str:
        return ", ".join(f"{times[name, layer]:.2f}x" for name in names)

    return (
        "FP8 that keeps as little as BF16, `Float8BlockScaling(requantize_weights=True)`, is "
        f"{of(REQUANTIZED)} in the table's order, where BF16 is {of(OURS[0])} (a run of commit "
        f"{commits})"
    )


def losses_line(losses: Sequence[dict[str, str]]) -> str:
    steps, commit = losses[0]["steps"], losses[0]["commit"]
    ranges = " and ".join(f"{held_out(name, losses)} in {name}" for name in LOSSES)
    return (
        f"Held-out loss of a language model after {steps} steps, three runs each: {ranges} "
        f"(commit {commit})"
    )


def held_out(precision: str, losses: Sequence[dict[str, str]]) -> str:
    """The range over the demo's runs."""
    runs = {f"{precision} {mode}" for mode in MODES}
    found = sorted(row["held_out"] for row in losses if row["run"] in runs)
    return f"{found[0]} to {found[-1]}"


def plot(names: Sequence[str], rows: Rows, title: str, path: Path) -> None:
    """Bars of each model: how fast a layer is, and what it keeps."""
    mpl.use("Agg")
    size = 2.5 + 2.8 * max(3, len(names)), 3.6
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    for axes, column in ((left, "speed"), (right, "memory_gib")):
        bars = {
            series: {
                name: float(rows[name, layer][column]) for name in names if (name, layer) in rows
            }
            for layer, series in LAYERS.items()
        }
        grouped_bars(axes, names, bars)
    left.set_title("speed, times compiled torch's grouped_mm (more is better)", fontsize=10)
    right.set_title("kept for the backward, and caches, GiB (less is better)", fontsize=10)
    figure.suptitle(title, fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LAYERS), frameon=False)
    fit_numbers(figure)
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
    print(f"{table(names, rows)}\n\n{requantized_line(names, options.gpu)}.")
    print(f"\n{losses_line(losses)}.\n\nlosses: {demo.stem.removeprefix('demo_')}")
    for name in names:
        versions = {
            row.get("version") or row["commit"] for (n, _), row in rows.items() if n == name
        }
        print(f"{name}: {', '.join(sorted(versions))}")
    card = options.gpu.split("_")[1].upper()
    title = f"An expert layer on one {card}, forward and backward"
    plot(names[:4], rows, title, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
