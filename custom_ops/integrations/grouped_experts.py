# SPDX-License-Identifier: Apache-2.0
"""Experts that one module holds in tensors [E, ...], as torchtitan's do: find and convert them.

R rows, E experts, H features of a token, F features inside an expert. torchtitan's names end in its
letters: D is H, and G is 2 F.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import silu

from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.projection import Projection
from grouped_linear.integrations.converted_class import convert_class
from grouped_linear.integrations.request import (
    Changes,
    Request,
    check_replaceable,
    check_weights,
    freeze_parameter,
    replace_parameter,
    where_in,
)
from grouped_linear.nn.check_swiglu import Expert, check_swiglu
from grouped_linear.nn.checks import check_mx_blocks, check_parameters, check_whole
from grouped_linear.nn.functional import apply_linear
from grouped_linear.nn.functional_mlp import apply_mlp_sorted
from grouped_linear.ops.activation import PLAIN, SwiGLU
from grouped_linear.quantized.frozen import STORAGES
from grouped_linear.quantized.weight import KEPT, is_dtensor, keep_weight, local_part
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.delayed import new_state
from grouped_linear.recipes.recipe import UNQUANTIZED

GPT_OSS_ALPHA = 1.702  # torchtitan has the number in its code, and swiglu_limit in the module


@dataclass(frozen=True)
class GroupedForm:
    """How a module holds its experts and how it is called."""

    name: str
    weights: tuple[str, ...]  # gate, up and down, or gate_up and down
    inputs: tuple[str, str]  # its forward's arguments: the sorted rows, the rows of each expert
    biases: tuple[str, ...] = ()  # of gate_up and of down
    gpt_oss: bool = False  # whether the activation is GPT-OSS's, with the limit swiglu_limit

    @property
    def gate_up_is_one(self) -> bool:
        """Whether one tensor holds gate and up, interleaved."""
        return len(self.weights) == 2

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters."""
        return *self.weights, *self.biases

    def shapes(self, E: int, F: int, H: int) -> list[tuple[int, ...]]:
        """Of the parameters of E experts."""
        gate_up: list[tuple[int, ...]] = [(E, F, H), (E, F, H)]
        if self.gate_up_is_one:
            gate_up = [(E, 2 * F, H)] if self.biases else [(E, F, 2, H)]
        return [*gate_up, (E, H, F), *([(E, 2 * F), (E, H)] if self.biases else [])]

    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the parameters' shapes are those of experts."""
        down = shapes[len(self.weights) - 1]
        return len(down) == 3 and list(shapes) == self.shapes(down[0], down[2], down[1])

    def experts(self, tensors: Sequence[Tensor]) -> list[Expert]:
        """Views of each expert's parameters."""
        parts = [as_matrices(t.detach()) for t in tensors]
        if self.gate_up_is_one:
            gate_up, down, *biases = parts
            parts = [gate_up[:, 0::2], gate_up[:, 1::2], down]
            parts += [biases[0][:, 0::2], biases[0][:, 1::2], biases[1]] if biases else []
        return [Expert(*one) for one in zip(*parts, strict=True)]

    def tensors(self, experts: Sequence[Expert]) -> dict[str, Tensor]:
        """The parameters that hold these experts, by name."""
        gate = experts[0].gate
        tensors = [gate.new_empty(shape) for shape in self.shapes(len(experts), *gate.shape)]
        for views, expert in zip(self.experts(tensors), experts, strict=True):
            for view, p in zip(views, expert, strict=True):
                if view is not None and p is not None:
                    view.copy_(p)
        return dict(zip(self.parameters, tensors, strict=True))

    def activation(self, module: Any) -> SwiGLU:
        """The form of SwiGLU that the module is to compute."""
        if self.gpt_oss:
            return SwiGLU(GPT_OSS_ALPHA, 1.0, module.swiglu_limit, interleaved=True)
        return SwiGLU(interleaved=True) if self.gate_up_is_one else PLAIN


SORTED_ROWS = ("x_RD", "num_tokens_per_expert_E")
# torchtitan's names before and after https://github.com/pytorch/torchtitan/pull/3425, those of its
# override that fuses gate and up, and those of its GPT-OSS.
FORMS = (
    GroupedForm("grouped SwiGLU", ("w1", "w3", "w2"), ("x", "num_tokens_per_expert")),
    GroupedForm("grouped SwiGLU", ("w1_EFD", "w3_EFD", "w2_EDF"), SORTED_ROWS),
    GroupedForm("grouped SwiGLU, w13", ("w13", "w2_EDF"), SORTED_ROWS),
    GroupedForm(
        "grouped SwiGLU of GPT-OSS",
        ("mlp1_weight_EGD", "mlp2_weight_EDF"),
        SORTED_ROWS,
        ("mlp1_bias_EG", "mlp2_bias_ED"),
        gpt_oss=True,
    ),
)


FORM_OF = {frozenset(form.parameters): form for form in FORMS}


def form_of(module: nn.Module) -> GroupedForm | None:
    """The form of a module that holds experts; None if it is not known."""
    parameters = dict(module.named_parameters())
    form = FORM_OF.get(frozenset(parameters))
    if form is None:
        return None
    # The class's forward: torchtitan's parallelize replaces the module's.
    _, *called_with = inspect.signature(type(module).forward).parameters
    shapes = [tuple(parameters[name].shape) for name in form.parameters]
    has_limit = not form.gpt_oss or hasattr(module, "swiglu_limit")
    return form if form.fits(shapes) and tuple(called_with) == form.inputs and has_limit else None


def check(name: str, module: nn.Module, request: Request) -> None:
    """Raise ValueError for experts that cannot be converted, or compute something else."""
    where, form = where_in(name, module), form_of(module)
    assert form is not None
    recipe, weights = request.recipe, request.weights
    if request.save_gate_up_in_fp8:
        raise ValueError(f"{where}: save_gate_up_in_fp8 is an option of Hugging Face experts")
    parameters = [module.get_parameter(name) for name in form.parameters]
    check_whole(where, parameters, "convert")
    check_weights(where, ((name, as_matrices(module.get_parameter(name))) for name in form.weights))
    if getattr(module, "_parallelized", False):
        raise ValueError(f"{where}: torchtitan has parallelized it already: convert before")
    if recipe is not None and recipe.has_state and parameters[0].is_meta:
        raise ValueError(
            f"{where}: the first scales of {type(recipe).__name__} would be lost on the meta "
            "device: convert when parameters have values"
        )
    if weights is not None and parameters[0].dim() == 4:
        raise ValueError(
            f"{where}: {form.weights[0]} is {list(parameters[0].shape)}, and weights={weights!r} "
            "keeps [E, N, K]: leave gate and up apart"
        )
    if weights in STORAGES and parameters[0].is_meta and hasattr(module, "init_states"):
        raise ValueError(
            f"{where}: torchtitan draws the first values of a model that is on the meta device, "
            f"and weights={weights!r} holds those of a checkpoint: convert when it is loaded, or "
            "with weights='both'"
        )
    if weights is not None:
        check_replaceable(where, module, form.weights)
        for name in form.weights:
            K = module.get_parameter(name).size(-1)
            check_mx_blocks(where, weights, **{f"in_features of {name}": K})
    if any(isinstance(p, KEPT) for p in parameters):
        raise ValueError(f"{where}: weights are in FP8 already: convert before they are quantized")

    def run(x_ERH: Tensor, stand_ins: Sequence[Expert] | None) -> Tensor:
        E, R, _ = x_ERH.shape
        counts_E = torch.full((E,), R, dtype=torch.int32, device=x_ERH.device)
        others = {} if stand_ins is None else form.tensors(stand_ins)
        y: Tensor = functional_call(module, others, (x_ERH.flatten(0, 1), counts_E))
        return y.view(x_ERH.shape)

    experts, activation = form.experts(parameters), form.activation(module)
    check_swiglu(where, module, run, experts, activation, in_bfloat16=True)
    if "forward" in vars(module):
        raise ValueError(f"{where} has a forward of its own, which would hide the new one")


def as_matrices(w: Tensor) -> Tensor:
    """A weight as [E, N, K]: w13 is [E, F, 2, H]."""
    return w.flatten(1, 2) if w.dim() == 4 else w


def convert(module: Any, request: Request, changes: Changes) -> None:
    """Give the module a forward of grouped layers. It raises only if memory runs out."""
    recipe, weights, form = request.recipe, request.weights, form_of(module)
    assert form is not None
    if recipe is not None and recipe.has_state:
        w = module.get_parameter(form.weights[0])
        states = (new_state(recipe, len(w), w.device) for _ in form.weights)
        module.scaling_states = nn.ModuleList(state for state in states if state is not None)
    convert_class(module, grouped_members, form, recipe)
    for name in form.weights if weights is not None else ():
        w = module.get_parameter(name)
        if weights in STORAGES:
            freeze_parameter(changes, module, name, w, request, w.dtype)
        else:
            replace_parameter(changes, module, name, keep_weight(w, weights, recipe))


def _tensor_parallel_degree(w: Any) -> int:
    """Over how many processes the features inside experts are sharded."""
    if not is_dtensor(w):
        return 1
    placements = enumerate(w.placements)
    return math.prod(w.device_mesh.size(i) for i, p in placements if p.is_shard() and p.dim != 0)


def grouped_members(form: GroupedForm, recipe: Recipe | None) -> dict[str, Any]:
    """The members of a converted module's class: its forward.

    It has the names of arguments that the module's callers may use.
    """

    def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        m_splits_E = num_tokens_per_expert.to(torch.int32)  # some routers count in float
        states: Any = getattr(self, "scaling_states", None) or (None,) * len(form.weights)
        observed = getattr(self, "observed", None)

        def projection(i: int, bias: Tensor | None = None) -> Projection:
            of_call = recipe if states[i] is None else states[i].of_call()
            of_call = of_call or UNQUANTIZED
            if observed is not None:
                of_call = observed.recipe(form.weights[i], of_call)
            frozen = self.frozen_weight(form.weights[i])
            if frozen is not None:
                kept = frozen.each(local_part)
                return Projection((kept.stand_in,), bias, of_call, kept)
            weight, state = local_part(getattr(self, form.weights[i])), states[i]
            held = None if state is None else len(state.weight.scale)
            if held is not None and len(weight) != held:
                raise ValueError(
                    f"{type(self).__name__}: {type(recipe).__name__} holds scales of "
                    f"{held} experts, {len(weight)} are on this process: "
                    "shard in another way or take another recipe"
                )
            if recipe is None or not recipe.weight.reads_any_dtype:
                weight = weight.to(x.dtype)
            check_parameters("grouped_linear", weight=weight)
            return Projection((as_matrices(weight),), bias, of_call)

        def layer(x: Tensor, i: int) -> Tensor:
            return apply_linear(x, m_splits_E, projection(i))

        if not form.gate_up_is_one:
            return layer(silu(layer(x, 0)) * layer(x, 1), 2).to(x.dtype)
        gate_up_bias, down_bias = (
            (local_part(getattr(self, name)) for name in form.biases)
            if form.biases
            else (None, None)
        )
        # Tensor parallelism sums the processes' outputs, so each process adds its share of the
        # bias. The gradient of the bias is not divided.
        degree = _tensor_parallel_degree(getattr(self, form.weights[0]))
        if down_bias is not None and degree > 1:
            down_bias = down_bias - down_bias.detach() * (1 - 1 / degree)
        projections = projection(0, gate_up_bias), projection(1, down_bias)
        config = MLPConfig(form.activation(self), False)
        return apply_mlp_sorted(x, m_splits_E, None, *projections, config).to(x.dtype)

    def forward_RD(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return forward(self, x_RD, num_tokens_per_expert_E)

    return {"forward": forward_RD if form.inputs == SORTED_ROWS else forward}
