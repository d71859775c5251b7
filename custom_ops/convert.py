"""Plain torch models on grouped_linear: experts are recognised, checked and replaced.

R rows, E experts, H features of a token, F features inside an expert.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from grouped_linear.delayed import DelayedScalingState
from grouped_linear.functional import grouped_linear
from grouped_linear.mlp import GroupedMLP
from grouped_linear.module import GroupedLinear
from grouped_linear.recipes import DelayedScaling, Recipe

Forward = Callable[..., Any]

# What ``down(silu(gate(x)) * up(x))`` is made of, by its names: gate, up, down.
GROUPED_SWIGLU = ("w1", "w3", "w2")
SWIGLU = (
    ("w1.weight", "w3.weight", "w2.weight"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)


class ConvertedExperts(NamedTuple):
    """What :func:`convert_experts` converted in one place."""

    name: str
    """Of the module in the model, as ``named_modules`` has it."""
    form: str
    """What its experts were: ``"Linear"``, ``"SwiGLU"`` or ``"grouped SwiGLU"``."""
    num_experts: int


def convert_experts(
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Forward] | None = None,
    recipe: Recipe = None,
    **options: bool,
) -> list[ConvertedExperts]:
    """Replace the experts of a model, in place, by grouped ones, and list them.

    Two forms are recognised:

    **Experts in one tensor**, as torchtitan has them: a module whose only parameters are w1 and w3
    [E, F, H] and w2 [E, H, F], called as ``(x, num_tokens_per_expert)``. Its forward becomes three
    grouped layers; its parameters, their names and its callers stay what they are.

    **A ModuleList of experts** in a block whose class is named in ``forwards``: torch.nn.Linear
    become one :class:`grouped_linear.GroupedLinear`, and experts that compute ``w2(silu(w1(x)) *
    w3(x))``, also named gate_proj, up_proj and down_proj, one :class:`grouped_linear.GroupedMLP`.
    It takes the list's place and name in the block. How a block loops over its experts cannot be
    recognised, so ``forwards`` gives the forward that replaces it, a function of the block and what
    it is called with. These parameters are new: make the optimizer afterwards. Any other ModuleList
    is left alone.

    A form is only a guess at what is computed. So SwiGLU experts are run on a few random rows, in
    training mode, and must give what SwiGLU gives: another activation, a clamp or dropout is an
    error. So is whatever else a list's experts hold that would be lost: hooks (as of weight_norm or
    pruning), parametrizations, buffers, a forward or a subclass of Linear of their own, parameters
    with a second owner. Attributes of parameters do not come along. Load a checkpoint before, and
    convert before sharding. The parameters of lists are held twice until all is converted; if
    anything raises, nothing was changed.

    Args:
        model: a model, or a module that itself is to be converted.
        forwards: of each class of block with a ModuleList of experts its new forward.
        recipe: how the products are computed.
        options: of the modules that take the place of lists, ``quantized_weight`` or
            ``fuse_wgrad_accumulation`` for two.

    Returns:
        What was converted, in the order of ``named_modules``; never nothing.

    Raises:
        ValueError: where nothing is recognised, a class of ``forwards`` is not in the model or
            holds no such ModuleList, or its experts differ in form, compute something else or hold
            what would be lost; and for options where experts in one tensor stay what they are.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.router = nn.Linear(16, 4)
    ...         self.experts = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))
    ...
    ...     def forward(self, x):
    ...         best = self.router(x).argmax(dim=-1)
    ...         return torch.stack([self.experts[e](row) for e, row in zip(best, x)])
    >>> def grouped_forward(self, x):
    ...     best, order = self.router(x).argmax(dim=-1).sort()
    ...     m_splits = (best[:, None] == torch.arange(4)).sum(dim=0)
    ...     return self.experts(x[order], m_splits)[order.argsort()]
    >>> block, x = Block(), torch.randn(10, 16)
    >>> y = block(x)
    >>> convert_experts(block, {Block: grouped_forward})
    [ConvertedExperts(name='', form='Linear', num_experts=4)]
    >>> torch.allclose(block(x), y, atol=1e-5)
    True
    """
    forwards = dict(forwards or {})
    found: dict[str, nn.Module] = {}
    replaced: dict[str, tuple[str, nn.Module]] = {}  # a block's list, and what takes its place
    converted = []
    gpus = {p.device.index for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(gpus):  # parameters and rows are drawn in here, and leave no trace
        for name, module in model.named_modules():
            where = f"convert_experts: {name or type(module).__name__}"
            if type(module) in forwards:
                list_name, experts = _list_of_experts(where, module)
                lost = next(_lost(experts, model), None)
                if lost is not None:
                    raise ValueError(f"{where}.{list_name}: {lost}, which would be lost")
                form, grouped = _grouped(f"{where}.{list_name}", experts, recipe, options)
                replaced[name] = list_name, grouped
                num_experts = len(experts)
            elif _has_grouped_swiglu(module):
                if options:
                    raise ValueError(
                        f"{where}: experts in one tensor stay what they are, so there is nothing "
                        f"to give {' and '.join(options)} to"
                    )
                weights = [module.get_parameter(n) for n in GROUPED_SWIGLU]
                form, num_experts = "grouped SwiGLU", len(weights[0])
                _check_swiglu(where, module, _run_sorted(module), *weights)
            else:
                continue
            if "forward" in vars(module):
                raise ValueError(f"{where} has a forward of its own, which would hide the new one")
            found[name] = module
            converted.append(ConvertedExperts(name, form, num_experts))
    absent = set(forwards).difference(map(type, found.values()))
    if absent:
        names = " or ".join(sorted(block.__name__ for block in absent))
        raise ValueError(f"convert_experts: {type(model).__name__} has no module of class {names}")
    if not found:
        raise ValueError(
            f"convert_experts: {type(model).__name__} has no module with parameters w1, w2 and w3 "
            "[E, ...] that is called as (x, num_tokens_per_expert), and no class is in forwards"
        )

    classes: dict[type[nn.Module], type[nn.Module]] = {}  # one for all layers of a class
    for name, module in found.items():
        before = type(module)
        if before not in classes:
            forward = forwards.get(before) or _grouped_swiglu_forward(recipe)
            body = {"forward": forward, "__module__": before.__module__}
            classes[before] = type(f"Grouped{before.__name__}", (before,), body)
        if name in replaced:
            setattr(module, *replaced[name])
        elif isinstance(recipe, DelayedScaling):
            w1 = module.get_parameter("w1")
            states = (DelayedScalingState(recipe, len(w1), w1.device) for _ in GROUPED_SWIGLU)
            module.scaling_states = nn.ModuleList(states)
        module.__class__ = classes[before]
    return converted


def _has_grouped_swiglu(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    if set(parameters) != set(GROUPED_SWIGLU) or any(p.dim() != 3 for p in parameters.values()):
        return False
    E, F, H = parameters["w1"].shape
    shapes = [tuple(parameters[name].shape) for name in GROUPED_SWIGLU]
    called_with = list(inspect.signature(module.forward).parameters)
    right_shapes = shapes == [(E, F, H), (E, F, H), (E, H, F)]
    return right_shapes and called_with == ["x", "num_tokens_per_expert"]


def _grouped_swiglu_forward(recipe: Recipe) -> Forward:
    def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        m_splits_E = num_tokens_per_expert.to(torch.int32)  # some count in float
        states = getattr(self, "scaling_states", (None, None, None))

        def layer(x: Tensor, i: int) -> Tensor:
            weight = getattr(self, GROUPED_SWIGLU[i])
            weight = weight.to(x.dtype) if recipe is None else weight  # a quantizer reads any dtype
            return grouped_linear(x, weight, m_splits_E, None, recipe, states[i])

        return layer(silu(layer(x, 0)) * layer(x, 1), 2).to(x.dtype)

    return forward


def _list_of_experts(where: str, block: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and value of the one ModuleList of experts that a block holds."""
    lists = {
        name: child
        for name, child in block.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(map(_is_expert, child))
    }
    if len(lists) != 1:
        held = [
            f"{name} of {', '.join(sorted({type(expert).__name__ for expert in child}))}"
            for name, child in block.named_children()
            if isinstance(child, nn.ModuleList)
        ]
        raise ValueError(
            f"{where} must hold one ModuleList of torch.nn.Linear or SwiGLU experts, "
            f"it has {' and '.join(held) or 'none'}"
        )
    [found] = lists.items()
    return found


def _is_expert(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _swiglu_names(module) is not None


def _swiglu_names(expert: nn.Module) -> tuple[str, str, str] | None:
    """The parameters that are gate, up and down, if these are all that an expert has."""
    parameters = {name for name, _ in expert.named_parameters()}
    return next((names for names in SWIGLU if set(names) == parameters), None)


def _lost(experts: nn.ModuleList, model: nn.Module) -> Iterator[str]:
    """What experts hold besides parameters, which alone reach the module in their place."""
    for name, module in experts.named_modules():
        for attribute, value in vars(module).items():
            if attribute.endswith("_hooks") and value:
                yield f"{name} has {attribute}"
        if "forward" in vars(module):
            yield f"{name} has a forward of its own"
        for buffer, _ in module.named_buffers(recurse=False):
            yield f"{name} has the buffer {buffer}"
    others = set(model.modules()).difference(experts.modules())
    owned = {id(p) for module in others for p in module.parameters(recurse=False)}
    for name, p in experts.named_parameters(remove_duplicate=False):
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            yield f"{name} has hooks"
        if id(p) in owned:
            yield f"{name} has a second owner"
        owned.add(id(p))


def _grouped(
    where: str, experts: nn.ModuleList, recipe: Recipe, options: dict[str, bool]
) -> tuple[str, nn.Module]:
    """The form of a list of experts, and one module with their parameters."""
    parameters = [dict(expert.named_parameters()) for expert in experts]
    forms = {
        tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in one.items())
        for one in parameters
    }
    if len(forms) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' names, shapes or dtypes")

    def stacked(name: str) -> Tensor:
        return torch.stack([one[name].detach() for one in parameters])

    names = _swiglu_names(experts[0])
    first = next(iter(parameters[0].values()))
    like: dict[str, Any] = {"recipe": recipe, "dtype": first.dtype, "device": first.device}
    like |= options
    grouped: nn.Module
    if names is None:
        E, (N, K) = len(experts), first.shape
        grouped = GroupedLinear(E, K, N, bias="bias" in parameters[0], **like)
        values = {name: stacked(name) for name in parameters[0]}
        trained = {name: p.requires_grad for name, p in parameters[0].items()}
    else:
        gate, up, down = map(stacked, names)
        of_gate, of_up, of_down = (parameters[0][name].requires_grad for name in names)
        if of_gate != of_up:
            raise ValueError(
                f"{where}: {names[0]} and {names[1]} become one parameter: let both require grad, "
                "or neither"
            )
        trained = {"gate_up_proj": of_gate, "down_proj": of_down}
        _check_swiglu(where, experts, _run_each(experts), gate, up, down)
        grouped = GroupedMLP(len(experts), gate.size(2), gate.size(1), **like)
        values = {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}
    with torch.no_grad():
        for name, value in values.items():
            grouped.get_parameter(name).copy_(value).requires_grad_(trained[name])
    grouped.train(experts.training)
    return "Linear" if names is None else "SwiGLU", grouped


# --- what is computed ----------------------------------------------------------------------------


def _run_each(experts: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    return lambda x_ERH: torch.stack([e(x_RH) for e, x_RH in zip(experts, x_ERH, strict=True)])


def _run_sorted(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x_ERH: Tensor) -> Tensor:
        E, R, _ = x_ERH.shape
        counts_E = torch.full((E,), R, dtype=torch.int32, device=x_ERH.device)
        y: Tensor = experts(x_ERH.flatten(0, 1), counts_E)
        return y.view(x_ERH.shape)

    return run


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Training mode, in which dropout shows; each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def _check_swiglu(
    where: str,
    experts: nn.Module,
    run: Callable[[Tensor], Tensor],
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
) -> None:
    """Raise unless ``run`` of x [E, R, H] is ``down(silu(gate(x)) * up(x))``, row by row."""
    if gate_EFH.is_meta:
        raise ValueError(
            f"{where}: parameters are on the meta device: convert when they have values"
        )
    E, _, H = gate_EFH.shape
    gate, up, down = (w.float().mT for w in (gate_EFH, up_EFH, down_EHF))
    with _in_training(experts):
        x_ERH = torch.randn(E, 16, H, dtype=gate_EFH.dtype, device=gate_EFH.device)
        # Gates of 0.1 to 30: activations differ at small ones, clamps show at large ones.
        size_R1 = torch.logspace(-1, 1.5, 16, device=x_ERH.device)[:, None]
        x_ERH = (x_ERH * size_R1 / (x_ERH.float() @ gate).std()).to(x_ERH.dtype)
        actual = run(x_ERH).float()
    expected = (silu(x_ERH.float() @ gate) * (x_ERH.float() @ up)) @ down
    difference = (actual - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    # Experts may round to bf16 four times, by at most 2^-9 each.
    if not difference.max() < 2.0**-6:
        raise ValueError(
            f"{where}: experts do not compute down(silu(gate(x)) * up(x)): they are "
            f"{difference.max():.1%} off"
        )
