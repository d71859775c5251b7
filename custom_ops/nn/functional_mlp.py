"""The MLP as a function of tokens and the experts chosen for them, or of sorted rows.

T tokens, C experts chosen for a token, R rows, E experts, H features of a token, F features inside
an expert, G = 2 F for gate and up together, or F without a gate.
"""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.activation import MLPConfig
from grouped_linear.autograd.context import PLAIN_CALL, LinearContext, LinearOptions
from grouped_linear.autograd.mlp import GroupedMLPFunction
from grouped_linear.autograd.routing import truncate_routing
from grouped_linear.meta_kernels.rules import ACTIVATIONS, dtype_name
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.functional import (
    as_rows,
    autocast_dtype,
    check_device,
    check_dtypes,
    check_lora_weights,
    check_parameters,
    check_sizes,
    check_splits,
    check_tensors,
    context_of,
    splits_on,
)
from grouped_linear.nn.lora import LoraWeights, dropped
from grouped_linear.nn.options import check_flags, check_recipe, check_state
from grouped_linear.ops.activation import PLAIN, Activation
from grouped_linear.recipes import DelayedScalingState, Recipe

NAMES = "gate_up_proj", "down_proj"
#: Of gate_up_proj and of down_proj.
Adapters = tuple[LoraWeights | None, LoraWeights | None]
NO_ADAPTERS: Adapters = (None, None)


def check_activation(op: str, activation: Activation) -> None:
    """Raise ValueError unless it is an instance of Activation."""
    if isinstance(activation, type) and issubclass(activation, Activation):
        name = activation.__name__
        raise ValueError(f"{op}: activation is the class {name}: call it, activation={name}()")
    if not isinstance(activation, Activation):
        raise ValueError(f"{op}: activation must be a SwiGLU or an Activation, got {activation!r}")


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
        top_k_weights: [..., C], of any floating dtype; used in float32.
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
        max_rows: how many choices, of all tokens, memory is allocated for; None for all of them. It
            saves memory, and the time to clear what is not used, where most choices are of no
            expert. If there are more, the last ones, sorted by expert and then by token, are
            dropped as if they were of no expert. On the device
            ``((top_k_index >= 0) & (top_k_index < E)).sum()`` counts them.
        save_gate_up_in_fp8: keep the activation's input for the backward in e4m3, with a scale for
            each 128 features of a row, which halves what an expert layer keeps and takes two
            passes. Outputs are the same; gradients of what is before the activation, and
            down_proj's, have an error of FP8's size.
        gate_up_lora: an adapter of gate_up_proj, see :class:`grouped_linear.nn.lora.LoraWeights`.
            It adds ``scaling * b[e] @ (a[e] @ x[t])`` to gate and up, in x's dtype under every
            recipe. A projection that does not require grad then costs no wgrad and keeps nothing.
        down_lora: an adapter of down_proj, the same.

    Returns:
        [..., H] of x's dtype, or autocast's.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number of features.
        TypeError: for an argument that is no tensor.
        ValueError: for ``max_rows`` below 0, if ``recipe`` is no recipe, if its state is missing,
            if there is a state and no recipe that has one, and for a quantized weight under another
            recipe than ``Float8BlockScaling``.

    >>> x, scores = torch.randn(5, 16), torch.randn(5, 4).softmax(dim=-1)
    >>> gate_up_proj, down_proj = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    >>> grouped_mlp(x, *scores.topk(2), gate_up_proj, down_proj).shape
    torch.Size([5, 16])
    """
    check_flags("grouped_mlp", save_gate_up_in_fp8=save_gate_up_in_fp8)
    return apply_mlp(
        x,
        top_k_weights,
        top_k_index,
        (gate_up_proj, down_proj),
        (gate_up_proj_bias, down_proj_bias),
        _recipes_of("grouped_mlp", recipe, state),
        MLPConfig(activation, save_gate_up_in_fp8),
        max_rows=max_rows,
        lora=(gate_up_lora, down_lora),
    )


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
    gate_up_lora: LoraWeights | None = None,
    down_lora: LoraWeights | None = None,
) -> Tensor:
    """:func:`grouped_mlp` for rows that a dispatcher has sorted by expert. Differentiable.

    For expert e and its rows r, of which nothing is gathered or summed::

        gate, up = (gate_up_proj[e] @ x[r] + gate_up_proj_bias[e]).chunk(2)
        y[r] = row_weights[r] * (down_proj[e] @ (silu(gate) * up) + down_proj_bias[e])

    Args:
        x: [R, H] bfloat16, float16 or float32, rows sorted by expert.
        m_splits: [E] rows of each expert, as :func:`grouped_linear.grouped_linear` takes them.
        row_weights: [R], of any floating dtype; used in float32. None for ones, which is faster.
        gate_up_proj, down_proj, recipe, state, activation: see :func:`grouped_mlp`.
        gate_up_proj_bias, down_proj_bias, save_gate_up_in_fp8: see :func:`grouped_mlp`.
        gate_up_lora, down_lora: see :func:`grouped_mlp`.

    Returns:
        [R, H] of x's dtype, or autocast's; zero in rows at and past sum(m_splits).

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number of features, and on CPU for wrong
            m_splits.
        TypeError: for an argument that is no tensor.
        ValueError: as :func:`grouped_mlp`.

    >>> x, m_splits = torch.randn(10, 16), torch.tensor([3, 0, 5, 2])
    >>> gate_up_proj, down_proj = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    >>> grouped_mlp_sorted(x, m_splits, gate_up_proj, down_proj).shape
    torch.Size([10, 16])
    """
    check_flags("grouped_mlp_sorted", save_gate_up_in_fp8=save_gate_up_in_fp8)
    return apply_mlp_sorted(
        x,
        m_splits,
        row_weights,
        (gate_up_proj, down_proj),
        (gate_up_proj_bias, down_proj_bias),
        _recipes_of("grouped_mlp_sorted", recipe, state),
        MLPConfig(activation, save_gate_up_in_fp8),
        lora=(gate_up_lora, down_lora),
    )


def _recipes_of(
    op: str, recipe: Recipe | None, state: tuple[DelayedScalingState, DelayedScalingState] | None
) -> tuple[Recipe | None, Recipe | None]:
    """The recipes of both layers in a call without a module."""
    check_recipe(op, recipe)
    if (state is not None) != (recipe is not None and recipe.has_state):
        raise ValueError(
            f"{op}: state must be two DelayedScalingStates under a recipe that has a state, and "
            f"None under another, got recipe {recipe} and state {state}"
        )
    if state is None:
        return recipe, recipe
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise ValueError(
            f"{op}: state must be two, of gate_up_proj and of down_proj, got {state!r}"
        )
    check_state(op, *state)
    return state[0].of_call(), state[1].of_call()


def _check_choices(
    x: Tensor, top_k_weights: Tensor, top_k_index: Tensor, max_rows: int | None
) -> None:
    """Check the routing in the caller's words."""
    check_device("grouped_mlp", "top_k_weights", top_k_weights, x)
    check_device("grouped_mlp", "top_k_index", top_k_index, x)
    if any(t.dim() == 0 or t.size(-1) == 0 for t in (top_k_weights, top_k_index)):
        raise RuntimeError(
            "grouped_mlp: top_k_weights and top_k_index must be [..., C] with C positive, got "
            f"{list(top_k_weights.shape)} and {list(top_k_index.shape)}"
        )
    if x.dim() == top_k_weights.dim() == top_k_index.dim() and torch.compiler.is_compiling():
        for t in (top_k_weights, top_k_index):
            for i in range(x.dim() - 1):  # unknown sizes are assumed to be equal
                torch._check(
                    x.size(i) == t.size(i),
                    lambda: "grouped_mlp: x, top_k_weights and top_k_index differ in their tokens",
                )
    elif not x.shape[:-1] == top_k_weights.shape[:-1] == top_k_index.shape[:-1]:
        shapes = ", ".join(str(list(t.shape)) for t in (x, top_k_weights, top_k_index))
        raise RuntimeError(
            f"grouped_mlp: x, top_k_weights and top_k_index differ in their tokens: {shapes}"
        )
    if top_k_weights.size(-1) != top_k_index.size(-1):
        raise RuntimeError(
            f"grouped_mlp: C differs: top_k_weights has {top_k_weights.size(-1)}, top_k_index "
            f"{top_k_index.size(-1)}"
        )
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"grouped_mlp: top_k_index must be int32 or int64, got {dtype_name(top_k_index.dtype)}"
        )
    if max_rows is not None and torch.compiler.is_compiling():  # it may be computed from x's size
        torch._check(max_rows >= 0, lambda: "grouped_mlp: max_rows must not be negative")
    elif max_rows is None:
        return
    elif isinstance(max_rows, bool) or not isinstance(max_rows, Integral | torch.SymInt):
        raise ValueError(f"grouped_mlp: max_rows must be None or an integer, got {max_rows!r}")
    elif max_rows < 0:
        raise ValueError(f"grouped_mlp: max_rows must not be negative, got {max_rows}")


def _check_weights(
    op: str,
    x_TH: Tensor,
    projections: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    options: tuple[LinearOptions, LinearOptions],
    gated: bool,
    lora: Adapters,
) -> None:
    """Check the parameters in the caller's words. The ops check everything again, in theirs."""
    gate_up_proj, down_proj = projections
    for name, w, bias, own in zip(NAMES, projections, biases, options, strict=True):
        named = {name: w, f"{name}_bias": bias}
        # A weight that is stored quantized may be passed as its FP8 numbers.
        check_parameters(op, **(named if own.stored is None else {f"{name}_bias": bias}))
        for own_name, t in named.items():
            check_device(op, own_name, t, x_TH)
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
    check_sizes(op, "gate_up_proj", gate_up_proj, E, H=H)
    check_sizes(op, "down_proj", down_proj, E, F=down_proj.size(2))
    for name, w, bias in zip(NAMES, projections, biases, strict=True):
        if bias is not None and bias.shape != w.shape[:2]:
            raise RuntimeError(
                f"{op}: {name}_bias must be {list(w.shape[:2])}, as {name} is "
                f"{list(w.shape)}, got {list(bias.shape)}"
            )
    for name, short, w, adapter in zip(NAMES, ("gate_up", "down"), projections, lora, strict=True):
        check_lora_weights(op, f"{short}_lora", adapter, name, w, x_TH)


def _contexts(
    op: str,
    x_TH: Tensor,
    projections: tuple[Tensor, Tensor],
    recipes: tuple[Recipe | None, Recipe | None],
    options: tuple[LinearOptions, LinearOptions],
    lora: Adapters,
    dtype: torch.dtype | None,
) -> tuple[list[LinearContext], list[Tensor]]:
    """The contexts of both layers, and the weights that autograd differentiates."""
    contexts, grad_inputs = [], []
    for name, w, recipe, own, adapter in zip(
        NAMES, projections, recipes, options, lora, strict=True
    ):
        context, (grad_input,) = context_of(op, (w,), recipe, own, adapter, dtype)
        check_dtypes(op, x_TH, name, context.weights[0], context.recipe)
        contexts.append(context)
        grad_inputs.append(grad_input)
    return contexts, grad_inputs


def _adapter_inputs(
    x_TH: Tensor, num_rows: int, features: int, lora: Adapters
) -> tuple[Tensor | None, ...]:
    """What the function takes of adapters: the first one's input, their tensors, h's dropout."""
    of_gate_up, of_down = lora
    if of_gate_up is None and of_down is None:
        return (None,) * 6
    tensors = [t for one in lora for t in ((None, None) if one is None else one[:2])]
    dropout_RF = None
    if of_down is not None and of_down.dropout > 0:
        dropout_RF = dropped(x_TH.new_ones(num_rows, features), of_down)
    return dropped(x_TH, of_gate_up), *tensors, dropout_RF


def apply_mlp(
    x: Tensor,
    top_k_weights: Tensor,
    top_k_index: Tensor,
    projections: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    recipes: tuple[Recipe | None, Recipe | None],
    config: MLPConfig,
    options: tuple[LinearOptions, LinearOptions] = (PLAIN_CALL, PLAIN_CALL),
    lora: Adapters = NO_ADAPTERS,
    *,
    max_rows: int | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> Tensor:
    """Compute :func:`grouped_mlp` with the options that :class:`GroupedMLP` has besides.

    Pairs are of gate_up_proj and of down_proj. Where experts are on several processes, the
    dispatcher chooses ``max_rows``.
    """
    check_activation("grouped_mlp", config.activation)
    names = "x", "top_k_weights", "top_k_index", *NAMES
    check_tensors("grouped_mlp", names, (x, top_k_weights, top_k_index, *projections))
    dtype = autocast_dtype(x.device)
    x_TH = as_rows("grouped_mlp", x)
    _check_choices(x, top_k_weights, top_k_index, max_rows)
    _check_weights("grouped_mlp", x_TH, projections, biases, options, config.activation.gated, lora)
    if dtype is not None and x.dtype in ACTIVATIONS:
        x_TH = x_TH.to(dtype)
    contexts, grad_inputs = _contexts(
        "grouped_mlp", x_TH, projections, recipes, options, lora, dtype
    )
    index_TC = top_k_index.reshape(-1, top_k_index.size(-1))
    weights_TC = top_k_weights.reshape(-1, top_k_weights.size(-1))
    dispatched = None
    if dispatcher is not None:
        dispatched = dispatcher.dispatch(x_TH, weights_TC, index_TC)
        x_TH, weights_TC, index_TC, max_rows, _ = dispatched
    routing = ops.sort_by_expert(index_TC, projections[0].size(0))
    if max_rows is not None:
        contexts[0] = contexts[0].with_routed(routing.offs)
        routing = truncate_routing(routing, max_rows)
    # Zero the weights of unrouted choices, so that NaN * 0 cannot leak.
    weights_TC = weights_TC.masked_fill(routing.row >= routing.offs[-1], 0)
    adapters = _adapter_inputs(x_TH, routing.token.size(0), projections[1].size(2), lora)
    y_TH: Tensor = GroupedMLPFunction.apply(
        *contexts, config, x_TH, weights_TC, *grad_inputs, *biases, *adapters, *routing
    )
    if dispatcher is not None and dispatched is not None:
        y_TH = dispatcher.combine(y_TH, dispatched)
    return y_TH if x.dim() == 2 else y_TH.reshape(x.shape)


def apply_mlp_sorted(
    x: Tensor,
    m_splits: Tensor | Sequence[int],
    row_weights: Tensor | None,
    projections: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    recipes: tuple[Recipe | None, Recipe | None],
    config: MLPConfig,
    options: tuple[LinearOptions, LinearOptions] = (PLAIN_CALL, PLAIN_CALL),
    lora: Adapters = NO_ADAPTERS,
) -> Tensor:
    """Compute :func:`grouped_mlp_sorted`; arguments are those of :func:`apply_mlp`."""
    op = "grouped_mlp_sorted"
    check_activation(op, config.activation)
    check_tensors(op, ("x", *NAMES), (x, *projections))
    if x.dim() != 2:
        raise RuntimeError(f"{op}: x must be [R, H], got shape {list(x.shape)}")
    dtype = autocast_dtype(x.device)
    _check_weights(op, x, projections, biases, options, config.activation.gated, lora)
    check_splits(op, m_splits, x, "gate_up_proj", len(projections[0]))
    if row_weights is not None:
        check_tensors(op, ("row_weights",), (row_weights,))
        check_device(op, "row_weights", row_weights, x)
        if row_weights.dim() == 1 and torch.compiler.is_compiling():  # unknown sizes are assumed
            torch._check(
                row_weights.size(0) == x.size(0),
                lambda: "grouped_mlp_sorted: row_weights and x differ in R",
            )
        elif row_weights.shape != x.shape[:1]:
            raise RuntimeError(
                f"{op}: row_weights must be [{x.size(0)}], one of each row, got "
                f"{list(row_weights.shape)}"
            )
    x_RH = x if dtype is None or x.dtype not in ACTIVATIONS else x.to(dtype)
    contexts, grad_inputs = _contexts(op, x_RH, projections, recipes, options, lora, dtype)
    offs_E = ops.splits_to_offsets(splits_on(op, m_splits, x.device), x.size(0))
    if row_weights is not None:  # zero those of rows past the last group: no NaN * 0 leaks
        row_R = torch.arange(x.size(0), dtype=torch.int32, device=x.device)
        row_weights = row_weights.masked_fill(row_R >= offs_E[-1], 0)
    adapters = _adapter_inputs(x_RH, x_RH.size(0), projections[1].size(2), lora)
    return GroupedMLPFunction.apply(
        *contexts, config, x_RH, row_weights, *grad_inputs, *biases, *adapters, offs_E
    )
