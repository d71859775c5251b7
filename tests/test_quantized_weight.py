"""Layers with weights="fp8": the numbers of quantizing in each call, without doing it.

T rows, E groups, K in_features, N out_features; of GroupedMLP, K features of a token and N of an
expert.
"""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from grouped_linear import (
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    GroupedTensor,
    GroupedTensorWithMaster,
    MXFP8BlockScaling,
    grouped_linear,
    grouped_mlp,
)
from grouped_linear.quantized.checkpoints import expert_tensors, load_experts
from support.calls import Calls
from support.compare import assert_same, assert_same_bits, bits
from support.devices import devices, needs_gpu
from support.errors import sentence
from support.graphs import STRICT_GRAPHS
from support.groups import experts_of
from support.layers import linear_of
from support.ops import OPS
from support.pairs import pairwise
from support.tensors import BF16, DTYPES, FP32

E, T, K, N = 4, 147, 144, 272
SPLITS = ([3, 0, 130, 7], [0, 140, 0, 0], [0, 0, 0, 0], [37, 37, 37, 36])
DEVICES = pytest.mark.parametrize("device", devices(*OPS))
RECIPES = {
    "default": Float8BlockScaling(),
    "any_scale": Float8BlockScaling(power_of_two_scales=False),
    "bf16_wgrad": Float8BlockScaling(wgrad=BF16),
}


class MLP(GroupedMLP):
    """Called as a GroupedLinear is, with scores for each of T tokens, which learn, too."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        w = self.down_proj
        self.score = nn.Parameter(torch.rand(T, 2, dtype=w.dtype, device=w.device))

    def forward(self, x: Tensor, m_splits: Tensor, is_first_microbatch: Any = None) -> Tensor:
        return super().forward(x, self.score, experts_of(m_splits, T), is_first_microbatch)


EVERY_KIND = pytest.mark.parametrize("kind", [linear_of, MLP])


def make_layer(
    device: str = "cpu", kind: Any = linear_of, *, weights: str | None = "fp8", **options: Any
) -> Any:
    torch.manual_seed(0)
    kept: dict[str, Any] = {"recipe": Float8BlockScaling(), "dtype": BF16, "device": device}
    return kind(E, K, N, weights=weights, **(kept | options))


def weights_of(layer: nn.Module) -> list[Any]:
    return [p for p in layer.parameters() if p.dim() == 3]


def inputs(device: str, m_splits: list[int], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """x with NaN past the last group, and m_splits."""
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(sum(m_splits))).to(dtype)
    x[sum(m_splits) :] = torch.nan
    return x.to(device).requires_grad_(), torch.tensor(m_splits, device=device)


def gradient_for(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)


def call(layer: Callable[..., Tensor], x: Tensor, m_splits: Tensor) -> tuple[Tensor, ...]:
    """y, dx, and the gradients of parameters."""
    y = layer(x, m_splits)
    leaves = (x, *getattr(layer, "_orig_mod", layer).parameters())
    return y.detach(), *torch.autograd.grad(y, leaves, gradient_for(y))


def assert_all_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        assert_same_bits(a, b)


# --- numbers -------------------------------------------------------------------------------------


@DEVICES
@EVERY_KIND
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_weight_quantized_in_each_call(
    device: str, kind: Any, recipe: Float8BlockScaling, dtype: torch.dtype
) -> None:
    quantized = make_layer(device, kind, recipe=recipe, dtype=dtype)
    plain = make_layer(device, kind, recipe=recipe, dtype=dtype, weights=None)
    for m_splits in SPLITS:
        arguments = inputs(device, m_splits, dtype)
        results = call(quantized, *arguments)
        assert_all_same(results, call(plain, *arguments))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_same_bits(quantized(*arguments), results[0])


def function_of(layer: Any, x: Tensor, m_splits: Tensor, weights: list[Tensor]) -> Tensor:
    """What a layer computes, with other weights."""
    recipe = Float8BlockScaling()
    if isinstance(layer, GroupedMLP):
        return grouped_mlp(x, layer.score, experts_of(m_splits, T), *weights, recipe)
    return grouped_linear(x, *weights, m_splits, layer.bias, recipe)


@DEVICES
@EVERY_KIND
def test_transposed_where_a_gradient_reads_it(device: str, kind: Any) -> None:
    """Weights without q_t: each backward makes it for itself, so one layer has it at a time."""
    layer, (x, m_splits) = make_layer(device, kind), inputs(device, SPLITS[0])
    weights = [GroupedTensor.from_parts(w.q, w.scale, columnwise=False) for w in weights_of(layer)]
    expected = call(layer, x, m_splits)
    gradients = [g for g in expected[1:] if g.dim() == 3 or g.shape == x.shape]
    if isinstance(layer, GroupedMLP):  # the router's gradient reads the second weight, too
        layer.score.requires_grad_(False)
    leaves = [x, *weights]
    for wanted in itertools.product([False, True], repeat=len(leaves)):
        for leaf, want in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(want)
        with Calls() as forward:
            y = function_of(layer, x, m_splits, weights)
        assert "transpose_weight" not in forward.counts
        assert_same_bits(y, expected[0])
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        with Calls() as backward:
            got = torch.autograd.grad(y, asked, gradient_for(y)) if asked else ()
        # The first weight's for dx; the second's for dx and the first one's gradient.
        read = sum(any(wanted[: i + 1]) for i in range(len(weights)))
        assert backward.counts.get("transpose_weight", 0) == read
        assert_all_same(got, tuple(itertools.compress(gradients, wanted)))


@EVERY_KIND
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_activations_of_another_dtype(autocast: bool, kind: Any) -> None:
    quantized = make_layer(kind=kind, dtype=FP32)
    plain = make_layer(kind=kind, dtype=FP32, weights=None)
    with torch.autocast("cpu", BF16, enabled=autocast):
        x, m_splits = inputs("cpu", SPLITS[0], FP32 if autocast else torch.float16)
        results = call(quantized, x, m_splits)
        assert_all_same(results, call(plain, x, m_splits))
    assert results[0].dtype == (BF16 if autocast else torch.float16)
    assert results[2].dtype == FP32


@EVERY_KIND
def test_rounds_stochastically_unless_told_otherwise(kind: Any) -> None:
    for option, expected in ({}, True), ({"stochastic_rounding": False}, False):
        weights = weights_of(make_layer(kind=kind, **option))
        assert all(w.stochastic_rounding == expected for w in weights)


@EVERY_KIND
def test_keeps_itself_transposed_where_asked(kind: Any) -> None:
    """Without q_t each backward transposes for itself, with the same bits."""
    results = []
    for option, expected in (
        ({}, True),
        ({"columnwise": True}, True),
        ({"columnwise": False}, False),
    ):
        layer = make_layer(kind=kind, **option)
        assert all((w.q_t is not None) == expected for w in weights_of(layer))
        results.append(call(layer, *inputs("cpu", SPLITS[0])))
    for other in results[1:]:
        assert_all_same(other, results[0])


def test_errors() -> None:
    w, x = GroupedTensor.quantize(torch.ones(1, 16, 16)), torch.ones(2, 16)
    up, expert = GroupedTensor.quantize(torch.ones(1, 32, 16)), torch.zeros(2, 1, dtype=torch.int32)
    cases = [
        lambda: make_layer(recipe=None),
        lambda: make_layer(recipe=MXFP8BlockScaling()),
        lambda: make_layer(cache_weights=True),
        lambda: make_layer(single_grouped_weight=False),
        lambda: make_layer(weights=None, stochastic_rounding=True),
        lambda: make_layer(weights=None, columnwise=True),
        lambda: make_layer(columnwise="no"),
        lambda: make_layer(weights=None, preserve_high_precision_init=True),
        lambda: grouped_linear(x, w, [2]),
        lambda: make_layer(kind=MLP, recipe=None),
        lambda: make_layer(kind=MLP, recipe=MXFP8BlockScaling()),
        lambda: make_layer(kind=MLP, cache_weights=True),
        lambda: make_layer(kind=MLP, weights=None, stochastic_rounding=True),
        lambda: grouped_mlp(x, x[:, :1], expert, up, w),
        lambda: grouped_mlp(x, x[:, :1], expert, up.dequantize(), w, MXFP8BlockScaling()),
    ]
    sentences = []
    for case in cases:
        with pytest.raises(ValueError, match=r"^(Grouped|grouped_)[A-Za-z]+: ") as error:
            case()
        sentences.append(str(error.value))
    assert_expected_inline(
        "\n".join(sentences),
        """\
GroupedLinear: weights='fp8' needs the recipe Float8BlockScaling, got None
GroupedLinear: weights='fp8' needs the recipe Float8BlockScaling, got MXFP8BlockScaling()
GroupedLinear: cache_weights keeps what weights='fp8' has already: choose one of them
GroupedLinear: weights='fp8' needs single_grouped_weight=True
GroupedLinear: stochastic_rounding needs weights='fp8'
GroupedLinear: columnwise needs weights='fp8'
GroupedLinear: columnwise must be None, True or False, got 'no'
GroupedLinear: preserve_high_precision_init needs weights='fp8'
grouped_linear: a quantized weight needs the recipe Float8BlockScaling, got None
GroupedMLP: weights='fp8' needs the recipe Float8BlockScaling, got None
GroupedMLP: weights='fp8' needs the recipe Float8BlockScaling, got MXFP8BlockScaling()
GroupedMLP: cache_weights keeps what weights='fp8' has already: choose one of them
GroupedMLP: stochastic_rounding needs weights='fp8'
grouped_mlp: a quantized weight needs the recipe Float8BlockScaling, got None
grouped_mlp: a quantized weight needs the recipe Float8BlockScaling, got MXFP8BlockScaling()""",
    )


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@EVERY_KIND
def test_loads_round_to_nearest(kind: Any, dtype: torch.dtype, assign: bool) -> None:
    """Though the weight rounds stochastically whatever else is written to it."""
    plain = make_layer(kind=kind, weights=None)
    layer = make_layer(kind=kind, stochastic_rounding=True)
    state = {name: t.to(dtype) for name, t in plain.state_dict().items()}
    layer.load_state_dict(state, assign=assign)
    for name, w in layer.named_parameters():
        if isinstance(w, GroupedTensor):
            to = dtype if dtype in DTYPES else FP32
            expected = GroupedTensor.quantize(state[name].to(to), w.recipe)
            assert_same_bits(w.q, expected.q)
            assert_same_bits(w.scale, expected.scale)
            assert_same(w.detach(), w.detach())
            assert w.stochastic_rounding


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("kind", [GroupedLinear, GroupedMLP])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_for_torchscript(kind: Any, learns: bool) -> None:
    layer = kind(E, K, N, recipe=Float8BlockScaling(), weights="fp8")
    layer.requires_grad_(learns)
    x, splits = torch.randn(T, K), torch.tensor([40, 0, 100, 7])
    routing = (splits,) if kind is GroupedLinear else (torch.rand(T, 2), experts_of(splits, T))
    with pytest.raises(RuntimeError, match="trace records no quantized weight: use torch"):
        torch.jit.trace(layer, (x, *routing))
    layer(x, *routing)


@DEVICES
@pytest.mark.parametrize("shape", [(E * N, K), (E, K, N), (2 * E, N // 2, K), (2, 2, N, K), (-1,)])
def test_a_view_of_another_shape(shape: tuple[int, ...], device: str) -> None:
    """Its blocks are those of the shape that was quantized, in which it would be read."""
    w, (x, m_splits) = make_layer(device).weight.detach(), inputs(device, SPLITS[0])
    view, recipe = w.view(shape), Float8BlockScaling()
    said = {
        "grouped_linear": sentence(lambda: grouped_linear(x, view, m_splits, recipe=recipe)),
        "expert_tensors": sentence(lambda: expert_tensors(view, "{}")),
        "load_experts": sentence(lambda: load_experts(view, "nowhere", "{}")),
    }
    expected = (
        f"GroupedTensor: blocks are read in the shape [{E}, {N}, {K}] that was quantized, "
        f"got a view as {list(view.shape)}"
    )
    assert said == dict.fromkeys(said, expected)
    assert_same_bits(
        grouped_linear(x, view.view(E, N, K), m_splits, recipe=recipe),
        grouped_linear(x, w, m_splits, recipe=recipe),
    )


UPDATES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda w: w.mul_(2),
    "zero_of_one_expert": lambda w: w[1].zero_(),
    "copy_": lambda w: w.copy_(w.detach().clone()),
    "foreach": lambda w: torch._foreach_add_([w, *w], 1.0),
    "view": lambda w: w.detach()[1:].view(-1).fill_(0),
}


def test_weights_in_one_vector() -> None:
    """It is a plain tensor to whoever reads or writes it; C++ that sends it finds the weights."""
    made = [GroupedTensor.quantize(torch.randn(2, N, K), RECIPES["any_scale"]) for _ in "ab"]
    weights = [nn.Parameter(t, requires_grad=False) for t in (made[0], torch.randn(5), made[1])]
    expected = torch.cat([w.flatten() + 0 for w in weights])

    def vector() -> Tensor:
        return parameters_to_vector(weights)

    assert_same_bits(vector() + 0, expected)
    assert vector().tolist() == expected.tolist()
    assert (vector().numpy() == expected.numpy()).all()
    file = io.BytesIO()
    torch.save(vector(), file)
    file.seek(0)
    for t in (torch.load(file), copy.deepcopy(vector()), vector()[3:], vector().view(1, -1)[0]):
        assert type(t) is Tensor
        assert_same_bits(t, expected[-len(t) :])
    for backend in ("eager", "aot_eager"):
        doubled = torch.compile(lambda t: 2 * t, backend=backend)
        assert_same_bits(doubled(vector()), 2 * expected)
        joined = torch.compile(lambda *ts: torch.cat([t.view(-1) for t in ts]), backend=backend)
        assert_same_bits(joined(*weights) + 0, expected)
    written = vector()
    part = written[: weights[0].numel()]
    part.zero_()
    written[-3:] = 1
    written.mul_(2)
    assert not part.any()
    assert (written[: len(part)] == 0).all()
    assert (written[-3:] == 2).all()
    kept = vector()
    for w in weights:
        w.zero_()
    assert_same_bits(kept + 0, expected)  # memory of its own
    vector_to_parameters(kept, weights)
    assert_same_bits(vector() + 0, torch.cat([w.flatten() + 0 for w in weights]))
    assert_same_bits(weights[1], expected[made[0].numel() :][:5])


def test_what_is_made_like_a_part() -> None:
    """It is quantized, as distribute_tensor receives in it; but not in another dtype."""
    for weight in (
        GroupedTensor.quantize(torch.randn(3, N, K), RECIPES["any_scale"]),
        GroupedTensorWithMaster.quantize(torch.randn(3, N, K)),
    ):
        part, _ = weight.chunk(2)
        assert type(torch.empty_like(part)) is type(weight)
        for t in (weight, part.detach(), weight[:2]):
            assert type(torch.empty_like(t)) is Tensor
        assert type(torch.empty_like(part, dtype=torch.int32)) is Tensor
        assert type(torch.zeros_like(part)) is Tensor
    weight = GroupedTensor.quantize(torch.randn(3, N, K), RECIPES["any_scale"])
    experts = [0, 0, 0, 0, 0, 1]
    _, last = weight.chunk(2)
    padded = nn.functional.pad(last, experts)
    assert_same(padded[:1], last)
    assert not padded[1].any()
    for t, pad, value in ((weight, experts, 0), (last, [1, 0], 0), (last, experts, 2)):
        assert_same_bits(
            nn.functional.pad(t, pad, value=value),
            nn.functional.pad(t.dequantize(), pad, value=value),
        )


@EVERY_KIND
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_update_between_forward_and_backward_raises(
    update: Callable[[Tensor], Any], kind: Any, which: int
) -> None:
    layer = make_layer(kind=kind)
    y = layer(*inputs("cpu", SPLITS[0]))
    with torch.no_grad():
        update(weights_of(layer)[which])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(gradient_for(y))


# --- birth and travels ---------------------------------------------------------------------------


@DEVICES
@EVERY_KIND
def test_initialisation(device: str, kind: Any) -> None:
    """Drawn as a plain weight is, then quantized."""
    plain, layer = make_layer(device, kind, weights=None), make_layer(device, kind)
    for p, own in zip(plain.parameters(), layer.parameters(), strict=True):
        if p.dim() == 3:
            assert isinstance(own, nn.Parameter)
            assert_same(own.detach(), GroupedTensor.quantize(p))
        else:
            assert_same_bits(own, p)
    weights = weights_of(layer)
    addresses = [w.q.data_ptr() for w in weights]
    layer.reset_parameters()
    for w, own, address, drawn in zip(
        weights, weights_of(layer), addresses, weights_of(plain), strict=True
    ):
        assert own is w
        assert own.q.data_ptr() == address
        assert not torch.equal(own, drawn)


@DEVICES
def test_initialisation_of_the_users(device: str) -> None:
    """What was drawn can be kept, or filled otherwise."""
    plain = make_layer(device, weights=None)
    layer = make_layer(device, preserve_high_precision_init=True)
    assert_same_bits(layer.high_precision_init, plain.weight.detach().cpu())
    kept_nothing = make_layer(device, preserve_high_precision_init=False)
    assert kept_nothing.high_precision_init is None
    filled = make_layer(device, init_method=lambda w: w.fill_(3))
    assert (filled.weight == 3).all()


@EVERY_KIND
def test_meta_device(kind: Any) -> None:
    layer = make_layer("meta", kind, stochastic_rounding=True)
    assert all(w.is_meta for w in weights_of(layer))
    layer.reset_parameters()  # nothing to draw yet
    layer.to_empty(device="cpu")
    for w in weights_of(layer):
        assert isinstance(w, GroupedTensor)
        assert w.stochastic_rounding
        assert w.isnan().all()  # until it is drawn or loaded
    torch.manual_seed(0)
    layer.reset_parameters()
    assert_same_weights(layer, make_layer(kind=kind))
    again = make_layer("meta", kind).to_empty(device="cpu")
    again.load_state_dict(layer.state_dict())
    assert_same_weights(again, layer)
    assigned = make_layer("meta", kind)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    assert_same_weights(assigned, layer)


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    for a, e in zip(weights_of(actual), weights_of(expected), strict=True):
        assert_same(a.detach(), e.detach())


def through_torch_save(layer: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save]
)
@EVERY_KIND
def test_copies(kind: Any, copied: Callable[[Any], Any]) -> None:
    layer = make_layer(kind=kind)
    twin = copied(layer)
    assert_all_same(call(twin, *inputs("cpu", SPLITS[0])), call(layer, *inputs("cpu", SPLITS[0])))
    for own, w in zip(weights_of(twin), weights_of(layer), strict=True):
        assert isinstance(own, nn.Parameter)
        with torch.no_grad():
            own.zero_()
        assert w.any()


@EVERY_KIND
def test_module_moves_dtype(kind: Any) -> None:
    layer = make_layer(kind=kind)
    before = [w.q for w in weights_of(layer)]
    for dtype in (FP32, BF16):
        layer.to("cpu", dtype)
        assert all(p.dtype == dtype for p in layer.parameters())
        for w, q in zip(weights_of(layer), before, strict=True):
            assert isinstance(w, GroupedTensor)
            assert_same_bits(w.q, q)


@EVERY_KIND
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("to_quantized", [True, False])
@pytest.mark.parametrize("from_quantized", [True, False])
def test_state_dicts_of_either_kind(
    from_quantized: bool, to_quantized: bool, assign: bool, kind: Any
) -> None:
    """Bit for bit between quantized layers, quantized or dequantized where they differ."""
    source = make_layer(kind=kind, weights="fp8" if from_quantized else None)
    target = make_layer(kind=kind, weights="fp8" if to_quantized else None)
    for w in weights_of(target):
        torch.nn.init.zeros_(w)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), strict=True, assign=assign)
    if to_quantized:
        assert_same_weights(target, make_layer(kind=kind))
        return
    for w, of_source in zip(weights_of(target), weights_of(source), strict=True):
        expected = of_source.detach()
        assert not isinstance(w, GroupedTensor)
        assert_same_bits(w, expected.dequantize() if from_quantized else expected)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_with_scales_in_bfloat16(assign: bool) -> None:
    """Which hold powers of two exactly."""
    source, target = make_layer(), make_layer()
    torch.nn.init.zeros_(target.weight)
    state = source.state_dict()
    state["weight_scale_inv"] = state["weight_scale_inv"].to(BF16)
    target.load_state_dict(state, assign=assign)
    assert_same_weights(target, source)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("to_quantized", [True, False])
@pytest.mark.parametrize("from_quantized", [True, False])
def test_state_dicts_with_an_expert_a_key(
    from_quantized: bool, to_quantized: bool, assign: bool
) -> None:
    """weight0, weight1, ... of either kind into one weight; one weight of either kind into them."""
    source = make_layer(weights="fp8" if from_quantized else None)
    packed, apart = source.weight.detach(), source.state_dict()
    for name in ("weight", "weight_scale_inv"):
        if name in apart:
            parts = enumerate(apart.pop(name))
            apart |= {name.replace("weight", f"weight{e}", 1): part for e, part in parts}
    target = make_layer(weights="fp8" if to_quantized else None, single_grouped_weight=True)
    torch.nn.init.zeros_(target.weight)
    target.load_state_dict(apart, strict=True, assign=assign)
    expected = make_layer(weights=None).weight.detach()
    if to_quantized:
        assert_same(target.weight.detach(), GroupedTensor.quantize(expected))
    elif from_quantized:
        assert_same_bits(target.weight, packed.dequantize())
    else:
        assert_same_bits(target.weight, expected)
    discrete = make_layer(weights=None, single_grouped_weight=False)
    discrete.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert discrete(torch.ones(T, K, dtype=BF16), [T, 0, 0, 0]).isfinite().all()
    for e, expert in enumerate(packed):
        plain = expert.dequantize() if from_quantized else expert
        assert_same_bits(getattr(discrete, f"weight{e}"), plain)


@EVERY_KIND
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_are_plain_tensors(assign: bool, kind: Any, tmp_path: Path) -> None:
    """e4m3 numbers and scales, which safetensors writes and reads; q_t follows from them."""
    layer = make_layer(kind=kind)
    state = layer.state_dict()
    assert {type(t) for t in state.values()} == {Tensor}
    names = {name for name, p in layer.named_parameters() if isinstance(p, GroupedTensor)}
    assert {n for n, t in state.items() if t.dtype == torch.float8_e4m3fn} == names
    assert {n for n in state if n.endswith("_scale_inv")} == {f"{n}_scale_inv" for n in names}
    for name in names:
        assert getattr(layer, f"{name}_scale_inv") is layer.get_parameter(name).scale
        assert state[name].data_ptr() == layer.get_parameter(name).q.data_ptr()
    save_file(state, tmp_path / "model.safetensors")
    other = make_layer(kind=kind, stochastic_rounding=True)
    for own in weights_of(other):
        nn.init.zeros_(own)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=assign)
    for own, w in zip(weights_of(other), weights_of(layer), strict=True):
        assert own.stochastic_rounding
        assert_same_bits(bits(own.q), bits(w.q))
        assert_same_bits(own.scale, w.scale)
        assert_same_bits(bits(own.q_t), bits(w.q_t))
    assert all(isinstance(p, nn.Parameter) for p in layer.state_dict(keep_vars=True).values())


@EVERY_KIND
@pytest.mark.parametrize("to_quantized", [True, False])
def test_state_dicts_with_wrong_parts(to_quantized: bool, kind: Any) -> None:
    """Numbers without their scales would be other weights."""
    target = make_layer(kind=kind, weights="fp8" if to_quantized else None)
    before = copy.deepcopy(target.state_dict())
    name = next(n for n, p in target.named_parameters() if p.dim() == 3)
    state = make_layer(kind=kind).state_dict()
    scale = state.pop(f"{name}_scale_inv")
    with pytest.raises(RuntimeError, match=f"{name} is float8_e4m3fn, and there is no {name}_s"):
        target.load_state_dict(state)
    with pytest.raises(RuntimeError, match=rf"{name}: GroupedTensor: scale must be \["):
        target.load_state_dict(state | {f"{name}_scale_inv": scale[:1]})
    assert_same_bits(bits(target.state_dict()[name]), bits(before[name]))


def test_bytes_that_are_held() -> None:
    w = GroupedTensor.quantize(torch.randn(2, 256, 128, dtype=BF16))
    elements, scales = 2 * 256 * 128, 2 * 2 * 4
    assert (w.nbytes, w.element_size()) == (2 * elements + scales, 2)
    one_way = GroupedTensor.quantize(torch.randn(2, 256, 128, dtype=BF16), columnwise=False)
    assert (one_way.nbytes, one_way.element_size()) == (elements + scales, 1)
    assert nn.Parameter(one_way).nbytes == elements + scales


@pytest.mark.parametrize(
    ("kind", "backend", "flag"),
    pairwise(
        {"linear": linear_of, "mlp": MLP},
        {"eager": None, "compiled": "aot_eager"},
        {"bool": bool, "tensor": torch.tensor},
    ),
)
def test_micro_batches(flag: Callable[[bool], Any], backend: str | None, kind: Any) -> None:
    """Gradients in main_grad, for which the quantized weight is the same in each micro-batch."""
    results = []
    for quantized in (True, False):
        layer = make_layer(
            kind=kind,
            weights="fp8" if quantized else None,
            cache_weights=not quantized,
            fuse_wgrad_accumulation=True,
        )
        weights = weights_of(layer)
        for w in weights:
            w.main_grad = torch.full(w.shape, torch.nan)
        call_of = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
        for i, m_splits in enumerate(SPLITS[:3]):
            y = call_of(*inputs("cpu", m_splits), is_first_microbatch=flag(i == 0))
            y.backward(gradient_for(y))
        assert all(w.grad is None for w in weights)
        others = (p.grad for p in layer.parameters() if p.dim() == 2)
        results.append((*(w.main_grad for w in weights), *others))
    assert_all_same(*results)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, foreach=True),
}


@DEVICES
@EVERY_KIND
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make_optimizer: Any, kind: Any, device: str) -> None:
    """Each step is that of a layer in float32, whose weights are rounded after it."""
    layer = make_layer(device, kind, dtype=FP32, stochastic_rounding=False)
    plain = make_layer(device, kind, dtype=FP32, weights=None)
    optimizers = [make_optimizer(m.parameters()) for m in (layer, plain)]
    for m_splits in SPLITS:
        plain.load_state_dict(layer.state_dict())
        before = [bits(w.q).clone() for w in weights_of(layer)]
        for module, optimizer in zip((layer, plain), optimizers, strict=True):
            gradients = call(module, *inputs(device, m_splits, FP32))[2:]
            for p, grad in zip(module.parameters(), gradients, strict=True):
                p.grad = grad
            optimizer.step()
        for own, p in zip(layer.parameters(), plain.parameters(), strict=True):
            if p.dim() == 3:
                assert_same(own.detach(), GroupedTensor.quantize(p))
            else:
                assert_same_bits(own, p)
        assert not any(map(torch.equal, before, (bits(w.q) for w in weights_of(layer))))


def test_delayed_weight_gradient() -> None:
    layers = [
        make_layer(weights="fp8" if q else None, delay_wgrad_compute=True, save_original_input=True)
        for q in (True, False)
    ]
    for layer in layers:
        y = layer(*inputs("cpu", SPLITS[0]))
        y.backward(gradient_for(y))
        layer.backward_dw()
    assert type(layers[0].weight.grad) is Tensor
    assert_same_bits(layers[0].weight.grad, layers[1].weight.grad)


# --- torch.compile -------------------------------------------------------------------------------


def train(layer: Any, function: Callable[..., Tensor], device: str, **options: Any) -> list[Tensor]:
    """Results of a few steps of an optimizer, and the weights' parts in the end."""
    torch.manual_seed(1)  # of rounding stochastically
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, **options)
    results, weights = [], weights_of(layer)
    for m_splits in SPLITS:
        x, splits = inputs(device, m_splits)
        y = function(x, splits)
        y.backward(gradient_for(y))
        results += [t.clone() for t in (y.detach(), x.grad, *(w.grad for w in weights))]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(part for w in weights for part in (w.q, w.scale, w.q_t))]


@DEVICES
@EVERY_KIND
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training(backend: str, device: str, kind: Any) -> None:
    """One graph for all steps, and the numbers of eager."""
    layer, twin = (make_layer(device, kind, stochastic_rounding=True) for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for a, b in zip(
        train(layer, compiled, device, fused=True),
        train(twin, twin, device, fused=True),
        strict=True,
    ):
        assert_same_bits(a, b)
    assert counter.frame_count == 1
    assert all(isinstance(w, GroupedTensor) for w in weights_of(layer))


@EVERY_KIND
def test_graph_quantizes_no_weight(kind: Any) -> None:
    layer, backend = make_layer(kind=kind), AotEagerAndRecordGraphs()
    call(torch.compile(layer, fullgraph=True, backend=backend), *inputs("cpu", SPLITS[0]))
    graphs = backend.fw_graphs + backend.bw_graphs
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert "grouped_linear.grouped_scaled_mm.default" in called
    assert not [name for name in called if "weight" in name and "quantize" in name]


def test_compiled_reading_and_writing() -> None:
    """Members, views and writes inside a graph."""
    w = make_layer(stochastic_rounding=False).weight

    def read(w: Tensor) -> tuple[Tensor, ...]:
        return w[1], w.detach(), w.view(-1), w[2].t() * 2, w.dequantize(), w.sum()

    def write(w: Tensor) -> Tensor:
        with torch.no_grad():
            w[0] = 1.0
            w[1].mul_(3)
            w.add_(0.5)
        return w.sum()

    twin = copy.deepcopy(w)
    got = torch.compile(read, fullgraph=True, backend="aot_eager")(w)
    for a, b in zip(got, read(w), strict=True):
        assert type(a) is type(b)
        assert a.shape == b.shape
        assert_same_bits(a.float(), b.float())
    assert got[0].q.data_ptr() == w[1].q.data_ptr()
    total = torch.compile(write, fullgraph=True, backend="aot_eager")(w)
    assert_same_bits(total, write(twin))
    assert_same(w.detach(), twin.detach())


def test_compiled_optimizer() -> None:
    layer, twin = (make_layer(stochastic_rounding=True) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (layer, twin)]
    compiled = torch.compile(optimizers[0].step, backend="aot_eager")
    for step in range(3):
        for module, update in ((layer, compiled), (twin, optimizers[1].step)):
            torch.manual_seed(step)
            for p in module.parameters():
                p.grad = torch.randn(p.shape, dtype=BF16)
            update()
    assert_same(layer.weight.detach(), twin.weight.detach())


@needs_gpu
@EVERY_KIND
def test_cudagraph_trees(kind: Any) -> None:
    """Two graph launches a step, recorded once, while an optimizer writes the weights."""
    layer, twin = make_layer("cuda", kind), make_layer("cuda", kind)
    counters.clear()
    with torch._inductor.config.patch(STRICT_GRAPHS):
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (layer, twin)]

        def step(i: int) -> None:
            x, m_splits = inputs("cuda", SPLITS[i % len(SPLITS)])
            torch.compiler.cudagraph_mark_step_begin()
            results = tuple(t.clone() for t in call(compiled, x, m_splits))
            assert_all_same(results, call(twin, x, m_splits))
            for module, optimizer in zip((layer, twin), optimizers, strict=True):
                for p, grad in zip(module.parameters(), results[2:], strict=True):
                    p.grad = grad.clone()
                optimizer.step()

        for i in range(12):
            step(i)
        assert_same_weights(layer, twin)
        with torch.profiler.profile() as profile:
            for i in range(3):
                step(i)
            torch.cuda.synchronize()
    launches = sum(e.count for e in profile.key_averages() if e.key == "cudaGraphLaunch")
    assert launches == 2 * 3
    assert counters["stats"]["unique_graphs"] == 1
    skipped = [key for key in counters["inductor"] if key.startswith("cudagraph_")]
    assert not [key for key in skipped if "skip" in key or "partition" in key], skipped
