"""Plain torch models on grouped_linear: experts are recognised, checked and replaced.

R rows, E experts, H features of a token, F features inside an expert.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import silu
from torch.nn.parallel import DistributedDataParallel

from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name
from grouped_linear.nn.functional import check_whole, grouped_linear, is_dtensor
from grouped_linear.nn.linear import GroupedLinear
from grouped_linear.nn.mlp import GroupedMLP
from grouped_linear.recipes import Recipe

Forward = Callable[..., Any]
Names = tuple[str, str, str]

# What ``down(silu(gate(x)) * up(x))`` is made of, by its names: gate, up, down.
SWIGLU: tuple[Names, ...] = (
    ("w1.weight", "w3.weight", "w2.weight"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)
# The same in one tensor each, and what its forward is called with: torchtitan's names until and
# since https://github.com/pytorch/torchtitan/pull/3425.
GROUPED_SWIGLU: dict[Names, list[str]] = {
    ("w1", "w3", "w2"): ["x", "num_tokens_per_expert"],
    ("w1_EFD", "w3_EFD", "w2_EDF"): ["x_RD", "num_tokens_per_expert_E"],
}

# Of the modules that take the place of lists. Their other options follow from the experts, or would
# give parameters another form.
SWIGLU_OPTIONS = (
    "cache_weights",
    "fuse_wgrad_accumulation",
    "quantized_weight",
    "stochastic_rounding",
)
LINEAR_OPTIONS = (*SWIGLU_OPTIONS, "return_bias", "delay_wgrad_compute", "save_original_input")


class ConvertedExperts(NamedTuple):
    """What :func:`convert_experts` converted in one place."""

    name: str
    """Of the module in the model, as ``named_modules`` has it."""
    form: str
    """What its experts were: ``"Linear"``, ``"SwiGLU"`` or ``"grouped SwiGLU"``."""
    num_experts: int


@torch.inference_mode(False)
def convert_experts(
    model: nn.Module,
    forwards: Mapping[type[nn.Module], Forward] | None = None,
    recipe: Recipe | None = None,
    **options: bool,
) -> list[ConvertedExperts]:
    """Replace the experts of a model, in place, by grouped ones, and list them.

    Two forms are recognised:

    **Experts in one tensor**, as torchtitan has them: a module whose only parameters are w1 and w3
    [E, F, H] and w2 [E, H, F], called as ``(x, num_tokens_per_expert)``; or w1_EFD, w3_EFD and
    w2_EDF, called as ``(x_RD, num_tokens_per_expert_E)``. Its forward becomes three grouped layers;
    its parameters, their names and its callers stay what they are. Of parameters that are DTensors
    later the local part is used, as there: experts may be sharded by expert or by feature.

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
    pruning), parametrizations, buffers, a forward or a subclass of Linear of their own, modules or
    parameters with a second owner. Attributes of parameters do not come along. Load a checkpoint
    before, and convert before sharding and before DistributedDataParallel. The parameters of lists
    are held twice until all is converted; if anything raises, nothing was changed. What is
    converted already is left alone. A converted model can be copied, and pickled where ``forwards``
    can.

    A model may be on the meta device. Small random parameters are then run in place of its own, on
    a GPU if there is one. After ``to_empty`` call ``reset_parameters()`` of what took a list's
    place.

    Args:
        model: a model, or a module that itself is to be converted.
        forwards: of each class of block with a ModuleList of experts its new forward.
        recipe: how the products are computed.
        options: of the modules that take the place of lists: ``cache_weights``,
            ``fuse_wgrad_accumulation``, ``quantized_weight`` and ``stochastic_rounding``; where all
            are GroupedLinear also ``return_bias``, ``delay_wgrad_compute`` and
            ``save_original_input``.

    Returns:
        What was converted, in the order of ``named_modules``; never nothing.

    Raises:
        ValueError: where nothing is recognised, a class of ``forwards`` is not in the model or
            holds no such ModuleList, or its experts differ in form, compute something else or hold
            what would be lost; for other options, and for any where experts in one tensor stay
            what they are; for these on the meta device with ``DelayedScaling``, or where small
            parameters do not run; for parameters that are sharded, and lists in
            DistributedDataParallel.

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
    names_of: dict[str, Names] = {}  # of experts in one tensor
    converted = []
    drawn_on = set(map(_runs_on, model.parameters()))
    gpus = {device.index for device in drawn_on if device.type == "cuda"}
    with torch.random.fork_rng(gpus):  # parameters and rows are drawn in here, and leave no trace
        for name, module in model.named_modules():
            where = f"convert_experts: {name or type(module).__name__}"
            if type(module) in forwards:
                list_name, experts = _list_of_experts(where, module)
                check_whole(f"{where}.{list_name}", experts.parameters(), "convert")
                lost = next(_lost(experts, (module, list_name), model), None)
                if lost is not None:
                    raise ValueError(f"{where}.{list_name}: {lost}, which would be lost")
                form, grouped = _grouped(f"{where}.{list_name}", experts, recipe, options)
                replaced[name] = list_name, grouped
                num_experts = len(experts)
            elif (weight_names := _grouped_swiglu_names(module)) is not None:
                if _is_converted(module):
                    continue
                if options:
                    raise ValueError(
                        f"{where}: experts in one tensor stay what they are, so there is nothing "
                        f"to give {' and '.join(options)} to"
                    )
                weights = [module.get_parameter(n) for n in weight_names]
                check_whole(where, weights, "convert")
                if recipe is not None and recipe.has_state and weights[0].is_meta:
                    raise ValueError(
                        f"{where}: the first scales of {type(recipe).__name__} would be lost on "
                        "the meta device: convert when parameters have values"
                    )
                form, num_experts = "grouped SwiGLU", len(weights[0])
                _check_swiglu(where, module, _run_sorted(module, weight_names), *weights)
                names_of[name] = weight_names
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
    if not found and any(map(_is_converted, model.modules())):
        raise ValueError(
            f"convert_experts: experts of {type(model).__name__} are converted already"
        )
    if not found:
        raise ValueError(
            f"convert_experts: {type(model).__name__} has no module with parameters w1, w2 and w3 "
            "[E, ...] that is called as (x, num_tokens_per_expert), and no class is in forwards"
        )

    if replaced and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "convert_experts: DistributedDataParallel holds the parameters of lists, which are "
            "replaced: convert before it is made"
        )

    for name, module in found.items():
        before: Any = type(module)
        if name in replaced:
            setattr(module, *replaced[name])
            module.__class__ = _converted_class(before, forwards[before])
            continue
        if recipe is not None and recipe.has_state:
            w1 = module.get_parameter(names_of[name][0])
            states = (recipe.new_state(len(w1), w1.device) for _ in names_of[name])
            module.scaling_states = nn.ModuleList(state for state in states if state is not None)
        module.__class__ = _converted_class(before, _GroupedSwiGLU(names_of[name], recipe))
    return converted


def _grouped_swiglu_names(module: nn.Module) -> Names | None:
    parameters = dict(module.named_parameters())
    names = next((names for names in GROUPED_SWIGLU if set(names) == set(parameters)), None)
    if names is None or any(p.dim() != 3 for p in parameters.values()):
        return None
    E, F, H = parameters[names[0]].shape
    shapes = [tuple(parameters[name].shape) for name in names]
    called_with = list(inspect.signature(module.forward).parameters)
    right_shapes = shapes == [(E, F, H), (E, F, H), (E, H, F)]
    return names if right_shapes and called_with == GROUPED_SWIGLU[names] else None


class _GroupedSwiGLU(NamedTuple):
    """The forward of experts in one tensor, as data: a pickle holds no function made here."""

    names: Names
    recipe: Recipe | None

    def forward(self) -> Forward:
        names, recipe = self

        def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            m_splits_E = num_tokens_per_expert.to(torch.int32)  # some count in float
            states = getattr(self, "scaling_states", (None, None, None))

            def layer(x: Tensor, i: int) -> Tensor:
                weight, state = getattr(self, names[i]), states[i]
                if is_dtensor(weight):
                    weight = weight.to_local()
                held = None if state is None else len(state.quantizer_states().weight.scale)
                if held is not None and len(weight) != held:
                    raise ValueError(
                        f"{type(self).__name__}: {type(recipe).__name__} holds scales of "
                        f"{held} experts, {len(weight)} are on this process: "
                        "shard in another way or take another recipe"
                    )
                if recipe is None or not recipe.reads_any_weight_dtype:
                    weight = weight.to(x.dtype)
                return grouped_linear(x, weight, m_splits_E, None, recipe, state)

            return layer(silu(layer(x, 0)) * layer(x, 1), 2).to(x.dtype)

        def forward_RD(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            return forward(self, x_RD, num_tokens_per_expert_E)

        return forward if GROUPED_SWIGLU[names][0] == "x" else forward_RD


def _is_converted(module: nn.Module) -> bool:
    return hasattr(type(module), "_converted_from")


@lru_cache  # one for all layers of a class, copies and loaded ones too: compiled once for all
def _converted_class(before: type[nn.Module], new: Forward | _GroupedSwiGLU) -> type[nn.Module]:
    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        whole: tuple[Any, ...] = super(converted, self).__reduce_ex__(protocol)
        if type(self) is not converted:  # a subclass, as FSDP2 makes one
            return whole
        # No import finds a class that is made here, so it is made again where a pickle is loaded.
        return _new_converted, (before, new), *whole[2:]

    body = {
        "forward": new.forward() if isinstance(new, _GroupedSwiGLU) else new,
        "__module__": before.__module__,
        "__reduce_ex__": reduce_ex,
        "_converted_from": before,
    }
    converted: type[nn.Module] = type(f"Grouped{before.__name__}", (before,), body)
    return converted


def _new_converted(before: Any, new: Forward | _GroupedSwiGLU) -> nn.Module:
    """Of a copy or a pickle, which fills it."""
    converted = _converted_class(before, new)
    return converted.__new__(converted)


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
            f"{where} must hold one ModuleList of torch.nn.Linear or of SwiGLU experts without "
            f"biases, it has {' and '.join(held) or 'none'}"
        )
    [found] = lists.items()
    return found


def _is_expert(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _swiglu_names(module) is not None


def _swiglu_names(expert: nn.Module) -> Names | None:
    """The parameters that are gate, up and down, if these are all that an expert has."""
    parameters = {name for name, _ in expert.named_parameters()}
    return next((names for names in SWIGLU if set(names) == parameters), None)


def _lost(experts: nn.ModuleList, place: tuple[nn.Module, str], model: nn.Module) -> Iterator[str]:
    """What experts hold besides parameters, which alone reach the module in their place."""
    for name, module in experts.named_modules():
        for attribute, value in vars(module).items():
            if attribute.endswith("_hooks") and value:
                yield f"{name} has {attribute}"
        if "forward" in vars(module):
            yield f"{name} has a forward of its own"
        for buffer, _ in module.named_buffers(recurse=False):
            yield f"{name} has the buffer {buffer}"
    inside = {module: name for name, module in experts.named_modules()}
    others = [module for module in model.modules() if module not in inside]
    for owner in others:
        for attribute, child in owner._modules.items():
            if child is None or child not in inside or (owner, attribute) == place:
                continue
            if next(child.parameters(), None) is not None:
                yield f"{inside[child] or 'the list'} has a second owner"
    owned = {id(p) for module in others for p in module.parameters(recurse=False)}
    for name, p in experts.named_parameters(remove_duplicate=False):
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            yield f"{name} has hooks"
        if id(p) in owned:
            yield f"{name} has a second owner"
        owned.add(id(p))


def _grouped(
    where: str, experts: nn.ModuleList, recipe: Recipe | None, options: dict[str, bool]
) -> tuple[str, nn.Module]:
    """The form of a list of experts, and one module with their parameters."""
    parameters = [dict(expert.named_parameters()) for expert in experts]
    forms = {tuple((name, p.shape, p.dtype) for name, p in one.items()) for one in parameters}
    if len(forms) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' names, shapes or dtypes")
    if len({tuple(p.requires_grad for p in one.values()) for one in parameters}) != 1:
        raise ValueError(f"{where}: experts differ in their parameters' requires_grad")
    for name, p in parameters[0].items():
        if p.dtype not in ACTIVATIONS:
            raise ValueError(
                f"{where}: {name} must be bfloat16, float16 or float32, got {dtype_name(p.dtype)}"
            )

    def stacked(name: str) -> Tensor:
        return torch.stack([one[name].detach() for one in parameters])

    names = _swiglu_names(experts[0])
    known = LINEAR_OPTIONS if names is None else SWIGLU_OPTIONS
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"{where}: options may be {', '.join(known)}, got {' and '.join(unknown)}")
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
        if not gate.shape == up.shape == down.mT.shape:
            shapes = ", ".join(f"{name} {list(parameters[0][name].shape)}" for name in names)
            raise ValueError(f"{where}: experts are not SwiGLU by their shapes: {shapes}")
        trained = {"gate_up_proj": of_gate, "down_proj": of_down}
        _check_swiglu(where, experts, _run_each(experts, names), gate, up, down)
        grouped = GroupedMLP(len(experts), gate.size(2), gate.size(1), **like)
        values = {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}
    with torch.no_grad():
        for name, value in values.items():
            grouped.get_parameter(name).copy_(value).requires_grad_(trained[name])
    grouped.train(experts.training)
    return "Linear" if names is None else "SwiGLU", grouped


# --- what is computed ----------------------------------------------------------------------------


# Of x [E, R, H] and gate, up and down: these take the place of the experts' own.
Run = Callable[..., Tensor]


def _run_each(experts: nn.ModuleList, names: Names) -> Run:
    def run(x_ERH: Tensor, *weights: Tensor) -> Tensor:
        y = [
            functional_call(expert, dict(zip(names, own, strict=True)), x_RH)
            for expert, x_RH, *own in zip(experts, x_ERH, *weights, strict=True)
        ]
        return torch.stack(y)

    return run


def _run_sorted(experts: nn.Module, names: Names) -> Run:
    def run(x_ERH: Tensor, *weights: Tensor) -> Tensor:
        E, R, _ = x_ERH.shape
        counts_E = torch.full((E,), R, dtype=torch.int32, device=x_ERH.device)
        args = x_ERH.flatten(0, 1), counts_E
        y: Tensor = functional_call(experts, dict(zip(names, weights, strict=True)), args)
        return y.view(x_ERH.shape)

    return run


def _runs_on(p: Tensor) -> torch.device:
    """Its own device; for the meta device a GPU, which some experts need."""
    if not p.is_meta:
        return p.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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


def _tells(weight_ENK: Tensor) -> bool:
    """Whether what each expert computes with a weight shows what it computes; zeros do not."""
    largest_E = weight_ENK.abs().amax(dim=(1, 2))
    return bool((largest_E.isfinite() & (largest_E > 0)).all())


@torch.no_grad()
def _check_swiglu(
    where: str, experts: nn.Module, run: Run, gate_EFH: Tensor, up_EFH: Tensor, down_EHF: Tensor
) -> None:
    """Raise unless ``run`` of x [E, R, H] is ``down(silu(gate(x)) * up(x))``, for each expert."""
    E, F, H = gate_EFH.shape
    dtype, device, on_meta = gate_EFH.dtype, _runs_on(gate_EFH), gate_EFH.is_meta
    weights = [gate_EFH, up_EFH, down_EHF]
    if on_meta:  # what is computed does not follow from sizes: all experts, but small ones
        F, H = 48, 32
    if on_meta or not all(map(_tells, weights)):
        shapes = (F, H), (F, H), (H, F)
        weights = [torch.randn(E, N, K, dtype=dtype, device=device) / K**0.5 for N, K in shapes]
    gate, up, down = (w.float().mT for w in weights)
    rows = 4  # of each size: one alone may be mostly what rounding left
    with _in_training(experts):
        x_ERH = torch.randn(E, 16 * rows, H, dtype=dtype, device=device)
        # Gates of 0.1 to 30: activations differ at small ones, clamps show at large ones.
        size_R1 = torch.logspace(-1, 1.5, 16, device=device).repeat_interleave(rows)[:, None]
        spread_E11 = (x_ERH.float() @ gate).std(dim=(1, 2), keepdim=True)
        x_ERH = (x_ERH * size_R1 / spread_E11).to(dtype)
        try:
            actual = run(x_ERH, *weights).float()
        except Exception as error:
            if not on_meta:
                raise
            raise ValueError(
                f"{where}: parameters are on the meta device, and small ones in their place do not "
                "run: convert when they have values"
            ) from error
    expected = (silu(x_ERH.float() @ gate) * (x_ERH.float() @ up)) @ down
    of_size = (E, 16, rows * H)
    difference = (actual - expected).view(of_size).norm(dim=2) / expected.view(of_size).norm(dim=2)
    # Experts may round to bf16 four times, by at most 2^-9 each, and sums of few terms may cancel.
    if not difference.max() < 2.0**-5:
        raise ValueError(
            f"{where}: experts do not compute down(silu(gate(x)) * up(x)): they are "
            f"{difference.max():.1%} off"
        )
