"""Bars, as the plots of benchmarks/results/ and of the README have them."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes


def grouped_bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    *,
    horizontal: bool = False,
) -> None:
    """Draw a bar for each value: its number beside it, bars of a group side by side.

    Args:
        axes: where to.
        groups: names, in order.
        series: label -> group -> value; a series need not have every group.
        colours: label -> colour.
        horizontal: for many groups, or long names. The first group is then at the top.
    """
    draw = axes.barh if horizontal else axes.bar
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        shift = (i - (len(series) - 1) / 2) * width
        present = [(g, name) for g, name in enumerate(groups) if name in values]
        places = [g + shift for g, _ in present]
        lengths = [values[name] for _, name in present]
        bars = draw(places, lengths, 0.9 * width, color=colours[label], label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.spines[["top", "right"]].set_visible(False)
    if horizontal:
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
    else:
        axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="y" if horizontal else "x", length=0)
