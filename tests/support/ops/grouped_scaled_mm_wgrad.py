# SPDX-License-Identifier: Apache-2.0
"""grouped_scaled_mm_wgrad: dy.T @ x of each group in FP8, with scales of blocks or of groups."""

import torch
from torch import Tensor

from support import expected as must
from support import reference, variants
from support.groups import Groups
from support.op_info import Arguments, OpInfo, Options, Outputs, Sample
from support.tensors import BF16, per_group_rows, quantized_columns


def sample(groups: Groups, dtype: torch.dtype, layout: str, options: Options) -> Arguments:
    return {**operands(groups, options), "out_dtype": dtype}


def operands(groups: Groups, options: Options) -> Arguments:
    fp8 = options.pop("per_group", None)
    if fp8 is None:
        dy_t, scale_dy_t = quantized_columns(groups, groups.N)
        share = options.pop("share_scales", False)
        x_t, scale_x_t = quantized_columns(groups, groups.K, share)
    else:
        _, dy_t, scale_dy_t = per_group_rows(groups, groups.N, fp8)
        _, x_t, scale_x_t = per_group_rows(groups, groups.K, reference.E4M3)
    scales = {"scale_dy_t": scale_dy_t, "scale_x_t": scale_x_t}
    return {"dy_t": dy_t, "x_t": x_t, **scales, "offs": groups.offs()}


def expected(sample: Sample) -> Outputs:
    dtype = sample.get("out_dtype") or BF16
    return [must.wgrad(*numbers(sample), sample["offs"], dtype, scaled=True)]


def numbers(sample: Sample) -> list[Tensor]:
    """The operands, dequantized: the rows of groups."""
    offs, found = sample["offs"], []
    for name in ("dy_t", "x_t"):
        q_t, scale_t = sample[name], sample[f"scale_{name}"]
        ones = torch.ones(q_t.shape[:2], dtype=torch.float64)
        of_blocks, end = scale_t.dim() == 2, int(offs.max())
        columns = scale_t if of_blocks else ones
        x = reference.dequantize_columnwise(q_t, columns, offs, end)
        found.append(x if of_blocks else reference.scale_groups(x, scale_t, offs))
    return found


OP = OpInfo(
    sample=sample,
    expected=expected,
    variants={"default_dtype": {"out_dtype": None}, **variants.PER_GROUP, **variants.SHARED},
    too_large=(({"dy_t": 0}, {}),),
    benchmark="bench_grouped_mm",
)
