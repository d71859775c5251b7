# SPDX-License-Identifier: Apache-2.0
"""The call that converts a model's experts: all are checked, then all are written."""

import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.integrations import grouped_experts
from grouped_linear.integrations.conversion import (
    Conversion,
    ConvertedExperts,
    how_kept,
    kept_weights,
    lines_of,
    num_parameters,
)
from grouped_linear.integrations.converted_class import class_before, is_converted
from grouped_linear.integrations.experts import Experts, experts_of
from grouped_linear.integrations.look_alikes import look_alikes
from grouped_linear.integrations.request import Changes, Request, warn_of_others_that_hold
from grouped_linear.integrations.wrappers import adapted
from grouped_linear.nn.checks import check_flags, check_model, check_recipe
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.quantized.weight import Weights, check_weights_kept, recipe_for
from grouped_linear.recipes import Recipe


@torch.inference_mode(False)  # new parameters are to be ordinary ones
def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    weights: Weights = None,
    recipes: Mapping[str, Recipe | None] | None = None,
    save_gate_up_in_fp8: bool = False,
) -> Conversion:
    """Have all of a model's experts computed by this package, in place.

    Recognised are:

    - **Hugging Face models**: experts that go through transformers' experts interface. The model
      keeps its modules and parameters; an experts implementation of the recipe is registered and
      chosen, see :func:`grouped_linear.integrations.transformers.register`. transformers has the
      choice in the configuration, so the model gets copies of its configuration objects, and
      others that share these stay as they were. PEFT's adapters on experts compute here, too.
    - **torchtitan's experts**: a module whose only parameters are w1 and w3 [E, F, H] and w2
      [E, H, F], called as ``(x, num_tokens_per_expert)``; or w1_EFD, w3_EFD and w2_EDF, called as
      ``(x_RD, num_tokens_per_expert_E)``; also torchtitan's w13 [E, F, 2, H] and its GPT-OSS
      experts, which have biases. The module gets another forward. Names and shapes do not show the
      formula, so experts run on random rows, in training mode, and must give SwiGLU's result up to
      three times the error that rounding explains.

    A ModuleList of experts is not converted: :meth:`grouped_linear.GroupedMLP.from_experts` and
    :meth:`grouped_linear.GroupedLinear.from_linears` make a layer of one.

    A model is converted as a whole or not at all, unless memory runs out: everything is checked
    before anything is written. Convert after a checkpoint is loaded, and before sharding and
    DistributedDataParallel. Parameters that learn go on to learn, in an optimizer that was made
    before, too, except weights that ``weights="fp8"`` and ``"mxfp4"`` freeze; a warning says if
    the optimizer must be made again. A converted model can be copied and pickled. docs/models.md
    lists the models; docs/from_other_libraries.md has torchtitan's.

    Args:
        model: a model, or a module that is to be converted itself; torchtitan's experts may be on
            the meta device.
        recipe: how the GEMMs are computed; None for the activations' dtype, or where ``weights`` is
            "both" or "fp8" for ``Float8BlockScaling()``.
        weights: how the experts' weights are kept. None: as they are. ``"both"``: in high precision
            and FP8, as ``GroupedTensorWithMaster``, for training. ``"fp8"``: frozen in FP8 alone,
            as bytes in plain parameters. ``"mxfp4"``: frozen in 4.25 bits an element, with an error
            that the report says. Experts of a checkpoint in FP8 or MXFP4 are read as they are, or
            become such bytes in the same memory by the option of their format; the others are
            refused. Refused are also: w13 with any of the three; biases and weights stored as
            [E, in_features, out_features] with ``"fp8"``; in_features that are no multiple of 32
            with ``"mxfp4"``.
        recipes: other recipes for some of the experts, by patterns of their names in
            ``named_modules``, as ``fnmatch`` has them: ``{"model.layers.0.*": None}`` computes the
            first layer without FP8. Of several that match, the last one counts. With ``weights``
            experts for which a pattern has None keep plain weights.
        save_gate_up_in_fp8: of Hugging Face experts, see :func:`grouped_linear.grouped_mlp`.

    Returns:
        The converted experts, the errors of weights that were quantized, how weights are kept and
        in how many bytes, and modules that look like experts and were skipped, with the reason.

    Raises:
        ValueError: if nothing is recognised; for experts that cannot be converted as asked, for
            which the sentence gives the reason; for a pattern of ``recipes`` that matches no
            experts; for weights that the kernels do not take; and with ``weights`` for parameters
            that have hooks or are in DistributedDataParallel. The model is then unchanged.
        TypeError: if `model` is not a module.
        ImportError: for a Hugging Face model of transformers older than 5.23.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> print(convert(model))
    module                      modules  form            experts  parameters  computed by
    model.layers.*.mlp.experts        2  MixtralExperts        8      98,304  experts implementation
    recipe: None
    weights: float32, 393.2 kB
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    request = Request(recipe_for(recipe, weights), weights, save_gate_up_in_fp8, recipes or {})
    _check(model, request)
    found: dict[str, Experts] = {}
    for name, module in model.named_modules():
        experts = experts_of(module)
        if experts is not None and (experts.library == "transformers" or not experts.computed_here):
            found[name] = experts
    _check_found(model, found, request)
    of_transformers = {n: e.module for n, e in found.items() if e.library == "transformers"}
    of_torchtitan = {n: e.module for n, e in found.items() if e.library == "torchtitan"}
    changes = Changes()
    if of_transformers:
        from grouped_linear.integrations import hugging_face

        hugging_face.check(model, of_transformers, request)
    for name, module in of_torchtitan.items():
        grouped_experts.check(name, module, request.of(name))
    if of_transformers:
        hugging_face.convert(model, of_transformers, request, changes)
    for name, module in of_torchtitan.items():
        grouped_experts.convert(module, request.of(name), changes)
    warn_of_others_that_hold(changes)
    return _report(model, found, request, changes)


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
    if request.weights is not None and _is_in_ddp(model):
        raise ValueError(
            "convert: DistributedDataParallel holds the parameters that weights="
            f"{request.weights!r} replaces: convert before it is made"
        )


def _is_in_ddp(model: nn.Module) -> bool:
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _check_found(model: nn.Module, names: Collection[str], request: Request) -> None:
    """Raise ValueError if a model has no experts to convert, or a pattern matches none of them."""
    if not names:
        if any(map(is_converted, model.modules())):
            name = class_before(model).__name__
            raise ValueError(f"convert: experts of {name} are converted already")
        skipped = look_alikes(model)
        remedy = ": help(grouped_linear.convert) names the forms, and what makes a layer of a list"
        if any(isinstance(module, GroupedLinear | GroupedMLP) for module in model.modules()):
            remedy = ": its layers are this package's, which take recipe= when they are made"
        if skipped:
            remedy = f", and these look like experts: {', '.join(lines_of(skipped))}"
        raise ValueError(
            f"convert: {type(model).__name__} has no experts of a form that is known{remedy}"
        )
    unused = [repr(p) for p in request.recipes if not any(fnmatchcase(n, p) for n in names)]
    if unused:
        raise ValueError(
            f"convert: no experts have a name that matches {', '.join(unused)} of recipes: names "
            f"are whole, as {next(iter(names))!r}"
        )


def _report(
    model: nn.Module, found: Mapping[str, Experts], request: Request, changes: Changes
) -> Conversion:
    has_adapters, converted = adapted(model), []
    for name, experts in found.items():
        module = experts.module
        path = "grouped_linear" if experts.library == "torchtitan" else "experts implementation"
        path += how_kept(module, experts.weights[0])
        path += ", with adapters" if module in has_adapters else ""
        error = None
        if module in changes.squares:
            off, whole = changes.squares[module].tolist()
            error = math.sqrt(off / whole) if whole else 0.0
        sizes = experts.num_experts, num_parameters(module)
        converted.append(ConvertedExperts(name, experts.form, *sizes, path, error))
    in_ddp = _is_in_ddp(model)  # where weights cannot be kept in another way
    recipes = {e.module: None if in_ddp else request.of(n).recipe for n, e in found.items()}
    skipped, kept = look_alikes(model), kept_weights(recipes)
    return Conversion(request.recipe, tuple(converted), skipped, kept, dict(request.recipes))
