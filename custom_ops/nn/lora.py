# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA): what a user gives, and its checks.

E groups (experts), K in_features, N out_features, r the rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_linear.autograd.low_rank import Adapter
from grouped_linear.meta_kernels.rules import ACTIVATIONS
from grouped_linear.ops.constants import constant, is_finite, is_integer, is_number, keep_constants
from grouped_linear.recipes.format import check_flags

MAX_RANK = 256


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """The adapter of one projection: ``y[t] += scaling * (x[t] @ a[e].T) @ b[e].T``.

    Several adapters of one projection are passed as one, whose rank is the sum of theirs: each
    ``scaling * a`` concatenated along r, and so ``b``.
    """

    a: Tensor
    """[E, r, K] bfloat16, float16 or float32, r from 1 to 256."""
    b: Tensor
    """[E, N, r]."""
    scaling: float = 1
    dropout: float = 0
    """The probability with which a feature of the adapter's input is zeroed; 0 for none."""

    def __post_init__(self) -> None:
        keep_constants(self, "scaling", "dropout")


# FSDP2's hooks and torch.export look for tensors in arguments. A saved program has the name, and an
# example of the arguments, which torch.export.load reads as torch.load does.
torch.export.register_dataclass(
    LoraWeights, serialized_type_name=f"{__name__}.{LoraWeights.__qualname__}"
)
torch.serialization.add_safe_globals([LoraWeights])


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank beside a layer's weights, which are frozen.

    With A [E, rank, K] and B [E, N, rank], for the rows t of expert e::

        y[t] = x[t] @ weight[e].T + bias[e] + alpha / rank * (dropout(x[t]) @ A[e].T) @ B[e].T

    A starts random and B as zeros, so that the layer starts as it was (arXiv:2106.09685).

    Args:
        rank: from 1 to 256. GEMMs take multiples of 16; others are padded with zeros.
        alpha: None stands for the rank, so that the factor is 1.
        dropout: the probability with which a feature of the adapter's input is zeroed in training.
        rslora: divide alpha by the rank's square root instead (arXiv:2312.03732).
        dtype: of A and B; None for the layer's.

    Raises:
        ValueError: for what is out of range.

    >>> from grouped_linear import GroupedLinear, Lora
    >>> layer = GroupedLinear(4, 64, 32, lora=Lora(rank=8, alpha=16))
    >>> [name for name, p in layer.named_parameters() if p.requires_grad]
    ['weight_lora_a', 'weight_lora_b']
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0
    rslora: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        rank = self.rank
        if not (is_integer(rank) and 1 <= rank <= MAX_RANK):
            raise ValueError(f"Lora: rank must be an integer from 1 to {MAX_RANK}, got {rank!r}")
        alpha = self.alpha
        if alpha is not None and not is_finite(alpha):
            raise ValueError(f"Lora: alpha must be None or a finite number, got {alpha!r}")
        if not (is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(
                f"Lora: dropout must be at least 0 and less than 1, got {self.dropout!r}"
            )
        check_flags("Lora", rslora=self.rslora)
        if self.dtype is not None and self.dtype not in ACTIVATIONS:
            raise ValueError(
                f"Lora: dtype must be None, bfloat16, float16 or float32, got {self.dtype!r}"
            )
        keep_constants(self, "scaling", "dropout")

    @property
    def scaling(self) -> float:
        """The factor of the adapter's product."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapter(self, a_ErK: Tensor, b_ENr: Tensor, training: bool) -> Adapter:
        """The adapter of a call, whose numbers are constants for Dynamo."""
        dropout = constant(self, "dropout") if training else 0
        return Adapter(a_ErK, b_ENr, constant(self, "scaling"), None, dropout)


def adapter_of(op: str, name: str, lora: Any) -> Adapter | None:
    """The adapter of one projection; TypeError for an argument that is no LoraWeights."""
    if lora is None:
        return None
    if not isinstance(lora, LoraWeights):
        raise TypeError(f"{op}: {name} must be None or a LoraWeights, got {type(lora).__name__}")
    return Adapter(lora.a, lora.b, constant(lora, "scaling"), None, constant(lora, "dropout"))


def check_lora(layer: str, lora: Any) -> None:
    """Raise ValueError unless it is None or a Lora."""
    if lora is not None and not isinstance(lora, Lora):
        raise ValueError(f"{layer}: lora must be None or a grouped_linear.Lora, got {lora!r}")
