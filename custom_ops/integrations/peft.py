# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters on experts, computed beside the experts' weights and not added to them.

PEFT's ``LoraConfig(target_parameters=[...])`` computes ``W + scaling * B @ A`` for all experts in
every forward: a copy of all weights. Its adapters are grouped here instead: each row goes through
the factors of its own expert. PEFT is imported where this module is, and nowhere else.

E experts, K in_features, N out_features, r an adapter's rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.lora import layer as lora
from peft.tuners.mixed import MixedModel
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from grouped_linear.integrations.adapter import class_before
from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.transformers import (
    dtype_of_kept,
    options_of,
    shape_of,
    storage_of,
    weight_names,
)
from grouped_linear.integrations.wrappers import named_unwrapped
from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name
from grouped_linear.nn.arguments import without_autocast
from grouped_linear.nn.checks import check_model
from grouped_linear.nn.lora import MAX_RANK, Lora, LoraWeights
from grouped_linear.quantized.frozen import KeepsFrozen, frozen_of
from grouped_linear.quantized.keep import is_dtensor

__all__ = ["for_packed_experts", "use_grouped_adapters"]

OLDEST_PEFT = (0, 21)  # older ones lay the factors of stacked experts out in another way
if tuple(map(int, peft.__version__.split(".")[:2])) < OLDEST_PEFT:
    raise ImportError(
        f"grouped_linear.integrations.peft: peft must be 0.21 or newer, got {peft.__version__}"
    )


def use_grouped_adapters(model: nn.Module, *, dropout: float | None = None) -> tuple[str, ...]:
    """Have rows go through PEFT's adapters on a converted model's experts, without new weights.

    For expert e and its rows t::

        y[t] = W[e] @ x[t] + scaling * B[e] @ (A[e] @ x[t])

    Call it once, after ``get_peft_model`` or ``PeftModel.from_pretrained``.
    :func:`grouped_linear.convert` does the same for adapters that the model has already. Adapters
    that are added later to the same parameters compute this way too. Everything else stays PEFT's:
    names, shapes and files of adapters, ranks and alphas by pattern, several active adapters, and
    merges, which weights in few bits refuse. Adapters on other modules are left alone.

    Args:
        model: a PeftModel, or another module with PEFT's layers, whose experts are converted.
        dropout: the probability with which a feature of an adapter's input is zeroed in training:
            ``lora_dropout``, which PEFT refuses beside ``target_parameters``. It is that of all
            adapters that are on experts, in all of their layers. None changes nothing.

    Returns:
        The names of the parameters that have such adapters.

    Raises:
        ValueError: if no adapter is on experts; for experts that are not converted, or sharded; for
            adapters on another parameter of experts than their weights, of another dtype than
            bfloat16, float16 and float32, or of a rank above 256; for a dropout out of range. The
            model is then unchanged.
        TypeError: if `model` is not a module.

    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from grouped_linear import convert
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> done = convert(model, weights="fp8")
    >>> experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    >>> model = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=experts))
    >>> use_grouped_adapters(model)[0]
    'model.layers.0.mlp.experts.down_proj'
    """
    op = "use_grouped_adapters"
    check_model(op, model)
    found = dict(_wrappers_of_experts(model))
    if not found:
        raise ValueError(
            f"{op}: {type(model).__name__} has no adapter on experts that go through transformers' "
            "interface: name them in target_parameters of LoraConfig"
        )
    for name, wrapper in found.items():
        check_implementation(f"{op}: {name}", wrapper.get_base_layer())
    check_adapters(op, model)
    p = None if dropout is None else Lora(1, dropout=dropout).dropout  # which checks it
    group_adapters(model)
    adapters = {a for wrapper in found.values() for a in wrapper.lora_A}
    for module in model.modules():  # all layers that have them
        if p is not None and isinstance(module, lora.LoraLayer):
            for name in adapters & module.lora_dropout.keys():
                module.lora_dropout[name] = nn.Dropout(p).train(module.training)
    return tuple(found)


def for_packed_experts(config: peft.LoraConfig) -> peft.LoraConfig:
    """Prepare PEFT's configuration for a model whose experts are frozen in MXFP4 or FP8.

    PEFT reads an adapter's sizes and dtype off the weight, whose parameter holds bytes. A byte of
    MXFP4 is two numbers, so such experts need this call. Over FP8 it matters with
    ``autocast_adapter_dtype=False`` alone: adapters then have the model's 16 bits, not float32.
    Names, shapes and files are those of adapters on the same model in 16 bits. Give the result to
    ``get_peft_model``, then call :func:`use_grouped_adapters`. Loaded adapters need it, too::

        config = for_packed_experts(LoraConfig.from_pretrained(path))
        model = PeftModel.from_pretrained(model, path, config=config)

    Args:
        config: with ``target_parameters`` on experts. It is changed and returned.

    Raises:
        TypeError: if `config` is not a LoraConfig.

    >>> from peft import LoraConfig
    >>> config = for_packed_experts(LoraConfig(target_parameters=["mlp.experts.down_proj"]))
    """
    if not isinstance(config, peft.LoraConfig):
        raise TypeError(
            "for_packed_experts: config must be a LoraConfig, for get_peft_model(model, config), "
            f"got {type(config).__name__}"
        )
    wrappers: Any = dict.fromkeys((KeepsFrozen, FP8Experts), _wrapper_of_packed)
    config._register_custom_module(wrappers)
    return config


def _wrapper_of_packed(target: Any, adapter: str, **kwargs: Any) -> "ParamWrapper | None":
    """The adapter on a parameter in few bits; None has PEFT make its own, or refuse."""
    experts = target.get_base_layer() if isinstance(target, lora.LoraLayer) else target
    is_ours = kwargs.get("parameter_name") is not None and goes_through_interface(experts)
    return ParamWrapper(target, adapter, **kwargs) if is_ours else None


def check_adapters(op: str, model: nn.Module) -> None:
    """Raise ValueError for adapters on experts that cannot be grouped; ``op`` begins it."""
    for of_parameter, wrapper in _wrappers_of_experts(model):
        where, experts = f"{op}: {of_parameter}", wrapper.get_base_layer()
        name = wrapper.parameter_name
        if type(wrapper) not in (lora.ParamWrapper, ParamWrapper) or "forward" in vars(wrapper):
            raise ValueError(
                f"{where}: this {type(wrapper).__name__} has another forward than PEFT's, which "
                "would hide the new forward"
            )
        if name not in weight_names(experts):
            raise ValueError(
                f"{where}: {class_before(experts).__name__} has adapters on {name}, and only its "
                f"weights {' and '.join(weight_names(experts))} take some here"
            )
        if is_dtensor(getattr(experts, name)):
            raise ValueError(
                f"{where} is sharded, and its adapters are not: use adapters before the model is "
                "sharded by FSDP2, and without DistributedConfig"
            )
        if storage_of(experts) == "mxfp4" and not isinstance(wrapper, ParamWrapper):
            raise ValueError(
                f"{where} is in MXFP4, and PEFT reads the adapter's sizes off its bytes: give "
                "get_peft_model for_packed_experts(config)"
            )
        for adapter in wrapper.lora_A:
            of_adapter = f"{where}: the adapter {adapter!r}"
            for factor in (wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight):
                if factor.dtype not in ACTIVATIONS:
                    raise ValueError(
                        f"{of_adapter} must be bfloat16, float16 or float32, got "
                        f"{dtype_name(factor.dtype)}: leave autocast_adapter_dtype=True"
                    )
            _check_rank(of_adapter, wrapper.r[adapter])


def group_adapters(model: nn.Module) -> None:
    """Group the adapters on a model's experts, after their check."""
    wrappers = [wrapper for _, wrapper in _wrappers_of_experts(model)]
    for wrapper in wrappers:
        wrapper.__class__ = ParamWrapper
    for module in model.modules():
        if wrappers and type(module) in (peft.LoraModel, MixedModel):
            module.__class__ = LoraModel if type(module) is peft.LoraModel else _MixedModel


def check_implementation(where: str, experts: Any) -> None:
    """Raise ValueError for experts that do not compute here, and so without grouped adapters."""
    implementation = experts.config._experts_implementation
    if options_of(experts) is None:
        raise ValueError(
            f"{where}: the experts implementation {implementation!r} is not one of "
            "grouped_linear's: call convert, before or after the adapters are made"
        )


def _wrappers_of_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers of parameters of experts, by the parameter's name in the plain model."""
    names = {module: name for name, module in named_unwrapped(model)}
    for module in model.modules():
        experts = module.get_base_layer() if isinstance(module, lora.ParamWrapper) else module
        if experts is not module and goes_through_interface(experts):
            yield f"{names[experts]}.{module.parameter_name}", module


def _check_rank(where: str, rank: int) -> None:
    if rank > MAX_RANK:
        raise ValueError(f"{where} must have a rank of at most {MAX_RANK}, got {rank}")


def _check_merge(where: str, layer: Any) -> None:
    """Raise ValueError for a layer whose weight an adapter cannot be added to."""
    base = layer.get_base_layer()
    is_linear = type(base).__name__ == "FP8Linear"
    if not is_linear and not isinstance(layer, lora.ParamWrapper):
        return
    w = base.weight if is_linear else layer.get_param()
    if is_dtensor(w):
        raise ValueError(
            f"{where} is sharded: save the adapter, and merge it in a model that is not"
        )
    if w.element_size() == 1:
        loaded = "mxfp4" if w.dtype == torch.int8 else "fp8"  # by transformers
        kept_as = frozen_of(base)[layer.parameter_name].weights if frozen_of(base) else loaded
        raise ValueError(
            f"{where} is in {kept_as.upper()} and stays as it is: keep the adapter beside it, or "
            "merge it in the model in 16 bits (a checkpoint: dequantize=True in its quantization "
            "config)"
        )


class _ChecksMerges:
    """A model of adapters that raises before a merge writes a layer, for any in few bits."""

    model: nn.Module

    def _check_merge_allowed(self) -> None:
        for name, layer in self.model.named_modules():
            if isinstance(layer, lora.LoraLayer):
                _check_merge(f"merge: {name}", layer)
        super()._check_merge_allowed()  # type: ignore[misc]


class _MixedModel(_ChecksMerges, MixedModel):
    """PEFT's model of adapters of several kinds."""

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        """PEFT's, which asks nothing."""
        self._check_merge_allowed()
        return super().merge_and_unload(*args, **kwargs)  # type: ignore[no-any-return]


class LoraModel(_ChecksMerges, peft.LoraModel):
    """PEFT's model of adapters, which refuses what adapters on grouped experts cannot do."""

    def _check_new_adapter_config(self, config: Any) -> None:
        """Raise for an adapter that experts cannot have before a layer gets it; PEFT asks this."""
        super()._check_new_adapter_config(config)
        if not config.target_parameters:
            return
        for name, wrapper in _wrappers_of_experts(self.model):
            key = get_pattern_key(config.rank_pattern.keys(), name)
            rank = config.rank_pattern.get(key, config.r)
            parts = wrapper.get_base_layer(), "new", wrapper.parameter_name, config, rank
            try:
                with torch.device("meta"):
                    lora.ParamWrapper(*parts)
            except Exception as error:
                raise ValueError(f"add_adapter: {name} cannot have it: {error}") from error
            _check_rank(f"add_adapter: {name}: the adapter", rank)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Refuse mixed batches before PEFT adds the hooks, which an error would leave behind."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "adapter_names: adapters on experts are those of the whole batch: choose them with "
                "set_adapter, and call the model once for each"
            )
        with super()._enable_peft_forward_hooks(*args, **kwargs):
            yield


class ParamWrapper(lora.ParamWrapper):
    """PEFT's wrapper of an experts' parameter, whose factors the experts compute with.

    It has the name of PEFT's class, by which PEFT knows it. Bytes of frozen weights refuse a merge
    of PEFT's own wrapper, too, see :class:`grouped_linear.quantized.frozen.FrozenBytes`.
    """

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """PEFT's; ValueError for weights in few bits and for sharded ones."""
        _check_merge(f"merge: {self.parameter_name}", self)
        super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        """PEFT's; ValueError where the weights were frozen with the adapters in them."""
        if self.merged:
            _check_merge(f"unmerge: {self.parameter_name}", self)
        super().unmerge()

    def _kept_as(self) -> str | None:
        """How the parameter is kept that is in few bits; None of any other, as a bias."""
        experts = self.get_base_layer()
        return storage_of(experts) if self.parameter_name in weight_names(experts) else None

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """The sizes of a weight in MXFP4, which its bytes do not have; PEFT asks this."""
        sizes: tuple[int, int] = super()._get_in_out_features(module)  # type: ignore[assignment]
        if self._kept_as() != "mxfp4":
            return sizes
        experts = self.get_base_layer()
        _, N, K = shape_of(experts, self.parameter_name)
        return (K, N) if experts.is_transposed else (N, K)  # PEFT exchanges those of [E, N, K]

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """New factors have the dtype of the weight, which one in few bits does not show."""
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        if self._kept_as() is not None:
            dtype = dtype_of_kept(self.get_base_layer(), self.parameter_name)
            for factors in (self.lora_A, self.lora_B):
                factors[adapter_name].to(dtype)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' forward, with the active adapters, and those around, as ``lora``."""
        self._check_forward_args(x, *args, **kwargs)
        for of_other_layers in ("adapter_names", *lora.VARIANT_KWARG_KEYS):
            kwargs.pop(of_other_layers, None)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
        elif not self.merged:
            active = self.active_weights()
            if active is not None:
                if "lora" not in kwargs:  # else the wrapper around has asked
                    check_implementation(self.parameter_name, self.get_base_layer())
                kwargs["lora"] = {**kwargs.get("lora", {}), self.parameter_name: active}
        y: Tensor = self.base_layer(x, *args, **kwargs)
        return y

    def factors(self, adapter: str) -> LoraWeights:
        """The factors of an adapter, as views of its parameters.

        PEFT lays out A's rows by expert, then by rank, and B's columns by rank, then by expert.
        """
        a: Any = self.lora_A[adapter].weight
        b: Any = self.lora_B[adapter].weight
        E = self.num_experts
        a_ERK = a.view(E, -1, a.size(1))
        b_ENR = b.view(b.size(0), -1, E).permute(2, 0, 1)
        drop = self.lora_dropout[adapter]
        p = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
        return LoraWeights(a_ERK, b_ENR, self.scaling[adapter], p)

    def active_weights(self) -> LoraWeights | None:
        """The active adapters as one, None if there is none."""
        active = [self.factors(name) for name in self.active_adapters if name in self.lora_A]
        if len(active) < 2:
            return active[0] if active else None
        dropouts = {adapter.dropout for adapter in active}
        if len(dropouts) > 1:
            raise ValueError(
                f"{self.parameter_name}: adapters that are active together must have one dropout, "
                f"got {sorted(dropouts)}: call use_grouped_adapters(model, dropout=...)"
            )
        with without_autocast(active[0].a.device):
            a = torch.cat([adapter.a for adapter in active], dim=1)
            b = torch.cat([adapter.b * adapter.scaling for adapter in active], dim=2)
        return LoraWeights(a, b, dropout=dropouts.pop())
