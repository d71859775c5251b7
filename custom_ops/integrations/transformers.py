"""Hugging Face's mixture-of-experts models on grouped_linear's ops.

transformers' experts interface lets any function that is registered under a name compute the
experts of a model. A model is given the name; its code does not change::

    from grouped_linear import Float8BlockScaling
    from grouped_linear.integrations.transformers import register

    register("grouped_linear_fp8", recipe=Float8BlockScaling())
    model.set_experts_implementation("grouped_linear_fp8")

This module needs transformers 5.23 or newer; with an older one, importing it raises ImportError.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F features
between an expert's two layers, G = 2 F if experts have a gate, else F.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from grouped_linear import ops
from grouped_linear.autograd.context import PLAIN_CALL, LinearOptions, StoredWeight
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.integrations import fp8_checkpoint
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, ceil_div
from grouped_linear.nn.functional import apply_layer, apply_mlp, check_bias
from grouped_linear.ops import SwiGLU
from grouped_linear.quantized import block_math
from grouped_linear.quantized.state_dict import distributed_like, keep_quantized
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import is_dtensor, is_quantized, quantized_weight_of
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

__all__ = ["dequantize_experts", "quantize_experts", "register"]

# Experts of older versions do not say whether a norm follows them (has_post_expert_norm).
OLDEST_TRANSFORMERS = (5, 23)
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
    raise ImportError(
        "grouped_linear.integrations.transformers: transformers must be 5.23 or newer, "
        f"got {transformers.__version__}"
    )


def register(name: str = "grouped_linear", recipe: Recipe | None = None) -> None:
    """Make ``model.set_experts_implementation(name)`` compute experts with grouped_linear.

    Any model that uses transformers' experts interface then accepts this name, also in
    ``from_pretrained(..., experts_implementation=name)``. The experts keep their parameters,
    activation, biases and layouts. Training, inference, ``generate`` and ``torch.compile`` all
    work. A name always means the recipe it was registered with, so models with different recipes
    can be used side by side.

    A quantizing recipe quantizes the weights of all experts in every call. That pays if an expert
    has some 500 rows or more, as in training. For fewer rows a name without a recipe is faster, or
    :func:`quantize_experts`, which quantizes weights once.

    Weights that a model stores as [E, in_features, out_features] (GPT-OSS, Aria) are read in place;
    only MXFP8 copies them before it rounds them. Their gradients are computed in the same layout,
    except with e5m2 gradients, where the result is copied into it.

    Experts of a checkpoint in FP8 (``FineGrainedFP8Config``, as DeepSeek-V3's) are read in place
    under ``Float8BlockScaling``, with or without powers of two. Gradients pass through them, but
    they get no gradient themselves.

    Args:
        name: the implementation's name.
        recipe: how the GEMMs are computed; None for the activations' own dtype.

    Raises:
        ValueError: for a recipe with a state (``DelayedScaling``), which a function cannot keep,
            and for a name that is registered with another recipe or implementation.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    if recipe is not None and recipe.has_state:
        raise ValueError(
            f"register: {type(recipe).__name__} has a state in each layer, and an experts "
            "implementation is a function: choose a recipe without state"
        )
    registered = ALL_EXPERTS_FUNCTIONS.get(name)
    ours = isinstance(registered, partial) and registered.func is _experts_forward
    if name == "eager" or (registered and not (ours and registered.keywords["recipe"] == recipe)):
        raise ValueError(f"register: {name!r} names another experts implementation already")
    if not ours:
        for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
            interface.register(name, partial(_experts_forward, recipe=recipe))


@torch.no_grad()
def quantize_experts(model: nn.Module, recipe: Float8BlockScaling | None = None) -> None:
    """Quantize the weights of a model's experts to FP8 once, for inference and for adapters.

    Each weight becomes a :class:`grouped_linear.GroupedTensor` that takes one byte an element, or
    two if it is stored as [E, in_features, out_features]. The model computes the same bits as
    before, and no call quantizes weights any more. The weights get no gradients; gradients pass
    through them to earlier layers.

    ``save_pretrained`` then writes the experts as transformers' FP8 models have theirs
    (``FineGrainedFP8Config``): e4m3 numbers with ``weight_scale_inv``, bit for bit. Where that
    format cannot hold them it raises ValueError before it writes anything; after
    :func:`dequantize_experts` it writes the model in its own dtype. A state dict has each weight as
    ``name`` and ``name_scale_inv``, which accelerate's ``save_state`` and safetensors write.

    Experts that expert parallelism distributes over processes are quantized where they are.

    Args:
        model: the whole model. Its experts' weights are replaced, one after another. Experts of a
            checkpoint in FP8 are left alone.
        recipe: how to quantize; by default the recipe of the model's experts implementation.

    Raises:
        ValueError: for a model without experts that use the interface; for an implementation that
            is no name of :func:`register` with ``Float8BlockScaling``; for weights on the meta
            device, where accelerate's offloading leaves them; and for weights that are sharded by
            FSDP or inside experts. The model is then as it was.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> quantize_experts(model)
    >>> model.model.layers[0].mlp.experts.down_proj.q.dtype
    torch.float8_e4m3fn
    """
    if not any(hasattr(module, "is_concatenated") for module in model.modules()):
        raise ValueError(
            "quantize_experts: the model has no experts that go through transformers' interface"
        )
    found = _experts_of(model)
    places = []
    for where, experts in found.items():
        own_recipe = _block_recipe_of(experts)
        for name in fp8_checkpoint.weight_names(experts):
            w = getattr(experts, name)
            _check_can_be_quantized(f"{where}.{name}".lstrip("."), w, experts, model)
            places.append((experts, name, own_recipe if recipe is None else recipe))
    for experts, name, of_weight in places:
        w, columnwise = getattr(experts, name), experts.is_transposed
        if not is_quantized(w):
            # For a weight that is stored transposed, fprop reads the columnwise data.
            local = w.to_local() if is_dtensor(w) else w
            quantized: Any = GroupedTensor.quantize(local, of_weight, columnwise=columnwise)
            if is_dtensor(w):
                quantized = distributed_like(w, quantized)
            setattr(experts, name, nn.Parameter(quantized, requires_grad=False))
        keep_quantized(experts)
    for where, root in _models_in(model):
        own = {n.removeprefix(where): e for n, e in found.items() if n.startswith(where)}
        obstacles = (fp8_checkpoint.obstacle_of(n, e, _same_activation) for n, e in own.items())
        if own:
            fp8_checkpoint.describe(root, own, next(filter(None, obstacles), None))


@torch.no_grad()
def dequantize_experts(model: nn.Module) -> None:
    """Replace the weights that :func:`quantize_experts` made by plain ones of the same numbers.

    They are of the dtype that the weights had before, and frozen, as the quantized ones are.
    ``save_pretrained`` then writes a checkpoint without FP8.

    Args:
        model: the whole model.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling
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
    for experts in _experts_of(model).values():
        for name in fp8_checkpoint.weight_names(experts):
            w = getattr(experts, name)
            if is_quantized(w):
                plain = (w.to_local() if is_dtensor(w) else w).dequantize()
                plain = distributed_like(w, plain) if is_dtensor(w) else plain
                setattr(experts, name, nn.Parameter(plain, requires_grad=False))
    for _, root in _models_in(model):
        fp8_checkpoint.forget(root)


def _experts_of(model: nn.Module) -> dict[str, Any]:
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
    registered: Any = ALL_EXPERTS_FUNCTIONS.get(name)
    ours = isinstance(registered, partial) and registered.func is _experts_forward
    recipe = registered.keywords["recipe"] if ours else None
    if not isinstance(recipe, Float8BlockScaling):
        computes = f"has the recipe {recipe!r}" if ours else "is not one of grouped_linear's"
        raise ValueError(
            f"quantize_experts: the experts implementation {name!r} {computes}, and would not "
            "compute with quantized weights: call register(name, Float8BlockScaling()) and "
            "model.set_experts_implementation(name) before"
        )
    return recipe


def _check_can_be_quantized(where: str, w: Any, experts: Any, model: nn.Module) -> None:
    if w.is_meta:
        reason = "is on the meta device, it has no numbers yet: load the checkpoint before"
        if hasattr(experts, "_hf_hook"):
            reason = (
                "is offloaded by accelerate: load the model without offloading its experts, which "
                "take half of the memory once they are quantized"
            )
        raise ValueError(f"quantize_experts: {where} {reason}")
    if not is_dtensor(w):
        return
    fsdp = importlib.import_module("torch.distributed.fsdp").FSDPModule
    if any(isinstance(module, fsdp) for module in model.modules()):
        raise ValueError(
            f"quantize_experts: {where} is sharded by FSDP: quantize before fully_shard"
        )
    if not all(p.is_replicate() or p.is_shard(0) for p in w.placements):
        raise ValueError(
            f"quantize_experts: {where} is split inside of each expert, {w.placements}: distribute "
            "whole experts instead, with DistributedConfig(ep_size=...)"
        )


def _experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recipe: Recipe | None,
) -> Tensor:
    """The function that transformers calls in place of an experts module's forward.

    Args:
        experts: a module with gate_up_proj [E, G, H], or up_proj without a gate, and down_proj
            [E, H, F]. They are transposed if ``is_transposed``, have biases if ``has_bias``, and in
            FP8 have block scales.
        hidden_states: [T, H].
        top_k_index: [T, C]. The number E means an expert of another process and adds nothing.
        top_k_weights: [T, C].
    """
    in_fp8 = isinstance(experts, FP8Experts)
    learns = torch.is_grad_enabled() and hidden_states.requires_grad

    def weight(name: str) -> tuple[Tensor, LinearOptions]:
        if in_fp8:
            quantized = _weight_in_fp8(experts, name, recipe, learns)
            return quantized.values, LinearOptions(stored=StoredWeight(quantized))
        stored: Tensor = getattr(experts, name)
        if not experts.is_transposed:
            return stored, PLAIN_CALL
        if isinstance(stored, GroupedTensor):
            q, scale, q_t = quantized_weight_of("grouped_linear", stored, recipe, columnwise=True)
            assert q_t is not None
            assert scale is not None
            transposed = QuantizedWeight(q_t, scale.mT, q if learns else None)
            return q_t, LinearOptions(stored=StoredWeight(transposed))
        return stored.transpose(1, 2), PLAIN_CALL

    def bias(name: str) -> Tensor | None:
        return getattr(experts, f"{name}_bias") if experts.has_bias else None

    activation = _swiglu_of(experts)
    if activation is not None:
        (gate_up, of_gate_up), (down, of_down) = weight("gate_up_proj"), weight("down_proj")
        routed, options = (hidden_states, top_k_weights, top_k_index), (of_gate_up, of_down)
        biases = bias("gate_up_proj"), bias("down_proj")
        y_TH = apply_mlp(*routed, (gate_up, down), biases, recipe, options, activation)
        return y_TH.to(hidden_states.dtype)

    routing = ops.sort_by_expert(top_k_index, experts.num_experts)
    m_splits_E = routing.offs.diff(prepend=routing.offs.new_zeros(1))

    def layer(x: Tensor, name: str) -> Tensor:
        b = bias(name)
        check_bias(b)
        w, options = weight(name)
        return apply_layer(x, (w,), b, m_splits_E, recipe, options)

    x_RH = GatherFunction.apply(hidden_states, routing.token, routing.row)
    if experts.has_gate:
        h_RF = experts._apply_gate(layer(x_RH, "gate_up_proj"))
    else:
        h_RF = experts.act_fn(layer(x_RH, "up_proj"))
    y_RH = layer(h_RF, "down_proj")
    if experts.has_post_expert_norm:
        y_RH = experts.post_expert_norm(y_RH)
    out_TH: Tensor = CombineFunction.apply(y_RH, top_k_weights, *routing)
    return out_TH.to(hidden_states.dtype)


def _weight_in_fp8(
    experts: Any, name: str, recipe: Recipe | None, columnwise: bool
) -> QuantizedWeight:
    """A weight of a checkpoint in FP8; if `columnwise`, with its transpose for dgrad."""
    q, scale = (getattr(experts, n).detach() for n in (name, f"{name}_scale_inv"))
    E, N, K = q.shape
    scales = E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)
    if not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            "grouped_linear: experts in FP8 need a name whose recipe is Float8BlockScaling, got "
            f"{recipe!r}; or load the checkpoint with FineGrainedFP8Config(dequantize=True)"
        )
    if (
        q.dtype != E4M3
        or scale.dtype != torch.float32
        or scale.shape != scales
        or experts.activation_scheme != "dynamic"
    ):
        raise ValueError(
            f"grouped_linear: experts in FP8 must be float8_e4m3fn with float32 scales "
            f"{list(scales)} and dynamic activations, got {name} {q.dtype} with {scale.dtype} "
            f"scales {list(scale.shape)} and {experts.activation_scheme} activations: load the "
            "checkpoint with FineGrainedFP8Config(dequantize=True)"
        )
    return QuantizedWeight(q, scale, block_math.transposed(q) if columnwise else None)


# Classes of transformers whose own _apply_gate is a form of SwiGLU, and the names of the attributes
# for alpha and the limit. With an alpha, 1 is added to up.
SWIGLU_FORMS = {
    "BeamExperts": (None, None),
    "DeepseekV4Experts": (None, "limit"),
    "FP8Experts": ("swiglu_alpha", "swiglu_limit"),
    "Glm5NextTextExperts": (None, "swiglu_limit"),
    "GptOssExperts": ("alpha", "limit"),
    "HYV4Experts": (None, "swiglu_limit"),
    "HYV4VLExperts": (None, "swiglu_limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit"),
    "OpenAIPrivacyFilterExperts": ("alpha", "limit"),
}


def _swiglu_of(experts: Any) -> SwiGLU | None:
    """The form of SwiGLU that the experts compute, which grouped_mlp fuses with quantization.

    None if their gate is not SwiGLU, or if a norm follows the second layer.
    """
    if not experts.has_gate or experts.has_post_expert_norm or "_apply_gate" in vars(experts):
        return None
    cls = type(experts)
    alpha = limit = None
    if cls._apply_gate is not _default_apply_gate:
        replaced = cls._apply_gate.__module__ != cls.__module__
        in_library = cls.__module__.startswith("transformers.")
        if cls.__name__ not in SWIGLU_FORMS or not in_library or replaced:
            return None
        alpha_name, limit_name = SWIGLU_FORMS[cls.__name__]
        alpha = getattr(experts, alpha_name) if alpha_name else None
        limit = getattr(experts, limit_name) if limit_name else None
    if getattr(experts, "gate_softcap", None) is not None or (limit is not None and limit <= 0):
        return None
    if alpha is not None:
        return SwiGLU(alpha, 1.0, limit, interleaved=not experts.is_concatenated)
    act_fn = getattr(experts, "act_fn", silu)
    is_silu = act_fn is silu or isinstance(act_fn, nn.SiLU | SiLUActivation)
    return SwiGLU(limit=limit) if is_silu and experts.is_concatenated else None


def _same_activation(experts: Any, fp8_experts: Any) -> bool:
    """Whether transformers' FP8 experts compute the same between their two layers."""
    own, other = _swiglu_of(experts), _swiglu_of(fp8_experts)
    if own is not None or other is not None:
        return own == other
    if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
        return False
    return type(experts.act_fn) is type(fp8_experts.act_fn)
