# SPDX-License-Identifier: Apache-2.0
"""Where the layer's gradients go: grad, main_grad, or to backward_dw; and what is kept for them.

T rows, E groups, K in_features, N out_features.
"""

import gc
import pickle
import re
import weakref
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from grouped_linear import (
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    Recipe,
    SwiGLU,
    grouped_linear,
    ops,
)
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.nn.router import router_logits
from support import training
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits, outcome
from support.errors import sentence
from support.layers import call_of, linear_of, with_numbers_in_adapters
from support.pairs import in_turn, pairwise
from support.recipes import MORE_RECIPES, RECIPES, state_for
from support.saved import saved_tensors
from support.tensors import BF16, FP16, FP32

T, E, K, N = 40, 3, 32, 48
QAT = Float8BlockScaling(qat="mxfp4")
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
WAYS = {"eager": False, "compiled": True}
ONE_OR_APART = {"one": True, "apart": False}
FORMS = pytest.mark.parametrize("single", ONE_OR_APART.values(), ids=ONE_OR_APART)


def make_layer(recipe: Recipe | None = None, device: str = "cpu", **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return linear_of(E, K, N, recipe=recipe, device=device, **options)


def make_mlp(
    recipe: Recipe | None = None, device: str = "cpu", dtype: torch.dtype = FP32, **options: Any
) -> training.Routed:
    return training.make_mlp(recipe, dtype, device, **options)


EVERY_LAYER = {
    "one": make_layer,
    "apart": partial(make_layer, single_grouped_weight=False),
    "mlp": make_mlp,
}
OF_EACH = pytest.mark.parametrize("make", EVERY_LAYER.values(), ids=EVERY_LAYER)
TRAINED = RECIPES | {"block_bf16_wgrad": MORE_RECIPES["block_bf16_wgrad"]}


def every_weight(layer: Any) -> list[Any]:
    return [w for parts in training.weights_of(layer) for w in parts]


def inputs(device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).to(device).requires_grad_()
    return x, torch.tensor([10, 0, 25], device=device)


def weights_of(layer: nn.Module) -> list[Any]:
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def give_main_grads(layer: nn.Module, dtype: torch.dtype = FP32, value: float = 1.0) -> Tensor:
    """Slices of one buffer, in the order of the parameters, after a gap."""
    weights = weights_of(layer)
    flat = torch.full((16 + E * N * K,), value, dtype=dtype, device=weights[0].device)
    for w, part in zip(weights, flat[16:].view(len(weights), -1), strict=True):
        w.main_grad = part.view(w.shape)
    return flat[16:].view(E, N, K)


# --- main_grad -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "single", "compiled"), pairwise({"fp32": FP32, "bf16": BF16}, ONE_OR_APART, WAYS)
)
def test_main_grad(dtype: torch.dtype, single: bool, compiled: bool, device: str) -> None:
    """One addition an element, rounded once; nothing in grad."""
    layer = make_layer(None, device, fuse_wgrad_accumulation=True, single_grouped_weight=single)
    main_grad, (x, m_splits) = give_main_grads(layer, dtype), inputs(device)
    expected = main_grad.clone()
    dy = torch.randn(T, N, device=device)
    call_of(layer, compiled)(x, m_splits).backward(dy)
    ops.grouped_mm_wgrad_(expected, dy, x.detach(), ops.splits_to_offsets(m_splits, T))
    assert_same_bits(main_grad, expected)
    assert (main_grad[1] == 1).all()  # an empty group's stays as it was
    assert all(w.grad is None for w in weights_of(layer))


@pytest.mark.parametrize(("recipe", "single", "compiled"), pairwise(RECIPES, ONE_OR_APART, WAYS))
def test_a_float32_bias_gets_its_gradient_unrounded(
    single: bool, recipe: Recipe | None, compiled: bool, device: str
) -> None:
    layer = make_layer(recipe, device, single_grouped_bias=single)
    if recipe is None:
        layer.weight.data = layer.weight.data.bfloat16()
    x, m_splits = inputs(device)
    dy = torch.randn(T, N, device=device).bfloat16()
    call_of(layer, compiled)(x.bfloat16(), m_splits).backward(dy)
    biases = [p.grad for name, p in layer.named_parameters() if name.startswith("bias")]
    actual = biases[0] if single else torch.stack(biases)
    assert_same_bits(actual, ops.grouped_bias_grad(dy, ops.splits_to_offsets(m_splits, T)))


@pytest.mark.parametrize(
    ("how", "dtype"),
    in_turn(
        {
            "plain": (None, False),
            "fused": ("fuse_wgrad_accumulation", False),
            "later": ("delay_wgrad_compute", False),  # refused in compiled code
            "compiled": (None, True),
            "compiled_fused": ("fuse_wgrad_accumulation", True),
            "fused_again": ("fuse_wgrad_accumulation", False),
        },
        {"bf16": BF16, "fp16": FP16, "fp32": FP32},
    ),
)
def test_autocast_of_experts_apart(
    how: tuple[str | None, bool], dtype: torch.dtype, device: str
) -> None:
    """As of one weight and one bias, whatever dtype the parameters have."""
    option, compiled = how
    dy = torch.randn(T, N, device=device).bfloat16()
    results = []
    for single in (True, False):
        options: dict[str, Any] = {} if option is None else {option: True}
        options |= {f"single_grouped_{name}": single for name in ("weight", "bias")}
        layer, (x, m_splits) = make_layer(None, device, dtype=dtype, **options), inputs(device)
        total = give_main_grads(layer, value=0.0)
        with torch.autocast(device, dtype=BF16):
            y = call_of(layer, compiled)(x, m_splits)
        y.backward(dy)
        if option == "delay_wgrad_compute":
            layer.backward_dw()
        if option != "fuse_wgrad_accumulation":
            total = torch.stack([w.grad for w in weights_of(layer)]).view(E, N, K)
        biases = [p.grad for name, p in layer.named_parameters() if name.startswith("bias")]
        results.append((y, x.grad, total, torch.stack(biases).view(E, N)))
    assert_all_same_bits(*results)


@pytest.mark.parametrize("kept", [False, True], ids=["plain", "kept_gemms"])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), QAT], ids=[*RECIPES, "qat"])
def test_autocast_beside_weights_in_the_other_16_bits(
    recipe: Recipe | None, kept: bool, device: str
) -> None:
    """torch.stack of experts' weights refuses these under autocast, wherever it is called."""
    layer = make_layer(recipe, device, dtype=FP16, single_grouped_weight=False)
    x, m_splits = inputs(device)
    how: dict[str, Any] = {"use_reentrant": False}
    if kept:  # a dispatch mode
        how["context_fn"] = partial(create_selective_checkpoint_contexts, [*ops.GEMMS])
    results = []
    for autocast, given in ((True, x), (False, x.bfloat16())):
        layer.to(FP16 if recipe is not None or autocast else BF16)
        with torch.autocast(device, BF16, enabled=autocast):
            y = checkpoint(layer, given, m_splits, **how)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *weights_of(layer)])))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other.to(one.dtype))


@pytest.mark.parametrize("order", ["backwards", "gaps"])
@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["none", "block"])
def test_main_grads_anywhere(recipe: Recipe | None, order: str) -> None:
    layer = make_layer(recipe, fuse_wgrad_accumulation=True, single_grouped_weight=False)
    flat = torch.zeros(2 * E, N, K)
    slots = list(flat[:E])[::-1] if order == "backwards" else flat[::2]
    for w, slot in zip(weights_of(layer), slots, strict=True):
        w.main_grad = slot
    x, m_splits = inputs()
    layer(x, m_splits).square().sum().backward()
    plain = make_layer(recipe)
    plain(x, m_splits).square().sum().backward()
    assert_same_bits(torch.stack([w.main_grad for w in weights_of(layer)]), plain.weight.grad)
    assert flat.count_nonzero() == plain.weight.grad.count_nonzero()


@pytest.mark.parametrize(
    ("make", "recipe", "compiled"), pairwise(EVERY_LAYER, TRAINED, WAYS | {"eager_again": False})
)
def test_what_megatron_asks_for(
    make: Any, recipe: Recipe | None, compiled: bool, device: str
) -> None:
    """Of each weight main_grad is added to or written over, as it says.

    Who waits for a gradient, by grad_added_to_main_grad, gets one of zeros; hooks run in any case.
    """
    layer, plain = make(recipe, device, fuse_wgrad_accumulation=True), make(recipe, device)
    x, m_splits = inputs(device)
    groups, fired = training.weights_of(layer), []
    weights = every_weight(layer)
    for w in weights:
        w.register_post_accumulate_grad_hook(fired.append)
    _, *expected = outcome(plain(x, m_splits), every_weight(plain))
    training.give_main_grads(layer, training.FEATURES["fused"])
    for turn in range(2):
        for i, parts in enumerate(groups):
            for w in parts:
                w.grad, w.overwrite_main_grad = None, (i + turn) % 2 == 0
                w.main_grad.fill_(torch.nan if w.overwrite_main_grad else 1)
                w.__dict__.pop("grad_added_to_main_grad", None)
                if not w.overwrite_main_grad:
                    w.grad_added_to_main_grad = False
        waits = [w for w in weights if not w.overwrite_main_grad]
        with pytest.raises(RuntimeError):
            layer(x[:, :16], m_splits)
        assert not any(w.grad_added_to_main_grad for w in waits)  # a refused call adds none
        torch._dynamo.reset()
        call_of(layer, compiled)(x, m_splits).square().sum().backward()
        assert {*map(id, fired)} == {*map(id, weights)}
        for w, d in zip(weights, expected, strict=True):
            assert_same_bits(w.main_grad, d if w.overwrite_main_grad else 1 + d)
            if w.overwrite_main_grad:
                assert w.grad is None
                assert not hasattr(w, "grad_added_to_main_grad")
            else:
                assert w.grad_added_to_main_grad
                assert_same_bits(w.grad, torch.zeros_like(w))
        fired.clear()
    if isinstance(layer, training.Routed):
        waits[-1].grad_added_to_main_grad = False
        layer.mlp.forward_sorted(x, m_splits)
        assert waits[-1].grad_added_to_main_grad


@pytest.mark.parametrize("frozen", [0, 1], ids=["gate_up_proj", "down_proj"])
def test_a_frozen_weight_needs_no_main_grad(frozen: int, device: str) -> None:
    layer = make_mlp(RECIPES["block"], device, fuse_wgrad_accumulation=True)
    plain, (x, m_splits) = make_mlp(RECIPES["block"], device), inputs(device)
    layer.weights[frozen].requires_grad_(False)
    learning = layer.weights[1 - frozen]
    learning.main_grad = torch.zeros_like(learning, requires_grad=False)
    layer(x, m_splits).square().sum().backward()
    expected = outcome(plain(x, m_splits), plain.weights)
    assert_same_bits(learning.main_grad, expected[2 - frozen])


@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["none", "block"])
def test_autocast_of_an_mlp(recipe: Recipe | None, device: str) -> None:
    """float32 weights get unrounded gradients, of products in bfloat16."""
    layers = [
        make_mlp(recipe, device, dtype, fuse_wgrad_accumulation=True) for dtype in (FP32, BF16)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x, m_splits = inputs(device)
    for layer, given in zip(layers, (x, x.detach().to(BF16)), strict=True):
        for w in layer.weights:
            w.main_grad = torch.zeros_like(w, dtype=FP32, requires_grad=False)
        with torch.autocast(device, dtype=BF16, enabled=layer is layers[0]):
            y = layer(given, m_splits)
        y.float().square().sum().backward()
    for w, other in zip(*(layer.weights for layer in layers), strict=True):
        assert w.grad is None
        assert other.dtype == (FP32 if recipe else BF16)
        assert_same_bits(w.main_grad, other.main_grad)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *in_turn({name: EVERY_LAYER[name] for name in ONE_OR_APART}, {n: n for n in RECIPES}),
        *((make_mlp, name) for name in ("delayed", "mxfp8")),
    ],
)
def test_inductor_clones_neither_main_grad_nor_cache(make: Any, name: str) -> None:
    layer = make(RECIPES[name], cache_weights=True, fuse_wgrad_accumulation=True)
    plain, (x, m_splits) = make(RECIPES[name]), inputs()
    training.give_main_grads(layer, training.FEATURES["fused"])
    compiled = torch.compile(layer, fullgraph=True)

    def step() -> None:
        compiled(x, m_splits, torch.tensor(True)).square().sum().backward()

    _, codes = run_and_get_code(step)
    code = "\n".join(codes)
    assert len(codes) == 2
    assert ".copy_(" not in code
    allocated = set(re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", code))
    if isinstance(layer, training.Routed):  # which has tensors between its products
        allocated &= {str([*t.shape])[1:-1] for w in layer.weights for t in (w, w.mT)}
    assert not allocated
    _, *expected = outcome(plain(x, m_splits), every_weight(plain))
    assert_all_same_bits((w.main_grad for w in every_weight(layer)), expected)


def test_mistakes() -> None:
    layer = make_layer(fuse_wgrad_accumulation=True, single_grouped_weight=False)
    assert sentence(lambda: layer(*inputs())) == (
        "GroupedLinear: fuse_wgrad_accumulation adds to weight0.main_grad, which is not set"
    )
    give_main_grads(layer)
    layer.weight1.requires_grad_(False)
    assert sentence(lambda: layer(*inputs())) == (
        "GroupedLinear: fuse_wgrad_accumulation computes the gradients of all experts, but only 2 "
        "of 3 require one"
    )
    with torch.no_grad():  # nothing is asked of main_grad
        make_layer(fuse_wgrad_accumulation=True)(*inputs())
    frozen = make_layer(fuse_wgrad_accumulation=True)
    frozen.weight.requires_grad_(False)
    frozen(*inputs()).sum().backward()
    mlp = make_mlp(fuse_wgrad_accumulation=True)
    mlp.weights[0].main_grad = torch.zeros_like(mlp.weights[0], requires_grad=False)
    assert sentence(lambda: mlp(*inputs())) == (
        "GroupedMLP: fuse_wgrad_accumulation adds to down_proj.main_grad, which is not set"
    )


# --- deferred -------------------------------------------------------------------------------------


@EVERY_RECIPE
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@FORMS
def test_several_in_flight(single: bool, fused: bool, recipe: Recipe | None, device: str) -> None:
    """First in, first out; each exactly once; bias gradients come with the main backward."""
    options = {"fuse_wgrad_accumulation": fused, "single_grouped_weight": single}
    layer = make_layer(recipe, device, delay_wgrad_compute=True, **options)
    plain = make_layer(recipe, device, **options)
    totals = [give_main_grads(x, value=0.0) for x in (layer, plain)]

    def grads(of: nn.Module) -> Tensor:
        if fused:
            return totals[of is plain].clone()
        parts = [w.grad for w in weights_of(of)]
        return (parts[0] if single else torch.stack(parts)).clone()

    expected = []
    for seed in range(3):
        for called in (layer, plain):
            x, m_splits = inputs(device, seed)
            called(x, m_splits).square().sum().backward()
        expected.append(grads(plain))
        assert_same_bits(layer.bias.grad, plain.bias.grad)
    assert all(w.grad is None for w in weights_of(layer))
    for right in expected:
        layer.backward_dw()
        assert_same_bits(grads(layer), right)
    assert sentence(layer.backward_dw) == (
        "GroupedLinear: backward_dw: no backward has left anything to do"
    )


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_hooks_run_with_the_gradient(fused: bool) -> None:
    layer = make_layer(delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    give_main_grads(layer)
    weight, fired = layer.weight, []
    weight.register_post_accumulate_grad_hook(lambda w: fired.append("post"))
    weight.register_hook(lambda grad: fired.append("tensor"))
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *grads: fired.append("node"))
    layer(*inputs()).sum().backward()
    assert not fired
    layer.backward_dw()
    undelayed = make_layer(fuse_wgrad_accumulation=fused)
    give_main_grads(undelayed)
    seen = []
    undelayed.weight.register_post_accumulate_grad_hook(lambda w: seen.append("post"))
    undelayed.weight.register_hook(lambda grad: seen.append("tensor"))
    node_too = undelayed.weight.expand_as(undelayed.weight).grad_fn.next_functions[0][0]
    node_too.register_hook(lambda *grads: seen.append("node"))
    undelayed(*inputs()).sum().backward()
    assert sorted(fired) == sorted(seen)
    assert "post" in fired


def test_deferred_with_nothing_else_to_do() -> None:
    """Neither x nor a bias asks for a backward: there is one all the same."""
    layer, (x, m_splits) = make_layer(delay_wgrad_compute=True, bias=False), inputs()
    layer(x.detach(), m_splits).sum().backward()
    layer.backward_dw()
    plain = make_layer(bias=False)
    plain(x, m_splits).sum().backward()
    assert_same_bits(layer.weight.grad, plain.weight.grad)


def test_nothing_is_put_off_without_need() -> None:
    make_layer(delay_wgrad_compute=False).backward_dw()
    layer = make_layer(delay_wgrad_compute=True)
    with torch.no_grad():
        layer(*inputs())
    layer.weight.requires_grad_(False)
    layer(*inputs()).sum().backward()
    layer.backward_dw()
    assert layer.bias.grad is not None


def test_what_was_put_off_stays_with_its_layer() -> None:
    """Not with a copy, nor with a weight that was frozen since, for a later step to find."""
    layer, (x, m_splits) = make_layer(delay_wgrad_compute=True), inputs()
    layer(x, m_splits).sum().backward()
    nothing = "GroupedLinear: backward_dw: no backward has left anything to do"
    assert sentence(deepcopy(layer).backward_dw) == nothing
    assert sentence(pickle.loads(pickle.dumps(layer)).backward_dw) == nothing
    layer.weight.requires_grad_(False)
    layer.backward_dw()
    layer.weight.requires_grad_(True)
    assert sentence(layer.backward_dw) == nothing


@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["none", "block"])
@pytest.mark.parametrize("kind", ["main_grad", "later", "mlp", "sorted", "sorted_unweighted"])
def test_the_gradient_of_x_alone(kind: str, recipe: Recipe | None) -> None:
    """Asked for before the backward, as by a pipeline or an adversary, it adds to no main_grad."""
    (x, m_splits), chosen = inputs(), torch.arange(T)[:, None] % E
    grads: list[list[Tensor]] = []
    for asks in (False, True):
        layer: nn.Module = make_layer(recipe, fuse_wgrad_accumulation=True)
        if kind == "later":
            layer = make_layer(recipe, delay_wgrad_compute=True)
        call: Any = layer
        if kind.startswith(("mlp", "sorted")):
            torch.manual_seed(0)
            layer = GroupedMLP(E, K, N, recipe=recipe, fuse_wgrad_accumulation=True)
            call = layer if kind == "mlp" else layer.forward_sorted
        for p in layer.parameters():
            p.main_grad = torch.zeros_like(p, requires_grad=False)
        routed = (torch.ones(T, 1), chosen) if kind == "mlp" else (m_splits,)
        routed += (torch.rand(T),) if kind == "sorted" else ()
        loss = call(x, *routed).square().sum()
        if asks:
            torch.autograd.grad(loss, x, retain_graph=True)
            assert not any(p.main_grad.any() for p in layer.parameters())
        loss.backward()
        if kind == "later":
            assert isinstance(layer, GroupedLinear)
            layer.backward_dw()
            assert sentence(layer.backward_dw).endswith("no backward has left anything to do")
        grads.append([p.main_grad if p.grad is None else p.grad for p in layer.parameters()])
    for a, e in zip(*grads, strict=True):
        assert_same_bits(a, e)
        assert a.any()


@pytest.mark.parametrize("single", [True, False], ids=["one", "apart"])
def test_deferred_of_weights_that_were_put_in_place(single: bool) -> None:
    """What the forward used learns: not the layer's own weight, nor one that is computed again."""
    gradients = []
    for delay in (False, True):
        torch.manual_seed(0)
        layer = linear_of(
            E, K, N, bias=False, delay_wgrad_compute=delay, single_grouped_weight=single
        )
        own = list(layer.parameters())
        low, high = (torch.randn(*sizes, requires_grad=True) for sizes in ((E, N, 2), (E, 2, K)))
        whole = low @ high + torch.stack([p.detach() for p in own]).view(E, N, K)
        parts = (whole,) if single else whole.unbind()
        names = dict(layer.named_parameters())
        x, m_splits = torch.randn(T, K), torch.tensor([10, 0, 25])
        y = torch.func.functional_call(layer, dict(zip(names, parts, strict=True)), (x, m_splits))
        y.square().sum().backward()
        assert (low.grad is None) == delay
        layer.backward_dw()
        assert all(p.grad is None for p in own)
        gradients.append((low.grad, high.grad))
    for plain, later in zip(*gradients, strict=True):
        assert_same_bits(later, plain)


def test_overwritten_before_its_turn() -> None:
    """As autograd tells of what it saved; scales and quantized operands belong to nobody else."""
    layer, (x, m_splits) = make_layer(delay_wgrad_compute=True), inputs()
    layer(x, m_splits).sum().backward()
    with torch.no_grad():
        x.zero_()
    assert sentence(layer.backward_dw) == (
        "GroupedLinear: backward_dw: the layer's input, or the gradient of its output, was "
        "modified in place since the backward"
    )


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def test_deferral_keeps_no_graph() -> None:
    layer, (x, m_splits) = make_layer(delay_wgrad_compute=True), inputs()
    hidden = Identity.apply(x)
    alive = weakref.ref(hidden.grad_fn)
    layer(hidden, m_splits).sum().backward()
    del hidden
    gc.collect()
    assert alive() is None


def test_main_grads_are_apart() -> None:
    layer = make_layer(fuse_wgrad_accumulation=True, single_grouped_weight=False)
    give_main_grads(layer)
    layer.weight1 = layer.weight0
    assert sentence(lambda: layer(*inputs())) == (
        "GroupedLinear: fuse_wgrad_accumulation needs a main_grad of its own for each expert, "
        "and some share one"
    )


# --- kept for the backward -----------------------------------------------------------------------


@EVERY_RECIPE
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "frozen"])
def test_a_quantized_weight_is_not_kept_in_high_precision(
    learns: bool, recipe: Recipe | None
) -> None:
    """Where it is no parameter that learns, which lives anyway."""
    w = torch.randn(E, N, K, requires_grad=learns)
    merged, (x, m_splits) = w * 2, inputs()
    alive = weakref.ref(merged)
    y = grouped_linear(x, merged, m_splits, None, recipe, state_for(recipe, E, "cpu"))
    if recipe is None:  # which reads it in dgrad, and lets go of it then
        y.sum().backward()
    del merged
    gc.collect()
    assert alive() is None
    if recipe is not None:
        y.sum().backward()
    assert (w.grad is not None) == learns


def keep_ours(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = getattr(op, "namespace", "") == "grouped_linear"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
@OF_EACH
def test_selective_checkpointing_that_keeps_our_ops(
    make: Any, recipe: Recipe | None, device: str, poisoned: None
) -> None:
    """What a kept op returned is not computed again, so nothing may be filled by one."""
    layer, (x, m_splits) = make(recipe, device), inputs(device)
    contexts = partial(create_selective_checkpoint_contexts, keep_ours)
    gradients = []
    for options in ({}, {"context_fn": contexts}):
        y = checkpoint(layer, x, m_splits, use_reentrant=False, **options)
        gradients.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    assert_all_same_bits(*gradients)


def test_mx_blocks_of_a_weight_end_with_its_expert() -> None:
    """Also in a dispatch mode, where another op rounds. 48 columns are a block and a half."""
    layer = GroupedLinear(2, 32, 48, False, recipe=RECIPES["mxfp8"])
    layer.weight.data[1].mul_(2**20)
    x, contexts = (
        torch.randn(20, 32, requires_grad=True),
        partial(create_selective_checkpoint_contexts, keep_ours),
    )
    gradients = []
    for options in ({}, {"context_fn": contexts}):
        y = checkpoint(layer, x, [12, 8], use_reentrant=False, **options)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert_same_bits(*gradients)


@EVERY_RECIPE
@OF_EACH
def test_selective_checkpointing_that_keeps_gemms(make: Any, recipe: Recipe | None) -> None:
    """ops.GEMMS as a policy: a recompute multiplies nothing."""
    layer, (x, m_splits) = make(recipe), inputs()
    names = {op._schema.name.removeprefix("grouped_linear::") for op in ops.GEMMS}

    def gemms(calls: Calls) -> int:
        return sum(n for op, n in calls.counts.items() if op.split(" ")[0] in names)

    multiplied = []
    contexts = partial(create_selective_checkpoint_contexts, [*ops.GEMMS])
    for options in ({}, {"context_fn": contexts}):
        with Calls() as forward:
            y = checkpoint(layer, x, m_splits, use_reentrant=False, **options)
        with Calls() as backward:
            y.sum().backward()
        multiplied.append((gemms(forward), gemms(backward)))
    (in_forward, recomputed), (again, kept) = multiplied
    assert again == in_forward == (2 if make is make_mlp else 1)
    assert recomputed - kept == in_forward


@EVERY_RECIPE
@pytest.mark.parametrize(
    "options",
    [
        {"lora": Lora(8, alpha=16)},
        {"save_gate_up_in_fp8": True, "activation": SwiGLU(limit=0.1)},
        {"save_gate_up_in_fp8": True, "activation": SwiGLU(limit=0.1, interleaved=True)},
    ],
    ids=["scaled_adapter", "limit_in_fp8", "interleaved_limit_in_fp8"],
)
def test_kept_results_are_not_written(
    options: dict[str, Any], recipe: Recipe | None, device: str
) -> None:
    """torch refuses a kept tensor that was written since, and a recompute would read it.

    A recompute would also write a kept view, which is of the forward's numbers.
    """
    mlp = with_numbers_in_adapters(GroupedMLP(E, K, N, recipe=recipe, device=device, **options))
    x, routed = inputs(device)[0], torch.rand(T, E, device=device).topk(2)
    learning, gradients = [x, *(p for p in mlp.parameters() if p.requires_grad)], []
    policies: list[Any] = [
        [*ops.GEMMS],
        lambda _, op, *args, **kwargs: any(r.alias_info for r in op._schema.returns),  # views
        lambda *args, **kwargs: True,
    ]
    contexts = [partial(create_selective_checkpoint_contexts, policy) for policy in policies]
    for how in ({}, *({"context_fn": context} for context in contexts)):
        y = checkpoint(mlp, x, *routed, use_reentrant=False, **how)
        gradients.append(torch.autograd.grad(y.square().sum(), learning))
    for of_policy in gradients[1:]:
        assert_all_same_bits(of_policy, gradients[0])


@EVERY_RECIPE
def test_saved_input(recipe: Recipe | None) -> None:
    """x itself is kept, and its columns are quantized in the backward."""
    if recipe is RECIPES["delayed"]:
        assert sentence(lambda: make_layer(recipe, save_original_input=True)) == (
            "GroupedLinear: save_original_input quantizes the input once more in the backward, "
            "by when the scales of DelayedScaling may have changed"
        )
        return
    layer, (x, m_splits) = make_layer(recipe, save_original_input=True), inputs()
    with saved_tensors() as saved, Calls() as forward:
        y = layer(x, m_splits)
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    columns = [op for op in forward.counts.elements() if "group_" in op and "columnwise" in op]
    assert len(columns) == (recipe is RECIPES["mxfp8"])  # the weight's, where a mode looks
    with Calls() as backward:
        y.square().sum().backward()
    quantizers = [op for op in backward.counts.elements() if op.startswith(("group_q", "group_r"))]
    assert len(quantizers) == (0 if recipe is None else 2)


@pytest.mark.parametrize(
    ("recipe", "flag"), in_turn(RECIPES, {"bool": bool, "tensor": torch.tensor})
)
def test_micro_batches_whose_recompute_is_compiled(
    flag: Any, recipe: Recipe | None, device: str
) -> None:
    """It quantizes the weight once more, to the same bytes, and records the same amax."""
    results = []
    for compiled in (False, True):
        layer = make_layer(recipe, device, cache_weights=True, fuse_wgrad_accumulation=True)
        main_grad, call = give_main_grads(layer, value=torch.nan), layer
        if compiled:
            again = partial(checkpoint, layer, use_reentrant=False)
            call = torch.compile(again, fullgraph=True, backend="aot_eager")
        xs = []
        for i in range(2):
            x, m_splits = inputs(device, seed=i)
            first = torch.tensor(i == 0, device=device) if flag is torch.tensor else i == 0
            call(x, m_splits, first).square().sum().backward()
            xs.append(x)
        results.append([main_grad, *(x.grad for x in xs), layer.bias.grad, *layer.buffers()])
    assert_all_same_bits(*results)


def test_only_what_is_asked_for() -> None:
    """Of a parameter an expert; test_layer.py has the rest."""
    layer = make_layer(RECIPES["block"], single_grouped_weight=False, cache_weights=True)
    x, m_splits = inputs()

    def work(x_needs: bool, weight_needs: bool, bias_needs: bool) -> set[str]:
        for w in weights_of(layer):
            w.requires_grad_(weight_needs)
        layer.bias.requires_grad_(bias_needs)
        y = layer(x.detach().requires_grad_(x_needs), m_splits, True)
        with Calls() as calls:
            y.backward(torch.ones_like(y))
        return set(calls.counts)

    dgrad, wgrad = "grouped_scaled_mm", "grouped_scaled_mm_wgrad"
    assert work(False, False, True) == {"grouped_bias_grad"}
    assert work(True, False, False) == {"group_quantize rowwise", dgrad}
    assert work(False, True, False) == {"group_quantize columnwise", wgrad}
    every = "group_quantize rowwise columnwise bias_grad"
    assert work(True, True, True) == {every, dgrad, wgrad}


def test_some_experts_frozen() -> None:
    layer, plain = make_layer(single_grouped_weight=False), make_layer()
    layer.weight1.requires_grad_(False)
    for called in (layer, plain):
        called(*inputs()).square().sum().backward()
    assert layer.weight1.grad is None
    assert_same_bits(layer.weight2.grad, plain.weight.grad[2])


@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["none", "block"])
@pytest.mark.parametrize("make", [make_layer, make_mlp])
def test_a_gradient_penalty_is_refused(make: Any, recipe: Recipe | None) -> None:
    """Not taken for a constant where the incoming gradient is one, as that of a sum is."""
    layer, (x, m_splits) = make(recipe), inputs()
    y = layer(x, m_splits)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_same_bits(dx.detach(), expected)
    loss = y.sum() + dx.square().sum()
    with pytest.raises(RuntimeError, match="grouped_linear: there is no second derivative"):
        torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)
    with pytest.raises(RuntimeError, match="grouped_linear: there is no second derivative"):
        loss.backward()


@EVERY_RECIPE
@pytest.mark.parametrize("make", [make_layer, make_mlp])
def test_what_else_autograd_offers_is_refused(make: Any, recipe: Recipe | None) -> None:
    """A Hessian, forward mode, torch.func: never answered with zeros."""
    layer, (x, m_splits) = make(recipe), inputs()
    x = x.detach()

    def call(x: Tensor) -> Tensor:
        y: Tensor = layer(x, m_splits)
        return y

    def loss(x: Tensor) -> Tensor:
        return call(x).square().sum()

    with pytest.raises(RuntimeError, match="there is no second derivative"):
        torch.autograd.functional.hessian(loss, x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        call(forward_ad.make_dual(x, x))
    for function in (torch.func.grad(loss), torch.func.jacrev(call)):
        with pytest.raises(RuntimeError, match="functorch transforms"):
            function(x)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.vmap(call)(x[None])


@pytest.mark.parametrize("kind", ["layer", "mlp", "router", "gather", "combine"])
def test_transforms_are_refused_in_a_graph(kind: str) -> None:
    """torch.func would drop their backward there, and give zeros."""
    layer, mlp, router = make_layer(RECIPES["block"]), GroupedMLP(E, K, N), nn.Linear(K, E)
    (x, m_splits), chosen = inputs(), torch.arange(T)[:, None] % E
    x, routing = x.detach(), ops.sort_by_expert(chosen, E)
    ones = torch.ones(T, 1, requires_grad=True)
    calls = {
        "layer": lambda x: layer(x, m_splits),
        "mlp": lambda x: mlp(x, ones, chosen),
        "router": lambda x: router_logits((x * ones), router.weight)[0],
        "gather": lambda x: GatherFunction.apply(x * ones, *routing),
        "combine": lambda x: CombineFunction.apply(x, ones, *routing),
    }

    def loss(x: Tensor) -> Tensor:
        y: Tensor = calls[kind](x)
        return y.square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    for function in (torch.func.grad(loss), torch.func.jacrev(loss)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=r"not for torch\.func's transforms"):
            compiled(x)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # after a graph break
        torch.compile(torch.func.grad(loss), backend="aot_eager")(x)


# --- regions of a graph ---------------------------------------------------------------------------

#: torch refuses a region that writes a tensor, as delayed scaling does, or that has parts of a
#: parameter as inputs, as of a quantized weight.
IN_REGIONS = {name: RECIPES[name] for name in ("none", "block", "mxfp8")}


@pytest.mark.parametrize(("recipe", "is_mlp"), in_turn(IN_REGIONS, {"mlp": True, "layer": False}))
def test_in_a_region_of_a_graph(is_mlp: bool, recipe: Recipe | None) -> None:
    """nested_compile_region and torch.cond take no views of a parameter as further inputs."""
    torch.manual_seed(0)
    layer: Any = (GroupedMLP if is_mlp else GroupedLinear)(E, K, 64, recipe=recipe)
    (x, m_splits), chosen, ones = inputs(), torch.arange(T)[:, None] % E, torch.ones(T, 1)

    def call(x: Tensor) -> Tensor:
        y: Tensor = layer(x, ones, chosen) if is_mlp else layer(x, m_splits)
        return y

    region = torch.compiler.nested_compile_region(call)

    def nested(x: Tensor) -> Tensor:
        y: Tensor = region(x)
        return y

    def branches(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x[0, 0] < 9, call, lambda x: 2 * call(x), (x,))
        return y

    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    expected = outcome(call(x), leaves)
    for function in (nested, branches):
        y = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert_all_same_bits(outcome(y, leaves), expected)


# --- a backward in two halves ---------------------------------------------------------------------


@OF_EACH
@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["none", "block"])
def test_main_grad_of_a_backward_in_two_halves(recipe: Recipe | None, make: Any) -> None:
    """As pipelines without bubbles run it: first for x, then for the weights, by torch itself."""
    layer, before, (given, m_splits) = (
        make(recipe, fuse_wgrad_accumulation=True),
        nn.Linear(K, K),
        inputs(),
    )
    fused = every_weight(layer)
    results = []
    for in_halves in (False, True):
        for p in fused:
            p.main_grad = torch.ones_like(p, dtype=FP32)
        parameters = [*before.parameters(), *layer.parameters()]
        for t in (given, *parameters):
            t.grad = None
        for _ in range(2):  # micro-batches
            y = layer(before(given), m_splits)
            dy = torch.ones_like(y)
            if in_halves:
                _, groups = stage_backward_input([y], [dy], [given], iter(parameters))
                stage_backward_weight(iter(parameters), groups)
            else:
                y.backward(dy)
        others = [p.grad for p in parameters if not any(p is w for w in fused)]
        results.append([given.grad, *others, *(p.main_grad for p in fused)])
    assert_all_same_bits(*results)
    assert all(p.grad is None or not p.grad.any() for p in fused)
