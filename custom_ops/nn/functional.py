"""The grouped linear layer as a function.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.linear import Call, GroupedLinearFunction
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, dtype_name
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import kept_weight
from grouped_linear.recipes import DelayedScaling, Experts, Recipe
from grouped_linear.recipes.delayed_state import DelayedScalingState


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch.autocast computes in on a device, or None where it is not on."""
    device_type = device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_weights(weights: Experts, recipe: Recipe, dtype: torch.dtype) -> Experts:
    """Weights in autocast's dtype where products read them; a quantizer reads any of the three."""
    if recipe is not None or weights[0].dtype not in ACTIVATIONS or weights[0].dtype == dtype:
        return weights
    return tuple(w.to(dtype) for w in weights)


def is_dtensor(t: Any) -> bool:
    """By its type, which is what Dynamo sees; to import DTensor takes half a second."""
    return hasattr(type(t), "to_local")


def check_whole(where: str, parameters: Iterable[Tensor], action: str) -> None:
    """What replaces parameters comes before what spreads them."""
    if any(map(is_dtensor, parameters)):
        raise ValueError(f"{where}: parameters are sharded already: {action} before")


def check_bias(bias: Tensor | None, op: str = "grouped_linear", name: str = "bias") -> None:
    """A bias is cast to the activations' dtype, which must not lose a part of it in silence."""
    if bias is not None and bias.dtype not in ACTIVATIONS:
        raise RuntimeError(
            f"{op}: {name} must be bfloat16, float16 or float32, got {dtype_name(bias.dtype)}"
        )


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
    recipe: Recipe = None,
    state: DelayedScalingState | None = None,
) -> Tensor:
    """Apply to each group of rows its own linear layer. Differentiable.

    For group e and its rows t: ``y[t] = x[t] @ weight[e].T + bias[e]``. Group sizes are data: any
    sizes, also unaligned or zero ones, and any sum up to the number of rows.

    Under torch.autocast the layer computes in the autocast dtype, as torch.nn.functional.linear
    does.

    Args:
        x: [..., K] bfloat16, float16 or float32, rows sorted by group; leading dimensions count as
            rows. K and N are multiples of 16.
        weight: [E, N, K]. Of x's dtype without a recipe, of any of the three dtypes with one. Under
            ``Float8BlockScaling`` also a :class:`grouped_linear.GroupedTensor`, read as it is. One
            that is stored as [E, K, N] is given as its ``.mT``: it is read in place (MXFP8 copies
            it), and its gradient comes in its layout (e5m2's is copied).
        m_splits: [E] rows of each group, int32 or int64. A tensor on x's device is never read by
            the host; a list or a tensor elsewhere is copied there.
        bias: [E, N], of any of the three dtypes.
        recipe: how the products are computed; None for x's dtype.
        state: what ``DelayedScaling`` remembers of this layer; for it alone. With gradients enabled
            the largest magnitudes of x, weight and dy are recorded there; without, nothing is.

    Returns:
        [..., N] of x's dtype, or autocast's; zero in rows at and past sum(m_splits).

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size, and on CPU for wrong m_splits.
        ValueError: for ``DelayedScaling`` without a state, or a state without it, and for a
            quantized weight under another recipe than ``Float8BlockScaling``.

    >>> x, weight = torch.randn(5, 16), torch.randn(2, 32, 16)
    >>> y = grouped_linear(x, weight, torch.tensor([2, 3]))
    >>> torch.allclose(y[:2], x[:2] @ weight[0].T, atol=1e-5)
    True
    """
    check_bias(bias)
    if isinstance(recipe, DelayedScaling) and state is None:
        raise ValueError(
            "grouped_linear: DelayedScaling keeps a DelayedScalingState: pass state, "
            "or use GroupedLinear"
        )
    if state is not None and not isinstance(recipe, DelayedScaling):
        raise ValueError(f"grouped_linear: state is for DelayedScaling, got recipe {recipe}")
    slots = None if state is None else state.slots()
    return apply_layer(x, (weight,), bias, m_splits, recipe, slots=slots)


def _check_call(
    x_TK: Tensor, experts: Experts, m_splits: Tensor | Sequence[int], recipe: Recipe
) -> None:
    """What callers mix up, in their words. Ops check it all, in theirs."""
    weight, sizes = experts[0], m_splits.shape if isinstance(m_splits, Tensor) else (len(m_splits),)
    if weight.dim() not in (2, 3):
        return
    E = len(experts) if weight.dim() == 2 else weight.size(0)
    if len(sizes) == 1 and torch.compiler.is_compiling():  # a size not known yet is held to be E
        torch._check(sizes[0] == E, lambda: "grouped_linear: m_splits and weight differ in E")
    elif len(sizes) == 1 and sizes[0] != E:
        raise RuntimeError(f"grouped_linear: E differs: m_splits has {sizes[0]}, weight {E}")
    if x_TK.size(1) != weight.size(-1):
        raise RuntimeError(
            f"grouped_linear: K differs: x has {x_TK.size(1)}, weight {weight.size(-1)}"
        )
    if recipe is None and x_TK.dtype != weight.dtype and x_TK.dtype in ACTIVATIONS:
        raise RuntimeError(
            f"grouped_linear: x is {dtype_name(x_TK.dtype)}, weight {dtype_name(weight.dtype)}: "
            "cast one of them, or use torch.autocast"
        )


def apply_layer(
    x: Tensor,
    weights: Experts,
    bias: Tensor | None,
    m_splits: Tensor | Sequence[int],
    recipe: Recipe,
    **options: Any,
) -> Tensor:
    """:func:`grouped_linear` with what :class:`GroupedLinear` has besides.

    Args:
        x: [..., K].
        weights: one [E, N, K] or E of [N, K].
        bias: [E, N].
        m_splits: [E].
        recipe: how the products are computed.
        options: further fields of :class:`grouped_linear.autograd.linear.Call`.
    """
    experts = weights
    if isinstance(weights[0], GroupedTensor):
        need_x = torch.is_grad_enabled() and x.requires_grad
        options["kept"] = kept_weight("grouped_linear", weights[0], recipe, need_x)
    device = x.device
    dtype = autocast_dtype(device)
    if dtype is not None:
        if x.dtype in ACTIVATIONS:  # autocast leaves other dtypes alone
            x = x.to(dtype)
        experts = autocast_weights(weights, recipe, dtype)
    x_TK = as_rows("grouped_linear", x)
    _check_call(x_TK, experts, m_splits, recipe)
    if not isinstance(m_splits, Tensor):
        # Not as_tensor: Dynamo would compile a graph for each list.
        m_splits = torch.tensor(m_splits, device=device)
    elif m_splits.device != device:
        m_splits = m_splits.to(device)
    if options.get("later") is not None:
        options["differentiated"] = weights
    call = Call(recipe, torch.is_grad_enabled(), experts, **options)
    one_op = call.has_one_op_forward
    offs_E = None if one_op else ops.splits_to_offsets(m_splits, x_TK.size(0))
    grad_inputs = experts
    if call.main_grad is not None:
        grad_inputs = weights
    if call.later is not None:
        # The weights are differentiated in a graph of their own; something must ask for this one.
        grad_inputs = (x.new_empty(0, requires_grad=True),)
    y_TN: Tensor = GroupedLinearFunction.apply(
        call, x_TK, bias, m_splits if one_op else None, offs_E, *grad_inputs
    )
    return y_TN if x.dim() == 2 else y_TN.reshape(*x.shape[:-1], y_TN.size(1))
