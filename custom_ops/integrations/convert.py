"""The calls that convert a model's experts: finders make a plan, which is then carried out."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from grouped_linear.integrations.conversion import (
    Conversion,
    ConvertedExperts,
    kept_weights,
    lines_of,
)
from grouped_linear.integrations.converted_class import Forward, is_converted
from grouped_linear.integrations.expert_lists import find_lists
from grouped_linear.integrations.grouped_experts import find_grouped_experts
from grouped_linear.integrations.look_alikes import goes_through_interface, look_alikes
from grouped_linear.integrations.plan import Plan, Request, num_still_held
from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.weight import Weights, check_weights_kept
from grouped_linear.recipes import Float8BlockScaling, Recipe


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

    - **Hugging Face models**: experts that go through transformers' experts interface. The model
      keeps its modules and parameters; an experts implementation of the recipe is registered and
      chosen, see :func:`grouped_linear.integrations.transformers.register`. PEFT's adapters on
      experts compute here, too.
    - **Experts in one module**: w1, w2, w3 [E, ...] as in torchtitan, its GPT-OSS and its fused
      w13. The module gets another forward, see :func:`grouped_linear.convert_experts`.
    - **A ModuleList of experts**, Linear or SwiGLU, in a block whose new forward is given in
      ``forwards``. A :class:`grouped_linear.GroupedLinear` or :class:`grouped_linear.GroupedMLP`
      replaces the list, see :func:`grouped_linear.convert_experts`.

    A model is converted as a whole or not at all, unless memory runs out: everything is checked
    before anything is written. Convert after a checkpoint is loaded, before sharding,
    DistributedDataParallel and the optimizer. What required a gradient still does, except Hugging
    Face experts stored as [E, in_features, out_features] (GPT-OSS, Aria) in FP8. A converted model
    can be copied and pickled, ``forwards`` permitting. docs/transformers.md, docs/plain_torch.md
    and docs/inference.md say what becomes of each form.

    Args:
        model: a model, or a module that is to be converted itself; for experts in one module and
            lists it may be on the meta device.
        recipe: how the GEMMs are computed; None for the activations' dtype, or with ``weights`` for
            ``Float8BlockScaling()``.
        weights: ``"both"`` to keep the experts' weights in high precision and FP8, for training,
            as :class:`grouped_linear.GroupedTensorWithMaster`; ``"fp8"`` to keep them in FP8 alone,
            as :class:`grouped_linear.GroupedTensor`; None to leave them as they are. Experts of a
            checkpoint in FP8 become such tensors without a change of a byte; under another
            ``weights`` they are read as they are, and do not learn. w13 is refused with either.
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
        ValueError: if nothing is recognised; for what cannot be converted as asked, which the
            sentence says; for a pattern of ``recipes`` that matches no experts; and for weights
            that the kernels do not take. The model is then unchanged.
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
    _check_model("convert", model)
    check_recipe("convert", recipe)
    recipe = Float8BlockScaling() if recipe is None and weights is not None else recipe
    stochastic_rounding, columnwise = map(options.get, ("stochastic_rounding", "columnwise"))
    check_weights_kept("convert", recipe, weights, stochastic_rounding, columnwise=columnwise)
    if weights is not None:
        options["weights"] = weights
    forwards = _check_forwards("convert", forwards)
    by_name = _check_recipes("convert", recipes, weights)
    plan, request = Plan(), Request("convert", recipe, forwards, options, by_name)
    if any(map(goes_through_interface, model.modules())):
        from grouped_linear.integrations.hugging_face import find_hugging_face

        find_hugging_face(plan, request, model)
    _find_plain(plan, request, model)
    if not plan.converted:
        _check_not_converted("convert", model)
        skipped = tuple(look_alikes(model))
        raise ValueError(
            f"convert: {type(model).__name__} has no experts of a form that is known"
            + (", and these look like experts: " if skipped else "")
            + ", ".join(lines_of(skipped))
        )
    _check_used("convert", by_name, plan)
    replaced = plan.carry_out()
    converted = _in_order(plan, model)
    return Conversion(
        recipe,
        tuple(converted),
        tuple(look_alikes(model)),
        kept_weights((model.get_submodule(one.name) for one in converted), recipe),
        num_still_held(replaced),
        by_name,
    )


@torch.inference_mode(False)
def convert_experts(
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Forward] | None = None,
    recipe: Recipe | None = None,
    **options: Any,
) -> list[ConvertedExperts]:
    """Replace the experts of a plain torch model by grouped ones, in place.

    :func:`grouped_linear.convert` does so too, and knows Hugging Face's models besides. Two forms
    of experts are recognized:

    **Experts in one module**, as in torchtitan: a module whose only parameters are w1 and w3
    [E, F, H] and w2 [E, H, F], called as ``(x, num_tokens_per_expert)``; or w1_EFD, w3_EFD and
    w2_EDF, called as ``(x_RD, num_tokens_per_expert_E)``; also torchtitan's w13 [E, F, 2, H] and
    its GPT-OSS experts, which have biases. Its forward becomes grouped layers. Its parameters,
    their names and its callers stay the same.

    **A ModuleList of experts** in a block whose class is a key of ``forwards``. Experts that are
    torch.nn.Linear become one :class:`grouped_linear.GroupedLinear`. Experts that compute
    ``w2(silu(w1(x)) * w3(x))``, or have the names gate_proj, up_proj and down_proj, become one
    :class:`grouped_linear.GroupedMLP`, under the list's name. Their parameters are new. Experts of
    another form are refused, and so are those that have what would be lost.

    Names and shapes do not show what experts compute. So SwiGLU experts are run on random rows, in
    training mode, and must give SwiGLU's result up to three times the error that rounding explains.
    docs/plain_torch.md has the rest: the meta device, DTensors, the order of things.

    Args:
        model: a model, or a module that is to be converted itself.
        forwards, recipe: see :func:`grouped_linear.convert`.
        options: ``weights``, ``stochastic_rounding`` and ``columnwise``, see
            :func:`grouped_linear.convert`. For the modules that replace lists also
            ``cache_weights`` and ``fuse_wgrad_accumulation``; if all of them are GroupedMLP,
            ``save_gate_up_in_fp8``.

    Returns:
        What was converted, in the order of ``named_modules``; never empty.

    Raises:
        ValueError: if no experts are recognized; if a class of ``forwards`` is not in the model or
            has no such ModuleList; for what cannot be converted as asked, which the sentence says.
            The model is then unchanged.
        TypeError: if `model` is not a module.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.router = nn.Linear(16, 4)
    ...         self.experts = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))
    ...
    ...     def forward(self, x):
    ...         best = self.router(x).argmax(dim=-1)
    ...         return torch.stack([self.experts[e](row) for e, row in zip(best, x)])
    >>> def grouped_forward(self, x):
    ...     best, order = self.router(x).argmax(dim=-1).sort()
    ...     m_splits = (best[:, None] == torch.arange(4)).sum(dim=0)
    ...     return self.experts(x[order], m_splits)[order.argsort()]
    >>> block, x = Block(), torch.randn(10, 16)
    >>> y = block(x)
    >>> [converted] = convert_experts(block, {Block: grouped_forward})
    >>> converted.form, converted.num_experts, converted.path
    ('Linear', 4, 'GroupedLinear')
    >>> torch.allclose(block(x), y, atol=1e-5)
    True
    """
    _check_model("convert_experts", model)
    check_recipe("convert_experts", recipe)
    forwards = _check_forwards("convert_experts", forwards)
    plan, request = Plan(), Request("convert_experts", recipe, forwards, options)
    _find_plain(plan, request, model)
    if not plan.converted:
        _check_not_converted("convert_experts", model)
        raise ValueError(
            f"convert_experts: {type(model).__name__} has no module with parameters w1, w2 and w3 "
            "[E, ...] that is called as (x, num_tokens_per_expert), and no class is in forwards"
        )
    plan.carry_out()
    return _in_order(plan, model)


def _check_model(op: str, model: Any) -> None:
    """Raise TypeError for anything but a module."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        got = f"the class {model.__name__}: make a model of it"
    else:
        got = "None" if model is None else f"a {type(model).__name__}"
    raise TypeError(f"{op}: model must be a torch.nn.Module, got {got}")


def _check_forwards(op: str, forwards: Any) -> dict[type[nn.Module], Forward]:
    """The forwards as a dict; raises ValueError for anything else."""
    if forwards is not None and not isinstance(forwards, Mapping):
        raise ValueError(
            f"{op}: forwards must be a dict such as {{Block: new_forward}}, with the class of the "
            f"block whose forward is replaced, got {forwards!r}"
        )
    found: dict[type[nn.Module], Forward] = dict(forwards or {})
    for cls, forward in found.items():
        is_class = isinstance(cls, type) and issubclass(cls, nn.Module) and cls is not nn.Module
        if not is_class or not callable(forward):
            raise ValueError(
                f"{op}: forwards must have classes of modules as keys and functions as values, got "
                f"{{{cls!r}: {forward!r}}}"
            )
    return found


def _check_recipes(op: str, recipes: Any, weights: Weights) -> dict[str, Recipe | None]:
    """The recipes by pattern; raises ValueError for what is none, or cannot keep weights so."""
    if recipes is not None and not isinstance(recipes, Mapping):
        raise ValueError(
            f"{op}: recipes must map patterns of names to recipes, got {type(recipes).__name__}"
        )
    for pattern, own in (recipes or {}).items():
        if not isinstance(pattern, str):
            raise ValueError(f"{op}: a pattern of recipes must be a string, got {pattern!r}")
        where = f"{op}: recipes[{pattern!r}]"
        check_recipe(where, own)
        if own is not None:
            check_weights_kept(where, own, weights)
    return dict(recipes or {})


def _check_used(op: str, patterns: Iterable[str], plan: Plan) -> None:
    """Raise ValueError for a pattern that matches no experts."""
    names = [one.name for one in plan.converted]
    unused = [repr(p) for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if unused:
        raise ValueError(
            f"{op}: no experts have a name that matches {', '.join(unused)} of recipes"
        )


def _find_plain(plan: Plan, request: Request, model: nn.Module) -> None:
    """Plan the experts of plain torch: one module with all of them, and lists of modules."""
    find_grouped_experts(plan, request, model)
    find_lists(plan, request, model)


def _in_order(plan: Plan, model: nn.Module) -> list[ConvertedExperts]:
    """What a plan converts, in the order of ``named_modules``."""
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(plan.converted, key=lambda one: order[one.name])


def _check_not_converted(op: str, model: nn.Module) -> None:
    """Raise ValueError for a model that has converted experts, where others were looked for."""
    if any(map(is_converted, model.modules())):
        raise ValueError(f"{op}: experts of {type(model).__name__} are converted already")
