# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear.from_linears and GroupedMLP.from_experts: a layer of a list of modules.

T tokens, E experts, H features of a token, F features of an expert.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import dropout, gelu, relu, silu
from torch.nn.utils import parametrizations, prune

from grouped_linear import DelayedScaling, Float8BlockScaling, GroupedLinear, GroupedMLP, Recipe
from support.compare import assert_same_bits, assert_same_tensors, relative_error
from support.errors import sentence
from support.experts import Expert
from support.processes import PROCESSES, Checks, on_cpu
from support.tensors import BF16, DTYPES, FP32

E, H, F = 4, 32, 48
COUNTS = [16, 0, 32, 2]
PROJ = "gate_proj", "up_proj", "down_proj"


class Exchanged(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x) * silu(self.w3(x)))


def experts_of(act: Any = silu, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(Expert(act=act, **options) for _ in range(E))


def linears_of(**options: Any) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(H, F, **options) for _ in range(E))


def of_list(modules: nn.ModuleList, x: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients, each parameter's stacked."""
    rows = x.clone().requires_grad_().split(COUNTS)
    y = torch.cat([m(r) for m, r in zip(modules, rows, strict=True)])
    y.square().sum().backward()
    each = [[p.grad for p in m.parameters()] for m in modules]
    grads = [torch.stack(list(same)) for same in zip(*each, strict=True)]
    if isinstance(modules[0], Expert):
        gate, up, down = grads
        grads = [torch.cat([gate, up], dim=1), down]
    return y.detach(), *grads


def of_layer(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    call = layer.forward_sorted if isinstance(layer, GroupedMLP) else layer
    y = call(x.clone().requires_grad_(), torch.tensor(COUNTS, device=x.device))
    y.square().sum().backward()
    return y.detach(), *(p.grad for p in layer.parameters())


LISTS: dict[str, tuple[Callable[[], nn.ModuleList], Callable[..., Any]]] = {
    "linears": (linears_of, GroupedLinear.from_linears),
    "linears without biases": (partial(linears_of, bias=False), GroupedLinear.from_linears),
    "experts": (experts_of, GroupedMLP.from_experts),
    "other names": (partial(experts_of, names=PROJ), GroupedMLP.from_experts),
}
EVERY_LIST = pytest.mark.parametrize("kind", LISTS)


@EVERY_LIST
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients(kind: str, dtype: torch.dtype, device: str) -> None:
    make, layer_of = LISTS[kind]
    modules, before = make().to(device, dtype), torch.get_rng_state()
    layer, x = layer_of(modules), torch.randn(sum(COUNTS), H, device=device, dtype=dtype)
    assert all(p.dtype == dtype and p.device.type == device for p in layer.parameters())
    for actual, expected in zip(of_layer(layer, x), of_list(modules, x), strict=True):
        off = relative_error(actual, expected)
        assert off < (1e-5 if dtype == FP32 else 2.0**-6)
    torch.set_rng_state(before)
    layer_of(modules)
    assert torch.equal(torch.get_rng_state(), before)


@EVERY_LIST
@pytest.mark.parametrize("weights", [None, "both", "fp8"])
@pytest.mark.parametrize("recipe", [None, Float8BlockScaling(), DelayedScaling()], ids=str)
def test_as_a_layer_that_loads_these_weights(
    recipe: Recipe | None, weights: Any, kind: str
) -> None:
    if weights is not None and recipe != Float8BlockScaling():
        return
    make, layer_of = LISTS[kind]
    modules, x = make(), torch.randn(sum(COUNTS), H)
    layer, plain = layer_of(modules, recipe=recipe, weights=weights), layer_of(modules)
    options: dict[str, Any] = {"recipe": recipe, "weights": weights}
    if isinstance(layer, GroupedMLP):
        other: nn.Module = GroupedMLP(E, H, F, **options)
    else:
        other = GroupedLinear(E, H, F, bias=layer.bias is not None, **options)
    other.load_state_dict(plain.state_dict(), strict=False)
    state, expected = layer.state_dict(), other.state_dict()
    assert_same_tensors(state, expected)
    counts = torch.tensor(COUNTS)
    calls = (getattr(one, "forward_sorted", one) for one in (layer, other))
    assert_same_bits(*(call(x, counts) for call in calls))


def test_options() -> None:
    options: dict[str, Any] = {"cache_weights": True, "fuse_wgrad_accumulation": True}
    recipe = Float8BlockScaling()
    linear = GroupedLinear.from_linears(linears_of(), recipe=recipe, **options)
    assert linear.fuse_wgrad_accumulation
    assert linear.weight_cache is not None
    mlp = GroupedMLP.from_experts(experts_of(), recipe=recipe, save_gate_up_in_fp8=True, **options)
    assert mlp.fuse_wgrad_accumulation
    assert mlp.save_gate_up_in_fp8
    assert mlp.down_proj_cache is not None
    with torch.no_grad():  # the cache has memory
        mlp.forward_sorted(torch.randn(50, H), COUNTS, is_first_microbatch=True)


@EVERY_LIST
def test_on_the_meta_device(kind: str) -> None:
    make, layer_of = LISTS[kind]
    with torch.device("meta"):
        modules = make()
    before = torch.get_rng_state()
    layer = layer_of(modules, recipe=Float8BlockScaling())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    layer.load_state_dict(layer_of(make()).state_dict())


def test_what_is_frozen_stays_frozen() -> None:
    linears = linears_of()
    for linear in linears:
        linear.weight.requires_grad_(False)
    layer = GroupedLinear.from_linears(linears)
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    frozen = experts_of().requires_grad_(False)
    mlp = GroupedMLP.from_experts(frozen, recipe=Float8BlockScaling(), weights="fp8")
    assert not any(p.requires_grad for p in mlp.parameters())


def test_made_in_inference_mode() -> None:
    with torch.inference_mode():
        layer = GroupedLinear.from_linears(linears_of())
    of_layer(layer, torch.randn(sum(COUNTS), H))


def test_a_subclass_is_made() -> None:
    class Sorted(GroupedMLP):
        pass

    assert type(Sorted.from_experts(experts_of())) is Sorted


def one_frozen() -> nn.ModuleList:
    experts = experts_of()
    experts[1].requires_grad_(False)
    return experts


def halfway() -> nn.ModuleList:
    experts = experts_of()
    for expert in experts:
        expert.w1.requires_grad_(False)
    return experts


class Named(nn.Linear):
    pass


def shared(modules: nn.ModuleList, name: str) -> nn.ModuleList:
    modules[2].get_submodule(name).weight = modules[0].get_submodule(name).weight
    return modules


def test_mistakes() -> None:
    linears: list[Any] = [
        [],
        experts_of(),
        [nn.Linear(H, F), Named(H, F)],
        [nn.Linear(H, F), nn.Linear(H, F, bias=False)],
        [nn.Linear(H, F), nn.Linear(H, F, device="meta")],
        [parametrizations.weight_norm(nn.Linear(H, F))],
        [nn.Linear(H, 40)],
        linears_of(dtype=torch.float64),
        [nn.Linear(H, F)] * 2,
    ]
    experts: list[Any] = [
        [],
        linears_of(),
        experts_of(bias=True),
        experts_of(names=("gate", "up", "down")),
        experts_of(names=("w1", "w2", "w3")),
        one_frozen(),
        halfway(),
        [Expert(), Expert(dtype=BF16)],
        shared(experts_of(), "w3"),
    ]
    said = [sentence(lambda m=m: GroupedLinear.from_linears(m)) for m in linears]
    said += [sentence(lambda m=m: GroupedMLP.from_experts(m)) for m in experts]
    no_lists: list[Any] = [Expert(), None, ["w1"]]
    said += [sentence(lambda m=m: GroupedMLP.from_experts(m), TypeError) for m in no_lists]
    said.append(sentence(lambda: GroupedLinear.from_linears(no_lists[0]), TypeError))
    assert_expected_inline(
        "\n".join(said),
        """\
GroupedLinear.from_linears: modules must be torch.nn.Linear, got no module
GroupedLinear.from_linears: modules must be torch.nn.Linear, got Expert
GroupedLinear.from_linears: modules must be torch.nn.Linear, got Linear, Named
GroupedLinear.from_linears: modules 0 and 1 differ in parameters' names, shapes, dtypes or devices
GroupedLinear.from_linears: modules 0 and 1 differ in parameters' names, shapes, dtypes or devices
GroupedLinear.from_linears: modules must be torch.nn.Linear, got ParametrizedLinear
GroupedLinear: out_features must be a positive multiple of 16, got 40
GroupedLinear: dtype must be bfloat16, float16 or float32, got float64
GroupedLinear.from_linears: modules share parameters, which would be lost
GroupedMLP.from_experts: modules must have the weights w1, w3, w2 or gate_proj, up_proj, down_proj and no other parameters, got no module
GroupedMLP.from_experts: modules must have the weights w1, w3, w2 or gate_proj, up_proj, down_proj and no other parameters, got weight, bias
GroupedMLP.from_experts: modules must have the weights w1, w3, w2 or gate_proj, up_proj, down_proj and no other parameters, got w1.weight, w1.bias, w3.weight, w3.bias, w2.weight, w2.bias
GroupedMLP.from_experts: modules must have the weights w1, w3, w2 or gate_proj, up_proj, down_proj and no other parameters, got gate.weight, up.weight, down.weight
GroupedMLP.from_experts: modules are not SwiGLU by their shapes: w1.weight [48, 32], w3.weight [32, 48], w2.weight [48, 32]
GroupedMLP.from_experts: modules differ in their parameters' requires_grad
GroupedMLP.from_experts: w1.weight and w3.weight become one parameter: let both require grad, or neither
GroupedMLP.from_experts: modules 0 and 1 differ in parameters' names, shapes, dtypes or devices
GroupedMLP.from_experts: modules share parameters, which would be lost
GroupedMLP.from_experts: needs a list of modules, one an expert, got Expert
GroupedMLP.from_experts: needs a list of modules, one an expert, got NoneType
GroupedMLP.from_experts: needs a list of modules, one an expert, got list of str
GroupedLinear.from_linears: needs a list of modules, one an expert, got Expert""",  # noqa: E501
    )


def add_one(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    return y + 1


def patched(linear: nn.Linear) -> None:
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)


LOST: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "forward_hook": (lambda m: m.register_forward_hook(add_one), " has _forward_hooks"),
    "backward_hook": (
        lambda m: m.register_full_backward_hook(lambda *_: None),
        " has _backward_hooks",
    ),
    "state_dict_hook": (
        lambda m: m.register_state_dict_post_hook(lambda *_: None),
        " has _state_dict_hooks",
    ),
    "gradient_hook": (lambda m: m.weight.register_hook(lambda g: 2 * g), ".weight has hooks"),
    "step_in_backward": (
        lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
        ".weight has hooks",
    ),
    "weight_norm": (nn.utils.weight_norm, " has _forward_pre_hooks"),
    "pruning": (lambda m: prune.random_unstructured(m, "weight", 0.5), " has _forward_pre_hooks"),
    "buffer": (lambda m: m.register_buffer("steps", torch.zeros(1)), " has the buffer steps"),
    "patched": (patched, " has a forward of its own"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", LOST)
def test_what_would_be_lost(kind: str) -> None:
    add, lost = LOST[kind]
    linears = linears_of()
    add(linears[2])
    refused = sentence(lambda: GroupedLinear.from_linears(linears))
    differs = kind in ("weight_norm", "pruning")  # in names, too
    assert refused == "GroupedLinear.from_linears: module" + (
        "s 0 and 2 differ in parameters' names, shapes, dtypes or devices"
        if differs
        else f" 2{lost}, which would be lost"
    )
    if kind in ("forward_hook", "gradient_hook", "buffer"):
        experts = experts_of()
        add(experts[2].w1)
        refused = sentence(lambda: GroupedMLP.from_experts(experts))
        lost = lost.replace("buffer ", "buffer w1.") if kind == "buffer" else f".w1{lost}"
        assert refused == f"GroupedMLP.from_experts: module 2{lost}, which would be lost"


# --- what experts compute ------------------------------------------------------------------------


def dropping(x: Tensor) -> Tensor:
    return dropout(silu(x), 0.1, training=True)


def clamped(x: Tensor) -> Tensor:
    return silu(x).clamp(max=7.0)


def steeper(x: Tensor) -> Tensor:
    return x * (1.1 * x).sigmoid()


@pytest.mark.parametrize("act", [gelu, relu, clamped, steeper, dropping])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_not_swiglu_is_refused(act: Any, dtype: torch.dtype, device: str) -> None:
    experts = experts_of(act).to(device, dtype).eval()
    with pytest.raises(ValueError, match=r"^GroupedMLP\.from_experts: experts do not compute down"):
        GroupedMLP.from_experts(experts)
    assert not any(module.training for module in experts.modules())


def test_dropout_that_is_off_and_exchanged_names() -> None:
    class Dropped(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return dropout(super().forward(x), 0.1, training=self.training)

    for cls in (Dropped, Exchanged):
        experts = nn.ModuleList(cls() for _ in range(E)).eval()
        with pytest.raises(ValueError, match="experts do not compute"):
            GroupedMLP.from_experts(experts)


def test_experts_that_are_off_by_a_little() -> None:
    """What rounding explains is less than 3% in any dtype."""
    for dtype, factor in ((FP32, 1.002), (BF16, 1.03)):
        experts = experts_of().to(dtype)
        experts[1].act = lambda x, factor=factor: factor * silu(x)
        refused = sentence(lambda experts=experts: GroupedMLP.from_experts(experts))
        assert " off, and rounding explains 0." in refused


@pytest.mark.parametrize("size", [1.0, 0.2])
def test_one_expert_of_many_is_not_swiglu(size: float) -> None:
    """However little it adds to what all give."""
    experts = [Expert() for _ in range(63)] + [Expert(act=gelu)]
    with torch.no_grad():
        for p in experts[-1].parameters():
            p.mul_(size)
    with pytest.raises(ValueError, match="experts do not compute"):
        GroupedMLP.from_experts(experts)


@pytest.mark.parametrize("value", [0.0, torch.nan])
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_weights_that_show_nothing(name: str, value: float) -> None:
    """A model may be initialised with zeros; others stand in for them while it is looked at."""
    for act in (silu, gelu):
        experts = experts_of(act)
        with torch.no_grad():
            experts[1].get_submodule(name).weight.fill_(value)
        if act is silu:
            layer = GroupedMLP.from_experts(experts)
            assert_same_bits(layer.down_proj[1], experts[1].w2.weight)
        else:
            with pytest.raises(ValueError, match="experts do not compute"):
                GroupedMLP.from_experts(experts)


def check_sharded(rank: int, directory: Path) -> None:
    experts, mesh = experts_of(), init_device_mesh("cpu", (PROCESSES,))
    for expert in experts:
        fully_shard(expert, mesh=mesh)
    assert sentence(lambda: GroupedMLP.from_experts(experts)) == (
        "GroupedMLP.from_experts: parameters are sharded already: make the layer before"
    )


CHECKS: Checks = {"sharded": check_sharded}

test_two_processes = on_cpu(CHECKS)
