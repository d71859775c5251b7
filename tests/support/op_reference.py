# SPDX-License-Identifier: Apache-2.0
"""What every op computes, in float64 and plain torch, to be read aloud.

T rows, E groups, K in_features, N out_features. offs [E] are group ends. Nothing here calls the ops
under test. Quantization follows the recipe's formula in float32, because the formula says
float32; everything else is float64.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E4M3_MAX = 448.0
E4M3_NAN = 0x7F


# --- group sizes ---------------------------------------------------------------------------------


def topk_experts(scores_TE: Tensor, k: int) -> Tensor:
    """[T, k]: NaN, then the largest scores; of equal ones the first."""
    return scores_TE.argsort(dim=1, descending=True, stable=True)[:, :k]


def scores_of_experts(logits_TE: Tensor, function: str) -> Tensor:
    """A router's scores."""
    if function == "softmax":
        return logits_TE.softmax(dim=1)
    return logits_TE.sigmoid() if function == "sigmoid" else logits_TE


def weights_of_experts(score_Tk: Tensor, normalize: bool, factor: float) -> Tensor:
    """The weights of chosen experts, of their scores."""
    if normalize:
        score_Tk = score_Tk / (score_Tk.sum(dim=1, keepdim=True) + 1e-20)
    return factor * score_Tk


def sort_by_expert(experts_TC: Tensor, num_experts: int) -> list[Tensor]:
    """choice [R], token [R], row [T, C] and offs [E]: what is in no expert comes last."""
    expert_R = experts_TC.flatten().long()
    expert_R[(expert_R < 0) | (expert_R >= num_experts)] = num_experts
    choice_R = expert_R.argsort(stable=True)
    offs_E = expert_R.bincount(minlength=num_experts + 1)[:num_experts].cumsum(0)
    token_R = choice_R // max(experts_TC.size(1), 1)
    row_TC = choice_R.argsort().view(experts_TC.shape)
    return [t.int() for t in (choice_R, token_R, row_TC, offs_E)]


def splits_to_offsets(
    m_splits: Sequence[int], num_rows: int, alignment: int = 1, stride: int = 1
) -> list[int]:
    """Group ends. Negative sizes count as zero; no end is past num_rows."""
    end, offs = 0, []
    for size in m_splits:
        blocks = -(-max(size, 0) // alignment)  # rounded up
        end = min(num_rows, end + blocks * alignment)
        offs.append(end * stride)
    return offs


def groups(offs_E: Tensor, num_rows: int) -> list[slice]:
    """The rows of each group: ends clamped into the rows there are, never before the last end."""
    begin, rows = 0, []
    for end in offs_E.tolist():
        end = max(begin, min(end, num_rows))
        rows.append(slice(begin, end))
        begin = end
    return rows


def row_blocks(offs_E: Tensor, num_rows: int) -> list[slice]:
    """At most 128 rows of one group each: the blocks of columnwise data, in their order."""
    return [
        slice(begin, min(begin + BLOCK, rows.stop))
        for rows in groups(offs_E, num_rows)
        for begin in range(rows.start, rows.stop, BLOCK)
    ]


def feature_blocks(features: int) -> list[slice]:
    """At most 128 features each."""
    return [slice(k, min(k + BLOCK, features)) for k in range(0, features, BLOCK)]


# --- quantization --------------------------------------------------------------------------------


class Format(NamedTuple):
    """An FP8 format."""

    dtype: torch.dtype
    largest: float
    mantissa_bits: int
    smallest_exponent: int


FORMATS = {E4M3: Format(E4M3, E4M3_MAX, 3, -6), E5M2: Format(E5M2, 57344.0, 2, -14)}


def fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest FP8 number, ties to even; saturate; an e5m2 infinity stays one."""
    _, largest, mantissa_bits, smallest_exponent = FORMATS[dtype]
    magnitude = x.double().abs().clamp(max=largest)
    exponent = torch.frexp(magnitude).exponent - 1
    step = exponent.clamp(min=smallest_exponent) - mantissa_bits
    step = torch.ldexp(torch.ones_like(magnitude), step)
    rounded = (magnitude / step).round() * step  # torch rounds halves to even
    q = torch.copysign(rounded, x.double()).nan_to_num().to(dtype)  # exact: such a number already
    q.view(torch.uint8)[~x.isfinite()] = E4M3_NAN  # in e5m2, too
    if dtype == E5M2:
        q.view(torch.uint8)[x == torch.inf] = 0x7C
        q.view(torch.uint8)[x == -torch.inf] = 0xFC
    return q


def e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3 number."""
    return fp8(x, E4M3)


class Scaling(NamedTuple):
    """The options of block scaling."""

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0
    share_x_scales: bool = False
    wgrad: torch.dtype = E4M3


def quantize(
    x: Tensor, dims: int | tuple[int, ...], scaling: Scaling, dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """Quantize with one scale for all that `dims` span: (q, scale), scale with sizes 1 there."""
    x = x.float()
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(dims, keepdim=True)
    amax = amax.clamp(min=scaling.amax_epsilon)
    # tensor / tensor: torch computes number / tensor as a product with the rounded reciprocal
    factor = (torch.full_like(amax, FORMATS[dtype].largest) / amax).clamp(max=2.0**126)
    factor = torch.where(amax == 0, 1.0, factor)
    if scaling.power_of_two_scales:  # rounded down
        factor = torch.ldexp(torch.ones_like(factor), torch.frexp(factor).exponent - 1)
    return fp8(x * factor, dtype), torch.ones_like(factor) / factor


def quantize_with(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize with a given scale: what is finite saturates, however large the factor."""
    product = x.float() * (torch.ones_like(scale) / scale)
    largest = FORMATS[dtype].largest
    return fp8(torch.where(x.isfinite(), product.clamp(-largest, largest), x.float()), dtype)


def quantize_rowwise(x_TK: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """q [T, K] and scale [ceil(K / 128), T]. Groups do not matter to it."""
    blocks = [quantize(x_TK[:, features], 1, scaling) for features in feature_blocks(x_TK.size(1))]
    q_TK = torch.cat([q.view(torch.uint8) for q, _ in blocks], dim=1)
    return q_TK.view(E4M3), torch.stack([scale.flatten() for _, scale in blocks])


def are_near(x: Tensor) -> bool:
    """Whether no feature but those of zeros has an amax of less than 1/256 of the largest."""
    amax = torch.where(x.isfinite(), x.float().abs(), 0.0).amax(0)
    return bool(((amax == 0) | (amax * 256 >= amax.max())).all())


def quantize_columnwise(
    x_TK: Tensor, offs_E: Tensor, scaling: Scaling, share_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """q_t [blocks, K, 128] and scale_t [blocks, K]: only as many blocks as the groups need."""
    T, K = x_TK.shape
    blocks = row_blocks(offs_E, T)
    q_t = x_TK.new_zeros((len(blocks), K, BLOCK), dtype=torch.uint8)  # a last block is zero-filled
    scale_t = x_TK.new_zeros((len(blocks), K), dtype=torch.float32)
    for b, rows in enumerate(blocks):
        for part in feature_blocks(K):
            x = x_TK[rows, part]
            q, scale = quantize(x, (0, 1) if share_scales and are_near(x) else 0, scaling)
            q_t[b, part, : rows.stop - rows.start] = q.view(torch.uint8).t()
            scale_t[b, part] = scale
    return q_t.view(E4M3), scale_t


def quantize_weight(w_ENK: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """q [E, N, K], scale [E, ceil(N / 128), ceil(K / 128)] and q_t [E, K, N]."""
    E, N, K = w_ENK.shape
    n_blocks, k_blocks = feature_blocks(N), feature_blocks(K)
    q_ENK = w_ENK.new_zeros((E, N, K), dtype=torch.uint8)
    scale = w_ENK.new_zeros((E, len(n_blocks), len(k_blocks)), dtype=torch.float32)
    for i, n in enumerate(n_blocks):
        for j, k in enumerate(k_blocks):
            q, scale_E = quantize(w_ENK[:, n, k], (1, 2), scaling)
            q_ENK[:, n, k] = q.view(torch.uint8)
            scale[:, i, j] = scale_E.flatten()
    return q_ENK.view(E4M3), scale, q_ENK.transpose(1, 2).contiguous().view(E4M3)


def adam(
    w: Tensor, grad: Tensor, m: Tensor, v: Tensor, max_v: Tensor | None, step: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """w, m, v and max_v after a step of AdamW, or of Adam; all in float64."""
    lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    w, g, m, v = w.double(), grad.double(), m.double(), v.double()
    g = g / options["grad_scale"]
    g = -g if options["maximize"] else g
    if options["decoupled_weight_decay"]:
        w = w * (1 - lr * options["weight_decay"])
    else:
        g = g + options["weight_decay"] * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    max_v = None if max_v is None else torch.maximum(max_v.double(), v)
    unbiased_m = m / (1 - beta1**step)
    unbiased_v = (v if max_v is None else max_v) / (1 - beta2**step)
    return w - lr * unbiased_m / (unbiased_v.sqrt() + options["eps"]), m, v, max_v


def gather(x_SK: Tensor, rows_T: Tensor | None, offs_E: Tensor) -> Tensor:
    """x[rows] for every group's rows; NaN elsewhere, where rows hold anything."""
    if rows_T is None:
        return x_SK
    end = groups(offs_E, rows_T.numel())[-1].stop
    x_TK = x_SK.new_full((rows_T.numel(), x_SK.size(1)), torch.nan)
    x_TK[:end] = x_SK[rows_T[:end].long()]
    return x_TK


# --- SwiGLU --------------------------------------------------------------------------------------


def gather_sum(
    y_RH: Tensor, rows_TC: Tensor, weight_TC: Tensor | None, offs_E: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows, one after the other, every operation rounded to float32."""
    sum_TH = torch.zeros(len(rows_TC), y_RH.size(1))
    for c in range(rows_TC.size(1)):
        row_TH = y_RH[rows_TC[:, c]].float()
        term_TH = row_TH if weight_TC is None else weight_TC[:, c, None] * row_TH
        if offs_E is not None:
            term_TH = torch.where(rows_TC[:, c, None] < offs_E[-1], term_TH, 0)
        sum_TH = sum_TH + term_TH
    return sum_TH.to(y_RH.dtype)


def gate_and_up(gate_up: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Each [T, K]."""
    if interleaved:
        return gate_up[..., 0::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def scaled_gate(gate: Tensor, alpha: float = 1.0, cubic: float = 0.0) -> Tensor:
    """What sigmoid is taken of."""
    return alpha * (gate + cubic * gate**3)


def swiglu(
    gate_up: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    cubic: float = 0.0,
) -> Tensor:
    """h [T, K] in gate_up's dtype. Differentiable: at a limit too, where newer clamps stop it."""
    gate, up = gate_and_up(gate_up, interleaved)
    if limit is not None:
        gate, up = torch.where(gate > limit, limit, gate), torch.where(up > limit, limit, up)
        up = torch.where(up < -limit, -limit, up)
    return gate * torch.sigmoid(scaled_gate(gate, alpha, cubic)) * (up + beta)


class SwigluGrad(NamedTuple):
    """What an expert's backward takes from gate_up, in float64."""

    d_gate_up: Tensor
    h: Tensor
    d_weight: Tensor


def swiglu_grad(dh_TK: Tensor, gate_up: Tensor, weight_T: Tensor, **form: Any) -> SwigluGrad:
    """The weighted h and, for a gradient dh by it, those of gate_up and of the weights."""
    gate_up, weight_T = (t.detach().double().requires_grad_() for t in (gate_up, weight_T))
    h_TK = weight_T[:, None] * swiglu(gate_up, **form)
    d_gate_up, d_weight = torch.autograd.grad(h_TK, (gate_up, weight_T), dh_TK.double())
    return SwigluGrad(d_gate_up, h_TK.detach(), d_weight)


# --- one scale a group ---------------------------------------------------------------------------


def quantize_groups(
    x_TK: Tensor, offs_E: Tensor, scaling: Scaling, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q [T, K], NaN outside groups, and scale [E], each group's from its own amax."""
    q, scales = torch.full(x_TK.shape, E4M3_NAN, dtype=torch.uint8, device=x_TK.device), []
    zero_11 = x_TK.new_zeros(1, 1)
    for rows in groups(offs_E, x_TK.size(0)):
        empty = rows.start == rows.stop  # its amax is 0
        part, scale = quantize(zero_11 if empty else x_TK[rows], (0, 1), scaling, dtype)
        q[rows] = part.view(torch.uint8)
        scales.append(scale.view(()))
    return q.view(dtype), torch.stack(scales)


def quantize_groups_with(
    x_TK: Tensor, offs_E: Tensor, scale_E: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q [T, K], NaN outside groups, and the scales: a group's own where the given one is 0."""
    own_q, own_scale_E = quantize_groups(x_TK, offs_E, Scaling(False), dtype)
    q = own_q.view(torch.uint8)
    for rows, scale in zip(groups(offs_E, x_TK.size(0)), scale_E, strict=True):
        if scale != 0:
            q[rows] = quantize_with(x_TK[rows], scale, dtype).view(torch.uint8)
    return q.view(dtype), torch.where(scale_E == 0, own_scale_E, scale_E)


def in_column_blocks(q_TK: Tensor, offs_E: Tensor) -> Tensor:
    """q_t [blocks, K, 128], a group's last block filled with zeros."""
    blocks = row_blocks(offs_E, q_TK.size(0))
    q_t = torch.zeros(len(blocks), q_TK.size(1), BLOCK, dtype=torch.uint8, device=q_TK.device)
    for b, rows in enumerate(blocks):
        q_t[b, :, : rows.stop - rows.start] = q_TK[rows].view(torch.uint8).t()
    return q_t.view(q_TK.dtype)


def scale_groups(q_TK: Tensor, scale_E: Tensor, offs_E: Tensor) -> Tensor:
    """x [T, K] in float64; rows outside every group are zero."""
    x_TK = torch.zeros(q_TK.shape, dtype=torch.float64, device=q_TK.device)
    for rows, scale in zip(groups(offs_E, q_TK.size(0)), scale_E, strict=True):
        x_TK[rows] = q_TK[rows].double() * scale.double()
    return x_TK


def amax_of_groups(x_TK: Tensor, offs_E: Tensor) -> Tensor:
    """[E] float32: the largest magnitudes, infinity where one is not finite, 0 without rows."""
    magnitude = x_TK.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    rows_E = groups(offs_E, x_TK.size(0))
    return torch.stack([torch.cat([magnitude[r].flatten(), torch.zeros(1)]).max() for r in rows_E])


class Rolled(NamedTuple):
    """What an update leaves behind; amax is zero."""

    scale: Tensor
    amax_history: Tensor


def update_scales(
    scale_E: Tensor,
    amax_E: Tensor,
    history_HE: Tensor,
    fp8_max: float,
    margin: int = 0,
    most_recent: bool = False,
) -> Rolled:
    """Roll the history, then scale by what it says, where it says something."""
    latest_1E = amax_E.where(amax_E.isfinite(), 0.0)[None]
    history_HE = torch.cat([latest_1E, history_HE[:-1]])
    largest_E = history_HE[0] if most_recent else history_HE.amax(0)
    factor = torch.full_like(largest_E, fp8_max) / largest_E * 2.0**-margin
    new_E = torch.ones_like(factor) / factor.clamp(2.0**-126, 2.0**126)
    return Rolled(new_E.where(amax_E.isfinite() & (largest_E > 0), scale_E), history_HE)


# --- MXFP8 ---------------------------------------------------------------------------------------

MX_BLOCK = 32


def quantize_mx(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Quantize with one power of two for all that `dim` spans: (q, scale in float64)."""
    x = x.double()
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim, keepdim=True)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)  # 0.5 <= mantissa < 1, or 0
    exponent = torch.where(mantissa == 0, -1000, exponent - (mantissa == 0.5).int())  # rounded up
    scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-124, 119))
    return e4m3(x / scale), scale


def quantize_mx_rowwise(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, K] and scale [T, ceil(K / 32)] in float64."""
    blocks = [quantize_mx(x, 1) for x in x_TK.split(MX_BLOCK, dim=1)]
    q_TK = torch.cat([q.view(torch.uint8) for q, _ in blocks], dim=1)
    return q_TK.view(E4M3), torch.cat([scale for _, scale in blocks], dim=1)


def quantize_mx_columnwise(x_TK: Tensor, offs_E: Tensor) -> tuple[Tensor, Tensor]:
    """q_t [blocks, K, 128] and scale_t [blocks, K, 4]: as many blocks as the groups need."""
    T, K = x_TK.shape
    blocks = row_blocks(offs_E, T)
    x_t = torch.zeros(len(blocks), K, BLOCK, dtype=torch.float64)  # a last block is zero-filled
    for b, rows in enumerate(blocks):
        x_t[b, :, : rows.stop - rows.start] = x_TK[rows].double().t()
    if not blocks:
        return x_t.to(E4M3), torch.zeros(0, K, BLOCK // MX_BLOCK, dtype=torch.float64)
    q, scale = quantize_mx(x_t.view(len(blocks), K, -1, MX_BLOCK), 3)
    return q.view(x_t.shape), scale.view(len(blocks), K, -1)


def round_mx_rowwise(x_TK: Tensor) -> Tensor:
    """What MXFP8 keeps of x, in float64, in blocks of 32 features."""
    q_TK, scale = quantize_mx_rowwise(x_TK)
    return q_TK.double() * scale.repeat_interleave(MX_BLOCK, 1)[:, : x_TK.size(1)]


def round_mx_columnwise(x_TK: Tensor, offs_E: Tensor) -> Tensor:
    """What MXFP8 keeps of x, in float64, in blocks of 32 rows; zero outside groups."""
    q_t, scale_t = quantize_mx_columnwise(x_TK, offs_E)
    columns = q_t.double() * scale_t.repeat_interleave(MX_BLOCK, 2)
    rounded_TK = torch.zeros(x_TK.shape, dtype=torch.float64)
    for column, rows in zip(columns, row_blocks(offs_E, x_TK.size(0)), strict=True):
        rounded_TK[rows] = column[:, : rows.stop - rows.start].t()
    return rounded_TK


# --- back to numbers -----------------------------------------------------------------------------


def dequantize_rowwise(q_TK: Tensor, scale: Tensor, offs_E: Tensor) -> Tensor:
    """x [T, K] in float64; rows outside every group are zero."""
    T, K = q_TK.shape
    scale_TK = scale[:, :T].t().double().repeat_interleave(BLOCK, dim=1)[:, :K]
    return zero_outside_groups(q_TK.double() * scale_TK, offs_E)


def dequantize_columnwise(q_t: Tensor, scale_t: Tensor, offs_E: Tensor, num_rows: int) -> Tensor:
    """x [T, K] in float64; rows outside every group are zero."""
    K = q_t.size(1)
    x_TK = torch.zeros(num_rows, K, dtype=torch.float64, device=q_t.device)
    for b, rows in enumerate(row_blocks(offs_E, num_rows)):
        size = rows.stop - rows.start
        x_TK[rows] = (q_t[b, :, :size].double() * scale_t[b, :, None].double()).t()
    return x_TK


def dequantize_weight(q_ENK: Tensor, scale: Tensor) -> Tensor:
    """w [E, N, K] in float64."""
    _, N, K = q_ENK.shape
    scale_ENK = scale.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return q_ENK.double() * scale_ENK[:, :N, :K]


def zero_outside_groups(x_TK: Tensor, offs_E: Tensor) -> Tensor:
    """The rows of groups; zero elsewhere."""
    rows = groups(offs_E, x_TK.size(0))
    return torch.cat([x_TK[: rows[-1].stop], torch.zeros_like(x_TK[rows[-1].stop :])])


# --- products and sums ---------------------------------------------------------------------------


def grouped_mm(
    a_TK: Tensor, b_EKN: Tensor, offs_E: Tensor, bias_EN: Tensor | None = None
) -> Tensor:
    """y[t] = a[t] @ b[e] + bias[e] for the rows t of group e; zero elsewhere."""
    y_TN = a_TK.new_zeros((a_TK.size(0), b_EKN.size(2)), dtype=torch.float64)
    for e, rows in enumerate(groups(offs_E, a_TK.size(0))):
        y_TN[rows] = a_TK[rows].double() @ b_EKN[e].double()
        if bias_EN is not None:
            y_TN[rows] += bias_EN[e].double()
    return y_TN


def grouped_mm_wgrad(dy_TN: Tensor, x_TK: Tensor, offs_E: Tensor) -> Tensor:
    """dw[e] = dy.T @ x over the rows of group e."""
    rows_E = groups(offs_E, x_TK.size(0))
    return torch.stack([dy_TN[rows].double().t() @ x_TK[rows].double() for rows in rows_E])


def grouped_bias_grad(dy_TN: Tensor, offs_E: Tensor) -> Tensor:
    """db[e] = the sum of dy over the rows of group e."""
    rows_E = groups(offs_E, dy_TN.size(0))
    return torch.stack([dy_TN[rows].double().sum(0) for rows in rows_E])


# --- MXFP4 ---------------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK = 32


def quantize_mxfp4(w_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and E8M0 scales: the smallest powers of two with amax <= 7 * scale."""
    blocks = w_ENK.double().unflatten(2, (-1, MX_BLOCK))
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa < 1
    scale = (exponent - 3 + (mantissa > 0.875).int() + 127).clamp(min=0)
    scale = torch.where(amax == 0, 0, scale)
    magnitude = (blocks * torch.exp2(127.0 - scale.double())[..., None]).abs().clamp(max=6)
    numbers = torch.tensor(E2M1, dtype=torch.float64)
    distance = (magnitude[..., None] - numbers).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = torch.tensor([2, 1] * 4)  # of two that are as near, the one with the even code
    code = (nearest * even).argmax(-1) + 8 * blocks.signbit()
    finite = blocks.isfinite().all(-1)
    scale = torch.where(finite, scale, 255)
    code = torch.where(finite[..., None], code, 0).flatten(2)
    return (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8), scale.to(torch.uint8)


def mxfp4_codes(q: Tensor) -> Tensor:
    """[E, N, K] of two a byte, the low nibble first."""
    return torch.stack([q & 15, q >> 4], dim=-1).flatten(2)


def dequantize_mxfp4(q: Tensor, scale: Tensor) -> Tensor:
    """In float64."""
    codes = mxfp4_codes(q)
    numbers = torch.tensor(E2M1, dtype=torch.float64)[(codes & 7).long()]
    numbers = torch.where(codes >= 8, -numbers, numbers)
    factor = torch.exp2(scale.double() - 127).masked_fill(scale == 255, torch.nan)
    return numbers * factor.repeat_interleave(MX_BLOCK, dim=-1)


def mxfp4_in_e4m3(q: Tensor, scale: Tensor) -> Tensor:
    """What FP8 GEMMs multiply: e4m3 numbers with 2^-6 of a 128 x 128 block's largest scale."""
    return dequantize_weight(*mxfp4_as_blocks(q, scale))


def mxfp4_as_blocks(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """These e4m3 numbers, and a scale for each 128 x 128 block."""
    numbers = dequantize_mxfp4(q, scale)
    zeros = (numbers == 0).unflatten(2, (-1, MX_BLOCK)).all(3)
    known = scale.double().masked_fill(zeros | (scale == 255), 0)
    n_blocks, k_blocks = feature_blocks(q.size(1)), feature_blocks(numbers.size(2))
    shared = torch.zeros(len(q), len(n_blocks), len(k_blocks))
    for i, n in enumerate(n_blocks):
        for j, k in enumerate(k_blocks):
            of_block = known[:, n, k.start // MX_BLOCK : -(-k.stop // MX_BLOCK)]
            shared[:, i, j] = torch.exp2(of_block.amax((1, 2)) - 127 - 6).clamp(min=2.0**-126)
            numbers[:, n, k] /= shared[:, i, j, None, None].double()
    return e4m3(numbers), shared


def quantize_weight_in_mxfp4(w: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, scale and q_t of a weight's numbers in MXFP4, whose blocks run along a dimension."""
    if dim == -2:
        q_t, scale, q = quantize_weight_in_mxfp4(w.mT, -1)
        return q, scale.mT.contiguous(), q_t
    q, scale = mxfp4_as_blocks(*quantize_mxfp4(w))
    return q, scale, q.view(torch.uint8).mT.contiguous().view(E4M3)
