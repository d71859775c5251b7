"""A call of an op with what it must give, and what the calls share.

T rows, E groups, K in_features, N out_features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_linear.selftest.expected import Outputs
from grouped_linear.selftest.operands import Groups
from grouped_linear.selftest.reference import Scaling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POWERS = Scaling(True)
BOTH = {"columnwise": True, "bias_grad": True}
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A call, and what is returned and then written by it."""

    op: str
    arguments: Arguments
    outputs: Outputs
    what: str = ""


def numbers(groups: Groups, dtype: torch.dtype = torch.int32) -> Tensor:
    """Numbers of rows, of as many as are in groups and three; past the last group none."""
    index_T = torch.randint(groups.valid + 3, (groups.T,)).to(dtype)
    index_T[groups.valid :] = torch.iinfo(dtype).min
    return index_T


def written(op: str) -> list[str]:
    """The names of the arguments that an op writes, by its schema."""
    arguments = getattr(torch.ops.grouped_linear, op).default._schema.arguments
    return [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
