"""compare: each layer of a model beside itself without a recipe, on the same inputs.

T rows, E groups (experts), K in_features, N out_features.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.debugging.statistics import aligned
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.recipes import (
    DelayedScalingState,
    Format,
    Layouts,
    Operands,
    Recipe,
    quantize,
    quantize_weight,
)

ROLES = ("input", "weight", "grad_output")


class Difference(NamedTuple):
    """A tensor of a layer under a recipe, or with one role quantized, beside no recipe at all."""

    layer: str
    quantized: str
    """``"all"``, or the role that alone is quantized."""
    tensor: str
    """``"output"``, or the name of what the gradient is by."""
    difference: float
    """The root mean square of what differs, divided by that of the tensor without a recipe."""


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` has found: ``print`` it, or read :attr:`differences`."""

    differences: tuple[Difference, ...]

    def worst(self, tensor: str = "output", n: int = 10) -> list[Difference]:
        """The layers whose output, or a gradient, differs most under their recipe."""
        found = [d for d in self.differences if d[1:3] == ("all", tensor)]
        return sorted(found, key=lambda d: -d.difference)[:n]

    def __str__(self) -> str:
        """A line for each layer and tensor, a column for what is quantized."""
        columns = list(dict.fromkeys(d.quantized for d in self.differences))
        by_tensor: dict[tuple[str, str], dict[str, float]] = {}
        for d in self.differences:
            by_tensor.setdefault((d.layer, d.tensor), {})[d.quantized] = d.difference
        lines = [["layer", "tensor", *columns]]
        for (layer, tensor), found in by_tensor.items():
            lines.append([layer, tensor, *(f"{found.get(c, math.nan):.2%}" for c in columns)])
        return "\n".join(aligned(lines))


def compare(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    roles: bool = False,
    compiled: bool = False,
) -> Comparison:
    """Compute each layer under its recipe and without one, on what a step of the model gives it.

    Every call's inputs and the gradient of its output are those of the step, so that a layer shows
    its own error and not that of the layers before it. No gradient, weight or state of the model
    changes besides what the step itself changes.

    Args:
        model: with :class:`GroupedLinear` or :class:`GroupedMLP` layers that have a recipe. Their
            modules must be called by Python: give the model that torch.compile has not compiled.
        step: runs a forward and a backward of the model, once.
        roles: quantize each role alone as well, x, the weight or the gradient: its numbers are
            rounded by the recipe, and the GEMMs multiply the results in x's dtype.
        compiled: compile what the layers are compared by, with ``fullgraph=True``.

    Raises:
        ValueError: for a model without such layers, or if no backward reached one of them.

    >>> from grouped_linear import Float8BlockScaling
    >>> layer = GroupedLinear(2, 128, 64, bias=False, recipe=Float8BlockScaling())
    >>> x = torch.randn(64, 128, requires_grad=True)
    >>> found = compare(layer, lambda: layer(x, [40, 24]).square().sum().backward())
    >>> [(d.tensor, 0.01 < d.difference < 0.06) for d in found.differences]
    [('output', True), ('x', True), ('weight', True)]
    """
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GroupedLinear | GroupedMLP) and module.recipe is not None
    }
    if not layers:
        raise ValueError(
            f"compare: {type(model).__name__} has no GroupedLinear and no GroupedMLP with a recipe"
        )
    if roles:
        for name, layer in layers.items():
            if layer.recipe.has_state:
                raise ValueError(
                    f"compare: {name or type(model).__name__}: roles=True needs a recipe without "
                    f"state, got {layer.recipe!r}"
                )
    squares: dict[tuple[str, str, str], Tensor] = {}  # of the difference, and of the tensor

    def measure(name: str, layer: Any, args: Any, kwargs: Any, dy: Tensor) -> None:
        plain = _results(layer, None, args, kwargs, dy, compiled)
        recipes = {"all": layer.recipe}
        if roles:
            recipes |= {role: _one_role(layer.recipe, role) for role in ROLES}
        for what, recipe in recipes.items():
            results = _results(layer, recipe, args, kwargs, dy, compiled)
            for tensor, without in plain.items():
                off = results[tensor].double() - without.double()
                both = torch.stack([off.square().sum(), without.double().square().sum()])
                key = name, what, tensor
                squares[key] = squares[key] + both if key in squares else both

    def hook(name: str, layer: Any, args: Any, kwargs: Any, y: Any) -> None:
        output = y[0] if isinstance(y, tuple) else y
        if output.requires_grad:
            output.register_hook(lambda dy: measure(name, layer, args, kwargs, dy))

    handles = [
        layer.register_forward_hook(
            lambda module, args, kwargs, y, name=name: hook(name, module, args, kwargs, y),
            with_kwargs=True,
        )
        for name, layer in layers.items()
    ]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for name in layers if (name, "all", "output") not in squares]
    if missed:
        raise ValueError(f"compare: no backward of step reached the layer {missed[0]!r}")
    order = list(layers)
    differences = []
    for key in sorted(squares, key=lambda key: order.index(key[0])):
        off, whole = squares[key].tolist()
        share = math.sqrt(off / whole) if whole else math.nan
        differences.append(Difference(key[0] or "the model", *key[1:], share))
    return Comparison(tuple(differences))


def _results(
    layer: Any, recipe: Recipe | None, args: Any, kwargs: Any, dy: Tensor, compiled: bool
) -> dict[str, Tensor]:
    """The output, and the gradients by x and the parameters, of a copy with another recipe."""
    other = _with_recipe(layer, recipe)
    args = tuple(map(_leaf, args))
    kwargs = {name: _leaf(t) for name, t in kwargs.items()}
    leaves = {"x": args[0] if args else kwargs["x"], **dict(other.named_parameters())}
    # Each recipe is a compilation of the same forward.
    many = torch._dynamo.config.patch(recompile_limit=1024) if compiled else nullcontext()
    with torch.enable_grad(), many:
        y = (torch.compile(other, fullgraph=True) if compiled else other)(*args, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    results = {"output": y.detach()}
    results |= {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
    return results


def _with_recipe(layer: Any, recipe: Recipe | None) -> Any:
    """A layer with the same parameters in high precision, which keeps and changes nothing else."""
    other = copy.copy(layer)
    keeps_state = recipe is not None and recipe.has_state
    changed: dict[str, Any] = {"_recipe": recipe, "weights": None, "watched": None}
    changed |= {"fuse_wgrad_accumulation": False, "_modules": {}}
    for name, module in layer._modules.items():
        keeps = isinstance(module, DelayedScalingState) and keeps_state
        if keeps:
            changed["_modules"][name] = copy.deepcopy(module)
        else:
            changed[name] = None
    changed["_parameters"] = {n: _in_high_precision(p) for n, p in layer._parameters.items()}
    hooks = [n for n in vars(layer) if n.startswith("_") and n.endswith("_hooks")]
    changed |= {name: OrderedDict() for name in hooks}
    vars(other).update(changed)
    return other


def _in_high_precision(p: nn.Parameter | None) -> nn.Parameter | None:
    if p is None:
        return None
    w: Tensor = p.detach()
    if isinstance(w, GroupedTensor):
        w = w.numbers(w.dtype)
    return nn.Parameter(w, p.requires_grad)


def _leaf(t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    return t.detach().clone().requires_grad_(t.is_floating_point())


def _one_role(recipe: Recipe, role: str) -> Recipe:
    """The recipe with the other two roles as they are, and this one rounded: fake quantization."""
    formats: dict[str, Any] = {role: Format(quantize=Rounded(getattr(recipe, role)))}
    return Recipe(**formats)


@dataclass(frozen=True)
class Rounded:
    """A format as a function that rounds: its numbers, dequantized to the tensor's dtype."""

    format: Format

    def __call__(self, t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands | Tensor:
        """What ``Format(quantize=)`` calls."""
        format = self.format
        if format.quantize is not None:
            return format.quantize(t, offs_E, layouts)
        if format.scaling is None:
            return t if format.dtype is None else t.to(format.dtype).to(t.dtype)
        if offs_E is None:
            w: Any = quantize_weight((t,), format, Layouts(True, True))
            if w.rowwise_scale is None:  # MXFP8: rounded already, each way
                return Operands(w.rowwise.to(t.dtype), None, w.columnwise.to(t.dtype))
            return _times_scales(w.rowwise, w.rowwise_scale).to(t.dtype)
        in_16_bits = format.wgrad_dtype is not None
        made = quantize(t, replace(format, wgrad_dtype=None), offs_E, layouts)
        columnwise = t if in_16_bits else self._columnwise(made, offs_E, t)
        return Operands(self._rowwise(made, offs_E, t), None, columnwise)

    def _rowwise(self, made: Any, offs_E: Tensor, t: Tensor) -> Tensor | None:
        if made.rowwise is None or made.rowwise_scale is None:
            return None if made.rowwise is None else made.rowwise.to(t.dtype)
        if self.format.scaling == "block":
            return ops.group_dequantize(made.rowwise, made.rowwise_scale, offs_E, t.dtype)
        return _of_groups(made.rowwise, made.rowwise_scale, offs_E).to(t.dtype)

    def _columnwise(self, made: Any, offs_E: Tensor, t: Tensor) -> Tensor | None:
        if made.columnwise is None or made.columnwise_scale is None:
            return None if made.columnwise is None else made.columnwise.to(t.dtype)
        if self.format.scaling == "group":  # the same bytes as rowwise
            whole = quantize(t, self.format, offs_E, Layouts(True, False))
            return self._rowwise(whole, offs_E, t)
        T, scale = t.size(0), made.columnwise_scale
        return ops.group_dequantize_t(made.columnwise, scale, offs_E, T, t.dtype)


def _times_scales(q_ENK: Tensor, scale: Tensor) -> Tensor:
    """Of blocks of 128 x 128, or of experts."""
    if scale.dim() == 1:
        return q_ENK.float() * scale[:, None, None]
    scale = scale.repeat_interleave(128, 1)[:, : q_ENK.size(1)]
    return q_ENK.float() * scale.repeat_interleave(128, 2)[..., : q_ENK.size(2)]


def _of_groups(q_TK: Tensor, scale_E: Tensor, offs_E: Tensor) -> Tensor:
    row_T = torch.arange(q_TK.size(0), dtype=torch.int32, device=q_TK.device)
    group_T = torch.searchsorted(offs_E, row_T, right=True).clamp(max=len(offs_E) - 1)
    return q_TK.float() * scale_E[group_T, None]
