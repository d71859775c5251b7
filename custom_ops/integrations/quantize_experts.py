"""Keep the experts of a Hugging Face model in FP8. The rest of the model stays as it is.

E experts, F features inside an expert.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
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
from grouped_linear.integrations.implementation import Implementation
from grouped_linear.integrations.plan import Replaced, check_weights, replace_parameter
from grouped_linear.nn.options import check_recipe
from grouped_linear.quantized.state_dict import SCALE, scale_properties
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import distributed_like, is_dtensor, is_quantized, local_part
from grouped_linear.recipes import Float8BlockScaling


@torch.no_grad()
def quantize_experts(model: nn.Module, recipe: Float8BlockScaling | None = None) -> None:
    """Quantize the weights of a model's experts to FP8 once, for inference and for adapters.

    Each weight becomes a :class:`grouped_linear.GroupedTensor` that takes one byte an element, or
    two if it is stored as [E, in_features, out_features]. The model computes the same bits as
    before, and no call quantizes weights any more. The weights get no gradients; gradients pass
    through them to earlier layers.

    ``save_pretrained`` then writes the experts as transformers' FP8 models have theirs
    (``FineGrainedFP8Config``): e4m3 numbers with ``weight_scale_inv``, bit for bit. Where that
    format cannot hold them it writes the same numbers in the weights' own dtype, and warns. A state
    dict has each weight as ``name`` and ``name_scale_inv``, which ``torch.distributed.checkpoint``,
    accelerate's ``save_state`` and safetensors write.

    Experts that expert parallelism distributes over processes are quantized where they are.

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
    check_has_experts("quantize_experts", model)
    check_recipe("quantize_experts", recipe)
    own_recipes = {where: _block_recipe_of(experts) for where, experts in experts_of(model).items()}
    if recipe is not None and not isinstance(recipe, Float8BlockScaling):
        raise ValueError(f"quantize_experts: recipe must be Float8BlockScaling, got {recipe!r}")
    recipes = own_recipes if recipe is None else dict.fromkeys(own_recipes, recipe)
    for write in plan_quantization("quantize_experts", model, recipes):
        write()


def plan_quantization(
    op: str,
    model: nn.Module,
    recipes: dict[str, Float8BlockScaling],
    *,
    learn: bool = False,
    columnwise: bool = False,
) -> list[Callable[[], Replaced | None]]:
    """Check that a model's experts can be quantized; the returned functions quantize them.

    Args:
        op: what errors begin with.
        model: the whole model.
        recipes: of each experts module, by name.
        learn: whether weights that learn go on learning. Those that are stored as [E, in_features,
            out_features] stop: the GEMM that reads them gives no gradient for them.
        columnwise: whether q_t is kept.
    """
    found = {where: model.get_submodule(where) for where in recipes}
    writes: list[Callable[[], Replaced | None]] = []
    for where, experts in found.items():
        weights = fp8_checkpoint.weight_names(experts)
        for name in weights:
            w, place = getattr(experts, name), f"{where}.{name}".lstrip(".")
            _check_can_be_quantized(op, place, w, experts, model)
        named = [(name, getattr(experts, name)) for name in weights]
        check_weights(f"{op}: {where or class_before(experts).__name__}", named)
        kept = recipes[where], learn, columnwise
        writes += [partial(_quantize, experts, name, *kept) for name in weights]
        writes.append(partial(save_by_parts, experts, weights))
    for where, root in _models_in(model):
        own = {
            fp8_checkpoint.name_without_adapters(name.removeprefix(where)): experts
            for name, experts in found.items()
            if name.startswith(where)
        }
        if own:
            obstacles = (fp8_checkpoint.obstacle_of(n, e) for n, e in own.items())
            obstacle = next(filter(None, obstacles), None)
            writes.append(fp8_checkpoint.plan_description(root, own, obstacle))
    return writes


@torch.no_grad()
def _quantize(
    experts: Any, name: str, recipe: Float8BlockScaling, learn: bool, columnwise: bool
) -> Replaced:
    """Quantize a weight of an experts module, if it is not quantized yet."""
    w = getattr(experts, name)
    if is_quantized(w):
        return []
    learns = learn and w.requires_grad and not experts.is_transposed
    # For a weight that is stored transposed, fprop reads the columnwise data.
    columnwise = columnwise or experts.is_transposed
    quantized: Any = GroupedTensor.quantize(local_part(w), recipe, columnwise=columnwise)
    if is_dtensor(w):
        quantized = distributed_like(w, quantized)
    replaced = replace_parameter(experts, name, quantized)
    experts.get_parameter(name).requires_grad_(learns)
    return replaced


def plan_joining(
    op: str,
    model: nn.Module,
    experts: dict[str, Any],
    recipe: Float8BlockScaling,
    columnwise: bool,
) -> list[Callable[[], Replaced | None]]:
    """Check that experts of a checkpoint in FP8 can learn; the returned functions make them.

    A weight's numbers and scales, two parameters, become one GroupedTensor in the same memory. It
    requires a gradient if the numbers did.

    Args:
        op: what errors begin with.
        model: the whole model.
        experts: by name, those whose numbers and scales the recipe can read.
        recipe: how optimizers' steps are quantized.
        columnwise: whether q_t is kept.
    """
    writes: list[Callable[[], Replaced | None]] = []
    for where, module in experts.items():
        weights = fp8_checkpoint.weight_names(module)
        for name in weights:
            w, place = getattr(module, name), f"{where}.{name}".lstrip(".")
            _check_can_be_quantized(op, place, w, module, model)
            joined = _joined(module, name, recipe)
            writes.append(partial(_join, module, name, joined, columnwise))
        writes.append(partial(save_by_parts, module, weights))
    for where, root in _models_in(model):
        inside = (module for name, module in experts.items() if name.startswith(where))
        if any(p.requires_grad for module in inside for p in module.parameters()):
            writes.append(partial(fp8_checkpoint.let_trainer_train, root))
    return writes


def _joined(experts: Any, name: str, recipe: Float8BlockScaling) -> Any:
    """A weight's numbers and scales as one tensor, which stands for the model's dtype."""
    q, scale = getattr(experts, name), getattr(experts, name + SCALE)
    dtype = getattr(experts.config, "dtype", None) or torch.get_default_dtype()
    own_q, own_scale = (local_part(t).detach().contiguous() for t in (q, scale))
    w = GroupedTensor.from_parts(own_q, own_scale, dtype, recipe, columnwise=False)
    return distributed_like(q, w) if is_dtensor(q) else w


@torch.no_grad()
def _join(experts: Any, name: str, joined: Any, columnwise: bool) -> Replaced:
    if columnwise:
        own = local_part(joined)
        own = GroupedTensor.from_parts(own.q, own.scale, own.dtype, own.recipe)
        joined = distributed_like(joined, own) if is_dtensor(joined) else own
    delattr(experts, name + SCALE)
    return replace_parameter(experts, name, joined)


def save_by_parts(experts: Any, weights: tuple[str, str]) -> None:
    """Prepare experts with quantized weights for state dicts and pickles."""
    if not is_converted(experts):
        convert_class(experts, scale_properties, weights)
    implementation = Implementation.of(experts.config._experts_implementation)
    if implementation is not None:
        implementation.travel_with(experts)


@torch.no_grad()
def dequantize_experts(model: nn.Module) -> None:
    """Replace the weights that :func:`quantize_experts` made by plain ones of the same numbers.

    They are of the dtype that the weights had before, and frozen, as the quantized ones are.
    ``save_pretrained`` then writes a checkpoint without FP8.

    Args:
        model: the whole model.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling
    >>> from grouped_linear.integrations.transformers import register
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> quantize_experts(model)
    >>> dequantize_experts(model)
    >>> type(model.model.layers[0].mlp.experts.down_proj.data)
    <class 'torch.Tensor'>
    """
    for experts in experts_of(model).values():
        for name in fp8_checkpoint.weight_names(experts):
            w = getattr(experts, name)
            if is_quantized(w):
                plain = local_part(w).dequantize()
                plain = distributed_like(w, plain) if is_dtensor(w) else plain
                setattr(experts, name, nn.Parameter(plain, requires_grad=False))
        restore_class(experts)
    for _, root in _models_in(model):
        fp8_checkpoint.forget(root)


def check_has_experts(where: str, model: nn.Module) -> None:
    """Raise ValueError for a model without experts that go through transformers' interface."""
    if not any(hasattr(module, "is_concatenated") for module in model.modules()):
        raise ValueError(
            f"{where}: the model has no experts that go through transformers' interface"
        )


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The experts that go through transformers' interface and are not of a checkpoint in FP8."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_concatenated") and not isinstance(module, FP8Experts)
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
    recipe = None if ours is None else ours.recipe
    if not isinstance(recipe, Float8BlockScaling):
        computes = f"has the recipe {recipe!r}" if ours else "is not one of grouped_linear's"
        raise ValueError(
            f"quantize_experts: the experts implementation {name!r} {computes}, and would not "
            "compute with quantized weights: call register(name, Float8BlockScaling()) and "
            "model.set_experts_implementation(name) before"
        )
    return recipe


def _check_can_be_quantized(op: str, where: str, w: Any, experts: Any, model: nn.Module) -> None:
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
