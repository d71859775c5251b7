# SPDX-License-Identifier: Apache-2.0
"""The formats of published checkpoints whose experts are in few bits, by transformers' names.

Those of its FP8 models (``FineGrainedFP8Config``): as DeepSeek-V3 was published, e4m3 numbers
``weight`` and float32 scales ``weight_scale_inv`` for each expert, or with ``expert_dtype="fp4"``,
as DeepSeek-V4, two numbers a byte in int8 and E8M0 scales. And GPT-OSS's blocks and scales.

E experts, K in_features, N out_features of a weight.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, revert_weight_conversion
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import Mxfp4Config

from grouped_linear.integrations.transformers import (
    FILES,
    recipe_of,
    same_activation,
    shape_of,
    weight_names,
)
from grouped_linear.integrations.wrappers import named_unwrapped
from grouped_linear.meta_kernels.rules import BLOCK, MX_BLOCK, ceil_div
from grouped_linear.quantized.frozen import STORAGES, Parts, as_bytes
from grouped_linear.quantized.keep import SCALE
from grouped_linear.recipes import Float8BlockScaling, Recipe

#: Why no checkpoint has a model of another library's quantizer, whatever its experts are in.
FOREIGN = "the model's other modules are quantized in a format of theirs, a checkpoint has one"
_TWO_FORMATS = "the model would be in two formats, a checkpoint has one"
#: Of files of DeepSeek-V4, which call scales so.
_SCALE_NAMES = WeightRenaming(r"^(.+)\.scale", r"\1.weight_scale_inv")
#: What the published GPT-OSS leaves in 16 bits.
_IN_16_BITS = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]


def checkpoint_of(
    model: Any, experts: Mapping[str, Any], forms: Mapping[str, str | None]
) -> tuple[Any, list[Any], str | None]:
    """The checkpoint of a model whose experts are in these forms, by name: its configuration.

    None in 16 bits. Then the conversions of names to its names, and why there is none, or None.
    """
    few = {name: module for name, module in experts.items() if forms[name] in STORAGES}
    shapes = {f"{n}.{w}": shape_of(m, w) for n, m in few.items() for w in weight_names(m)}
    kinds, quantizer = {str(forms[name]) for name in few}, getattr(model, "hf_quantizer", None)
    if len(kinds) > 1:
        return None, [], _TWO_FORMATS
    in_mxfp4, own = kinds == {"mxfp4"}, getattr(quantizer, "quantization_config", quantizer)
    own = getattr(own, "of_file", own)
    for key, (_, _, K) in shapes.items():
        if in_mxfp4 and K % MX_BLOCK:
            return None, [], f"MXFP4 is in blocks of {MX_BLOCK}, {key} has {K} in_features"
    classes = [{cls.__name__ for cls in type(module).__mro__} for module in experts.values()]
    is_gpt_oss = isinstance(own, Mxfp4Config | None) and all("GptOssExperts" in c for c in classes)
    if is_gpt_oss and in_mxfp4:
        others = [n for n in experts if n not in few and should_convert_module(n, _IN_16_BITS)]
        return Mxfp4Config([*_IN_16_BITS, *others]), _conversions_of(model), None
    if not few and (quantizer is None or is_gpt_oss):
        return None, _conversions_of(model), None
    if not isinstance(own, FineGrainedFP8Config | None):
        return None, [], FOREIGN
    return _fp8_checkpoint(model, own, few, min(kinds, default="fp8"), shapes)


def _fp8_checkpoint(
    model: Any, own: Any, experts: dict[str, Any], kept_as: str, shapes: dict[str, torch.Size]
) -> tuple[Any, list[Any], str | None]:
    """The same of a model with experts in few bits, by the configuration it was loaded with."""
    # The configuration of a checkpoint knows the experts that were loaded in few bits.
    loaded = {m for m in model.modules() if isinstance(m, FP8Experts)}
    config = own or FineGrainedFP8Config()
    if own is None or loaded != {*experts.values()}:
        config = copy.deepcopy(config)
        config.expert_dtype = "fp4" if kept_as == "mxfp4" else "fp8"
        if kept_as == "mxfp4" and not any(isinstance(m, FP8Linear) for m in model.modules()):
            config.scale_fmt = "ue8m0"
        config.modules_to_not_convert = [
            name
            for name, module in named_unwrapped(model, False)
            if isinstance(module, nn.Linear) or name.endswith(".experts")
            if not isinstance(module, FP8Linear) and name not in experts
        ]
    obstacles = (_obstacle_of(name, module, kept_as) for name, module in experts.items())
    obstacle = next(filter(None, obstacles), None)
    has_blocks = tuple(config.weight_block_size or ()) == (BLOCK, BLOCK)
    if not has_blocks or (kept_as, config.scale_fmt) == ("mxfp4", "float"):
        obstacle = _TWO_FORMATS
    others = [m for m in experts.values() if kept_as == "fp8" and not isinstance(m, FP8Experts)]
    powers_of_two = all(recipe_of_blocks(m).weight.power_of_two_scales for m in others)
    if config.scale_fmt == "ue8m0" and not powers_of_two:
        obstacle = "the checkpoint's scales are powers of two, those of its experts no longer are"
    if obstacle is not None:
        return config, [], obstacle
    return config, *_named_with_scales(model, shapes, kept_as)


def _named_with_scales(
    model: Any, shapes: dict[str, torch.Size], kept_as: str
) -> tuple[list[Any], str | None]:
    """The conversions that save these experts with their scales, or those tried last and why not.

    A model that was loaded in FP8 has them.
    """
    with_scales = [(f"{key}{SCALE}", None) for key in shapes]
    state: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        state |= in_file(key, kept_as, empty_bytes(shape, kept_as), None)
    stand_in: Any = SimpleNamespace(named_parameters=lambda: with_scales, config=model.config)
    # Nothing is quantized while it is saved.
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=False)
    renamed = [_SCALE_NAMES] if model.config.model_type == "deepseek_v4" else []
    own, of_class = _conversions_of(model), _conversions_of(model, loaded=False)
    candidates, update = [own], HfQuantizer.update_weight_conversions
    for base in (own, of_class):
        candidates.append(update(quantizer, [*renamed, *base], stand_in))
    for conversions in candidates:
        obstacle = _obstacle_of_names(model, conversions, state, kept_as)
        if obstacle is None:
            break
    return conversions, obstacle


def recipe_of_blocks(experts: Any) -> Recipe:
    """The recipe that quantizes experts in high precision to FP8 blocks: theirs, or the default."""
    recipe = recipe_of(experts)
    return recipe if recipe is not None and recipe.weight.in_blocks else Float8BlockScaling()


def _obstacle_of(name: str, experts: Any, kept_as: str) -> str | None:
    """Why transformers' FP8 format cannot hold the experts of this name, or None."""
    if not name.endswith(".experts"):
        return f"transformers looks for experts in FP8 in modules called experts, not {name}"
    in_mxfp4 = kept_as == "mxfp4"
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
        own = shape_of(experts, w)
        if list(getattr(theirs, w).shape) != [*own[:2], own[2] // STORAGES[kept_as].per_entry]:
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
    model: Any, conversions: list[Any], state: dict[str, Tensor], kept_as: str
) -> str | None:
    """Try on tensors without memory what ``save_pretrained`` will do with the experts' names."""
    (dtype, _), (rows, columns) = FILES[kept_as], STORAGES[kept_as].block
    try:
        saved = as_saved(model, conversions, state)
    except Exception as error:  # save_pretrained would raise it, with files half written
        return f"transformers cannot name the experts' tensors ({error})"
    numbers = {name: t for name, t in saved.items() if t.dtype == dtype}
    for name, q in numbers.items():
        *_, N, K = q.shape
        scale = saved.get(name + SCALE, saved.get(name.removesuffix("weight") + "scale"))
        if scale is None or scale.shape[-2:] != (ceil_div(N, rows), ceil_div(K, columns)):
            return f"transformers does not save {name} with scales of its own"
    return None if 2 * len(numbers) == len(saved) else "transformers does not save its scales"


# --- names and forms of tensors ------------------------------------------------------------------


@contextmanager
def for_now(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes, and bring back those that were there."""
    before = {name: vars(holder)[name] for name in values if name in vars(holder)}
    vars(holder).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(holder)[name]
        vars(holder).update(before)


def in_file(key: str, form: str, parts: Parts, config: Any) -> dict[str, Tensor]:
    """A weight and its scales of this checkpoint, in the memory of their bytes.

    Names are those before the conversions. Experts as loaded have no bytes.
    """
    q, scale = parts
    if isinstance(config, Mxfp4Config):
        blocks = q.unflatten(-1, (-1, MX_BLOCK // 2))
        return {f"{key}_blocks": blocks, f"{key}_scales": scale.reshape(blocks.shape[:3])}
    if q.dtype == torch.uint8:
        numbers, (of_scale, *_) = FILES[form]
        q, scale = q.view(numbers), scale.view(of_scale).squeeze(-1)
    return {key: q, key + SCALE: scale}


def _conversions_of(model: Any, loaded: bool = True) -> list[Any]:
    """The conversions that ``save_pretrained`` reverts: of loading, or of the model's class."""
    found: list[Any] | None = getattr(model, "_weight_conversions", None) if loaded else None
    if found is not None:
        return found
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in found if not isinstance(c, PrefixChange)]


def as_saved(model: Any, conversions: list[Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model as ``save_pretrained`` names and splits them."""
    with for_now(model, {"_weight_conversions": conversions}):
        saved: dict[str, Tensor] = revert_weight_conversion(model, state)
    return saved


def empty_bytes(shape: torch.Size, kept_as: str) -> Parts:
    """The bytes of the numbers and of the scales of a weight [E, N, K], without memory."""
    w = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return as_bytes(STORAGES[kept_as].quantize(w, Float8BlockScaling()))
