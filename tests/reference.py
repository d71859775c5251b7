"""What every op and the layer compute, in float64 and plain torch, to be read aloud.

T rows, E groups, K in_features, N out_features. offs [E] are group ends. Nothing here imports the
library under test. Quantization follows the recipe's formula in float32, because the formula says
float32; everything else is float64.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN = 0x7F


# --- group sizes ---------------------------------------------------------------------------------


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
    return [slice(k, min(k + BLOCK, features)) for k in range(0, features, BLOCK)]


# --- quantization --------------------------------------------------------------------------------


def e4m3(x: Tensor) -> Tensor:
    """Round float32 to the nearest e4m3 number, ties to even; saturate; NaN where not finite."""
    magnitude = x.double().abs().clamp(max=E4M3_MAX)
    exponent = torch.frexp(magnitude).exponent - 1
    step = torch.ldexp(torch.ones_like(magnitude), exponent.clamp(min=-6) - 3)  # 3 mantissa bits
    rounded = (magnitude / step).round() * step  # torch rounds halves to even
    q = torch.copysign(rounded, x.double()).nan_to_num().to(E4M3)  # exact: an e4m3 number already
    q.view(torch.uint8)[~x.isfinite()] = E4M3_NAN
    return q


class Scaling(NamedTuple):
    """The options of block scaling."""

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0


def quantize(x: Tensor, dims: int | tuple[int, ...], scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Quantize with one scale for all that `dims` span: (q, scale), scale with sizes 1 there."""
    x = x.float()
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(dims, keepdim=True)
    amax = amax.clamp(min=scaling.amax_epsilon)
    # tensor / tensor: torch computes number / tensor as a product with the rounded reciprocal
    factor = (torch.full_like(amax, E4M3_MAX) / amax).clamp(max=2.0**126)
    factor = torch.where(amax == 0, 1.0, factor)
    if scaling.power_of_two_scales:  # rounded down
        factor = torch.ldexp(torch.ones_like(factor), torch.frexp(factor).exponent - 1)
    return e4m3(x * factor), torch.ones_like(factor) / factor


def quantize_rowwise(x_TK: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """q [T, K] and scale [ceil(K / 128), T]. Groups do not matter to it."""
    blocks = [quantize(x_TK[:, features], 1, scaling) for features in feature_blocks(x_TK.size(1))]
    q_TK = torch.cat([q.view(torch.uint8) for q, _ in blocks], dim=1)
    return q_TK.view(E4M3), torch.stack([scale.flatten() for _, scale in blocks])


def quantize_columnwise(x_TK: Tensor, offs_E: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """q_t [blocks, K, 128] and scale_t [blocks, K]: only as many blocks as the groups need."""
    T, K = x_TK.shape
    blocks = row_blocks(offs_E, T)
    q_t = x_TK.new_zeros((len(blocks), K, BLOCK), dtype=torch.uint8)  # a last block is zero-filled
    scale_t = x_TK.new_zeros((len(blocks), K), dtype=torch.float32)
    for b, rows in enumerate(blocks):
        q, scale = quantize(x_TK[rows], 0, scaling)
        q_t[b, :, : rows.stop - rows.start] = q.view(torch.uint8).t()
        scale_t[b] = scale.flatten()
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


def gather(x_SK: Tensor, rows_T: Tensor | None, offs_E: Tensor) -> Tensor:
    """x[rows] for every group's rows; NaN elsewhere, where rows hold anything."""
    if rows_T is None:
        return x_SK
    end = groups(offs_E, rows_T.numel())[-1].stop
    x_TK = x_SK.new_full((rows_T.numel(), x_SK.size(1)), torch.nan)
    x_TK[:end] = x_SK[rows_T[:end].long()]
    return x_TK


# --- SwiGLU --------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor) -> Tensor:
    """h [T, K] = silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def swiglu_grad(dh_TK: Tensor, gate_up: Tensor) -> Tensor:
    """d_gate_up [T, 2 K]."""
    gate, up = gate_up.double().chunk(2, dim=1)
    s = torch.sigmoid(gate)
    d_gate = dh_TK.double() * up * s * (1 + gate * (1 - s))
    return torch.cat([d_gate, dh_TK.double() * gate * s], dim=1)


# --- back to numbers -----------------------------------------------------------------------------


def dequantize_rowwise(q_TK: Tensor, scale: Tensor, offs_E: Tensor) -> Tensor:
    """x [T, K] in float64; rows outside every group are zero."""
    T, K = q_TK.shape
    scale_TK = scale[:, :T].t().double().repeat_interleave(BLOCK, dim=1)[:, :K]
    return zero_outside_groups(q_TK.double() * scale_TK, offs_E)


def dequantize_columnwise(q_t: Tensor, scale_t: Tensor, offs_E: Tensor, num_rows: int) -> Tensor:
    """x [T, K] in float64; rows outside every group are zero."""
    x_TK = torch.zeros(num_rows, q_t.size(1), dtype=torch.float64, device=q_t.device)
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
    rows = groups(offs_E, x_TK.size(0))
    return torch.cat([x_TK[: rows[-1].stop], torch.zeros_like(x_TK[rows[-1].stop :])])


# --- products and sums ---------------------------------------------------------------------------


def grouped_mm(
    a_TK: Tensor, b_ENK: Tensor, offs_E: Tensor, bias_EN: Tensor | None = None
) -> Tensor:
    """y[t] = a[t] @ b[e].T + bias[e] for the rows t of group e; zero elsewhere."""
    y_TN = a_TK.new_zeros((a_TK.size(0), b_ENK.size(1)), dtype=torch.float64)
    for e, rows in enumerate(groups(offs_E, a_TK.size(0))):
        y_TN[rows] = a_TK[rows].double() @ b_ENK[e].double().t()
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


# --- the layer -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Results of the layer's forward and backward."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor


class Operands(NamedTuple):
    """What the layer's three products read."""

    x_rowwise: Tensor
    x_columnwise: Tensor
    weight: Tensor
    dy_rowwise: Tensor
    dy_columnwise: Tensor


def operands(
    x_TK: Tensor, w_ENK: Tensor, offs_E: Tensor, dy_TN: Tensor, scaling: Scaling | None
) -> Operands:
    """The numbers that the products see: dequantized where there is a scaling."""
    if scaling is None:
        return Operands(x_TK, x_TK, w_ENK, dy_TN, dy_TN)

    def rowwise(x: Tensor) -> Tensor:
        return dequantize_rowwise(*quantize_rowwise(x, scaling), offs_E)

    def columnwise(x: Tensor) -> Tensor:
        return dequantize_columnwise(*quantize_columnwise(x, offs_E, scaling), offs_E, x.size(0))

    q_ENK, scale, _ = quantize_weight(w_ENK, scaling)
    weight = dequantize_weight(q_ENK, scale)
    return Operands(rowwise(x_TK), columnwise(x_TK), weight, rowwise(dy_TN), columnwise(dy_TN))


def layer(operand: Operands, bias_EN: Tensor | None, offs_E: Tensor, dy_TN: Tensor) -> Layer:
    """y = x @ w.T + b and its gradients, group by group."""
    return Layer(
        y=grouped_mm(operand.x_rowwise, operand.weight, offs_E, bias_EN),
        dx=grouped_mm(operand.dy_rowwise, operand.weight.transpose(1, 2), offs_E),
        dw=grouped_mm_wgrad(operand.dy_columnwise, operand.x_columnwise, offs_E),
        db=grouped_bias_grad(dy_TN, offs_E),
    )
