"""Have all experts of a Hugging Face model computed by grouped_linear, in one call.

transformers is imported where a model of it is converted, and only there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts

import grouped_linear.integrations.transformers  # noqa: F401  (refuses older versions of it)
from grouped_linear.integrations.activations import activation_of
from grouped_linear.integrations.converted_class import class_before
from grouped_linear.integrations.experts_forward import (
    check_weight_in_fp8,
    has_parts,
    set_own_recipe,
)
from grouped_linear.integrations.fp8_checkpoint import weight_names
from grouped_linear.integrations.implementation import Implementation, check_stateless
from grouped_linear.integrations.plan import (
    ConvertedExperts,
    Plan,
    Replaced,
    check_weights,
    how_weights_are_kept,
    replace_parameter,
)
from grouped_linear.integrations.quantize_experts import (
    plan_joining,
    plan_quantization,
    save_by_parts,
)
from grouped_linear.nn.options import check_flags
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.weight import Weights, is_dtensor, keep_weight
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Float8BlockScaling, Recipe


def implementation_of(recipe: Recipe | None, save_gate_up_in_fp8: bool = False) -> str:
    """The name of the experts implementation with these options; equal ones share one."""
    name = "grouped_linear" if recipe is None else f"grouped_linear {recipe!r}"
    return f"{name}, gate_up saved in FP8" if save_gate_up_in_fp8 else name


def plan_hugging_face(
    model: nn.Module,
    experts: dict[str, Any],
    recipe: Recipe | None,
    weights: Weights,
    save_gate_up_in_fp8: bool,
    columnwise: bool,
    recipe_of: Callable[[str], Recipe | None],
) -> Plan:
    """Check a model's experts and change nothing.

    The writes register an implementation for the recipe, choose it, and quantize if asked to.

    Args:
        model: holds the experts.
        experts: by name, modules that go through transformers' experts interface.
        recipe: how the GEMMs are to be computed.
        weights: how weights are to be kept.
        save_gate_up_in_fp8: what is to be kept for the backward.
        columnwise: whether weights in FP8 alone are kept transposed as well.
        recipe_of: a recipe for each module's name.
    """
    check_flags("convert", save_gate_up_in_fp8=save_gate_up_in_fp8)
    implementation = Implementation(
        implementation_of(recipe, save_gate_up_in_fp8), recipe, save_gate_up_in_fp8
    )
    implementation.check("convert")
    own = {place: recipe_of(place) for place in experts}
    for place, module in experts.items():
        check_stateless("convert", own[place])
        where = f"convert: {place or type(module).__name__}"
        _check(where, module, own[place], save_gate_up_in_fp8)
    plan = Plan(writes=[partial(_choose, model, experts, implementation)])
    for place, module in experts.items():
        plan.writes.append(partial(set_own_recipe, module, own[place], recipe))
    adapted: set[nn.Module] = set()
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        from grouped_linear.integrations.peft import plan_adapters

        writes, adapted = plan_adapters("convert", model)
        plan.writes += writes
    plain = {p: module for p, module in experts.items() if not isinstance(module, FP8Experts)}
    kept = {place: one for place in plain if (one := own[place]) is not None}
    if weights == "both":
        for place, one in kept.items():
            module = experts[place]
            plan.writes.append(partial(_keep_both, module, one))
            check_not_sharded(f"convert: {place or type(module).__name__}", module)
    if weights == "fp8":
        assert isinstance(recipe, Float8BlockScaling)
        in_blocks = {p: one for p, one in kept.items() if isinstance(one, Float8BlockScaling)}
        plan.writes += plan_quantization(
            "convert", model, in_blocks, learn=True, columnwise=columnwise
        )
        loaded = {place: module for place, module in experts.items() if has_parts(module)}
        plan.writes += plan_joining("convert", model, loaded, recipe, columnwise)
    for place, module in experts.items():
        sizes = {n: p.numel() for n, p in module.named_parameters() if not n.endswith(SCALE)}
        num_parameters = sum(sizes.values())
        path = "experts implementation"
        if has_parts(module) and weights != "fp8":
            path += ", weights in FP8 as loaded"
        else:
            how = "fp8" if isinstance(module, FP8Experts) else weights
            how = how if place in kept or isinstance(module, FP8Experts) else None
            path += how_weights_are_kept(how)
            path += " that do not learn" if how == "fp8" and module.is_transposed else ""
        path += ", with adapters" if module in adapted else ""
        form = class_before(module).__name__
        plan.converted.append(
            ConvertedExperts(place, form, module.num_experts, num_parameters, path)
        )
    return plan


def check_not_sharded(where: str, experts: Any) -> None:
    """Raise ValueError for weights that are distributed or have no numbers yet."""
    for name in weight_names(experts):
        w = getattr(experts, name)
        if is_dtensor(w) or w.is_meta:
            what = "is sharded" if is_dtensor(w) else "is on the meta device"
            raise ValueError(
                f"{where}: {name} {what}: convert with weights='both' a model that is loaded, "
                "before it is sharded"
            )


@torch.no_grad()
def _keep_both(experts: Any, recipe: Recipe) -> Replaced:
    """Keep the weights in high precision and FP8; state dicts have them as plain tensors."""
    names, replaced = weight_names(experts), []
    for name in names:
        w = getattr(experts, name)
        if not isinstance(w, GroupedTensorWithMaster):
            replaced += replace_parameter(experts, name, keep_weight(w.detach(), "both", recipe))
    save_by_parts(experts, names)
    return replaced


def _check(where: str, experts: Any, recipe: Recipe | None, save_gate_up_in_fp8: bool) -> None:
    """Raise ValueError for experts that the recipe or the kernels cannot compute."""
    if save_gate_up_in_fp8 and activation_of(experts) is None:
        raise ValueError(
            f"{where}: save_gate_up_in_fp8 needs an activation of grouped_mlp, and "
            f"that of {class_before(experts).__name__} is none"
        )
    if experts.config._experts_implementation == "deepgemm_megamoe":
        raise ValueError(
            f"{where}: transformers' deepgemm_megamoe has rearranged the weights: load the model "
            "with another experts_implementation"
        )
    if has_parts(experts):
        for name in weight_names(experts):
            check_weight_in_fp8(where, experts, name, recipe)
    else:
        check_weights(where, ((name, getattr(experts, name)) for name in weight_names(experts)))


def _choose(model: nn.Module, experts: dict[str, Any], implementation: Implementation) -> None:
    """Choose an implementation for all of a model's experts, here and where it is unpickled."""
    implementation.register()
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            module.set_experts_implementation(implementation.name)
    for module in experts.values():  # outside of a PreTrainedModel, or with a config of their own
        if module.config._experts_implementation != implementation.name:
            module.config._experts_implementation = implementation.name
        implementation.travel_with(module)
