"""One call that converts a model's experts, whatever form they have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from grouped_linear.integrations.convert_experts import (
    check_model,
    check_not_converted,
    plan_experts,
)
from grouped_linear.integrations.converted_class import Forward
from grouped_linear.integrations.look_alikes import (
    SkippedExperts,
    goes_through_interface,
    look_alikes,
)
from grouped_linear.integrations.plan import (
    ConvertedExperts,
    KeptWeights,
    Plan,
    kept_weights,
)
from grouped_linear.integrations.recipes_by_name import RecipesByName
from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.weight import Weights, check_weights_kept
from grouped_linear.recipes import Float8BlockScaling, Recipe


@dataclass(frozen=True, repr=False)
class Conversion:
    """What :func:`convert` did; ``print`` shows it as a table.

    Modules that differ in numbers of their names alone are one row, with ``*`` for the numbers.
    """

    recipe: Recipe | None
    """How the GEMMs are computed."""
    converted: tuple[ConvertedExperts, ...]
    """In the order of ``named_modules``; never empty."""
    skipped: tuple[SkippedExperts, ...]
    """What looks like experts and is unchanged."""
    weights: tuple[KeptWeights, ...] = ()
    """How the weights of all these experts are kept, the most bytes first."""
    still_held: int = 0
    """How many parameters that learn were replaced and are held by something else, too.

    An optimizer that was made before steps these, in vain.
    """
    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)
    """Other recipes, by patterns of the experts' names."""

    def __repr__(self) -> str:
        """The table, below what an optimizer that was made before would miss."""
        head = ("module", "modules", "form", "experts", "parameters", "computed by")
        alike: dict[tuple[str, ...], list[int]] = {}
        for one in self.converted:
            key = _pattern(one.name) or "(the model)", one.form, str(one.num_experts), one.path
            alike.setdefault(key, []).append(one.num_parameters)
        rows = [
            (name, str(len(sizes)), form, experts, f"{sum(sizes):,}", path)
            for (name, form, experts, path), sizes in alike.items()
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        numbers = (1, 3, 4)
        lines = [
            "  ".join(
                cell.rjust(width) if i in numbers else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        ]
        if self.still_held:
            lines.insert(
                0,
                f"{self.still_held} parameters were replaced and something still holds them: an "
                "optimizer that was made before does not step the new ones, make another",
            )
        lines.append(f"recipe: {self.recipe!r}")
        lines += [f"recipe of {pattern}: {own!r}" for pattern, own in self.recipes.items()]
        lines.append(f"weights: {'; '.join(map(str, self.weights))}")
        lines += [f"skipped: {line}" for line in _lines_of(self.skipped)]
        return "\n".join(lines)


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _lines_of(skipped: tuple[SkippedExperts, ...]) -> list[str]:
    """Name and reason of what was skipped, alike ones once."""
    counts: dict[tuple[str, str], int] = {}
    for one in skipped:
        key = _pattern(one.name) or "(the model)", one.why
        counts[key] = counts.get(key, 0) + 1
    return [f"{name} ({why}{_times(n)})" for (name, why), n in counts.items()]


def _times(n: int) -> str:
    return f"; {n} of them" if n > 1 else ""


@torch.inference_mode(False)  # new parameters are to be ordinary ones
def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    weights: Weights = None,
    forwards: Mapping[type[nn.Module], Forward] | None = None,
    recipes: Mapping[str, Recipe | None] | None = None,
    **options: Any,
) -> Conversion:
    """Have all of a model's experts computed by this package, in place.

    Recognised are:

    ============================  ==================================================================
    Hugging Face models           Experts that go through transformers' experts interface. The model
                                  keeps its modules and parameters; an experts implementation of the
                                  recipe is registered and chosen. See
                                  :func:`grouped_linear.integrations.transformers.register`, and of
                                  PEFT's adapters on experts
                                  :func:`grouped_linear.integrations.peft.use_grouped_adapters`.
    experts in one module         w1, w2, w3 [E, ...] as in torchtitan, its GPT-OSS and its fused
                                  w13. The module gets another forward. See
                                  :func:`grouped_linear.convert_experts`.
    a ModuleList of experts       Linear or SwiGLU, in a block whose new forward is given in
                                  ``forwards``. A :class:`grouped_linear.GroupedLinear` or
                                  :class:`grouped_linear.GroupedMLP` replaces the list. See
                                  :func:`grouped_linear.convert_experts`.
    ============================  ==================================================================

    With ``weights="both"`` experts are kept as :class:`grouped_linear.GroupedTensorWithMaster`:
    plain tensors for the rest of the program, and their FP8 numbers, which are made when an
    optimizer, or anything else, writes them. Two more bytes an element make FP8 training fast: no
    call quantizes weights. w13 is refused.

    With ``weights="fp8"`` experts are kept as :class:`grouped_linear.GroupedTensor`, in e4m3 with a
    scale for each 128 x 128 block. All of these serve inference. Experts of a checkpoint in FP8
    become such weights without a change of a byte; under another ``weights`` they are read as they
    are, and do not learn. What required a gradient still does, except in these cases:

    - Hugging Face experts stored as [E, in_features, out_features] (GPT-OSS, Aria) do not learn;
      gradients pass through them to what lies before.
    - w13 is refused.
    - Tensor and expert parallelism that make DTensors of parameters (torchtitan's) make them of
      high precision; the experts' forward then says so. FSDP2 keeps them in FP8.

    Experts in one module and Hugging Face's stay the same parameters, so an optimizer that was made
    before steps them, whatever ``weights`` is. Those of a list are replaced; so is a parameter that
    a graph which is still alive, or a weak reference, leads to. The first line of what is returned
    says so if something still holds a parameter that was replaced.

    A model is converted as a whole or not at all, unless memory runs out: everything is checked
    before anything is written. A converted model can be copied and pickled, ``forwards``
    permitting, and computes where it is unpickled.

    Convert after a checkpoint is loaded, before sharding, DistributedDataParallel and the
    optimizer. Nothing is copied to float32 as a whole. One list, or one weight that is quantized,
    is in memory twice at a time.

    Args:
        model: a model, or a module that is to be converted itself; for experts in one module and
            lists it may be on the meta device.
        recipe: how the GEMMs are computed; None for the activations' dtype, or with ``weights`` for
            ``Float8BlockScaling()``.
        weights: ``"both"`` to keep the experts' weights in high precision and FP8, ``"fp8"`` to
            keep them in FP8 alone; None to leave them as they are.
        forwards: for each class of block with a ModuleList of experts, its new forward, a function
            of the block and its inputs. Subclasses that inherit the block's forward get it, too.
        recipes: other recipes for some of the experts, by patterns of their names in
            ``named_modules`` (of the block, if it holds a list), as ``fnmatch`` has them:
            ``{"model.layers.0.*": None}`` computes the first layer without FP8. Of several that
            match, the last one counts. With ``weights`` experts whose recipe is None keep plain
            weights.
        options: of the modules that replace lists: ``cache_weights``, ``fuse_wgrad_accumulation``
            and others of :func:`grouped_linear.convert_experts`. ``save_gate_up_in_fp8`` is of
            those and of Hugging Face experts; see :func:`grouped_linear.grouped_mlp`. With
            ``weights="fp8"`` also ``stochastic_rounding``, of what optimizers write, and of all
            experts ``columnwise``, to keep weights transposed as well: a second byte an element,
            which dgrad reads. Without it each backward transposes one weight after the other.

    Returns:
        What was converted, how its weights are kept and in how many bytes, and what looks like
        experts and was skipped, with the reason.

    Raises:
        ValueError: if nothing is recognised, and where
            :func:`grouped_linear.convert_experts`,
            :func:`grouped_linear.integrations.transformers.register` or
            :func:`grouped_linear.integrations.transformers.quantize_experts` raise it; for
            a pattern of ``recipes`` that matches no experts; for ``weights`` that are not known, or
            need another recipe; for ``options`` that no module takes; and for weights that the
            kernels do not take: in_features and out_features that are no multiples of 16, more than
            1024 experts, another dtype than bfloat16, float16 and float32. The model is then
            unchanged.
        TypeError: for what is no module.
        ImportError: for a Hugging Face model of transformers older than 5.23.

    >>> import torch
    >>> from grouped_linear import Float8BlockScaling
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
    check_model("convert", model)
    check_recipe("convert", recipe)
    recipe = Float8BlockScaling() if recipe is None and weights is not None else recipe
    stochastic_rounding, columnwise = map(options.get, ("stochastic_rounding", "columnwise"))
    check_weights_kept("convert", recipe, weights, stochastic_rounding, columnwise=columnwise)
    if weights is not None:
        options["weights"] = weights
    experts = {n: m for n, m in model.named_modules() if goes_through_interface(m)}
    of_both = "weights", "save_gate_up_in_fp8", "columnwise"
    of_layers = [option for option in options if option not in of_both]
    if experts and of_layers:
        raise ValueError(
            "convert: experts of a Hugging Face model stay what they are, so there is nothing to "
            f"give {' and '.join(of_layers)} to"
        )
    by_name = RecipesByName("convert", recipe, recipes, weights)
    plan = Plan()
    if experts:
        from grouped_linear.integrations.hugging_face import plan_hugging_face

        save_in_fp8 = options.get("save_gate_up_in_fp8", False)
        kept = weights, save_in_fp8, bool(columnwise)
        plan.add(plan_hugging_face(model, experts, recipe, *kept, by_name.of))
    plan.add(plan_experts("convert", model, forwards, recipe, options, by_name.of))
    if not plan.converted:
        _raise_for_nothing(model)
    by_name.check_used()
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    converted = sorted(plan.carry_out(), key=lambda one: order[one.name])
    return Conversion(
        recipe,
        tuple(converted),
        tuple(look_alikes(model)),
        kept_weights((model.get_submodule(one.name) for one in converted), recipe),
        plan.still_held(),
        by_name.recipes,
    )


def _raise_for_nothing(model: nn.Module) -> None:
    check_not_converted("convert", model)
    name, skipped = type(model).__name__, _lines_of(tuple(look_alikes(model)))
    raise ValueError(
        f"convert: {name} has no experts of a form that is known"
        + (f", and these look like experts: {', '.join(skipped)}" if skipped else "")
    )
