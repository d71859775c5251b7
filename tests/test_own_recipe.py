"""Recipes that are defined outside the package train both layers, eager and compiled.

T rows, E groups, K in_features, N out_features; of the MLP: H features of a token, F features
inside an expert.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from grouped_linear import GroupedLinear, GroupedMLP, Recipe, grouped_linear, ops
from grouped_linear.recipes import (
    LayerStates,
    Operands,
    OutputMask,
    QuantizerState,
    RecipeState,
)

BF16 = torch.bfloat16
T, E, K, N = 200, 3, 160, 144
SPLITS = (70, 0, 110)  # an empty group, groups that end inside a block, and rows of no group


@dataclass(frozen=True)
class Float8Forward(Recipe):
    """FP8 fprop with blocks' scales; dgrad and wgrad in bfloat16."""

    power_of_two_scales: bool = True

    reads_any_weight_dtype = True

    def quantize_input(
        self, x_TK: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        q = scale = None
        if outputs.rowwise:
            pow2 = self.power_of_two_scales
            q, scale, *_ = ops.group_quantize(x_TK, offs_E, power_of_two_scales=pow2)
        return Operands(q, scale, x_TK.to(BF16) if outputs.columnwise else None, None)

    def quantize_weight(
        self, w_ENK: Tensor, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        pow2 = self.power_of_two_scales
        q, scale, _ = ops.quantize_weight(w_ENK, power_of_two_scales=pow2, columnwise=False)
        return Operands(q, scale, w_ENK.to(BF16) if columnwise else None, None)

    def quantize_grad_output(
        self, dy_TN: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        return super().quantize_grad_output(dy_TN.to(BF16), offs_E, state, outputs)


@dataclass(frozen=True)
class FusedFloat8Forward(Float8Forward):
    """The same, with an op that gathers and quantizes in one pass."""

    def quantize_gathered(
        self,
        x_TH: Tensor,
        routing: ops.SortedByExpert,
        state: QuantizerState | None,
        outputs: OutputMask,
    ) -> Operands:
        pow2 = self.power_of_two_scales
        q, scale, *_ = ops.group_quantize(
            x_TH, routing.offs, routing.token, power_of_two_scales=pow2
        )
        x_RH = x_TH[routing.token].to(BF16) if outputs.columnwise else None
        return Operands(q, scale, x_RH, None)


class RoundedWeights(Recipe):
    """Not a dataclass, of torch operations alone: each weight is rounded to a multiple of 1/64."""

    def quantize_weight(
        self, w_ENK: Tensor, state: QuantizerState | None, columnwise: bool
    ) -> Operands:
        w_ENK = (w_ENK * 64).round() / 64
        return Operands(w_ENK, None, w_ENK if columnwise else None, None)


RECIPES = pytest.mark.parametrize("recipe", [Float8Forward(), RoundedWeights()], ids=["fp8", "int"])


def layer_of(recipe: Recipe | None, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(E, K, N, recipe=recipe, dtype=BF16, **options)


def mlp_of(recipe: Recipe | None) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(E, K, N, recipe=recipe, bias=True, dtype=BF16)


def rows(*size: int) -> Tensor:
    return torch.randn(size, dtype=BF16)


def routing_of(num_tokens: int) -> tuple[Tensor, Tensor]:
    weights, experts = torch.randn(num_tokens, E).softmax(dim=1).topk(2)
    return weights.to(BF16), experts


def gradients(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(module.named_parameters())}
    return dict(zip(named, torch.autograd.grad(y, list(named.values()), dy), strict=True))


# --- numbers -------------------------------------------------------------------------------------


def dequantized(q_ENK: Tensor, scale: Tensor) -> Tensor:
    """The float64 numbers of a weight in 128x128 blocks."""
    _, N, K = q_ENK.shape
    scales = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return q_ENK.double() * scales[:, :N, :K]


@pytest.mark.parametrize("save_input", [False, True])
@pytest.mark.parametrize("single", [True, False])
def test_layer_is_what_the_recipe_says(single: bool, save_input: bool) -> None:
    """Against float64 of the operands that the recipe made.

    Sums are float32 and results are rounded to bfloat16 once: half of its last place is 2**-9 of a
    result, 2**-8 leaves room for the sums. Where a result is near 0 the sums' own error shows:
    some 2**-24 of up to 160 terms near 1, far below 1e-3.
    """
    layer = layer_of(Float8Forward(), single_grouped_weight=single, save_original_input=save_input)
    x, dy, m_splits = rows(T, K).requires_grad_(), rows(T, N), torch.tensor(SPLITS)
    w = torch.stack([p for name, p in layer.named_parameters() if "weight" in name]).view(E, N, K)
    assert layer.bias is not None

    offs_E = m_splits.cumsum(0).int()
    q, scale, *_ = ops.group_quantize(x.detach(), offs_E)
    assert q is not None
    assert scale is not None
    x_of_fprop = ops.group_dequantize(q, scale, offs_E, torch.float32).double()
    w_of_fprop = dequantized(*ops.quantize_weight(w.detach(), columnwise=False)[:2])
    expected: dict[str, Tensor] = {
        "y": torch.zeros(T, N, dtype=torch.float64),
        "x": torch.zeros(T, K, dtype=torch.float64),
        "weight": torch.zeros(E, N, K, dtype=torch.float64),
        "bias": torch.zeros(E, N, dtype=torch.float64),
    }
    first = 0
    for e, size in enumerate(SPLITS):
        of_group = slice(first, first + size)
        first += size
        expected["y"][of_group] = x_of_fprop[of_group] @ w_of_fprop[e].T + layer.bias[e].double()
        expected["x"][of_group] = dy[of_group].double() @ w[e].double()
        expected["weight"][e] = dy[of_group].double().T @ x[of_group].double()
        expected["bias"][e] = dy[of_group].double().sum(0)

    y = layer(x, m_splits)
    actual = gradients(layer, x, y, dy)
    if not single:
        actual["weight"] = torch.stack([actual.pop(f"weight{e}") for e in range(E)])
    for name, t in {"y": y, **actual}.items():
        torch.testing.assert_close(t.double(), expected[name], rtol=2**-8, atol=1e-3, msg=name)


def mlp_in_float64(mlp: GroupedMLP, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Every expert of every token, unquantized."""
    p = {name: p.double() for name, p in mlp.named_parameters()}
    gate_up = torch.einsum("th,egh->teg", x, p["gate_up_proj"]) + p["gate_up_proj_bias"]
    gate, up = gate_up.chunk(2, dim=-1)
    y = torch.einsum("tef,ehf->teh", silu(gate) * up, p["down_proj"]) + p["down_proj_bias"]
    chosen = torch.zeros(len(x), E, dtype=torch.float64).scatter(1, experts, weights.double())
    return torch.einsum("teh,te->th", y, chosen)


@pytest.mark.parametrize("recipe", [Float8Forward(), Recipe()], ids=["fp8", "plain"])
def test_mlp_is_near_float64(recipe: Recipe) -> None:
    """In the norm of each result.

    bfloat16 rounds three tensors on the way by 2**-9 each at most. e4m3 has 3 bits after the
    leading one, so a quantized number is off by at most 2**-4 and by 2**-5 in the mean. Two
    quantized operands a GEMM and two GEMMs one after the other make 2**-4. A tenth bounds that; a
    wrong scale or a wrong expert is off by 1.
    """
    mlp, x, dy = mlp_of(recipe), rows(50, K).requires_grad_(), rows(50, K)
    weights, experts = routing_of(50)
    actual = gradients(mlp, x, mlp(x, weights, experts), dy)
    x64 = x.detach().double().requires_grad_()
    y64 = mlp_in_float64(mlp, x64, weights, experts)
    expected = gradients(mlp, x64, y64, dy.double())
    bound = 0.1 if isinstance(recipe, Float8Forward) else 0.01
    for name, t in actual.items():
        error = (t.double() - expected[name].double()).norm() / expected[name].double().norm()
        assert error < bound, f"{name}: {error}"


# --- training ------------------------------------------------------------------------------------


def losses(module: nn.Module, call: Callable[..., Tensor], inputs: tuple[Any, ...]) -> list[float]:
    """Of AdamW steps toward a target."""
    target = rows(*inputs[0].shape[:1], N if isinstance(module, GroupedLinear) else K)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    values = []
    for _ in range(8):
        loss = (call(*inputs) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


@RECIPES
@pytest.mark.parametrize("kind", ["packed", "per_expert", "mlp"])
def test_training(kind: str, recipe: Recipe) -> None:
    """The loss falls, and compiled training has the bits of eager training."""
    module: nn.Module
    if kind == "mlp":
        module, inputs = mlp_of(recipe), (rows(T, K), *routing_of(T))
    else:
        module = layer_of(recipe, single_grouped_weight=kind == "packed")
        inputs = rows(T, K), torch.tensor([60, 20, T - 80])
    twin = copy.deepcopy(module)
    torch.manual_seed(1)
    eager = losses(module, module, inputs)
    assert eager[-1] < 0.8 * eager[0]
    torch.manual_seed(1)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    assert losses(twin, compiled, inputs) == eager


def test_training_under_inductor() -> None:
    module = mlp_of(Float8Forward())
    compiled = torch.compile(module, fullgraph=True)
    values = losses(module, compiled, (rows(T, K), *routing_of(T)))
    assert values[-1] < 0.8 * values[0]


# --- what the base class does --------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_the_base_class_is_no_recipe(compiled: bool) -> None:
    results = []
    for recipe in (None, Recipe()):
        torch.manual_seed(1)
        layer, x, dy = layer_of(recipe), rows(T, K).requires_grad_(), rows(T, N)
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        y = call(x, torch.tensor(SPLITS))
        results.append({"y": y, **gradients(layer, x, y, dy)})
    for name, t in results[0].items():
        assert torch.equal(t, results[1][name]), name


def test_a_fused_op_changes_no_bit() -> None:
    results = []
    for recipe in (Float8Forward(), FusedFloat8Forward()):
        mlp = mlp_of(recipe)
        torch.manual_seed(1)
        x, dy = rows(50, K).requires_grad_(), rows(50, K)
        y = mlp(x, *routing_of(50))
        results.append({"y": y, **gradients(mlp, x, y, dy)})
    for name, t in results[0].items():
        assert torch.equal(t, results[1][name]), name


def test_options_of_the_layer() -> None:
    """Those that need nothing of a recipe: main_grad, deferred gradients, micro-batches, pickle."""
    m_splits, x, dy = torch.tensor(SPLITS), rows(T, K), rows(T, N)
    plain = layer_of(Float8Forward())
    plain(x, m_splits).backward(dy)
    layer = layer_of(Float8Forward(), fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    layer.weight.main_grad = torch.full((E, N, K), torch.nan)
    layer = pickle.loads(pickle.dumps(layer))
    layer.weight.main_grad = torch.full((E, N, K), torch.nan)
    layer(x, m_splits, is_first_microbatch=True).backward(dy)
    layer.backward_dw()
    # main_grad is float32; grad was rounded to bfloat16 once.
    assert torch.equal(layer.weight.main_grad.to(BF16), plain.weight.grad)


def test_dtypes() -> None:
    """A recipe whose quantizer reads any dtype needs no cast; another one is told so."""
    w, m_splits = torch.randn(E, N, K), torch.tensor(SPLITS)
    y = grouped_linear(rows(T, K), w, m_splits, recipe=Float8Forward())
    assert y.dtype == BF16
    with pytest.raises(RuntimeError, match="x is bfloat16, weight float32: cast one of them"):
        grouped_linear(rows(T, K), w, m_splits, recipe=RoundedWeights())
    with torch.autocast("cpu", BF16):
        assert grouped_linear(rows(T, K), w, m_splits, recipe=RoundedWeights()).dtype == BF16


@pytest.mark.parametrize("layer", [GroupedLinear, GroupedMLP])
def test_a_cache_needs_two_methods(layer: Any) -> None:
    sentence = (
        "Float8Forward: cache_weights=True needs a recipe that defines new_weight and "
        "refresh_weight_"
    )
    with pytest.raises(ValueError, match=sentence):
        layer(E, K, N, recipe=Float8Forward(), cache_weights=True)


# --- a state -------------------------------------------------------------------------------------


class LargestInput(RecipeState):
    """Remembers the largest magnitude of each expert's input."""

    amax: Tensor

    def __init__(self, num_groups: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.register_buffer("amax", torch.zeros(num_groups, device=device))

    def reset(self) -> None:
        self.amax.zero_()

    def quantizer_states(self) -> LayerStates:
        scale = torch.ones_like(self.amax)
        return LayerStates(
            QuantizerState(scale, self.amax if torch.is_grad_enabled() else None),
            QuantizerState(scale, None),
            QuantizerState(scale, None),
        )


class Observing(Recipe):
    """GEMMs as without a recipe, and a record of what went in."""

    def quantize_input(
        self, x_TK: Tensor, offs_E: Tensor, state: QuantizerState | None, outputs: OutputMask
    ) -> Operands:
        assert state is not None
        if state.amax is not None:
            first = 0
            for e, end in enumerate(offs_E.tolist()):
                if end > first:
                    state.amax[e] = max(state.amax[e], x_TK[first:end].abs().max().float())
                first = end
        return super().quantize_input(x_TK, offs_E, state, outputs)

    def new_state(self, num_groups: int, device: torch.device | str | None) -> RecipeState:
        return LargestInput(num_groups, device)


def test_a_state_is_the_layer_s_own() -> None:
    layer, x, m_splits = layer_of(Observing()), rows(T, K), torch.tensor(SPLITS)
    layer(x, m_splits).sum().backward()
    largest = [x[:70].abs().max().item(), 0, x[70:180].abs().max().item()]
    assert layer.state_dict()["weight_state.amax"].tolist() == largest
    with torch.no_grad():
        layer(100 * x, m_splits)
    assert layer.weight_state.get_buffer("amax").tolist() == largest
    layer.reset_parameters()
    assert not layer.weight_state.get_buffer("amax").any()


def test_what_is_said_about_a_state() -> None:
    w, m_splits = layer_of(None).weight, torch.tensor(SPLITS)
    with pytest.raises(ValueError, match="Observing has a state: pass state, or use GroupedLinear"):
        grouped_linear(rows(T, K), w, m_splits, recipe=Observing())
    state = Observing().new_state(E, "cpu")
    with pytest.raises(ValueError, match="state needs a recipe that has one, got recipe Float8For"):
        grouped_linear(rows(T, K), w, m_splits, recipe=Float8Forward(), state=state)
    with pytest.raises(ValueError, match="by when the scales of Observing may have changed"):
        layer_of(Observing(), save_original_input=True)
