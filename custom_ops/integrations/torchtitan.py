# SPDX-License-Identifier: Apache-2.0
"""torchtitan's experts: its seam for low precision, and a fused forward for two of its forms.

R rows, E experts, D features of a token, F features inside an expert, G = 2 F: torchtitan's
letters. N out_features and K in_features of a weight.
"""

import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.linear import GroupedLinearFunction
from grouped_linear.autograd.mlp import GroupedMLPFunction
from grouped_linear.autograd.projection import Projection
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.integrations.adapter import (
    Changes,
    Converted,
    Experts,
    Request,
    Write,
    check_replaceable,
    check_sizes,
    check_weight,
    class_before,
    convert_class,
    freeze,
    keep_both,
)
from grouped_linear.nn.checks import check_parameter, check_whole
from grouped_linear.nn.functional import apply_linear
from grouped_linear.nn.functional_mlp import apply_mlp_sorted
from grouped_linear.ops.activation import SwiGLU
from grouped_linear.quantized.frozen import STORAGES
from grouped_linear.quantized.keep import KEPT, is_dtensor, local_part
from grouped_linear.recipes import Recipe
from grouped_linear.recipes.delayed import new_state
from grouped_linear.recipes.recipe import UNQUANTIZED
from grouped_linear.te.deferred import DeferredWgrad

GPT_OSS_ALPHA = 1.702  # torchtitan has the number in its code, and swiglu_limit in the module

# torchtitan's type checking of distributed programs (debug.spmd_typechecking) has to be told what
# an autograd Function does. The layers' Functions are local: a result differs between processes
# where an input does. Functions of grouped_linear.parallel communicate, and are left out.
if find_spec("spmd_types") is not None:
    local: Any = import_module("spmd_types").register_local_autograd_function
    of_layers = GroupedLinearFunction, GroupedMLPFunction, DeferredWgrad
    for function in (*of_layers, GatherFunction, CombineFunction):
        local(function)


def projection_of(
    experts: Any, number: int, dtype: torch.dtype, bias: Tensor | None = None
) -> Projection:
    """The weight of a GEMM of converted experts as [E, N, K], with its recipe."""
    name, recipe = _form_of(experts).weights[number], experts.recipe
    states: Any = getattr(experts, "scaling_states", None)
    observed: Any = getattr(experts, "observed", None)
    of_call = (recipe if states is None else states[number].of_call()) or UNQUANTIZED
    if observed is not None:
        of_call = observed.recipe(name, of_call)
    frozen = experts.frozen_weight(name)
    if frozen is not None:
        kept = frozen.each(local_part)
        return Projection((kept.stand_in,), bias, of_call, kept)
    weight = local_part(getattr(experts, name))
    if states is not None and len(weight) != len(states[number].weight.scale):
        raise ValueError(
            f"{type(experts).__name__}: {type(recipe).__name__} holds scales of "
            f"{len(states[number].weight.scale)} experts, {len(weight)} are on this process: "
            "shard in another way or take another recipe"
        )
    if recipe is None or not recipe.weight.reads_any_dtype:
        weight = weight.to(dtype)
    check_parameter("grouped_linear", "weight", weight)
    return Projection((as_matrices(weight),), bias, of_call)


class SeamExperts(Converted):
    """Experts whose class multiplies by ``_grouped_mm``, torchtitan's seam for low precision.

    The seam gets a weight that is cast already. The number of the call tells which weight it is, so
    the parameter itself is read: quantized numbers, the state of delayed scaling, and shards.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as torchtitan does, and count the multiplications from 0."""
        self.calls = 0  # a forward may have been left half way, as checkpoints do
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        number, self.calls = self.calls, self.calls + 1
        m_splits_E = offs.diff(prepend=offs.new_zeros(1))
        return apply_linear(A, m_splits_E, projection_of(self, number, A.dtype))


class FusedExperts(Converted):
    """Experts whose activation is fused into the GEMMs: gate and up are one tensor, interleaved."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Compute [R, D] of rows [R, D] that are sorted by expert, and the rows of each."""
        form, activation, biases = _form_of(self), SwiGLU(interleaved=True), (None, None)
        if form.biases:
            limit: Any = self.swiglu_limit
            gate_up_bias, down_bias = (local_part(getattr(self, name)) for name in form.biases)
            activation = SwiGLU(GPT_OSS_ALPHA, 1.0, limit, interleaved=True)
            # Tensor parallelism sums the processes' outputs, so each process adds its share of the
            # bias. The gradient of the bias is not divided.
            w: Any = getattr(self, form.weights[0])
            if is_dtensor(w):
                inside = (i for i, p in enumerate(w.placements) if p.is_shard() and p.dim != 0)
                degree = math.prod(map(w.device_mesh.size, inside))
                down_bias = down_bias - down_bias.detach() * (1 - 1 / degree)
            biases = gate_up_bias, down_bias
        m_splits_E = num_tokens_per_expert_E.to(torch.int32)  # some routers count in float
        gate_up, down = (projection_of(self, i, x_RD.dtype, bias) for i, bias in enumerate(biases))
        config = MLPConfig(activation, False)
        return apply_mlp_sorted(x_RD, m_splits_E, None, gate_up, down, config).to(x_RD.dtype)


@dataclass(frozen=True)
class Form:
    """How a class of torchtitan's holds its experts."""

    name: str
    kind: type[Converted]
    weights: tuple[str, ...]  # in the order of their GEMMs
    biases: tuple[str, ...] = ()  # of these GEMMs


#: By the class of torchtitan 0.3 whose forward is run. Weights are gate, up, down; gate and up as
#: [E, F, 2, D], down; gate and up, interleaved, down.
FORMS = {
    "GroupedExperts": Form("grouped SwiGLU", SeamExperts, ("w1_EFD", "w3_EFD", "w2_EDF")),
    "FusedGroupedExperts": Form("grouped SwiGLU, w13", FusedExperts, ("w13", "w2_EDF")),
    "GptOssGroupedExperts": Form(
        "grouped SwiGLU of GPT-OSS",
        FusedExperts,
        ("mlp1_weight_EGD", "mlp2_weight_EDF"),
        ("mlp1_bias_EG", "mlp2_bias_ED"),
    ),
}


def _owner(cls: type, method: str) -> type:
    """The class that defines a method which a class has."""
    return next((base for base in cls.__mro__ if method in vars(base)), cls)


def _form_of(module: nn.Module) -> Any:
    """The form of torchtitan's experts; None of any other module."""
    cls = class_before(module)
    owner = _owner(cls, "forward")
    form = FORMS.get(owner.__name__) if owner.__module__.startswith("torchtitan") else None
    return form if form is not None and hasattr(cls, "_grouped_mm") else None


def experts_in(module: nn.Module) -> Experts | None:
    """The experts of torchtitan that a module holds, for whoever asks; None if it holds none."""
    form, here = _form_of(module), isinstance(module, Converted)
    if form is None:
        return None
    E = local_part(getattr(module, form.weights[0])).size(0)
    given = form.name, form.weights, E, "x_RD", here, getattr(module, "recipe", None)

    def compute_by(recipe: Recipe | None) -> None:
        convert_class(module, form.kind)
        vars(module)["recipe"] = recipe

    to_plan = None if here else partial(plan, module, form)
    return Experts(module, "torchtitan", *given, compute_by, to_plan)


def plan(module: Any, form: Form, name: str, request: Request) -> Write:
    """Check that experts can be converted; the function that does it."""
    where, recipe = f"convert: {name or type(module).__name__}", request.recipe
    weights = request.weights
    if request.save_gate_up_in_fp8:
        raise ValueError(f"{where}: save_gate_up_in_fp8 is an option of Hugging Face experts")
    parameters = [module.get_parameter(name) for name in (*form.weights, *form.biases)]
    check_whole(where, parameters, "convert")
    if any(isinstance(p, KEPT) for p in parameters):
        raise ValueError(f"{where}: weights are in FP8 already: convert before they are quantized")
    for w, p in zip(form.weights, parameters, strict=False):
        check_weight(where, w, p)
        check_sizes(where, w, as_matrices(p).shape, request)
    if getattr(module, "_parallelized", False):
        raise ValueError(f"{where}: torchtitan has parallelized it already: convert before")
    for own in {"forward", "_grouped_mm"} & vars(module).keys():
        raise ValueError(
            f"{where} has a {own} of its own, which would hide the new one: delete it, or "
            "convert a model without it"
        )
    seam = _owner(class_before(module), "_grouped_mm")
    if seam.__name__ != "GroupedExperts":
        raise ValueError(
            f"{where}: its GEMMs are those of {seam.__name__}: leave out torchtitan's converters "
            "that quantize experts"
        )
    on_meta = parameters[0].is_meta
    if recipe is not None and recipe.has_state and on_meta:
        raise ValueError(
            f"{where}: the first scales of {type(recipe).__name__} would be lost on the meta "
            "device: convert when parameters have values"
        )
    if weights is not None and parameters[0].dim() == 4:
        raise ValueError(
            f"{where}: {form.weights[0]} is {list(parameters[0].shape)}, and weights={weights!r} "
            "keeps [E, N, K]: leave gate and up apart"
        )
    if weights in STORAGES and on_meta and hasattr(module, "init_states"):
        raise ValueError(
            f"{where}: torchtitan draws the first values of a model that is on the meta device, "
            f"and weights={weights!r} holds those of a checkpoint: convert when it is loaded, or "
            "with weights='both'"
        )
    if weights is not None:
        check_replaceable(where, module, form.weights)

    given = recipe, len(parameters[0]), parameters[0].device
    states: Any = [new_state(*given) for _ in form.weights]
    parameters.clear()  # a parameter that somebody holds is warned of

    def write(changes: Changes) -> None:
        convert_class(module, form.kind)
        vars(module)["recipe"] = recipe
        if states[0] is not None:
            module.scaling_states = nn.ModuleList(states)
        for w in form.weights if weights is not None else ():
            if weights == "both":
                keep_both(changes, module, w, recipe)
            else:
                freeze(changes, module, w, request)

    return write


def as_matrices(w: Tensor) -> Tensor:
    """A weight as [E, N, K]: w13 is [E, F, 2, D]."""
    return w.flatten(1, 2) if w.dim() == 4 else w
