"""How transformers saves experts that are kept in FP8, and loads them again.

``save_pretrained`` writes them as its own FP8 models are written (``FineGrainedFP8Config``): for
each expert e4m3 numbers ``weight`` and float32 scales ``weight_scale_inv``, as DeepSeek-V3 was
published. What that format cannot hold is written in the weights' own dtype.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from grouped_linear.integrations.activations import same_activation
from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.experts_forward import weight_names
from grouped_linear.integrations.plan import Plan
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, ceil_div, dtype_name
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.weight import (
    KEPT,
    distributed_like,
    is_dtensor,
    is_quantized,
    local_part,
)

_TWO_FORMATS = "the model's other modules are quantized in a format of theirs, a checkpoint has one"


class QuantizedExpertsHfQuantizer(FineGrainedFP8HfQuantizer):
    """What ``model.hf_quantizer`` is after ``quantize_experts``: ``save_pretrained`` asks it."""

    obstacle: str | None = None
    conversions_before: list[Any] | None = None

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any] | None, Any]:
        """What ``save_pretrained`` writes; asked before a file is written."""
        return _in_own_dtype(model, self.obstacle, None), {}


class LearningExpertsHfQuantizer(FineGrainedFP8HfQuantizer):
    """What the quantizer of a checkpoint in FP8 is once its experts learn: ``Trainer`` asks it."""

    @property
    def is_qat_trainable(self) -> bool:
        """Whether ``Trainer`` may train the model without adapters."""
        return True


def let_trainer_train(model: Any) -> None:
    """Say to ``Trainer`` that a model of a checkpoint in FP8 has experts that learn.

    Its linear layers in FP8 do not, so that neither FSDP2 nor DDP waits for their gradients.
    """
    own = getattr(model, "hf_quantizer", None)
    if type(own) is FineGrainedFP8HfQuantizer:
        own.__class__ = LearningExpertsHfQuantizer
    for module in model.modules():
        if isinstance(module, FP8Linear) and module.weight.dtype == E4M3:
            module.weight.requires_grad_(False)
            module.weight_scale_inv.requires_grad_(False)


def _in_own_dtype(
    model: Any, obstacle: str | None, state: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The model's state with quantized experts dequantized, one after another, on the CPU.

    If there is no obstacle, or only adapters are saved, it returns the state unchanged.
    """
    only_adapters = getattr(model, "_hf_peft_config_loaded", False)
    if obstacle is None or only_adapters:
        return state
    state = dict(model.state_dict()) if state is None else state
    for name, p in model.named_parameters(remove_duplicate=False):
        if is_quantized(p):
            plain: Tensor = local_part(p).detach().dequantize()
            state[name] = distributed_like(p, plain) if is_dtensor(p) else plain.cpu()
            state.pop(name + SCALE, None)
            dtype = dtype_name(plain.dtype)
    warnings.warn(
        f"save_pretrained: {obstacle}: experts are written in {dtype}, with the numbers that they "
        "have in FP8",
        stacklevel=4,
    )
    return state


def plan_description(plan: Plan, model: Any, experts: dict[str, Any]) -> None:
    """Plan that a model's configuration and names in checkpoints say how its experts are stored.

    Args:
        plan: gets the write.
        model: what ``save_pretrained`` is called on.
        experts: by name in it, those whose weights are or will be in FP8 alone.
    """
    own = getattr(model, "hf_quantizer", None)
    if own is not None and not isinstance(own, QuantizedExpertsHfQuantizer):
        return plan.write(_add_to, own)  # its description of the other modules stays
    return plan.write(_describe, model, *_description(model, experts))


def _description(
    model: Any, experts: dict[str, Any]
) -> tuple[QuantizedExpertsHfQuantizer, list[Any]]:
    """How a checkpoint says that these experts are in FP8, and the conversions of its names."""
    quantized = {name_without_adapters(name): module for name, module in experts.items()}
    others = [
        name_without_adapters(name)
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or name.endswith(".experts")) and ".lora_" not in name
    ]
    config = FineGrainedFP8Config(modules_to_not_convert=[n for n in others if n not in quantized])
    own = getattr(model, "hf_quantizer", None)
    quantizer = QuantizedExpertsHfQuantizer(config)
    conversions = (
        getattr(model, "_weight_conversions", None) if own is None else own.conversions_before
    )
    quantizer.conversions_before = conversions
    if conversions is None:  # as save_pretrained does
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [c for c in found if not isinstance(c, PrefixChange)]
    shapes = {
        f"{name}.{w}": getattr(experts, w).shape
        for name, experts in quantized.items()
        for w in weight_names(experts)
    }
    with_scales = [(f"{key}{SCALE}", None) for key in shapes]
    stand_in: Any = SimpleNamespace(named_parameters=lambda: with_scales, config=model.config)
    with_fp8 = HfQuantizer.update_weight_conversions(quantizer, conversions, stand_in)
    obstacles = filter(None, map(_obstacle_of, quantized, quantized.values()))
    quantizer.obstacle = next(obstacles, None) or _obstacle_of_names(model, with_fp8, shapes)
    return quantizer, with_fp8


def _describe(model: Any, quantizer: QuantizedExpertsHfQuantizer, conversions: list[Any]) -> None:
    forget(model)
    model.hf_quantizer = quantizer
    if quantizer.obstacle is None:
        model._weight_conversions = conversions
        model.config.quantization_config = quantizer.quantization_config


def _add_to(quantizer: Any) -> None:
    """Have the quantizer of a model's other modules save the experts in their own dtype."""
    if "get_state_dict_and_metadata" not in vars(quantizer):
        saved = partial(_with_experts, type(quantizer), quantizer)
        quantizer.get_state_dict_and_metadata = saved


def _with_experts(cls: Any, quantizer: Any, model: Any) -> tuple[dict[str, Any] | None, Any]:
    state, metadata = cls.get_state_dict_and_metadata(quantizer, model)
    return _in_own_dtype(model, _TWO_FORMATS, state), metadata


def forget(model: Any) -> None:
    """Undo :func:`plan_description`, for a model whose experts are dequantized."""
    own = getattr(model, "hf_quantizer", None)
    if isinstance(own, QuantizedExpertsHfQuantizer):
        model._weight_conversions = own.conversions_before
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
    elif own is not None:
        vars(own).pop("get_state_dict_and_metadata", None)


def name_without_adapters(name: str) -> str:
    """A module's name in its model without PEFT's wrappers, as checkpoints have it."""
    return name.replace(".base_layer", "").replace(".original_module", "")


def _obstacle_of(name: str, experts: Any) -> str | None:
    """Why transformers' FP8 format cannot hold the experts of this name, or None."""
    if not name.endswith(".experts"):
        return f"transformers looks for experts in FP8 in modules called experts, not {name}"
    if experts.is_transposed or experts.has_bias or experts.has_post_expert_norm:
        return f"transformers' FP8 experts have no biases, transposed weights or norms, {name} has"
    try:
        with torch.device("meta"):
            theirs: Any = FP8Experts(experts.config, (BLOCK, BLOCK), has_gate=experts.has_gate)
    except AttributeError as error:
        return f"transformers' FP8 experts do not know the configuration of {name} ({error})"
    theirs.has_post_expert_norm, theirs.is_concatenated = False, True
    for w in weight_names(experts):
        weight = getattr(experts, w)
        own = weight.shape
        if getattr(theirs, w).shape != own:
            return f"transformers' FP8 experts have another {w} than {name}, of {list(own)}"
        if w == "gate_up_proj" and (own[1] // 2) % BLOCK:
            return (
                f"a checkpoint has gate and up apart, and a block of scales reaches from one into "
                f"the other where an expert's {own[1] // 2} features are no multiple of {BLOCK}"
            )
    if not same_activation(experts, theirs):
        return f"transformers' FP8 experts have another activation than {name}"
    return None


def _obstacle_of_names(
    model: Any, conversions: list[Any], shapes: dict[str, torch.Size]
) -> str | None:
    """Try on tensors without memory what ``save_pretrained`` will do with the experts' names."""
    state: dict[str, Tensor] = {}
    for key, (E, N, K) in shapes.items():
        state[key] = torch.empty(E, N, K, dtype=E4M3, device="meta")
        state[key + SCALE] = torch.empty(E, ceil_div(N, BLOCK), ceil_div(K, BLOCK), device="meta")
    saved = _as_saved(model, conversions, state)
    numbers = {name: t for name, t in saved.items() if t.dtype == E4M3}
    for name, q in numbers.items():
        *_, N, K = q.shape
        scale = saved.get(name + SCALE)
        if scale is None or scale.shape[-2:] != (ceil_div(N, BLOCK), ceil_div(K, BLOCK)):
            return f"transformers does not save {name} with scales of its own"
    return None if 2 * len(numbers) == len(saved) else "transformers does not save its scales"


def _as_saved(model: Any, conversions: list[Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model as ``save_pretrained`` names and splits them."""
    before = getattr(model, "_weight_conversions", None)
    model._weight_conversions = conversions
    try:
        saved: dict[str, Tensor] = revert_weight_conversion(model, state)
    finally:
        model._weight_conversions = before
    return saved


def fp8_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's weights by their names in a checkpoint, the experts' as they are multiplied.

    What vLLM and SGLang take to update a sampler: pairs of name and tensor, as of a checkpoint in
    FP8 blocks (DeepSeek-V3's, ``FineGrainedFP8Config``). Each weight of an expert is its e4m3
    numbers ``...weight`` and its float32 scales ``...weight_scale_inv``, one for each 128 x 128
    block, which multiply to dequantize. They are the bits of the training's GEMMs: nothing is
    quantized again. All other weights come as the model has them, tied ones once.

    The numbers are those of the moment when a pair is taken, so each optimizer step is followed by
    a new iteration. Tensors are views of the model's memory where the names allow it: copy what is
    to outlive the next step.

    Args:
        model: a transformers model, converted with ``weights="both"`` or ``"fp8"`` under
            ``Float8BlockScaling``, or loaded from a checkpoint in FP8.

    Raises:
        ValueError: for experts that are not kept in FP8 blocks, for weights that are sharded or
            have adapters beside them, and for experts that the format cannot hold: with biases,
            stored transposed, or of another number of features than a multiple of 128.

    >>> from grouped_linear import Float8BlockScaling, convert
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=128,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> report = convert(model, Float8BlockScaling(), weights="both")
    >>> tensors = dict(fp8_tensors(model))
    >>> name = "model.layers.0.block_sparse_moe.experts.7.w2.weight"
    >>> tensors[name].dtype, tensors[name + "_scale_inv"].shape
    (torch.float8_e4m3fn, torch.Size([1, 1]))
    """
    experts, _, conversions = _checkpoint_of("fp8_tensors", model)
    own = {f"{name}.{w}" for name, module in experts.items() for w in weight_names(module)}
    own |= {name + SCALE for name in own}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, module in experts.items():
            state = {}
            for w in weight_names(module):
                state[f"{name}.{w}"], state[f"{name}.{w}{SCALE}"] = _parts(module, w)
            yield from _as_saved(model, conversions, state).items()
        others: dict[Any, tuple[str, Tensor]] = {}
        for name, t in model.state_dict().items():
            if name not in own:  # tied ones have one address
                others.setdefault((t.data_ptr(), t.shape) if t.numel() else name, (name, t))
        yield from _as_saved(model, conversions, dict(others.values())).items()

    return tensors()


def fp8_quantization_config(model: Any) -> dict[str, Any]:
    """What ``config.json`` says of a checkpoint that has :func:`fp8_tensors`.

    With these two a sampler starts on a model that trains with ``weights="both"``, whose own
    ``save_pretrained`` writes high precision.

    Args:
        model: see :func:`fp8_tensors`, which raises the same.

    >>> from grouped_linear import Float8BlockScaling, convert
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=128,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> report = convert(model, Float8BlockScaling(), weights="both")
    >>> fp8_quantization_config(model)["weight_block_size"]
    (128, 128)
    """
    described: dict[str, Any] = _checkpoint_of("fp8_quantization_config", model)[1].to_dict()
    return described


def _checkpoint_of(op: str, model: Any) -> tuple[dict[str, Any], Any, list[Any]]:
    """A model's experts by name, how its checkpoint describes them, and converts their names."""
    own = getattr(model, "hf_quantizer", None)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{op}: model must be a transformers model, got {type(model).__name__}")
    for name, p in model.named_parameters():
        if is_dtensor(p) or ".lora_" in name:
            what = "is sharded" if is_dtensor(p) else "is of an adapter: merge it before"
            raise ValueError(f"{op}: {name} {what}")
    experts = {n: m for n, m in model.named_modules() if goes_through_interface(m)}
    if not experts:
        raise ValueError(f"{op}: {type(model).__name__} has no experts that are known")
    for name, module in experts.items():
        for w in weight_names(module):
            weight = getattr(module, w)
            if not isinstance(module, FP8Experts) and not _in_blocks(weight):
                raise ValueError(
                    f"{op}: {name}.{w} is not in FP8 blocks: convert with weights='both'"
                )
    if own is not None and not isinstance(own, FineGrainedFP8HfQuantizer):
        raise ValueError(f"{op}: {_TWO_FORMATS}")
    if own is not None and not isinstance(own, QuantizedExpertsHfQuantizer):
        as_loaded: Any = model._weight_conversions
        return experts, own.quantization_config, as_loaded
    quantizer, conversions = _description(model, experts)
    if quantizer.obstacle is not None:
        raise ValueError(f"{op}: {quantizer.obstacle}")
    return experts, quantizer.quantization_config, conversions


def _in_blocks(w: Any) -> bool:
    """Whether a weight is kept in e4m3 with a scale for each 128 x 128 block."""
    return isinstance(w, KEPT) and w.scale is not None and w.scale.dim() == 3


def _parts(experts: Any, name: str) -> tuple[Tensor, Tensor]:
    """The numbers and scales of a weight in FP8 blocks."""
    w = getattr(experts, name).detach()
    return (w.q, w.scale) if isinstance(w, KEPT) else (w, getattr(experts, name + SCALE))
