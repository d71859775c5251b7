# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion: converted experts, skipped modules, how weights are kept."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import E4M3, dtype_name
from grouped_linear.quantized.frozen import frozen_of
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.weight import Weights, local_part
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.weight import stores


class ConvertedExperts(NamedTuple):
    """Experts that were converted."""

    name: str
    """The module's name in ``named_modules`` of the model."""
    form: str
    """How they are held: ``"grouped SwiGLU"``, ``"grouped SwiGLU, w13"``, ``"grouped SwiGLU of
    GPT-OSS"``, or the class of a Hugging Face model's experts."""
    num_experts: int
    num_parameters: int
    """Of all these experts together."""
    path: str
    """By which they are computed now, and how their weights are kept if that changed."""
    error: float | None = None
    """Of weights that were quantized: the norm of their error, as a part of the weights' norm."""


class KeptWeights(NamedTuple):
    """Experts' weights that are kept alike."""

    kind: str
    """``"FP8"``, ``"MXFP4"``, ``"both precisions"``, or the dtype of plain tensors."""
    nbytes: int
    """On this process."""
    note: str = ""
    """Their bytes in high precision, or another way to keep them."""

    def __str__(self) -> str:
        return f"{self.kind}, {_size(self.nbytes)}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, repr=False)
class Conversion:
    """The result of :func:`convert`; ``print`` shows it as a table.

    Modules that differ in numbers of their names alone are one row, with ``*`` for the numbers.
    """

    recipe: Recipe | None
    """How the GEMMs are computed."""
    converted: tuple[ConvertedExperts, ...]
    """In the order of ``named_modules``; never empty."""
    skipped: Mapping[str, str]
    """Modules that look like experts and are unchanged: by name, why, in a few words."""
    weights: tuple[KeptWeights, ...] = ()
    """How the weights of all these experts are kept, the most bytes first."""
    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)
    """Other recipes, by patterns of the experts' names."""

    def __repr__(self) -> str:
        alike: dict[tuple[str, ...], list[ConvertedExperts]] = {}
        for one in self.converted:
            key = _pattern(one.name), one.form, str(one.num_experts), one.path
            alike.setdefault(key, []).append(one)
        rows = [("module", "modules", "form", "experts", "parameters", "computed by")]
        for (name, form, experts, path), same in alike.items():
            size = sum(one.num_parameters for one in same)
            rows.append((name, str(len(same)), form, experts, f"{size:,}", path + _errors(same)))
        lines = [*aligned(rows, "<><>><"), f"recipe: {self.recipe!r}"]
        lines += [f"recipe of {pattern}: {recipe!r}" for pattern, recipe in self.recipes.items()]
        lines.append(f"weights: {'; '.join(map(str, self.weights))}")
        lines += [f"skipped: {line}" for line in lines_of(self.skipped)]
        return "\n".join(lines)


def aligned(lines: Sequence[Sequence[str]], sides: str = "<<") -> list[str]:
    """Columns of one width, to the left or the right as format strings say it; ">" by default."""
    sides = sides.ljust(len(lines[0]), ">")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    ]


def _errors(converted: list[ConvertedExperts]) -> str:
    """The smallest and the largest error, for the end of a path."""
    errors = [one.error for one in converted if one.error is not None]
    if not errors:
        return ""
    ends = dict.fromkeys(f"{100 * end:.3g}%" for end in (min(errors), max(errors)))
    return f", error {' to '.join(ends)}"


def lines_of(skipped: Mapping[str, str]) -> list[str]:
    """Names and reasons, those that are alike once."""
    counts = Counter((_pattern(name), why) for name, why in skipped.items())
    return [
        f"{name} ({why}; {n} of them)" if n > 1 else f"{name} ({why})"
        for (name, why), n in counts.items()
    ]


def _pattern(name: str) -> str:
    """A module's name with ``*`` for numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(the model)"


def kept_weights(modules: Mapping[nn.Module, Recipe | None]) -> tuple[KeptWeights, ...]:
    """How the weights [E, N, K] in these modules are kept, the most bytes first.

    Each module has the recipe by which its weights are quantized in a call.
    """
    sizes: dict[tuple[str, torch.dtype, Weights], list[int]] = {}  # bytes with scales, and numbers
    counted: set[int] = set()  # tied ones count once
    for module, recipe in modules.items():
        parameters = dict(module.named_parameters())
        for name, p in parameters.items():
            if p.dim() != 3 or name.endswith(SCALE) or id(p) in counted:
                continue
            counted.add(id(p))
            w, scale = local_part(p), local_part(parameters.get(name + SCALE))
            key = _kind_of(module, name, p), w.dtype, _option_for(module, p, recipe)
            of_kind = sizes.setdefault(key, [0, 0])
            of_kind[0] += w.nbytes + (0 if scale is None else scale.nbytes)
            of_kind[1] += w.numel()
    kept = []
    for (kind, dtype, option), (nbytes, numbers) in sizes.items():
        note = ""
        if option == "both":
            more = _size(2 * numbers)
            note = f'quantized by each call; weights="both": FP8 as well, {more} more'
        elif option == "fp8":
            note = 'frozen, quantized by each call; weights="fp8" quantizes them once'
        if kind != dtype_name(dtype) and dtype.itemsize > 1:
            note = f"{_size(numbers * dtype.itemsize)} as {dtype_name(dtype)}"
        kept.append(KeptWeights(kind, nbytes, note))
    return tuple(sorted(kept, key=lambda one: -one.nbytes))


def _option_for(module: nn.Module, p: nn.Parameter, recipe: Recipe | None) -> Weights:
    """The option ``weights`` by which calls would not quantize a plain weight, if it is taken."""
    w = local_part(p)
    has_hooks = p._backward_hooks or p._post_accumulate_grad_hooks
    if w is not p or p.is_meta or has_hooks or type(w) is not nn.Parameter:
        return None
    if recipe is None or not stores(recipe.weight):
        return None
    if p.requires_grad and recipe.keeps_weights_as("both"):
        return "both"
    stays = getattr(module, "is_transposed", False) or getattr(module, "has_bias", False)
    can_freeze = recipe.keeps_weights_as("fp8") and p.element_size() > 1 and not stays
    return "fp8" if can_freeze and not p.requires_grad else None


def how_kept(module: nn.Module, name: str) -> str:
    """The end of :attr:`ConvertedExperts.path`, by one of a module's weights."""
    w = getattr(module, name)  # of parametrized experts no parameter
    kind = _kind_of(module, name, w)
    loaded = " as loaded" if w.dtype == E4M3 or _is_packed(w) else ""
    return "" if kind == dtype_name(w.dtype) else f", weights in {kind}{loaded}"


def num_parameters(module: nn.Module) -> int:
    """Of a module, whatever their numbers are stored in."""
    frozen = frozen_of(module)
    return sum(
        p.numel() * (frozen[name].storage.per_entry if name in frozen else 1 + _is_packed(p))
        for name, p in module.named_parameters()
        if not name.endswith(SCALE)
    )


def _kind_of(module: nn.Module, name: str, w: Tensor) -> str:
    w = local_part(w)
    frozen = frozen_of(module).get(name)
    if isinstance(w, GroupedTensorWithMaster):
        return "both precisions"
    if frozen is not None:
        return frozen.weights.upper()
    if w.dtype.itemsize == 1:
        return "MXFP4" if _is_packed(w) else "FP8"
    return dtype_name(w.dtype)


def _is_packed(w: Tensor) -> bool:
    """Whether transformers has loaded a weight of 4 bits, two numbers a byte."""
    return w.dtype == torch.int8


def _size(nbytes: float) -> str:
    """In decimal units, as memory of a GPU is sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
