# SPDX-License-Identifier: Apache-2.0
"""The MLP as a function of tokens and the experts chosen for them, or of sorted rows.

T tokens, C experts chosen for a token, R rows, E experts, H features of a token, F features inside
an expert, G = 2 F for gate and up together, or F without a gate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.mlp import Arriving, GroupedMLPFunction, MLPCall
from grouped_linear.autograd.projection import Projection
from grouped_linear.autograd.routing import ChosenRows, SortedRows, truncate_routing
from grouped_linear.nn.arguments import (
    as_rows,
    ready,
    recipe_of_call,
    with_dropout,
    without_autocast,
)
from grouped_linear.nn.checks import (
    DOWN,
    GATE_UP,
    check_activation,
    check_choices,
    check_combined,
    check_dispatched,
    check_flags,
    check_mlp,
    check_row_weights,
    splits_on,
)
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.gradient_accumulation import mark_added
from grouped_linear.nn.lora import LoraWeights, adapter_of
from grouped_linear.ops.activation import PLAIN, Activation
from grouped_linear.recipes import DelayedScalingState, Recipe


def grouped_mlp(
    x: Tensor,
    top_k_weights: Tensor,
    top_k_index: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    recipe: Recipe | None = None,
    state: tuple[DelayedScalingState, DelayedScalingState] | None = None,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: Activation = PLAIN,
    max_rows: int | None = None,
    save_gate_up_in_fp8: bool = False,
    recompute_gate_up: bool = False,
    gate_up_lora: LoraWeights | None = None,
    down_lora: LoraWeights | None = None,
) -> Tensor:
    """Send each token through its experts and sum their weighted outputs. Differentiable.

    With e = top_k_index[t, c] for the C experts of token t::

        gate, up = (gate_up_proj[e] @ x[t] + gate_up_proj_bias[e]).chunk(2)
        y[t] = sum over c of
            top_k_weights[t, c] * (down_proj[e] @ (silu(gate) * up) + down_proj_bias[e])

    Routing is data: the host reads nothing, and equal inputs give equal bits, gradients included.
    SwiGLU and the weighted sum are computed in float32 and rounded once. Under torch.autocast GEMMs
    compute in the autocast dtype, as torch.nn.functional.linear does.

    Args:
        x: [..., H] bfloat16, float16 or float32; H and F are multiples of 16.
        top_k_weights: [..., C], of a floating dtype of 16 bits or more; used in float32.
        top_k_index: [..., C] int32 or int64, the experts chosen. A number outside [0, E) stands for
            no expert: it adds nothing, whatever x holds there.
        gate_up_proj: [E, 2 F, H]: gate, then up, or as activation says; [E, F, H] for one without a
            gate. Its dtype and its form are those of ``weight`` of
            :func:`grouped_linear.grouped_linear`.
        down_proj: [E, H, F], the same.
        recipe: how the GEMMs are computed; None for x's dtype.
        state: of gate_up_proj and of down_proj, under a recipe that has a state:
            ``DelayedScaling``.
        gate_up_proj_bias: [E, 2 F] or [E, F], features as in gate_up_proj, of any of the three
            dtypes, which its gradient has, too; None adds nothing.
        down_proj_bias: [E, H], the same.
        activation: what replaces ``silu(gate) * up``, and how gate and up lie in gate_up_proj: a
            :class:`grouped_linear.SwiGLU`, :class:`grouped_linear.GeGLU`,
            :class:`grouped_linear.SquaredReLU` or any :class:`grouped_linear.Activation`. SwiGLU,
            and ``GeGLU("tanh")`` as one of its forms, are fused with what is before or after them;
            torch operations compute the others.
        max_rows: memory is allocated for so many choices, of all tokens together; None for all of
            them. Where most choices are no expert, this saves memory and the time to clear it.
            Choices past it, sorted by expert and then by token, are dropped as if they were no
            expert. On the device ``((top_k_index >= 0) & (top_k_index < E)).sum()`` counts choices
            of experts.
        save_gate_up_in_fp8: keep the activation's input for the backward in e4m3, with a scale for
            each 128 features of a row, which halves what an expert layer keeps and takes two
            passes. Outputs are the same; gradients of what is before the activation, and
            down_proj's, have an error of FP8's size. A SwiGLU's limit is compared with numbers
            before rounding.
        recompute_gate_up: keep no input of the activation: the backward computes the first GEMM
            again. Outputs and gradients have the same bits. The backward reads x, the weight and
            the bias of gate and up: do not write them before. It calls a format of your own again,
            which must give the same numbers.
        gate_up_lora: an adapter of gate_up_proj, see :class:`grouped_linear.nn.lora.LoraWeights`.
            It adds ``scaling * b[e] @ (a[e] @ x[t])`` to gate and up, in x's dtype under every
            recipe. A projection that does not require grad then costs no wgrad and keeps nothing.
        down_lora: an adapter of down_proj, the same.

    Returns:
        [..., H] of x's dtype, or autocast's.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number of features.
        TypeError: for an argument that is no tensor.
        ValueError: for ``max_rows`` below 0 or past int32, if ``recipe`` is no recipe, if its state
            is missing, if there is a state and no recipe that has one, and for a weight that FSDP2
            gathered in FP8 under a recipe whose weights have other scales.

    >>> x, scores = torch.randn(5, 16), torch.randn(5, 4).softmax(dim=-1)
    >>> gate_up_proj, down_proj = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    >>> grouped_mlp(x, *scores.topk(2), gate_up_proj, down_proj).shape
    torch.Size([5, 16])
    """
    op = "grouped_mlp"
    config = config_of(op, activation, save_gate_up_in_fp8, recompute_gate_up)
    given = (gate_up_proj, gate_up_proj_bias, gate_up_lora), (down_proj, down_proj_bias, down_lora)
    gate_up, down = _projections(op, recipe, state, *given)
    return apply_mlp(x, top_k_weights, top_k_index, gate_up, down, config, max_rows=max_rows)


def grouped_mlp_sorted(
    x: Tensor,
    m_splits: Tensor | Sequence[int],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    row_weights: Tensor | None = None,
    recipe: Recipe | None = None,
    state: tuple[DelayedScalingState, DelayedScalingState] | None = None,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: Activation = PLAIN,
    save_gate_up_in_fp8: bool = False,
    recompute_gate_up: bool = False,
    gate_up_lora: LoraWeights | None = None,
    down_lora: LoraWeights | None = None,
) -> Tensor:
    """:func:`grouped_mlp` for rows that a dispatcher has sorted by expert. Differentiable.

    For expert e and its rows r, which are neither gathered nor summed::

        gate, up = (gate_up_proj[e] @ x[r] + gate_up_proj_bias[e]).chunk(2)
        y[r] = row_weights[r] * (down_proj[e] @ (silu(gate) * up) + down_proj_bias[e])

    Args:
        x: [R, H] bfloat16, float16 or float32, rows sorted by expert.
        m_splits: [E] rows of each expert, as :func:`grouped_linear.grouped_linear` takes them.
        row_weights: [R], of a floating dtype of 16 bits or more; used in float32. None for ones,
            which is faster.
        gate_up_proj, down_proj, recipe, state, activation: see :func:`grouped_mlp`.
        gate_up_proj_bias, down_proj_bias, save_gate_up_in_fp8: see :func:`grouped_mlp`.
        recompute_gate_up, gate_up_lora, down_lora: see :func:`grouped_mlp`.

    Returns:
        [R, H] of x's dtype, or autocast's; zero in rows at and past sum(m_splits).

    Raises what :func:`grouped_mlp` raises, and on CPU RuntimeError for wrong m_splits.

    >>> x, m_splits = torch.randn(10, 16), torch.tensor([3, 0, 5, 2])
    >>> gate_up_proj, down_proj = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    >>> grouped_mlp_sorted(x, m_splits, gate_up_proj, down_proj).shape
    torch.Size([10, 16])
    """
    op = "grouped_mlp_sorted"
    config = config_of(op, activation, save_gate_up_in_fp8, recompute_gate_up)
    given = (gate_up_proj, gate_up_proj_bias, gate_up_lora), (down_proj, down_proj_bias, down_lora)
    gate_up, down = _projections(op, recipe, state, *given)
    return apply_mlp_sorted(x, m_splits, row_weights, gate_up, down, config)


def config_of(
    where: str, activation: Activation, save_gate_up_in_fp8: bool, recompute_gate_up: bool
) -> MLPConfig:
    """The options of a call, which checks the activation."""
    check_flags(where, save_gate_up_in_fp8=save_gate_up_in_fp8, recompute_gate_up=recompute_gate_up)
    if save_gate_up_in_fp8 and recompute_gate_up:
        raise ValueError(f"{where}: save_gate_up_in_fp8 and recompute_gate_up exclude each other")
    return MLPConfig(activation, save_gate_up_in_fp8, recompute_gate_up)


def _projections(
    op: str,
    recipe: Recipe | None,
    state: tuple[DelayedScalingState, DelayedScalingState] | None,
    *given: tuple[Tensor, Tensor | None, LoraWeights | None],
) -> list[Projection]:
    """The projections of a call without a module, of weights, biases and adapters."""
    is_pair = isinstance(state, tuple | list) and len(state) == 2 and None not in state
    if state is not None and not is_pair:
        raise ValueError(
            f"{op}: state must be two, of gate_up_proj and of down_proj, got {state!r}"
        )
    made = []
    for name, own, (weight, bias, lora) in zip(
        ("gate_up_lora", "down_lora"), state or (None, None), given, strict=True
    ):
        of_call = recipe_of_call(op, "GroupedMLP", recipe, own)
        made.append(Projection((weight,), bias, of_call, adapter=adapter_of(op, name, lora)))
    return made


def apply_mlp(
    x: Tensor,
    top_k_weights: Tensor,
    top_k_index: Tensor,
    gate_up: Projection,
    down: Projection,
    config: MLPConfig,
    *,
    max_rows: int | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> Tensor:
    """Compute :func:`grouped_mlp` with the options that :class:`GroupedMLP` has besides.

    Where experts are on several processes, the dispatcher chooses ``max_rows``.
    """
    op = "grouped_mlp"
    check_activation(op, config.activation)
    x_TH, dtype = as_rows(op, x)
    check_choices(op, x, top_k_weights, top_k_index, max_rows)
    given = gate_up, down, config.activation.gated, dtype, dispatcher is not None
    projections = _ready(op, x_TH, *given)
    index_TC = top_k_index.reshape(-1, top_k_index.size(-1))
    weights_TC = top_k_weights.reshape(-1, top_k_weights.size(-1))
    arriving = dispatched = None
    sent_TH = x_TH
    if dispatcher is not None:
        started = dispatcher._start(x_TH.detach(), weights_TC.detach(), index_TC)
        if started is not None:
            arriving, index_TC, max_rows = started
        else:
            dispatched = dispatcher.dispatch(x_TH, weights_TC, index_TC)
            check_dispatched(dispatcher, x_TH, dispatched)
            x_TH, weights_TC, index_TC, max_rows, _ = dispatched
    routing = ops.sort_by_expert(index_TC, len(projections[0][1]))
    rows = ChosenRows(*routing) if max_rows is None else truncate_routing(routing, max_rows)
    # Zero the weights of unrouted choices, so that NaN * 0 cannot leak in the backward. The sum of
    # the forward leaves these choices out.
    if arriving is None:
        if torch.is_grad_enabled():
            weights_TC = weights_TC.masked_fill(rows.without_row, 0)
    else:
        weight_SC = arriving.weight_SC.masked_fill(rows.without_row, 0)
        arriving = arriving._replace(weight_SC=weight_SC)
    y_TH = _apply(x_TH, weights_TC, rows, projections, config, arriving)
    if dispatcher is not None and dispatched is not None:
        y_TH = dispatcher.combine(y_TH, dispatched)
        check_combined(dispatcher, sent_TH, y_TH)
    mark_added(gate_up, down)
    return y_TH if x.dim() == 2 else y_TH.reshape(x.shape)


def apply_mlp_sorted(
    x: Tensor,
    m_splits: Tensor | Sequence[int],
    row_weights: Tensor | None,
    gate_up: Projection,
    down: Projection,
    config: MLPConfig,
) -> Tensor:
    """Compute :func:`grouped_mlp_sorted`; arguments are those of :func:`apply_mlp`."""
    op = "grouped_mlp_sorted"
    check_activation(op, config.activation)
    x_RH, dtype = as_rows(op, x)
    if x.dim() != 2:
        raise RuntimeError(f"{op}: x must be [R, H], got shape {list(x.shape)}")
    projections = _ready(op, x_RH, gate_up, down, config.activation.gated, dtype)
    m_splits_E = splits_on(op, m_splits, x.device, "gate_up_proj", len(gate_up.weights[0]))
    if row_weights is not None:
        check_row_weights(op, row_weights, x)
    offs_E = ops.splits_to_offsets(m_splits_E, x.size(0))
    if row_weights is not None and torch.is_grad_enabled():  # as in apply_mlp
        row_R = torch.arange(x.size(0), dtype=torch.int32, device=x.device)
        row_weights = row_weights.masked_fill(row_R >= offs_E[-1], 0)
    y_RH = _apply(x_RH, row_weights, SortedRows(offs_E), projections, config)
    mark_added(gate_up, down)
    return y_RH


#: Both projections as they are multiplied, each with the weight that autograd differentiates.
_Projections = tuple[tuple[Projection, Tensor], tuple[Projection, Tensor]]


def _ready(
    op: str,
    x_TH: Tensor,
    gate_up: Projection,
    down: Projection,
    gated: bool,
    dtype: torch.dtype | None,
    has_dispatcher: bool = False,
) -> _Projections:
    gate_up, (gate_up_w,) = ready(op, GATE_UP, gate_up, dtype, has_dispatcher)
    down, (down_w,) = ready(op, DOWN, down, dtype, has_dispatcher)
    check_mlp(op, x_TH, gate_up, down, gated)
    return (gate_up, gate_up_w), (down, down_w)


def _apply(
    x_TH: Tensor,
    weights: Tensor | None,
    rows: ChosenRows | SortedRows,
    projections: _Projections,
    config: MLPConfig,
    arriving: Arriving | None = None,
) -> Tensor:
    """Draw the adapters' dropout, and compute the layer of tokens or of sorted rows."""
    (gate_up, gate_up_w), (down, down_w) = projections
    down = with_dropout(down, x_TH, x_TH if rows.token is None else rows.token)
    gate_up = with_dropout(gate_up, x_TH, x_TH if arriving is None else arriving.weight_SC)
    of_gate_up = gate_up_w, gate_up.bias_EN, *gate_up.factors
    of_down = down_w, down.bias_EN, *down.factors
    call = MLPCall(gate_up, down, config, rows, torch.is_grad_enabled(), arriving)
    with without_autocast(x_TH.device):
        y: Tensor = GroupedMLPFunction.apply(call, x_TH, weights, *of_gate_up, *of_down)
    return y
