# SPDX-License-Identifier: Apache-2.0
"""compare: each layer of a model beside itself without a recipe, on the same inputs.

T rows, E groups (experts), K in_features, N out_features.
"""

import copy
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import Recipe
from grouped_linear.contrib.fake_quantize import fake_quantize
from grouped_linear.contrib.layers import ROLES, layers_of
from grouped_linear.integrations.convert import aligned
from grouped_linear.integrations.experts import Experts, named_experts
from grouped_linear.parallel import TokenDispatcher
from grouped_linear.quantized.frozen import KeepsFrozen
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.quantized.with_master import GroupedTensorWithMaster
from grouped_linear.recipes import DelayedScalingState


class Difference(NamedTuple):
    """A tensor of a layer under a recipe, or with one role quantized, beside no recipe at all."""

    layer: str
    """Its name in the model without wrappers, as PEFT's and torch.compile's."""
    quantized: str
    """``"all"``, or the role that alone is quantized."""
    tensor: str
    """``"output"``; ``"x"`` or a parameter's name for the gradient by it."""
    difference: float
    """The root mean square of the difference, divided by that of the tensor without a recipe."""
    worst_block: float
    """The same of the 128 neighbouring numbers of a row that differ most, by medians.

    A large number hides what happens beside it in ``difference``: it is most of that, and exact.
    Divided is by the block's median magnitude, or by that of all blocks where this is larger.
    """


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`: ``print`` it, or read :attr:`differences`."""

    differences: tuple[Difference, ...]

    def worst(self, tensor: str | None = None, n: int = 10) -> list[Difference]:
        """The outputs and gradients, or those of one kind, whose worst block differs most."""
        found = [d for d in self.differences if d.quantized == "all"]
        found = [d for d in found if tensor in (None, d.tensor)]
        return sorted(found, key=lambda d: (d.worst_block == d.worst_block, -d.worst_block))[:n]

    def __str__(self) -> str:
        """A line for each layer and tensor, and of each role both numbers, as ``all | block``."""
        columns = list(dict.fromkeys(d.quantized for d in self.differences))
        by_tensor: dict[tuple[str, str], dict[str, str]] = {}
        for d in self.differences:
            both = f"{d.difference:.2%} | {d.worst_block:.0%}"
            by_tensor.setdefault((d.layer, d.tensor), {})[d.quantized] = both
        lines = [["layer", "tensor", *columns]]
        for (layer, tensor), found in by_tensor.items():
            lines.append([layer, tensor, *(found.get(c, "") for c in columns)])
        return "\n".join(aligned(lines))


def compare(
    model: nn.Module, step: Callable[[], Any], *, roles: bool = False, compiled: bool = False
) -> Comparison:
    """Compute each layer under its recipe and without a recipe, on the inputs of a step.

    Every call's inputs and the gradient of its output are those of the step, so that a layer shows
    its error and not that of the layers before it. Both computations draw the same random
    numbers, as dropout does. Gradients, weights and states of the model are those after the step
    alone, and so are the random numbers that it draws.

    Args:
        model: with :class:`GroupedLinear`, :class:`GroupedMLP` or experts that :func:`convert` has
            converted, that have a recipe. If the model is compiled, call this function inside of
            ``torch.compiler.set_stance("force_eager")``: Python must call the layers.
        step: runs a forward and a backward of the model, once. Layers before all that learns have
            their outputs compared alone.
        roles: quantize each role alone as well, x, the weight or the gradient: its numbers are
            rounded by the recipe, and the GEMMs multiply the results in x's dtype.
        compiled: compare compiled copies of the layers, with ``fullgraph=True``.

    Raises:
        ValueError: for a model without such layers, with experts of a checkpoint in FP8, sharded
            ones or ones with a forward of their own, or if no backward reached one of them.
        TypeError: if `model` is not a module, or `step` no function.

    >>> from grouped_linear import Float8BlockScaling, GroupedLinear
    >>> layer = GroupedLinear(2, 128, 64, bias=False, recipe=Float8BlockScaling())
    >>> x = torch.randn(64, 128, requires_grad=True)
    >>> found = compare(layer, lambda: layer(x, [40, 24]).square().sum().backward())
    >>> [(d.tensor, 0.01 < d.difference < 0.06) for d in found.differences]
    [('output', True), ('x', True), ('weight', True)]
    """
    if not callable(step):
        raise TypeError(
            "compare: step must be a function that runs a forward and a backward, as "
            f"lambda: model(x).sum().backward(), got {type(step).__name__}"
        )
    layers = layers_of("compare", model)
    recipes_of: dict[str, dict[str, Recipe]] = {}
    for name, experts in layers.items():
        module, recipe = experts.module, experts.recipe
        if recipe is None:
            continue
        where = f"compare: {name or type(model).__name__}"
        if roles and recipe.has_state:
            raise ValueError(f"{where}: roles=True needs a recipe without state, got {recipe!r}")
        if any(hasattr(p, "to_local") for p in module.parameters()):
            raise ValueError(
                f"{where}: its parameters are on several processes: compare it before they are "
                "sharded"
            )
        if "forward" in vars(module):  # which calls the layer itself, and not a copy
            raise ValueError(
                f"{where} has a forward of its own: compare before it is set, or after `del "
                "layer.forward`; accelerate has remove_hook_from_module(model, recurse=True)"
            )
        as_loaded = torch.float8_e4m3fn, torch.int8
        if any(p.dtype in as_loaded for p in module.parameters()):
            raise ValueError(
                f"{where}: convert weights of a checkpoint in FP8 by weights='fp8', in MXFP4 by "
                "weights='mxfp4'"
            )
        recipes_of[name] = {"all": recipe}
        if roles:
            recipes_of[name] |= {role: fake_quantize(recipe, (role,)) for role in ROLES}
    if not recipes_of:
        raise ValueError(
            f"compare: {next(iter(layers)) or type(model).__name__} has no recipe, nor has another "
            "layer: make layers with a recipe, or convert(model, recipe) a model of another library"
        )
    # The squares of the difference and of the tensor, which add up, and the worst block.
    found: dict[tuple[str, str, str], tuple[Tensor, Tensor]] = {}

    def measure(name: str, args: Any, kwargs: Any, dy: Tensor | None) -> None:
        layer = layers[name]
        plain = _results(layer, None, args, kwargs, dy, compiled)
        for quantized, recipe in recipes_of[name].items():
            results = _results(layer, recipe, args, kwargs, dy, compiled)
            for tensor, t in plain.items():
                off = results[tensor].double() - t.double()
                squares = torch.stack([off.square().sum(), t.double().square().sum()])
                block, key = _worst_block(off, t.double()), (name, quantized, tensor)
                if key in found:
                    squares, block = found[key][0] + squares, found[key][1].maximum(block)
                found[key] = squares, block

    def hook(name: str, module: nn.Module, args: Any, kwargs: Any, y: Any) -> None:
        output = y[0] if isinstance(y, tuple) else y
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        before = [t.is_inference() or t._version for t in given]
        kind = output.device.type  # a backward may run outside of autocast
        casts = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

        def of_backward(dy: Tensor) -> None:
            if [t.is_inference() or t._version for t in given] != before:
                where = name or type(model).__name__
                raise ValueError(f"compare: an input of {where} was written since: write a clone()")
            with torch.autocast(kind, *casts):
                measure(name, args, kwargs, dy)

        if output.requires_grad:
            handles.append(output.register_hook(of_backward))
        else:  # frozen, as all before it
            measure(name, args, kwargs, None)

    handles: list[Any] = [  # of what the layer itself gives
        layers[n].module.register_forward_hook(partial(hook, n), prepend=True, with_kwargs=True)
        for n in recipes_of
    ]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for name in recipes_of if (name, "all", "output") not in found]
    if missed:
        raise ValueError(
            f"compare: no backward of step reached {missed[0] or type(model).__name__}: step must "
            "call it, and backward() of a loss that it has part in; where torch.compile has "
            "compiled it, compare inside of torch.compiler.set_stance('force_eager')"
        )
    order = list(layers)
    differences = []
    for key in sorted(found, key=lambda key: order.index(key[0])):
        (off, whole), block = found[key][0].tolist(), found[key][1].item()
        share = math.sqrt(off / whole) if whole else math.inf if off else 0.0
        differences.append(Difference(key[0] or "the model", *key[1:], share, block))
    return Comparison(tuple(differences))


def _worst_block(off: Tensor, t: Tensor) -> Tensor:
    """The largest median of 128 neighbours of off beside that of t; a tensor's last block is wider.

    Medians, because a large number in a block, which is exact, says nothing of those beside it.
    """
    if t.numel() == 0:
        return t.new_zeros(())
    parts = max(t.size(-1) // 128, 1)
    medians = []
    for x in (off, t):  # not by median, which torch's deterministic algorithms refuse on CUDA
        by_size = [part.abs().sort(-1).values for part in x.tensor_split(parts, -1)]
        both = [(s[..., (s.size(-1) - 1) // 2], s[..., -1].isnan()) for s in by_size]
        medians.append(torch.stack([m.masked_fill(n, math.nan).flatten() for m, n in both]))
    of_off, of_t = medians
    typical = of_t.masked_fill(of_t == 0, math.nan).nanmedian().nan_to_num()
    size = of_t.maximum(typical)
    return torch.where(of_off == 0, 0.0, of_off / size).max()


def _results(
    layer: Experts, recipe: Recipe | None, args: Any, kwargs: Any, dy: Tensor | None, compiled: bool
) -> dict[str, Tensor]:
    """The output of a copy with another recipe, and its gradients by x and the parameters.

    Random numbers are those that come next in the step, which draws them again.
    """
    if layer.library == "grouped_linear":  # the copy has no cache, and each call is compared alone
        given = inspect.signature(layer.module.forward).bind(*args, **kwargs)
        given.arguments.pop("is_first_microbatch", None)
        args, kwargs = given.args, given.kwargs
    if dy is not None:
        args = tuple(map(_leaf, args))
        kwargs = {name: _leaf(t) for name, t in kwargs.items()}
    x: Tensor = args[0] if args else kwargs[layer.input]
    other = _with_recipe(layer, recipe, x.dtype)
    leaves = {"x": x, **{n: p for n, p in other.named_parameters() if p.requires_grad}}
    # Each recipe is a compilation of the same forward.
    many = torch._dynamo.config.patch(recompile_limit=1024) if compiled else nullcontext()
    stance = torch.compiler.set_stance("default") if compiled else nullcontext()
    gpus = [x.get_device()] if x.is_cuda else []
    with torch.set_grad_enabled(dy is not None), torch.random.fork_rng(gpus), many, stance:
        y = (torch.compile(other, fullgraph=True) if compiled else other)(*args, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        if dy is None:
            return {"output": y}
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    results = {"output": y.detach()}
    results |= {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
    return results


def _with_recipe(experts: Experts, recipe: Recipe | None, dtype: torch.dtype) -> Any:
    """A layer with the same parameters in high precision, which keeps and changes nothing else.

    Its weights are in x's dtype where the recipe reads no other.
    """
    layer = experts.module
    other = copy.copy(layer)
    changed: dict[str, Any] = {"observed": None, "_modules": {}, "delay_wgrad_compute": False}
    for name, module in layer._modules.items():
        is_state = isinstance(module, DelayedScalingState) or name == "scaling_states"
        if is_state and recipe is not None and recipe.has_state:
            changed["_modules"][name] = copy.deepcopy(module)
        elif name == "observed" or is_state or isinstance(module, WeightCache | TokenDispatcher):
            changed[name] = None
        else:  # an activation of converted experts
            changed["_modules"][name] = module
    parameters: dict[str, Any] = {}
    for name, p in layer._parameters.items():
        w = p.detach().dequantize() if isinstance(p, GroupedTensorWithMaster) else p
        parameters[name] = None if p is None else nn.Parameter(w.detach(), p.requires_grad)
    for name in experts.weights:
        if isinstance(layer, KeepsFrozen) and layer.frozen_weight(name) is not None:
            del parameters[f"{name}_scale_inv"]
            parameters[name] = nn.Parameter(layer.dequantize(name), requires_grad=False)
    if recipe is None or not recipe.weight.reads_any_dtype:
        for name, p in parameters.items():
            if re.sub(r"\d+$", "", name) in experts.weights or name in experts.weights:
                parameters[name] = nn.Parameter(p.detach().to(dtype), p.requires_grad)
    changed |= {"_parameters": parameters, "_frozen": {}}
    hooks = [n for n in vars(layer) if n.startswith("_") and n.endswith("_hooks")]
    changed |= {name: OrderedDict() for name in hooks}
    vars(other).update(changed)
    dict(named_experts(other))[""].compute_by(recipe)
    return other


def _leaf(t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    return t.detach().clone().requires_grad_(t.is_floating_point())
