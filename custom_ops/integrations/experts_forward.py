# SPDX-License-Identifier: Apache-2.0
"""What computes a Hugging Face model's experts: the function behind transformers' interface.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F features
between an expert's two layers, G = 2 F if experts have a gate, else F. N out_features and K
in_features of a weight.
"""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from grouped_linear import ops
from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.projection import Projection
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.integrations.activations import activation_of
from grouped_linear.integrations.converted_class import class_before
from grouped_linear.meta_kernels.rules import ACTIVATIONS, E4M3, ceil_div, dtype_name
from grouped_linear.nn.checks import check_parameters
from grouped_linear.nn.functional import apply_linear
from grouped_linear.nn.functional_mlp import apply_mlp
from grouped_linear.nn.lora import LoraWeights, adapter_of
from grouped_linear.quantized.frozen import STORAGES, frozen_of
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.weight import check_weights_kept, stored_weight
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.recipe import UNQUANTIZED
from grouped_linear.recipes.weight import QuantizedWeight

#: The dtypes of numbers and of scales in transformers' FP8Experts. E8M0 is in float32 exact.
FILES = {
    "fp8": (E4M3, (torch.float32, torch.float8_e8m0fnu, torch.bfloat16)),
    "mxfp4": (torch.int8, (torch.float8_e8m0fnu,)),
}

#: The attribute of experts whose recipe, which may be None, is another than the implementation's.
OWN_RECIPE = "_grouped_linear_recipe"


def experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recipe: Recipe | None,
    save_gate_up_in_fp8: bool,
    lora: Mapping[str, LoraWeights] | None = None,
) -> Tensor:
    """The function that transformers calls in place of an experts module's forward.

    The module has gate_up_proj [E, G, H], or up_proj without a gate, and down_proj [E, H, F]; they
    are transposed if ``is_transposed`` and have biases if ``has_bias``. Of tokens [T, H] and their
    choices [T, C] the number E means an expert of another process and adds nothing. The options are
    as registered, see :func:`set_own_recipe`; ``lora`` is by a weight's name, as of [E, N, K].
    """
    lora = lora or {}
    first, second = weight_names(experts)
    recipe = recipe_of(experts, recipe)
    if "parametrizations" in experts._modules and not torch.compiler.is_compiling():
        _warn_of_adapters(experts)

    def bias(name: str) -> Tensor | None:
        return getattr(experts, f"{name}_bias") if experts.has_bias else None

    def projection(number: int) -> Projection:
        name, observed = (first, second)[number], getattr(experts, "observed", None)
        w, stored = _operand(experts, name, recipe)
        of_call = recipe or UNQUANTIZED
        if observed is not None:
            of_call = observed.recipe(name, of_call)
        adapter = adapter_of("grouped_linear", "lora", lora.get(name))
        return Projection((w,), bias(name), of_call, stored, adapter=adapter)

    activation = activation_of(experts)
    if activation is not None:
        config = MLPConfig(activation, save_gate_up_in_fp8)
        given = hidden_states, top_k_weights, top_k_index, projection(0), projection(1), config
        return apply_mlp(*given).to(hidden_states.dtype)
    check_activation("grouped_linear", experts, save_gate_up_in_fp8)

    routing = ops.sort_by_expert(top_k_index, experts.num_experts)
    m_splits_E = routing.offs.diff(prepend=routing.offs.new_zeros(1))

    def layer(x: Tensor, number: int) -> Tensor:
        given = projection(number)
        check_parameters("grouped_linear", bias=given.bias_EN)
        return apply_linear(x, m_splits_E, given)

    x_RH = GatherFunction.apply(hidden_states, *routing)
    gate_up_RG = layer(x_RH, 0)
    h_RF = experts._apply_gate(gate_up_RG) if experts.has_gate else experts.act_fn(gate_up_RG)
    y_RH = layer(h_RF, 1)
    if experts.has_post_expert_norm:
        y_RH = experts.post_expert_norm(y_RH)
    out_TH: Tensor = CombineFunction.apply(y_RH, top_k_weights, *routing)
    return out_TH.to(hidden_states.dtype)


def _warn_of_adapters(experts: Any) -> None:
    """Say, as Python does once, that PEFT's adapters make weights of all experts in each call."""
    if any(type(m).__module__.startswith("peft.") for m in experts.parametrizations.modules()):
        warnings.warn(
            "grouped_linear: PEFT makes weights of all experts in each call: call "
            "grouped_linear.integrations.peft.use_grouped_adapters(model) after get_peft_model, "
            "which has rows go through the adapters instead",
            stacklevel=2,
        )


def set_own_recipe(experts: Any, own: Recipe | None, recipe: Recipe | None) -> None:
    """Have these experts computed by another recipe than the implementation's, or by that."""
    vars(experts).pop(OWN_RECIPE, None)
    if own != recipe:
        vars(experts)[OWN_RECIPE] = own


def recipe_of(experts: Any, recipe: Recipe | None) -> Recipe | None:
    """The recipe that these experts are computed by: their own, or the implementation's."""
    own: Recipe | None = getattr(experts, OWN_RECIPE, recipe)
    return own


def _operand(
    experts: Any, name: str, recipe: Recipe | None
) -> tuple[Tensor, QuantizedWeight | None]:
    """A weight as [E, N, K], and where it is quantized already what GEMMs read."""
    kept_as = storage_of(experts)
    if kept_as is not None:
        if is_parametrized(experts):
            raise ValueError(
                f"grouped_linear: experts in {kept_as.upper()} are parametrized, which leaves "
                "scales out. PEFT's adapters do so: call "
                "grouped_linear.integrations.peft.use_grouped_adapters(model)"
                + (", and before for_packed_experts(config)" if kept_as == "mxfp4" else "")
            )
        check_recipe_reads("grouped_linear", recipe, kept_as)
        kept = kept_weight("grouped_linear", experts, name)  # a backward transposes it for itself
        return kept.stand_in, kept
    stored: Tensor = getattr(experts, name)
    if not experts.is_transposed:
        return stored, None
    beside = stored_weight("grouped_linear", stored, recipe or UNQUANTIZED)
    if beside is None or beside.scale is None:  # a format of one's own is of [E, N, K]
        return stored.transpose(1, 2), None
    q, scale, q_t = beside
    assert scale is not None
    q_t = ops.transpose_weight(q) if q_t is None else q_t
    transposed = QuantizedWeight(q_t, scale.mT if scale.dim() == 3 else scale, q)
    if isinstance(stored, GroupedTensorWithMaster):
        return stored.transpose(1, 2), transposed
    return _TransposedStandIn.apply(stored), transposed


class _TransposedStandIn(torch.autograd.Function):
    """What takes the gradient of a weight that FSDP2 gathered in FP8, which no view is made of."""

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


def storage_of(experts: Any) -> str | None:
    """How weights are kept, as loaded or by convert, that do not learn: "fp8", "mxfp4" or None."""
    for frozen in frozen_of(experts).values():
        return frozen.weights
    scale = experts._parameters.get(weight_names(experts)[1] + SCALE)  # PEFT parametrizes none
    if scale is None:
        return None
    return "mxfp4" if scale.size(1) == experts.hidden_dim else "fp8"  # for each row, or for 128


def dtype_of_kept(experts: Any, name: str) -> torch.dtype:
    """The dtype that a weight in few bits stands for."""
    if name in frozen_of(experts):
        return frozen_of(experts)[name].dtype
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


def weight_names(experts: Any) -> tuple[str, str]:
    """The names of an experts module's weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def check_activation(where: str, experts: Any, save_gate_up_in_fp8: bool) -> None:
    """Raise ValueError for an activation whose input cannot be saved as asked."""
    if save_gate_up_in_fp8 and activation_of(experts) is None:
        raise ValueError(
            f"{where}: save_gate_up_in_fp8 needs an activation of grouped_mlp, and that of "
            f"{class_before(experts).__name__} is none"
        )
