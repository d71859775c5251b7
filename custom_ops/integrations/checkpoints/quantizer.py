# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are loaded straight into experts in few bits, by ``from_pretrained``.

``convert`` gives the experts their form while the model has no memory yet. Each weight then is
quantized as its experts are read; what a file has in the same few bits, becomes the parameters.
transformers finds the quantizer by its public hook. Files never name it: a model is saved in a
format that is published (formats.py).

E experts, K in_features, N out_features of a weight.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.integrations import finegrained_fp8
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config, QuantizationMethod

from grouped_linear.integrations.adapter import Request
from grouped_linear.integrations.checkpoints.formats import for_now
from grouped_linear.integrations.checkpoints.tensors import save_as_published
from grouped_linear.integrations.convert import carry_out, plans_of
from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.transformers import check_by_experts
from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.nn.checks import check_recipe
from grouped_linear.quantized import keep
from grouped_linear.quantized.frozen import as_bytes, frozen_of, quantized
from grouped_linear.quantized.keep import SCALE, local_part
from grouped_linear.recipes import Recipe

__all__ = ["GroupedLinearConfig"]

_METHOD, _OP = "grouped_linear", "GroupedLinearConfig"
#: Names of modules that stay, as transformers' FP8 takes patterns of them.
_EXPERTS, _ALL_BUT_EXPERTS = r".*\.experts", r"(?!.*\.experts$).*"


class _Name(str):
    """A class's name that transformers does not find to differ from that of a file's class."""

    def __ne__(self, other: object) -> bool:
        return other not in (str(self), "FineGrainedFP8Config", "Mxfp4Config")


@dataclass(eq=False)
class GroupedLinearConfig(Mxfp4Config):  # of the classes whose options are laid over a file's
    """Have ``from_pretrained`` load a model whose experts are kept in FP8 or MXFP4.

    Its state dict has the bits that :func:`grouped_linear.convert` makes, with the same arguments,
    of the model in 16 bits. That model is never in memory: each expert is quantized as it is read.
    Experts that the checkpoint has in these few bits (DeepSeek-V3's and Qwen's FP8, GPT-OSS's
    MXFP4, DeepSeek-V4's FP4) are its bytes. FP8 becomes MXFP4 on request. Other modules are as
    transformers loads them. ``model.hf_quantizer.report`` is convert's report, without errors.

    The model trains adapters. ``save_pretrained`` writes a published format, which loads so again,
    or raises before it writes a file.

    Args:
        weights: "fp8" or "mxfp4", as convert takes it.
        recipe: as convert takes it; ``convert(model, recipe)`` chooses another later.
        recipes: as convert takes them. Experts for which a pattern has None keep 16 bits.

    Raises:
        ValueError: for arguments that convert refuses. ``from_pretrained`` raises, before it reads
            a tensor, for experts that cannot be kept so; and for tensors that are missing or of
            another shape, and experts that are offloaded. No model is there then.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> with TemporaryDirectory() as folder:
    ...     MixtralForCausalLM(config).save_pretrained(folder)
    ...     model = MixtralForCausalLM.from_pretrained(
    ...         folder, quantization_config=GroupedLinearConfig("mxfp4"))
    >>> print(model.hf_quantizer.report)
    module                      modules  form            experts  parameters  weights
    model.layers.*.mlp.experts        2  MixtralExperts        8      98,304  frozen in MXFP4, 52.22 kB
    recipe: None
    """  # noqa: E501

    weights: Literal["fp8", "mxfp4"] = "mxfp4"
    recipe: Recipe | None = None
    recipes: Mapping[str, Recipe | None] | None = field(default=None, kw_only=True)
    quant_method: Any = field(default=_METHOD, init=False, repr=False)
    modules_to_not_convert: Any = field(default=None, init=False, repr=False)  # is shown
    of_file: ClassVar = None  # what files say of few bits: nothing, they had 16

    def __post_init__(self) -> None:
        if self.weights not in ("fp8", "mxfp4"):
            raise ValueError(f"{_OP}: weights must be 'fp8' or 'mxfp4', got {self.weights!r}")
        check_recipe(_OP, self.recipe)
        keep.check_weights_kept(_OP, keep.recipe_for(self.recipe, self.weights), self.weights)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What transformers lays over the configuration of a file in few bits."""
        return {"quant_method": _METHOD, "asked": self}


GroupedLinearConfig.__name__ = _Name(_OP)


@register_quantizer(_METHOD)
class GroupedLinearQuantizer(HfQuantizer):
    """The quantizer that transformers calls around loading a model."""

    is_trainable = True  # adapters
    is_compileable = True
    serialized_names = FineGrainedFP8HfQuantizer.serialized_names  # a plan spreads scales, too
    report: Any = None

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.asked = vars(quantization_config).pop("asked", quantization_config)
        is_fp8 = isinstance(quantization_config, FineGrainedFP8Config)
        self._in_blocks = self.pre_quantized and not is_fp8  # as GPT-OSS's files
        if self.pre_quantized:
            quantization_config.quant_method = QuantizationMethod("fp8" if is_fp8 else "mxfp4")
        of_fp8: Any = FineGrainedFP8HfQuantizer  # transformers' own, for an FP8 file
        self._fp8: Any = of_fp8(quantization_config, pre_quantized=True) if is_fp8 else None

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` writes files that load again; else it raises itself."""
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Without a GPU transformers has modules in FP8 dequantized; experts are not."""
        if self._fp8 is not None:
            self._fp8.validate_environment(*args, **kwargs)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        asked, fp8 = self.asked, self._fp8
        self._dtype = torch.get_default_dtype()  # which transformers makes the model's here
        # Of DeepSeek-V4 it is MXFP4, which convert refuses to make FP8 of.
        in_fp4 = fp8 is not None and fp8.quantization_config.expert_dtype == "fp4"
        self._reads_as_is = in_fp4 or (fp8 is not None and asked.weights == "fp8")
        if fp8 is not None:
            self._replace_by_fp8(model)
        recipe = keep.recipe_for(asked.recipe, asked.weights)
        given = recipe, asked.weights, False, asked.recipes or {}
        self._request: Any = Request(model, *given, before_loading=True)
        self._plain: Any = None  # the model in 16 bits, without memory
        if self._reads_as_is:
            plans_of(self._request)  # what is wrong raises before anything is read
        else:
            self._plain = copy.deepcopy(model)
            self.report = carry_out(self._request)
        # Where weights are tied their scales are, too.
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
        self._experts = {n: m for n, m in model.named_modules() if goes_through_interface(m)}
        self._packed: dict[str, Any] = {}  # those in few bits, by the names of weights
        for name, module in self._experts.items():
            module._is_hf_initialized = True  # transformers would draw what a file lacks
            self._packed |= {f"{name}.{w}": module for w in frozen_of(module)}

    def _replace_by_fp8(self, model: Any) -> None:
        """Give modules the form of an FP8 file: experts to be read so, others where a GPU is."""
        own, fp8, experts = self._fp8.quantization_config, self._fp8, self._reads_as_is
        fp8._normalize_modules_to_not_convert(model)
        given = own.modules_to_not_convert, model._keep_in_fp32_modules
        stay = fp8.get_modules_to_not_convert(model, *given)
        stay += [_EXPERTS] if not experts else [_ALL_BUT_EXPERTS] if own.dequantize else []
        if own.modules_to_convert:
            finegrained_fp8.replace_with_fp8_embedding(model, own.modules_to_convert, stay)
        if experts or not own.dequantize:
            with for_now(own, {"dequantize": False}):
                finegrained_fp8.replace_with_fp8_linear(model, stay, own, pre_quantized=True)

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Spread scales as their numbers."""
        own = super().update_parallel_plan
        getattr(self._fp8, "update_parallel_plan", own)(model, plan)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Have experts quantized as they arrive, whatever steps a model's files take before."""
        found = [*weight_conversions]
        if self._fp8 is not None:
            found = self._fp8.update_weight_conversions(found, self._plain or model)
        for steps in found:
            ends = tuple(target.rpartition(r"\1")[2] for target in steps.target_patterns)
            if isinstance(steps, WeightConverter) and any(n.endswith(ends) for n in self._packed):
                steps.__class__ = OnArrival  # each model has steps of its own
        for name in self._packed:
            own = name.removeprefix(f"{model.base_model_prefix}.")
            parts = [own, f"{own}_blocks", f"{own}_scales"]
            found.append(OnArrival(parts, [own], [AsRead()]))
        # transformers reads a tensor when its turn comes if this is no file in few bits.
        self.pre_quantized = not self._packed or self._in_blocks
        return found

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """False: the steps quantize. transformers asks as it begins to read.

        From here on it is to ask for dtypes, too, which it does for files in few bits.
        """
        self.pre_quantized = True
        return False

    def write(self, found: dict[str, Tensor], name: str, t: Tensor, e: int | None) -> None:
        """Write the bytes of expert `e`, or of all, among those found, and make room for them."""
        experts, w = self._packed[name], name.rpartition(".")[2]
        shape, frozen = self._plain.get_parameter(name).shape[1:], frozen_of(experts)[w]
        own = {name: experts._parameters[w], name + SCALE: experts._parameters[w + SCALE]}
        for key, p in own.items() if name not in found else ():
            found[key] = torch.empty_like(local_part(p), device=t.device)
        if t.shape != (len(found[name]) if e is None else 1, *shape) or t.dtype.itemsize == 1:
            raise ValueError(
                f"{_OP}: the checkpoint has {list(t.shape)} in {dtype_name(t.dtype)} for {name}, "
                f"whose experts are {list(shape)}, with scales if in FP8"
            )
        for i, w_1NK in enumerate(t.to(frozen.dtype).split(1), e or 0):
            w_1NK = w_1NK.mT if experts.is_transposed else w_1NK
            for key, bits in zip(own, as_bytes(quantized(w_1NK, frozen)), strict=True):
                found[key][i] = bits[0]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The dtype to read a tensor in: that of the model in 16 bits, or for bytes None."""
        read = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        if "e8m0" in read.lower() and ".experts." in converter.target_patterns[0]:
            return None  # also where the model wants every scale in float32, as Hy4
        if isinstance(converter, OnArrival):
            is_high = self._fp8 is None and read.endswith(("16", "32"))
            return (self._dtype if dtype == torch.uint8 else dtype) if is_high else None
        return dtype if self._fp8 is None else self._fp8.get_new_dtype(converter, param, dtype)

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """The model's configuration is that of its files, if these say how they are in few bits."""
        if self._fp8 is not None:
            dequantized = self._fp8.quantization_config.dequantize
            if dequantized or self._packed:
                del model._weight_conversions
            self.quantization_config = self.asked if dequantized else self.quantization_config
        super().postprocess_model(model, **kwargs)
        if self.quantization_config is self.asked:
            del model.config.quantization_config
        save_as_published(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for name, module in self._experts.items():
            for of_experts, p in module.named_parameters():
                if p.is_meta:
                    raise ValueError(
                        f"{_OP}: {name} is offloaded by accelerate, whose hooks do not keep bytes: "
                        "load the model without offloading its experts"
                    )
                if not getattr(p, "_is_hf_initialized", False):  # its memory is as it was
                    raise ValueError(f"{_OP}: the checkpoint has no {name}.{of_experts}")
        if self._fp8 is not None:
            self._fp8._process_model_after_weight_loading(model)
        if self._reads_as_is:
            self.report = carry_out(self._request)
        self._experts, self._packed, self._request, self._plain = {}, {}, None, None


# --- steps of transformers' loading --------------------------------------------------------------


class OnArrival(WeightConverter):
    """Steps that make weights of experts, each of which is read and quantized before the next."""

    __slots__ = ()

    def convert(self, layer_name: str, *args: Any, **options: Any) -> Any:
        """The bytes of numbers and scales by their names; see transformers' WeightConverter."""
        quantizer = options.get("hf_quantizer")
        if quantizer is None or layer_name not in quantizer._packed:  # or a file is written
            return super().convert(layer_name, *args, **options)
        own = getattr(quantizer._packed[layer_name], layer_name.rpartition(".")[2])
        check_by_experts(f"{_OP}: {layer_name}", own)
        plain = options["model"] = quantizer._plain  # steps ask for shapes and dtypes
        given, self.collected_tensors = dict(self.collected_tensors), defaultdict(list)
        apart = any(isinstance(step, MergeModulelist) for step in self.operations)
        E, turns, first = len(plain.get_parameter(layer_name)), [given], 0
        if apart:
            sizes = {pattern: len(tensors) for pattern, tensors in given.items()}
            if {*sizes.values()} != {E}:
                raise ValueError(f"{_OP}: {layer_name} has {E} experts, the checkpoint {sizes}")
            turns = [{p: [tensors[e]] for p, tensors in given.items()} for e in range(E)]
        found: dict[str, Tensor] = {}
        for turn in turns:
            for pattern, tensors in turn.items():
                read = [t.result() if isinstance(t, Future) else t() for t in tensors]
                read = [t for t in read if t is not None]  # of experts of this process
                self.collected_tensors |= {pattern: read} if read else {}
            if not self.collected_tensors:
                continue
            del read
            for name, t in super().convert(layer_name, *args, **options).items():
                t = t[0] if isinstance(t, list) else t
                if name in quantizer._packed and t.is_floating_point():
                    quantizer.write(found, name, t, first if apart else None)
                else:
                    found[name] = t
            first += 1
        return found


class AsRead(ConversionOps):
    """A weight as a file has it in 16 bits, or GPT-OSS's blocks [E, N, K / 32, 16] and scales."""

    reverse_op = property(lambda self: self)  # in_file of formats.py makes blocks and scales

    def convert(self, input_dict: Any, *_: Any, full_layer_name: str = "", **options: Any) -> Any:
        """The tensors by the parameters' names; see transformers' ConversionOps."""
        made = {}
        for pattern, t in input_dict.items():
            t = t[0] if isinstance(t, list) else t
            if pattern.endswith("_scales"):
                made[full_layer_name + SCALE] = t.view(torch.uint8).unsqueeze(-1)
            else:
                made[full_layer_name] = t.flatten(-2) if t.dim() == 4 else t
        return made
