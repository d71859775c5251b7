"""Have all experts of a Hugging Face model computed by grouped_linear, in one call.

transformers is imported where a model of it is converted, and only there.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts

import grouped_linear.integrations.transformers  # noqa: F401  (refuses older versions of it)
from grouped_linear.integrations.converted_class import class_before
from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.experts_forward import (
    check_activation,
    check_weight_in_fp8,
    has_parts,
    set_own_recipe,
    weight_names,
)
from grouped_linear.integrations.implementation import Implementation, check_stateless
from grouped_linear.integrations.plan import (
    Plan,
    Request,
    check_replaceable,
    check_weights,
    how_weights_are_kept,
    where_in,
)
from grouped_linear.integrations.quantize_experts import keep_both, plan_fp8
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.weight import is_dtensor
from grouped_linear.recipes import Float8BlockScaling, Recipe


def implementation_of(recipe: Recipe | None, save_gate_up_in_fp8: bool = False) -> str:
    """The name of the experts implementation with these options; equal ones share one."""
    name = "grouped_linear" if recipe is None else f"grouped_linear {recipe!r}"
    return f"{name}, gate_up saved in FP8" if save_gate_up_in_fp8 else name


def find_hugging_face(plan: Plan, request: Request, model: nn.Module) -> None:
    """Plan that a model's experts compute here: an implementation of the recipe is chosen.

    Their weights are kept as asked, and PEFT's adapters on them are grouped.
    """
    op, recipe, save_in_fp8 = "convert", request.recipe, request.save_gate_up_in_fp8
    implementation = Implementation(implementation_of(recipe, save_in_fp8), recipe, save_in_fp8)
    implementation.check(op)
    experts: dict[str, Any] = {
        name: module for name, module in model.named_modules() if goes_through_interface(module)
    }
    own = {name: request.of(name) for name in experts}
    for name, module in experts.items():
        check_stateless(op, own[name].recipe)
        _check(where_in(name, module), module, own[name].recipe, save_in_fp8)
        if own[name].weights is not None:
            check_replaceable(where_in(name, module), module, weight_names(module))
    plan.write(_choose, model, experts, implementation)
    for name, module in experts.items():
        plan.write(set_own_recipe, module, own[name].recipe, recipe)
    adapted: set[nn.Module] = set()
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        from grouped_linear.integrations.peft import plan_adapters

        adapted = plan_adapters(plan, op, model)
    in_fp8: dict[str, Float8BlockScaling] = {}
    for name, module in experts.items():
        weights, of_module = own[name].weights, own[name].recipe
        is_plain = not isinstance(module, FP8Experts)
        if weights == "both" and is_plain:
            assert of_module is not None
            _check_can_keep_both(where_in(name, module), module)
            plan.write(keep_both, module, of_module)
        if weights == "fp8" and (is_plain or has_parts(module)):
            assert isinstance(of_module, Float8BlockScaling)
            in_fp8[name] = of_module
    if in_fp8:
        plan_fp8(plan, op, model, in_fp8, learn=True, columnwise=request.columnwise)
    for name, module in experts.items():
        weights = own[name].weights
        path = "experts implementation"
        if has_parts(module) and weights != "fp8":
            path += ", weights in FP8 as loaded"
        else:
            path += how_weights_are_kept("fp8" if isinstance(module, FP8Experts) else weights)
            path += " that do not learn" if weights == "fp8" and module.is_transposed else ""
        path += ", with adapters" if module in adapted else ""
        parameters = (p for n, p in module.named_parameters() if not n.endswith(SCALE))
        plan.add(name, class_before(module).__name__, module.num_experts, parameters, path)


def _check_can_keep_both(where: str, experts: Any) -> None:
    """Raise ValueError for weights that are distributed or have no numbers yet."""
    for name in weight_names(experts):
        w = getattr(experts, name)
        if is_dtensor(w) or w.is_meta:
            what = "is sharded" if is_dtensor(w) else "is on the meta device"
            raise ValueError(
                f"{where}: {name} {what}: convert with weights='both' a model that is loaded, "
                "before it is sharded"
            )


def _check(where: str, experts: Any, recipe: Recipe | None, save_gate_up_in_fp8: bool) -> None:
    """Raise ValueError for experts that the recipe or the kernels cannot compute."""
    check_activation(where, experts, save_gate_up_in_fp8)
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
