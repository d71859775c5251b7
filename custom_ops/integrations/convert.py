# SPDX-License-Identifier: Apache-2.0
"""The call that converts a model's experts, and its report."""

import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.integrations.adapter import (
    Changes,
    Converted,
    Experts,
    Request,
    Write,
    check_registration,
    class_before,
)
from grouped_linear.integrations.experts import experts_of
from grouped_linear.meta_kernels.rules import E4M3, dtype_name
from grouped_linear.nn.checks import check_flags, check_model, check_recipe
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.quantized.frozen import frozen_of
from grouped_linear.quantized.keep import SCALE, Weights, check_weights_kept, local_part, recipe_for
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe


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
    weights: str
    """How they are kept: ``"frozen in FP8"`` or MXFP4, ``"frozen in FP8 as loaded"`` or MXFP4,
    ``"both"``, or the dtype of plain tensors."""
    nbytes: int
    """Of the weights and their scales, on this process."""
    error: float | None = None
    """Of weights that were quantized: the norm of their error, as a part of the weights' norm."""


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
    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)
    """Other recipes, by patterns of the experts' names."""

    def __repr__(self) -> str:
        alike: dict[tuple[str, ...], list[ConvertedExperts]] = {}
        for one in self.converted:
            key = _pattern(one.name), one.form, str(one.num_experts), one.weights
            alike.setdefault(key, []).append(one)
        rows = [("module", "modules", "form", "experts", "parameters", "weights")]
        for (name, form, experts, kept), same in alike.items():
            kept += f", {_size(sum(one.nbytes for one in same))}"
            errors = [one.error for one in same if one.error is not None]
            if errors:
                ends = dict.fromkeys(f"{100 * end:.3g}%" for end in (min(errors), max(errors)))
                kept += f", error {' to '.join(ends)}"
            numbers = sum(one.num_parameters for one in same)
            rows.append((name, str(len(same)), form, experts, f"{numbers:,}", kept))
        lines = [*aligned(rows, "<><>><"), f"recipe: {self.recipe!r}"]
        lines += [f"recipe of {pattern}: {recipe!r}" for pattern, recipe in self.recipes.items()]
        return "\n".join([*lines, *(f"skipped: {line}" for line in _lines_of(self.skipped))])


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    weights: Weights = None,
    recipes: Mapping[str, Recipe | None] | None = None,
    save_gate_up_in_fp8: bool = False,
) -> Conversion:
    """Have all of a model's experts computed by this package, in place.

    It recognises:

    - **Hugging Face models**: experts that go through transformers' experts interface. The model
      keeps its modules, parameters and configuration. The experts get a configuration of their own,
      so ``set_experts_implementation`` no longer reaches them. PEFT's adapters on experts compute
      here, too.
    - **torchtitan's experts**: its ``GroupedExperts``, whose multiplications are this package's
      afterwards; its fused ones (w13) and those of its GPT-OSS, which get a fused forward.

    A ModuleList of experts is not converted: :meth:`grouped_linear.GroupedMLP.from_experts` and
    :meth:`grouped_linear.GroupedLinear.from_linears` make a layer of one.

    A model is converted as a whole or not at all, unless memory runs out. Convert after a
    checkpoint is loaded, and before sharding and DistributedDataParallel. Parameters continue to
    learn, also in an optimizer that was made before, except weights that are frozen. A warning says
    if the optimizer must be made again. A converted model can be copied and pickled. docs/models.md
    lists the models.

    Args:
        model: a model, or one module of experts; torchtitan's experts may be on the meta device. To
            freeze weights of a Hugging Face model give the whole model: if a part is converted,
            ``save_pretrained`` of the whole is refused.
        recipe: how the GEMMs are computed; None for the activations' dtype, or where ``weights`` is
            "both" or "fp8" for ``Float8BlockScaling()``.
        weights: how the experts' weights are kept. None: as they are. ``"both"``: in high precision
            and FP8, as ``GroupedTensorWithMaster``, for training. ``"fp8"``: frozen in FP8 alone,
            as bytes in plain parameters. ``"mxfp4"``: frozen in 4.25 bits an element. Experts that
            a checkpoint has in FP8 or MXFP4 stay as they are with None; the option of their format
            makes them such bytes in the same memory. torchtitan's fused w13 takes only None.
            ``"fp8"`` takes no biases and no weights stored as [E, in_features, out_features];
            ``"mxfp4"`` and a recipe with ``qat`` take in_features that are multiples of 32.
        recipes: other recipes for some of the experts, by ``fnmatch`` patterns of their names in
            ``named_modules``: ``{"model.layers.0.*": None}`` computes the first layer without FP8.
            The last pattern that matches counts. With ``weights``, experts whose pattern has None
            keep plain weights.
        save_gate_up_in_fp8: of Hugging Face experts, see :func:`grouped_linear.grouped_mlp`.

    Returns:
        The converted experts, how their weights are kept, in how many bytes and with which error,
        and modules that look like experts and were skipped, with the reason.

    Raises:
        ValueError: if nothing is recognised; for a pattern of ``recipes`` that matches no experts;
            for experts that cannot be converted as asked, which the sentence explains; with
            ``weights`` for parameters that have hooks or are in DistributedDataParallel. The model
            is then unchanged.
        TypeError: if `model` is not a module.
        ImportError: for a Hugging Face model of transformers older than 5.23.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> print(convert(model))
    module                      modules  form            experts  parameters  weights
    model.layers.*.mlp.experts        2  MixtralExperts        8      98,304  float32, 393.2 kB
    recipe: None
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    given = recipe_for(recipe, weights), weights, save_gate_up_in_fp8, recipes or {}
    return carry_out(Request(model, *given))


@torch.inference_mode(False)  # new parameters are to be ordinary ones
def carry_out(request: Request) -> Conversion:
    """Do what :func:`convert` was asked for."""
    found, writes = plans_of(request)
    changes = Changes()
    for write in writes:
        write(changes)
    changes.warn_of_holders()
    converted = tuple(_described(name, experts, changes) for name, experts in found.items())
    skipped = _look_alikes(request.model)
    return Conversion(request.recipe, converted, skipped, dict(request.recipes))


def plans_of(request: Request) -> tuple[dict[str, Experts], list[Write]]:
    """A model's experts by name and what is to be written, after all checks."""
    model = request.model
    _check(model, request)
    found = {
        name: experts
        for name, module in model.named_modules()
        if (experts := experts_of(module)) is not None and experts.plan is not None
    }
    _check_found(model, found, request)
    writes = [e.plan(name, request.of(name)) for name, e in found.items() if e.plan is not None]
    names = [name for name, e in found.items() if e.library == "transformers"]
    if "peft" in sys.modules and any("base_layer" in name.split(".") for name in names):
        from grouped_linear.integrations.peft import check_adapters, group_adapters

        check_adapters("convert", model)
        writes.append(lambda changes: group_adapters(model))
    if names:
        from grouped_linear.integrations.checkpoints.tensors import save_as_published

        writes.append(lambda changes: save_as_published(model))
    return found, writes


def _check(model: Any, request: Request) -> None:
    """Raise for arguments that no model could be converted with."""
    check_model("convert", model)
    check_recipe("convert", request.recipe)
    check_flags("convert", save_gate_up_in_fp8=request.save_gate_up_in_fp8)
    check_weights_kept("convert", request.recipe, request.weights)
    recipes: Any = request.recipes
    if not isinstance(recipes, Mapping):
        raise ValueError(
            "convert: recipes must map patterns of names to recipes, as "
            f"{{'model.layers.0.*': None}}, got {type(recipes).__name__}: recipe= is that of all "
            "experts"
        )
    for pattern, recipe in recipes.items():
        if not isinstance(pattern, str):
            raise ValueError(f"convert: a pattern of recipes must be a string, got {pattern!r}")
        where = f"convert: recipes[{pattern!r}]"
        check_recipe(where, recipe)
        if recipe is not None:
            check_weights_kept(where, recipe, request.weights)
    if request.weights is None:
        return
    check_registration()
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "convert: DistributedDataParallel holds the parameters that weights="
            f"{request.weights!r} replaces: convert before it is made"
        )


def _check_found(model: nn.Module, found: Mapping[str, Experts], request: Request) -> None:
    """Raise ValueError if a model has no experts to convert, or its recipes do not fit them."""
    if not found:
        if any(isinstance(module, Converted) for module in model.modules()):
            name = class_before(model).__name__
            raise ValueError(f"convert: experts of {name} are converted already")
        skipped = _look_alikes(model)
        remedy = ": help(grouped_linear.convert) names the forms, and what makes a layer of a list"
        if any(isinstance(module, GroupedLinear | GroupedMLP) for module in model.modules()):
            remedy = ": its layers are this package's, which take recipe= when they are made"
        if skipped:
            remedy = f", and these look like experts: {', '.join(_lines_of(skipped))}"
        raise ValueError(
            f"convert: {type(model).__name__} has no experts of a form that is known{remedy}"
        )
    unused = [repr(p) for p in request.recipes if not any(fnmatchcase(n, p) for n in found)]
    if unused:
        raise ValueError(
            f"convert: no experts have a name that matches {', '.join(unused)} of recipes: names "
            f"are whole, as {next(iter(found))!r}"
        )
    kept: dict[int, tuple[str, Any]] = {}
    for name, experts in found.items():
        asked = request.of(name)
        way = asked.weights, asked.weights == "fp8" and asked.recipe and asked.recipe.weight
        for p in map(experts.module._parameters.get, experts.weights):
            other, of_other = kept.setdefault(id(p), (name, way))
            if p is not None and of_other != way:
                raise ValueError(
                    f"convert: {name} has a weight of {other}: recipes must keep both in one way"
                )


# --- the report ----------------------------------------------------------------------------------


def _described(name: str, experts: Experts, changes: Changes) -> ConvertedExperts:
    """The report's entry of converted experts."""
    module, error, numbers, nbytes = experts.module, None, 0, 0
    if module in changes.squares:
        off, whole = changes.squares[module].tolist()
        error = math.sqrt(off / whole) if whole else 0.0
    first, frozen = local_part(getattr(module, experts.weights[0])), frozen_of(module)
    as_loaded = {E4M3: "FP8", torch.int8: "MXFP4"}.get(first.dtype)  # by transformers
    kept = f"frozen in {as_loaded} as loaded" if as_loaded else dtype_name(first.dtype)
    if isinstance(first, GroupedTensorWithMaster):
        kept = "both"
    for key, p in module.named_parameters():
        if p.dim() > 2 and not key.endswith("_bias"):
            nbytes += local_part(p).nbytes
        if key in frozen:
            kept = f"frozen in {frozen[key].weights.upper()}"
            numbers += p.numel() * frozen[key].storage.per_entry
        elif not key.endswith(SCALE):
            numbers += p.numel() * (1 + (p.dtype == torch.int8))  # two in a byte
    return ConvertedExperts(name, experts.form, experts.num_experts, numbers, kept, nbytes, error)


def aligned(lines: Sequence[Sequence[str]], sides: str = "<<") -> list[str]:
    """Columns of one width, to the left or the right as format strings say it; ">" by default."""
    sides = sides.ljust(len(lines[0]), ">")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    ]


def _lines_of(skipped: Mapping[str, str]) -> list[str]:
    """Names and reasons, those that are alike once."""
    counts = Counter((_pattern(name), why) for name, why in skipped.items())
    return [
        f"{name} ({why}; {n} of them)" if n > 1 else f"{name} ({why})"
        for (name, why), n in counts.items()
    ]


def _pattern(name: str) -> str:
    """A module's name with ``*`` for numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(the model)"


def _size(nbytes: float) -> str:
    """In decimal units, as memory of a GPU is sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _look_alikes(model: nn.Module) -> dict[str, str]:
    """Why modules that look like experts are skipped, by name, where this package computes none."""
    skipped: dict[str, str] = {}
    done: tuple[str, ...] = ()  # prefixes of converted modules, and of those reported as a whole
    for name, module in model.named_modules():
        if name.startswith(done):
            continue
        is_known = experts_of(module) is not None
        why = "" if is_known else _why_skipped(name, module)
        skipped |= {name: why} if why else {}
        done += (f"{name}.",) if why or is_known else ()
    return skipped


def _why_skipped(name: str, module: nn.Module) -> str:
    """Why a module is skipped; empty if it does not look like experts."""
    cls, held = type(module), dict(module.named_parameters(recurse=False))
    named = "expert" in f"{cls.__name__} {name.rpartition('.')[2]}".lower()
    kinds = [type(c) for c in module.children() if any(True for _ in c.parameters())]
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if named and not held:  # layers that hold a tensor of all experts each
        inside = ((n, c) for n, c in module.named_children() if not isinstance(c, _ConvNd))
        held = {f"{n}.{p}": w for n, c in inside for p, w in c.named_parameters(recurse=False)}
        held = {n: w for n, w in held.items() if w.dim() > 2 and w.size(0) > 1}
    stacked = [w.size(0) for w in held.values() if w.dim() > 2 and w.size(0) > 1]
    alike = named or (len(stacked) > 1 and len({*stacked}) == 1)
    matrices = not cls.__module__.startswith("torch.") and any(w.dim() > 1 for w in held.values())
    if not (matrices and alike) and not (named and is_list and len(kinds) > 1 == len({*kinds})):
        return ""
    if cls.__module__.startswith("transformers."):
        return (
            f"{cls.__name__} does not go through transformers' experts interface: give the class a "
            "forward that calls grouped_mlp or grouped_linear"
        )
    if is_list:
        return (
            f"a {cls.__name__} of {kinds[0].__name__}: GroupedMLP.from_experts and "
            "GroupedLinear.from_linears make layers of such"
        )
    inputs = ", ".join([*inspect.signature(cls.forward).parameters][1:])
    return f"no known form has parameters {', '.join(held)} and is called as ({inputs})"
