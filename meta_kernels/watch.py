# SPDX-License-Identifier: Apache-2.0
"""Fake kernel of the op that counts what quantization does to an operand.

T rows, E groups, K in_features, N out_features, F features of h, B = 128.
"""

from typing import Any

import torch

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    BLOCK,
    FP8,
    SCALE_ROW_MULTIPLE,
    Rules,
    ceil_div,
    fake,
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


@fake
def watch_operand_(rules: Rules, c: Any) -> None:
    """Stats [operands, parts, E, 14], written; x, q [T, K] or [E, N, K], gate_up [T, 2 F]."""
    _check_stats(rules, c)
    rules.check(1 <= c.most < 2**31, lambda: f"most must be between 1 and 2147483647, got {c.most}")
    given = [t for t in (c.x, c.q, c.gate_up, c.scale_t) if t is not None]
    rules.check(bool(given), lambda: "give x, q, gate_up or scale_t, got none of them")
    rules.dtype("x", *ACTIVATIONS)
    rules.device("x", "stats")
    if c.q is not None:
        rules.dtype("q", *(FP8 if c.q.dtype in FP8 else ACTIVATIONS))
        rules.device("q", "stats")
    if c.scale is not None:
        _check_scale(rules, c)
    if c.offs is None:
        of_rows = (c.rows, c.q_rows, c.gate_up, c.weight, c.scale_t, c.routed)
        rules.check(
            all(t is None for t in of_rows), lambda: "rows need offs, only a weight has none"
        )
        _check_weight(rules, c)
    else:
        for name, ends in (("offs", c.offs), ("routed", c.routed)):
            if ends is not None:
                rules.tensor(name, 1, torch.int32, "stats")
                rules.same("E", name, ends.size(0), "stats", c.stats.size(2))
        if c.scale_t is not None:
            rules.tensor("scale_t", 2, torch.float32, "stats")
            rules.features("K", c.scale_t.size(1))
        if c.x is None and c.q is None and c.gate_up is None:
            rules.check(c.weight is None, lambda: "weight needs gate_up")
            rules.check(c.rows is None, lambda: "rows need x")
            rules.check(c.q_rows is None, lambda: "q_rows need q")
        else:
            name, T, K = _check_rows(rules, c)
            rules.count(name, "rows", _check_quantized_rows(rules, c, name, T, K))
    rules.swiglu_form()


def _check_stats(rules: Rules, c: Any) -> None:
    rules.dim("stats", 4)
    rules.dtype("stats", torch.float64)
    operands, parts, E, columns = c.stats.shape
    rules.check(
        1 <= parts <= MAX_PARTS,
        lambda: f"stats must have between 1 and {MAX_PARTS} parts, got {parts}",
    )
    rules.groups(E)
    rules.check(
        columns == WATCH_COLUMNS,
        lambda: f"stats must have {WATCH_COLUMNS} numbers of a group, got {columns}",
    )
    rules.contiguous("stats")
    rules.tensor("turn", 0, torch.int32, "stats")
    rules.check(
        0 <= c.operand < operands,
        lambda: f"operand must be not negative and below {operands}, got {c.operand}",
    )


def _check_scale(rules: Rules, c: Any) -> None:
    """[E], [ceil(K / B), round_up(rows, 4)] or [E, ceil(N / B), ceil(K / B)]."""
    rules.check(c.q is not None, lambda: "scale needs q")
    rules.dtype("scale", torch.float32)
    rules.device("scale", "stats")
    E, sizes = c.stats.size(2), c.scale.shape
    if len(sizes) == 1:
        rules.same("E", "scale", sizes[0], "stats", E)
        return
    rules.dim("scale", c.q.dim())
    k_blocks = ceil_div(c.q.size(-1), BLOCK)
    if c.q.dim() == 3:
        rules.same("the number of K blocks", "scale", sizes[2], "q", k_blocks)
        rules.same("E", "scale", sizes[0], "stats", E)
        n_blocks = ceil_div(c.q.size(1), BLOCK)
        rules.same("the number of N blocks", "scale", sizes[1], "q", n_blocks)
    else:
        rules.same("the number of K blocks", "scale", sizes[0], "q", k_blocks)
        padded = SCALE_ROW_MULTIPLE * ceil_div(c.q.size(0), SCALE_ROW_MULTIPLE)
        rules.same("the number of scale rows", "scale", sizes[1], "q", padded)


def _check_weight(rules: Rules, c: Any) -> None:
    """[E, N, K]."""
    name, first = ("q", c.q) if c.x is None else ("x", c.x)
    rules.dim(name, 3)
    rules.same("E", name, first.size(0), "stats", c.stats.size(2))
    rules.features("N", first.size(1))
    rules.features("K", first.size(2))
    rules.count(name, "rows in all", c.stats.size(2) * first.size(1))
    if c.q is not None:
        rules.dim("q", 3)
        for d, letter in enumerate("ENK"):
            rules.same(letter, "q", c.q.size(d), name, first.size(d))


def _check_rows(rules: Rules, c: Any) -> tuple[str, int, int]:
    """What has T rows of K features before it is quantized: gate_up or x, else q; T and K."""
    name, T, K = "q", 0, 0
    if c.gate_up is not None:
        name = "gate_up"
        rules.dim(name, 2)
        rules.dtype(name, *ACTIVATIONS)
        rules.device(name, "stats")
        T, columns = c.gate_up.shape
        rules.check(
            columns % 2 == 0, lambda: f"gate_up must have an even number of columns, got {columns}"
        )
        rules.features("F", columns // 2)
        rules.check(c.rows is None, lambda: "rows are of x, and gate_up has them already")
        rules.check(
            (c.x is None) == (c.weight is None), lambda: "a gradient of gate_up needs x and weight"
        )
        K = columns // 2 if c.x is None else columns
    else:
        rules.check(c.weight is None, lambda: "weight needs gate_up")
    if c.x is not None:
        rules.dim("x", 2)
        rules.features("K", c.x.size(1))
    if c.x is not None and c.gate_up is not None:
        rules.dtype("gate_up", c.x.dtype)
        rules.same("T", "x", c.x.size(0), "gate_up", T)
        rules.same("2 * F", "x", 2 * c.x.size(1), "gate_up", K)
        rules.tensor("weight", 1, torch.float32, "stats")
        rules.same("T", "weight", c.weight.size(0), "gate_up", T)
    elif c.x is not None:
        name = "x"
        rules.rows(1, "stats")
        T, K = (c.x if c.rows is None else c.rows).size(0), c.x.size(1)
    elif c.gate_up is None:
        rules.check(c.rows is None, lambda: "rows need x")
    return name, T, K


def _check_quantized_rows(rules: Rules, c: Any, name: str, T: int, K: int) -> int:
    """q has as many rows and features; T, which is q's where there is nothing else."""
    if c.q is None:
        rules.check(c.q_rows is None, lambda: "q_rows need q")
        return T
    rules.dim("q", 2)
    rules.features("K", c.q.size(1))
    rules.rows(1, "stats", "q_rows")
    q_name, of_rows = ("q", c.q) if c.q_rows is None else ("q_rows", c.q_rows)
    if name == "q":
        rows: int = of_rows.size(0)
        return rows
    rules.same("T", q_name, of_rows.size(0), name, T)
    rules.same("K", "q", c.q.size(1), name, K)
    return T
