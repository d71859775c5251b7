# SPDX-License-Identifier: Apache-2.0
"""watch_operand_: what quantization does to some rows of each group.

T rows, E groups, K in_features, N out_features, F features of h.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from grouped_linear import SwiGLU, ops
from support import reference, variants
from support.expected import FORM
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Output, Outputs, Sample
from support.reference import E4M3, E5M2
from support.tensors import FP32, lay_out, per_row, quantized_columns, rows, weight

COLUMNS = 14
MAXIMA = (4, 5)
GOLDEN = Fraction(2654435769, 2**32)  # the golden ratio's fraction
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Half a step beyond the largest number: 1.75 * 2^n, of 3 or of 2 bits of mantissa.
BEYOND = {E4M3: 464.0, E5M2: 61440.0}


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    layout = options.pop("layout", layout)
    source, form = options.pop("source", "rows"), options.pop("format", E4M3)
    parts = options.pop("parts", 4)
    stats = torch.randint(9, (3, parts, groups.E, COLUMNS)).double()
    given: Arguments = {"stats": stats, "turn": torch.tensor(options.pop("turn", 5)).int()}
    given |= {"operand": 1, "x": None}
    if source == "weight":
        return given | of_weight(groups, dtype, layout, form, options)
    given["offs"] = groups.offs()
    if options.pop("columnwise", False) or source == "columns":
        _, given["scale_t"] = quantized_columns(groups, groups.K, share_scales=True)
    if options.pop("dropped", False):  # two rows of each group
        given["routed"] = groups.offs() + 2 * torch.arange(1, groups.E + 1, dtype=torch.int32)
    if source == "columns":
        return given
    if source in ("swiglu", "grad"):
        chosen = {name: options[name] for name in FORM if name in options}
        gate_up = rows(groups, 2 * groups.K, dtype, layout)
        t = swiglu_of(gate_up, given["offs"], chosen)
        given["gate_up"] = gate_up
        if source == "grad":
            given["x"] = rows(groups, groups.K, dtype, layout)
            given["weight"] = per_row(groups)
            t = gradient_of(given, chosen)
    else:
        changed = with_zeros if options.pop("zeros", False) else with_extremes
        t = changed(rows(groups, groups.K, FP32)).to(dtype)
        given["x"] = t if layout == "expanded" else lay_out(t, layout)
        if layout == "expanded":
            t = given["x"] = rows(groups, groups.K, dtype, layout)
    index = options.pop("index", None)
    if index is not None:  # the rows lie in another order, before quantization and after
        order = torch.randperm(groups.T)
        back = order.argsort().to(index)
        back[groups.valid :] = torch.iinfo(index).min
        given["q_rows"] = back
        t = t[order]
        if source == "rows":
            given["x"], given["rows"] = lay_out(t, layout), back
    return given | quantized_rows(t, groups, form, ordered=index is None)


def with_extremes(t: Tensor) -> Tensor:
    """What becomes zero, zeros, and what is not finite."""
    t[:, 5::7] *= 2.0**-20
    t[:, 3] = 0
    t[1::3, 2] = torch.inf
    t[2::5, -1] = torch.nan
    return t


def with_zeros(t: Tensor) -> Tensor:
    """Small numbers, zeros alone, whose scale is 1, and a number whose scale is 1, too."""
    t *= 2.0**-8
    t[: len(t) // 2] = 0
    t[len(t) // 4 :: 8] = 0
    t[-1:, -1] = 448
    return t


def quantized_rows(t: Tensor, groups: Groups, form: Any, ordered: bool) -> Arguments:
    """q and its scales, of rows in any order: of blocks, a group or none."""
    numbers, scaling = t.float(), reference.Scaling(False)
    if form is None:
        return {}
    if form == "rounded":
        return {"q": ((8 * numbers).round() / 8).to(torch.bfloat16)}
    if form == "saturated":  # a scale of earlier steps, which were smaller
        scale = torch.full((groups.E,), 2.0**-8)
        q, _ = reference.quantize_groups_with(numbers, groups.offs(), scale, E4M3)
        return {"q": q, "scale": scale}
    if form == E5M2:
        q, scale = reference.quantize_groups(numbers, groups.offs(), scaling, E5M2)
        return {"q": q, "scale": scale}
    q, scale_T = reference.quantize_rowwise(numbers, scaling)
    scale = torch.full((scale_T.size(0), -(-groups.T // 4) * 4), torch.nan)
    end = groups.valid if ordered else groups.T
    scale[:, :end] = scale_T[:, :end]
    return {"q": q, "scale": scale}


def of_weight(
    groups: Groups, dtype: torch.dtype, layout: str, form: Any, options: Options
) -> Arguments:
    changed = with_zeros if options.pop("zeros", False) else with_extremes
    w_ENK = changed(weight(groups, FP32).flatten(0, 1)).unflatten(0, (groups.E, groups.N))
    w_ENK = w_ENK.to(dtype)
    scaling = reference.Scaling(False)
    if form == "group":
        q, scale = reference.quantize(w_ENK.float(), (1, 2), scaling)
        given: Arguments = {"q": q, "scale": scale.flatten()}
    else:
        q, scale, _ = reference.quantize_weight(w_ENK.float(), scaling)
        given = {"q": q, "scale": scale}
    return given if options.pop("alone", False) else given | {"x": lay_out(w_ENK, layout)}


def swiglu_of(gate_up: Tensor, offs_E: Tensor, form: dict[str, Any]) -> Tensor:
    """What the fused quantizers quantize: h, with the bits of the op."""
    return ops.swiglu(gate_up, offs_E, SwiGLU(**form))


def gradient_of(given: Any, form: dict[str, Any]) -> Tensor:
    dh, gate_up, weight_T = given["x"], given["gate_up"], given["weight"]
    return ops.swiglu_grad(dh, gate_up, weight_T, given["offs"], SwiGLU(**form)).d_gate_up


def expected(sample: Sample) -> Outputs:
    stats = sample["stats"].clone()
    if sample["turn"]:
        number = sample["operand"]
        for e, now in enumerate(counts(sample)):
            maxima = torch.tensor([i in MAXIMA for i in range(COLUMNS)])
            before = stats[number, :, e]
            stats[number, :, e] = torch.where(maxima, torch.maximum(before, now), before + now)
    # Sums of squares are added in another order.
    return [Output(stats, 1e-13 * stats.abs(), torch.float64)]


def spaced(n: int, most: int, turn: int) -> list[int]:
    """At most so many of n: one of each of as many spaces, the larger first, by the turn."""
    count, found, first = min(n, most), [], 0
    for i in range(count):
        space = n // count + (i < n % count)
        found.append(first + int((turn - 1) * GOLDEN % 1 * space))
        first += space
    return found


def counts(sample: Sample) -> list[Tensor]:
    """What is added for each group, [parts, 14]: of what is read the i-th to part i % parts."""
    get = sample.arguments.get
    stats, offs, turn = sample["stats"], get("offs"), int(sample["turn"])
    most = get("most", 4)
    before, after, scale = numbers_of(sample)
    _, parts, E, _ = stats.shape
    if offs is None:
        t = before if before is not None else after
        N = t.size(0) // E
        groups = [slice(e * N, (e + 1) * N) for e in range(E)]
    else:
        T = next(
            (
                len(t)
                for t in (get("rows"), get("q_rows"), get("gate_up"), get("x"), get("q"))
                if t is not None
            ),
            0 if get("scale_t") is None else 128 * len(get("scale_t")),
        )
        groups = reference.groups(offs, T)
    dtype = None if get("q") is None else sample["q"].dtype
    counted = []
    first_block = 0
    for e, group in enumerate(groups):
        n, now = group.stop - group.start, torch.zeros(parts, COLUMNS, dtype=torch.float64)
        has_operand = before is not None or after is not None
        now[0, :2] = torch.tensor([1.0, n]) * has_operand
        read = [group.start + i for i in spaced(n, most, turn)] if has_operand else []
        step = 128 if offs is None else 1  # a weight's rows share scales by 128
        rows = enumerate(spaced(-(-n // step), 128 * most, turn))
        scanned: list[list[int]] = [[] for _ in range(parts)]
        for i, row in rows:
            scanned[i // 32 % parts].append(group.start + step * row)
        blocks = -(-n // 128)
        for part in range(parts):
            mine = slice(part, None, parts)
            if has_operand:
                of_rows = (t if t is None else t[read[mine]] for t in (before, after, scale))
                now[part, 2:11] = of_numbers(*of_rows, dtype)
            if scale is not None and dtype in LARGEST:
                rows_of = (slice(row, min(row + step, group.stop)) for row in scanned[part])
                largest = largest_scale(rows_of, after, scale, get("scale").dim() == 1)
                now[part, 5] = largest * LARGEST[dtype]
            if get("scale_t") is not None:
                for i in spaced(blocks, most, turn)[mine]:
                    for features in reference.feature_blocks(get("scale_t").size(1)):
                        scales = get("scale_t")[first_block + i, features]
                        now[part, 11] += 1
                        now[part, 12] += bool((scales == scales[0]).all())
        first_block += blocks
        if get("routed") is not None:
            now[0, 13] = get("routed")[e] - (get("routed")[e - 1] if e else 0) - n
        counted.append(now)
    return counted


def largest_scale(
    blocks: Iterable[slice], q: Tensor, scale: Tensor, of_all_features: bool
) -> float:
    """Of blocks of rows. Zeros have scale 1, and count nothing."""
    largest, K = 0.0, q.size(1)
    for block in blocks:
        for features in [slice(K)] if of_all_features else reference.feature_blocks(K):
            one = scale[block.start, features][0].item()
            if one != 1 or q[block, features].any():
                largest = max(largest, one)
    return largest


def numbers_of(sample: Sample) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Rows before quantization, dequantized rows and the scale of each number, in float64."""
    get = sample.arguments.get
    form = {name: sample.arguments[name] for name in FORM if name in sample.arguments}
    offs, before, after, scale = get("offs"), get("x"), get("q"), get("scale")
    if get("gate_up") is not None:
        before = (
            swiglu_of(sample["gate_up"], offs, form)
            if before is None
            else gradient_of(sample, form)
        )
    if scale is not None:
        if scale.dim() == 3:
            scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            scale = scale[:, : after.size(1), : after.size(2)]
        elif scale.dim() == 2:
            scale = scale[:, : len(after)].t().repeat_interleave(128, 1)[:, : after.size(1)]
        elif after.dim() == 3:
            scale = scale[:, None, None].expand(after.shape)
        else:
            T, of_rows = len(after), torch.ones(len(after))
            for group, one in zip(reference.groups(offs, T), scale, strict=True):
                of_rows[group] = one
            scale = of_rows[:, None].expand(after.shape)
    if after is not None:
        after = after.float() * scale if scale is not None else after.float()
    before, after, scale = (
        t if t is None else (t.flatten(0, 1) if t.dim() == 3 else t).double()
        for t in (before, after, scale)
    )
    if offs is not None:
        before = before if before is None else reference.gather(before, get("rows"), offs)
        after = after if after is None else reference.gather(after, get("q_rows"), offs)
        scale = scale if scale is None else reference.gather(scale, get("q_rows"), offs)
    return before, after, scale


def of_numbers(
    before: Tensor | None,
    after: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Numbers 2 to 10, of the rows that are read."""
    x = after if before is None else before
    q = x if after is None else after
    assert x is not None
    assert q is not None
    finite = x.isfinite() & q.isfinite()
    both = before is not None and after is not None
    compared = finite if both else torch.zeros_like(finite)
    beyond = torch.zeros_like(finite)
    if both and scale is not None and dtype in BEYOND:
        beyond = x.abs() > BEYOND[dtype] * scale
    of = {
        2: x.numel(),
        3: compared.sum(),
        4: x[finite].abs().max() if finite.any() else 0,
        6: (compared & (x != 0) & (q == 0)).sum(),
        7: (compared & beyond).sum(),
        8: (~finite).sum(),
        9: ((q - x)[compared] ** 2).sum(),
        10: (x[compared] ** 2).sum(),
    }
    return torch.tensor([float(of.get(i, 0)) for i in range(2, 11)], dtype=torch.float64)


ROWS: dict[str, Options] = {
    "off": {"turn": 0, "columnwise": True, "dropped": True},
    "columnwise": {"columnwise": True, "dropped": True, "parts": 1},
    "one_row": {"most": 1, "turn": 2, "parts": 64},
    "all_rows": {"most": 2**31 - 1, "columnwise": True, "turn": 2**31 - 1},
    "columns": {"source": "columns"},
    "amax": {"format": None},
    "rounded": {"format": "rounded"},
    "saturated": {"format": "saturated"},
    "e5m2": {"format": E5M2},
    "zeros": {"zeros": True},
    "zeros_group": {"format": E5M2, "zeros": True},
    "gathered": {"index": torch.int32, "columnwise": True, "dropped": True},
    "gathered_wide": {"index": torch.int64, "layout": "strided"},
    **{name: {"layout": name} for name in ("strided", "transposed", "expanded", "odd")},
}
WEIGHT: dict[str, Options] = {
    "weight": {"source": "weight"},
    "weight_group": {"source": "weight", "format": "group"},
    "weight_zeros": {"source": "weight", "zeros": True},
    "weight_group_zeros": {"source": "weight", "format": "group", "zeros": True},
    "weight_alone": {"source": "weight", "alone": True},
    "weight_transposed": {"source": "weight", "layout": "transposed"},
}
OP = OpInfo(
    sample=sample,
    expected=expected,
    every_tensor="gathered",
    variants={
        **ROWS,
        **WEIGHT,
        **{f"swiglu_{n}": {"source": "swiglu", **f} for n, f in variants.FORMS.items()},
        **{f"gradient_{n}": {"source": "grad", **f} for n, f in variants.FORMS.items()},
        "swiglu": {"source": "swiglu"},
        "swiglu_odd": {"source": "swiglu", "layout": "odd", "interleaved": True},
        "gradient": {"source": "grad"},
        "gradient_odd": {"source": "grad", "layout": "odd", "interleaved": True},
    },
    too_large=(({"x": 0}, {"format": None}),),
    benchmark="bench_watch",
)
