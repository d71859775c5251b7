"""Fake kernel of the op that counts what quantization does to an operand.

T rows, E groups, K in_features, N out_features, F features of h, B = 128.
"""

import torch
from torch import Tensor

from grouped_linear.meta_kernels.quantize import check_form
from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    FP8,
    SCALE_ROW_MULTIPLE,
    Rules,
    ceil_div,
)

#: What is counted of each group and operand, as in csrc/watch.h.
COLUMNS = (
    "calls",
    "rows",
    "numbers",
    "compared",
    "amax",
    "scaled_amax",
    "underflow",
    "saturated",
    "not_finite",
    "error",
    "square",
    "blocks",
    "shared",
    "dropped",
)
#: Of which the largest is kept; the others add up.
MAXIMA = ("amax", "scaled_amax")
WATCH_COLUMNS = len(COLUMNS)
MAX_PARTS = 64


@torch.library.register_fake("grouped_linear::watch_operand_")
def watch_operand_(
    stats: Tensor,
    turn: Tensor,
    operand: int,
    x: Tensor | None,
    q: Tensor | None = None,
    scale: Tensor | None = None,
    offs: Tensor | None = None,
    rows: Tensor | None = None,
    q_rows: Tensor | None = None,
    gate_up: Tensor | None = None,
    weight: Tensor | None = None,
    scale_t: Tensor | None = None,
    routed: Tensor | None = None,
    most: int = 4,
    operand_t: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> None:
    """Stats [operands, parts, E, 14], written; x, q [T, K] or [E, N, K], gate_up [T, 2 F]."""
    rules = Rules("watch_operand_")
    _check_stats(rules, stats, turn, operand, operand_t)
    rules.check(1 <= most < 2**31, lambda: f"most must be between 1 and 2147483647, got {most}")
    given = [t for t in (x, q, gate_up, scale_t) if t is not None]
    rules.check(bool(given), lambda: "give x, q, gate_up or scale_t, got none of them")
    if x is not None:
        rules.dtype("x", x.dtype, ACTIVATIONS)
        rules.device("x", x, "stats", stats)
    if q is not None:
        rules.dtype("q", q.dtype, ACTIVATIONS if q.dtype not in FP8 else FP8)
        rules.device("q", q, "stats", stats)
    if scale is not None:
        _check_scale(rules, scale, q, stats)
    if offs is None:
        of_rows = (rows, q_rows, gate_up, weight, scale_t, routed)
        rules.check(
            all(t is None for t in of_rows), lambda: "rows need offs, only a weight has none"
        )
        _check_weight(rules, stats, x, q)
    else:
        for name, ends in (("offs", offs), ("routed", routed)):
            if ends is not None:
                rules.dim(name, ends, 1)
                rules.dtype(name, ends.dtype, (torch.int32,))
                rules.device(name, ends, "stats", stats)
                rules.same("E", name, ends.size(0), "stats", stats.size(2))
        if scale_t is not None:
            rules.dim("scale_t", scale_t, 2)
            rules.dtype("scale_t", scale_t.dtype, (torch.float32,))
            rules.device("scale_t", scale_t, "stats", stats)
            rules.features("K", scale_t.size(1))
        if x is not None or q is not None or gate_up is not None:
            _check_rows(rules, stats, x, q, rows, q_rows, gate_up, weight)
    check_form(rules, alpha, beta, limit, cubic)


def _check_stats(
    rules: Rules, stats: Tensor, turn: Tensor, operand: int, operand_t: int | None
) -> None:
    rules.dim("stats", stats, 4)
    rules.dtype("stats", stats.dtype, (torch.float64,))
    rules.check(
        1 <= stats.size(1) <= MAX_PARTS,
        lambda: f"stats must have between 1 and {MAX_PARTS} parts, got {stats.size(1)}",
    )
    rules.groups(stats.size(2))
    rules.check(
        stats.size(3) == WATCH_COLUMNS,
        lambda: f"stats must have {WATCH_COLUMNS} numbers of a group, got {stats.size(3)}",
    )
    rules.contiguous("stats", stats)
    rules.dim("turn", turn, 0)
    rules.dtype("turn", turn.dtype, (torch.int32,))
    rules.device("turn", turn, "stats", stats)
    _check_operand(rules, "operand", operand, stats)
    if operand_t is not None:
        _check_operand(rules, "operand_t", operand_t, stats)


def _check_operand(rules: Rules, name: str, operand: int, stats: Tensor) -> None:
    rules.check(
        0 <= operand < stats.size(0),
        lambda: f"{name} must be not negative and below {stats.size(0)}, got {operand}",
    )


def _check_scale(rules: Rules, scale: Tensor, q: Tensor | None, stats: Tensor) -> None:
    """[E], [ceil(K / B), round_up(rows, 4)] or [E, ceil(N / B), ceil(K / B)]."""
    rules.check(q is not None, lambda: "scale needs q")
    assert q is not None
    rules.dtype("scale", scale.dtype, (torch.float32,))
    rules.device("scale", scale, "stats", stats)
    E = stats.size(2)
    if scale.dim() == 1:
        rules.same("E", "scale", scale.size(0), "stats", E)
        return
    rules.dim("scale", scale, q.dim())
    blocks = ceil_div(q.size(-1), BLOCK)
    of_weight = q.dim() == 3
    rules.same("the number of K blocks", "scale", scale.size(2 if of_weight else 0), "q", blocks)
    if of_weight:
        rules.same("E", "scale", scale.size(0), "stats", E)
        n_blocks = ceil_div(q.size(1), BLOCK)
        rules.same("the number of N blocks", "scale", scale.size(1), "q", n_blocks)
    else:
        padded = SCALE_ROW_MULTIPLE * ceil_div(q.size(0), SCALE_ROW_MULTIPLE)
        rules.same("the number of scale rows", "scale", scale.size(1), "q", padded)


def _check_weight(rules: Rules, stats: Tensor, x: Tensor | None, q: Tensor | None) -> None:
    """[E, N, K]."""
    name, first = ("q", q) if x is None else ("x", x)
    assert first is not None
    rules.dim(name, first, 3)
    rules.same("E", name, first.size(0), "stats", stats.size(2))
    rules.features("N", first.size(1))
    rules.features("K", first.size(2))
    rules.count(name, "rows in all", stats.size(2) * first.size(1))
    if q is not None:
        rules.dim("q", q, 3)
        for d, letter in enumerate("ENK"):
            rules.same(letter, "q", q.size(d), name, first.size(d))


def _check_rows(
    rules: Rules,
    stats: Tensor,
    x: Tensor | None,
    q: Tensor | None,
    rows: Tensor | None,
    q_rows: Tensor | None,
    gate_up: Tensor | None,
    weight: Tensor | None,
) -> None:
    """What is measured has T rows of K features, before and after quantization."""
    name, T, K = "q", 0, 0
    if gate_up is not None:
        name = "gate_up"
        rules.dim(name, gate_up, 2)
        rules.dtype(name, gate_up.dtype, ACTIVATIONS)
        rules.device(name, gate_up, "stats", stats)
        T, columns = gate_up.shape
        rules.check(
            columns % 2 == 0,
            lambda: f"gate_up must have an even number of columns, got {columns}",
        )
        rules.features("F", columns // 2)
        rules.check(rows is None, lambda: "rows are of x, and gate_up has them already")
        rules.check(
            (x is None) == (weight is None), lambda: "a gradient of gate_up needs x and weight"
        )
        K = columns // 2 if x is None else columns
    else:
        rules.check(weight is None, lambda: "weight needs gate_up")
    if x is not None:
        rules.dim("x", x, 2)
        rules.features("K", x.size(1))
    if x is not None and gate_up is not None:
        assert weight is not None
        rules.dtype("gate_up", gate_up.dtype, (x.dtype,))
        rules.same("T", "x", x.size(0), "gate_up", T)
        rules.same("2 * F", "x", 2 * x.size(1), "gate_up", K)
        rules.dim("weight", weight, 1)
        rules.dtype("weight", weight.dtype, (torch.float32,))
        rules.device("weight", weight, "stats", stats)
        rules.same("T", "weight", weight.size(0), "gate_up", T)
    elif x is not None:
        name = "x"
        if rows is not None:
            rules.rows(rows, 1, "stats", stats)
        T, K = (x if rows is None else rows).size(0), x.size(1)
    elif gate_up is None:
        rules.check(rows is None, lambda: "rows need x")
    if q is None:
        rules.check(q_rows is None, lambda: "q_rows need q")
    else:
        rules.dim("q", q, 2)
        rules.features("K", q.size(1))
        if q_rows is not None:
            rules.rows(q_rows, 1, "stats", stats, "q_rows")
        of_rows = q if q_rows is None else q_rows
        if name == "q":
            T, K = of_rows.size(0), q.size(1)
        rules.same("T", "q" if q_rows is None else "q_rows", of_rows.size(0), name, T)
        rules.same("K", "q", q.size(1), name, K)
    rules.count(name, "rows", T)
