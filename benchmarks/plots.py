# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmarks/results/ and of the README: their bars, and names that readers know."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# What rows call "torch bf16" and so on: its name and its colour, one of Okabe and Ito's, told apart
# by all kinds of eyes.
SERIES = {
    "torch bf16": ("torch, BF16", "#999999"),
    "SonicMoE bf16": ("SonicMoE, BF16", "#E69F00"),
    "loop bf16": ("a loop over experts, BF16", "#000000"),
    "ours bf16": ("ours, BF16", "#56B4E9"),
    "ours block": ("ours, FP8", "#D55E00"),
    "ours block, cached weight": ("ours, FP8, weights cached", "#882255"),
    "ours own": ("ours, FP8, x's scales not shared", "#0072B2"),
    "ours current": ("ours, FP8, current scaling", "#009E73"),
    "ours delayed": ("ours, FP8, delayed scaling", "#CC79A7"),
    "ours mxfp8": ("ours, MXFP8", "#F0E442"),
}
# Where a model's experts are spread over GPUs: those of one.
MODELS = {
    "qwen3_30b": "Qwen3-30B-A3B",
    "qwen3_235b": "Qwen3-235B-A22B, 16 of 128 experts",
    "mixtral": "Mixtral 8x7B",
    "gptoss": "GPT-OSS 20B",
    "gpt_oss_20b": "GPT-OSS 20B",
    "dsv3": "DeepSeek-V3, 32 of 256 experts",
    "dsv3_32_experts": "DeepSeek-V3, 32 of 256 experts",
    "deepseek_v3": "DeepSeek-V3, 32 of 256 experts",
    "dsv3_ep8": "DeepSeek-V3, 32 of 256 experts",
    "dsv3_ep32": "DeepSeek-V3, 8 of 256 experts",
    "dsv3_ep64": "DeepSeek-V3, 4 of 256 experts",
    "kimi_k2_ep8": "Kimi K2, 48 of 384 experts",
    "sonic_7b": "128 experts, each 256 wide",
    "sonic_30b": "128 experts, each 1024 wide",
    "transformer": "2 layers of 64 experts, 1024 wide",
    "tiny": "8 small experts",
    "cpu_up": "8 experts, 512 to 1024 features",
    "cpu_many_groups": "64 experts, 256 to 256 features",
    "cpu_partial_blocks": "8 experts, 736 to 1440 features",
    "cpu_many_rows": "8 experts, 2048 to 512 features",
    "cpu_block": "8 experts, 256 wide",
    "cpu_transformer": "2 layers of 8 experts, 128 wide",
}
PARTS = {"up": ", gate and up", "down": ", down", "even": ", groups of one size"}
# What a section of a plot says of itself already, or the model's name.
UNSAID = ("", "like", "step", "training", "prompt", "token")


def label(name: str) -> str:
    """What a reader calls a shape or a case.

    >>> label("dsv3_ep8_up")
    'DeepSeek-V3, 32 of 256 experts, gate and up'
    """
    name = name.removeprefix("hf_")
    model = max((model for model in MODELS if f"{name}_".startswith(f"{model}_")), key=len)
    part = name[len(model) + 1 :]
    return MODELS[model] + ("" if part in UNSAID else PARTS[part])


def in_two_lines(name: str) -> str:
    return label(name).replace(", ", ",\n", 1)


def grouped_bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Mapping[str, float]],
    *,
    horizontal: bool = False,
) -> None:
    """Draw a bar for each value: its number beside it, bars of a group side by side.

    Args:
        axes: where to.
        groups: names of shapes or cases, in order.
        series: name in SERIES -> group -> value, also of other groups. A series takes no room in
            a group that it lacks.
        horizontal: for many groups, or long names. The first group is then at the top.
    """
    draw = axes.barh if horizontal else axes.bar
    width = 0.86 / len(series)
    here = [[name for name in series if group in series[name]] for group in groups]
    for name, values in series.items():
        present = [(g, group) for g, group in enumerate(groups) if group in values]
        places = [g + (here[g].index(name) - (len(here[g]) - 1) / 2) * width for g, _ in present]
        lengths = [values[group] for _, group in present]
        text, colour = SERIES[name]
        bars = draw(places, lengths, 0.9 * width, color=colour, label=text)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.spines[["top", "right"]].set_visible(False)
    if horizontal:
        axes.set_yticks(range(len(groups)), [in_two_lines(group) for group in groups])
        axes.set_ylim(len(groups) - 0.5, -0.5)
    else:
        axes.set_xticks(range(len(groups)), [in_two_lines(group) for group in groups])
    axes.tick_params(axis="y" if horizontal else "x", length=0)


def collide(figure: Figure) -> bool:
    """Whether two bars' numbers touch, or all but touch, as the figure is laid out now."""
    figure.draw_without_rendering()
    gap = figure.dpi / 72 * 1.5
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                across = abs(a.x0 + a.x1 - b.x0 - b.x1) / 2 < (a.width + b.width) / 2 + gap
                if across and abs(a.y0 + a.y1 - b.y0 - b.y1) < 0.8 * (a.height + b.height):
                    return True
    return False


def fit_numbers(figure: Figure) -> None:
    """Make bars' numbers smaller until none collides with another, or they could not be read."""
    texts = [text for axes in figure.axes for text in axes.texts]
    for size in (7.0, 6.5, 6.0, 5.5, 5.0, 4.5):
        for text in texts:
            text.set_fontsize(size)
        if not collide(figure):
            return


def losses_beside_the_first(curves: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Losses of each step above, and below how far they are from those of the first curve."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    baseline, first = next(iter(curves.items()))
    steps = range(1, len(first) + 1)
    for i, (name, curve) in enumerate(curves.items()):
        above.plot(steps, curve, label=name, linewidth=4 - i, color=f"C{i}")
        percent = [100 * (a / b - 1) for a, b in zip(curve, first, strict=True)]
        below.plot(steps, percent, color=f"C{i}")
    above.set_ylabel("loss")
    above.set_title(title, fontsize=10)
    above.legend(frameon=False)
    below.set(ylabel=f"above {baseline}, %", xlabel="step")
    figure.savefig(path, dpi=120)
