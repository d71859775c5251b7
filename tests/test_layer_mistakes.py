# SPDX-License-Identifier: Apache-2.0
"""The same mistake is the same kind of error in GroupedLinear and GroupedMLP: torch's.

RuntimeError for a tensor that does not fit, TypeError for what is no tensor, ValueError for a
configuration or an option.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Format,
    GroupedLinear,
    GroupedMLP,
    Lora,
    SwiGLU,
    grouped_linear,
    grouped_mlp,
    update_scales,
)
from grouped_linear.contrib import fake_quantize, watch
from grouped_linear.nn.lora import LoraWeights
from grouped_linear.parallel import Dispatched, ExpertParallel, TokenDispatcher
from support.compare import assert_same_bits
from support.errors import said
from support.layers import linear_of
from support.tensors import BF16

K, N = 16, 32


def linear(x: Any = None, m_splits: Any = (2, 3), first: Any = None, **options: Any) -> Any:
    dtype = options.pop("cast", None)
    layer = linear_of(**{"num_experts": 2, "in_features": K, "out_features": N} | options)
    layer.to(dtype)
    return layer(torch.randn(5, K) if x is None else x, m_splits, first)


def mlp(
    x: Any = None, routing: Any = None, first: Any = None, max_rows: Any = None, **options: Any
) -> Any:
    dtype = options.pop("cast", None)
    layer = GroupedMLP(**{"num_experts": 2, "hidden_size": K, "intermediate_size": N} | options)
    layer.to(dtype)
    scores, chosen = routing or (torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64))
    x = torch.randn(5, K) if x is None else x
    return layer(x, scores, chosen, first, max_rows=max_rows)


FP8 = {"recipe": Float8BlockScaling()}
FLAG = torch.zeros(2, dtype=torch.bool)
# Of either layer.
MISTAKES: list[Callable[[Any], Any]] = [
    lambda layer: layer(np.ones((5, K), np.float32)),
    lambda layer: layer(torch.ones(5, K).double()),
    lambda layer: layer(torch.ones(5, K).double(), **FP8),
    lambda layer: layer(torch.ones(5, K, dtype=BF16)),
    lambda layer: layer(torch.ones(())),
    lambda layer: layer(torch.ones(5, 0)),
    lambda layer: layer(first=FLAG),
    lambda layer: layer(first=torch.tensor(1)),
    lambda layer: layer(first=FLAG[0].to("meta")),
    lambda layer: layer(first=True, **FP8),
    lambda layer: layer(first=False, cache_weights=True, **FP8),
    lambda layer: layer(recipe="fp8"),
    lambda layer: layer(recipe=Float8BlockScaling),
    lambda layer: layer(bias=np.True_),
    lambda layer: layer(cache_weights="no"),
    lambda layer: layer(fuse_wgrad_accumulation="no"),
    lambda layer: layer(weights="int8", **FP8),
    lambda layer: layer(dtype=torch.float64),
    lambda layer: layer(dtype="bf16"),
    lambda layer: layer(cast=torch.float64, bias=False),
    lambda layer: layer(first="yes"),
    lambda layer: layer(device="meta"),
]
# Of one of them.
OTHERS: list[Callable[[], Any]] = [
    lambda: linear(torch.ones(5, N)),
    lambda: mlp(torch.ones(5, N)),
    lambda: linear(cast=torch.float64),
    lambda: linear(cast=torch.float64, return_bias=True),
    lambda: linear(m_splits=10),
    lambda: linear(m_splits=None),
    lambda: linear(m_splits=[1, 2, 2]),
    lambda: linear(m_splits="3052"),
    lambda: linear(m_splits=[2, "3"]),
    lambda: linear(m_splits=[2, 3.0]),
    lambda: linear(m_splits=[True, False]),
    lambda: linear(m_splits=torch.tensor([2, 3], device="meta")),
    lambda: linear(m_splits=torch.tensor([[2, 3]])),
    lambda: linear(in_features=16.0),
    lambda: linear(num_experts=2.0),
    lambda: linear(num_experts=True),
    lambda: linear(init_method="xavier"),
    lambda: linear(get_rng_state_tracker="tracker"),
    lambda: linear(single_grouped_weight="no"),
    lambda: linear(params_dtype=torch.int8),
    lambda: mlp(activation="swiglu"),
    lambda: mlp(activation=SwiGLU),
    lambda: mlp(num_experts=True),
    lambda: mlp(max_rows=2.5),
    lambda: mlp(routing=(torch.ones(5, 1), torch.zeros(5, 1, device="meta").long())),
    lambda: mlp(hidden_size=16.0),
    lambda: mlp(num_experts="2"),
    lambda: mlp(routing=(torch.ones(4, 1), torch.zeros(4, 1).long())),
    lambda: mlp(routing=(np.ones((5, 1)), torch.zeros(5, 1).long())),
    lambda: mlp(routing=(torch.ones(5, 1), np.zeros((5, 1), int))),
]


def test_of_either_layer() -> None:
    """The same sentence, but for the names of layers and of weights."""
    lines, others = (said(partial(call, layer) for call in MISTAKES) for layer in (linear, mlp))
    for ours, linears in (("mlp", "linear"), ("MLP", "Linear"), ("gate_up_proj", "weight")):
        others = others.replace(ours, linears)
    assert others == lines
    assert_expected_inline(
        lines,
        """\
TypeError: grouped_linear: x must be a tensor, got ndarray
RuntimeError: grouped_linear: x must be bfloat16, float16 or float32, got float64
RuntimeError: grouped_linear: x must be bfloat16, float16 or float32, got float64
RuntimeError: grouped_linear: x is bfloat16, weight float32: cast one of them, or use torch.autocast
RuntimeError: grouped_linear: x must have a last dimension of a positive multiple of 16, got shape []
RuntimeError: grouped_linear: x must have a last dimension of a positive multiple of 16, got shape [5, 0]
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 1-D bool on cpu
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 0-D int64 on cpu
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 0-D bool on meta
ValueError: GroupedLinear: is_first_microbatch needs cache_weights=True under the recipe Float8BlockScaling
RuntimeError: GroupedLinear: is_first_microbatch=False reads the weight cache, which holds no weight yet, or none since parameters were loaded, drawn or moved: call with True
ValueError: GroupedLinear: recipe must be None or a grouped_linear.Recipe, as Float8BlockScaling(), got 'fp8'
ValueError: GroupedLinear: recipe is the class Float8BlockScaling: call it, recipe=Float8BlockScaling()
ValueError: GroupedLinear: bias must be True or False, got np.True_
ValueError: GroupedLinear: cache_weights must be True or False, got 'no'
ValueError: GroupedLinear: fuse_wgrad_accumulation must be True or False, got 'no'
ValueError: GroupedLinear: weights must be None, 'both', 'fp8' or 'mxfp4', got 'int8'
ValueError: GroupedLinear: dtype must be bfloat16, float16 or float32, got float64
ValueError: GroupedLinear: dtype must be bfloat16, float16 or float32, got 'bf16'
RuntimeError: grouped_linear: weight must be bfloat16, float16 or float32, got float64: cast it, or the layer, as layer.float() does
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 'yes'
RuntimeError: grouped_linear: weight is on meta, x is on cpu""",  # noqa: E501
    )


def test_of_what_replaces_an_attribute_or_is_no_pair() -> None:
    layer, experts = GroupedLinear(2, K, N), GroupedMLP(2, K, N)
    x, scores, chosen = torch.randn(5, K), torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64)
    weights: Any = experts.gate_up_proj, experts.down_proj
    nothing: Any = None

    def with_activation(activation: Any) -> Any:
        experts.activation = activation
        return experts(x, scores, chosen)

    layer.weight = nothing
    calls = [
        lambda: layer(x, [2, 3]),
        lambda: with_activation("relu"),
        lambda: with_activation(SwiGLU),
        lambda: experts.forward_sorted(x, [2, 3]),
        lambda: grouped_mlp(x, scores, chosen, nothing, weights[1]),
        lambda: grouped_mlp(x, scores, chosen, *weights, state=(nothing, nothing)),
    ]
    assert_expected_inline(
        said(calls),
        """\
TypeError: grouped_linear: weight must be a tensor, got NoneType
ValueError: grouped_mlp: activation must be an Activation, as SwiGLU() or GeGLU(), got 'relu'
ValueError: grouped_mlp: activation is the class SwiGLU: call it, activation=SwiGLU()
ValueError: grouped_mlp_sorted: activation is the class SwiGLU: call it, activation=SwiGLU()
TypeError: grouped_mlp: gate_up_proj must be a tensor, got NoneType
ValueError: grouped_mlp: state must be two, of gate_up_proj and of down_proj, got (None, None)""",
    )


def test_of_one_layer() -> None:
    assert_expected_inline(
        said(OTHERS),
        """\
RuntimeError: grouped_linear: K differs: x has 32, weight [E, N, K] 16
RuntimeError: grouped_mlp: gate_up_proj must be [E, 2 F, 32], as x has 32 features, got [2, 64, 16]
RuntimeError: grouped_linear: weight must be bfloat16, float16 or float32, got float64: cast it, or the layer, as layer.float() does
RuntimeError: grouped_linear: bias must be bfloat16, float16 or float32, got float64: cast it, or the layer, as layer.float() does
TypeError: grouped_linear: m_splits must be a tensor or a list, the rows of each group, got 10
TypeError: grouped_linear: m_splits must be a tensor or a list, the rows of each group, got None
RuntimeError: grouped_linear: E differs: m_splits, the rows of each expert, has 3, weight 2
TypeError: grouped_linear: m_splits must be a tensor or a list, the rows of each group, got '3052'
TypeError: grouped_linear: m_splits must hold integers, the rows of each group, got [2, '3']
RuntimeError: splits_to_offsets: m_splits must be int32 or int64, got float32
RuntimeError: splits_to_offsets: m_splits must be int32 or int64, got bool
RuntimeError: grouped_linear: m_splits is on meta, without data, x is on cpu
RuntimeError: splits_to_offsets: m_splits must be 1-D, got 2-D
ValueError: GroupedLinear: in_features must be an integer, got 16.0
ValueError: GroupedLinear: num_experts must be an integer, got 2.0
ValueError: GroupedLinear: num_experts must be an integer, got True
ValueError: GroupedLinear: init_method must be None or a function called with each expert's weight, got 'xavier'
ValueError: GroupedLinear: get_rng_state_tracker must be None or a function that returns an object with fork(), got 'tracker'
ValueError: GroupedLinear: single_grouped_weight must be True or False, got 'no'
ValueError: GroupedLinear: params_dtype must be bfloat16, float16 or float32, got int8
ValueError: GroupedMLP: activation must be an Activation, as SwiGLU() or GeGLU(), got 'swiglu'
ValueError: GroupedMLP: activation is the class SwiGLU: call it, activation=SwiGLU()
ValueError: GroupedMLP: num_experts must be an integer, got True
ValueError: grouped_mlp: max_rows must be None or an integer, got 2.5
RuntimeError: grouped_mlp: top_k_index is on meta, x is on cpu
ValueError: GroupedMLP: hidden_size must be an integer, got 16.0
ValueError: GroupedMLP: num_experts must be an integer, got '2'
RuntimeError: grouped_mlp: x [..., H], top_k_weights [..., C] and top_k_index [..., C] differ in their tokens: [5, 16], [4, 1], [4, 1]
TypeError: grouped_mlp: top_k_weights must be a tensor, got ndarray
TypeError: grouped_mlp: top_k_index must be a tensor, got ndarray""",  # noqa: E501
    )


@pytest.mark.parametrize("layer", [linear, mlp])
def test_scales_that_change_before_the_backward(layer: Any) -> None:
    """In our words: the engine's say nothing of scales."""
    kept = (GroupedLinear if layer is linear else GroupedMLP)(2, K, N, recipe=DelayedScaling())
    x = torch.randn(5, K)
    scores, chosen = torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64)
    y = kept(x, [2, 3]) if layer is linear else kept(x, scores, chosen)
    update_scales(kept)
    op = "grouped_linear" if layer is linear else "grouped_mlp"
    message = f"^{op}: a tensor that the forward saved has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=f"{message} before its backward: .*call update_scales"):
        y.sum().backward()


@pytest.mark.parametrize("layer", [linear, mlp])
def test_x_that_changes_before_the_backward(layer: Any) -> None:
    """The sentence names x, and the shape tells which tensor it was."""
    x = torch.randn(5, K, requires_grad=True) * 1
    y = layer(x)
    x.add_(1)
    message = r"before its backward: write x, .*shape is \[5, 16\]\)$"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


@pytest.mark.parametrize("number", [10**400, 1e39])
def test_numbers_that_float32_does_not_hold(number: float) -> None:
    """Those that ops compute with; a limit of 1e39 stands for none."""
    factors = torch.ones(2, 8, K), torch.ones(2, N, 8)
    calls: dict[str, Callable[[], Any]] = {
        "SwiGLU: alpha must be finite": lambda: SwiGLU(number),
        "SwiGLU: cubic must be finite": lambda: SwiGLU(cubic=number),
        "Lora: alpha must be None or a finite": lambda: Lora(8, alpha=number),
        "Lora: dropout must be": lambda: Lora(8, dropout=number),
        "Format: amax_epsilon must be finite": lambda: Format(amax_epsilon=number),
        "grouped_linear: lora.scaling must be a finite": lambda: grouped_linear(
            torch.ones(5, K), torch.ones(2, N, K), [2, 3], lora=LoraWeights(*factors, number)
        ),
        "grouped_linear: lora.dropout must be": lambda: grouped_linear(
            torch.ones(5, K), torch.ones(2, N, K), [2, 3], lora=LoraWeights(*factors, 1, number)
        ),
    }
    if isinstance(number, int):
        calls |= {
            "SwiGLU: limit must be None or a positive float": lambda: SwiGLU(limit=number),
            "ExpertParallel: capacity_factor must": lambda: ExpertParallel(capacity_factor=number),
            "grouped_mlp: max_rows must be below 2": lambda: mlp(max_rows=number),
        }
    for sentence, call in calls.items():
        with pytest.raises(ValueError, match=f"^{sentence}"):
            call()


def test_sizes_of_numpy() -> None:
    """Which are integers."""
    two = np.int64(2)
    layer = GroupedLinear(two, np.int64(K), np.int64(N), lora=Lora(two))
    assert layer(torch.ones(5, K), np.array([2, 3])).shape == (5, N)
    watch(layer, every=two, rows=two).step()
    fake_quantize(Float8BlockScaling(), except_experts=[two])


def test_numbers_of_numpy() -> None:
    """Of every option they give what Python's give."""
    results = []
    for number in (float, np.float32, np.float64):
        torch.manual_seed(0)
        layer = GroupedMLP(
            2,
            K,
            N,
            activation=SwiGLU(number(1.5), number(0.5), number(7), cubic=number(0.25)),
            recipe=Float8BlockScaling(amax_epsilon=number(0.5)),
            lora=Lora(8, alpha=number(16), dropout=number(0.25)),
        )
        layer.down_proj_lora_b.data.normal_()
        results.append(layer(torch.ones(5, K), torch.ones(5, 1), torch.zeros(5, 1).long()))
    for y in results[1:]:
        assert_same_bits(y, results[0])


class Own(TokenDispatcher):
    """One process; each function changes what a method returns."""

    def __init__(self, dispatched: Any = lambda d: d, combined: Any = lambda y: y) -> None:
        super().__init__()
        self.dispatched, self.combined = dispatched, combined

    def dispatch(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Any:
        return self.dispatched(Dispatched(x, top_k_weights, top_k_index))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Any:
        return self.combined(y)


def test_of_a_dispatcher() -> None:
    """What its methods return is checked as what a caller gives, before an op reads it."""
    mlp = GroupedMLP(2, K, N)
    x, weights, chosen = torch.randn(5, K), torch.rand(5, 2), torch.zeros(5, 2).long()
    right = mlp(x, weights, chosen)
    mistakes = [
        Own(lambda d: None),
        Own(lambda d: tuple(d)[:3]),
        Own(lambda d: d._replace(x=d.x[:3])),
        Own(lambda d: d._replace(x=d.x[:, :8])),
        Own(lambda d: d._replace(x=d.x.to(BF16))),
        Own(lambda d: d._replace(x=d.x.to("meta"))),
        Own(lambda d: d._replace(top_k_weights=d.top_k_weights[:, :1])),
        Own(lambda d: d._replace(top_k_weights=d.top_k_weights.int())),
        Own(lambda d: d._replace(top_k_index=d.top_k_index.short())),
        Own(lambda d: d._replace(max_rows=-1)),
        Own(lambda d: d._replace(max_rows=2.5)),
        Own(combined=lambda y: None),
        Own(combined=lambda y: y[:3]),
        TokenDispatcher(),
    ]

    def call(dispatcher: TokenDispatcher) -> Any:
        mlp.dispatcher = dispatcher
        return mlp(x, weights, chosen)

    assert_same_bits(call(Own()), right)
    assert_expected_inline(
        said([partial(call, mistake) for mistake in mistakes]),
        """\
TypeError: Own.dispatch must return a Dispatched, got NoneType
TypeError: Own.dispatch must return a Dispatched, got tuple
RuntimeError: Own.dispatch: x [..., H], top_k_weights [..., C] and top_k_index [..., C] differ in their tokens: [3, 16], [5, 2], [5, 2]
RuntimeError: Own.dispatch: x must be [S, 16] float32 on cpu, as the tokens that it was given, got [5, 8] float32 on cpu
RuntimeError: Own.dispatch: x must be [S, 16] float32 on cpu, as the tokens that it was given, got [5, 16] bfloat16 on cpu
RuntimeError: Own.dispatch: x must be [S, 16] float32 on cpu, as the tokens that it was given, got [5, 16] float32 on meta
RuntimeError: Own.dispatch: C differs: top_k_weights has 1, top_k_index 2
RuntimeError: Own.dispatch: top_k_weights must be floating, of 16 bits or more, got int32
RuntimeError: Own.dispatch: top_k_index must be int32 or int64, got int16
ValueError: Own.dispatch: max_rows must not be negative, got -1
ValueError: Own.dispatch: max_rows must be None or an integer, got 2.5
TypeError: Own.combine: the result must be a tensor, got NoneType
RuntimeError: Own.combine must return [5, 16], got [3, 16]
NotImplementedError: TokenDispatcher has no dispatch""",  # noqa: E501
    )
