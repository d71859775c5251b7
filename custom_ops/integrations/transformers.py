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

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grouped_linear import ops
from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.context import PLAIN_CALL, LinearOptions, StoredWeight
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.integrations.activations import activation_of
from grouped_linear.integrations.cache_experts import (
    RefreshWeights,
    cache_experts,
    cached_weight_of,
)
from grouped_linear.integrations.quantize_experts import dequantize_experts, quantize_experts
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, ceil_div
from grouped_linear.nn.functional import apply_layer, check_bias
from grouped_linear.nn.functional_mlp import apply_mlp
from grouped_linear.nn.options import check_flags
from grouped_linear.quantized import block_math
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import quantized_weight_of
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

__all__ = [
    "RefreshWeights",
    "cache_experts",
    "dequantize_experts",
    "quantize_experts",
    "register",
]

# Experts of older versions do not say whether a norm follows them (has_post_expert_norm).
OLDEST_TRANSFORMERS = (5, 23)
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
    raise ImportError(
        "grouped_linear.integrations.transformers: transformers must be 5.23 or newer, "
        f"got {transformers.__version__}"
    )


def register(
    name: str = "grouped_linear",
    recipe: Recipe | None = None,
    *,
    save_gate_up_in_fp8: bool = False,
) -> None:
    """Make ``model.set_experts_implementation(name)`` compute experts with grouped_linear.

    Any model that uses transformers' experts interface then accepts this name, also in
    ``from_pretrained(..., experts_implementation=name)``. The experts keep their parameters,
    activation, biases and layouts. Training, inference, ``generate`` and ``torch.compile`` all
    work. A name always means the options it was registered with, so models with different ones can
    be used side by side.

    A quantizing recipe quantizes the weights of all experts in every call. That pays if an expert
    has some 500 rows or more, as in training. For fewer rows a name without a recipe is faster, or
    :func:`quantize_experts`, which quantizes weights once. In training :func:`cache_experts` takes
    their quantization off the critical path.

    Weights that a model stores as [E, in_features, out_features] (GPT-OSS, Aria) are read in place;
    only MXFP8 copies them before it rounds them. Their gradients are computed in the same layout,
    except with e5m2 gradients, where the result is copied into it.

    Experts of a checkpoint in FP8 (``FineGrainedFP8Config``, as DeepSeek-V3's) are read in place
    under ``Float8BlockScaling``, with or without powers of two. Gradients pass through them, but
    they get no gradient themselves.

    Args:
        name: the implementation's name.
        recipe: how the GEMMs are computed; None for the activations' own dtype.
        save_gate_up_in_fp8: see :func:`grouped_linear.grouped_mlp`. Experts whose activation is not
            one of its activations then raise ValueError when they are called.

    Raises:
        ValueError: for a recipe with a state (``DelayedScaling``), which a function cannot keep,
            and for a name that is registered with other options or another implementation.

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
    check_flags("register", save_gate_up_in_fp8=save_gate_up_in_fp8)
    options: dict[str, Any] = {"recipe": recipe, "save_gate_up_in_fp8": save_gate_up_in_fp8}
    if name == "eager" or (registered and not (ours and registered.keywords == options)):
        raise ValueError(f"register: {name!r} names another experts implementation already")
    if not ours:
        for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
            interface.register(name, partial(_experts_forward, **options))


def _experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recipe: Recipe | None,
    save_gate_up_in_fp8: bool,
) -> Tensor:
    """The function that transformers calls in place of an experts module's forward.

    Args:
        experts: a module with gate_up_proj [E, G, H], or up_proj without a gate, and down_proj
            [E, H, F]. They are transposed if ``is_transposed``, have biases if ``has_bias``, and in
            FP8 have block scales.
        hidden_states: [T, H].
        top_k_index: [T, C]. The number E means an expert of another process and adds nothing.
        top_k_weights: [T, C].
        recipe: as registered.
        save_gate_up_in_fp8: as registered.
    """
    in_fp8 = isinstance(experts, FP8Experts)
    learns = torch.is_grad_enabled() and hidden_states.requires_grad

    def weight(name: str) -> tuple[Tensor, LinearOptions]:
        if in_fp8:
            quantized = _weight_in_fp8(experts, name, recipe, learns)
            return quantized.values, LinearOptions(stored=StoredWeight(quantized))
        stored: Tensor = getattr(experts, name)
        cached = cached_weight_of(experts, name, recipe)
        if cached is not None:
            w = stored.transpose(1, 2) if experts.is_transposed else stored
            return w, LinearOptions(stored=cached)
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

    activation = activation_of(experts)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    if activation is not None:
        (gate_up, of_gate_up), (down, of_down) = weight(first), weight("down_proj")
        routed, options = (hidden_states, top_k_weights, top_k_index), (of_gate_up, of_down)
        biases = bias(first), bias("down_proj")
        config = MLPConfig(activation, save_gate_up_in_fp8)
        y_TH = apply_mlp(*routed, (gate_up, down), biases, (recipe, recipe), config, options)
        return y_TH.to(hidden_states.dtype)
    if save_gate_up_in_fp8:
        raise ValueError(
            f"grouped_linear: save_gate_up_in_fp8 needs an activation of grouped_mlp, and that of "
            f"{type(experts).__name__} is none"
        )

    routing = ops.sort_by_expert(top_k_index, experts.num_experts)
    m_splits_E = routing.offs.diff(prepend=routing.offs.new_zeros(1))

    def layer(x: Tensor, name: str) -> Tensor:
        b = bias(name)
        check_bias(b)
        w, options = weight(name)
        return apply_layer(x, (w,), b, m_splits_E, recipe, options)

    x_RH = GatherFunction.apply(hidden_states, *routing)
    gate_up_RG = layer(x_RH, first)
    h_RF = experts._apply_gate(gate_up_RG) if experts.has_gate else experts.act_fn(gate_up_RG)
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
