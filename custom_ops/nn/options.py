"""GroupedLinear's constructor arguments, checked, and the checks that both layers share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    FEATURE_MULTIPLE,
    MAX_GROUPS,
    dtype_name,
)
from grouped_linear.quantized.weight import check_quantized_weight
from grouped_linear.recipes import DelayedScalingState, Recipe
from grouped_linear.recipes.format import check_flags as check_flags

#: Arguments of TransformerEngine's layer that its callers handle here, and the values that ask for
#: nothing.
OUT_OF_SCOPE: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False,),
    "tp_group": (None,),
    "tp_size": (1,),
    "parallel_mode": (None,),
    "ub_overlap_rs": (False,),
    "ub_overlap_ag": (False,),
    "ub_name": (None,),
}


class RngStateTracker(Protocol):
    """What ``get_rng_state_tracker`` returns, Megatron's convention."""

    def fork(self, name: str = ...) -> AbstractContextManager[Any]:
        """A context in which the named random state is the current one."""
        ...


@dataclass(frozen=True)
class GroupedLinearOptions:
    """See :class:`grouped_linear.GroupedLinear`.

    Raises:
        ValueError: for a configuration that no call could run.
    """

    num_gemms: int
    in_features: int
    out_features: int
    bias: bool
    return_bias: bool
    init_method: Callable[[Tensor], Any] | None
    get_rng_state_tracker: Callable[[], RngStateTracker] | None
    rng_tracker_name: str | None
    recipe: Recipe | None
    cache_weights: bool
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    save_original_input: bool
    single_grouped_weight: bool
    single_grouped_bias: bool
    quantized_weight: bool
    stochastic_rounding: bool | None
    preserve_high_precision_init: bool

    def __post_init__(self) -> None:
        check_num_groups("GroupedLinear", "num_gemms", self.num_gemms)
        check_features("GroupedLinear", "in_features", self.in_features)
        check_features("GroupedLinear", "out_features", self.out_features)
        check_flags(
            "GroupedLinear",
            bias=self.bias,
            return_bias=self.return_bias,
            cache_weights=self.cache_weights,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            delay_wgrad_compute=self.delay_wgrad_compute,
            save_original_input=self.save_original_input,
            single_grouped_weight=self.single_grouped_weight,
            single_grouped_bias=self.single_grouped_bias,
            quantized_weight=self.quantized_weight,
            preserve_high_precision_init=self.preserve_high_precision_init,
        )
        check_stochastic_rounding("GroupedLinear", self.stochastic_rounding)
        check_recipe("GroupedLinear", self.recipe)
        check_function(
            "GroupedLinear", "init_method", self.init_method, "called with each expert's weight"
        )
        check_function(
            "GroupedLinear",
            "get_rng_state_tracker",
            self.get_rng_state_tracker,
            "that returns an object with fork()",
        )
        check_quantized_weight(
            "GroupedLinear",
            self.recipe,
            self.quantized_weight,
            self.cache_weights,
            stochastic_rounding=self.stochastic_rounding,
            preserve_high_precision_init=self.preserve_high_precision_init,
        )
        if self.quantized_weight and not self.single_grouped_weight:
            raise ValueError("GroupedLinear: quantized_weight needs single_grouped_weight=True")
        if self.save_original_input and self.recipe is not None and self.recipe.has_state:
            raise ValueError(
                "GroupedLinear: save_original_input quantizes the input once more in the backward, "
                f"by when the scales of {type(self.recipe).__name__} may have changed"
            )

    @property
    def weight_names(self) -> list[str]:
        """The weight's parameters."""
        return ["weight"] if self.single_grouped_weight else self.per_expert_names("weight")

    @property
    def bias_names(self) -> list[str]:
        """The bias's parameters, if the layer has a bias."""
        return ["bias"] if self.single_grouped_bias else self.per_expert_names("bias")

    def per_expert_names(self, name: str) -> list[str]:
        """The names of E parameters, one an expert."""
        return [f"{name}{e}" for e in range(self.num_gemms)]


def check_num_groups(layer: str, name: str, number: int) -> None:
    """Raise ValueError for a number of experts that ops do not take."""
    _check_integer(layer, name, number)
    if not 1 <= number <= MAX_GROUPS:
        raise ValueError(f"{layer}: {name} must be between 1 and {MAX_GROUPS}, got {number}")


def check_features(layer: str, name: str, size: int) -> None:
    """Raise ValueError for a number of features that ops do not take."""
    _check_integer(layer, name, size)
    if size <= 0 or size % FEATURE_MULTIPLE:
        raise ValueError(
            f"{layer}: {name} must be a positive multiple of {FEATURE_MULTIPLE}, got {size}"
        )


def _check_integer(layer: str, name: str, number: Any) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise ValueError(f"{layer}: {name} must be an integer, got {number!r}")


def check_stochastic_rounding(layer: str, flag: Any) -> None:
    """Raise ValueError for what is neither None, True nor False."""
    if flag is not None and not isinstance(flag, bool):
        raise ValueError(f"{layer}: stochastic_rounding must be None, True or False, got {flag!r}")


def check_function(layer: str, name: str, function: Any, which: str) -> None:
    """Raise ValueError for what is neither None nor can be called."""
    if function is not None and not callable(function):
        raise ValueError(f"{layer}: {name} must be None or a function {which}, got {function!r}")


def check_parameters_dtype(layer: str, name: str, dtype: Any) -> None:
    """Raise ValueError for a dtype of parameters that no call could multiply."""
    given = torch.get_default_dtype() if dtype is None else dtype
    if given not in ACTIVATIONS:
        got = dtype_name(given) if isinstance(given, torch.dtype) else repr(given)
        default = ", torch's default dtype" if dtype is None else ""
        raise ValueError(
            f"{layer}: {name} must be bfloat16, float16 or float32, got {got}{default}"
        )


def check_recipe(layer: str, recipe: Recipe | None) -> None:
    """Raise ValueError for what is no recipe, as the class in place of an instance."""
    if recipe is None or isinstance(recipe, Recipe):
        return
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        name = recipe.__name__
        raise ValueError(f"{layer}: recipe is the class {name}: call it, recipe={name}()")
    raise ValueError(f"{layer}: recipe must be None or a grouped_linear.Recipe, got {recipe!r}")


def check_state(op: str, *states: Any) -> None:
    """Raise ValueError for what is neither None nor a layer's state, as a recipe."""
    for state in states:
        if state is not None and not isinstance(state, DelayedScalingState):
            raise ValueError(
                f"{op}: state must be a grouped_linear.DelayedScalingState, got {state!r}"
            )


def check_out_of_scope(arguments: dict[str, Any]) -> None:
    """Accept TransformerEngine's other arguments where they ask for nothing."""
    for name, value in arguments.items():
        if name not in OUT_OF_SCOPE:
            raise TypeError(f"GroupedLinear: unexpected keyword argument {name!r}")
        if not any(value is nothing or value == nothing for nothing in OUT_OF_SCOPE[name]):
            raise ValueError(
                "GroupedLinear: tensor parallelism and overlapped communication are out of scope, "
                f"got {name}={value!r}"
            )
