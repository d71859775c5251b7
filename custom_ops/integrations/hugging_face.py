# SPDX-License-Identifier: Apache-2.0
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
from grouped_linear.integrations.configurations import modules_around, separate_configs
from grouped_linear.integrations.converted_class import convert_class, is_converted
from grouped_linear.integrations.experts_forward import (
    check_activation,
    check_recipe_reads,
    dtype_of_kept,
    kept_weight,
    set_own_recipe,
    storage_of,
    weight_names,
)
from grouped_linear.integrations.fp8_checkpoint import check_loads, describe
from grouped_linear.integrations.implementation import Implementation, check_stateless
from grouped_linear.integrations.request import (
    Changes,
    Request,
    check_replaceable,
    check_sizes,
    check_weights,
    freeze_parameter,
    replace_parameter,
    where_in,
)
from grouped_linear.integrations.wrappers import adapted
from grouped_linear.nn.checks import check_mx_blocks
from grouped_linear.quantized.frozen import STORAGES, frozen_of
from grouped_linear.quantized.weight import (
    Weights,
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
        weights, kept_as = of_module.weights, storage_of(module)
        if kept_as is not None and weights not in (None, kept_as):
            raise ValueError(
                f"{where}: the weights are frozen in {kept_as.upper()} and stay so: leave weights "
                "out, with the recipe Float8BlockScaling(), or load the model in high precision "
                "(a checkpoint: dequantize=True in its quantization config) and convert that"
            )
        _check(where, module, of_module.recipe, request.save_gate_up_in_fp8)
        if weights is not None:
            check_replaceable(where, module, weight_names(module))
        if weights == "both":
            _check_can_keep_both(where, module)
        if weights in STORAGES and not frozen_of(module):
            _check_can_freeze(where, module, model, weights)
    if adapted(model) & {*experts.values()}:  # PEFT is imported for such models alone
        from grouped_linear.integrations.peft import check_adapters

        check_adapters("convert", model)


def convert(
    model: nn.Module, experts: Mapping[str, Any], request: Request, changes: Changes
) -> None:
    """Have experts compute here: choose an implementation, group PEFT's adapters, keep weights."""
    around = modules_around(model, experts.values())
    separate_configs(model, around, experts.values())
    _choose(model, experts, implementation_of(request))
    if adapted(model) & {*experts.values()}:  # PEFT is imported for such models alone
        from grouped_linear.integrations.peft import group_adapters

        group_adapters(model)
    frozen = False
    for name, module in experts.items():
        of_module = request.of(name)
        set_own_recipe(module, of_module.recipe, request.recipe)
        if of_module.weights == "both":
            assert of_module.recipe is not None
            _keep_both(changes, module, of_module.recipe)
        if of_module.weights in STORAGES and not frozen_of(module):
            _freeze(changes, module, of_module)
            frozen = True
        elif of_module.weights is None:
            check_loads(module)
    models = [m for m in around if isinstance(m, PreTrainedModel)]
    for root in (*_outermost(model), *models) if frozen else ():
        describe(root)


@torch.no_grad()
def _freeze(changes: Changes, experts: Any, request: Request) -> None:
    """Freeze the weights: those of a checkpoint in FP8 in the memory that they have."""
    save_by_parts(experts)
    for name in weight_names(experts):
        w: Any = experts.get_parameter(name)
        dtype = w.dtype
        if isinstance(experts, FP8Experts):
            dtype = dtype_of_kept(experts, name)
            w = kept_weight("convert", experts, name)[:2]
        elif experts.is_transposed:
            w = w.mT
        freeze_parameter(changes, experts, name, w, request, dtype)


@torch.no_grad()
def _keep_both(changes: Changes, experts: Any, recipe: Recipe) -> None:
    """Keep the weights in high precision and FP8; state dicts have them as plain tensors."""
    for name in weight_names(experts):
        w = getattr(experts, name)
        if not isinstance(w, GroupedTensorWithMaster) or w.recipe.weight != recipe.weight:
            kept = keep_weight(w.detach(), "both", recipe)
            replace_parameter(changes, experts, name, kept)
    save_by_parts(experts)


def save_by_parts(experts: Any) -> None:
    """Prepare experts for state dicts of quantized weights."""
    if not is_converted(experts):
        convert_class(experts, _members, type(experts))


def _members(before: type[nn.Module]) -> dict[str, Any]:
    """The members of a class of experts with quantized weights."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.config._experts_implementation
        if frozen_of(self) and Implementation.of(name) is None:
            raise ValueError(
                f"{before.__name__}: the weights are in few bits, and the experts implementation "
                f"{name!r} would read their bytes: call convert(model, Float8BlockScaling()) "
                "again, which chooses another"
            )
        return before.forward(self, *args, **kwargs)

    return {"forward": forward}


def _outermost(model: nn.Module) -> list[nn.Module]:
    """transformers' models in a module, which may be one, without models inside of models."""
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


def _check_can_freeze(where: str, experts: Any, model: nn.Module, weights: Weights) -> None:
    """Raise ValueError for experts that few bits do not hold, or that have no whole ones here."""
    if ".modules_to_save." in where or where.endswith(".original_module"):
        raise ValueError(
            f"{where} is in PEFT's modules_to_save and learns whole, as no frozen weight does: use "
            "weights='both' or None"
        )
    if weights == "fp8" and (experts.is_transposed or experts.has_bias):
        raise ValueError(
            f"{where}: weights='fp8' is for experts without biases that are stored as [E, "
            "out_features, in_features], as checkpoints in FP8 have them: use weights='mxfp4', "
            "'both' or None. GPT-OSS is published in MXFP4, which "
            "grouped_linear.integrations.mxfp4 loads"
        )
    for name in weight_names(experts):
        w = getattr(experts, name)
        if not isinstance(experts, FP8Experts):
            K = w.size(-2 if experts.is_transposed else -1)
            check_mx_blocks(where, weights, **{f"in_features of {name}": K})
        if w.is_meta:
            reason = "is on the meta device, it has no numbers yet: load the checkpoint before"
            if hasattr(experts, "_hf_hook"):
                reason = (
                    "is offloaded by accelerate: load the model without offloading its experts, "
                    "which take half of the memory in FP8, a quarter in MXFP4"
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
    check_activation(where, experts, save_gate_up_in_fp8)
    if experts.config._experts_implementation == "deepgemm_megamoe":
        raise ValueError(
            f"{where}: transformers' deepgemm_megamoe has rearranged the weights: load the model "
            "with another experts_implementation"
        )
    kept_as = storage_of(experts)
    if kept_as is None:
        check_weights(where, ((name, getattr(experts, name)) for name in weight_names(experts)))
        return
    check_recipe_reads(where, recipe, kept_as)
    for name in weight_names(experts):
        w = kept_weight(where, experts, name).each(local_part)
        check_sizes(where, name, list(w.stand_in.shape))


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
