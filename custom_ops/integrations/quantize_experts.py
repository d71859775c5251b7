"""Keep the experts of a Hugging Face model in FP8. The rest of the model stays as it is.

E experts, F features inside an expert.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from grouped_linear.integrations import fp8_checkpoint
from grouped_linear.integrations.converted_class import (
    class_before,
    convert_class,
    is_converted,
    restore_class,
)
from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.experts_forward import has_parts, recipe_of, weight_names
from grouped_linear.integrations.implementation import Implementation
from grouped_linear.integrations.plan import Plan, Replaced, check_weights, replace_parameter
from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.state_dict import SCALE, scale_properties
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import (
    distributed_like,
    is_dtensor,
    is_quantized,
    keep_weight,
    local_part,
)
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Float8BlockScaling, Recipe


@torch.no_grad()
def quantize_experts(model: nn.Module, recipe: Float8BlockScaling | None = None) -> None:
    """Quantize the weights of a model's experts to FP8 once, for inference and for adapters.

    Each weight becomes a :class:`grouped_linear.GroupedTensor` that takes one byte an element, or
    two if it is stored as [E, in_features, out_features]. The model computes the same bits as
    before, and no call quantizes weights any more. The weights get no gradients; gradients pass
    through them to earlier layers. docs/inference.md says what ``save_pretrained`` and state dicts
    write. Experts that expert parallelism distributes over processes are quantized where they are.

    Args:
        model: the whole model. Its experts' weights are replaced, one after another. Experts of a
            checkpoint in FP8 are left alone.
        recipe: how to quantize; by default the recipe of the model's experts implementation.

    Raises:
        ValueError: for a model without experts that use the interface; for an implementation that
            is no name of ``register`` with ``Float8BlockScaling``; for weights on the meta
            device, where accelerate's offloading leaves them; for weights that are sharded by
            FSDP or inside experts; and for sizes that the kernels do not take. The model is then as
            it was.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling
    >>> from grouped_linear.integrations.transformers import register
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> quantize_experts(model)
    >>> model.model.layers[0].mlp.experts.down_proj.q.dtype
    torch.float8_e4m3fn
    """
    op = "quantize_experts"
    if not any(map(goes_through_interface, model.modules())):
        raise ValueError(f"{op}: the model has no experts that go through transformers' interface")
    check_recipe(op, recipe)
    experts = _experts_of(model)
    recipes = {name: _block_recipe_of(module) for name, module in experts.items()}
    if recipe is not None and not isinstance(recipe, Float8BlockScaling):
        raise ValueError(f"{op}: recipe must be Float8BlockScaling, got {recipe!r}")
    plan = Plan()
    for name, module in experts.items():
        weights = ((weight, getattr(module, weight)) for weight in weight_names(module))
        check_weights(f"{op}: {name or class_before(module).__name__}", weights)
    plan_fp8(plan, op, model, recipes if recipe is None else dict.fromkeys(recipes, recipe))
    plan.carry_out()


def plan_fp8(
    plan: Plan,
    op: str,
    model: nn.Module,
    recipes: dict[str, Float8BlockScaling],
    *,
    learn: bool = False,
    columnwise: bool = False,
) -> None:
    """Plan that a model's experts are kept in FP8, as GroupedTensors; ``recipes`` are by name.

    Experts of a checkpoint in FP8 have numbers and scales, two parameters, which become one in the
    same memory. With ``learn`` weights that learn go on learning, except those that are stored as
    [E, in_features, out_features]: the GEMM that reads them gives no gradient for them.
    """
    found: dict[str, Any] = {name: model.get_submodule(name) for name in recipes}
    for name, experts in found.items():
        for weight in weight_names(experts):
            _check_can_be_quantized(op, f"{name}.{weight}".lstrip("."), experts, weight, model)
        plan.write(_keep_in_fp8, experts, recipes[name], learn, columnwise)
    for prefix, root in _models_in(model):
        own = {n.removeprefix(prefix): m for n, m in found.items() if n.startswith(prefix)}
        plain = {name: m for name, m in own.items() if not isinstance(m, FP8Experts)}
        if plain:
            fp8_checkpoint.plan_description(plan, root, plain)
        loaded = [m for m in own.values() if isinstance(m, FP8Experts)]
        if any(p.requires_grad for module in loaded for p in module.parameters()):
            plan.write(fp8_checkpoint.let_trainer_train, root)


@torch.no_grad()
def _keep_in_fp8(
    experts: Any, recipe: Float8BlockScaling, learn: bool, columnwise: bool
) -> Replaced:
    """Replace an experts module's weights by GroupedTensors, unless they are some already."""
    is_loaded, replaced = has_parts(experts), []
    # For a weight that is stored transposed, fprop reads the columnwise data.
    transposed = experts.is_transposed
    columnwise = columnwise or transposed
    for name in weight_names(experts):
        w = getattr(experts, name)
        if is_quantized(w):
            continue
        learns = learn and w.requires_grad and not transposed
        local: Any = local_part(w).detach()
        if is_loaded:
            scale = local_part(getattr(experts, name + SCALE)).detach()
            dtype = getattr(experts.config, "dtype", None) or torch.get_default_dtype()
            parts = local.contiguous(), scale.contiguous()
            local = GroupedTensor.from_parts(*parts, dtype, recipe, columnwise=columnwise)
            delattr(experts, name + SCALE)
        else:
            local = GroupedTensor.quantize(local, recipe, columnwise=columnwise)
        quantized = distributed_like(w, local) if is_dtensor(w) else local
        replaced += replace_parameter(experts, name, quantized)
        experts.get_parameter(name).requires_grad_(learns)
    _save_by_parts(experts)
    return replaced


@torch.no_grad()
def keep_both(experts: Any, recipe: Recipe) -> Replaced:
    """Keep the weights in high precision and FP8; state dicts have them as plain tensors."""
    replaced = []
    for name in weight_names(experts):
        w = getattr(experts, name)
        if not isinstance(w, GroupedTensorWithMaster) or w.recipe.weight != recipe.weight:
            replaced += replace_parameter(experts, name, keep_weight(w.detach(), "both", recipe))
    _save_by_parts(experts)
    return replaced


def _save_by_parts(experts: Any) -> None:
    """Prepare experts with quantized weights for state dicts and pickles."""
    if not is_converted(experts):
        convert_class(experts, scale_properties, weight_names(experts))
    implementation = Implementation.of(experts.config._experts_implementation)
    if implementation is not None:
        implementation.travel_with(experts)


@torch.no_grad()
def dequantize_experts(model: nn.Module) -> None:
    """Replace experts' weights that are in FP8 alone by plain ones of the same numbers.

    They have the dtype that the weights had before, and are frozen.
    ``save_pretrained`` then writes a checkpoint without FP8.

    Args:
        model: the whole model.

    Raises:
        ValueError: for experts of a checkpoint in FP8, whose class has no others. The model is then
            as it was.

    >>> from grouped_linear import convert
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> conversion = convert(model, weights="fp8")
    >>> dequantize_experts(model)
    >>> type(model.model.layers[0].mlp.experts.down_proj.data)
    <class 'torch.Tensor'>
    """
    for name, module in model.named_modules():
        if isinstance(module, FP8Experts):
            raise ValueError(
                f"dequantize_experts: {name} is of a checkpoint in FP8: load it with "
                "FineGrainedFP8Config(dequantize=True)"
            )
    for experts in _experts_of(model).values():
        for name in weight_names(experts):
            w = getattr(experts, name)
            if is_quantized(w):
                plain = local_part(w).dequantize()
                plain = distributed_like(w, plain) if is_dtensor(w) else plain
                setattr(experts, name, nn.Parameter(plain, requires_grad=False))
        restore_class(experts)
    for _, root in _models_in(model):
        fp8_checkpoint.forget(root)


def _experts_of(model: nn.Module) -> dict[str, Any]:
    """The experts that go through transformers' interface and are not of a checkpoint in FP8."""
    return {
        name: module
        for name, module in model.named_modules()
        if goes_through_interface(module) and not isinstance(module, FP8Experts)
    }


def _models_in(model: nn.Module) -> Iterator[tuple[str, transformers.PreTrainedModel]]:
    """transformers' models in a module, or the module itself, without models inside of models."""
    found: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        inside = any(prefix.startswith(outer) for outer in found)
        if isinstance(module, transformers.PreTrainedModel) and not inside:
            found.append(prefix)
            yield prefix, module


def _block_recipe_of(experts: Any) -> Float8BlockScaling:
    name = experts.config._experts_implementation
    ours = Implementation.of(name)
    recipe = None if ours is None else recipe_of(experts, ours.recipe)
    if not isinstance(recipe, Float8BlockScaling):
        computes = f"has the recipe {recipe!r}" if ours else "is not one of grouped_linear's"
        raise ValueError(
            f"quantize_experts: the experts implementation {name!r} {computes}, and would not "
            "compute with quantized weights: call register(name, Float8BlockScaling()) and "
            "model.set_experts_implementation(name) before"
        )
    return recipe


def _check_can_be_quantized(op: str, where: str, experts: Any, name: str, model: nn.Module) -> None:
    w = getattr(experts, name)
    if w.is_meta:
        reason = "is on the meta device, it has no numbers yet: load the checkpoint before"
        if hasattr(experts, "_hf_hook"):
            reason = (
                "is offloaded by accelerate: load the model without offloading its experts, which "
                "take half of the memory once they are quantized"
            )
        raise ValueError(f"{op}: {where} {reason}")
    if not is_dtensor(w):
        return
    fsdp = importlib.import_module("torch.distributed.fsdp").FSDPModule
    if any(isinstance(module, fsdp) for module in model.modules()):
        raise ValueError(f"{op}: {where} is sharded by FSDP: quantize before fully_shard")
    if not all(p.is_replicate() or p.is_shard(0) for p in w.placements):
        raise ValueError(
            f"{op}: {where} is split inside of each expert, {w.placements}: distribute "
            "whole experts instead, with DistributedConfig(ep_size=...)"
        )
