# SPDX-License-Identifier: Apache-2.0
"""Weights as the published checkpoint of a model has them: for a sampler, and as files.

E experts, K in_features, N out_features of a weight.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from grouped_linear.integrations.checkpoints.formats import (
    FOREIGN,
    as_saved,
    checkpoint_of,
    empty_bytes,
    for_now,
    in_file,
    recipe_of_blocks,
)
from grouped_linear.integrations.experts import goes_through_interface
from grouped_linear.integrations.transformers import (
    SAVES,
    kept_weight,
    recipe_of,
    shape_of,
    storage_of,
    weight_names,
)
from grouped_linear.integrations.wrappers import named_unwrapped, plain_name, unwrapped
from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.quantized.frozen import STORAGES, Frozen, Parts, as_bytes, frozen_of, quantized
from grouped_linear.quantized.keep import (
    SCALE,
    distributed_like,
    is_by_experts,
    is_dtensor,
    local_part,
)
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes.recipe import UNQUANTIZED

OP = "CheckpointTensors"


class TensorMeta(NamedTuple):
    """A tensor of a checkpoint before it is there, as vLLM's ``ParamMeta`` has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointTensors:
    """A model's weights as its published checkpoint has them, for a sampler that loads them.

    Iteration gives pairs of name and whole tensor. Experts have the bits that training multiplies:
    e4m3 numbers ``...weight`` and float32 scales ``...weight_scale_inv`` of 128 x 128 blocks, as
    DeepSeek-V3; MXFP4 as DeepSeek-V4, int8 codes and E8M0 scales, or as GPT-OSS, ``..._blocks`` and
    ``..._scales``; or numbers of 16 bits. All other weights come as the model has them, tied ones
    once. vLLM calls this a ``WeightSource``: :meth:`metadata` and iteration agree element for
    element, and each iteration reads the present numbers. Make another one after ``convert``.

    Of a sharded model (FSDP2, transformers' ``DistributedConfig``) every process iterates to the
    end, and has every tensor: one layer is gathered at a time. Of other models tensors are views of
    the model's memory where names allow it: copy those that must outlive the next step.

    Args:
        model: a transformers model.
        weights: how experts are handed over. None: as training multiplies them, in FP8 blocks
            under ``Float8BlockScaling``, in MXFP4 where they learn or are frozen in it, else as
            they are. ``"fp8"`` and ``"mxfp4"`` quantize experts that training multiplies in 16
            bits or another form; ``"bf16"`` has experts that learn in bfloat16.

    Attributes:
        quantization_config: the entry of this checkpoint's ``config.json``; None in 16 bits.

    Raises:
        ValueError: for experts that the format cannot hold, as those with biases in FP8; for
            adapters beside weights, and weights without numbers; for frozen weights, or weights
            that learn in MXFP4, in another format.

    >>> from grouped_linear import Float8BlockScaling, convert
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=128,
    ...                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> report = convert(model, Float8BlockScaling(), weights="both")
    >>> source = CheckpointTensors(model)
    >>> one = next(meta for meta in source.metadata() if ".experts.7.w2." in meta.name)
    >>> one.name.removeprefix("model.layers.0."), one.dtype, one.shape
    ('block_sparse_moe.experts.7.w2.weight', torch.float8_e4m3fn, (32, 128))
    >>> dict(source)[one.name].shape, source.quantization_config["weight_block_size"]
    (torch.Size([32, 128]), (128, 128))
    """

    def __init__(
        self, model: nn.Module, weights: Literal["bf16", "fp8", "mxfp4"] | None = None
    ) -> None:
        self._model = unwrapped(model)
        cls = type(self._model).__name__
        if not isinstance(self._model, PreTrainedModel):
            raise ValueError(f"{OP}: model must be a transformers model, got {cls}")
        if weights not in (None, "bf16", *STORAGES):
            choices = "None, 'bf16', 'fp8' or 'mxfp4'"
            raise ValueError(f"{OP}: weights must be {choices}, got {weights!r}")
        check_no_adapters(OP, model)
        for name, t in self._tensors().items():
            if t.is_meta:
                raise ValueError(f"{OP}: {name} is on the meta device and has no numbers yet")
        experts = _experts_of(self._model)
        if weights in STORAGES and not experts:
            raise ValueError(f"{OP}: {cls} has no experts that are known")
        forms = {name: _form_of(name, module, weights) for name, module in experts.items()}
        self._weights, self._forms = weights, forms
        self._config, self._conversions, obstacle = checkpoint_of(self._model, experts, forms)
        if obstacle is not None:
            no_way = obstacle is FOREIGN or any(map(storage_of, experts.values()))
            remedy = "" if no_way else ": weights='bf16' hands experts over in 16 bits"
            raise ValueError(f"{OP}: {obstacle}{remedy}")
        self.quantization_config = self._config and self._config.to_dict()
        self._experts = _weights_of(experts, forms)

    def metadata(self) -> list[TensorMeta]:
        """Name, dtype and whole shape of each tensor, in order of iteration; reads no number."""
        return [TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in self._pairs(_like)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._pairs(partial(_whole, _casts_of(self._model)))

    def _pairs(self, made_of: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, layer by layer: no conversion reaches into two of them."""
        for name, module in _experts_of(self._model).items():
            if _form_of(name, module, self._weights) != self._forms.get(name):
                raise ValueError(f"{OP}: {name} was converted since: make another one")
        layers: dict[str, dict[str, Any]] = {}
        for key, t in self._tensors().items():
            if not key.endswith(SCALE) or key.removesuffix(SCALE) not in self._experts:
                layer: Any = re.match(r".*?\.\d+\.|", key)
                layers.setdefault(layer[0], {})[key] = t
        for tensors in layers.values():
            state: dict[str, Tensor] = {}
            for key, t in tensors.items():
                experts, w, form = self._experts.get(key, (None, "", None))
                parts = made_of(t, experts, w, form)
                few = isinstance(parts, tuple)
                state |= in_file(key, str(form), parts, self._config) if few else {key: parts}
            yield from as_saved(self._model, self._conversions, state).items()

    def _tensors(self) -> dict[str, Any]:
        """The model's tensors by the plain model's names, tied ones once."""
        model: Any = self._model
        ignored, tied = model._keys_to_ignore_on_save or (), model.all_tied_weights_keys
        found = {
            plain_name(key): t
            for key, t in model.state_dict(keep_vars=True).items()
            if isinstance(t, Tensor) and key not in ignored
        }
        return {name: t for name, t in found.items() if found.get(tied.get(name)) is not t}


def check_no_adapters(op: str, model: nn.Module, state: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError for a model, or its state, of PEFT's names, which no checkpoint has."""
    is_peft = any(c.__name__ == "PeftModel" for m in model.modules() for c in type(m).__mro__)
    parts_of_peft = ".lora_", ".base_layer.", ".original_module."
    for name in state or unwrapped(model).state_dict(keep_vars=True):
        if is_peft or any(part in name for part in parts_of_peft):
            raise ValueError(f"{op}: {name} is of a model with adapters: merge or unload them")


def save_as_published(module: nn.Module) -> None:
    """Have the models of transformers in a module save experts in few bits as what they are.

    If the format cannot hold them, ``save_pretrained`` then raises ValueError before it writes a
    file. The configuration says that there are few bits while it is saved: others may share it.
    """
    inside: set[nn.Module] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and model not in inside:
            inside.update(model.modules())
            saves: Any = model.save_pretrained
            few = any(frozen_of(m) or _learns_in(m) for m in _experts_of(model).values())
            if getattr(saves, "func", None) is not _save and (few or _is_loaded_here(model)):
                vars(model)["save_pretrained"] = partial(_save, saves, model)


def _is_loaded_here(model: Any) -> bool:
    """Whether the quantizer is that of ``GroupedLinearConfig``."""
    return hasattr(getattr(model, "hf_quantizer", None), "asked")


def _save(saves: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """``save_pretrained`` of a model with experts in few bits, around the one that it had."""
    experts = _experts_of(model)
    options = signature(PreTrainedModel.save_pretrained).bind(model, *args, **kwargs).arguments
    resumes = not options.get("save_original_format", True)
    # A run that goes on needs what learns in high precision.
    in_high = resumes or options.get("distributed_checkpoint")
    forms = {n: storage_of(m) or (None if in_high else _learns_in(m)) for n, m in experts.items()}
    learns = any(form and storage_of(experts[name]) is None for name, form in forms.items())
    changed = learns or any(map(frozen_of, experts.values()))
    of_model: dict[str, Any] = {SAVES: True}
    if _is_loaded_here(model):
        of_model["hf_quantizer"] = None  # beside a quantizer transformers takes no state_dict=
    if not changed or getattr(model, "_hf_peft_config_loaded", False):  # adapters alone are saved
        with for_now(model, of_model):
            return saves(*args, **kwargs)  # type: ignore[no-any-return]
    op = "save_pretrained"
    given: Any = options.get("state_dict")
    check_no_adapters(op, model, given)
    config, conversions, obstacle = checkpoint_of(model, experts, forms)
    if obstacle is not None:
        high = "high precision by save_original_format=False, " if learns else ""
        raise ValueError(
            f"{op}: {obstacle}: save {high}the model before it is converted, or its state_dict()"
        )
    few = {key: of for key, of in _weights_of(experts, forms).items() if of[2] is not None}
    for key, t in (given or {}).items():
        if plain_name(key) in few and t.dtype.itemsize == 1 and key + SCALE not in given:
            raise ValueError(f"{op}: state_dict has {key} in {dtype_name(t.dtype)} without scales")
        numbers = plain_name(key).removesuffix(SCALE)  # tied ones are in a file once
        is_tied = numbers in model.all_tied_weights_keys
        if numbers in few and not is_tied and key.removesuffix(SCALE) not in given:
            raise ValueError(f"{op}: state_dict has {key} without the numbers that it scales")
    gather, quantizer = model.gather_sharded_state_dict_for_save, FineGrainedFP8HfQuantizer(config)
    vars(quantizer)["get_state_dict_and_metadata"] = lambda _: (given, {})

    def gathered(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state as files have it; by the model's names if a run is to go on."""
        found: Any = gather(*args, **kwargs)
        state: dict[str, Any] = {}
        for key, t in found.items():
            name = plain_name(key)
            own = key if resumes else name
            if name in few:
                (module, _, form), scale = few[name], found.get(key + SCALE)
                parts = (t, scale) if t.dtype.itemsize == 1 else _quantized(module, t, form)
                if name in model.all_tied_weights_keys and not resumes:
                    parts = parts[0], parts[1].clone()  # transformers ties numbers alone
                if resumes and isinstance(config, Mxfp4Config):  # whose names are for blocks
                    state |= {own: parts[0], own + SCALE: parts[1]}
                else:
                    state |= in_file(own, form, parts, None if resumes else config)
            elif name.removesuffix(SCALE) not in few:
                state[own] = t
        return state

    of_model |= {
        "hf_quantizer": quantizer,
        "_weight_conversions": conversions,
        "gather_sharded_state_dict_for_save": gathered,
    }
    with for_now(model, of_model), for_now(model.config, {"quantization_config": config}):
        return saves(*args, **kwargs)  # type: ignore[no-any-return]


# --- how experts are handed over -----------------------------------------------------------------


def _casts_of(model: nn.Module) -> dict[int, torch.dtype]:
    """The dtype to which FSDP2 casts parameters as it gathers them, by a parameter's id."""
    found: dict[int, torch.dtype] = {}
    for module in model.modules():
        group: Any = None
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group  # no public name (torch 2.13)
        dtype = None if group is None else group.mp_policy.param_dtype
        if dtype is not None:
            found |= dict.fromkeys((id(p.sharded_param) for p in group.fsdp_params), dtype)
    return found


def _experts_of(model: nn.Module) -> dict[str, Any]:
    """A model's experts that go through transformers' interface, by all names in checkpoints."""
    return {name: m for name, m in named_unwrapped(model, False) if goes_through_interface(m)}


def _weights_of(experts: dict[str, Any], forms: dict[str, Any]) -> dict[str, tuple[Any, str, Any]]:
    """The modules of weights, their names there and their forms, by their names in checkpoints."""
    named = ((name, module, w) for name, module in experts.items() for w in weight_names(module))
    return {f"{name}.{w}": (module, w, forms[name]) for name, module, w in named}


def _learns_in(experts: Any) -> str | None:
    """The few bits that training rounds a weight to which learns, "mxfp4", or None."""
    return (recipe_of(experts) or UNQUANTIZED).weight.qat


def _form_of(name: str, experts: Any, weights: str | None) -> str | None:
    """How experts are handed over: "fp8", "mxfp4", "bf16", or None for as they are."""
    recipe = recipe_of(experts)
    format, kept_as = (recipe or UNQUANTIZED).weight, storage_of(experts)
    few = kept_as or _learns_in(experts)
    if weights not in (None, few) and (kept_as or (few and weights in STORAGES)):
        raise ValueError(
            f"{OP}: training multiplies {name} in {str(few).upper()}, which is handed over as it "
            f"is: leave weights={weights!r} out"
        )
    if weights is not None or few is not None or format.in_blocks:
        return weights or few or "fp8"
    if format.reads_any_dtype or format.quantize is not None:
        raise ValueError(
            f"{OP}: no checkpoint has {name} as {recipe!r} multiplies it: choose weights='bf16', "
            "'fp8' or 'mxfp4'"
        )
    return None


def _like(t: Any, experts: Any, name: str, form: str | None) -> Any:
    """What :func:`_whole` gives, without memory."""
    if form in STORAGES:
        return empty_bytes(shape_of(experts, name), str(form))
    return torch.empty(t.shape, dtype=torch.bfloat16 if form else t.dtype, device="meta")


def _whole(casts: dict[int, torch.dtype], t: Any, experts: Any, name: str, form: str | None) -> Any:
    """All of a tensor as it is; or of a weight of experts its bytes and scales, or in bfloat16."""
    dtype, t = casts.get(id(t)), t.detach()
    local = local_part(t)
    if form in STORAGES:
        if dtype is not None and storage_of(experts) is None:
            t = distributed_like(t, getattr(local, "numbers", local).to(dtype), t.shape)
        return tuple(map(_gathered, _bytes_of(t, experts, name, str(form))))
    if isinstance(local, GroupedTensorWithMaster):
        t = distributed_like(t, local.numbers, t.shape)
    return _gathered(t).bfloat16() if form else _gathered(t)


def _bytes_of(t: Any, experts: Any, name: str, form: str) -> Parts:
    """The bytes of a weight's numbers and of their scales; sharded where the weight is."""
    local, parts = local_part(t), None
    if storage_of(experts) is not None:
        parts = kept_weight(OP, experts, name)
    elif isinstance(local, GroupedTensorWithMaster):
        if form == "fp8" and local.recipe.weight == recipe_of_blocks(experts).weight:
            parts = local.quantized_weight().each(partial(distributed_like, t))
        t = distributed_like(t, local.numbers, t.shape)
    if parts is not None:
        return as_bytes(parts[:2])  # type: ignore[arg-type]
    return _quantized(experts, t if not is_dtensor(t) or is_by_experts(t) else _gathered(t), form)


def _quantized(experts: Any, w: Any, form: str) -> Parts:
    """Bytes of a weight in high precision, as the module has it, and of its scales."""
    w = w.mT if experts.is_transposed else w
    frozen = Frozen(form, recipe_of_blocks(experts), w.dtype)
    if len(local := local_part(w)) == 0:  # experts do not divide among the processes
        one = as_bytes(quantized(local.new_zeros(1, *local.shape[1:]), frozen))
        return tuple(distributed_like(w, part[:0]) for part in one)  # type: ignore[return-value]
    return as_bytes(quantized(w, frozen))


def _gathered(t: Any) -> Any:
    """All of a tensor that may be sharded. gloo sends no float8, so bytes are sent."""
    if not is_dtensor(t):
        return t
    local = t.to_local()
    in_bytes = local.view(torch.uint8) if local.dtype.itemsize == 1 else local
    return distributed_like(t, in_bytes, t.shape).full_tensor().view(local.dtype)
