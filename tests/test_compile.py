# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True): the same numbers as eager, one graph for all group sizes.

Most tests use the aot_eager backend, which traces, partitions and functionalizes as Inductor does;
Inductor itself is compiled where its output is the subject.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend, normalize_gm
from torch._inductor.utils import run_and_get_code

from grouped_linear import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    Lora,
    MXFP8BlockScaling,
    Recipe,
    SwiGLU,
    grouped_linear,
    grouped_mlp,
    ops,
    recipes,
    update_scales,
)
from grouped_linear.nn.lora import LoraWeights
from support.compare import assert_all_same_bits, assert_same_bits
from support.layers import linear_of
from support.pairs import in_turn
from support.recipes import RECIPES as EVERY_RECIPE
from support.tensors import BF16
from support.versions import READS_FIELDS_ALONE

T, E, K, N = 40, 3, 32, 48
SPLITS = ([10, 20, 10], [0, 40, 0], [0, 0, 0], [1, 2, 3], [40, 0, 0])


class Experts(nn.Module):
    """Two layers with a nonlinearity between: an MLP an expert."""

    def __init__(self, recipe: Recipe | None, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": BF16}
        self.up = GroupedLinear(E, K, N, **options)
        self.down = GroupedLinear(E, N, K, **options)

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x, m_splits)), m_splits)


def inputs(device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(T, K, generator=generator).to(device, BF16),
            torch.tensor(m_splits, device=device),
        )
        for m_splits in SPLITS
    ]


@pytest.mark.parametrize(("recipe", "experts"), in_turn(EVERY_RECIPE, {"1": 1, "2": 2, "3": 3}))
def test_frozen(recipe: Recipe | None, device: str, experts: int) -> None:
    """Nothing needs a gradient, and nobody said no_grad: of a parameter an expert, too."""
    layers = [
        linear_of(
            experts,
            K,
            N,
            recipe=recipe,
            device=device,
            dtype=BF16,
            single_grouped_weight=single,
            single_grouped_bias=single,
        ).requires_grad_(False)
        for single in (True, False)
    ]
    x = torch.randn(T, K, device=device).to(BF16)
    m_splits = torch.tensor([T - 2 * experts, *[2] * (experts - 1)], device=device)
    for layer in layers:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(x, m_splits), layer(x, m_splits))


def train(model: nn.Module, call: Callable[..., Tensor], device: str) -> list[Tensor]:
    """Outputs, input gradients and, at last, the parameters of a few optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for x, m_splits in inputs(device):
        x.requires_grad_()
        y = call(x, m_splits)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
        results += [y.detach(), x.grad]
    return results + [p.detach() for p in (*model.parameters(), *model.buffers())]


def compiles(module: Callable[..., Any], **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(options.pop("backend", "aot_eager"))
    return torch.compile(module, fullgraph=True, backend=counter, **options), counter


# --- compiled equals eager -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "backend"), in_turn(EVERY_RECIPE, {"inductor": "inductor", "aot_eager": "aot_eager"})
)
def test_training_equals_eager(backend: str, recipe: Recipe | None, device: str) -> None:
    """Bit for bit: the ops are the same, and relu is exact. New group sizes never recompile."""
    eager, model = Experts(recipe, device), Experts(recipe, device)
    expected = train(eager, eager, device)
    compiled, counter = compiles(model, backend=backend)
    assert_all_same_bits(train(model, compiled, device), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("recipe", "mode"),
    in_turn(EVERY_RECIPE, {mode.__name__: mode for mode in (torch.no_grad, torch.inference_mode)}),
)
def test_inference_equals_eager(mode: Any, recipe: Recipe | None, device: str) -> None:
    model = Experts(recipe, device)
    compiled, counter = compiles(model)
    with mode():
        for x, m_splits in inputs(device):
            assert_same_bits(compiled(x, m_splits), model(x, m_splits))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("recipe", "autocast"), in_turn(EVERY_RECIPE, {"autocast": True, "float32": False})
)
def test_lists_autocast_and_leading_dimensions(
    autocast: bool, recipe: Recipe | None, device: str
) -> None:
    layer = GroupedLinear(E, K, N, recipe=recipe, device=device)
    compiled, _ = compiles(layer)
    x = torch.randn(4, 10, K, device=device)
    with torch.autocast(device, dtype=BF16, enabled=autocast):
        y = compiled(x, [10, 5, 20])
        assert y.dtype == (BF16 if autocast else torch.float32)
        assert_same_bits(y, layer(x, [10, 5, 20]))


def test_lists_of_splits_compile_twice(device: str) -> None:
    """And once more for every entry that changes later than others; a tensor compiles once."""
    layer = GroupedLinear(E, K, N, device=device)
    compiled, counter = compiles(layer)
    x = torch.randn(40, K, device=device)
    for i in range(12):
        m_splits = [i, 20 - i, 20]
        assert_same_bits(compiled(x, m_splits), layer(x, m_splits))
    assert counter.frame_count == 2


def test_splits_of_a_number_that_is_not_known(device: str) -> None:
    """As bincount's under fullgraph: it is held to be the number of groups."""
    layer = GroupedLinear(E, K, N, device=device)
    expert, x = torch.randint(E, (40,), device=device), torch.randn(40, K, device=device)

    def call(x: Tensor, expert: Tensor) -> Tensor:
        y: Tensor = layer(x, torch.bincount(expert, minlength=E))
        return y

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same_bits(compiles(call)[0](x, expert), call(x, expert))


@pytest.mark.parametrize(
    "recipe", [None, Float8BlockScaling(), Float8CurrentScaling()], ids=["none", "block", "current"]
)
def test_compiled_autograd_changes_no_bit(recipe: Recipe | None) -> None:
    """It finds the tensors that were saved, and none that Dynamo computes from them beside them."""
    layer = GroupedLinear(E, K, N, recipe=recipe)
    gradients = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-1, 1, T * K).view(T, K).requires_grad_()
        loss = call(x, torch.tensor(SPLITS[0])).square().sum()
        if call is not layer:
            with compiled_autograd._enable(torch.compile(fullgraph=True, backend="aot_eager")):
                loss.backward()
        else:
            loss.backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    assert_all_same_bits(*gradients)


# --- recompiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dynamic"),
    [(Float8BlockScaling(), None), (Float8CurrentScaling(), True), (MXFP8BlockScaling(), True)],
    ids=["block", "current-dynamic", "mxfp8-dynamic"],
)
def test_layers_share_a_recipe(dynamic: bool | None, recipe: Recipe) -> None:
    """Also one whose numbers Dynamo has seen change, and takes for inputs of the graph."""
    for changed in (recipe,) if dynamic else (recipe, replace(recipe, amax_epsilon=2.0**-9)):
        experts, x = Experts(changed, "cpu"), torch.randn(T, K, dtype=BF16)
        call = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        gradients = []
        for forward in (experts, call):
            forward(x, torch.tensor([10, 20, 10])).sum().backward()
            gradients.append([p.grad for p in experts.parameters()])
            experts.zero_grad()
        for eager, compiled in zip(*gradients, strict=True):
            assert_same_bits(compiled, eager)


@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_share_an_activation(dynamic: bool | None) -> None:
    """Its numbers, too, stay constants for Dynamo, as the default of what saves its input does."""
    x, weights = torch.randn(T, K), torch.rand(T, 1)
    index = torch.randint(E, (T, 1))
    for limit in (5.0,) if dynamic else (5.0, 7.0):
        activation = SwiGLU(1.702, 1.0, limit)
        mlp = GroupedMLP(E, K, N, activation=activation, save_gate_up_in_fp8=True)

        def twice(x: Tensor, mlp: GroupedMLP = mlp) -> Tensor:
            y: Tensor = mlp(mlp(x, weights, index), weights, index)
            return y

        call = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        expected, actual = (
            torch.autograd.grad(forward(x).sum(), [*mlp.parameters()]) for forward in (twice, call)
        )
        assert_all_same_bits(actual, expected)


def calls_with_numbers() -> dict[str, Callable[..., Any]]:
    """Of x, its group sizes, and a routing; the objects are made before the graph, or in it."""
    weight, a, b = torch.randn(E, N, K), torch.randn(E, 4, K), torch.randn(E, N, 4)
    gate_up, down = torch.randn(E, 2 * N, K), torch.randn(E, K, N)
    adapter, activation = LoraWeights(a, b, 0.5, 0.25), SwiGLU(1.702, 1.0, 7.0)
    recipe = Float8BlockScaling(amax_epsilon=2.0**-9)
    layer = GroupedLinear(E, K, N, lora=Lora(4, alpha=6, dropout=0.5))
    mlp = GroupedMLP(E, K, N, recipe=recipe, activation=activation)
    scores: Any = {"score_function": "softmax"}
    return {
        "Lora": lambda x, splits, *_: layer(x, splits),
        "LoraWeights": lambda x, splits, *_: grouped_linear(x, weight, splits, lora=adapter),
        "LoraWeights in it": lambda x, splits, *_: grouped_linear(
            x, weight, splits, lora=LoraWeights(a, b)
        ),
        "recipe and activation": lambda x, splits, *routing: mlp(x, *routing),
        "recipe in it": lambda x, splits, *_: grouped_linear(
            x, weight, splits, recipe=Float8CurrentScaling()
        ),
        "activation in it": lambda x, splits, *routing: grouped_mlp(
            x, *routing, gate_up, down, activation=SwiGLU(limit=7.0)
        ),
        "router": lambda x, *_: ops.topk_experts(x, 2, **scores),
        "router's gradient": lambda x, splits, weights, experts: ops.topk_experts_grad(
            weights, x.detach(), experts, **scores
        ),
        "block": lambda x, *_: ops.group_quantize(x.detach(), torch.tensor([8, 20, 40]).int()),
    }


@pytest.mark.parametrize("name", calls_with_numbers())
def test_numbers_are_constants(name: str) -> None:
    """Dynamo makes inputs of floats with dynamic=True, and traces again to remove them."""
    compiled, counter = compiles(calls_with_numbers()[name], dynamic=True)
    for tokens in (40, 56):
        x = torch.randn(tokens, K, requires_grad=True)
        splits = torch.tensor([tokens // 2, 0, tokens - tokens // 2])
        y = compiled(x, splits, torch.rand(tokens, 2), torch.randint(E, (tokens, 2)))
        first = y if isinstance(y, Tensor) else y[0]
        if first.requires_grad:
            first.sum().backward()
    once = READS_FIELDS_ALONE or name != "recipe and activation"
    assert counter.frame_count == (1 if once else 2)


def test_no_default_is_a_float() -> None:
    """Which Dynamo would make an input of; the integers 0 and 1 stay constants."""
    modules: Any = sys.modules["grouped_linear"], ops, recipes
    public = {getattr(module, name) for module in modules for name in module.__all__}
    floats = {
        (call.__name__, name)
        for call in (*public, LoraWeights)
        if inspect.isfunction(call) or isinstance(call, type)
        for name, parameter in inspect.signature(call).parameters.items()
        if isinstance(parameter.default, float)
    }
    # A graph gives the numbers of its optimizer.
    adam = "lr", "beta1", "beta2", "weight_decay", "eps"
    assert floats == {("adam_weight_", name) for name in adam}


def test_an_activation_that_is_made_in_the_graph() -> None:
    """Of a module's numbers, which may be symbols there, as of GPT-OSS's experts."""
    mlp = GroupedMLP(E, K, N)
    mlp.alpha = 1.702  # type: ignore[assignment]
    x, routing = torch.randn(T, K), (torch.rand(T, 1), torch.randint(E, (T, 1)))

    def call(x: Tensor) -> Tensor:
        activation = SwiGLU(mlp.alpha, 1.0)  # type: ignore[arg-type]
        weights = mlp.gate_up_proj, mlp.down_proj
        return grouped_mlp(x, *routing, *weights, activation=activation)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same_bits(compiled(x), call(x))


@pytest.mark.parametrize(
    ("name", "marked"), [("none", True), ("block", True), ("block", False), ("delayed", True)]
)
def test_recompiles_for_token_counts(name: str, marked: bool, device: str) -> None:
    """mark_unbacked is the recommended marking: one compile for every number of tokens."""
    layer = GroupedLinear(E, K, N, recipe=EVERY_RECIPE[name], device=device)
    compiled, counter = compiles(layer)
    for tokens in (33, 40, 57, 1, 0, 64, 65, 74, 128, 300, 449, 31):
        x = torch.randn(tokens, K, device=device, requires_grad=True)
        if marked:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        m_splits = torch.tensor([tokens // 2, 0, tokens - tokens // 2], device=device)
        results = []
        for call in (compiled, layer):
            y = call(x, m_splits)
            results.append([y, *torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y))])
        assert_all_same_bits(*results)
    assert counter.frame_count == (1 if marked else 4)


# --- graphs --------------------------------------------------------------------------------------


def readable(graph: torch.fx.GraphModule) -> str:
    """A graph's code, one statement per line, without the statements that free dead values."""
    code = normalize_gm(graph.print_readable(print_output=False))
    code = re.sub(r";  [\w =]*None", "", code)
    code = re.sub(r"\[[\d, ]+\]", lambda shape: shape[0].replace(" ", ""), code)
    code = code.replace("torch.ops.", "").replace(".default(", "(")
    return "\n".join(
        textwrap.fill(line.strip(), 96, subsequent_indent="    ", break_long_words=False)
        for line in code.splitlines()
        if line.strip() and not line.startswith("class ")
    )


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
def test_training_graphs_of_block_scaling() -> None:
    backend = AotEagerAndRecordGraphs()
    layer = GroupedLinear(E, K, N, recipe=Float8BlockScaling())
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    compiled(torch.randn(T, K, requires_grad=True), torch.tensor(SPLITS[0])).sum().backward()
    assert_expected_inline(
        "\n\n".join(map(readable, backend.fw_graphs + backend.bw_graphs)),
        """\
def forward(self, primals_1: "f32[3,48,32]", primals_2: "f32[3,48]", primals_3: "f32[40,32]",
    primals_4: "i64[3]"):
splits_to_offsets: "i32[3]" = grouped_linear.splits_to_offsets(primals_4, 40)
group_quantize = grouped_linear.group_quantize(primals_3, splits_to_offsets, None, 0.0, True,
    True, True, False, True)
getitem: "f8e4m3fn[40,32]" = group_quantize[0]
getitem_1: "f32[1,40]" = group_quantize[1]
getitem_2: "f8e4m3fn[3,32,128]" = group_quantize[2]
getitem_3: "f32[3,32]" = group_quantize[3]
quantize_weight = grouped_linear.quantize_weight(primals_1)
getitem_5: "f8e4m3fn[3,48,32]" = quantize_weight[0]
getitem_6: "f32[3,1,1]" = quantize_weight[1]
getitem_7: "f8e4m3fn[3,32,48]" = quantize_weight[2]
transpose: "f8e4m3fn[3,32,48]" = aten.transpose.int(getitem_5, 1, 2)
transpose_1: "f32[3,1,1]" = aten.transpose.int(getitem_6, 1, 2)
grouped_scaled_mm: "f32[40,48]" = grouped_linear.grouped_scaled_mm(getitem, transpose,
    getitem_1, transpose_1, splits_to_offsets, primals_2, torch.float32)
transpose_2: "f8e4m3fn[3,48,32]" = aten.transpose.int(getitem_7, -2, -1)
return (grouped_scaled_mm, splits_to_offsets, getitem_2, getitem_3, getitem_6, transpose_2)

def forward(self, splits_to_offsets: "i32[3]", getitem_2: "f8e4m3fn[3,32,128]", getitem_3:
    "f32[3,32]", getitem_6: "f32[3,1,1]", transpose_2: "f8e4m3fn[3,48,32]", tangents_1:
    "f32[40,48]"):
group_quantize_1 = grouped_linear.group_quantize(tangents_1, splits_to_offsets, None, 0.0, True,
    True, True, True)
getitem_8: "f8e4m3fn[40,48]" = group_quantize_1[0]
getitem_9: "f32[1,40]" = group_quantize_1[1]
getitem_10: "f8e4m3fn[3,48,128]" = group_quantize_1[2]
getitem_11: "f32[3,48]" = group_quantize_1[3]
getitem_12: "f32[3,48]" = group_quantize_1[4]
grouped_scaled_mm_1: "f32[40,32]" = grouped_linear.grouped_scaled_mm(getitem_8, transpose_2,
    getitem_9, getitem_6, splits_to_offsets, None, torch.float32)
grouped_scaled_mm_wgrad: "f32[3,48,32]" = grouped_linear.grouped_scaled_mm_wgrad(getitem_10,
    getitem_2, getitem_11, getitem_3, splits_to_offsets, torch.float32)
return (grouped_scaled_mm_wgrad, getitem_12, grouped_scaled_mm_1, None)""",
    )


def test_inductor_accumulates_in_place(device: str) -> None:
    """An in-place wgrad writes the caller's tensor: no clone before, no copy after."""
    x, dy = torch.randn(T, K, device=device), torch.randn(T, N, device=device)
    offs = torch.tensor([10, 10, 40], dtype=torch.int32, device=device)

    def step(main_grad: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        ops.grouped_mm_wgrad_(main_grad, dy * 2, x, offs)
        return main_grad.sum()

    main_grad = torch.ones(E, N, K, device=device)
    expected = main_grad.clone()
    step(expected, x, dy)
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), main_grad, x, dy)
    assert_same_bits(main_grad, expected)
    assert code.count("grouped_linear.grouped_mm_wgrad_.default(") == 1
    assert not re.search(rf"empty_strided\w*\(\({E}, {N}, {K}\)", code)
    assert ".copy_(" not in code
