"""One call of each op, small and uneven, and what its results must be in float64.

T rows, E groups, K in_features, N out_features, B = 128. Groups are unaligned and empty, and rows
past the last group hold NaN.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BF16, FP32 = torch.bfloat16, torch.float32
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


def tail(y: Tensor) -> Tensor:
    """With zeros past the last group."""
    return torch.cat([y[:VALID], torch.zeros_like(y[VALID:])])


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


def in_mx(q: Tensor, scale: Tensor) -> Tensor:
    """Numbers of blocks of 32."""
    return q.double() * scale.double().repeat_interleave(32, -1)[..., : q.size(-1)]


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
    """Rows to FP8 under each scaling, and back."""
    x = rows(K)
    own, given = x[:VALID], {"x": x, "offs": OFFS, "columnwise": True, "bias_grad": True}

    def both(q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, db: Tensor) -> list[Near]:
        of_either = of_rows(q, scale), of_columns(q_t, scale_t)
        return [*(quantized(t, own) for t in of_either), bias_grad(db, x)]

    def in_blocks_of_32(
        q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, db: Tensor
    ) -> list[Near]:
        turned = zip(in_mx(q_t, scale_t), BLOCKS, strict=False)
        columns = torch.cat([t.t()[: block.stop - block.start] for t, block in turned])
        return [*rounded(in_mx(q, scale)[:VALID], columns, db)]

    def rounded(rowwise: Tensor, columnwise: Tensor, db: Tensor) -> list[Near]:
        of_either = (t[:VALID].double() for t in (rowwise, columnwise))
        return [*(quantized(t, own) for t in of_either), bias_grad(db, x)]

    def per_group(q: Tensor, scale: Tensor, q_t: Tensor, db: Tensor) -> list[Near]:
        return both(q, scale, q_t, scale, db)

    scale, amax = torch.full((E,), 4 / 448), torch.zeros(E)
    largest = torch.stack([own[g].abs().amax() if g.stop > g.start else amax[0] for g in GROUPS])

    def delayed(q: Tensor, used: Tensor, q_t: Tensor, db: Tensor, amax: Tensor) -> list[Near]:
        near = both(q, used, q_t, used, db)
        clamped = own.double().clamp(-4, 4)
        return [*(quantized(n.actual, clamped) for n in near[:2]), near[2], Near(amax, largest)]

    yield Call("group_quantize", given, both)
    yield Call("group_quantize_current", given | {"out_dtype": E4M3}, per_group)
    arguments = {"amax": amax, **given, "scale": scale, "out_dtype": E4M3}
    yield Call("group_quantize_delayed", arguments, delayed)
    yield Call("group_quantize_mx", given, in_blocks_of_32)
    yield Call("group_round_mx", given, rounded)
    yield Call("grouped_bias_grad", {"dy": x, "offs": OFFS}, lambda db: [bias_grad(db, x)])
    q, scale_q, q_t, scale_t, _ = _ops.group_quantize(**given)
    for op, parts, numbers in (
        ("group_dequantize", {"q": q, "scale": scale_q}, of_rows(q, scale_q)),
        ("group_dequantize_t", {"q_t": q_t, "scale_t": scale_t}, of_columns(q_t, scale_t)),
    ):
        size = {"num_rows": T} if op.endswith("_t") else {}
        exact = torch.cat([numbers.float(), torch.zeros(T - VALID, K)])
        arguments = {**parts, **size, "offs": OFFS, "out_dtype": FP32}
        yield Call(op, arguments, lambda t, exact=exact: [Near(t, exact)])


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


# --- weights -------------------------------------------------------------------------------------


def weights() -> Iterator[Call]:
    """Weights to FP8, into new tensors and in place; scales of a step; Adam."""
    w = torch.randn(E, N, K).to(BF16)
    amax, scale = torch.zeros(E), torch.full((E,), 8 / 448)
    largest = w.float().abs().amax((1, 2))

    def near(q: Tensor, scale: Tensor, q_t: Tensor) -> list[Near]:
        turned = q_t.view(torch.uint8).transpose(1, 2)
        return [quantized(of_weight(q, scale), w), Near(turned, q.view(torch.uint8))]

    def delayed(q: Tensor, scale: Tensor, q_t: Tensor, amax: Tensor) -> list[Near]:
        return [*near(q, scale, q_t), Near(amax, largest)]

    yield Call("quantize_weight", {"w": w}, near)
    q = w.to(E4M3)
    turned = q.view(torch.uint8).transpose(1, 2)
    yield Call("transpose_weight", {"q": q}, lambda q_t: [Near(q_t.view(torch.uint8), turned)])
    yield Call("quantize_weight_list", {"w": [w_e.clone() for w_e in w]}, near)
    yield Call("quantize_weight_current", {"w": w}, near)
    yield Call("quantize_weight_delayed", {"amax": amax, "w": w, "scale": scale}, delayed)
    q, of_blocks, q_t = _ops.quantize_weight(w.flip(0))
    given = {"w": [w], "refresh": None, "q": q, "scale": of_blocks, "q_t": q_t}
    per_expert = given | {"scale": torch.ones(E)}
    yield Call("refresh_weight_", given, near)
    yield Call("refresh_weight_current_", per_expert, near)
    arguments = {"amax": amax, "state": scale, **per_expert}
    yield Call("refresh_weight_delayed_", arguments, delayed)
    rounded = {"w_rowwise": w.flip(0), "w_columnwise": w.flip(0)}
    yield Call(
        "refresh_weight_mx_",
        {"w": [w], "refresh": None, **rounded},
        lambda *both: [quantized(t.double(), w) for t in both],
    )
    history, recorded = torch.rand(16, E), torch.rand(E)
    most = torch.maximum(history[:-1].amax(0), recorded).double()
    arguments = {"scale": [scale], "amax": [recorded], "amax_history": [history]}
    yield Call(
        "update_scales_",
        arguments | {"fp8_max": [448.0]},
        lambda scale, amax, kept: [
            Near(scale, most / 448, 2.0**-22 * most / 448),
            Near(amax, torch.zeros(E)),
            Near(kept, torch.cat([recorded[None], history[:-1]])),
        ],
    )
    m, v, grad = w.flip(1), w.square(), w.flip(2)
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6}
    arguments = {"q": q, "scale": of_blocks, "q_t": q_t, "grad": grad, "exp_avg": m}
    arguments |= {"exp_avg_sq": v, "max_exp_avg_sq": None, "step": torch.tensor(3.0)}
    arguments |= dict.fromkeys(("lr_tensor", "grad_scale", "found_inf")) | rates
    g = grad.double()
    new_m, new_v = 0.9 * m.double() + 0.1 * g, 0.99 * v.double() + 0.01 * g * g
    ratio = new_m / (1 - 0.9**3) / ((new_v / (1 - 0.99**3)).sqrt() + 1e-6)
    new_w = 0.99 * of_weight(q, of_blocks) - 0.1 * ratio

    def stepped(
        q: Tensor, scale: Tensor, q_t: Tensor, grad: Tensor, m: Tensor, v: Tensor
    ) -> list[Near]:
        kept = Near(q_t.view(torch.uint8).transpose(1, 2), q.view(torch.uint8))
        to_nearest = quantized(of_weight(q, scale), new_w)
        moments = (Near(t, e, 2.0**-8 * e.abs() + 1e-6) for t, e in ((m, new_m), (v, new_v)))
        return [to_nearest._replace(allowed=2 * to_nearest.allowed), kept, *moments]

    yield Call("adam_weight_", arguments, stepped)


# --- GEMMs ---------------------------------------------------------------------------------------


def gemms() -> Iterator[Call]:
    """fprop, dgrad and wgrad in bf16, and with SwiGLU."""
    x, dy, w, bias = rows(K), rows(N), torch.randn(E, N, K).to(BF16), torch.randn(E, N).to(BF16)
    index = torch.randint(T, (T,))
    fprop = {"a": x, "b": w.mT, "offs": OFFS, "bias": bias}
    source = torch.randn(T, K).to(BF16)
    yield Call("grouped_mm", fprop, lambda y: [product(y, x, w.mT, bias)])
    yield Call(
        "grouped_mm",
        {"a": dy, "b": w, "offs": OFFS},
        lambda dx: [product(dx, dy, w)],
    )
    yield Call(
        "grouped_mm",
        fprop | {"a": source, "rows": index},
        lambda y: [product(y, source[index], w.mT, bias)],
    )
    experts = [w_e.clone() for w_e in w]
    yield Call(
        "grouped_mm_list",
        fprop | {"b": experts, "transpose_b": True},
        lambda y: [product(y, x, w.mT, bias)],
    )
    operands, before = {"dy": dy, "x": x, "offs": OFFS}, torch.randn(E, N, K)
    listed = [t.clone() for t in before]
    yield Call("grouped_mm_wgrad", operands, lambda dw: [wgrad(dw, dy, x)])
    yield Call(
        "grouped_mm_wgrad_",
        {"main_grad": before, **operands},
        lambda dw: [wgrad(dw, dy, x, before)],
    )
    yield Call(
        "grouped_mm_wgrad_list_",
        {"main_grad": listed, **operands},
        lambda *dw: [wgrad(torch.stack(dw), dy, x, before)],
    )

    def with_h(gate_up: Tensor, h: Tensor) -> list[Near]:
        gate, up = gate_up.double().chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
        return [product(gate_up, x, w.mT), total(h, expected, expected.abs())]

    yield Call("grouped_mm_swiglu", {"a": x, "b": w.mT, "offs": OFFS}, with_h)
    gate_up, weight = rows(2 * N), torch.ones(T)
    d_gate_up, h, d_weight = _ops.swiglu_grad(_ops.grouped_mm(x, w.mT, OFFS), gate_up, weight, OFFS)
    most = d_gate_up.abs().max()
    yield Call(
        "grouped_mm_swiglu_grad",
        {"a": x, "b": w.mT, "gate_up": gate_up, "weight": weight, "offs": OFFS},
        lambda d, t, d_w: [total(d, d_gate_up, most), Near(t, h), total(d_w, d_weight, N * most)],
    )


def scaled_gemms() -> Iterator[Call]:
    """The same in FP8, with scales of blocks and of groups; a whole layer."""
    x, dy, w, bias = rows(K), rows(N), torch.randn(E, N, K).to(BF16), torch.randn(E, N).to(BF16)
    x_q, x_scale, x_t, x_scale_t, _ = _ops.group_quantize(x, OFFS, columnwise=True)
    dy_q, dy_scale, dy_t, dy_scale_t, _ = _ops.group_quantize(dy, OFFS, columnwise=True)
    w_q, w_scale, w_t = _ops.quantize_weight(w)
    x_rows, x_columns = of_rows(x_q, x_scale), of_columns(x_t, x_scale_t)
    dy_rows, dy_columns = of_rows(dy_q, dy_scale), of_columns(dy_t, dy_scale_t)
    w_ENK, before = of_weight(w_q, w_scale), torch.randn(E, N, K)
    arguments = {"a": x_q, "b": w_q.mT, "scale_a": x_scale, "scale_b": w_scale.mT, "offs": OFFS}
    yield Call(
        "grouped_scaled_mm",
        arguments | {"bias": bias},
        lambda y: [product(y, x_rows, w_ENK.mT, bias)],
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
    listed = [t.clone() for t in before]
    yield Call("grouped_scaled_mm_wgrad", operands, lambda dw: [wgrad(dw, dy_columns, x_columns)])
    yield Call(
        "grouped_scaled_mm_wgrad_",
        {"main_grad": before, **operands},
        lambda dw: [wgrad(dw, dy_columns, x_columns, before)],
    )
    yield Call(
        "grouped_scaled_mm_wgrad_list_",
        {"main_grad": listed, **operands},
        lambda *dw: [wgrad(torch.stack(dw), dy_columns, x_columns, before)],
    )
    yield Call(
        "block_scaled_linear",
        {"x": x, "w": w, "m_splits": torch.tensor(SIZES), "bias": bias},
        lambda y, *_: [product(y, x_rows, w_ENK.mT, bias)],
    )
    kept = {"x_t": x_t, "scale_x_t": x_scale_t, "w_t": w_t, "scale_w": w_scale}
    yield Call(
        "block_scaled_linear_grad",
        {"dy": dy, "offs": OFFS, **kept, "bias_grad": True},
        lambda dx, dw, db: [
            product(dx, dy_rows, w_ENK),
            wgrad(dw, dy_columns, x_columns),
            bias_grad(db, dy),
        ],
    )


def every_call() -> list[Call]:
    """One call of each op, and few of a GEMM that takes several kinds of operands."""
    families = (routing, quantizers, activations, weights, gemms, scaled_gemms)
    return [call for family in families for call in family()]
