"""Hugging Face's mixture-of-experts models on grouped_linear's ops.

transformers' experts interface lets the experts of a model be computed by any function that is
registered under a name; a model is told the name, and its own code stays as it is::

    from grouped_linear import Float8BlockScaling
    from grouped_linear.integrations.transformers import register

    register("grouped_linear_fp8", recipe=Float8BlockScaling())
    model.set_experts_implementation("grouped_linear_fp8")

It needs transformers 5.23 or newer; importing it beside an older one raises ImportError.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F features
between an expert's two layers, G = 2 F where experts have a gate, else F.
"""

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
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, ceil_div
from grouped_linear.nn.functional import apply_layer, apply_mlp, check_bias, check_whole
from grouped_linear.ops.activation_forms import SwiGLU
from grouped_linear.quantized import block_math as blocks
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import kept_weight
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

__all__ = ["quantize_experts", "register"]

# Experts of older ones do not say whether a norm follows them (has_post_expert_norm).
OLDEST_TRANSFORMERS = (5, 23)
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
    raise ImportError(
        "grouped_linear.integrations.transformers: transformers must be 5.23 or newer, "
        f"got {transformers.__version__}"
    )


def register(name: str = "grouped_linear", recipe: Recipe | None = None) -> None:
    """Make ``model.set_experts_implementation(name)`` compute experts with grouped_linear.

    Any model that uses transformers' experts interface can then be told that name, also where it
    is made: ``from_pretrained(..., experts_implementation=name)``. Its experts' parameters,
    activation, biases and layouts stay what they are; training, inference, ``generate`` and
    ``torch.compile`` all run. A name stands for one recipe for good, so models of different recipes
    live side by side.

    A quantizing recipe quantizes all experts in every call. That pays where an expert has some 500
    rows and more, as in training; for fewer a name without a recipe is faster, or
    :func:`quantize_experts`, which quantizes them once.

    Weights that a model stores as [E, in_features, out_features] (GPT-OSS, Aria) are read in place;
    MXFP8 alone copies them before it rounds them. Their gradients are computed in the same layout,
    but for those of e5m2, which are copied into it.

    Experts of a checkpoint in FP8 (``FineGrainedFP8Config``, as DeepSeek-V3's) are read as they
    are, under ``Float8BlockScaling`` with or without powers of two; gradients go through them, but
    they get none.

    Args:
        name: of the implementation.
        recipe: how the products are computed; None for the activations' own dtype.

    Raises:
        ValueError: for ``DelayedScaling``, whose memory a function cannot keep, and for a name that
            stands for something else already.

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
        raise ValueError(f"register: {name!r} stands for another experts implementation already")
    if not ours:
        for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
            interface.register(name, partial(_experts_forward, recipe=recipe))


@torch.no_grad()
def quantize_experts(model: nn.Module, recipe: Float8BlockScaling | None = None) -> None:
    """Keep the weights of a model's experts in FP8 from now on: for inference.

    Each becomes a :class:`grouped_linear.GroupedTensor`, of one byte an element, or two where it is
    stored as [E, in_features, out_features]. What a name with the recipe ``Float8BlockScaling``
    computes stays the same, bit for bit, and no call quantizes them any more. They learn no more
    either; gradients go through them to what lies before.

    Our names of other recipes refuse them; transformers' own, such as "eager", compute with the
    numbers they stand for. ``save_pretrained``, which reads memory, fails: save the model before.

    Args:
        model: its experts' weights are replaced, one after another; experts of a checkpoint in FP8
            are left as they are.
        recipe: how; ``Float8BlockScaling()`` by default. The name's must be one, too.

    Raises:
        ValueError: for a model without experts that go through the interface, and for experts that
            are spread as DTensors.

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
    found: list[Any] = [m for m in model.modules() if hasattr(m, "is_concatenated")]
    if not found:
        raise ValueError(
            "quantize_experts: the model has no experts that go through transformers' interface"
        )
    weights = [
        (experts, name)
        for experts in found
        if not isinstance(experts, FP8Experts)
        for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    ]
    check_whole("quantize_experts", (getattr(*place) for place in weights), "quantize")
    for experts, name in weights:
        w = getattr(experts, name)
        if not isinstance(w, GroupedTensor):
            # dgrad of one that is stored transposed is fprop of the other.
            w = GroupedTensor.quantize(w, recipe, columnwise=experts.is_transposed)
        setattr(experts, name, nn.Parameter(w, requires_grad=False))


def _experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recipe: Recipe | None,
) -> Tensor:
    """What transformers calls in place of an experts module's forward.

    Args:
        experts: with gate_up_proj [E, G, H], or up_proj without a gate, and down_proj [E, H, F],
            transposed where ``is_transposed`` says so, and their biases where ``has_bias`` does;
            or in FP8, each with a scale of every block.
        hidden_states: [T, H].
        top_k_index: [T, C]; E, an expert of another process, adds nothing.
        top_k_weights: [T, C].
    """
    in_fp8 = isinstance(experts, FP8Experts)
    learns = torch.is_grad_enabled() and hidden_states.requires_grad

    def weight(name: str) -> tuple[Tensor, LinearOptions]:
        if in_fp8:
            quantized = _kept_weight(experts, name, recipe, learns)
            return quantized.values, LinearOptions(stored=StoredWeight(quantized))
        stored: Tensor = getattr(experts, name)
        if not experts.is_transposed:
            return stored, PLAIN_CALL
        if isinstance(stored, GroupedTensor):
            q, scale, q_t = kept_weight("grouped_linear", stored, recipe, columnwise=True)
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


def _kept_weight(
    experts: Any, name: str, recipe: Recipe | None, columnwise: bool
) -> QuantizedWeight:
    """A weight of a checkpoint in FP8, and transposed where x's gradient will read it."""
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
    return QuantizedWeight(q, scale, blocks.transposed(q) if columnwise else None)


# Experts of the library whose own _apply_gate is a form of SwiGLU, and the attributes that hold
# alpha and the limit. Where there is an alpha, 1 is added to up.
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
    """What grouped_mlp computes in place of _apply_gate, fused with quantization; None if nothing.

    Nothing if a norm comes between the second layer and the weighted sum, either.
    """
    if not experts.has_gate or experts.has_post_expert_norm or "_apply_gate" in vars(experts):
        return None
    cls = type(experts)
    alpha = limit = None
    if cls._apply_gate is not _default_apply_gate:
        replaced = cls._apply_gate.__module__ != cls.__module__
        library = cls.__module__.startswith("transformers.")
        if cls.__name__ not in SWIGLU_FORMS or not library or replaced:
            return None
        of_alpha, of_limit = SWIGLU_FORMS[cls.__name__]
        alpha = getattr(experts, of_alpha) if of_alpha else None
        limit = getattr(experts, of_limit) if of_limit else None
    if getattr(experts, "gate_softcap", None) is not None or (limit is not None and limit <= 0):
        return None
    if alpha is not None:
        return SwiGLU(alpha, 1.0, limit, interleaved=not experts.is_concatenated)
    act_fn = getattr(experts, "act_fn", silu)
    is_silu = act_fn is silu or isinstance(act_fn, nn.SiLU | SiLUActivation)
    return SwiGLU(limit=limit) if is_silu and experts.is_concatenated else None
