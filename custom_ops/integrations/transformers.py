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
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import TrainerCallback
from transformers.activations import SiLUActivation
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from grouped_linear import ops
from grouped_linear.autograd.context import PLAIN_CALL, LinearOptions, StoredWeight
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, ceil_div
from grouped_linear.nn.functional import apply_layer, apply_mlp, check_bias, check_whole
from grouped_linear.nn.gradient_accumulation import cached_weight
from grouped_linear.ops import SwiGLU
from grouped_linear.quantized import block_math
from grouped_linear.quantized.refresh import caches_of, refresh_weights
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import quantized_weight_of
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import Float8BlockScaling, QuantizedWeight, Recipe

__all__ = ["RefreshWeights", "cache_experts", "quantize_experts", "register"]

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
    """Quantize the weights of a model's experts to FP8 once, for inference.

    Each weight becomes a :class:`grouped_linear.GroupedTensor` that takes one byte an element, or
    two if it is stored as [E, in_features, out_features]. A name with the recipe
    ``Float8BlockScaling`` computes the same bits as before, and no call quantizes weights any more.
    The weights get no gradients; gradients pass through them to earlier layers.

    Names of other recipes refuse quantized weights. Implementations of transformers, such as
    "eager", compute with the dequantized numbers. ``save_pretrained`` reads memory directly and
    fails, so save the model before.

    Args:
        model: its experts' weights are replaced, one after another. Experts of a checkpoint in FP8
            are left alone.
        recipe: how to quantize; ``Float8BlockScaling()`` by default. The name's recipe must be a
            ``Float8BlockScaling`` too.

    Raises:
        ValueError: for a model without experts that use the interface, and for experts that are
            sharded as DTensors.

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
    for experts, name in _weights_of_experts("quantize_experts", model, "quantize"):
        w = getattr(experts, name)
        if not isinstance(w, GroupedTensor):
            # For a weight that is stored transposed, fprop reads the columnwise data.
            w = GroupedTensor.quantize(w, recipe, columnwise=experts.is_transposed)
        setattr(experts, name, nn.Parameter(w, requires_grad=False))


def cache_experts(model: nn.Module, recipe: Recipe | None = None) -> None:
    """Give a model's experts caches of their quantized weights, which every call then reads.

    For training: the weights stay as they are, learn and are saved, and
    :func:`grouped_linear.refresh_weights` quantizes them into the caches once a step, on a stream
    of its own, while the GPU runs what comes before the experts. Without caches each call quantizes
    its weights, once more where activations are checkpointed. A call raises where the caches hold
    no weight yet, or where a weight was written since; compiled, an empty cache gives NaN.
    ``transformers.Trainer`` refreshes them with :class:`RefreshWeights`.

    The results have the bits of a model without caches. A cache takes two bytes an element.

    Args:
        model: on its device, not sharded. Experts of a checkpoint in FP8 are left alone.
        recipe: of the name that the model uses; ``Float8BlockScaling()`` by default. A call under
            another recipe raises.

    Raises:
        ValueError: for a model without experts that use the interface, for experts that are sharded
            as DTensors or that :func:`quantize_experts` quantized, and for a recipe that caches no
            weights or has a state.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import Float8BlockScaling, refresh_weights
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> register("grouped_linear_fp8", recipe=Float8BlockScaling())
    >>> model.set_experts_implementation("grouped_linear_fp8")
    >>> cache_experts(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> hook = optimizer.register_step_post_hook(lambda *_: refresh_weights(model))
    >>> refresh_weights(model)
    >>> for tokens in torch.randint(64, (2, 1, 8)):
    ...     model(tokens, labels=tokens).loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    recipe = Float8BlockScaling() if recipe is None else recipe
    if recipe.has_state:
        raise ValueError(
            f"cache_experts: {type(recipe).__name__} has a state in each layer, and an experts "
            "implementation is a function: choose a recipe without state"
        )
    weights = _weights_of_experts("cache_experts", model, "cache")
    for experts, name in weights:
        if isinstance(getattr(experts, name), GroupedTensor):
            raise ValueError(f"cache_experts: {name} is quantized already, by quantize_experts")
    for experts, name in weights:
        w = getattr(experts, name)
        E, N, K = w.shape  # as it is stored
        experts.add_module(f"{name}_cache", WeightCache(recipe, E, N, K, w.device, of=(name,)))


def _weights_of_experts(where: str, model: nn.Module, action: str) -> list[tuple[Any, str]]:
    """Experts modules and the names of their weights, but for those of a checkpoint in FP8."""
    found: list[Any] = [m for m in model.modules() if hasattr(m, "is_concatenated")]
    if not found:
        raise ValueError(
            f"{where}: the model has no experts that go through transformers' interface"
        )
    weights = [
        (experts, name)
        for experts in found
        if not isinstance(experts, FP8Experts)
        for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    ]
    check_whole(where, (getattr(*place) for place in weights), action)
    return weights


class RefreshWeights(TrainerCallback):
    """Calls :func:`grouped_linear.refresh_weights` before training and after each optimizer step.

    With a ``transformers.Trainer`` and a model whose experts have caches::

        cache_experts(model, recipe)
        Trainer(model, arguments, train_dataset=..., callbacks=[RefreshWeights()])

    On several processes, which ``DistributedDataParallel`` sends buffers to, it needs
    ``TrainingArguments(ddp_broadcast_buffers=False)``: caches are buffers. A checkpoint that is
    loaded after training (``load_best_model_at_end``) makes the caches cold: call
    ``refresh_weights`` before the model is used again.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fill the caches.

        Raises:
            ValueError: for a model without caches, and where caches are sent between processes.
        """
        if args.world_size > 1 and args.ddp_broadcast_buffers is not False:
            raise ValueError(
                "RefreshWeights: DistributedDataParallel overwrites all weight caches with rank "
                "0's: pass ddp_broadcast_buffers=False to TrainingArguments"
            )
        if next(caches_of(kwargs["model"]), None) is None:
            raise ValueError("RefreshWeights: the model has no weight caches: call cache_experts")
        refresh_weights(kwargs["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Quantize the weights that the optimizer has written."""
        refresh_weights(kwargs["model"])


def _cached_weight(experts: Any, name: str, recipe: Recipe | None) -> StoredWeight | None:
    """What :func:`cache_experts` keeps of a weight, as [E, out_features, in_features]."""
    cache = getattr(experts, f"{name}_cache", None)
    if cache is None:
        return None
    if cache.recipe != recipe:
        raise ValueError(
            f"grouped_linear: the caches of the experts are in {cache.recipe!r}, the name's recipe "
            f"is {recipe!r}"
        )
    if not (torch.compiler.is_compiling() or cache.warm):
        raise RuntimeError(
            "grouped_linear: the weight caches of the experts hold no weights yet, or none since "
            "they were loaded or moved: call refresh_weights"
        )
    cached = cached_weight("grouped_linear", cache, False)
    if cached is None or not experts.is_transposed:
        return cached
    values, scale, columnwise = cached.weight
    assert columnwise is not None
    if scale is not None and scale.dim() == 3:  # one a block
        scale = scale.mT
    return cached._replace(weight=QuantizedWeight(columnwise, scale, values))


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
        cached = _cached_weight(experts, name, recipe)
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
