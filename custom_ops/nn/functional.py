# SPDX-License-Identifier: Apache-2.0
"""The linear layer as a function.

T rows, E groups (experts), K in_features, N out_features.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.linear import GroupedLinearFunction, LinearCall, takes_one_op
from grouped_linear.autograd.projection import Projection
from grouped_linear.autograd.wgrad import Wgrad
from grouped_linear.nn.arguments import (
    as_rows,
    ready,
    recipe_of_call,
    with_dropout,
    without_autocast,
)
from grouped_linear.nn.checks import LINEAR, check_projection, check_tensor, splits_on
from grouped_linear.nn.gradient_accumulation import mark_added
from grouped_linear.nn.lora import LoraWeights, adapter_of
from grouped_linear.recipes import DelayedScalingState, Recipe


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
    """One linear layer for each group of rows, as a function. Differentiable.

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
            recipe that has one, and for a weight that FSDP2 gathered in FP8 under a recipe whose
            weights have other scales.

    >>> x, weight = torch.randn(5, 16), torch.randn(2, 32, 16)
    >>> y = grouped_linear(x, weight, torch.tensor([2, 3]))
    >>> torch.allclose(y[:2], x[:2] @ weight[0].T, atol=1e-5)
    True
    """
    check_tensor("grouped_linear", "weight", weight)
    if weight.dim() != 3:
        raise RuntimeError(f"grouped_linear: weight must be [E, N, K], got {list(weight.shape)}")
    adapter = adapter_of("grouped_linear", "lora", lora)
    of_call = recipe_of_call("grouped_linear", "GroupedLinear", recipe, state)
    return apply_linear(x, m_splits, Projection((weight,), bias, of_call, adapter=adapter))


def apply_linear(
    x: Tensor,
    m_splits: Tensor | Sequence[int],
    given: Projection,
    save_input: bool = False,
    defer_wgrad: Callable[[Wgrad], None] | None = None,
) -> Tensor:
    """Compute :func:`grouped_linear` with the options that :class:`GroupedLinear` has besides."""
    op = "grouped_linear"
    x_TK, dtype = as_rows(op, x)
    projection, inputs = ready(op, LINEAR, given, dtype)
    weights = projection.weights
    if x_TK.size(1) != projection.in_features:
        raise RuntimeError(
            f"{op}: K differs: x has {x_TK.size(1)}, weight [E, N, K] {projection.in_features}"
        )
    check_projection(op, LINEAR, projection, x_TK)
    E = len(weights) if weights[0].dim() == 2 else len(weights[0])
    m_splits_E = splits_on(op, m_splits, x.device, "weight", E)
    offs_E = None
    if save_input or projection.stored is not None or not takes_one_op(projection):
        offs_E = ops.splits_to_offsets(m_splits_E, x_TK.size(0))
    if defer_wgrad is not None:
        # The parameters are differentiated in a graph of their own, later. This tensor makes
        # autograd run the layer's backward where nothing else requires it.
        inputs = (x.new_empty(0, requires_grad=True),)
    projection = with_dropout(projection, x_TK, x_TK)
    sizes = m_splits_E if offs_E is None else None
    call = LinearCall(projection, torch.is_grad_enabled(), sizes, offs_E, save_input, defer_wgrad)
    differentiated = x_TK, given.bias_EN, *projection.factors, *inputs
    with without_autocast(x.device):
        y_TN: Tensor = GroupedLinearFunction.apply(call, *differentiated)
    mark_added(given)
    return y_TN if x.dim() == 2 else y_TN.reshape(*x.shape[:-1], y_TN.size(1))
