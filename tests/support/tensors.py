# SPDX-License-Identifier: Apache-2.0
"""Tensors for tests: dtypes, strides, rows, weights and quantized operands.

T rows, E groups, K in_features, N out_features, Tp = padded_rows(T, E). Quantized operands come
from the reference. Bytes that a layout leaves unspecified are NaN, so that a kernel which reads
them shows it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from support import op_reference as reference
from support.groups import Groups

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
    if layout == "dense":
        return x
    if layout == "strided":  # the row stride exceeds the row length
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 24), torch.nan)
        wide[..., 8:-16] = x
        return wide[..., 8:-16]
    if layout == "odd":  # rows that are not aligned
        wide = x.new_full((*x.shape[:-1], x.size(-1) + 3), torch.nan)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "transposed":  # the inner dimension is not dense
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    raise ValueError(layout)


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, each followed in memory by bytes of 0x7F: NaN in e4m3, huge elsewhere."""
    wide = torch.full((*x.shape, 2 * x.itemsize), 0x7F, dtype=torch.uint8).view(x.dtype)
    return wide[..., 0].copy_(x)


def rows(groups: Groups, features: int, dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Normal numbers for each group's rows, NaN after them."""
    if layout == "expanded":  # y.sum().backward() makes such a dy
        return torch.full((), 0.3, dtype=dtype).expand(groups.T, features)
    x = torch.randn(groups.T, features)
    x[groups.valid :] = torch.nan
    return lay_out(x.to(dtype), layout)


def per_row(groups: Groups, layout: str = "dense") -> Tensor:
    """A float32 number of either sign for each group's rows, NaN after them."""
    if layout == "expanded":
        return torch.tensor(-0.7).expand(groups.T)
    x = torch.randn(groups.T)
    x[groups.valid :] = torch.nan
    return torch.stack([x, x], dim=1)[:, 0] if layout == "strided" else x


def weight(groups: Groups, dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Normal numbers [E, N, K]."""
    return lay_out(torch.randn(groups.E, groups.N, groups.K).to(dtype), layout)


def whole_blocks(groups: Groups) -> Groups:
    """The same groups with a K that MXFP4 takes, whole blocks of 32."""
    return replace(groups, K=-(-groups.K // 32) * 32)


def mxfp4_blocks(groups: Groups, options: dict[str, Any]) -> Groups:
    """The same groups with a dimension that MXFP4 takes where `mxfp4_dim` names one."""
    dim = options.get("mxfp4_dim")
    if dim is None:
        return groups
    return whole_blocks(groups) if dim == -1 else replace(groups, N=-(-groups.N // 32) * 32)


def mxfp4_weight(groups: Groups, spread: int = 3) -> tuple[Tensor, Tensor]:
    """Random codes [E, N, K / 2], and scales [E, N, K / 32] that span so many powers of two.

    One block in sixteen has zeros of both signs, and a scale far above the others'.
    """
    E, N, K = groups.E, groups.N, whole_blocks(groups).K
    q = torch.randint(256, (E, N, K // 2), dtype=torch.uint8)
    scale = torch.randint(124 - spread, 125, (E, N, K // 32), dtype=torch.uint8)
    zeros = torch.randint(16, scale.shape) == 0
    q.unflatten(2, (-1, 16))[zeros] &= 0x88
    return q, scale + 40 * zeros.to(torch.uint8)


def quantized_rows(groups: Groups, features: int) -> tuple[Tensor, Tensor]:
    """q [T, features] and scale [blocks, round_up(T, 4)] in the op's layout."""
    q, scale_T = reference.quantize_rowwise(
        rows(groups, features, torch.float32), reference.Scaling(False)
    )
    scale = torch.full((scale_T.size(0), -(-groups.T // 4) * 4), torch.nan)
    scale[:, : groups.valid] = scale_T[:, : groups.valid]
    return q, scale


def per_group_rows(
    groups: Groups, features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, features], q_t [Tp / 128, features, 128] and scale [E] in the op's layout."""
    offs, scaling = groups.offs(), reference.Scaling(False)
    q, scale = reference.quantize_groups(
        rows(groups, features, torch.float32), offs, scaling, dtype
    )
    used = reference.in_column_blocks(q, offs)
    q_t = torch.full((groups.blocks, features, 128), reference.E4M3_NAN, dtype=torch.uint8)
    q_t[: len(used)] = used.view(torch.uint8)
    return q, q_t.view(dtype), scale


def per_group_weight(groups: Groups) -> tuple[Tensor, Tensor]:
    """q [E, N, K] and scale [E]."""
    w_ENK = weight(groups, torch.float32)
    q, scale = reference.quantize(w_ENK, (1, 2), reference.Scaling(False))
    return q, scale.flatten()


def quantized_columns(
    groups: Groups, features: int, share_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """q_t [Tp / 128, features, 128] and scale_t [Tp / 128, features] in the op's layout."""
    used, scales = reference.quantize_columnwise(
        rows(groups, features, torch.float32), groups.offs(), reference.Scaling(False), share_scales
    )
    q_t = torch.full((groups.blocks, features, 128), reference.E4M3_NAN, dtype=torch.uint8)
    scale_t = torch.full((groups.blocks, scales.size(1)), torch.nan)
    q_t[: len(used)], scale_t[: len(used)] = used.view(torch.uint8), scales
    return q_t.view(reference.E4M3), scale_t


def gathered(
    groups: Groups, features: int, dtype: torch.dtype, layout: str, index_dtype: torch.dtype
) -> dict[str, Tensor]:
    """x and the indices of the rows to gather. Past the last group's rows they are no indices."""
    S = groups.valid + 3
    x = lay_out(torch.randn(S, features).to(dtype), layout)
    index_T = torch.randint(S, (groups.T,)).to(index_dtype)
    index_T[groups.valid :] = torch.iinfo(index_dtype).min
    return {"x": x, "rows": index_T}


def per_expert(experts: Tensor) -> list[Tensor]:
    """A separate tensor per expert. `list` would give views of one tensor."""
    return [expert.clone() for expert in experts]


def listed(
    groups: Groups, dtype: torch.dtype, layout: str, options: dict[str, Any]
) -> list[Tensor]:
    """A weight as one tensor, as views of one tensor, or (the default) as a tensor per expert."""
    w_ENK = weight(groups, dtype, layout)
    match options.pop("experts", "per_expert"):
        case "packed":
            return [w_ENK]
        case "views":
            return list(w_ENK)
    return per_expert(w_ENK)


def on(device: str, value: Any) -> Any:
    """A tensor, moved to a device with its strides. Other values are returned unchanged."""
    if isinstance(value, list):
        return [on(device, v) for v in value]
    if not isinstance(value, Tensor) or value.device.type == device:
        return value
    flat = value.detach().as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    there = flat.to(device).as_strided(value.size(), value.stride(), value.storage_offset())
    return there.requires_grad_(value.requires_grad)


def special_rows(dtype: torch.dtype) -> Tensor:
    """Rows of 128 values. Each row is a block of another kind."""
    info, ramp = torch.finfo(dtype), torch.linspace(-1, 1, 128)
    smallest = info.smallest_normal * info.eps  # subnormal
    inf, nan = torch.inf, torch.nan
    kinds = [
        torch.zeros(128),
        -torch.zeros(128),
        ramp * smallest,
        torch.full((128,), smallest),
        ramp * info.smallest_normal,
        ramp * 448 * 2.0**-126,  # where the factor meets its cap of 2^126
        ramp * 449 * 2.0**-126,
        ramp * 2.0**-120,
        ramp * info.max,
        torch.full((128,), -info.max),
        ramp * 448,
        ramp * 1.0001,
        torch.where(torch.arange(128) == 5, nan, ramp),
        torch.where(torch.arange(128) == 7, inf, ramp),
        torch.where(torch.arange(128) == 9, -inf, ramp * info.max),
        torch.full((128,), nan),
        torch.full((128,), inf),
        torch.where(torch.arange(128) % 2 == 0, nan, 0.0),
    ]
    return torch.stack(kinds).to(dtype)
