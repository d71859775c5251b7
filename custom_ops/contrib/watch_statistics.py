# SPDX-License-Identifier: Apache-2.0
"""The counts of a watched model, as a table.

E groups (experts).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import NamedTuple

from torch import Tensor

from grouped_linear.contrib.watch_counts import COLUMNS, MAXIMA
from grouped_linear.integrations.convert import aligned


class OperandStatistics(NamedTuple):
    """An operand of a layer's GEMMs, for one expert or for all. NaN: nobody counted it.

    Shares and errors are of a sample: 4 rows of each expert in a call, or as many as ``watch`` was
    given, others in each step.
    """

    layer: str
    """The name of the weight in the model."""
    role: str
    """input, weight or grad_output."""
    expert: int | None
    """None for all of them together."""
    tokens: float
    """Rows of the expert, summed over the calls; of a weight its rows in one call."""
    amax: float
    """The largest magnitude that was read."""
    scaled_amax: float
    """The largest magnitude that the largest scale can stand for, of 128 times as many rows: at
    least the amax of a block, and up to twice that where scales are powers of two. Blocks of zeros
    alone, as of padding's gradients, count nothing."""
    outlier: float
    """The larger of both, divided by the root mean square of the numbers that were read: of
    normally distributed numbers below 15."""
    underflow: float
    """The share of numbers that became zero and were not."""
    saturated: float
    """The share beyond the largest number of the format."""
    not_finite: float
    """The share that is infinite or NaN, before quantization or after."""
    error: float
    """The mean square of quantization's changes, divided by that of the numbers."""
    shared: float
    """The share of wgrad's blocks of 128 x 128 whose columns share a scale."""
    moved: float
    """Of a weight that learns the share of numbers that differ from those of the reading before."""


class Load(NamedTuple):
    """The tokens that the router sent to a layer's experts."""

    layer: str
    tokens: tuple[int, ...]
    """Rows of each expert, summed over the calls."""
    dropped: int
    """Rows past ``max_rows``, or a dispatcher's capacity."""

    @property
    def imbalance(self) -> float:
        """The most loaded expert's tokens, divided by the mean; 1 is even."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else nan

    @property
    def idle(self) -> list[int]:
        """The experts without a token."""
        return [e for e, tokens in enumerate(self.tokens) if not tokens]


#: Columns of the table and how they are printed.
PRINTED = {
    "tokens": "{:.0f}",
    "amax": "{:.3g}",
    "scaled_amax": "{:.3g}",
    "outlier": "{:.3g}",
    "underflow": "{:.2%}",
    "saturated": "{:.2%}",
    "not_finite": "{:.2%}",
    "error": "{:.1e}",
    "shared": "{:.0%}",
    "moved": "{:.1%}",
}


@dataclass(frozen=True)
class Statistics:
    """A reading of :class:`Watch`. ``print`` it, or write its rows, which are named tuples.

    Args:
        experts: of each layer, role and expert.
        operands: the same of all experts together.
        loads: of each layer.
        step: the number of the step at which it was read.
    """

    experts: tuple[OperandStatistics, ...]
    operands: tuple[OperandStatistics, ...]
    loads: tuple[Load, ...]
    step: int

    def worst(
        self, column: str = "outlier", role: str | None = None, n: int = 10
    ) -> list[OperandStatistics]:
        """The experts with the largest numbers of a column, the largest first."""
        found = [
            row
            for row in self.experts
            if role in (None, row.role) and getattr(row, column) == getattr(row, column)
        ]
        return sorted(found, key=lambda row: -getattr(row, column))[:n]

    def __str__(self) -> str:
        """A line for each layer and role, with the expert of the largest outlier; then loads."""
        lines = [["layer", "role", *PRINTED, "worst expert"]]
        for row in self.operands:
            of_experts = [r for r in self.experts if r[:2] == row[:2] and r.outlier > 0]
            worst = max(of_experts, key=lambda r: r.outlier, default=None)
            named = "" if worst is None else f"{worst.expert}: {worst.outlier:.3g}"
            values = ((form, getattr(row, column)) for column, form in PRINTED.items())
            printed = (form.format(v) if v == v else "" for form, v in values)  # NaN is not printed
            lines.append([row.layer, row.role, *printed, named])
        loads = [["layer", "tokens", "imbalance", "idle experts", "dropped"]]
        for load in self.loads:
            idle = ", ".join(map(str, load.idle[:8])) + ", ..." * (len(load.idle) > 8)
            total, imbalance = sum(load.tokens), f"{load.imbalance:.2f}"
            loads.append([load.layer, str(total), imbalance, idle or "none", str(load.dropped)])
        return "\n".join([f"step {self.step}", *aligned(lines), "", *aligned(loads)])


#: The counts of a layer; then the numbers of a weight that moved, and those that were looked at.
READ_COLUMNS = (*COLUMNS, "moved", "looked_at")


def statistics_of_layer(
    layer: str, role: str, numbers_ES: Tensor
) -> tuple[OperandStatistics, list[OperandStatistics]]:
    """Of all experts together, and of each; S are READ_COLUMNS, in float64 on the CPU."""
    maxima = list(map(READ_COLUMNS.index, MAXIMA))
    total_S = numbers_ES.sum(0)
    total_S[maxima] = numbers_ES[:, maxima].amax(0)
    # All experts are in each call.
    total_S[READ_COLUMNS.index("calls")] = numbers_ES[:, READ_COLUMNS.index("calls")].amax()
    of_each = [_of_numbers(layer, role, e, row.tolist()) for e, row in enumerate(numbers_ES)]
    return _of_numbers(layer, role, None, total_S.tolist()), of_each


def _of_numbers(
    layer: str, role: str, expert: int | None, numbers: Sequence[float]
) -> OperandStatistics:
    n = dict(zip(READ_COLUMNS, numbers, strict=True))

    def share(part: str, whole: str) -> float:
        return n[part] / n[whole] if n[whole] else nan

    largest = max(n["amax"], n["scaled_amax"])
    tokens = n["rows"] / max(n["calls"], 1) if role == "weight" else n["rows"]
    return OperandStatistics(
        layer=layer,
        role=role,
        expert=expert,
        tokens=tokens,
        amax=n["amax"] if n["numbers"] else nan,
        scaled_amax=n["scaled_amax"] if n["scaled_amax"] else nan,
        outlier=largest * sqrt(n["compared"] / n["square"]) if n["square"] else nan,
        underflow=share("underflow", "compared"),
        saturated=share("saturated", "compared"),
        not_finite=share("not_finite", "numbers"),
        error=share("error", "square"),
        shared=share("shared", "blocks"),
        moved=share("moved", "looked_at"),
    )
