"""PEFT's adapters on experts, computed beside the experts' weights and not added to them.

PEFT's ``LoraConfig(target_parameters=[...])`` computes ``W + scaling * B @ A`` for all experts in
every forward: a copy of all weights. Its adapters are grouped here instead: each row goes through
the factors of its own expert. PEFT is imported where this module is, and nowhere else.

E experts, K in_features, N out_features, r an adapter's rank.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import check_adapters_to_merge, onload_layer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Linear

from grouped_linear.integrations.converted_class import class_before
from grouped_linear.integrations.experts_forward import has_parts, weight_names
from grouped_linear.integrations.fp8_checkpoint import name_without_adapters
from grouped_linear.integrations.implementation import Implementation
from grouped_linear.integrations.look_alikes import goes_through_interface
from grouped_linear.integrations.plan import Plan
from grouped_linear.meta_kernels.rules import ACTIVATIONS, BLOCK, E4M3, dtype_name
from grouped_linear.nn.lora import MAX_RANK, Lora, LoraWeights
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import is_dtensor

__all__ = ["use_grouped_adapters"]

OLDEST_PEFT = (0, 21)  # older ones lay the factors of stacked experts out in another way
if tuple(map(int, peft.__version__.split(".")[:2])) < OLDEST_PEFT:
    raise ImportError(
        f"grouped_linear.integrations.peft: peft must be 0.21 or newer, got {peft.__version__}"
    )


def use_grouped_adapters(model: nn.Module, *, dropout: float | None = None) -> tuple[str, ...]:
    """Have PEFT's adapters on a converted model's experts computed without weights of their own.

    For expert e and its rows t::

        y[t] = W[e] @ x[t] + scaling * B[e] @ (A[e] @ x[t])

    Call it once, after ``get_peft_model`` or ``PeftModel.from_pretrained``.
    :func:`grouped_linear.convert` does the same for adapters that the model has already. Adapters
    that are added later to the same parameters compute this way too. Everything else stays PEFT's:
    names, shapes and files of adapters, which plain PEFT loads; ranks and alphas by pattern;
    several active adapters; ``set_adapter``, ``disable_adapter``, ``merge_adapter`` and
    ``merge_and_unload``. Adapters on other modules are left alone.

    Merging adds all adapters in float32 and rounds once, also to FP8, experts and linear layers of
    a checkpoint in FP8. ``unmerge_adapter`` restores weights in FP8 bit for bit: until then their
    bytes are kept in the CPU's memory. It subtracts from others, as PEFT does, which rounds again.

    Args:
        model: a PeftModel, or what holds PEFT's layers, whose experts are converted.
        dropout: the probability with which a feature of an adapter's input is zeroed in training:
            ``lora_dropout``, which PEFT refuses beside ``target_parameters``. It is that of all
            adapters that are on experts, in all of their layers. None leaves what is.

    Returns:
        The names of the parameters that have such adapters.

    Raises:
        ValueError: if no adapter is on experts; for experts that are not converted, or sharded; for
            adapters on another parameter of experts than their weights, of another dtype than
            bfloat16, float16 and float32, or of a rank above 256; for a dropout out of range. The
            model is then unchanged.

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
    'base_model.model.model.layers.0.mlp.experts.down_proj'
    """
    op = "use_grouped_adapters"
    found = dict(_wrappers_of_experts(model))
    if not found:
        raise ValueError(
            f"{op}: {type(model).__name__} has no adapter on experts that go through transformers' "
            "interface: name them in target_parameters of LoraConfig"
        )
    for name, wrapper in found.items():
        check_implementation(f"{op}: {name}", wrapper.get_base_layer())
    plan = Plan()
    plan_adapters(plan, op, model)
    if dropout is not None:
        _plan_dropout(plan, model, dropout, {a for w in found.values() for a in w.lora_A})
    plan.carry_out()
    return tuple(found)


def plan_adapters(plan: Plan, op: str, model: nn.Module) -> set[nn.Module]:
    """Plan that adapters on experts are grouped, and return these experts.

    Args:
        plan: gets the writes.
        op: what errors begin with.
        model: whose experts are converted, or will be.
    """
    experts: set[nn.Module] = set()
    for name, wrapper in _wrappers_of_experts(model):
        _check(f"{op}: {name}", wrapper)
        plan.write(setattr, wrapper, "__class__", ParamWrapper)
        experts.add(wrapper.get_base_layer())
    module: Any
    for module in model.modules():
        if experts and type(module) is peft.LoraModel:
            plan.write(setattr, module, "__class__", LoraModel)
        if experts and _is_over_fp8(module):
            plan.write(setattr, module, "__class__", Linear)
    return experts


def _plan_dropout(plan: Plan, model: nn.Module, dropout: float, adapters: set[str]) -> None:
    """Plan the dropout of these adapters, in all layers that have them."""
    p = Lora(1, dropout=dropout).dropout  # which checks it
    for module in model.modules():
        if isinstance(module, lora.LoraLayer):
            for name in adapters & module.lora_dropout.keys():
                own = nn.Dropout(p).train(module.training)
                plan.write(module.lora_dropout.__setitem__, name, own)


def check_implementation(where: str, experts: Any) -> None:
    """Raise ValueError for experts that do not compute here, and so without grouped adapters."""
    implementation = experts.config._experts_implementation
    if Implementation.of(implementation) is None:
        raise ValueError(
            f"{where}: the experts implementation {implementation!r} is not one of "
            "grouped_linear's: call convert, before or after the adapters are made"
        )


def _wrappers_of_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers of parameters of experts, by the parameter's name in the plain model."""
    for name, module in model.named_modules():
        is_wrapper = isinstance(module, lora.ParamWrapper)
        if is_wrapper and goes_through_interface(module.get_base_layer()):
            yield f"{name_without_adapters(name)}.{module.parameter_name}", module


def _is_over_fp8(module: Any) -> bool:
    """Whether it is PEFT's layer over a linear layer of a checkpoint in FP8."""
    return type(module) is lora.Linear and type(module.get_base_layer()) is FP8Linear


def _check(where: str, wrapper: Any) -> None:
    """Raise ValueError for adapters that cannot be grouped."""
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    if type(wrapper) not in (lora.ParamWrapper, ParamWrapper) or "forward" in vars(wrapper):
        raise ValueError(
            f"{where}: {type(wrapper).__name__} has a forward of its own, which would hide the new "
            "one"
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
    for adapter in wrapper.lora_A:
        for factor in (wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight):
            if factor.dtype not in ACTIVATIONS:
                raise ValueError(
                    f"{where}: the adapter {adapter!r} must be bfloat16, float16 or float32, got "
                    f"{dtype_name(factor.dtype)}: leave autocast_adapter_dtype=True"
                )
        _check_rank(f"{where}: the adapter {adapter!r}", wrapper.r[adapter])


def _check_rank(where: str, rank: int) -> None:
    """Raise ValueError for a rank that no kernel takes."""
    if rank > MAX_RANK:
        raise ValueError(f"{where} must have a rank of at most {MAX_RANK}, got {rank}")


class LoraModel(peft.LoraModel):
    """PEFT's model of adapters, which is merged as a whole or not at all."""

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Merge adapters into the weights of all layers; see PEFT."""
        self._check_merge(adapter_names, safe_merge)
        super().merge_adapter(adapter_names, safe_merge)

    def unmerge_adapter(self) -> None:
        """Take merged adapters out of the weights of all layers; see PEFT."""
        layer: Any
        for layer in self.model.modules():
            if isinstance(layer, MergesOnce) and layer.merged:
                layer.weight_to_merge()
        super().unmerge_adapter()

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        """Merge adapters, and return the model without them; see PEFT."""
        self._check_merge(adapter_names, safe_merge)
        merged: nn.Module = super().merge_and_unload(progressbar, safe_merge, adapter_names)
        return merged

    @torch.no_grad()
    def _check_merge(self, adapter_names: list[str] | None, safe_merge: bool) -> None:
        """Raise before a layer is written what a later one would raise."""
        for name, layer in self.model.named_modules():
            if not isinstance(layer, lora.LoraLayer):
                continue
            with onload_layer(layer), warnings.catch_warnings(action="ignore"):
                if isinstance(layer, MergesOnce):
                    layer.check_merge(safe_merge, adapter_names)
                    continue
                try:  # PEFT's layers are no larger than a linear layer: on a copy
                    copy.deepcopy(layer).merge(safe_merge, adapter_names)
                except Exception as error:
                    raise ValueError(f"merge: {name} cannot be merged: {error}") from error

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

    @staticmethod
    def _create_new_module(*args: Any, **kwargs: Any) -> nn.Module:
        """A layer for an adapter that is added later."""
        module: nn.Module = peft.LoraModel._create_new_module(*args, **kwargs)
        if _is_over_fp8(module):
            module.__class__ = Linear
        return module

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


_Module: Any = nn.Module


class MergesOnce(_Module, lora.LoraLayer):  # PEFT's layers have these bases, too
    """Merging of a layer's adapters: their sum with one rounding, which FP8 takes back exactly."""

    # q and scale of a weight in FP8 before the merge, on the CPU.
    _before_merge: GroupedTensor | None = None

    def factors(self, adapter: str) -> LoraWeights:
        """The factors of an adapter, as views of its parameters."""
        raise NotImplementedError

    def weight_to_merge(self) -> Tensor:
        """The weight that adapters are merged into, detached: a write to it is one to the layer's.

        Raises:
            ValueError: if it cannot be written.
        """
        raise NotImplementedError

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None) -> None:
        """Raise what :meth:`merge` would raise."""
        w, names = self.weight_to_merge(), self._to_merge(adapter_names)
        for name in names:
            self.factors(name)
        if safe_merge and names:
            self._finite_sum(w, names)

    def merge(
        self,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        keep: bool = True,
    ) -> None:
        """Add adapters to the weight, all of them with one rounding, or none.

        Args:
            safe_merge: raise ValueError where the sum is not finite.
            adapter_names: by default the active ones.
            keep: whether a weight in FP8 is to be restored by :meth:`unmerge`.
        """
        names = self._to_merge(adapter_names)
        if not names:
            return
        w = self.weight_to_merge()
        merged = self._finite_sum(w, names) if safe_merge else self._sum(w, names, 1.0)
        if keep and not self.merged:
            self._before_merge = _bytes_of(w)
        w.copy_(merged)
        self.merged_adapters += names

    def unmerge(self) -> None:
        """Restore the weight in FP8, or subtract the merged adapters from it."""
        if not self.merged:
            super().unmerge()  # which warns
            return
        w, before = self.weight_to_merge(), self._before_merge
        names = [name for name in self.merged_adapters if name in self.lora_A]
        w.copy_(self._sum(w, names, -1.0) if before is None else before)
        self.merged_adapters.clear()
        self._before_merge = None

    def _to_merge(self, adapter_names: list[str] | None) -> list[str]:
        """Those of the adapters that this layer has, and that are not merged yet."""
        return [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]

    def _finite_sum(self, w: Tensor, adapters: list[str]) -> Tensor:
        """The weight and its adapters, in float32; raises ValueError for one that overflows."""
        total: Tensor = self._sum(w, adapters, 1.0)
        if not total.to(w.dtype).isfinite().all():
            name = getattr(self, "parameter_name", "a weight")
            raise ValueError(f"merge: {name} with {' and '.join(adapters)} would not be finite")
        return total

    @torch.no_grad()
    def _sum(self, w: Tensor, adapters: Iterable[str], sign: float) -> Tensor:
        """The weight and its adapters, in float32."""
        total: Tensor = (
            w.dequantize(torch.float32)
            if isinstance(w, GroupedTensor)
            else w.to(torch.float32, copy=True)
        )
        transposed = getattr(self.get_base_layer(), "is_transposed", False)
        for adapter in adapters:
            one = self.factors(adapter)
            a, b = one.a.to(w.device, torch.float32), one.b.to(w.device, torch.float32)
            left, right = (a.mT, b.mT) if transposed else (b, a)
            total.view(-1, *total.shape[-2:]).baddbmm_(left, right, alpha=sign * one.scaling)
        return total


class Linear(MergesOnce, lora.Linear):
    """PEFT's layer over a linear layer of a checkpoint in FP8, which PEFT cannot merge."""

    def factors(self, adapter: str) -> LoraWeights:
        """A as [1, r, K] and B as [1, N, r]."""
        if adapter in self.lora_variant or self.lora_bias[adapter]:
            raise ValueError(f"merge: {adapter!r} is more than A and B, and the weights are in FP8")
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return LoraWeights(a[None], b[None], self.scaling[adapter])

    def weight_to_merge(self) -> Tensor:
        """The numbers and scales [N, K] as one tensor."""
        base = self.get_base_layer()
        w, scale = base.weight.detach(), base.weight_scale_inv.detach()
        in_blocks = tuple(base.block_size or ()) == (BLOCK, BLOCK) and scale.dtype == torch.float32
        _check_not_sharded("a linear layer", w)
        if w.dtype != E4M3 or not in_blocks:
            raise ValueError(
                f"merge: a linear layer must be float8_e4m3fn with float32 scales of {BLOCK} x "
                f"{BLOCK}, got {dtype_name(w.dtype)} with {dtype_name(scale.dtype)} scales of "
                f"{base.block_size}: keep the adapter beside it"
            )
        return GroupedTensor.from_parts(w, scale, torch.float32, columnwise=False)


class ParamWrapper(MergesOnce, lora.ParamWrapper):
    """PEFT's wrapper of an experts' parameter, whose factors the experts compute with.

    It has the name of PEFT's class, by which PEFT knows it.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' forward, with the active adapters as an argument.

        Args:
            x: the tokens.
            args: what else experts take.
            kwargs: the same, and ``lora`` of the wrapper around this one.
        """
        self._check_forward_args(x, *args, **kwargs)
        for of_other_layers in ("adapter_names", *lora.VARIANT_KWARG_KEYS):
            kwargs.pop(of_other_layers, None)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
        elif not self.merged:
            own = self.active_weights()
            if own is not None:
                check_implementation(self.parameter_name, self.get_base_layer())
                kwargs["lora"] = {**kwargs.get("lora", {}), self.parameter_name: own}
        y: Tensor = self.base_layer(x, *args, **kwargs)
        return y

    def factors(self, adapter: str) -> LoraWeights:
        """The factors of an adapter, as views of its parameters.

        PEFT has A's rows by expert, then by rank, and B's columns by rank, then by expert.
        """
        a, b, E = self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.num_experts
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
        dropouts = {one.dropout for one in active}
        if len(dropouts) > 1:
            raise ValueError(
                f"{self.parameter_name}: adapters that are active together must have one dropout, "
                f"got {sorted(dropouts)}: call use_grouped_adapters(model, dropout=...)"
            )
        a = torch.cat([one.a for one in active], dim=1)
        b = torch.cat([one.b * one.scaling for one in active], dim=2)
        return LoraWeights(a, b, dropout=dropouts.pop())

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The experts without their wrappers, with the adapters if they are to be merged."""
        wrapper: Any = self
        while merge and isinstance(wrapper, ParamWrapper):
            wrapper.merge(safe_merge, adapter_names, keep=False)
            wrapper = wrapper.base_layer
        experts: nn.Module = self.get_base_layer()
        return experts

    def weight_to_merge(self) -> Tensor:
        """The experts' weight, numbers and scales of a checkpoint in FP8 as one tensor."""
        experts, name = self.get_base_layer(), self.parameter_name
        w: Tensor = getattr(experts, name).detach()
        _check_not_sharded(name, w)
        if has_parts(experts):
            scale = getattr(experts, name + SCALE).detach()
            return GroupedTensor.from_parts(w, scale, torch.float32, columnwise=False)
        return w


def _check_not_sharded(name: str, w: Tensor) -> None:
    """Raise ValueError for a weight that an adapter cannot be added to here."""
    if is_dtensor(w):
        raise ValueError(
            f"merge: {name} is sharded: save the adapter, and merge it in a model that is not"
        )


def _bytes_of(w: Tensor) -> GroupedTensor | None:
    """A copy of a weight in FP8 alone, on the CPU; None of another one."""
    if not isinstance(w, GroupedTensor) or w.master is not None:
        return None
    q, scale = (part.detach().to("cpu", copy=True) for part in (w.q, w.scale))
    return GroupedTensor.from_parts(q, scale, w.dtype, w.recipe, columnwise=False)
