"""A conversion in two passes: a plan, in which everything is checked, and its writes."""

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, MAX_GROUPS, dtype_name
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import Weights, local_part
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Float8BlockScaling, Recipe


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


class KeptWeights(NamedTuple):
    """Experts' weights that are kept alike."""

    kind: str
    """``"FP8"``, ``"both precisions"``, or the dtype of plain tensors."""
    nbytes: int
    """What they hold, on this process."""
    note: str = ""
    """What they would take in their dtype alone, or what else could be done with them."""

    def __str__(self) -> str:
        """As the report has it."""
        return f"{self.kind}, {_size(self.nbytes)}" + (f" ({self.note})" if self.note else "")


def kept_weights(modules: Iterable[nn.Module], recipe: Recipe | None) -> tuple[KeptWeights, ...]:
    """How the weights [E, N, K] in these modules are kept, the most bytes first."""
    weights = {
        id(p): p
        for module in modules
        for name, p in module.named_parameters()
        if p.dim() == 3 and not name.endswith("_scale_inv")
    }
    alike: dict[tuple[str, torch.dtype, bool], list[Tensor]] = {}
    for p in weights.values():
        w = local_part(p)
        kind = "FP8" if isinstance(w, GroupedTensor) or w.dtype.itemsize == 1 else ""
        kind = "both precisions" if isinstance(w, GroupedTensorWithMaster) else kind
        kind = kind or dtype_name(w.dtype)
        once = kind == dtype_name(w.dtype) and not p.requires_grad
        advise = once and isinstance(recipe, Float8BlockScaling)
        alike.setdefault((kind, w.dtype, advise), []).append(w)
    kept = []
    for (kind, dtype, advise), same in alike.items():
        note = 'frozen, quantized by each call; weights="fp8" quantizes them once' if advise else ""
        if kind != dtype_name(dtype) and dtype.itemsize > 1:
            plain = sum(w.numel() for w in same) * dtype.itemsize
            note = f"{_size(plain)} as {dtype_name(dtype)}"
        kept.append(KeptWeights(kind, sum(w.nbytes for w in same), note))
    return tuple(sorted(kept, key=lambda one: -one.nbytes))


def _size(nbytes: float) -> str:
    """In decimal units, as memory of a GPU is sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


#: Parameters that learn and were replaced by others. Whoever holds one still, holds the old one.
Replaced = list[weakref.ref[nn.Parameter]]


@dataclass
class Plan:
    """What will be converted, and the writes that do it.

    Making a plan checks all that its writes need, and changes nothing. So a model is converted as a
    whole or not at all, unless memory runs out.
    """

    converted: list[ConvertedExperts] = field(default_factory=list)
    writes: list[Callable[[], Replaced | None]] = field(default_factory=list)
    replaced: Replaced = field(default_factory=list)
    """By the writes."""

    def add(self, other: "Plan") -> None:
        """Append another plan."""
        self.converted += other.converted
        self.writes += other.writes

    def carry_out(self) -> list[ConvertedExperts]:
        """Write. What a write replaces is freed before the next one."""
        for write in self.writes:
            self.replaced += write() or ()
        return self.converted

    def still_held(self) -> int:
        """How many of the replaced parameters something still holds, as an optimizer does."""
        if any(one() is not None for one in self.replaced):
            gc.collect()  # modules and their hooks hold each other
        return sum(one() is not None for one in self.replaced)


def replace_parameter(module: nn.Module, name: str, w: Tensor) -> Replaced:
    """Give a parameter of a module another tensor, of the same shape and numbers.

    It stays the same object where torch can do that, so that an optimizer which has it steps it.
    """
    own = module.get_parameter(name)
    new = nn.Parameter(w, requires_grad=own.requires_grad)
    try:
        torch.utils.swap_tensors(own, new)
    except RuntimeError:  # a weak reference to it, as hooks have, or a graph that ends in it
        setattr(module, name, new)
        return replaced_by_others([own])
    return []


def replaced_by_others(parameters: Iterable[nn.Parameter]) -> Replaced:
    """Those that learn."""
    return [weakref.ref(p) for p in parameters if p.requires_grad]


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
