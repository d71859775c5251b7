# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's mixture-of-experts models on grouped_linear's ops.

transformers' experts interface has any function compute the experts whose configuration names it. A
converted module gets a configuration of its own, a shallow copy which names the function, and keeps
the recipe and the options as attributes. Its class has no forward: accelerate's hooks and expert
parallelism put one into the instance, which a forward of the class would never see.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F features
between an expert's two layers, G = 2 F if experts have a gate, else F. N out_features and K
in_features of a weight.
"""

import copy
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from grouped_linear import ops
from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.projection import Projection
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.integrations.adapter import (
    Changes,
    Converted,
    Experts,
    Request,
    Write,
    check_replaceable,
    check_sizes,
    check_weight,
    class_before,
    convert_class,
    freeze,
    keep_both,
)
from grouped_linear.meta_kernels.rules import ACTIVATIONS, E4M3, ceil_div, dtype_name
from grouped_linear.nn.checks import check_flags, check_recipe
from grouped_linear.nn.functional import apply_linear
from grouped_linear.nn.functional_mlp import apply_mlp
from grouped_linear.nn.lora import LoraWeights, adapter_of
from grouped_linear.ops.activation import PLAIN, Activation, GeGLU, SquaredReLU, SwiGLU
from grouped_linear.quantized.frozen import STORAGES, frozen_of
from grouped_linear.quantized.keep import (
    SCALE,
    check_weights_kept,
    is_by_experts,
    is_dtensor,
    local_part,
    stored_weight,
)
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.quantize_weight import QuantizedWeight
from grouped_linear.recipes.recipe import UNQUANTIZED

__all__ = ["register"]

# Experts of older versions do not say whether a norm follows them (has_post_expert_norm).
OLDEST_TRANSFORMERS = (5, 23)
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
    raise ImportError(
        "grouped_linear.integrations.transformers: transformers must be 5.23 or newer, "
        f"got {transformers.__version__}"
    )

#: The experts implementation that the configurations of converted experts name.
CONVERTED = "grouped_linear.convert"
#: By the other names of implementations the recipe and save_gate_up_in_fp8 of their experts.
OPTIONS: dict[str, tuple[Recipe | None, bool]] = {}


def register(
    name: str = "grouped_linear", recipe: Recipe | None = None, *, save_gate_up_in_fp8: bool = False
) -> None:
    """Make ``model.set_experts_implementation(name)`` compute experts with grouped_linear.

    So does ``from_pretrained(..., experts_implementation=name)``. A name always means the options
    it was registered with. A quantizing recipe quantizes all experts in every call;
    :func:`grouped_linear.convert` with ``weights`` does once, or once a step. Experts that
    ``convert`` was given stay as it made them, whatever name is set.

    Weights that a model stores as [E, in_features, out_features] (GPT-OSS, Aria) are read in place;
    only MXFP8 copies them before it rounds them. Their gradients are computed in the same layout,
    except with e5m2 gradients, where the result is copied into it. Experts of a checkpoint in FP8
    (``FineGrainedFP8Config``) are read in place under ``Float8BlockScaling``.

    Args:
        name: the implementation's name.
        recipe: how the GEMMs are computed; None for the activations' own dtype.
        save_gate_up_in_fp8: see :func:`grouped_linear.grouped_mlp`. Experts whose activation is not
            one of its activations then raise ValueError when they are called.

    Raises:
        ValueError: for a recipe with a state (``DelayedScaling``), and for a name that is
            registered with other options or another implementation.

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
    if not isinstance(name, str):
        raise ValueError(f"register: name must be a string, got {name!r}")
    check_recipe("register", recipe)
    check_flags("register", save_gate_up_in_fp8=save_gate_up_in_fp8)
    _check_stateless("register", recipe)
    options = recipe, save_gate_up_in_fp8
    taken = {"eager", *ALL_EXPERTS_FUNCTIONS, *ALL_FP8_EXPERTS_FUNCTIONS}
    if name in taken and _options_of_name(name) != options:
        raise ValueError(f"register: {name!r} names another experts implementation already")
    OPTIONS[name] = options
    _register(name)


def _register(name: str) -> None:
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(name, experts_forward)


def options_of(experts: Any) -> tuple[Recipe | None, bool] | None:
    """The recipe and save_gate_up_in_fp8 of experts that compute here; None of all others."""
    name = experts.config._experts_implementation
    if name == CONVERTED:
        return experts.recipe, experts.save_gate_up_in_fp8
    return _options_of_name(name)


def _options_of_name(name: Any) -> tuple[Recipe | None, bool] | None:
    """The options of a name, unless another library has registered it since."""
    return OPTIONS.get(name) if ALL_EXPERTS_FUNCTIONS.get(name) is experts_forward else None


def recipe_of(experts: Any) -> Recipe | None:
    """The recipe of experts that compute here; None of all others."""
    return (options_of(experts) or (None,))[0]


def _check_stateless(op: str, recipe: Recipe | None) -> None:
    """Raise ValueError for a recipe that experts of transformers cannot have."""
    if recipe is not None and recipe.has_state:
        raise ValueError(
            f"{op}: {type(recipe).__name__} keeps scales from step to step, for which experts of "
            "transformers have no place: take Float8BlockScaling() or Float8CurrentScaling()"
        )


# --- conversion ----------------------------------------------------------------------------------


def experts_in(experts: Any) -> Experts:
    """A module of transformers' experts interface, for whoever asks."""
    options = options_of(experts)
    recipe, save_gate_up_in_fp8 = options or (None, False)

    def compute_by(other: Recipe | None) -> None:
        compute_here(experts, other, save_gate_up_in_fp8)

    form, weights, E = class_before(experts).__name__, weight_names(experts), experts.num_experts
    given = form, weights, E, "hidden_states", options is not None, recipe, compute_by
    return Experts(experts, "transformers", *given, partial(plan, experts))


def plan(experts: Any, name: str, request: Request) -> Write:
    """Check that experts can be converted; the function that does it."""
    where = f"convert: {name or type(experts).__name__}"
    kept_as, weights = storage_of(experts), request.weights
    save_gate_up_in_fp8 = request.save_gate_up_in_fp8
    _check_stateless("convert", request.recipe)
    if kept_as is not None and weights not in (None, kept_as):
        raise ValueError(
            f"{where}: the weights are frozen in {kept_as.upper()} and stay so: take weights="
            f"{kept_as!r}, or load the model in high precision (a checkpoint: dequantize=True in "
            "its quantization config)"
        )
    check_activation(where, experts, save_gate_up_in_fp8)
    own, known = vars(experts).get("forward"), type(experts).forward

    def is_known(f: Any) -> bool:
        return getattr(f, "__func__", f) is known

    # Functions around the class's are accelerate's hooks, too.
    if isinstance(own, MethodType) and not (
        own.__self__ is experts and is_known(inspect.unwrap(own, stop=is_known))
    ):
        raise ValueError(
            f"{where} has a forward of its own, as Liger's kernels give it, which would hide the "
            "new one: delete it, or convert a model without it"
        )
    if experts.config._experts_implementation == "deepgemm_megamoe":
        raise ValueError(
            f"{where}: transformers' deepgemm_megamoe has rearranged the weights: load the model "
            "with another experts_implementation"
        )
    names = weight_names(experts)
    if kept_as is not None:
        check_recipe_reads(where, request.recipe, kept_as)
    for w in names:
        local = local_part(getattr(experts, w))
        if kept_as is not None:
            local = kept_weight(where, experts, w).each(local_part).stand_in
        else:
            check_weight(where, w, local)
            local = local.mT if experts.is_transposed else local
        check_sizes(where, w, local.shape, request)
    freezes = weights in STORAGES and not frozen_of(experts)
    if weights == "both" or freezes:
        _check_can_keep(where, experts, request)

    def write(changes: Changes) -> None:
        compute_here(experts, request.recipe, save_gate_up_in_fp8)
        for w in names:
            if weights == "both":
                keep_both(changes, experts, w, request.recipe)
            elif freezes and kept_as is not None:  # in the memory that they have
                kept = kept_weight("convert", experts, w)[:2]
                freeze(changes, experts, w, request, (kept, dtype_of_kept(experts, w)))
            elif freezes:
                freeze(changes, experts, w, request)

    return write


def compute_here(experts: Any, recipe: Recipe | None, save_gate_up_in_fp8: bool) -> None:
    """Have experts computed here: by a class and a configuration of their own."""
    convert_class(experts, HuggingFaceExperts)
    vars(experts).update(recipe=recipe, save_gate_up_in_fp8=save_gate_up_in_fp8)
    if experts.config._experts_implementation != CONVERTED:
        config = copy.copy(experts.config)
        if isinstance(config, PreTrainedConfig):  # whose property writes the configs inside, too
            config._experts_implementation_internal = CONVERTED
        else:
            config._experts_implementation = CONVERTED
        vars(experts).update(config=config, config_of_model=experts.config)


#: An attribute of a model while it saves experts as what they are, see checkpoints/tensors.py.
SAVES = "_saves_experts"
_SAVE_PRETRAINED = inspect.unwrap(PreTrainedModel.save_pretrained).__code__


class HuggingFaceExperts(Converted):
    """Experts of transformers' interface that compute here."""

    save_gate_up_in_fp8 = False

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *args: Any) -> None:
        recipe = vars(self).get("recipe")
        if self._frozen or (recipe is not None and recipe.weight.qat is not None):
            _check_saves(prefix.removesuffix("."))
        super()._save_to_state_dict(destination, prefix, *args)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load; bytes as bytes, and an error if the state has these experts by other names.

        ``load_state_dict(strict=False)``, by which transformers' Trainer resumes, would go on with
        the experts as they are.
        """
        kept_as = None if self._frozen else storage_of(self)
        for key in (prefix + name for name in weight_names(self) if kept_as is not None):
            # A checkpoint's experts take the bytes of frozen ones as the files have them.
            both: Any = state_dict.get(key), state_dict.get(key + SCALE)
            if all(isinstance(t, Tensor) and t.dtype == torch.uint8 for t in both):
                numbers, (of_scale, *_) = FILES[str(kept_as)]
                state_dict[key] = both[0].view(numbers)
                state_dict[key + SCALE] = both[1].view(of_scale).squeeze(-1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        missing, unexpected, errors = args[2:5]
        own = {prefix + name for name in weight_names(self)}
        layer = re.match(r"(.*\.\d+\.)?", prefix)[0]  # type: ignore[index]
        others = (k for k in unexpected if k.startswith(layer) and ".lora_" not in k)
        other = next(others, None) if own <= {*missing} else None
        if other is not None:
            errors.append(
                f"{min(own)} is missing, and the state has {other}, as files of transformers name "
                "experts: from_pretrained reads it. For load_state_dict, as Trainer resumes, save "
                "with save_original_format=False."
            )


def _check_saves(name: str) -> None:
    """Raise ValueError if ``save_pretrained`` of a model runs that convert was not given.

    Its config.json does not say that these experts are in few bits: bytes would load as numbers,
    and what learns in MXFP4 would be in 16 bits. A module does not know who holds it, but the frame
    of ``save_pretrained`` does.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _SAVE_PRETRAINED:
        frame = frame.f_back  # type: ignore[assignment]
    model = None if frame is None else frame.f_locals["self"]
    only_adapters = getattr(model, "_hf_peft_config_loaded", False)
    if model is not None and not only_adapters and SAVES not in vars(model):
        raise ValueError(
            f"save_pretrained: {name} is in few bits since a part of this model was converted, and "
            "its config.json would not say so: call convert(model, recipe) of the whole model "
            "before, which leaves weights as they are"
        )


def _check_can_keep(where: str, experts: Any, request: Request) -> None:
    """Raise ValueError for weights that cannot be replaced, or that ``weights`` does not hold."""
    names, freezes = weight_names(experts), request.weights in STORAGES
    check_replaceable(where, experts, names)
    if freezes and (".modules_to_save." in where or where.endswith(".original_module")):
        raise ValueError(
            f"{where} is in PEFT's modules_to_save and learns whole, as no frozen weight does: use "
            "weights='both' or None"
        )
    if request.weights == "fp8" and (experts.is_transposed or experts.has_bias):
        raise ValueError(
            f"{where}: weights='fp8' is for experts without biases that are stored as [E, "
            "out_features, in_features], as checkpoints in FP8 have them: use weights='mxfp4', "
            "'both' or None"
        )
    for name in names:
        w = getattr(experts, name)
        if w.is_meta and not request.before_loading:
            reason = "is on the meta device, it has no numbers yet: load the checkpoint before"
            if hasattr(experts, "_hf_hook"):
                reason = "is offloaded by accelerate: load the model without offloading its experts"
            raise ValueError(f"{where}: {name} {reason}")
        if is_dtensor(w):
            fsdp = importlib.import_module("torch.distributed.fsdp").FSDPModule
            if not freezes or any(isinstance(module, fsdp) for module in request.model.modules()):
                raise ValueError(f"{where}: {name} is sharded: load it whole and convert it before")
            check_by_experts(f"{where}: {name}", w)


def check_by_experts(where: str, w: Any) -> None:
    """Raise ValueError for a weight that is sharded otherwise than by whole experts."""
    if is_dtensor(w) and not is_by_experts(w):
        raise ValueError(
            f"{where} is split inside of each expert, {w.placements}: distribute whole experts "
            "instead, with DistributedConfig(ep_size=...)"
        )


# --- the forward ---------------------------------------------------------------------------------


def experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    lora: Mapping[str, LoraWeights] | None = None,
) -> Tensor:
    """The function that transformers calls in place of an experts module's forward.

    The module has gate_up_proj [E, G, H], or up_proj without a gate, and down_proj [E, H, F]; they
    are transposed if ``is_transposed`` and have biases if ``has_bias``. In the
    choices [T, C] of tokens [T, H] E is another process's expert and adds nothing. ``lora`` is by
    a weight's name, as of [E, N, K].
    """
    (recipe, save_gate_up_in_fp8), lora = cast(Any, options_of(experts)), lora or {}
    if "parametrizations" in experts._modules and not torch.compiler.is_compiling():
        makers = {type(module).__module__ for module in experts.parametrizations.modules()}
        if any(maker.startswith("peft.") for maker in makers):
            warnings.warn(  # which Python does once
                "grouped_linear: PEFT makes weights of all experts in each call: call "
                "grouped_linear.integrations.peft.use_grouped_adapters(model) after "
                "get_peft_model, which has rows go through the adapters instead",
                stacklevel=1,
            )

    def projection(name: str) -> Projection:
        w, stored = _operand(experts, name, recipe)
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        of_call, observed = recipe or UNQUANTIZED, getattr(experts, "observed", None)
        if observed is not None:
            of_call = observed.recipe(name, of_call)
        adapter = adapter_of("grouped_linear", "lora", lora.get(name))
        return Projection((w,), bias, of_call, stored, adapter=adapter)

    activation, names = activation_of(experts), weight_names(experts)
    if activation is not None:
        config = MLPConfig(activation, save_gate_up_in_fp8)
        gate_up, down = map(projection, names)
        given = hidden_states, top_k_weights, top_k_index, gate_up, down, config
        return apply_mlp(*given).to(hidden_states.dtype)
    check_activation("grouped_linear", experts, save_gate_up_in_fp8)

    routing = ops.sort_by_expert(top_k_index, experts.num_experts)
    m_splits_E = routing.offs.diff(prepend=routing.offs.new_zeros(1))

    x_RH = GatherFunction.apply(hidden_states, *routing)
    gate_up_RG = apply_linear(x_RH, m_splits_E, projection(names[0]))
    h_RF = experts._apply_gate(gate_up_RG) if experts.has_gate else experts.act_fn(gate_up_RG)
    y_RH = apply_linear(h_RF, m_splits_E, projection(names[1]))
    if experts.has_post_expert_norm:
        y_RH = experts.post_expert_norm(y_RH)
    out_TH: Tensor = CombineFunction.apply(y_RH, top_k_weights, *routing)
    return out_TH.to(hidden_states.dtype)


_register(CONVERTED)


def _operand(
    experts: Any, name: str, recipe: Recipe | None
) -> tuple[Tensor, QuantizedWeight | None]:
    """A weight as [E, N, K], and where it is quantized already what GEMMs read."""
    kept_as = storage_of(experts)
    if kept_as is not None:
        if is_parametrized(experts):
            config = "for_packed_experts(config)" if kept_as == "mxfp4" else "config"
            raise ValueError(
                f"grouped_linear: experts in {kept_as.upper()} are parametrized, which leaves "
                f"their scales out: for PEFT's adapters call get_peft_model(model, {config}), then "
                "grouped_linear.integrations.peft.use_grouped_adapters(model)"
            )
        check_recipe_reads("grouped_linear", recipe, kept_as)
        kept = kept_weight("grouped_linear", experts, name)  # a backward transposes it for itself
        return kept.stand_in, kept
    stored: Tensor = getattr(experts, name)
    if not experts.is_transposed:
        return stored, None
    beside = stored_weight("grouped_linear", stored, (recipe or UNQUANTIZED).transposed)
    if beside is None or beside.scale is None:  # a format of one's own is of [E, N, K]
        return stored.transpose(1, 2), None
    transposed = beside  # MXFP4's codes are of [E, N, K] anyway
    if not beside.is_mxfp4:
        q, scale, q_t = beside
        assert scale is not None
        q_t = ops.transpose_weight(q) if q_t is None else q_t
        transposed = QuantizedWeight(q_t, scale.mT if scale.dim() == 3 else scale, q)
    if isinstance(stored, GroupedTensorWithMaster):
        return stored.transpose(1, 2), transposed
    return _TransposedStandIn.apply(stored), transposed


class _TransposedStandIn(torch.autograd.Function):
    """Placeholder that receives a gathered weight's gradient; no view is made of such a weight."""

    @staticmethod
    def forward(ctx: Any, w: Any) -> Tensor:
        """Give a tensor [E, N, K] without memory, of the dtype that ``w`` [E, K, N] stands for."""
        E, K, N = w.shape
        stand_in: Tensor = w.scale.new_empty((), dtype=w.dtype).expand(E, N, K)
        return stand_in

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Transpose the gradient."""
        return grads[0].transpose(1, 2)


# --- weights in few bits -------------------------------------------------------------------------

#: The dtypes of numbers and of scales in transformers' FP8Experts. E8M0 is in float32 exact.
FILES = {
    "fp8": (E4M3, (torch.float32, torch.float8_e8m0fnu, torch.bfloat16)),
    "mxfp4": (torch.int8, (torch.float8_e8m0fnu,)),
}


def weight_names(experts: Any) -> tuple[str, str]:
    """The names of an experts module's weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def storage_of(experts: Any) -> str | None:
    """How weights are kept, as loaded or by convert, that do not learn: "fp8", "mxfp4" or None."""
    for frozen in frozen_of(experts).values():
        return frozen.weights
    scale = experts._parameters.get(weight_names(experts)[1] + SCALE)  # PEFT parametrizes none
    if scale is None:
        return None
    return "mxfp4" if scale.size(1) == experts.hidden_dim else "fp8"  # for each row, or for 128


def shape_of(experts: Any, name: str) -> torch.Size:
    """[E, N, K] of a weight of experts, of all processes together, however it is kept."""
    own, kept_as = getattr(experts, name), storage_of(experts)
    if kept_as is not None:
        return torch.Size((*own.shape[:2], own.size(2) * STORAGES[kept_as].per_entry))
    shape: torch.Size = own.mT.shape if experts.is_transposed else own.shape
    return shape


def dtype_of_kept(experts: Any, name: str) -> torch.dtype:
    """The dtype of a weight in high precision, or that one in few bits stands for."""
    if name in frozen_of(experts):
        return frozen_of(experts)[name].dtype
    if not isinstance(experts, FP8Experts):
        own: torch.dtype = getattr(experts, name).dtype
        return own
    return getattr(experts.config, "dtype", None) or torch.get_default_dtype()


def kept_weight(where: str, experts: Any, name: str) -> QuantizedWeight:
    """The numbers and scales of a weight in few bits.

    Raises:
        ValueError: for a checkpoint of another form than e4m3 with scales of 128 x 128, or codes of
            4 bits, two a byte, with E8M0 scales of 1 x 32.
    """
    if name in frozen_of(experts):
        return cast(QuantizedWeight, experts.frozen_weight(name))
    q, scale = getattr(experts, name).detach(), getattr(experts, name + SCALE).detach()
    kept_as = storage_of(experts)
    assert kept_as is not None
    (numbers, of_scales), (rows, columns) = FILES[kept_as], STORAGES[kept_as].block
    E, N, K = q.shape
    scales = E, ceil_div(N, rows), ceil_div(K, columns)
    fits = q.dtype == numbers and scale.dtype in of_scales and scale.shape == scales
    if not fits or experts.activation_scheme != "dynamic":
        remedy = "load the checkpoint with FineGrainedFP8Config(dequantize=True)"
        if q.dtype in ACTIVATIONS or scale.dtype in {*ACTIVATIONS} - {*of_scales}:
            remedy += (
                " if it is so; Module.to and FSDP2's param_dtype cast one without the other, which "
                f"convert(weights={kept_as!r}) prevents"
            )
        raise ValueError(
            f"{where}: experts in {kept_as.upper()} must be {dtype_name(numbers)} with scales "
            f"{list(scales)} in {' or '.join(map(dtype_name, of_scales[:2]))} and dynamic "
            f"activations, got {name} {dtype_name(q.dtype)} with {dtype_name(scale.dtype)} scales "
            f"{list(scale.shape)} and {experts.activation_scheme} activations: {remedy}"
        )
    if kept_as == "mxfp4":
        return QuantizedWeight(q.view(torch.uint8), scale.view(torch.uint8), None)
    return QuantizedWeight(q, scale.float(), None)


def check_recipe_reads(where: str, recipe: Recipe | None, kept_as: str) -> None:
    """Raise ValueError for a recipe that does not multiply weights that are kept so."""
    if kept_as == "mxfp4":
        check_weights_kept(where, recipe, kept_as)
    elif recipe is None or not recipe.keeps_weights_as("fp8"):
        raise ValueError(
            f"{where}: weights are in FP8 already and need the recipe Float8BlockScaling, "
            f"got {recipe!r}; or load the checkpoint with FineGrainedFP8Config(dequantize=True)"
        )


# --- activations ---------------------------------------------------------------------------------

# Classes of transformers whose _apply_gate is a form of SwiGLU, and the names of the attributes
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


def activation_of(experts: Any) -> Activation | None:
    """The activation that grouped_mlp can compute in the experts' place.

    None for any other, or if a norm follows the second layer.
    """
    if experts.has_post_expert_norm or "_apply_gate" in vars(experts):
        return None
    cls = type(experts)
    act_fn = getattr(experts, "act_fn", silu)
    if not experts.has_gate:
        return SquaredReLU() if _computes_as(act_fn, ReLUSquaredActivation) else None
    alpha = limit = None
    if cls._apply_gate is not _default_apply_gate:
        # The class that defines it: FSDP2 and convert make subclasses.
        owner = next(base for base in cls.__mro__ if "_apply_gate" in vars(base))
        replaced = cls._apply_gate.__module__ != owner.__module__
        in_library = owner.__module__.startswith("transformers.")
        if owner.__name__ not in SWIGLU_FORMS or not in_library or replaced:
            return None
        alpha_name, limit_name = SWIGLU_FORMS[owner.__name__]
        alpha = getattr(experts, alpha_name) if alpha_name else None
        limit = getattr(experts, limit_name) if limit_name else None
    if getattr(experts, "gate_softcap", None) is not None or (limit is not None and limit <= 0):
        return None
    if alpha is not None:
        return SwiGLU(alpha, 1.0, limit, interleaved=not experts.is_concatenated)
    if not experts.is_concatenated:
        return None
    if act_fn is silu or _computes_as(act_fn, nn.SiLU, SiLUActivation):
        return PLAIN if limit is None else SwiGLU(limit=limit)
    if limit is None and _computes_as(act_fn, GELUActivation, GELUTanh):
        return GeGLU("tanh" if isinstance(act_fn, GELUTanh) else "none")
    return None


def _computes_as(act_fn: Any, *classes: type[nn.Module]) -> bool:
    """Whether a module computes as one of these classes, and nothing of its own, as by hooks."""
    if not isinstance(act_fn, classes) or "forward" in vars(act_fn):
        return False
    before, after = act_fn._forward_pre_hooks, act_fn._forward_hooks
    hooks = before, after, act_fn._backward_pre_hooks, act_fn._backward_hooks
    return not any(hooks) and type(act_fn).forward in [cls.forward for cls in classes]


def same_activation(experts: Any, fp8_experts: Any) -> bool:
    """Whether transformers' FP8 experts have the same activation."""
    own, other = activation_of(experts), activation_of(fp8_experts)
    if own is not None or other is not None:
        return own == other
    if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
        return False
    return type(experts.act_fn) is type(fp8_experts.act_fn)


def check_activation(where: str, experts: Any, save_gate_up_in_fp8: bool) -> None:
    """Raise ValueError for an activation whose input cannot be saved as asked."""
    if save_gate_up_in_fp8 and activation_of(experts) is None:
        raise ValueError(
            f"{where}: save_gate_up_in_fp8 needs an activation of grouped_mlp, and that of "
            f"{class_before(experts).__name__} is none"
        )
