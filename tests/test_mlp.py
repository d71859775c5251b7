# SPDX-License-Identifier: Apache-2.0
"""GroupedMLP against float64, and against the same ops one after the other.

T tokens, C experts chosen for a token, E experts, H features of a token, F features of an expert.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GeGLU,
    GroupedMLP,
    Recipe,
    SquaredReLU,
    SwiGLU,
    grouped_linear,
    grouped_mlp,
    ops,
    update_scales,
)
from grouped_linear.autograd.routing import CombineFunction, GatherFunction
from grouped_linear.recipes.quantize import recipe_of_wgrad
from support.calls import Calls
from support.compare import assert_all_same_bits, assert_same_bits, outcome
from support.devices import needs_gpu
from support.errors import said
from support.formats import composed
from support.graphs import STRICT_GRAPHS, captured
from support.mlp import (
    KINDS,
    OTHERS,
    E,
    F,
    H,
    assert_one_graph,
    exact,
    function_of,
    near,
    ours,
    run,
    states_of,
)
from support.mlp import leaves_of as drawn_leaves
from support.mlp import truth as true_mlp
from support.pairs import in_turn, pairwise
from support.recipes import MORE_RECIPES
from support.recipes import RECIPES as SIMPLE_RECIPES
from support.saved import saved_tensors
from support.swiglu import Swiglu
from support.tensors import BF16, DTYPES, FP16, FP32

RECIPES = pytest.mark.parametrize("recipe", MORE_RECIPES.values(), ids=MORE_RECIPES)
# The experts of each token: some without tokens, and choices of none (-1 and past E).
ROUTINGS = {
    "random": torch.stack(
        [torch.randperm(E - 1, generator=torch.Generator().manual_seed(i))[:3] for i in range(90)]
    ),
    "all_to_one": torch.full((140, 1), 2),
    "one_expert_twice": torch.tensor([[1, 1], [1, 3], [3, 3]]),
    "some_to_none": torch.tensor([[-1, 4], [E, -1], [0, E + 3], [2, 4]]),
    "all_to_none": torch.full((3, 2), -1),
    "no_tokens": torch.empty(0, 2, dtype=torch.int64),
}
EVERY_ROUTING = pytest.mark.parametrize("routing", ROUTINGS)
FORMS_OF_SWIGLU = [kind for kind in KINDS if kind not in OTHERS]
Leaves = list[Tensor]


def leaves_of(
    experts_TC: Tensor, device: str, dtype: torch.dtype, kind: str = "plain", features: int = F
) -> Leaves:
    return drawn_leaves(experts_TC.shape, *KINDS[kind], device, dtype, features)


def run_composed(
    experts_TC: Tensor, recipe: Recipe, leaves: Leaves, kind: str = "plain"
) -> list[Tensor]:
    """Of a recipe of formats that are functions, by which nothing is fused and no row gathered.

    Down's gradient is that of a wgrad in 16 bits, where sizes choose it.
    """
    results = run(ours(experts_TC, composed(recipe), None, kind), leaves)
    x_TH, down = leaves[0], leaves[3]
    of_down = recipe_of_wgrad(recipe, x_TH.dtype, down.size(-1))
    if of_down is not recipe:
        results[4] = run(ours(experts_TC, composed(of_down), None, kind), leaves)[4]
    return results


def truth(experts_TC: Tensor, kind: str = "plain") -> Callable[..., Tensor]:
    return true_mlp(experts_TC, function_of(kind))


def unfused(
    experts_TC: Tensor, recipe: Recipe | None, states: Any, kind: str = "plain"
) -> Callable[..., Tensor]:
    """Two grouped layers with SwiGLU between them, rows gathered and combined around them."""
    state_of_gate_up, state_of_down = states or (None, None)

    def mlp(
        x_TH: Tensor, weight_TC: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor
    ) -> Tensor:
        of_gate_up, of_down = biases or (None, None)
        routing = ops.sort_by_expert(experts_TC, E)
        m_splits = routing.offs.diff(prepend=routing.offs.new_zeros(1))
        x_RH = GatherFunction.apply(x_TH, *routing)
        gate_up_RG = grouped_linear(x_RH, gate_up, m_splits, of_gate_up, recipe, state_of_gate_up)
        h_RF = Swiglu.apply(gate_up_RG, routing.offs, KINDS[kind][0])
        y_RH = grouped_linear(h_RF, down, m_splits, of_down, recipe, state_of_down)
        return CombineFunction.apply(y_RH, weight_TC, *routing)

    return mlp


@EVERY_ROUTING
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The gradient of gate_up has five roundings of up to half a unit in the last place before it.
    [(FP32, 1e-5), (FP16, 2.0**-10), (BF16, 2.0**-7)],
    ids=str,
)
def test_numbers(routing: str, dtype: torch.dtype, tolerance: float, device: str) -> None:
    experts = ROUTINGS[routing]
    leaves = leaves_of(experts, device, dtype)
    actual = run(ours(experts.to(device), None), leaves)
    assert [t.dtype for t in actual] == [dtype, *(t.dtype for t in leaves)]
    near(actual, run(truth(experts), exact(leaves)), tolerance)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        *((kind, FP32, 1e-5) for kind in KINDS),
        *((kind, *of) for kind in OTHERS for of in ((FP16, 2.0**-9), (BF16, 2.0**-6))),
    ],
)
def test_every_kind(kind: str, dtype: torch.dtype, tolerance: float, device: str) -> None:
    """In float32, which tells what a limit stops as float64 does; without a limit in each dtype."""
    for routing in ("random", "some_to_none"):
        experts = ROUTINGS[routing]
        leaves = leaves_of(experts, device, dtype, kind)
        actual = run(ours(experts.to(device), None, None, kind), leaves)
        assert [t.dtype for t in actual] == [dtype, *(t.dtype for t in leaves)]
        near(actual, run(truth(experts, kind), exact(leaves)), tolerance)


@pytest.mark.parametrize("recipe", SIMPLE_RECIPES.values(), ids=SIMPLE_RECIPES)
@pytest.mark.parametrize("kind", OTHERS)
def test_recipes_are_near_float64(kind: str, recipe: Recipe | None, device: str) -> None:
    """A product of e4m3 operands is off by 4% of its norm: see test_layer.py."""
    experts = ROUTINGS["random"]
    leaves = leaves_of(experts, device, BF16, kind)
    actual = run(ours(experts.to(device), recipe, states_of(recipe, device), kind), leaves)
    near(actual, run(truth(experts, kind), exact(leaves)), 0.2)


ROUTINGS_AND_KINDS = {
    f"{routing}-{kind}": (routing, kind)
    for routing, kind in (
        *((r, "plain") for r in ROUTINGS),
        *(("some_to_none", k) for k in FORMS_OF_SWIGLU if k != "plain"),
    )
}


@pytest.mark.parametrize(("routing", "kind"), ROUTINGS_AND_KINDS.values())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_is_unfused(routing: str, kind: str, dtype: torch.dtype, device: str) -> None:
    experts = ROUTINGS[routing].to(device)
    leaves = leaves_of(experts, device, dtype, kind)
    actual = run(ours(experts, Float8BlockScaling(), None, kind), leaves)
    expected = run_composed(experts, Float8BlockScaling(), leaves, kind)
    names = ["y", "x", "weights", "gate_up", "down", "gate_up_bias", "down_bias"]
    for name, a, e in zip(names, actual, expected, strict=False):
        if name == "weights":  # a sum over F by tiles, and by rows
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5 * float(e.abs().sum()))
        else:
            assert_same_bits(a, e)


@pytest.mark.parametrize(
    ("routing_and_kind", "recipe", "dtype"),
    pairwise(ROUTINGS_AND_KINDS, MORE_RECIPES, {str(dtype): dtype for dtype in DTYPES}),
)
def test_two_layers_around_swiglu(
    routing_and_kind: tuple[str, str], recipe: Recipe | None, dtype: torch.dtype, device: str
) -> None:
    """The same outputs, to the bit. Their gradients are weighted before dgrad, ours after it."""
    routing, kind = routing_and_kind
    experts = ROUTINGS[routing].to(device)
    leaves = leaves_of(experts, device, dtype, kind)
    states = [states_of(recipe, device) for _ in range(2)]
    actual = run(ours(experts, recipe, states[0], kind), leaves)
    expected = run(unfused(experts, recipe, states[1], kind), leaves)
    assert_same_bits(actual[0], expected[0])
    # Each side rounds a gradient a few times, in BF16 to 2^-9. A GEMM of e4m3 operands is off by 4
    # to 7%, each side's by its own.
    near(actual, [e.double().cpu() for e in expected], 2.0**-6 if recipe is None else 0.25)


@pytest.mark.parametrize("down_learns", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Float8BlockScaling(), Float8BlockScaling(wgrad=BF16)],
    ids=["bf16", "block", "bf16_wgrad"],
)
def test_gathered_in_gemms_or_before(recipe: Recipe, down_learns: bool, device: str) -> None:
    """Of formats that are functions no GEMM gathers rows."""
    experts = ROUTINGS["random"].to(device)
    *leaves, down = leaves_of(experts, device, BF16)

    expected = run_composed(experts, recipe, [*leaves, down])
    if down_learns:
        actual = run(ours(experts, recipe), [*leaves, down])
    else:
        actual = run(lambda *given: ours(experts, recipe)(*given, down.detach()), leaves)
    for i, (a, e) in enumerate(zip(actual, expected, strict=False)):
        if i == 2 and recipe != Recipe():  # of the routing weights: a sum over F by tiles, by rows
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5 * float(e.abs().sum()))
        else:
            assert_same_bits(a, e)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("features", [256, 272])
def test_down_s_wgrad_of_few_features_is_in_16_bits(
    features: int, dtype: torch.dtype, device: str
) -> None:
    """Of block scaling and 16-bit tokens, up to 256 features inside an expert."""
    experts, recipe = ROUTINGS["some_to_none"].to(device), Float8BlockScaling()
    leaves = leaves_of(experts, device, dtype, features=features)
    with Calls() as calls:
        actual = run(ours(experts, recipe), leaves)
    in_16_bits = features == 256 and dtype == BF16
    assert calls.counts["grouped_mm_wgrad"] == in_16_bits
    assert calls.counts["grouped_scaled_mm_wgrad"] == 2 - in_16_bits
    of_down = Float8BlockScaling(wgrad=BF16) if in_16_bits else recipe
    assert_same_bits(actual[4], run(ours(experts, composed(of_down)), leaves)[4])
    assert_same_bits(actual[3], run(ours(experts, composed(recipe)), leaves)[3])


def test_every_fused_op_and_no_other(device: str) -> None:
    experts = ROUTINGS["random"].to(device)
    leaves = leaves_of(experts, device, BF16)
    with Calls() as calls:
        run(ours(experts, Float8BlockScaling()), leaves)
    assert calls.counts == {
        "sort_by_expert": 1,
        "group_quantize rowwise": 2,  # x and the outputs' gradient, each token once
        "group_quantize columnwise": 1,  # x as it is gathered, for wgrad
        "gather_sum": 2,  # the outputs, x's gradient
        "quantize_weight rowwise columnwise": 2,
        "group_quantize_swiglu rowwise": 1,
        "group_quantize_swiglu_grad rowwise columnwise": 1,
        "grouped_scaled_mm": 4,
        "grouped_scaled_mm_wgrad": 1,
        "grouped_mm_wgrad": 1,  # of few features: down's
    }
    with torch.no_grad(), Calls() as calls:
        ours(experts, Float8BlockScaling())(*leaves)
    assert calls.counts == {
        "sort_by_expert": 1,
        "group_quantize rowwise": 1,
        "quantize_weight rowwise": 2,
        "group_quantize_swiglu rowwise": 1,
        "grouped_scaled_mm": 2,
        "gather_sum": 1,
    }
    for leaf in leaves[:2]:
        leaf.requires_grad_(False)
    y = ours(experts, Float8BlockScaling())(*leaves)
    with Calls() as calls:
        y.sum().backward()  # nobody reads the gradient of gate_up rowwise
    assert calls.counts["group_quantize_swiglu_grad columnwise"] == 1
    assert calls.counts["grouped_scaled_mm"] == 1


@pytest.mark.parametrize(
    ("recipe", "kind", "saved"),
    [
        *((name, "gpt_oss", False) for name in MORE_RECIPES),
        *(("block", kind, saved) for kind in OTHERS for saved in (False, True)),
    ],
)
def test_only_the_gradients_asked_for(recipe: str, kind: str, saved: bool, device: str) -> None:
    experts, of = ROUTINGS["some_to_none"].to(device), MORE_RECIPES[recipe]
    leaves = leaves_of(experts, device, BF16, kind)

    def call() -> Callable[..., Tensor]:
        return ours(experts, of, states_of(of, device), kind, save_gate_up_in_fp8=saved)

    expected = run(call(), leaves)[1:]
    for subset in range(1, 2 ** len(leaves), 1 if kind == "gpt_oss" else 3):
        for i, leaf in enumerate(leaves):
            leaf.grad = None
            leaf.requires_grad_(bool(subset >> i & 1))
        y = call()(*leaves)
        torch.manual_seed(2)
        y.backward(torch.randn(y.shape).to(y))
        for i, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
            if not leaf.requires_grad:
                assert leaf.grad is None
            elif i == 1 and kind == "gpt_oss":  # a sum over F by tiles, unquantized by rows
                torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)
            else:
                assert_same_bits(leaf.grad, gradient)


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
def test_biases_of_another_dtype(recipe: Recipe | None) -> None:
    """They are added in x's dtype, and their gradients have their own."""
    experts = ROUTINGS["random"]
    leaves = leaves_of(experts, "cpu", BF16, "bias")
    wide = [*leaves[:4], *(b.detach().float().requires_grad_() for b in leaves[4:])]
    expected, actual = (run(ours(experts, recipe, kind="bias"), of) for of in (leaves, wide))
    for a, e, same in zip(actual, expected, [True] * 5 + [False] * 2, strict=True):
        assert a.dtype == (e.dtype if same else FP32)
        assert_same_bits(a.to(e.dtype), e)


@RECIPES
def test_a_token_of_no_expert_reaches_nothing(recipe: Recipe | None, device: str) -> None:
    """Not even if it is NaN, as padding may be."""
    experts = torch.tensor([[0, 3], [-1, E], [3, 2]], device=device)
    x, *others = leaves_of(experts, device, BF16)
    results = []
    for padding in (1.0, torch.nan):
        with torch.no_grad():
            x[1] = padding
        results.append(run(ours(experts, recipe, states_of(recipe, device)), [x, *others]))
    for a, e in zip(*results, strict=True):
        assert a.isfinite().all()
        assert_same_bits(a, e)
    y, dx, d_weights, *_ = results[0]
    assert not any(t[1].any() for t in (y, dx, d_weights))


def test_a_weight_of_nan_for_no_expert() -> None:
    """As a router gives it for padding that is NaN."""
    mlp = GroupedMLP(E, H, F)
    x, experts = torch.randn(3, H), torch.tensor([[0, 1], [2, -1], [E, -5]])
    weights = torch.rand(3, 2)
    outside = (experts < 0) | (experts >= E)
    expected = mlp(x, weights, experts)
    spoilt = weights.masked_fill(outside, torch.nan).requires_grad_()
    with torch.no_grad():
        assert_same_bits(mlp(x, spoilt, experts), expected)
    y = mlp(x, spoilt, experts)
    assert_same_bits(y, expected)
    y.sum().backward()
    assert not spoilt.grad[outside].any()


def test_leading_dimensions(device: str) -> None:
    mlp = GroupedMLP(E, H, F, device=device)
    given = torch.randn(3, 4, H, device=device), *torch.rand(3, 4, E, device=device).topk(2)
    flat = mlp(*(t.flatten(0, 1) for t in given))
    assert_same_bits(mlp(*given), flat.view(3, 4, H))


def mlp_of(
    kind: str, recipe: Recipe | None, device: str, dtype: torch.dtype | None = None, **more: Any
) -> GroupedMLP:
    activation, bias = KINDS[kind]
    options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": dtype, **more}
    return GroupedMLP(E, H, F, bias=bias, activation=activation, **options)


@pytest.mark.parametrize(
    ("kind", "recipe", "saved"),
    [
        *in_turn(
            {"plain": "plain", "gpt_oss": "gpt_oss"},
            {name: MORE_RECIPES[name] for name in (*SIMPLE_RECIPES, "block_bf16_wgrad")},
            {"as_it_is": False},
        ),
        *in_turn(
            {kind: kind for kind in OTHERS},
            {name: MORE_RECIPES[name] for name in ("none", "block")},
            {"as_it_is": False, "in_fp8": True},
        ),
    ],
)
def test_compiled_in_one_graph(kind: str, recipe: Recipe | None, saved: bool, device: str) -> None:
    mlp = mlp_of(kind, recipe, device, BF16, save_gate_up_in_fp8=saved)
    assert_one_graph(mlp, device, seeds=2)


def test_compiled_for_each_activation(device: str) -> None:
    """One is a constant of a graph: another has another."""
    experts = ROUTINGS["random"].to(device)
    counter = CompileCounterWithBackend("aot_eager")
    leaves = leaves_of(experts, device, BF16)

    def call(activation: SwiGLU) -> Tensor:
        x_TH, weight_TC, *projections = leaves
        return grouped_mlp(x_TH, weight_TC, experts, *projections, activation=activation)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for limit in (None, None, 0.5, 0.5):  # every time another object
        assert_same_bits(compiled(SwiGLU(limit=limit)), call(SwiGLU(limit=limit)))
    assert counter.frame_count == 2


def test_one_compile_for_every_number_of_tokens(device: str) -> None:
    mlp = GroupedMLP(E, H, F, recipe=Float8BlockScaling(), device=device)
    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor, router: Tensor) -> Tensor:
        return mlp(x, *(x @ router).softmax(dim=-1).topk(2))

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    router = torch.randn(H, E, device=device, requires_grad=True)
    for T in [0, 1, *torch.randperm(300)[:48].tolist()]:
        x = torch.randn(T, H, device=device, requires_grad=True)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        leaves = [x, router, *mlp.parameters()]
        assert_all_same_bits(*(outcome(call(x, router), leaves) for call in (compiled, block)))
    assert counter.frame_count == 1


def test_tokens_that_differ_in_a_graph() -> None:
    mlp, inputs = GroupedMLP(E, H, F), (torch.randn(7, H), *torch.rand(7, E).topk(2))
    fewer = [t[: 3 + i].clone() for i, t in enumerate(inputs)]
    with pytest.raises(Exception, match="differ in their tokens"):
        torch.compile(mlp, backend="aot_eager")(*fewer)


def test_one_expert_a_token_without_a_dimension_for_it() -> None:
    """The sentence has the wanted shapes, also where sizes are symbols of Dynamo."""
    mlp, x = GroupedMLP(E, H, F), torch.randn(7, H)
    one = torch.rand(7, E).max(dim=-1)
    message = r"top_k_weights \[..., C\] and top_k_index \[..., C\] differ in their tokens: "
    with pytest.raises(RuntimeError, match=message):
        mlp(x, *one)
    with pytest.raises(Exception, match=message):
        torch.compile(mlp, fullgraph=True, dynamic=True, backend="eager")(x, *one)


def without_dropped(experts_TC: Tensor, max_rows: int) -> Tensor:
    """The choices for which there is no room, of the sorted ones, made those of no expert."""
    order = ops.sort_by_expert(experts_TC, E).choice[max_rows:].long()
    return experts_TC.flatten().index_fill(0, order, -1).view_as(experts_TC)


@pytest.mark.parametrize(
    ("room", "routing_and_kind", "recipe"),
    pairwise(
        {"none": 0, "few": 4, "most": 130, "all": None},
        {
            "random": ("random", "plain"),
            "some_to_none": ("some_to_none", "plain"),
            "all_to_none": ("all_to_none", "plain"),
            "no_tokens": ("no_tokens", "plain"),
            "gpt_oss": ("some_to_none", "gpt_oss"),
        },
        MORE_RECIPES,
    ),
)
def test_room_for_fewer_rows(
    room: int | None, routing_and_kind: tuple[str, str], recipe: Recipe | None, device: str
) -> None:
    """Who found room has the numbers that it has without a bound, who did not has none."""
    routing, kind = routing_and_kind
    experts = ROUTINGS[routing].to(device)
    max_rows = experts.numel() + 1 if room is None else room
    leaves = leaves_of(experts, device, BF16, kind)
    states = [states_of(recipe, device) for _ in range(2)]
    kept = without_dropped(experts, max_rows)
    with torch.no_grad():  # of what is dropped, it reaches nothing
        leaves[1].masked_fill_((kept < 0) & (experts >= 0), torch.nan)
    expected = run(ours(kept, recipe, states[0], kind), leaves)
    bounded = ours(experts, recipe, states[1], kind, max_rows=max_rows)
    assert_all_same_bits(run(bounded, leaves), expected)


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "of_tokens"])
def test_room_for_fewer_rows_compiled(constant: bool, device: str) -> None:
    """One graph, for any number of tokens and of choices; what is kept has the room's size."""
    mlp = GroupedMLP(E, H, F, recipe=Float8BlockScaling(), device=device)
    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        y: Tensor = mlp(x, scores, experts, max_rows=40 if constant else len(x))
        return y

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for T in (0, 1, 90, 17):
        x = torch.randn(T, H, device=device, requires_grad=True)
        inputs = x, *torch.rand(T, E, device=device).topk(2)
        for t in inputs:
            torch._dynamo.decorators.mark_unbacked(t, 0)
        with saved_tensors() as kept:
            y = block(*inputs)
        leaves = [x, *mlp.parameters()]
        assert_all_same_bits(outcome(y, leaves), outcome(compiled(*inputs), leaves))
        assert {len(t) for t in kept if t.size(-1) == 2 * F} == {
            min(2 * T, (40 if constant else T) + 1),
            E,
        }
    assert counter.frame_count == 1


def test_inductor(device: str) -> None:
    mlp = GroupedMLP(E, H, F, recipe=Float8BlockScaling(), device=device, dtype=BF16)
    x = torch.randn(2, 20, H, device=device, dtype=BF16, requires_grad=True)
    scores, experts = torch.rand(2, 20, E, device=device, requires_grad=True).topk(2)
    leaves = [x, scores, *mlp.parameters()]
    calls = mlp, torch.compile(mlp, fullgraph=True)
    for e, a in zip(*(outcome(call(x, scores, experts), leaves) for call in calls), strict=True):
        # A weighted sum fused into one kernel may round otherwise, and change what is quantized.
        assert (a.double() - e.double()).norm() < 2.0**-7 * e.double().norm()


def test_trains_with_delayed_scaling(device: str) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    mlp = GroupedMLP(E, H, F, recipe=recipe, device=device)
    experts = ROUTINGS["random"].to(device)
    x, weights, *_ = leaves_of(experts, device, FP32)
    y = mlp(x, weights, experts)
    y.sum().backward()
    update_scales(mlp)
    largest = mlp.gate_up_proj.detach().abs().amax(dim=(1, 2))
    assert mlp.gate_up_proj_state is not None
    assert_same_bits(mlp.gate_up_proj_state.weight.amax_history[0], largest)
    assert mlp.down_proj_state is not None
    for operand in (*mlp.gate_up_proj_state.operands, *mlp.down_proj_state.operands):
        assert operand.amax_history[0, : E - 1].all()  # the last expert has no tokens


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "block"])
@pytest.mark.parametrize("kind", FORMS_OF_SWIGLU)
def test_autocast(kind: str, recipe: Recipe | None, device: str) -> None:
    mlp = mlp_of(kind, recipe, device)
    experts = ROUTINGS["random"].to(device)
    x, weights, *_ = leaves_of(experts, device, FP32)
    with torch.autocast(device, dtype=BF16):
        y = mlp(x, weights, experts)
    parameters = [p if recipe else p.to(BF16) for p in mlp.parameters()]
    assert_same_bits(y, ours(experts, recipe, None, kind)(x.to(BF16), weights, *parameters))
    y.sum().backward()
    for leaf in (x, *mlp.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.dtype == FP32


@pytest.mark.parametrize("bias", [False, True])
def test_state_dict(bias: bool) -> None:
    mlp = GroupedMLP(E, H, F, bias=bias, dtype=BF16, device="meta")
    shapes = {name: tuple(t.shape) for name, t in mlp.state_dict().items()}
    biases = {"gate_up_proj_bias": (E, 2 * F), "down_proj_bias": (E, H)}
    weights = {"gate_up_proj": (E, 2 * F, H), "down_proj": (E, H, F)}
    assert shapes == (weights | biases if bias else weights)
    mlp.to_empty(device="cpu").reset_parameters()
    for name, p in mlp.named_parameters():
        bound = (H if "gate_up" in name else F) ** -0.5
        assert 0.9 * bound < p.abs().max() <= bound


def test_mistakes() -> None:
    """test_layer_mistakes.py has those that are GroupedLinear's, too."""
    fitting: dict[str, Any] = {
        "x": torch.randn(4, H),
        "top_k_weights": torch.rand(4, 2),
        "top_k_index": torch.zeros(4, 2).long(),
        "gate_up_proj": torch.zeros(E, 2 * F, H),
        "down_proj": torch.zeros(E, H, F),
    }
    x, weights, experts, _, down = fitting.values()

    def call(**changed: Any) -> Callable[[], Tensor]:
        return lambda: grouped_mlp(**{**fitting, **changed})

    none = {"top_k_weights": weights[:, :0], "top_k_index": experts[:, :0]}
    of_scalars = {"x": x[0], "top_k_weights": weights[0, 0], "top_k_index": experts[0, 0]}
    mistakes = [
        lambda: GroupedMLP(0, H, F),
        lambda: GroupedMLP(E, 20, F),
        call(activation=None),
        call(activation=torch.nn.functional.gelu),
        lambda: GeGLU("sigmoid"),
        lambda: SwiGLU(float("inf")),
        lambda: SwiGLU(limit=float("nan")),
        lambda: SwiGLU(interleaved=1),
        lambda: SwiGLU(cubic=-1.0),
        call(**of_scalars),
        call(**none),
        call(top_k_weights=weights[:, :1]),
        call(top_k_weights=weights.to(torch.complex64)),
        call(top_k_index=torch.zeros(4, 2)),
        call(down_proj=down[1:]),
        call(down_proj=torch.zeros(E, 2 * H, F)),
        call(gate_up_proj=torch.randn(E, 176, H)),
        call(activation=SquaredReLU()),
        call(activation=GeGLU(), gate_up_proj=torch.zeros(E, F, H)),
        call(activation=SquaredReLU(), gate_up_proj=torch.zeros(E, F, H - 16)),
        call(gate_up_proj_bias=torch.zeros(E, F)),
        call(down_proj_bias=torch.zeros(E, H).double()),
        call(max_rows=-1),
        call(recipe=DelayedScaling()),
        call(save_gate_up_in_fp8="fp8"),
        lambda: GroupedMLP(E, H, F, save_gate_up_in_fp8=1),
        lambda: GroupedMLP(E, H, F, save_gate_up_in_fp8=True, recompute_gate_up=True),
    ]
    assert_expected_inline(
        said(mistakes),
        """\
ValueError: GroupedMLP: num_experts must be between 1 and 1024, got 0
ValueError: GroupedMLP: hidden_size must be a positive multiple of 16, got 20
ValueError: grouped_mlp: activation must be an Activation, as SwiGLU() or GeGLU(), got None
ValueError: grouped_mlp: activation must be an Activation, as SwiGLU() or GeGLU(), got <built-in function gelu>
ValueError: GeGLU: approximate must be 'none' or 'tanh', got 'sigmoid'
ValueError: SwiGLU: alpha must be finite, got inf
ValueError: SwiGLU: limit must be None or a positive float, got nan
ValueError: SwiGLU: interleaved must be True or False, got 1
ValueError: SwiGLU: cubic must be finite and not negative, got -1.0
RuntimeError: grouped_mlp: top_k_weights and top_k_index must be [..., C] with C positive, got [] and []
RuntimeError: grouped_mlp: top_k_weights and top_k_index must be [..., C] with C positive, got [4, 0] and [4, 0]
RuntimeError: grouped_mlp: C differs: top_k_weights has 1, top_k_index 2
RuntimeError: grouped_mlp: top_k_weights must be floating, of 16 bits or more, got complex64
RuntimeError: grouped_mlp: top_k_index must be int32 or int64, got float32
RuntimeError: grouped_mlp: down_proj must be [5, 144, F], as gate_up_proj has 5 experts of 144 features, got [4, 144, 80]
RuntimeError: grouped_mlp: down_proj must be [5, 144, F], as gate_up_proj has 5 experts of 144 features, got [5, 288, 80]
RuntimeError: grouped_mlp: F differs: down_proj has 80, gate_up_proj 176 for gate and up
RuntimeError: grouped_mlp: F differs: down_proj has 80, gate_up_proj 160 without a gate
RuntimeError: grouped_mlp: F differs: down_proj has 80, gate_up_proj 80 for gate and up
RuntimeError: grouped_mlp: gate_up_proj must be [E, F, 144], as x has 144 features, got [5, 80, 128]
RuntimeError: grouped_mlp: gate_up_proj_bias must be [5, 160], as gate_up_proj is [5, 160, 144], got [5, 80]
RuntimeError: grouped_mlp: down_proj_bias must be bfloat16, float16 or float32, got float64: cast it, or the layer, as layer.float() does
ValueError: grouped_mlp: max_rows must not be negative, got -1
ValueError: grouped_mlp: DelayedScaling has a state: pass state, or use GroupedMLP
ValueError: grouped_mlp: save_gate_up_in_fp8 must be True or False, got 'fp8'
ValueError: GroupedMLP: save_gate_up_in_fp8 must be True or False, got 1
ValueError: GroupedMLP: save_gate_up_in_fp8 and recompute_gate_up exclude each other""",  # noqa: E501
    )


@needs_gpu
@RECIPES
@pytest.mark.parametrize("kind", ["plain", "gpt_oss"])
def test_one_cuda_graph_for_every_routing(kind: str, recipe: Recipe | None) -> None:
    """Captured once, replayed with other tokens that go to other experts: the bits of eager."""
    mlp = mlp_of(kind, recipe, "cuda", BF16)
    x = torch.zeros(90, H, device="cuda", dtype=BF16, requires_grad=True)
    weights = torch.zeros(90, 3, device="cuda", requires_grad=True)
    experts = torch.zeros(90, 3, device="cuda", dtype=torch.int64)

    def step() -> list[Tensor]:
        return outcome(mlp(x, weights, experts), [x, weights, *mlp.parameters()])

    graph, results = captured(step)
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(90, H))
            weights.copy_(torch.rand(90, 3))
            experts.copy_(torch.randint(-1, E, (90, 3)))
        graph.replay()
        assert_all_same_bits(results, step())


@needs_gpu
@RECIPES
def test_cudagraph_trees(recipe: Recipe | None) -> None:
    """Reduce-overhead mode: one graph launch forward, one backward, whatever the routing."""
    mlp = GroupedMLP(E, H, F, recipe=recipe, device="cuda", dtype=BF16)
    counters.clear()
    with torch._inductor.config.patch(STRICT_GRAPHS):
        compiled = torch.compile(mlp, fullgraph=True, mode="reduce-overhead")

        def step(call: Callable[..., Tensor], seed: int) -> list[Tensor]:
            torch.manual_seed(seed)
            x = torch.randn(90, H, device="cuda", dtype=BF16, requires_grad=True)
            weights = torch.rand(90, 3, device="cuda", requires_grad=True)
            experts = torch.randint(-1, E, (90, 3), device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            y = call(x, weights, experts)
            leaves = [x, weights, *mlp.parameters()]
            gradients = torch.autograd.grad(y, leaves, torch.randn_like(y))
            return [t.clone() for t in (y, *gradients)]

        for seed in range(6):
            for a, e in zip(step(compiled, seed), step(mlp, seed), strict=True):
                # See test_inductor: the compiled sum over choices may round otherwise.
                assert (a.double() - e.double()).norm() < 2.0**-7 * e.double().norm()
        with torch.profiler.profile() as profile:
            for seed in range(3):
                step(compiled, seed)
            torch.cuda.synchronize()
    launches = sum(e.count for e in profile.key_averages() if e.key == "cudaGraphLaunch")
    assert launches == 2 * 3
    assert counters["stats"]["unique_graphs"] == 1
    skipped = [key for key in counters["inductor"] if key.startswith("cudagraph_")]
    assert not [key for key in skipped if "skip" in key or "partition" in key], skipped
