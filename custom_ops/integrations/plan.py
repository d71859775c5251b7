"""A conversion in two passes: a plan, in which everything is checked, and its writes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, MAX_GROUPS, dtype_name
from grouped_linear.quantized.weight import Weights, local_part


class ConvertedExperts(NamedTuple):
    """Experts that were converted."""

    name: str
    """The module's name in ``named_modules`` of the model: of the block, if a list was replaced."""
    form: str
    """How they were held: ``"Linear"``, ``"SwiGLU"``, ``"grouped SwiGLU"``, ``"grouped SwiGLU,
    w13"``, ``"grouped SwiGLU of GPT-OSS"``, or the class of a Hugging Face model's experts."""
    num_experts: int
    num_parameters: int
    """Of all these experts together."""
    path: str
    """What computes them now, and how their weights are kept if that changed."""


@dataclass
class Plan:
    """What will be converted, and the writes that do it.

    Making a plan checks all that its writes need, and changes nothing. So a model is converted as a
    whole or not at all, unless memory runs out.
    """

    converted: list[ConvertedExperts] = field(default_factory=list)
    writes: list[Callable[[], None]] = field(default_factory=list)

    def add(self, other: "Plan") -> None:
        """Append another plan."""
        self.converted += other.converted
        self.writes += other.writes

    def carry_out(self) -> list[ConvertedExperts]:
        """Write. What a write replaces is freed before the next one."""
        for write in self.writes:
            write()
        return self.converted


def replace_parameter(module: nn.Module, name: str, w: Tensor) -> None:
    """Give a parameter of a module another tensor, of the same shape and numbers.

    It stays the same object where torch can do that, so that an optimizer which has it steps it.
    """
    own = module.get_parameter(name)
    new = nn.Parameter(w, requires_grad=own.requires_grad)
    try:
        torch.utils.swap_tensors(own, new)
    except RuntimeError:  # a weak reference to it, as torch's hooks hold
        setattr(module, name, new)


def how_weights_are_kept(weights: Weights) -> str:
    """The end of :attr:`ConvertedExperts.path`."""
    texts = {None: "", "both": ", weights in both precisions", "fp8": ", weights in FP8"}
    return texts[weights]


def check_weights(where: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for expert weights that the kernels do not take.

    Args:
        where: what an error begins with, the module's name at its end.
        weights: by name, [E, N, K] or of one expert [N, K]. Of a DTensor, this process's part
            counts.
    """
    for name, w in weights:
        local = local_part(w)
        *groups, N, K = local.shape
        if local.dtype not in ACTIVATIONS:
            raise ValueError(
                f"{where}: {name} must be bfloat16, float16 or float32, got "
                f"{dtype_name(local.dtype)}"
            )
        check_sizes(where, name, [*groups, N, K])


def check_sizes(where: str, name: str, shape: list[int]) -> None:
    """Raise ValueError for a weight [E, N, K] or [N, K] of sizes that the kernels do not take."""
    *groups, N, K = shape
    if N <= 0 or K <= 0 or N % FEATURE_MULTIPLE or K % FEATURE_MULTIPLE:
        raise ValueError(
            f"{where}: {name} is {shape}, and kernels take in_features and out_features that are "
            f"positive multiples of {FEATURE_MULTIPLE}"
        )
    if groups and not 1 <= groups[0] <= MAX_GROUPS:
        raise ValueError(f"{where}: {name} is {shape}, and kernels take 1 to {MAX_GROUPS} experts")
