"""PEFT's adapters on experts, computed beside the experts' weights and not added to them.

PEFT's ``LoraConfig(target_parameters=[...])`` computes ``W + scaling * B @ A`` for all experts in
every forward: a copy of all weights. Its adapters are grouped here instead: each row goes through
the factors of its own expert. PEFT is imported where this module is, and nowhere else.

E experts, K in_features, N out_features, r an adapter's rank.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import peft
import torch
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from grouped_linear.integrations.converted_class import class_before
from grouped_linear.integrations.experts_forward import has_parts, weight_names
from grouped_linear.integrations.fp8_checkpoint import name_without_adapters
from grouped_linear.integrations.implementation import Implementation
from grouped_linear.integrations.look_alikes import goes_through_interface
from grouped_linear.integrations.plan import Plan
from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name
from grouped_linear.nn.lora import MAX_RANK, LoraWeights
from grouped_linear.quantized.state_dict import SCALE
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import is_dtensor

__all__ = ["use_grouped_adapters"]

OLDEST_PEFT = (0, 21)  # older ones lay the factors of stacked experts out in another way
if tuple(map(int, peft.__version__.split(".")[:2])) < OLDEST_PEFT:
    raise ImportError(
        f"grouped_linear.integrations.peft: peft must be 0.21 or newer, got {peft.__version__}"
    )


def use_grouped_adapters(model: nn.Module) -> tuple[str, ...]:
    """Have PEFT's adapters on a converted model's experts computed without weights of their own.

    For expert e and its rows t::

        y[t] = W[e] @ x[t] + scaling * B[e] @ (A[e] @ x[t])

    Call it once, after ``get_peft_model`` or ``PeftModel.from_pretrained``.
    :func:`grouped_linear.convert` does the same for adapters that the model has already. Adapters
    that are added later to the same parameters compute this way too. Everything else stays PEFT's:
    names, shapes and files of adapters, which plain PEFT loads; ranks and alphas by pattern;
    several active adapters; ``set_adapter``, ``disable_adapter``, ``merge_adapter`` and
    ``merge_and_unload``. Adapters on other modules are left alone.

    Merging adds all adapters in float32 and rounds once, also to FP8. ``unmerge_adapter`` restores
    weights in FP8 bit for bit: until then their bytes are kept in the CPU's memory. It subtracts
    from others, as PEFT does, which rounds again.

    Args:
        model: a PeftModel, or what holds PEFT's layers, whose experts are converted.

    Returns:
        The names of the parameters that have such adapters.

    Raises:
        ValueError: if no adapter is on experts; for experts that are not converted, or sharded; for
            adapters on another parameter of experts than their weights, of another dtype than
            bfloat16, float16 and float32, or of a rank above 256. The model is then unchanged.

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
    for module in model.modules():
        if experts and type(module) is peft.LoraModel:
            plan.write(setattr, module, "__class__", LoraModel)
    return experts


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
        if wrapper.r[adapter] > MAX_RANK:
            raise ValueError(
                f"{where}: the adapter {adapter!r} must have a rank of at most {MAX_RANK}, got "
                f"{wrapper.r[adapter]}"
            )


class LoraModel(peft.LoraModel):
    """PEFT's model of adapters, which is merged as a whole or not at all."""

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Merge adapters into the weights of all layers; see PEFT."""
        self._check_merge(adapter_names, safe_merge)
        super().merge_adapter(adapter_names, safe_merge)

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

    def _check_merge(self, adapter_names: list[str] | None, safe_merge: bool) -> None:
        """Raise before a layer is written what a later one would raise."""
        for name, layer in self.model.named_modules():
            if isinstance(layer, ParamWrapper):
                layer.check_not_sharded()
            if not safe_merge or not isinstance(layer, lora.LoraLayer):
                continue
            for adapter in layer.active_adapters if adapter_names is None else adapter_names:
                factors = [f[adapter].weight for f in (layer.lora_A, layer.lora_B) if adapter in f]
                if not all(factor.isfinite().all() for factor in factors):
                    raise ValueError(f"merge: {name} has numbers in {adapter} that are not finite")


class ParamWrapper(lora.ParamWrapper):
    """PEFT's wrapper of an experts' parameter, whose factors the experts compute with.

    It has the name of PEFT's class, by which PEFT knows it.
    """

    # q and scale of a weight in FP8 before the merge, on the CPU.
    _before_merge: GroupedTensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' forward, with the active adapters as an argument.

        Args:
            x: the tokens.
            args: what else experts take.
            kwargs: the same, and ``lora`` of the wrapper around this one.
        """
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
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
        return LoraWeights(a_ERK, b_ENR, self.scaling[adapter])

    def active_weights(self) -> LoraWeights | None:
        """The active adapters as one, None if there is none."""
        active = [self.factors(name) for name in self.active_adapters if name in self.lora_A]
        if len(active) < 2:
            return active[0] if active else None
        a = torch.cat([one.a for one in active], dim=1)
        b = torch.cat([one.b * one.scaling for one in active], dim=2)
        return LoraWeights(a, b)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight, all of them with one rounding, or none.

        Args:
            safe_merge: raise ValueError where the sum is not finite.
            adapter_names: by default the active ones.
        """
        self._merge(safe_merge, adapter_names, keep=True)

    def _merge(self, safe_merge: bool, adapter_names: list[str] | None, keep: bool) -> None:
        asked = check_adapters_to_merge(self, adapter_names)
        names = [name for name in asked if name in self.lora_A]
        if not names:
            return
        w = self._weight()
        merged = self._sum(w, names, 1.0)
        if safe_merge and not merged.to(w.dtype).isfinite().all():
            raise ValueError(
                f"merge: {self.parameter_name} with {' and '.join(names)} would not be finite"
            )
        if keep and not self.merged:
            self._before_merge = _bytes_of(w)
        _write(w, merged)
        self.merged_adapters += names

    def unmerge(self) -> None:
        """Restore the weight in FP8, or subtract the merged adapters from it."""
        if not self.merged:
            super().unmerge()  # which warns
            return
        w, before = self._weight(), self._before_merge
        names = [name for name in self.merged_adapters if name in self.lora_A]
        _write(w, self._sum(w, names, -1.0) if before is None else before)
        self.merged_adapters.clear()
        self._before_merge = None

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The experts without their wrappers, with the adapters if they are to be merged."""
        wrapper: Any = self
        while merge and isinstance(wrapper, ParamWrapper):
            wrapper._merge(safe_merge, adapter_names, keep=False)
            wrapper = wrapper.base_layer
        experts: nn.Module = self.get_base_layer()
        return experts

    def check_not_sharded(self) -> None:
        """Raise ValueError for a weight that an adapter cannot be added to here."""
        if is_dtensor(self.get_param()):
            raise ValueError(
                f"merge: {self.parameter_name} is sharded: save the adapter, and merge it in a "
                "model that is not"
            )

    def _weight(self) -> Tensor:
        """The weight that adapters are merged into: what writes it writes the experts'."""
        self.check_not_sharded()
        experts, name = self.get_base_layer(), self.parameter_name
        w: Tensor = getattr(experts, name).detach()
        if has_parts(experts):
            scale = getattr(experts, name + SCALE).detach()
            return GroupedTensor.from_parts(w, scale, torch.float32, columnwise=False)
        return w

    @torch.no_grad()
    def _sum(self, w: Tensor, adapters: Iterable[str], sign: float) -> Tensor:
        """The weight and its adapters, in float32."""
        total: Tensor = (
            w.dequantize(torch.float32)
            if isinstance(w, GroupedTensor)
            else w.to(torch.float32, copy=True)
        )
        transposed = self.get_base_layer().is_transposed
        for adapter in adapters:
            one = self.factors(adapter)
            a, b = one.a.to(w.device, torch.float32), one.b.to(w.device, torch.float32)
            left, right = (a.mT, b.mT) if transposed else (b, a)
            total.baddbmm_(left, right, alpha=sign * one.scaling)
        return total


@torch.no_grad()
def _write(w: Tensor, numbers: Tensor) -> None:
    w.copy_(numbers)


def _bytes_of(w: Tensor) -> GroupedTensor | None:
    """A copy of a weight in FP8 alone, on the CPU; None of another one."""
    if not isinstance(w, GroupedTensor) or w.master is not None:
        return None
    q, scale = (part.detach().to("cpu", copy=True) for part in (w.q, w.scale))
    return GroupedTensor.from_parts(q, scale, w.dtype, w.recipe, columnwise=False)
