# SPDX-License-Identifier: Apache-2.0
"""Arguments that samples of several ops have in common.

T rows, E groups, K in_features, N out_features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from support import reference
from support.groups import Groups
from support.op_info import Arguments, Options, Sample
from support.tensors import FP32, lay_out, per_expert, quantized_rows, rows, weight

# By the name of the numbers: the operand whose rows they are.
GATHERED = {"rows": "a", "dy_rows": "dy", "x_rows": "x"}


def gathering(tensors: Arguments, groups: Groups, layout: str, options: Options) -> Arguments:
    """Where `gathers` names the numbers: a GEMM's operand of other rows, and those to gather.

    Past the last group's rows they are no numbers of rows.
    """
    numbers = options.pop("gathers", None)
    if numbers is None:
        return {}
    operand, index = tensors[GATHERED[numbers]], options.pop("index", torch.int32)
    source = Groups((groups.T + 3,), groups.T + 3)
    numbers_T = torch.randint(source.T, (groups.T,)).to(index)
    numbers_T[groups.valid :] = torch.iinfo(index).min
    if "scale_a" in tensors:
        a, scale_a = quantized_rows(source, operand.size(1))
        return {"a": a, "scale_a": scale_a, numbers: numbers_T}
    own = rows(source, operand.size(1), operand.dtype, layout)
    return {GATHERED[numbers]: own, numbers: numbers_T}


def gathered_before(sample: Sample) -> Sample:
    """The same GEMM of rows that were gathered before it."""
    for numbers, operand in GATHERED.items():
        rows_T = sample.arguments.get(numbers)
        if rows_T is None or sample.op == "group_quantize":
            continue
        rows_T = rows_T.long().clamp(min=0)
        changed = {operand: sample[operand][rows_T], numbers: None}
        if "scale_a" in sample.arguments:
            changed["scale_a"] = F.pad(sample["scale_a"][:, rows_T], (0, -len(rows_T) % 4))
        return sample.but(**changed)
    return sample


def bias(groups: Groups, dtype: torch.dtype, options: Options) -> Arguments:
    """A bias where `bias=True`, of the result's dtype."""
    if not options.pop("bias", False):
        return {}
    return {"bias": torch.randn(groups.E, groups.N).to(options.get("out_dtype", dtype))}


def low_rank(groups: Groups, dtype: torch.dtype, options: Options) -> Arguments:
    """The operands of a second product where `r` is given, in the layout `low_layout`."""
    r, layout = options.pop("r", None), options.pop("low_layout", "dense")
    if r is None:
        return {}
    b_low = torch.randn(groups.E, r, groups.N).to(dtype)
    return {"a_low": rows(groups, r, dtype, layout), "b_low": lay_out(b_low, layout)}


def main_grad(groups: Groups, options: Options) -> Tensor:
    """[E, N, K] to add to, with negative zeros, which adding zero would make positive."""
    grad = torch.randn(groups.E, groups.N, groups.K).to(options.pop("grad_dtype", FP32))
    grad[:, 0, 0] = -0.0
    return grad


def main_grads(groups: Groups, options: Options) -> list[Tensor]:
    """The same as a tensor an expert, or as views of one."""
    grad = main_grad(groups, options)
    return per_expert(grad) if options.pop("per_expert", True) else list(grad)


def kept_weight(groups: Groups, options: Options) -> Arguments:
    """q, scale and q_t of another weight under block scaling."""
    q, scale, q_t = reference.quantize_weight(weight(groups, FP32), reference.Scaling())
    return {"q": q, "scale": scale, "q_t": q_t if options.pop("columnwise", True) else None}


def scales(groups: Groups, options: Options | None = None) -> Tensor:
    """[E] of delayed scaling, for numbers around 1: some saturate. 0 for every other if "first"."""
    scale = 0.005 + 0.01 * torch.rand(groups.E)
    if options is not None and options.pop("first", False):
        scale[::2] = 0
    return scale


def recorded_amax(groups: Groups, options: Options) -> Tensor | None:
    return torch.rand(groups.E) if options.pop("amax", True) else None
