"""Convert plain torch models: recognise their experts, check them and replace them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.integrations.check_swiglu import device_to_run_on
from grouped_linear.integrations.converted_class import (
    Forward,
    class_before,
    convert_class,
    forward_alone,
    is_converted,
)
from grouped_linear.integrations.expert_lists import (
    empty_grouped_module,
    fill,
    list_of_experts,
    lists_of_experts,
    what_would_be_lost,
)
from grouped_linear.integrations.grouped_experts import (
    GroupedForm,
    check_grouped_experts,
    convert_grouped_experts,
    form_of,
)
from grouped_linear.integrations.plan import (
    ConvertedExperts,
    Plan,
    Replaced,
    how_weights_are_kept,
    replaced_by_others,
)
from grouped_linear.nn.functional import check_whole
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.weight import check_weights_kept
from grouped_linear.recipes import Recipe

# Options that have a meaning for experts in one module, too.
WEIGHT_OPTIONS = ("weights", "stochastic_rounding", "columnwise")


@torch.inference_mode(False)
def convert_experts(
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Forward] | None = None,
    recipe: Recipe | None = None,
    **options: Any,
) -> list[ConvertedExperts]:
    """Replace the experts of a plain torch model by grouped ones, in place.

    :func:`grouped_linear.convert` calls it, and knows Hugging Face's models besides.

    Two forms of experts are recognized:

    **Experts in one module**, as in torchtitan: a module whose only parameters are w1 and w3
    [E, F, H] and w2 [E, H, F], called as ``(x, num_tokens_per_expert)``; or w1_EFD, w3_EFD and
    w2_EDF, called as ``(x_RD, num_tokens_per_expert_E)``; also torchtitan's w13 [E, F, 2, H] of its
    override that fuses gate and up, and its GPT-OSS experts, which have biases. Its forward becomes
    grouped layers. Its parameters, their names and its callers stay the same. If a parameter
    becomes a DTensor, the forward uses its local part, as torchtitan does; experts may be sharded
    by expert or by feature.

    **A ModuleList of experts** in a block whose class is a key of ``forwards``. Experts that are
    torch.nn.Linear become one :class:`grouped_linear.GroupedLinear`. Experts that compute
    ``w2(silu(w1(x)) * w3(x))``, or have the names gate_proj, up_proj and down_proj, become one
    :class:`grouped_linear.GroupedMLP`. Other names, biases and experts without a gate are refused.
    It replaces the list under the same name. The block's loop over its experts cannot be
    recognized, so ``forwards`` gives the block's new forward, a function of the block and its
    inputs. The parameters are new: create the optimizer after the conversion. Any other ModuleList
    is left alone.

    Names and shapes do not show what experts compute. So SwiGLU experts are run on random rows, in
    training mode, and must give SwiGLU's result up to three times the error that rounding explains:
    another activation, a clamp or dropout is an error. It is an error too if a list's experts have
    anything that would be lost: hooks (as of weight_norm or pruning), parametrizations, buffers,
    their own forward or a subclass of Linear, modules or parameters with a second owner. Attributes
    of parameters are not copied.

    Load a checkpoint before the conversion. Convert before sharding and before
    DistributedDataParallel. One list after another is replaced, and its experts are copied one
    after another, so the peak is the model's memory and one list; none is copied to float32 as a
    whole. If experts are refused, the model is unchanged. Modules that are converted already are
    left alone. A converted model can be copied, and pickled if ``forwards`` can.

    A model may be on the meta device. The check then runs small random parameters in place of its
    own, on a GPU if there is one. After ``to_empty`` call ``reset_parameters()`` of the modules
    that replaced lists.

    Args:
        model: a model, or a module that is to be converted itself.
        forwards: for each class of block with a ModuleList of experts, its new forward. Subclasses
            that inherit the block's forward get it, too.
        recipe: how the GEMMs are computed.
        options: ``weights``, ``stochastic_rounding`` and ``columnwise``, see
            :func:`grouped_linear.convert`. For the modules that replace lists also
            ``cache_weights`` and ``fuse_wgrad_accumulation``; if all of them are GroupedMLP,
            ``save_gate_up_in_fp8``.

    Returns:
        What was converted, in the order of ``named_modules``; never empty.

    Raises:
        ValueError: if no experts are recognized; if a class of ``forwards`` is not in the model or
            has no such ModuleList; if experts differ in form, compute something else or have
            something that would be lost; for unknown options, and for options of layers with
            experts in one module; for experts in one module on the meta device under a recipe with
            a state (``DelayedScaling``); for w13 that is to be quantized; if small parameters do
            not run; for sharded parameters, for weights that the kernels do not take, and for lists
            inside DistributedDataParallel. The model is then unchanged.
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
    check_model("convert_experts", model)
    check_recipe("convert_experts", recipe)
    plan = plan_experts("convert_experts", model, forwards, recipe, options)
    if not plan.converted:
        check_not_converted("convert_experts", model)
        raise ValueError(
            f"convert_experts: {type(model).__name__} has no module with parameters w1, w2 and w3 "
            "[E, ...] that is called as (x, num_tokens_per_expert), and no class is in forwards"
        )
    return plan.carry_out()


def check_model(op: str, model: Any) -> None:
    """Raise TypeError for anything but a module."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        got = f"the class {model.__name__}: make a model of it"
    else:
        got = "None" if model is None else f"a {type(model).__name__}"
    raise TypeError(f"{op}: model must be a torch.nn.Module, got {got}")


def check_forwards(op: str, forwards: Any) -> dict[type[nn.Module], Forward]:
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


def plan_experts(
    op: str,
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Forward] | None,
    recipe: Recipe | None,
    options: Mapping[str, Any],
    recipe_of: Callable[[str], Recipe | None] | None = None,
) -> Plan:
    """Recognise and check a model's experts, and change nothing.

    Args:
        op: what errors begin with.
        model: see :func:`convert_experts`.
        forwards: see :func:`convert_experts`.
        recipe: see :func:`convert_experts`.
        options: see :func:`convert_experts`.
        recipe_of: a recipe for each module's name; without one all have `recipe`.
    """
    forwards = check_forwards(op, forwards)
    unused = set(forwards)
    plan = Plan()
    devices = set(map(device_to_run_on, model.parameters()))
    gpus = {device.index for device in devices if device.type == "cuda"}
    with torch.random.fork_rng(gpus):  # random rows leave the generators unchanged
        for name, module in model.named_modules():
            if is_converted(module):
                continue
            where = f"{op}: {name or type(module).__name__}"
            block = _class_in(where, module, forwards)
            form = form_of(module)
            if block is None and form is None:
                continue
            own = recipe if recipe_of is None else recipe_of(name), options
            if own[0] is None and recipe is not None:  # without a recipe weights stay plain
                kept = {n: v for n, v in options.items() if n not in WEIGHT_OPTIONS}
                own = None, kept
            if block is not None:
                unused.discard(block)
                plan.add(_plan_list(where, name, module, model, forwards[block], *own))
            else:
                assert form is not None
                plan.add(_plan_module(where, name, module, form, *own))
            if "forward" in vars(module):
                raise ValueError(f"{where} has a forward of its own, which would hide the new one")
    _check_used(op, model, unused)
    return plan


def _class_in(
    where: str, module: nn.Module, forwards: Mapping[type[nn.Module], Forward]
) -> type[nn.Module] | None:
    """The class in ``forwards`` that the module is of, if its forward is that of this class."""
    cls = type(module)
    if cls in forwards:
        return type(module)
    block: type[nn.Module] | None = next((base for base in cls.__mro__ if base in forwards), None)
    if block is None or not lists_of_experts(module):
        return None
    if getattr(cls, "forward", None) is not getattr(block, "forward", None):
        raise ValueError(
            f"{where}: {cls.__name__} is a {block.__name__} with a forward of its own: give "
            f"forwards one for {cls.__name__}, too"
        )
    return block


def _plan_list(
    where: str,
    name: str,
    block: nn.Module,
    model: nn.Module,
    forward: Forward,
    recipe: Recipe | None,
    options: Mapping[str, Any],
) -> Plan:
    list_name, experts = list_of_experts(where, block)
    where = f"{where}.{list_name}"
    check_whole(where, experts.parameters(), "convert")
    lost = next(what_would_be_lost(experts, (block, list_name), model), None)
    if lost is not None:
        raise ValueError(f"{where}: {lost}, which would be lost")
    if any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        raise ValueError(
            f"{where}: DistributedDataParallel holds the parameters of lists, which are replaced: "
            "convert before it is made"
        )
    grouped = empty_grouped_module(where, experts, recipe, dict(options))
    what = ConvertedExperts(
        name,
        "Linear" if isinstance(grouped, GroupedLinear) else "SwiGLU",
        len(experts),
        _num_parameters(experts.parameters()),
        type(grouped).__name__ + how_weights_are_kept(options.get("weights")),
    )
    return Plan([what], [partial(_replace_list, block, list_name, grouped, forward)])


def _replace_list(block: Any, list_name: str, grouped: nn.Module, forward: Forward) -> Replaced:
    experts = block.get_submodule(list_name)
    fill(grouped, experts)
    setattr(block, list_name, grouped)
    convert_class(block, forward_alone, forward)
    return replaced_by_others(experts.parameters())


def _plan_module(
    where: str,
    name: str,
    module: nn.Module,
    form: GroupedForm,
    recipe: Recipe | None,
    options: Mapping[str, Any],
) -> Plan:
    of_layers = [option for option in options if option not in WEIGHT_OPTIONS]
    if of_layers:
        raise ValueError(
            f"{where}: experts in one module stay what they are, so there is nothing to give "
            f"{' and '.join(of_layers)} to"
        )
    weights, stochastic_rounding, columnwise = map(options.get, WEIGHT_OPTIONS)
    check_weights_kept(where, recipe, weights, stochastic_rounding, columnwise=columnwise)
    check_grouped_experts(where, module, form, recipe, weights)
    what = ConvertedExperts(
        name,
        form.name,
        len(module.get_parameter(form.weights[0])),
        _num_parameters(module.parameters()),
        "grouped_linear" + how_weights_are_kept(options.get("weights")),
    )
    kept = weights, stochastic_rounding, bool(columnwise)
    return Plan([what], [partial(convert_grouped_experts, module, form, recipe, *kept)])


def _num_parameters(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _check_used(op: str, model: nn.Module, unused: Collection[type[nn.Module]]) -> None:
    """Raise ValueError for classes of forwards that no module is of."""
    converted = [class_before(module) for module in model.modules() if is_converted(module)]
    of_converted = [cls for cls in unused if any(issubclass(one, cls) for one in converted)]
    if of_converted:
        raise ValueError(f"{op}: experts of {_names(of_converted)} are converted already")
    if unused:
        raise ValueError(f"{op}: {type(model).__name__} has no module of class {_names(unused)}")


def check_not_converted(op: str, model: nn.Module) -> None:
    """Raise ValueError for a model that has converted experts, where others were looked for."""
    if any(map(is_converted, model.modules())):
        raise ValueError(f"{op}: experts of {type(model).__name__} are converted already")


def _names(classes: Iterable[type]) -> str:
    return " or ".join(sorted(cls.__name__ for cls in classes))
