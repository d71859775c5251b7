# SPDX-License-Identifier: Apache-2.0
"""Checks of the layers: of constructors' options, of a call's tensors, in the caller's words.

The ops check tensors again, in theirs. T rows or tokens, E groups (experts), C experts chosen for a
token, K in_features, N out_features, H features of a token, F features inside an expert.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear.autograd.low_rank import Adapter
from grouped_linear.autograd.projection import Projection
from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    FEATURE_MULTIPLE,
    MAX_GROUPS,
    MX_BLOCK,
    dtype_name,
)
from grouped_linear.nn.lora import MAX_RANK
from grouped_linear.ops.activation import Activation
from grouped_linear.ops.constants import is_finite, is_integer, is_number
from grouped_linear.quantized.keep import is_dtensor
from grouped_linear.recipes import DelayedScalingState, Recipe
from grouped_linear.recipes.format import check_flags as check_flags
from grouped_linear.recipes.format import check_model as check_model
from grouped_linear.recipes.format import check_num_groups as check_num_groups
from grouped_linear.recipes.format import shown
from grouped_linear.recipes.recipe import check_is_recipe

#: The names of a projection's weight, bias and adapter in a call, and the letters of [N, K].
LINEAR = "weight", "bias", "lora", "N", "K"
GATE_UP = "gate_up_proj", "gate_up_proj_bias", "gate_up_lora", "2 F", "H"
DOWN = "down_proj", "down_proj_bias", "down_lora", "H", "F"

# --- options -------------------------------------------------------------------------------------


def check_features(layer: str, **features: int) -> None:
    """Raise ValueError unless each is a positive multiple of 16."""
    for name, size in features.items():
        if not is_integer(size):
            raise ValueError(f"{layer}: {name} must be an integer, got {size!r}")
        if size <= 0 or size % FEATURE_MULTIPLE:
            raise ValueError(
                f"{layer}: {name} must be a positive multiple of {FEATURE_MULTIPLE}, got {size}"
            )


def check_mx_blocks(layer: str, recipe: Recipe | None, weights: Any, **features: int) -> None:
    """Raise ValueError for in_features of a weight in MXFP4 that are no whole blocks."""
    learns = recipe is not None and recipe.weight.qat == "mxfp4"
    for name, size in features.items():
        if (learns or weights == "mxfp4") and size % MX_BLOCK:
            option = "qat" if learns else "weights"
            raise ValueError(
                f"{layer}: {name} must be a multiple of {MX_BLOCK} with {option}='mxfp4', got "
                f"{size}"
            )


def check_parameters_dtype(layer: str, name: str, dtype: Any) -> None:
    """Raise ValueError for a parameter dtype that no GEMM takes."""
    given = torch.get_default_dtype() if dtype is None else dtype
    if given not in ACTIVATIONS:
        default = ", torch's default dtype" if dtype is None else ""
        raise ValueError(
            f"{layer}: {name} must be bfloat16, float16 or float32, got {shown(given)}{default}"
        )


def check_recipe(layer: str, recipe: Recipe | None) -> None:
    """Raise ValueError unless it is None or an instance of Recipe."""
    if recipe is not None:
        check_is_recipe(layer, recipe, "None or a grouped_linear.Recipe, as Float8BlockScaling()")
        if recipe.weight.qat_dim != -1:
            raise ValueError(f"{layer}: qat_dim is convert's, for weights kept as [E, K, N]")


def check_state(op: str, state: Any) -> None:
    """Raise ValueError unless it is None or a DelayedScalingState."""
    if state is not None and not isinstance(state, DelayedScalingState):
        raise ValueError(
            f"{op}: state must be a grouped_linear.recipes.DelayedScalingState, got {state!r}"
        )


def check_activation(op: str, activation: Activation) -> None:
    """Raise ValueError unless it is an instance of Activation."""
    if isinstance(activation, type) and issubclass(activation, Activation):
        name = activation.__name__
        raise ValueError(f"{op}: activation is the class {name}: call it, activation={name}()")
    if not isinstance(activation, Activation):
        raise ValueError(
            f"{op}: activation must be an Activation, as SwiGLU() or GeGLU(), got {activation!r}"
        )


# --- a call's tensors ----------------------------------------------------------------------------


def check_whole(where: str, parameters: Iterable[Tensor], action: str) -> None:
    """Raise ValueError for sharded parameters: they must be replaced before they are sharded."""
    if any(map(is_dtensor, parameters)):
        raise ValueError(f"{where}: parameters are sharded already: {action} before")


def check_parameter(op: str, name: str, t: Tensor) -> None:
    """Raise RuntimeError for a parameter whose dtype no GEMM takes, for example after ``double()``.

    The cast to the activations' dtype would silently damage a bias of another dtype.
    """
    check_tensor(op, name, t)
    if t.dtype not in ACTIVATIONS:
        remedy = "cast it, or the layer, as layer.float() does"
        if t.dtype.itemsize == 1:  # whose scales a cast would leave out
            remedy = "give a frozen weight's numbers, as layer.dequantize(name) returns them"
        got = dtype_name(t.dtype)
        raise RuntimeError(
            f"{op}: {name} must be bfloat16, float16 or float32, got {got}: {remedy}"
        )


def check_device(op: str, name: str, t: Tensor | None, x: Tensor) -> None:
    """Raise RuntimeError for a tensor on another device than x."""
    if t is not None and t.device != x.device:
        raise RuntimeError(f"{op}: {name} is on {t.device}, x is on {x.device}")


def check_tensor(op: str, name: str, value: Any) -> None:
    """Raise TypeError for a DTensor, a tensor that is not dense, and anything but a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        got = "a nested one" if value.is_nested else f"layout {value.layout}"
        raise TypeError(
            f"{op}: {name} must be a dense tensor, got {got}: pass a nested tensor's values(), or "
            "a sparse one's to_dense()"
        )
    if is_dtensor(value):
        raise TypeError(
            f"{op}: {name} is a DTensor, and a layer computes with the tensors of one process: "
            "pass its to_local(), or shard the layer by fully_shard, a GroupedMLP also by "
            "grouped_linear.parallel.ExpertParallel"
        )


def check_adapter(op: str, name: str, adapter: Adapter, weight: str, w: Tensor, x: Tensor) -> None:
    """Raise, in the caller's words, for an adapter that does not fit a weight w [E, N, K]."""
    a, b, scaling, dropout = adapter.a_ErK, adapter.b_ENr, adapter.scaling, adapter.dropout
    for part, t in ((f"{name}.a", a), (f"{name}.b", b)):
        check_parameter(op, part, t)
        check_device(op, part, t, x)
    E, N, K = w.shape
    rank = a.size(1) if a.dim() == 3 else 0
    if not 1 <= rank <= MAX_RANK or a.shape != (E, rank, K) or b.shape != (E, N, rank):
        raise RuntimeError(
            f"{op}: {name} must be a [{E}, r, {K}] and b [{E}, {N}, r] with r from 1 to "
            f"{MAX_RANK}, as {weight} is {list(w.shape)}, got {list(a.shape)} and {list(b.shape)}"
        )
    if not is_finite(scaling):
        raise ValueError(f"{op}: {name}.scaling must be a finite number, got {scaling!r}")
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise ValueError(
            f"{op}: {name}.dropout must be at least 0 and less than 1, got {dropout!r}"
        )


def splits_on(op: str, m_splits: Any, device: torch.device, name: str, E: int) -> Tensor:
    """Group sizes as a tensor on the device; raises for what are no integers of E groups."""
    if isinstance(m_splits, Tensor):
        check_tensor(op, "m_splits", m_splits)
        if m_splits.is_meta and device.type != "meta":
            raise RuntimeError(f"{op}: m_splits is on meta, without data, x is on {device}")
        sizes = m_splits
    elif isinstance(m_splits, str | bytes | dict | set) or not hasattr(m_splits, "__len__"):
        raise TypeError(
            f"{op}: m_splits must be a tensor or a list, the rows of each group, got {m_splits!r}"
        )
    elif torch.compiler.is_compiling():
        sizes = torch.tensor(m_splits, device=device)
    else:
        try:
            # Not as_tensor: Dynamo would compile a graph for each list.
            sizes = torch.tensor(m_splits, device=device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"{op}: m_splits must hold integers, the rows of each group, got {m_splits!r}"
            ) from error
    if sizes.dim() == 1 and torch.compiler.is_compiling():
        # In a nested_compile_region Dynamo takes no message, so what is known while a graph is made
        # is not checked there.
        assume(sizes.size(0) == E, lambda: "grouped_linear: m_splits and weight differ in E")
    elif sizes.dim() == 1 and sizes.size(0) != E:
        raise RuntimeError(
            f"{op}: E differs: m_splits, the rows of each expert, has {sizes.size(0)}, {name} {E}"
        )
    return sizes if sizes.device == device else sizes.to(device)  # the op checks the rest


def assume(holds: Any, sentence: Callable[[], str]) -> None:
    """In a graph: that a rule of unknown sizes holds. Dynamo takes no variables in a sentence."""
    if holds is not True:
        torch._check(holds, sentence)


# --- a call --------------------------------------------------------------------------------------


def check_projection(op: str, names: Sequence[str], given: Projection, x: Tensor) -> None:
    """Check a projection that is multiplied with rows x, in the caller's words."""
    (weight, bias, lora, *letters), w, bias_EN = names, given.weights[0], given.bias_EN
    for name, t in ((weight, w), (bias, bias_EN)):
        check_device(op, name, t, x)
    E = len(given.weights) if w.dim() == 2 else w.size(0)
    if not 1 <= E <= MAX_GROUPS:
        raise RuntimeError(f"{op}: E must be between 1 and {MAX_GROUPS}, got {E}")
    for letter, size in zip(letters, w.shape[-2:], strict=True):
        if size <= 0 or size % FEATURE_MULTIPLE:
            raise RuntimeError(
                f"{op}: {letter} must be a positive multiple of {FEATURE_MULTIPLE}, got {size}: "
                f"{weight} is {list(w.shape)}"
            )
    if x.dtype not in ACTIVATIONS:
        raise RuntimeError(
            f"{op}: x must be bfloat16, float16 or float32, got {dtype_name(x.dtype)}"
        )
    is_stored = w.dtype not in ACTIVATIONS  # numbers that GEMMs read beside any x
    if x.dtype != w.dtype and not given.recipe.weight.reads_any_dtype and not is_stored:
        raise RuntimeError(
            f"{op}: x is {dtype_name(x.dtype)}, {weight} {dtype_name(w.dtype)}: "
            "cast one of them, or use torch.autocast"
        )
    if bias_EN is not None and bias_EN.shape != (E, w.size(-2)):
        raise RuntimeError(
            f"{op}: {bias} must be {[E, w.size(-2)]}, as {weight} is {[E, *w.shape[-2:]]}, got "
            f"{list(bias_EN.shape)}"
        )
    if given.adapter is not None:
        check_adapter(op, lora, given.adapter, weight, w, x)


def check_choices(
    op: str, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor, max_rows: int | None
) -> None:
    """Check the routing in the caller's words, or what a dispatcher returned."""
    for name, t in (("top_k_weights", top_k_weights), ("top_k_index", top_k_index)):
        check_tensor(op, name, t)
        check_device(op, name, t, x)
    _check_factors(op, "top_k_weights", top_k_weights)
    if any(t.dim() == 0 or t.size(-1) == 0 for t in (top_k_weights, top_k_index)):
        raise RuntimeError(
            f"{op}: top_k_weights and top_k_index must be [..., C] with C positive, got "
            f"{list(top_k_weights.shape)} and {list(top_k_index.shape)}"
        )
    if x.dim() == top_k_weights.dim() == top_k_index.dim() and torch.compiler.is_compiling():
        for t in (top_k_weights, top_k_index):
            for i in range(x.dim() - 1):
                assume(
                    x.size(i) == t.size(i),
                    lambda: "grouped_mlp: x, top_k_weights and top_k_index differ in their tokens",
                )
    elif not x.shape[:-1] == top_k_weights.shape[:-1] == top_k_index.shape[:-1]:
        raise RuntimeError(  # without str() of a shape, which Dynamo does not trace
            f"{op}: x [..., H], top_k_weights [..., C] and top_k_index [..., C] differ in "
            f"their tokens: {list(x.shape)}, {list(top_k_weights.shape)}, {list(top_k_index.shape)}"
        )
    if top_k_weights.size(-1) != top_k_index.size(-1):
        raise RuntimeError(
            f"{op}: C differs: top_k_weights has {top_k_weights.size(-1)}, top_k_index "
            f"{top_k_index.size(-1)}"
        )
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"{op}: top_k_index must be int32 or int64, got {dtype_name(top_k_index.dtype)}"
        )
    if max_rows is not None and torch.compiler.is_compiling():  # it may be computed from x's size
        assume(max_rows >= 0, lambda: "grouped_mlp: max_rows must not be negative")
    elif max_rows is None:
        return
    elif not (is_integer(max_rows) or isinstance(max_rows, torch.SymInt)):
        raise ValueError(f"{op}: max_rows must be None or an integer, got {max_rows!r}")
    elif max_rows < 0:
        raise ValueError(f"{op}: max_rows must not be negative, got {max_rows}")
    elif max_rows >= 2**31:  # rows are numbered in int32
        raise ValueError(f"{op}: max_rows must be below 2**31, got {max_rows}")


def check_dispatched(dispatcher: nn.Module, x: Tensor, dispatched: Any) -> None:
    """Check what a dispatcher returned for tokens x [T, H]."""
    op = f"{type(dispatcher).__name__}.dispatch"
    if not isinstance(dispatched, tuple) or len(dispatched) != 5:
        raise TypeError(f"{op} must return a Dispatched, got {type(dispatched).__name__}")
    came, top_k_weights, top_k_index, max_rows, _ = dispatched
    check_tensor(op, "x", came)
    same = (came.dtype, came.device) == (x.dtype, x.device)
    if not same or came.dim() != 2 or came.size(1) != x.size(1):
        raise RuntimeError(
            f"{op}: x must be [S, {x.size(1)}] {dtype_name(x.dtype)} on {x.device}, as the tokens "
            f"that it was given, got {list(came.shape)} {dtype_name(came.dtype)} on {came.device}"
        )
    check_choices(op, came, top_k_weights, top_k_index, max_rows)


def check_combined(dispatcher: nn.Module, x: Tensor, y: Any) -> None:
    """Check that a dispatcher summed outputs of tokens x [T, H]; not in a graph, of any sizes."""
    op = f"{type(dispatcher).__name__}.combine"
    check_tensor(op, "the result", y)
    if not torch.compiler.is_compiling() and y.shape != x.shape:
        raise RuntimeError(f"{op} must return {list(x.shape)}, got {list(y.shape)}")


def _check_factors(op: str, name: str, t: Tensor) -> None:
    """Raise RuntimeError for weights of rows in a dtype that float32 or masks do not take."""
    if not t.is_floating_point() or t.dtype.itemsize == 1:
        raise RuntimeError(
            f"{op}: {name} must be floating, of 16 bits or more, got {dtype_name(t.dtype)}"
        )


def check_row_weights(op: str, row_weights: Any, x: Tensor) -> None:
    """Check the weights of rows that come sorted."""
    check_tensor(op, "row_weights", row_weights)
    check_device(op, "row_weights", row_weights, x)
    _check_factors(op, "row_weights", row_weights)
    if row_weights.dim() == 1 and torch.compiler.is_compiling():
        same = row_weights.size(0) == x.size(0)
        assume(same, lambda: "grouped_mlp_sorted: row_weights and x differ in R")
    elif row_weights.shape != x.shape[:1]:
        raise RuntimeError(
            f"{op}: row_weights must be [{x.size(0)}], one of each row, got "
            f"{list(row_weights.shape)}"
        )


def check_mlp(op: str, x_TH: Tensor, gate_up: Projection, down: Projection, gated: bool) -> None:
    """Check both projections in the caller's words."""
    gate_up_proj, down_proj = gate_up.weights[0], down.weights[0]
    if gate_up_proj.dim() != 3 or gate_up_proj.size(2) != x_TH.size(1):
        raise RuntimeError(
            f"{op}: gate_up_proj must be [E, {'2 F' if gated else 'F'}, {x_TH.size(1)}], as x "
            f"has {x_TH.size(1)} features, got {list(gate_up_proj.shape)}"
        )
    E, _, H = gate_up_proj.shape
    if down_proj.dim() != 3 or down_proj.shape[:2] != (E, H):
        raise RuntimeError(
            f"{op}: down_proj must be [{E}, {H}, F], as gate_up_proj has {E} experts of "
            f"{H} features, got {list(down_proj.shape)}"
        )
    if (1 + gated) * down_proj.size(2) != gate_up_proj.size(1):
        raise RuntimeError(
            f"{op}: F differs: down_proj has {down_proj.size(2)}, gate_up_proj "
            f"{gate_up_proj.size(1)} {'for gate and up' if gated else 'without a gate'}"
        )
    check_projection(op, GATE_UP, gate_up, x_TH)
    check_projection(op, DOWN, down, x_TH)
