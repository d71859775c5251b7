"""Have all experts of a Hugging Face model computed by grouped_linear, in one call.

transformers is imported where a model of it is converted, and only there.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts

import grouped_linear.integrations.transformers  # noqa: F401  (refuses older versions of it)
from grouped_linear.integrations.converted_class import convert_class, is_converted
from grouped_linear.integrations.experts_forward import (
    check_activation,
    check_recipe_reads_fp8,
    is_frozen,
    is_in_fp8,
    is_in_mxfp4,
    set_own_recipe,
    weight_in_fp8,
    weight_names,
)
from grouped_linear.integrations.fp8_checkpoint import describe
from grouped_linear.integrations.implementation import Implementation, check_stateless
from grouped_linear.integrations.request import (
    Replaced,
    Request,
    check_replaceable,
    check_sizes,
    check_weights,
    freeze_parameter,
    replace_parameter,
    where_in,
)
from grouped_linear.integrations.wrappers import adapted
from grouped_linear.quantized.weight import (
    check_weights_kept,
    is_by_experts,
    is_dtensor,
    keep_weight,
    local_part,
)
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe


def implementation_of(request: Request) -> Implementation:
    """The experts implementation with these options; equal ones share a name."""
    name = "grouped_linear" if request.recipe is None else f"grouped_linear {request.recipe!r}"
    name += ", gate_up saved in FP8" if request.save_gate_up_in_fp8 else ""
    return Implementation(name, request.recipe, request.save_gate_up_in_fp8)


def check(model: nn.Module, experts: Mapping[str, Any], request: Request) -> None:
    """Raise ValueError for a model whose experts, by name, cannot be converted."""
    implementation_of(request).check("convert")
    for name, module in experts.items():
        where, of_module = where_in(name, module), request.of(name)
        check_stateless("convert", of_module.recipe)
        _check(where, module, of_module.recipe, request.save_gate_up_in_fp8)
        if of_module.weights is not None and is_in_mxfp4(module):
            raise ValueError(
                f"{where}: the weights are in MXFP4 and stay so: leave weights out, or load the "
                "checkpoint with Mxfp4Config(dequantize=True)"
            )
        if of_module.weights == "both" and is_in_fp8(module):
            raise ValueError(
                f"{where}: the weights are frozen in FP8 and would not learn: leave weights out, "
                "or load the model in high precision (a checkpoint in FP8: "
                "FineGrainedFP8Config(dequantize=True)) and convert that"
            )
        if of_module.weights is not None:
            check_replaceable(where, module, weight_names(module))
        if of_module.weights == "both":
            _check_can_keep_both(where, module)
        if of_module.weights == "fp8" and not is_frozen(module):
            _check_can_freeze(where, module, model)
    if adapted(model) & {*experts.values()}:  # PEFT is imported for such models alone
        from grouped_linear.integrations.peft import check_adapters

        check_adapters("convert", model)


def convert(model: nn.Module, experts: Mapping[str, Any], request: Request) -> Replaced:
    """Have experts compute here: an implementation of the recipe is chosen, weights are kept.

    PEFT's adapters on them are grouped.
    """
    _choose(model, experts, implementation_of(request))
    if adapted(model) & {*experts.values()}:  # PEFT is imported for such models alone
        from grouped_linear.integrations.peft import group_adapters

        group_adapters(model)
    replaced, frozen = list[Any](), False
    for name, module in experts.items():
        of_module = request.of(name)
        set_own_recipe(module, of_module.recipe, request.recipe)
        if of_module.recipe is None:  # its weights stay plain
            continue
        if of_module.weights == "both":
            replaced += _keep_both(module, of_module.recipe)
        if of_module.weights == "fp8" and not is_frozen(module):
            replaced += _freeze(module, of_module.recipe)
            frozen = True
    for root in _outermost(model) if frozen else ():
        describe(root)
    return replaced


@torch.no_grad()
def _freeze(experts: Any, recipe: Recipe) -> Replaced:
    """Freeze the weights in FP8: those of a checkpoint in FP8 in the memory that they have."""
    loaded = isinstance(experts, FP8Experts)
    replaced = list[Any]()
    save_by_parts(experts)
    for name in weight_names(experts):
        w: Any = experts.get_parameter(name)
        dtype = w.dtype
        if loaded:
            dtype = getattr(experts.config, "dtype", None) or torch.get_default_dtype()
            w = weight_in_fp8("convert", experts, name)[:2]
        replaced += freeze_parameter(experts, name, w, recipe, dtype)
    return [] if loaded else replaced


@torch.no_grad()
def _keep_both(experts: Any, recipe: Recipe) -> Replaced:
    """Keep the weights in high precision and FP8; state dicts have them as plain tensors."""
    replaced = []
    for name in weight_names(experts):
        w = getattr(experts, name)
        if not isinstance(w, GroupedTensorWithMaster) or w.recipe.weight != recipe.weight:
            replaced += replace_parameter(experts, name, keep_weight(w.detach(), "both", recipe))
    save_by_parts(experts)
    return replaced


def save_by_parts(experts: Any) -> None:
    """Prepare experts for state dicts of quantized weights."""
    if not is_converted(experts):
        convert_class(experts, _members, type(experts))


def _members(before: type[nn.Module]) -> dict[str, Any]:
    """The members of a class of experts with quantized weights."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.config._experts_implementation
        if is_frozen(self) and Implementation.of(name) is None:
            raise ValueError(
                f"{before.__name__}: the weights are in few bits, and the experts implementation "
                f"{name!r} would read their bytes: call convert(model, Float8BlockScaling()) "
                "again, which chooses another"
            )
        return before.forward(self, *args, **kwargs)

    return {"forward": forward}


def _outermost(model: nn.Module) -> list[nn.Module]:
    """transformers' models in a module, or the module itself, without models inside of models."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            found.append(module)
    return found


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


def _check_can_freeze(where: str, experts: Any, model: nn.Module) -> None:
    """Raise ValueError for experts that FP8 does not hold, or that have no whole experts here."""
    if experts.is_transposed or experts.has_bias:
        raise ValueError(
            f"{where}: weights='fp8' is for experts without biases that are stored as [E, "
            "out_features, in_features], as checkpoints in FP8 have them. GPT-OSS is published in "
            "MXFP4: load it with grouped_linear.integrations.mxfp4, or use weights=None or 'both'"
        )
    for name in weight_names(experts):
        w = getattr(experts, name)
        if w.is_meta:
            reason = "is on the meta device, it has no numbers yet: load the checkpoint before"
            if hasattr(experts, "_hf_hook"):
                reason = (
                    "is offloaded by accelerate: load the model without offloading its experts, "
                    "which take half of the memory in FP8"
                )
            raise ValueError(f"{where}: {name} {reason}")
        if not is_dtensor(w):
            continue
        fsdp = importlib.import_module("torch.distributed.fsdp").FSDPModule
        if any(isinstance(module, fsdp) for module in model.modules()):
            raise ValueError(f"{where}: {name} is sharded by FSDP: convert before fully_shard")
        if not is_by_experts(w):
            raise ValueError(
                f"{where}: {name} is split inside of each expert, {w.placements}: distribute "
                "whole experts instead, with DistributedConfig(ep_size=...)"
            )


def _check(where: str, experts: Any, recipe: Recipe | None, save_gate_up_in_fp8: bool) -> None:
    """Raise ValueError for experts that the recipe or the kernels cannot compute."""
    check_activation(where, experts, save_gate_up_in_fp8)
    if experts.config._experts_implementation == "deepgemm_megamoe":
        raise ValueError(
            f"{where}: transformers' deepgemm_megamoe has rearranged the weights: load the model "
            "with another experts_implementation"
        )
    if is_in_mxfp4(experts):
        check_weights_kept(where, recipe, "mxfp4")
        for name in weight_names(experts):
            check_sizes(where, name, list(experts.weight_shape(name)))
        return
    if not is_in_fp8(experts):
        check_weights(where, ((name, getattr(experts, name)) for name in weight_names(experts)))
        return
    check_recipe_reads_fp8(where, recipe)
    for name in weight_names(experts):
        w, _, _ = weight_in_fp8(where, experts, name).each(local_part)
        check_sizes(where, name, list(w.shape))


def _choose(model: nn.Module, experts: Mapping[str, Any], implementation: Implementation) -> None:
    """Choose an implementation for all of a model's experts, here and where it is unpickled."""
    implementation.register()
    root: Any
    for root in _outermost(model):
        root.set_experts_implementation(implementation.name)
    for module in experts.values():  # outside of a PreTrainedModel, or with a config of their own
        if module.config._experts_implementation != implementation.name:
            module.config._experts_implementation = implementation.name
        # It is registered where these experts are unpickled.
        vars(module)["_grouped_linear_implementation"] = implementation
