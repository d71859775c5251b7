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

from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    GroupedLinear,
    GroupedMLP,
    SwiGLU,
    update_scales,
)
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
MISTAKES: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "numpy x": (TypeError, lambda layer: layer(np.ones((5, K), np.float32))),
    "x of float64": (RuntimeError, lambda layer: layer(torch.ones(5, K).double())),
    "x of float64, fp8": (RuntimeError, lambda layer: layer(torch.ones(5, K).double(), **FP8)),
    "x of bfloat16": (RuntimeError, lambda layer: layer(torch.ones(5, K, dtype=BF16))),
    "no dimension": (RuntimeError, lambda layer: layer(torch.ones(()))),
    "flag": (RuntimeError, lambda layer: layer(first=FLAG)),
    "flag of an integer": (RuntimeError, lambda layer: layer(first=torch.tensor(1))),
    "flag on meta": (RuntimeError, lambda layer: layer(first=FLAG[0].to("meta"))),
    "flag without cache": (ValueError, lambda layer: layer(first=True, **FP8)),
    "empty cache": (RuntimeError, lambda layer: layer(first=False, cache_weights=True, **FP8)),
    "recipe": (ValueError, lambda layer: layer(recipe="fp8")),
    "recipe's class": (ValueError, lambda layer: layer(recipe=Float8BlockScaling)),
    "numpy's True": (ValueError, lambda layer: layer(bias=np.True_)),
    "cache_weights": (ValueError, lambda layer: layer(cache_weights="no")),
    "fused": (ValueError, lambda layer: layer(fuse_wgrad_accumulation="no")),
    "quantized": (ValueError, lambda layer: layer(weights="int8", **FP8)),
    "dtype": (ValueError, lambda layer: layer(dtype=torch.float64)),
    "no dtype": (ValueError, lambda layer: layer(dtype="bf16")),
    "double": (RuntimeError, lambda layer: layer(cast=torch.float64, bias=False)),
    "flag of text": (RuntimeError, lambda layer: layer(first="yes")),
    "parameters on meta": (RuntimeError, lambda layer: layer(device="meta")),
}
# Of one of them.
OTHERS: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "features of x, linear": (RuntimeError, lambda: linear(torch.ones(5, N))),
    "features of x, mlp": (RuntimeError, lambda: mlp(torch.ones(5, N))),
    "m_splits 10": (TypeError, lambda: linear(m_splits=10)),
    "m_splits None": (TypeError, lambda: linear(m_splits=None)),
    "m_splits of three": (RuntimeError, lambda: linear(m_splits=[1, 2, 2])),
    "m_splits of text": (TypeError, lambda: linear(m_splits="3052")),
    "m_splits with text": (TypeError, lambda: linear(m_splits=[2, "3"])),
    "m_splits of floats": (RuntimeError, lambda: linear(m_splits=[2, 3.0])),
    "m_splits of flags": (RuntimeError, lambda: linear(m_splits=[True, False])),
    "m_splits on meta": (
        RuntimeError,
        lambda: linear(m_splits=torch.tensor([2, 3], device="meta")),
    ),
    "m_splits of rows": (RuntimeError, lambda: linear(m_splits=torch.tensor([[2, 3]]))),
    "in_features": (ValueError, lambda: linear(in_features=16.0)),
    "linear's num_experts": (ValueError, lambda: linear(num_experts=2.0)),
    "linear's num_experts True": (ValueError, lambda: linear(num_experts=True)),
    "init_method": (ValueError, lambda: linear(init_method="xavier")),
    "tracker": (ValueError, lambda: linear(get_rng_state_tracker="tracker")),
    "single": (ValueError, lambda: linear(single_grouped_weight="no")),
    "params_dtype": (ValueError, lambda: linear(params_dtype=torch.int8)),
    "activation": (ValueError, lambda: mlp(activation="swiglu")),
    "activation's class": (ValueError, lambda: mlp(activation=SwiGLU)),
    "num_experts True": (ValueError, lambda: mlp(num_experts=True)),
    "max_rows": (ValueError, lambda: mlp(max_rows=2.5)),
    "experts on meta": (
        RuntimeError,
        lambda: mlp(routing=(torch.ones(5, 1), torch.zeros(5, 1, device="meta").long())),
    ),
    "hidden_size": (ValueError, lambda: mlp(hidden_size=16.0)),
    "num_experts": (ValueError, lambda: mlp(num_experts="2")),
    "no tokens": (RuntimeError, lambda: mlp(routing=(torch.ones(4, 1), torch.zeros(4, 1).long()))),
    "numpy scores": (TypeError, lambda: mlp(routing=(np.ones((5, 1)), torch.zeros(5, 1).long()))),
    "numpy experts": (TypeError, lambda: mlp(routing=(torch.ones(5, 1), np.zeros((5, 1), int)))),
}


def said(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    return f"{kind.__name__}: {error.value}"


def test_of_either_layer() -> None:
    """The same sentence, but for the names of layers and of weights."""
    lines, others = (
        [said(kind, partial(call, layer)) for kind, call in MISTAKES.values()]
        for layer in (linear, mlp)
    )
    for line, other in zip(lines, others, strict=True):
        other = other.replace("grouped_mlp", "grouped_linear")
        other = other.replace("GroupedMLP", "GroupedLinear")
        assert other.replace("gate_up_proj", "weight") == line
    assert_expected_inline(
        "\n".join(lines),
        """\
TypeError: grouped_linear: x must be a tensor, got ndarray
RuntimeError: grouped_linear: x must be bfloat16, float16 or float32, got float64
RuntimeError: grouped_linear: x must be bfloat16, float16 or float32, got float64
RuntimeError: grouped_linear: x is bfloat16, weight float32: cast one of them, or use torch.autocast
RuntimeError: grouped_linear: x must have a last dimension of a positive multiple of 16, got shape []
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 1-D bool on cpu
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 0-D int64 on cpu
RuntimeError: GroupedLinear: is_first_microbatch must be None, a bool or a 0-D bool tensor on cpu, got 0-D bool on meta
ValueError: GroupedLinear: is_first_microbatch needs cache_weights=True under the recipe Float8BlockScaling
RuntimeError: GroupedLinear: is_first_microbatch=False reads the weight cache, which holds no weight yet, or none since parameters were loaded, drawn or moved: call with True
ValueError: GroupedLinear: recipe must be None or a grouped_linear.Recipe, got 'fp8'
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


def test_of_one_layer() -> None:
    lines = [said(kind, call) for kind, call in OTHERS.values()]
    assert_expected_inline(
        "\n".join(lines),
        """\
RuntimeError: grouped_linear: K differs: x has 32, weight 16
RuntimeError: grouped_mlp: gate_up_proj must be [E, 2 F, 32], as x has 32 features, got [2, 64, 16]
TypeError: grouped_linear: m_splits must be a tensor or a list, the rows of each group, got 10
TypeError: grouped_linear: m_splits must be a tensor or a list, the rows of each group, got None
RuntimeError: grouped_linear: E differs: m_splits, the rows of each expert, has 3, weight 2
TypeError: grouped_linear: m_splits must be a tensor or a list, the rows of each group, got '3052'
TypeError: grouped_linear: m_splits must hold integers, the rows of each group, got [2, '3']
RuntimeError: grouped_linear: m_splits must be [E] int32 or int64, got [2] float32
RuntimeError: grouped_linear: m_splits must be [E] int32 or int64, got [2] bool
RuntimeError: grouped_linear: m_splits is on meta, without data, x is on cpu
RuntimeError: grouped_linear: m_splits must be [E] int32 or int64, got [1, 2] int64
ValueError: GroupedLinear: in_features must be an integer, got 16.0
ValueError: GroupedLinear: num_experts must be an integer, got 2.0
ValueError: GroupedLinear: num_experts must be an integer, got True
ValueError: GroupedLinear: init_method must be None or a function called with each expert's weight, got 'xavier'
ValueError: GroupedLinear: get_rng_state_tracker must be None or a function that returns an object with fork(), got 'tracker'
ValueError: GroupedLinear: single_grouped_weight must be True or False, got 'no'
ValueError: GroupedLinear: params_dtype must be bfloat16, float16 or float32, got int8
ValueError: GroupedMLP: activation must be a SwiGLU or an Activation, got 'swiglu'
ValueError: GroupedMLP: activation is the class SwiGLU: call it, activation=SwiGLU()
ValueError: GroupedMLP: num_experts must be an integer, got True
ValueError: grouped_mlp: max_rows must be None or an integer, got 2.5
RuntimeError: grouped_mlp: top_k_index is on meta, x is on cpu
ValueError: GroupedMLP: hidden_size must be an integer, got 16.0
ValueError: GroupedMLP: num_experts must be an integer, got '2'
RuntimeError: grouped_mlp: x, top_k_weights and top_k_index differ in their tokens: [5, 16], [4, 1], [4, 1]
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
    with pytest.raises(RuntimeError, match=r"before its backward: write x .*shape is \[5, 16\]\)$"):
        y.sum().backward()


def test_sizes_of_numpy() -> None:
    """Which are integers."""
    layer = GroupedLinear(np.int64(2), np.int64(K), np.int64(N))
    assert layer(torch.ones(5, K), np.array([2, 3])).shape == (5, N)
