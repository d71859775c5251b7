"""Have all experts of a Hugging Face model computed by grouped_linear, in one call.

transformers is imported where a model of it is converted, and only there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts

from grouped_linear.integrations.activations import activation_of
from grouped_linear.integrations.convert_experts import ConvertedExperts
from grouped_linear.integrations.transformers import quantize_experts, register
from grouped_linear.nn.options import check_flags
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.recipes import Float8BlockScaling, Recipe


def implementation_of(recipe: Recipe | None, save_gate_up_in_fp8: bool = False) -> str:
    """The name of the experts implementation with these options; equal ones share one."""
    name = "grouped_linear" if recipe is None else f"grouped_linear {recipe!r}"
    return f"{name}, gate_up saved in FP8" if save_gate_up_in_fp8 else name


def check_hugging_face(
    experts: dict[str, nn.Module], recipe: Recipe | None, save_gate_up_in_fp8: bool
) -> None:
    """Raise ValueError for options that these experts cannot be computed with.

    Args:
        experts: by name, modules that go through transformers' experts interface.
        recipe: how the GEMMs are to be computed.
        save_gate_up_in_fp8: what is to be kept for the backward.
    """
    check_flags("convert", save_gate_up_in_fp8=save_gate_up_in_fp8)
    if save_gate_up_in_fp8:
        unfused = next((p for p, module in experts.items() if activation_of(module) is None), None)
        if unfused is not None:
            raise ValueError(
                f"convert: {unfused}: save_gate_up_in_fp8 needs an activation of grouped_mlp, and "
                f"that of {type(experts[unfused]).__name__} is none"
            )
    if recipe is not None and recipe.has_state:
        raise ValueError(
            f"convert: {type(recipe).__name__} has a state in each layer, and Hugging Face's "
            "experts have no place for it: choose a recipe without state"
        )
    in_fp8 = (name for name, module in experts.items() if isinstance(module, FP8Experts))
    name = next(in_fp8, None)
    if name is not None and not isinstance(recipe, Float8BlockScaling):
        raise ValueError(
            f"convert: {name}: weights are in FP8 already and need the recipe Float8BlockScaling, "
            f"got {recipe!r}; or load the checkpoint with FineGrainedFP8Config(dequantize=True)"
        )


def convert_hugging_face(
    model: nn.Module,
    experts: dict[str, Any],
    recipe: Recipe | None,
    in_fp8: bool,
    save_gate_up_in_fp8: bool,
) -> list[ConvertedExperts]:
    """Register an implementation for the recipe and choose it, and quantize if asked to.

    Args:
        model: holds the experts.
        experts: by name, those that were checked.
        recipe: how the GEMMs are computed.
        in_fp8: whether weights are kept in FP8.
        save_gate_up_in_fp8: what is kept for the backward.
    """
    name = implementation_of(recipe, save_gate_up_in_fp8)
    register(name, recipe, save_gate_up_in_fp8=save_gate_up_in_fp8)
    learned = {
        p: [w for w, value in module.named_parameters() if value.requires_grad]
        for p, module in experts.items()
    }
    num_parameters = {p: sum(w.numel() for w in m.parameters()) for p, m in experts.items()}
    with _as_before_if_it_fails(experts):
        _choose(model, experts, name)
        if in_fp8:
            assert isinstance(recipe, Float8BlockScaling)
            quantize_experts(model, recipe)
    converted = []
    for place, module in experts.items():
        path = "experts implementation"
        if isinstance(module, FP8Experts):
            path += ", weights in FP8 as loaded"
        elif in_fp8:
            path += ", weights in FP8"
            # Their gradient is that of the weight that they stand for. Transposed weights are read
            # by a GEMM that has none.
            for weight in learned[place]:
                p = module.get_parameter(weight)
                if isinstance(p, GroupedTensor) and not module.is_transposed:
                    p.requires_grad_()
            if module.is_transposed:
                path += " that do not learn"
        form, num_experts = type(module).__name__, module.num_experts
        converted.append(ConvertedExperts(place, form, num_experts, num_parameters[place], path))
    return converted


def _choose(model: nn.Module, experts: dict[str, Any], name: str) -> None:
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            module.set_experts_implementation(name)
    for module in experts.values():  # outside of models of transformers, or with a config apart
        if module.config._experts_implementation != name:
            module.config._experts_implementation = name


@contextmanager
def _as_before_if_it_fails(experts: dict[str, Any]) -> Iterator[None]:
    before = [(m.config, m.config._experts_implementation) for m in experts.values()]
    try:
        yield
    except Exception:
        for config, implementation in before:
            config._experts_implementation = implementation
        raise
