"""Tensors for tests: dtypes, strides, rows, weights and quantized operands.

T rows, E groups, K in_features, N out_features, Tp = padded_rows(T, E). Quantized operands come
from the reference. Bytes that a layout leaves unspecified are NaN, so that a kernel which reads
them shows it.
"""

from typing import Any

import torch
from torch import Tensor

from grouped_linear.selftest.operands import *  # noqa: F403
from grouped_linear.selftest.operands import Groups, lay_out, weight

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


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
