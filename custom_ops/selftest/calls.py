"""Calls of the kernels that layers run, small and uneven, and what must come out in float64.

Ops that differ in where they read or write a weight share a kernel, and one of them is here. The
tests call all.

T rows, E groups, K in_features, N out_features, B = 128. Groups are unaligned and empty, and rows
past the last group hold NaN.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
T, K, N, B = 500, 144, 288, 128
SIZES = (0, 130, 3, 0, 257, 64)
E, VALID = len(SIZES), sum(SIZES)
OFFS = torch.tensor(SIZES).cumsum(0).int()
GROUPS = [slice(end - size, end) for end, size in zip(OFFS.tolist(), SIZES, strict=True)]
BLOCKS = [
    slice(first, min(first + B, rows.stop))
    for rows in GROUPS
    for first in range(rows.start, rows.stop, B)
]
_ops = torch.ops.grouped_linear


class Near(NamedTuple):
    """Numbers of a result, in float64, and how far they may be from what they must be.

    Args:
        actual: the numbers, of what the contract specifies.
        expected: what they must be.
        allowed: the bound of their difference; 0 where they must be equal.
        same_bits: whether a GPU's are the CPU's.
    """

    actual: Tensor
    expected: Tensor
    allowed: Tensor | float = 0.0
    same_bits: bool = True


Check = Callable[..., list[Near]]  # of the results: what is returned, then what is written


class Call(NamedTuple):
    """A call of an op, its arguments on the CPU, and how its results are looked at."""

    op: str
    arguments: dict[str, Any]
    check: Check


def rows(features: int) -> Tensor:
    """[T, features] bf16, NaN past the last group."""
    x = torch.randn(T, features).to(BF16)
    x[VALID:] = torch.nan
    return x


# --- numbers of quantized tensors ----------------------------------------------------------------


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """A scale of each 128 or 128 x 128 numbers, for each number."""
    for dim in range(like.dim()):
        if scale.size(dim) != like.size(dim):
            scale = scale.repeat_interleave(B, dim).narrow(dim, 0, like.size(dim))
    return scale.double()


def of_rows(q: Tensor, scale: Tensor) -> Tensor:
    """x[:VALID] of blocks of 128 features, or of a scale a group."""
    q = q[:VALID].double()
    if scale.dim() == 1:
        return q * scale.double().repeat_interleave(torch.tensor(SIZES))[:, None]
    return q * spread(scale.t()[:VALID], q)


def of_columns(q_t: Tensor, scale_t: Tensor) -> Tensor:
    """x[:VALID] of blocks of 128 rows, or of a scale a group."""
    parts = []
    for b, block in enumerate(BLOCKS):
        e = next(e for e, rows in enumerate(GROUPS) if block.stop <= rows.stop)
        scale = scale_t[e] if scale_t.dim() == 1 else scale_t[b][:, None]
        parts.append((q_t[b].double() * scale.double()).t()[: block.stop - block.start])
    return torch.cat(parts)


def of_weight(q: Tensor, scale: Tensor) -> Tensor:
    """A weight of 128 x 128 blocks, or of a scale an expert."""
    return q.double() * (scale.double()[:, None, None] if scale.dim() == 1 else spread(scale, q))


def quantized(actual: Tensor, x: Tensor) -> Near:
    """Numbers within half a unit of e4m3's 3 bits of mantissa, or of its smallest number.

    A scale is at most 2 / 448 of the largest magnitude.
    """
    x = x.double()
    return Near(actual, x, 2.0**-4 * x.abs() + 2.0**-9 / 448 * x.abs().max())


# --- sums ----------------------------------------------------------------------------------------


def total(actual: Tensor, expected: Tensor, magnitude: Tensor) -> Near:
    """A sum, rounded to bf16 or not. FP8 tensor cores lose up to 8 * 2^-13 of what they add."""
    return Near(actual, expected, 2.0**-8 * expected.abs() + 2.0**-10 * magnitude, False)


def product(y: Tensor, a: Tensor, b_EKN: Tensor, bias: Tensor | None = None) -> Near:
    """a[t] @ b[e] + bias[e] for the rows of groups, and zero past them."""
    expected, magnitude = torch.zeros(2, T, b_EKN.size(2), dtype=torch.float64)
    for e, group in enumerate(GROUPS):
        x, w = a[group].double(), b_EKN[e].double()
        expected[group], magnitude[group] = x @ w, x.abs() @ w.abs()
        if bias is not None:
            expected[group] += bias[e]
    return total(y, expected, magnitude)


def wgrad(dw: Tensor, dy: Tensor, x: Tensor, before: Tensor | float = 0.0) -> Near:
    """dy.T @ x of each group, added to what was there."""
    sums = [
        torch.stack([d[g].double().t() @ t[g].double() for g in GROUPS])
        for d, t in ((dy, x), (dy.abs(), x.abs()))
    ]
    return total(dw, sums[0] + before, sums[1])


def bias_grad(db: Tensor, dy: Tensor) -> Near:
    """The sums of each group's rows."""
    sums = [torch.stack([t[g].double().sum(0) for g in GROUPS]) for t in (dy, dy.abs())]
    return total(db, *sums)


# --- routing -------------------------------------------------------------------------------------


def routing() -> Iterator[Call]:
    """Offsets, experts, rows that move."""
    splits = {"m_splits": torch.tensor(SIZES), "num_rows": T}
    yield Call("splits_to_offsets", splits, lambda offs: [Near(offs, OFFS)])
    scores = torch.randn(T, 64).to(BF16)
    best = scores.float().argsort(dim=1, descending=True, stable=True)[:, :8]
    yield Call("topk_experts", {"scores": scores, "k": 8}, lambda chosen: [Near(chosen, best)])
    experts = torch.randint(-1, E + 1, (T, 3))
    sorted_by = torch.where(experts < 0, E, experts).flatten().argsort(stable=True)
    counts = torch.stack([(experts == e).sum() for e in range(E)])

    def of_sort(choice: Tensor, token: Tensor, row: Tensor, offs: Tensor) -> list[Near]:
        places = Near(row.flatten(), sorted_by.argsort())
        moved = [Near(choice, sorted_by), Near(token, sorted_by // 3)]
        return [*moved, places, Near(offs, counts.cumsum(0))]

    yield Call("sort_by_expert", {"experts": experts, "num_experts": E}, of_sort)
    a, y = torch.randn(T, K).to(BF16), torch.randn(700, K).to(BF16)
    index, weight = torch.randint(700, (T, 3)), torch.randn(T, 3)
    parts = y.double()[index] * weight.double()[..., None]
    dots = a.double()[:, None] * y.double()[index]
    arguments = {"y": y, "rows": index, "weight": weight}
    summed = parts.sum(1), parts.abs().sum(1)
    yield Call("gather_sum", arguments, lambda t: [total(t, *summed)._replace(same_bits=True)])
    yield Call(
        "gather_dot",
        {"a": a, "y": y, "rows": index},
        lambda t: [total(t, dots.sum(2), dots.abs().sum(2))],
    )
    places = torch.randperm(3 * T).view(T, 3)
    of_scatter = {"x": a, "rows": places, "num_rows": 3 * T}
    yield Call("scatter_rows", of_scatter, lambda y: [Near(y[places], a[:, None].expand(T, 3, K))])


# --- rows ----------------------------------------------------------------------------------------


def quantizers() -> Iterator[Call]:
    """Rows to FP8, or rounded to it."""
    x = rows(K)
    own, given = x[:VALID], {"x": x, "offs": OFFS, "columnwise": True, "bias_grad": True}

    def both(q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, db: Tensor) -> list[Near]:
        of_either = of_rows(q, scale), of_columns(q_t, scale_t)
        return [*(quantized(t, own) for t in of_either), bias_grad(db, x)]

    def rounded(rowwise: Tensor, columnwise: Tensor, db: Tensor) -> list[Near]:
        of_either = (t[:VALID].double() for t in (rowwise, columnwise))
        return [*(quantized(t, own) for t in of_either), bias_grad(db, x)]

    def per_group(q: Tensor, scale: Tensor, q_t: Tensor, db: Tensor) -> list[Near]:
        return both(q, scale, q_t, scale, db)

    yield Call("group_quantize", given, both)
    yield Call("group_quantize_current", given | {"out_dtype": E4M3}, per_group)
    yield Call("group_round_mx", given, rounded)


def activations() -> Iterator[Call]:
    """SwiGLU and its gradient, alone and quantized."""
    gate_up, dh, weight = rows(2 * K), rows(K), torch.randn(T)
    weight[VALID:] = torch.nan
    exact, by = (t[:VALID].double().requires_grad_() for t in (gate_up, weight))
    gate, up = exact.chunk(2, 1)
    h = torch.nn.functional.silu(gate) * up
    weighted = by[:, None] * h
    grads = torch.autograd.grad(weighted, (exact, by), dh[:VALID].double())
    h, weighted, d_gate_up, d_weight = (t.detach() for t in (h, weighted, *grads))
    products = dh[:VALID].double() * h

    def near(actual: Tensor, expected: Tensor) -> Near:
        """Rounded once; float32 loses 2^-18 of parts, which are up to 2^5 here."""
        padded = torch.cat([expected, torch.zeros(T - VALID, expected.size(1))])
        return Near(actual, padded, 2.0**-8 * padded.abs() + 2.0**-13 * (padded != 0))

    def of_weight(actual: Tensor) -> Near:
        return total(actual[:VALID], d_weight, products.abs().sum(1))

    forward = {"gate_up": gate_up, "offs": OFFS}
    backward = {"dh": dh, **forward, "weight": weight}
    yield Call("swiglu", forward, lambda t: [near(t, h)])
    yield Call(
        "swiglu_grad",
        backward,
        lambda d, t, d_w: [near(d, d_gate_up), near(t, weighted), of_weight(d_w)],
    )

    def of_h(q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, kept: Tensor) -> list[Near]:
        of_either = of_rows(q, scale), of_columns(q_t, scale_t)
        return [*(quantized(t, kept[:VALID]) for t in of_either), near(kept, h)]

    def of_grad(
        q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, db: Tensor, *others: Tensor
    ) -> list[Near]:
        d, t = (x.to(BF16) for x in (d_gate_up, weighted))
        of_either = of_rows(q, scale), of_columns(q_t, scale_t)
        of_h_t = quantized(of_columns(*others[:2]), t)
        found = [*(quantized(x, d) for x in of_either), of_h_t]
        wider = [n._replace(allowed=n.allowed + 2.0**-7 * n.expected.abs()) for n in found]
        return [*wider, bias_grad(db, d), of_weight(others[2])]

    arguments = forward | {"columnwise": True, "keep_h": True}
    yield Call("group_quantize_swiglu", arguments, of_h)
    arguments = backward | {"columnwise": True, "bias_grad": True, "h_columnwise": True}
    yield Call("group_quantize_swiglu_grad", arguments, of_grad)


def watching() -> Iterator[Call]:
    """What quantization does to all rows, one of whose features becomes zero."""
    x = rows(K)
    x[:, 5] *= 2.0**-20
    q, scale, *_ = _ops.group_quantize(x, OFFS)
    before, after = x[:VALID].double(), of_rows(q, scale)

    def of_groups(t: Tensor) -> Tensor:
        return torch.stack([t[g].sum() for g in GROUPS])

    def check(stats: Tensor) -> list[Near]:
        parts = stats[0]
        numbers, underflow, error = (parts[..., i].sum(0) for i in (2, 6, 9))
        amax = [before[g].abs().max() if g.stop > g.start else torch.zeros(()) for g in GROUPS]
        squares = of_groups((after - before) ** 2)
        return [
            Near(numbers, K * torch.tensor(SIZES)),
            Near(parts[..., 4].amax(0), torch.stack([t.double() for t in amax])),
            Near(underflow, of_groups((before != 0) & (after == 0))),
            Near(error, squares, 1e-12 * squares, False),
        ]

    stats, turn = torch.zeros(1, 4, E, 14).double(), torch.tensor(1).int()
    given = {"stats": stats, "turn": turn, "operand": 0, "x": x, "q": q, "scale": scale}
    yield Call("watch_operand_", given | {"offs": OFFS, "most": T}, check)


# --- weights -------------------------------------------------------------------------------------


def weights() -> Iterator[Call]:
    """Weights to FP8."""
    w = torch.randn(E, N, K).to(BF16)

    def near(q: Tensor, scale: Tensor, q_t: Tensor) -> list[Near]:
        turned = q_t.view(torch.uint8).transpose(1, 2)
        return [quantized(of_weight(q, scale), w), Near(turned, q.view(torch.uint8))]

    yield Call("quantize_weight", {"w": w}, near)
    yield Call("quantize_weight_current", {"w": w}, near)


# --- GEMMs ---------------------------------------------------------------------------------------


def gemms() -> Iterator[Call]:
    """fprop, dgrad and wgrad in bf16, and with SwiGLU."""
    x, dy, w, bias = rows(K), rows(N), torch.randn(E, N, K).to(BF16), torch.randn(E, N).to(BF16)
    index = torch.randint(T, (T,))
    fprop = {"a": x, "b": w.mT, "offs": OFFS, "bias": bias}
    source = torch.randn(T, K).to(BF16)
    yield Call("grouped_mm", fprop, lambda y: [product(y, x, w.mT, bias)])
    yield Call("grouped_mm", {"a": dy, "b": w, "offs": OFFS}, lambda dx: [product(dx, dy, w)])
    yield Call(
        "grouped_mm",
        fprop | {"a": source, "rows": index},
        lambda y: [product(y, source[index], w.mT, bias)],
    )
    a_low, b_low = rows(16), torch.randn(E, 16, N).to(BF16)
    yield Call(
        "grouped_mm",
        fprop | {"a_low": a_low, "b_low": b_low},
        lambda y: [product(y, torch.cat([x, a_low], 1), torch.cat([w.mT, b_low], 1), bias)],
    )
    operands, before = {"dy": dy, "x": x, "offs": OFFS}, torch.randn(E, N, K)
    yield Call("grouped_mm_wgrad", operands, lambda dw: [wgrad(dw, dy, x)])
    yield Call(
        "grouped_mm_wgrad_",
        {"main_grad": before, **operands},
        lambda dw: [wgrad(dw, dy, x, before)],
    )

    def with_h(gate_up: Tensor, h: Tensor) -> list[Near]:
        gate, up = gate_up.double().chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
        return [product(gate_up, x, w.mT), total(h, expected, expected.abs())]

    yield Call("grouped_mm_swiglu", {"a": x, "b": w.mT, "offs": OFFS}, with_h)


def scaled_gemms() -> Iterator[Call]:
    """The same in FP8, with scales of blocks and of groups."""
    x, dy, w, bias = rows(K), rows(N), torch.randn(E, N, K).to(BF16), torch.randn(E, N).to(BF16)
    x_q, x_scale, x_t, x_scale_t, _ = _ops.group_quantize(x, OFFS, columnwise=True)
    dy_q, dy_scale, dy_t, dy_scale_t, _ = _ops.group_quantize(dy, OFFS, columnwise=True)
    w_q, w_scale, w_t = _ops.quantize_weight(w)
    x_rows, x_columns = of_rows(x_q, x_scale), of_columns(x_t, x_scale_t)
    dy_rows, dy_columns = of_rows(dy_q, dy_scale), of_columns(dy_t, dy_scale_t)
    w_ENK, before = of_weight(w_q, w_scale), torch.randn(E, N, K)
    given = {"a": x_q, "b": w_q.mT, "scale_a": x_scale, "scale_b": w_scale.mT, "bias": bias}
    fprop = given | {"offs": OFFS}
    yield Call("grouped_scaled_mm", fprop, lambda y: [product(y, x_rows, w_ENK.mT, bias)])
    dgrad = {"a": dy_q, "b": w_t.mT, "scale_a": dy_scale, "scale_b": w_scale, "offs": OFFS}
    yield Call("grouped_scaled_mm", dgrad, lambda dx: [product(dx, dy_rows, w_ENK)])
    a_low, b_low = rows(16), torch.randn(E, 16, N).to(BF16)
    both = torch.cat([x_rows, a_low[: len(x_rows)]], 1), torch.cat([w_ENK.mT, b_low], 1)
    yield Call(
        "grouped_scaled_mm",
        fprop | {"a_low": a_low, "b_low": b_low},
        lambda y: [product(y, *both, bias)],
    )
    g_q, g_scale, _, _ = _ops.group_quantize_current(x, OFFS, E4M3)
    e_q, e_scale, _ = _ops.quantize_weight_current(w)
    yield Call(
        "grouped_scaled_mm",
        {"a": g_q, "b": e_q.mT, "scale_a": g_scale, "scale_b": e_scale, "offs": OFFS},
        lambda y: [product(y, of_rows(g_q, g_scale), of_weight(e_q, e_scale).mT)],
    )
    operands = {"dy_t": dy_t, "x_t": x_t, "scale_dy_t": dy_scale_t, "scale_x_t": x_scale_t}
    operands["offs"] = OFFS
    yield Call("grouped_scaled_mm_wgrad", operands, lambda dw: [wgrad(dw, dy_columns, x_columns)])
    yield Call(
        "grouped_scaled_mm_wgrad_",
        {"main_grad": before, **operands},
        lambda dw: [wgrad(dw, dy_columns, x_columns, before)],
    )


def every_call() -> list[Call]:
    """All calls; several of a GEMM that takes several kinds of operands."""
    families = (routing, quantizers, activations, watching, weights, gemms, scaled_gemms)
    return [call for family in families for call in family()]
