# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers models whose experts are in few bits, as files and for a sampler.

The format is that of transformers' FP8 models (``FineGrainedFP8Config``), as DeepSeek-V3 was
published: for each expert e4m3 numbers ``weight`` and float32 scales ``weight_scale_inv``. MXFP4 is
its ``expert_dtype="fp4"``, as DeepSeek-V4 was published: two numbers a byte in int8, E8M0 scales.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    revert_weight_conversion,
)
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.transformers import (
    FILES,
    kept_weight,
    options_of,
    same_activation,
    storage_of,
    weight_names,
)
from grouped_linear.integrations.wrappers import named_unwrapped
from grouped_linear.meta_kernels.rules import BLOCK, ceil_div
from grouped_linear.quantized.frozen import STORAGES, as_bytes, frozen_of
from grouped_linear.quantized.keep import KEPT, SCALE, is_dtensor

_TWO_FORMATS = "the model's other modules are quantized in a format of theirs, a checkpoint has one"


def save_frozen_experts(module: nn.Module) -> None:
    """Have the models of transformers in a module save frozen experts as what they are.

    ``save_pretrained`` then writes a checkpoint in few bits that loads again. If transformers'
    format cannot hold the experts, it raises ValueError before it writes a file. The configuration
    says that there are few bits only while it is saved: other models may share it.
    """
    inside: set[nn.Module] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and model not in inside:
            inside.update(model.modules())
            quantizer, saves = getattr(model, "hf_quantizer", None), model.save_pretrained
            if getattr(quantizer, "saves_frozen_experts", False):
                continue
            if getattr(saves, "func", None) is not _save and any(map(frozen_of, model.modules())):
                vars(model)["save_pretrained"] = partial(_save, saves, model)


def _save(saves: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """``save_pretrained`` of a model with frozen experts, around the one that it had."""
    experts = {name: m for name, m in _experts_of(model).items() if frozen_of(m)}
    save = partial(saves, *args, **kwargs)
    if not experts or getattr(model, "_hf_peft_config_loaded", False):  # adapters alone are saved
        return save()
    config, conversions, obstacle = _checkpoint_of(model, experts)
    if obstacle is not None:
        raise ValueError(
            f"save_pretrained: {obstacle}: save the model before it is converted, or its "
            "state_dict()"
        )
    own: Any = getattr(model, "hf_quantizer", None)
    quantizer: Any = copy.copy(own) or FineGrainedFP8HfQuantizer(config)
    quantizer.quantization_config, quantizer.saves_frozen_experts = config, True
    of_model = {"hf_quantizer": quantizer, "_weight_conversions": conversions}
    with _for_now(model, of_model), _for_now(model.config, {"quantization_config": config}):
        return save()


@contextmanager
def _for_now(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes, and bring back those that were there."""
    before = {name: vars(holder)[name] for name in values if name in vars(holder)}
    vars(holder).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(holder)[name]
        vars(holder).update(before)


class OneTensor(ConversionOps):
    """A conversion of one tensor in the same memory, or the way back, for saving."""

    def __init__(self, reverse: bool = False) -> None:
        self.reverse = reverse

    def of(self, t: Tensor, is_scale: bool) -> Tensor:
        """The converted tensor, of numbers or of scales."""
        raise NotImplementedError

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tensor by its new name; see transformers' ConversionOps."""
        (found,) = input_dict.values()
        t = found[0] if isinstance(found, list) else found
        name = (source_patterns if self.reverse else target_patterns)[0]
        return {target_patterns[0]: self.of(t, SCALE in name)}

    @property
    def reverse_op(self) -> "OneTensor":
        """The way back."""
        other = copy.copy(self)
        other.reverse = not self.reverse
        return other


class AsBytes(OneTensor):
    """Numbers or scales of a file as bytes of a frozen weight; experts as loaded have no bytes."""

    def __init__(self, numbers: torch.dtype, scales: torch.dtype) -> None:
        super().__init__()
        self.numbers, self.scales = numbers, scales

    def of(self, t: Tensor, is_scale: bool) -> Tensor:
        """Bytes, or what they are of."""
        if not self.reverse:
            return (t.unsqueeze(-1) if is_scale else t).view(torch.uint8)
        if t.dtype != torch.uint8:
            return t
        return t.view(self.scales).squeeze(-1) if is_scale else t.view(self.numbers)


def _with_bytes(conversions: list[Any], keys: Iterable[str], kept_as: str) -> list[Any]:
    """Conversions whose tensors of these names are the bytes of frozen weights."""
    numbers, scales = FILES[kept_as]
    op, left, found = AsBytes(numbers, scales[0]), {*keys}, []
    for conversion in conversions:
        own = set()
        if isinstance(conversion, WeightConverter):
            back = conversion.reverse_transform()
            own = {key for key in left if back.rename_source_key(key)[1] is not None}
        if own:
            sources = conversion._original_source_patterns
            targets = conversion._original_target_patterns
            operations = [*conversion.operations, op]
            conversion = conversion.copy(sources, targets, operations=operations)
        found.append(conversion)
        left -= own
    return found + [WeightConverter([key], [key], [op]) for key in sorted(left)]


def _experts_of(model: nn.Module) -> dict[str, Any]:
    """A model's experts that go through transformers' interface, by their names in checkpoints."""
    return {name: m for name, m in named_unwrapped(model) if goes_through_interface(m)}


def _checkpoint_of(
    model: Any, in_fp8: dict[str, Any]
) -> tuple[FineGrainedFP8Config, list[Any], str | None]:
    """The checkpoint of a model with these experts in FP8: its configuration.

    Then the conversions of names to its names, and why transformers cannot write it, or None.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        config = FineGrainedFP8Config()
    elif isinstance(quantizer, FineGrainedFP8HfQuantizer):
        config = quantizer.quantization_config
    else:
        return FineGrainedFP8Config(), [], _TWO_FORMATS
    kinds = {storage_of(m) or "fp8" for m in in_fp8.values()}
    kept_as = min(kinds)
    # The configuration of a checkpoint knows the experts that were loaded in FP8.
    if quantizer is None or not all(isinstance(m, FP8Experts) for m in in_fp8.values()):
        config = copy.deepcopy(config)
        config.expert_dtype = "fp4" if kept_as == "mxfp4" else "fp8"
        if kept_as == "mxfp4" and not any(isinstance(m, FP8Linear) for m in model.modules()):
            config.scale_fmt = "ue8m0"
        config.modules_to_not_convert = [
            name
            for name, module in named_unwrapped(model)
            if isinstance(module, nn.Linear) or name.endswith(".experts")
            if not isinstance(module, FP8Linear) and name not in in_fp8
        ]
    obstacle = next(filter(None, map(_obstacle_of, in_fp8, in_fp8.values())), None)
    has_blocks = tuple(config.weight_block_size or ()) == (BLOCK, BLOCK)
    if len(kinds) > 1 or not has_blocks or (kept_as, config.scale_fmt) == ("mxfp4", "float"):
        obstacle = _TWO_FORMATS
    if config.scale_fmt == "ue8m0" and not all(map(_has_powers_of_two, in_fp8.values())):
        obstacle = "the checkpoint's scales are powers of two, those of its experts no longer are"
    if obstacle is not None:
        return config, [], obstacle
    return config, *_conversions_of(model, in_fp8, kept_as)


def _conversions_of(
    model: Any, in_fp8: dict[str, Any], kept_as: str
) -> tuple[list[Any], str | None]:
    """The conversions that save these experts with their scales, or those tried last and why not.

    A model that was loaded in FP8 has them.
    """
    shapes = {
        f"{name}.{w}": getattr(experts, w).shape
        for name, experts in in_fp8.items()
        for w in weight_names(experts)
    }
    with_scales = [(f"{key}{SCALE}", None) for key in shapes]
    stand_in: Any = SimpleNamespace(named_parameters=lambda: with_scales, config=model.config)
    # Nothing is quantized while it is saved.
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=False)
    loaded = getattr(model, "_weight_conversions", None)
    found = get_model_conversion_mapping(model, add_legacy=False)
    default = [c for c in found if not isinstance(c, PrefixChange)]  # as save_pretrained does
    candidates = [] if loaded is None else [loaded]
    for base in (*candidates, default):
        candidates.append(HfQuantizer.update_weight_conversions(quantizer, base, stand_in))
    for candidate in candidates:
        conversions = _with_bytes(candidate, (*shapes, *(key for key, _ in with_scales)), kept_as)
        obstacle = _obstacle_of_names(model, conversions, shapes, kept_as)
        if obstacle is None:
            break
    return conversions, obstacle


def _has_powers_of_two(experts: Any) -> bool:
    """Whether the scales are known to be powers of two: as they were loaded, or by the recipe."""
    recipe, _ = options_of(experts) or (None, False)
    options = {} if recipe is None else recipe.weight.scale_options
    known = isinstance(experts, FP8Experts) or storage_of(experts) == "mxfp4"
    return known or options.get("power_of_two_scales", False)


def _obstacle_of(name: str, experts: Any) -> str | None:
    """Why transformers' FP8 format cannot hold the experts of this name, or None."""
    if not name.endswith(".experts"):
        return f"transformers looks for experts in FP8 in modules called experts, not {name}"
    in_mxfp4 = storage_of(experts) == "mxfp4"
    if experts.is_transposed or experts.has_bias or experts.has_post_expert_norm:
        format = "MXFP4, as DeepSeek-V4's files have it," if in_mxfp4 else "FP8"
        return f"experts in {format} have no biases, transposed weights or norms, {name} has"
    options = {"has_gate": experts.has_gate, "expert_dtype": "fp4" if in_mxfp4 else "fp8"}
    try:
        with torch.device("meta"):
            config = getattr(experts, "config_of_model", experts.config)  # the saved one
            theirs: Any = FP8Experts(config, (BLOCK, BLOCK), **options)
    except AttributeError as error:
        return f"transformers' FP8 experts do not know the configuration of {name} ({error})"
    except TypeError:  # ERNIE 4.5 VL: one for text, one for images
        return f"transformers' FP8 experts have one size, the configuration of {name} lists several"
    theirs.has_post_expert_norm, theirs.is_concatenated = False, True
    for w in weight_names(experts):
        weight = getattr(experts, w)
        own = weight.shape
        if getattr(theirs, w).shape != own:
            return f"transformers' FP8 experts have another {w} than {name}, of {list(own)}"
        if w == "gate_up_proj" and (own[1] // 2) % BLOCK and not in_mxfp4:
            return (
                f"a checkpoint has gate and up apart, and a block of scales reaches from one into "
                f"the other where an expert's {own[1] // 2} features are no multiple of {BLOCK}"
            )
    if not same_activation(experts, theirs):
        return f"transformers' FP8 experts have another activation than {name}"
    return None


def _obstacle_of_names(
    model: Any, conversions: list[Any], shapes: dict[str, torch.Size], kept_as: str
) -> str | None:
    """Try on tensors without memory what ``save_pretrained`` will do with the experts' names."""
    state: dict[str, Tensor] = {}
    (dtype, (of_scale, *_)), (rows, columns) = FILES[kept_as], STORAGES[kept_as].block
    for key, (E, N, K) in shapes.items():
        q = torch.empty(E, N, K, dtype=dtype, device="meta")
        scales = E, ceil_div(N, rows), ceil_div(K, columns)
        parts = q, torch.empty(scales, dtype=of_scale, device="meta")
        state[key], state[key + SCALE] = as_bytes(parts)
    try:
        saved = _as_saved(model, conversions, state)
    except Exception as error:  # save_pretrained would raise it, with files half written
        return f"transformers cannot name the experts' tensors ({error})"
    numbers = {name: t for name, t in saved.items() if t.dtype == dtype}
    for name, q in numbers.items():
        *_, N, K = q.shape
        scale = saved.get(name + SCALE, saved.get(name.removesuffix("weight") + "scale"))
        if scale is None or scale.shape[-2:] != (ceil_div(N, rows), ceil_div(K, columns)):
            return f"transformers does not save {name} with scales of its own"
    return None if 2 * len(numbers) == len(saved) else "transformers does not save its scales"


def _as_saved(model: Any, conversions: list[Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model as ``save_pretrained`` names and splits them."""
    with _for_now(model, {"_weight_conversions": conversions}):
        saved: dict[str, Tensor] = revert_weight_conversion(model, state)
    return saved


def fp8_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's weights by their names in a checkpoint, the experts' as they are multiplied.

    vLLM and SGLang update a sampler with these pairs of name and tensor, as of a checkpoint in
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
            stored transposed, or of an intermediate size that is no multiple of 128.

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
    >>> fp8_quantization_config(model)["weight_block_size"]
    (128, 128)
    """
    experts, _, conversions = _in_blocks("fp8_tensors", model)
    own = {f"{name}.{w}" for name, module in experts.items() for w in weight_names(module)}
    own |= {name + SCALE for name in own}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, module in experts.items():
            state = {}
            for w in weight_names(module):
                weight = _blocks_of("fp8_tensors", module, w)
                state[f"{name}.{w}"], state[f"{name}.{w}{SCALE}"] = weight.values, weight.scale
            yield from _as_saved(model, conversions, state).items()
        others: dict[Any, tuple[str, Tensor]] = {}
        for key, t in model.state_dict().items():
            name = key.replace("_orig_mod.", "")  # of layers that torch.compile has wrapped
            if name not in own:  # tied ones have one address
                others.setdefault((t.data_ptr(), t.shape) if t.numel() else name, (name, t))
        yield from _as_saved(model, conversions, dict(others.values())).items()

    return tensors()


def fp8_quantization_config(model: Any) -> dict[str, Any]:
    """The entry in ``config.json`` for a checkpoint that has :func:`fp8_tensors`.

    With these two a sampler starts on a model that trains with ``weights="both"``, whose own
    ``save_pretrained`` writes high precision.

    Args:
        model: see :func:`fp8_tensors`, which raises the same.
    """
    described: dict[str, Any] = _in_blocks("fp8_quantization_config", model)[1].to_dict()
    return described


def _in_blocks(op: str, model: Any) -> tuple[dict[str, Any], FineGrainedFP8Config, list[Any]]:
    """A model's experts in FP8 blocks by name, its checkpoint's configuration and conversions."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{op}: model must be a transformers model, got {type(model).__name__}")
    for name, p in model.named_parameters():
        if is_dtensor(p) or ".lora_" in name:
            what = "is sharded" if is_dtensor(p) else "is of an adapter: merge it before"
            raise ValueError(f"{op}: {name} {what}")
    experts = _experts_of(model)
    if not experts:
        raise ValueError(f"{op}: {type(model).__name__} has no experts that are known")
    in_fp8 = {n: m for n, m in experts.items() if _blocks_of(op, m, weight_names(m)[1]) is not None}
    if not in_fp8:
        name, module = next(iter(experts.items()))
        remedy = "convert with weights='both'"
        if storage_of(module) == "mxfp4":
            remedy = "load a checkpoint by dequantize=True for that"
        raise ValueError(f"{op}: {name} is not in FP8 blocks: {remedy}")
    config, conversions, obstacle = _checkpoint_of(model, in_fp8)
    if obstacle is not None:
        raise ValueError(f"{op}: {obstacle}")
    return in_fp8, config, conversions


def _blocks_of(op: str, experts: Any, name: str) -> Any:
    """A weight's e4m3 numbers with a scale for each 128 x 128 block; None if it has no blocks."""
    if storage_of(experts) == "fp8":
        return kept_weight(op, experts, name)
    w = getattr(experts, name).detach()
    has_blocks = isinstance(w, KEPT) and w.scale is not None and w.scale.dim() == 3
    return w.quantized_weight() if has_blocks else None
