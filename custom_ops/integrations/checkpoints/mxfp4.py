# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS's checkpoints as they are published: the bytes of the files are the parameters.

transformers' own quantizer of the method ``mxfp4`` dequantizes on CPUs and without the package
``kernels``, and refuses to train. This module registers another quantizer with transformers' public
hooks, under a method name of its own; :func:`mxfp4_config` gives a checkpoint's configuration that
name. Saved configurations say ``mxfp4`` again, so files stay those that everybody reads.

E experts, K in_features, N out_features of a weight.
"""

from typing import Any

import torch
from transformers import AutoConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import Mxfp4Config

from grouped_linear.integrations.adapter import convert_class
from grouped_linear.integrations.convert import convert
from grouped_linear.integrations.transformers import ConvertedExperts, options_of
from grouped_linear.meta_kernels.rules import MX_BLOCK, ceil_div
from grouped_linear.quantized.frozen import FrozenBytes, frozen_of
from grouped_linear.quantized.keep import SCALE, is_dtensor

__all__ = ["mxfp4_config"]

_METHOD = "grouped_linear_mxfp4"
_WEIGHTS = "gate_up_proj", "down_proj"


def mxfp4_config(path: str, **kwargs: Any) -> Any:
    """Read the configuration of a GPT-OSS checkpoint, for a model that keeps experts in MXFP4.

    Give it to ``from_pretrained``::

        model = AutoModelForCausalLM.from_pretrained(path, config=mxfp4_config(path))

    The experts' codes and scales then are the model's parameters, as :func:`grouped_linear.convert`
    keeps frozen weights: 4.25 bits a number, on CPUs and GPUs, without the package ``kernels``.
    Nothing is dequantized, at loading or later. The model is converted with the recipe None, unless
    ``experts_implementation`` names one of this package's, and ``convert(model, recipe)`` chooses
    another: ``Float8BlockScaling`` or ``MXFP8BlockScaling``. It
    generates and trains adapters, and ``save_pretrained`` writes the blocks and scales of the
    checkpoint bit for bit. PEFT's configuration goes through
    :func:`grouped_linear.integrations.peft.for_packed_experts`.

    Args:
        path: a folder, or a repository's name, as ``AutoConfig.from_pretrained`` takes it.
        kwargs: of ``AutoConfig.from_pretrained``.

    Returns:
        The configuration, for one or more calls of ``from_pretrained``.

    Raises:
        ValueError: for a checkpoint that is not in MXFP4.
    """
    config = AutoConfig.from_pretrained(path, **kwargs)
    described = getattr(config, "quantization_config", None) or {}
    if described.get("quant_method") != "mxfp4":
        raise ValueError(
            f"mxfp4_config: {path} is not in MXFP4, its quantization_config says "
            f"{described.get('quant_method')!r}: load it without this configuration"
        )
    config.quantization_config = {**described, "quant_method": _METHOD}
    return config


@register_quantization_config(_METHOD)
class PackedMxfp4Config(Mxfp4Config):
    """transformers' Mxfp4Config, which chooses the quantizer below. Its files say mxfp4."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(modules_to_not_convert)
        self.quant_method: Any = _METHOD

    def to_dict(self) -> dict[str, Any]:
        """The description of a checkpoint, as it is published."""
        return {**super().to_dict(), "quant_method": "mxfp4"}


@register_quantizer(_METHOD)
class PackedMxfp4Quantizer(HfQuantizer):
    """The quantizer that transformers calls around loading a model."""

    is_trainable = True  # adapters
    is_compileable = True
    serialized_names = {name: [f"{name}{SCALE}"] for name in _WEIGHTS}  # noqa: RUF012  (as its base)
    quantization_config: PackedMxfp4Config

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` writes files that load again."""
        return True

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Names and shapes of the files, and of the parameters, for the experts in few bits alone.

        A checkpoint may have layers in 16 bits, which are saved as they were read.
        """
        found = [*weight_conversions]
        for module_name, module in model.named_modules():
            for name in frozen_of(module) if isinstance(module, GptOssExperts) else ():
                own = f"{module_name}.{name}".removeprefix(f"{model.base_model_prefix}.")
                found += [
                    WeightConverter([f"{own}_blocks"], [own], [AsBytes()]),
                    WeightConverter([f"{own}_scales"], [f"{own}{SCALE}"], [AsBytes()]),
                ]
        return found

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Blocks and scales are read as they are; files may say that scales are E8M0."""
        operations = getattr(converter, "operations", ())
        if any(isinstance(operation, AsBytes) for operation in operations):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        skipped = self.quantization_config.modules_to_not_convert or []
        packed = [
            module
            for name, module in model.named_modules()
            if isinstance(module, GptOssExperts) and should_convert_module(name, skipped)
        ]
        if not packed:
            raise ValueError(
                f"mxfp4_config: {type(model).__name__} has no experts of GPT-OSS: load it without "
                "this configuration"
            )
        for module in packed:
            _pack(module)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        recipe: Any = None
        for name, module in model.named_modules():
            if isinstance(module, GptOssExperts) and frozen_of(module):
                _check_loaded(name, module)
                _set_scales(module, True)
                recipe, _ = options_of(module) or (None, False)  # by the name that was asked for
        convert(model, recipe)


def _pack(experts: Any) -> None:
    """Give experts without memory the parameters of MXFP4, [E, N, K], in place of [E, K, N]."""
    convert_class(experts, ConvertedExperts)
    for name in _WEIGHTS:
        w = getattr(experts, name)
        E, K, N = w.shape
        shapes = (E, N, ceil_div(K, 2)), (E, N, ceil_div(K, MX_BLOCK))
        parts = [torch.empty(shape, dtype=torch.uint8, device=w.device) for shape in shapes]
        experts.freeze(name, tuple(parts), None, w.dtype, weights="mxfp4")
    _set_scales(experts, False)
    experts._is_hf_initialized = True  # transformers would draw bytes from a normal distribution


def _set_scales(experts: Any, has_bytes: bool) -> None:
    """Give scales the last dimension that frozen weights' have, or take it while a file is read.

    transformers takes a tensor with one dimension less than its sharded parameter for one expert's.
    Sharded scales stay without it, because FSDP2 has their parameters by then.
    """
    for name in _WEIGHTS:
        scale = experts._parameters[name + SCALE]
        if not is_dtensor(scale):
            scale = scale.data.unsqueeze(-1) if has_bytes else scale.data.squeeze(-1)
            experts._parameters[name + SCALE] = FrozenBytes(scale)


def _check_loaded(name: str, experts: Any) -> None:
    """Raise ValueError for experts without numbers."""
    for of_parameter, p in experts.named_parameters():
        if p.is_meta:
            raise ValueError(
                f"mxfp4_config: {name} is offloaded by accelerate, whose hooks do not keep bytes: "
                "load the model without offloading its experts"
            )
        if not getattr(p, "_is_hf_initialized", False):  # its memory is as it was
            raise ValueError(f"mxfp4_config: the checkpoint has no {name}.{of_parameter}")


class AsBytes(ConversionOps):
    """Blocks [E, N, K / 32, 16] of a file as codes [E, N, K / 2], scales [E, N, K / 32] as bytes.

    Scales may say that they are E8M0. The way back is :func:`.formats.in_file`.
    """

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
        return {target_patterns[0]: t.flatten(-2) if t.dim() == 4 else t.view(torch.uint8)}
