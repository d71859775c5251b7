"""The linear layer as a function, and checks that both layers share.

T rows, E groups (experts), K in_features, N out_features.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.context import PLAIN_CALL, LinearContext, LinearOptions, StoredWeight
from grouped_linear.autograd.linear import GroupedLinearFunction
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, MAX_GROUPS, dtype_name
from grouped_linear.nn.lora import MAX_RANK, LoraWeights, dropped, is_number
from grouped_linear.nn.options import check_recipe, check_state
from grouped_linear.quantized.weight import KEPT, is_dtensor, stored_weight
from grouped_linear.recipes import UNQUANTIZED, DelayedScalingState, Recipe, WeightList


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast computes in on a device, or None where it is off."""
    device_type = device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_weights(weights: WeightList, recipe: Recipe, dtype: torch.dtype) -> WeightList:
    """Cast weights to autocast's dtype, unless the recipe's quantizer reads any dtype."""
    w = weights[0]
    if recipe.weight.reads_any_dtype or w.dtype not in ACTIVATIONS or w.dtype == dtype:
        return weights
    return tuple(w.to(dtype) for w in weights)


def check_whole(where: str, parameters: Iterable[Tensor], action: str) -> None:
    """Raise ValueError for sharded parameters: they must be replaced before they are sharded."""
    if any(map(is_dtensor, parameters)):
        raise ValueError(f"{where}: parameters are sharded already: {action} before")


def check_parameters(op: str, **parameters: Tensor | None) -> None:
    """Raise RuntimeError for a parameter whose dtype no GEMM takes, for example after ``double()``.

    The cast to the activations' dtype would silently damage a bias of another dtype.
    """
    for name, t in parameters.items():
        if t is None:
            continue
        check_tensors(op, (name,), (t,))
        if t.dtype not in ACTIVATIONS:
            raise RuntimeError(
                f"{op}: {name} must be bfloat16, float16 or float32, got {dtype_name(t.dtype)}: "
                "cast it, or the layer, as layer.float() does"
            )


def check_device(op: str, name: str, t: Tensor | None, x: Tensor) -> None:
    """Raise RuntimeError for a tensor on another device than x."""
    if t is not None and t.device != x.device:
        raise RuntimeError(f"{op}: {name} is on {t.device}, x is on {x.device}")


def check_sizes(op: str, name: str, w: Tensor, E: int, **features: int) -> None:
    """Raise RuntimeError, in the layer's words, for a weight whose size the ops do not take."""
    if not 1 <= E <= MAX_GROUPS:
        raise RuntimeError(f"{op}: E must be between 1 and {MAX_GROUPS}, got {E}")
    for letter, size in features.items():
        if size <= 0 or size % FEATURE_MULTIPLE:
            raise RuntimeError(
                f"{op}: {letter} must be a positive multiple of {FEATURE_MULTIPLE}, got {size}: "
                f"{name} is {list(w.shape)}"
            )


def check_dtypes(op: str, x: Tensor, name: str, w: Tensor, recipe: Recipe) -> None:
    """Raise RuntimeError for activations and a weight that the recipe's GEMM cannot multiply."""
    if x.dtype not in ACTIVATIONS:
        raise RuntimeError(
            f"{op}: x must be bfloat16, float16 or float32, got {dtype_name(x.dtype)}"
        )
    if x.dtype != w.dtype and not recipe.weight.reads_any_dtype:
        raise RuntimeError(
            f"{op}: x is {dtype_name(x.dtype)}, {name} {dtype_name(w.dtype)}: "
            "cast one of them, or use torch.autocast"
        )


def check_tensors(op: str, names: Iterable[str], values: Iterable[Any]) -> None:
    """Raise TypeError for DTensors and for anything but a tensor, such as a numpy array."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        if is_dtensor(value):
            raise TypeError(
                f"{op}: {name} is a DTensor, and a layer computes with the tensors of one process: "
                "pass its to_local(), or let fully_shard or grouped_linear.parallel.ExpertParallel "
                "shard the layer"
            )


def check_lora_weights(
    op: str, name: str, lora: Any, weight_name: str, weight: Tensor, x: Tensor
) -> None:
    """Raise, in the caller's words, for an adapter that does not fit a weight [E, N, K]."""
    if lora is None:
        return
    if not isinstance(lora, LoraWeights):
        raise TypeError(f"{op}: {name} must be None or a LoraWeights, got {type(lora).__name__}")
    a, b, scaling, dropout = lora
    named = {f"{name}.a": a, f"{name}.b": b}
    check_tensors(op, named, named.values())
    check_parameters(op, **named)
    for part, t in named.items():
        check_device(op, part, t, x)
    E, N, K = weight.shape
    rank = a.size(1) if a.dim() == 3 else 0
    if not 1 <= rank <= MAX_RANK or a.shape != (E, rank, K) or b.shape != (E, N, rank):
        raise RuntimeError(
            f"{op}: {name} must be a [{E}, r, {K}] and b [{E}, {N}, r] with r from 1 to "
            f"{MAX_RANK}, as {weight_name} is {list(weight.shape)}, got {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    # Not math.isfinite: Dynamo does not trace it for a float that it holds as a symbol.
    if not (is_number(scaling) and -math.inf < scaling < math.inf):
        raise ValueError(f"{op}: {name}.scaling must be a finite number, got {scaling!r}")
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise ValueError(
            f"{op}: {name}.dropout must be at least 0 and less than 1, got {dropout!r}"
        )


def check_splits(op: str, m_splits: Any, x: Tensor, name: str, E: int) -> None:
    """Check group sizes, in the caller's words."""
    if isinstance(m_splits, Tensor):
        check_tensors(op, ("m_splits",), (m_splits,))
        if m_splits.is_meta and not x.is_meta:
            raise RuntimeError(f"{op}: m_splits is on meta, without data, x is on {x.device}")
    elif isinstance(m_splits, str | bytes | dict | set) or not hasattr(m_splits, "__len__"):
        raise TypeError(
            f"{op}: m_splits must be a tensor or a list, the rows of each group, got {m_splits!r}"
        )
    sizes = m_splits.shape if isinstance(m_splits, Tensor) else (len(m_splits),)
    if len(sizes) == 1 and torch.compiler.is_compiling():  # an unknown size is assumed to be E
        # Dynamo of torch 2.11 takes no message with variables.
        torch._check(sizes[0] == E, lambda: "grouped_linear: m_splits and weight differ in E")
    elif len(sizes) == 1 and sizes[0] != E:
        raise RuntimeError(f"{op}: E differs: m_splits has {sizes[0]}, {name} {E}")


def splits_on(op: str, m_splits: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Group sizes as a tensor on the device; raises for what is no vector of integers."""
    if isinstance(m_splits, Tensor):
        sizes = m_splits
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
    if sizes.dim() != 1 or sizes.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"{op}: m_splits must be [E] int32 or int64, got {list(sizes.shape)} "
            f"{dtype_name(sizes.dtype)}"
        )
    return sizes if sizes.device == device else sizes.to(device)


def as_rows(op: str, x: Tensor) -> Tensor:
    """x [..., K] as [T, K]."""
    if x.dim() == 0 or x.size(-1) == 0:
        raise RuntimeError(
            f"{op}: x must have a last dimension of a positive multiple of {FEATURE_MULTIPLE}, "
            f"got shape {list(x.shape)}"
        )
    return x if x.dim() == 2 else x.reshape(-1, x.size(-1))


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    m_splits: Tensor | Sequence[int],
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: DelayedScalingState | None = None,
    *,
    lora: LoraWeights | None = None,
) -> Tensor:
    """Apply to each group of rows its own linear layer. Differentiable.

    For group e and its rows t: ``y[t] = x[t] @ weight[e].T + bias[e]``. Group sizes are data: they
    may be unaligned or zero, and their sum may be less than the number of rows. An adapter adds
    ``lora.scaling * (x[t] @ lora.a[e].T) @ lora.b[e].T``, in x's dtype under every recipe. Under
    torch.autocast the layer computes in the autocast dtype, as torch.nn.functional.linear does.

    Args:
        x: [..., K] bfloat16, float16 or float32, rows sorted by group; leading dimensions count as
            rows. K and N are multiples of 16.
        weight: [E, N, K]. Without a recipe of x's dtype; the quantizing recipes read any of the
            three dtypes. A weight that is stored as [E, K, N] is given as its ``.mT``: it is read
            in place (MXFP8 copies it), and its gradient has its layout (a gradient in e5m2 is
            copied).
        m_splits: [E] rows of each group, int32 or int64. A tensor on x's device is never read by
            the host; a list or a tensor elsewhere is copied there.
        bias: [E, N], of any of the three dtypes.
        recipe: how the GEMMs are computed; None for x's dtype.
        state: of this layer, under a recipe that has one: ``DelayedScaling``. With gradients
            enabled the largest magnitudes of x, weight and dy are recorded there.
        lora: an adapter, see :class:`grouped_linear.nn.lora.LoraWeights`. A weight that does not
            require grad then costs no wgrad and keeps nothing.

    Returns:
        [..., N] of x's dtype, or autocast's; zero in rows at and past sum(m_splits).

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size, and on CPU for wrong m_splits.
        TypeError: for an argument that is no tensor, or no adapter.
        ValueError: if ``recipe`` is no recipe, if its state is missing, if there is a state and no
            recipe that has one.

    >>> x, weight = torch.randn(5, 16), torch.randn(2, 32, 16)
    >>> y = grouped_linear(x, weight, torch.tensor([2, 3]))
    >>> torch.allclose(y[:2], x[:2] @ weight[0].T, atol=1e-5)
    True
    """
    check_parameters("grouped_linear", weight=weight, bias=bias)
    if weight.dim() != 3:
        raise RuntimeError(f"grouped_linear: weight must be [E, N, K], got {list(weight.shape)}")
    check_recipe("grouped_linear", recipe)
    check_state("grouped_linear", state)
    has_state = recipe is not None and recipe.has_state
    if has_state and state is None:
        raise ValueError(
            f"grouped_linear: {type(recipe).__name__} has a state: pass state, or use GroupedLinear"
        )
    if state is not None and not has_state:
        raise ValueError(f"grouped_linear: state needs a recipe that has one, got recipe {recipe}")
    of_call = recipe if state is None else state.of_call()
    return apply_layer(x, (weight,), bias, m_splits, of_call, lora=lora)


def _check_call(
    x_TK: Tensor,
    weights: WeightList,
    bias: Tensor | None,
    m_splits: Tensor | Sequence[int],
    recipe: Recipe,
) -> None:
    """Check the call in the caller's words. The ops check everything again, in theirs."""
    op, weight = "grouped_linear", weights[0]
    E = len(weights) if weight.dim() == 2 else weight.size(0)
    N, K = weight.shape[-2:]
    check_splits(op, m_splits, x_TK, "weight", E)
    if x_TK.size(1) != K:
        raise RuntimeError(f"{op}: K differs: x has {x_TK.size(1)}, weight {K}")
    check_sizes(op, "weight", weight, E, N=N, K=K)
    check_dtypes(op, x_TK, "weight", weight, recipe)
    check_device(op, "weight", weight, x_TK)
    check_device(op, "bias", bias, x_TK)
    if bias is not None and bias.shape != (E, N):
        raise RuntimeError(
            f"{op}: bias must be {[E, N]}, as weight has {E} experts of {N} features, got "
            f"{list(bias.shape)}"
        )


def context_of(
    op: str,
    weights: WeightList,
    recipe: Recipe | None,
    options: LinearOptions,
    lora: LoraWeights | None,
    dtype: torch.dtype | None,
) -> tuple[LinearContext, WeightList]:
    """The context of one layer's call, and the weights to differentiate; dtype is autocast's."""
    if options.stored is None and isinstance(weights[0], KEPT):
        quantized = stored_weight(op, weights[0], recipe)
        if quantized is not None:
            options = options._replace(stored=StoredWeight(quantized))
    if lora is not None:
        options = options._replace(lora_scaling=lora.scaling)
    recipe = UNQUANTIZED if recipe is None else recipe
    cast = weights if dtype is None else autocast_weights(weights, recipe, dtype)
    context = LinearContext(recipe, torch.is_grad_enabled(), cast, options)
    return context, cast if options.main_grad is None else weights


def apply_layer(
    x: Tensor,
    weights: WeightList,
    bias: Tensor | None,
    m_splits: Tensor | Sequence[int],
    recipe: Recipe | None,
    options: LinearOptions = PLAIN_CALL,
    lora: LoraWeights | None = None,
) -> Tensor:
    """Compute :func:`grouped_linear` with the options that :class:`GroupedLinear` has besides.

    ``weights`` are one [E, N, K], or E of [N, K], which have no adapter.
    """
    op = "grouped_linear"
    check_tensors(op, ("x", "weight"), (x, weights[0]))
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype in ACTIVATIONS:  # autocast leaves other dtypes alone
        x = x.to(dtype)
    x_TK = as_rows(op, x)
    if lora is not None:
        check_lora_weights(op, "lora", lora, "weight", weights[0], x_TK)
    context, grad_inputs = context_of(op, weights, recipe, options, lora, dtype)
    _check_call(x_TK, context.weights, bias, m_splits, context.recipe)
    m_splits = splits_on(op, m_splits, x.device)
    one_op = context.has_one_op_forward
    offs_E = None if one_op else ops.splits_to_offsets(m_splits, x_TK.size(0))
    if options.defer_wgrad is not None:
        # The parameters are differentiated in a graph of their own, later. This tensor makes
        # autograd run the layer's backward where nothing else requires it.
        grad_inputs = (x.new_empty(0, requires_grad=True),)
    adapter = (None, None, None) if lora is None else (lora.a, lora.b, dropped(x_TK, lora))
    y_TN: Tensor = GroupedLinearFunction.apply(
        context, x_TK, bias, m_splits if one_op else None, offs_E, *adapter, *grad_inputs
    )
    return y_TN if x.dim() == 2 else y_TN.reshape(*x.shape[:-1], y_TN.size(1))
