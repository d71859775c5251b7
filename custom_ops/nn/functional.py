"""The layers as functions.

T rows or tokens, E groups (experts), K in_features, N out_features; of an MLP: C experts chosen for
a token, H features of a token, F features inside an expert.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.autograd.activation import Inside
from grouped_linear.autograd.context import (
    PLAIN_CALL,
    LinearContext,
    LinearOptions,
    StoredWeight,
)
from grouped_linear.autograd.linear import GroupedLinearFunction
from grouped_linear.autograd.mlp import GroupedMLPFunction
from grouped_linear.autograd.routing import truncate_routing
from grouped_linear.meta_kernels.rules import ACTIVATIONS, FEATURE_MULTIPLE, dtype_name
from grouped_linear.nn.dispatcher import TokenDispatcher
from grouped_linear.nn.options import check_flags, check_recipe
from grouped_linear.ops.activation import PLAIN, SwiGLU
from grouped_linear.ops.elementwise import Activation
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import is_dtensor as is_dtensor
from grouped_linear.quantized.weight import quantized_weight_of
from grouped_linear.recipes import UNQUANTIZED, Experts, Recipe, RecipeState


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast computes in on a device, or None where it is off."""
    device_type = device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast_weights(weights: Experts, recipe: Recipe, dtype: torch.dtype) -> Experts:
    """Cast weights to autocast's dtype, unless the recipe's quantizer reads any dtype."""
    w = weights[0]
    if recipe.reads_any_weight_dtype or w.dtype not in ACTIVATIONS or w.dtype == dtype:
        return weights
    return tuple(w.to(dtype) for w in weights)


def check_whole(where: str, parameters: Iterable[Tensor], action: str) -> None:
    """Raise ValueError for sharded parameters, which must be replaced before they are sharded."""
    if any(map(is_dtensor, parameters)):
        raise ValueError(f"{where}: parameters are sharded already: {action} before")


def check_bias(bias: Tensor | None, op: str = "grouped_linear", name: str = "bias") -> None:
    """Raise RuntimeError for a bias that a cast to the activations' dtype would silently damage."""
    if bias is not None:
        check_tensors(op, (name,), (bias,))
    if bias is not None and bias.dtype not in ACTIVATIONS:
        raise RuntimeError(
            f"{op}: {name} must be bfloat16, float16 or float32, got {dtype_name(bias.dtype)}"
        )


def check_dtypes(op: str, x: Tensor, name: str, w: Tensor, recipe: Recipe) -> None:
    """Raise RuntimeError for activations and a weight that the recipe's GEMM cannot multiply."""
    if x.dtype not in ACTIVATIONS:
        raise RuntimeError(
            f"{op}: x must be bfloat16, float16 or float32, got {dtype_name(x.dtype)}"
        )
    if x.dtype != w.dtype and not recipe.reads_any_weight_dtype:
        raise RuntimeError(
            f"{op}: x is {dtype_name(x.dtype)}, {name} {dtype_name(w.dtype)}: "
            "cast one of them, or use torch.autocast"
        )


def check_tensors(op: str, names: Iterable[str], values: Iterable[Any]) -> None:
    """Raise TypeError for what is no tensor, as a numpy array, or is one of several processes."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        if is_dtensor(value):
            raise TypeError(
                f"{op}: {name} is a DTensor, and a layer computes with the tensors of one process: "
                "pass its to_local(), or let fully_shard or grouped_linear.parallel.ExpertParallel "
                "shard the layer"
            )


def check_activation(op: str, activation: SwiGLU | Activation) -> None:
    """Raise ValueError for what is no activation."""
    if not isinstance(activation, SwiGLU | Activation):
        raise ValueError(f"{op}: activation must be a SwiGLU or an Activation, got {activation!r}")


def _as_rows(op: str, x: Tensor) -> Tensor:
    """x [..., K] as [T, K]."""
    if x.dim() == 0 or x.size(-1) == 0:
        raise RuntimeError(
            f"{op}: x must have a last dimension of a positive multiple of {FEATURE_MULTIPLE}, "
            f"got shape {list(x.shape)}"
        )
    return x if x.dim() == 2 else x.reshape(-1, x.size(-1))


# --- a linear layer ------------------------------------------------------------------------------


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    m_splits: Tensor | Sequence[int],
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    state: RecipeState | None = None,
) -> Tensor:
    """Apply to each group of rows its own linear layer. Differentiable.

    For group e and its rows t: ``y[t] = x[t] @ weight[e].T + bias[e]``. Group sizes are data: they
    may be unaligned or zero, and their sum may be less than the number of rows.

    Under torch.autocast the layer computes in the autocast dtype, as torch.nn.functional.linear
    does.

    Args:
        x: [..., K] bfloat16, float16 or float32, rows sorted by group; leading dimensions count as
            rows. K and N are multiples of 16.
        weight: [E, N, K]. Without a recipe of x's dtype; the quantizing recipes read any of the
            three dtypes. Under ``Float8BlockScaling`` it may also be a
            :class:`grouped_linear.GroupedTensor`, which is read as it is. A weight that is stored
            as [E, K, N] is given as its ``.mT``: it is read in place (MXFP8 copies it), and its
            gradient has its layout (a gradient in e5m2 is copied).
        m_splits: [E] rows of each group, int32 or int64. A tensor on x's device is never read by
            the host; a list or a tensor elsewhere is copied there.
        bias: [E, N], of any of the three dtypes.
        recipe: how the GEMMs are computed; None for x's dtype.
        state: of this layer, under a recipe that has one: ``DelayedScaling``. With gradients
            enabled the largest magnitudes of x, weight and dy are recorded there.

    Returns:
        [..., N] of x's dtype, or autocast's; zero in rows at and past sum(m_splits).

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size, and on CPU for wrong m_splits.
        TypeError: for what is no tensor.
        ValueError: for what is no recipe, a recipe without the state that it needs, or a state
            without such a recipe, and for a quantized weight under another recipe than
            ``Float8BlockScaling``.

    >>> x, weight = torch.randn(5, 16), torch.randn(2, 32, 16)
    >>> y = grouped_linear(x, weight, torch.tensor([2, 3]))
    >>> torch.allclose(y[:2], x[:2] @ weight[0].T, atol=1e-5)
    True
    """
    check_bias(bias)
    check_recipe("grouped_linear", recipe)
    has_state = recipe is not None and recipe.has_state
    if has_state and state is None:
        raise ValueError(
            f"grouped_linear: {type(recipe).__name__} has a state: pass state, or use GroupedLinear"
        )
    if state is not None and not has_state:
        raise ValueError(f"grouped_linear: state needs a recipe that has one, got recipe {recipe}")
    options = PLAIN_CALL if state is None else LinearOptions(state.quantizer_states())
    return apply_layer(x, (weight,), bias, m_splits, recipe, options)


def _check_call(
    x_TK: Tensor, weights: Experts, m_splits: Tensor | Sequence[int], recipe: Recipe
) -> None:
    """Check what callers mix up, in their words. Ops check everything in theirs."""
    weight, sizes = weights[0], m_splits.shape if isinstance(m_splits, Tensor) else (len(m_splits),)
    if weight.dim() not in (2, 3):
        return
    E = len(weights) if weight.dim() == 2 else weight.size(0)
    if len(sizes) == 1 and torch.compiler.is_compiling():  # an unknown size is assumed to be E
        torch._check(sizes[0] == E, lambda: "grouped_linear: m_splits and weight differ in E")
    elif len(sizes) == 1 and sizes[0] != E:
        raise RuntimeError(f"grouped_linear: E differs: m_splits has {sizes[0]}, weight {E}")
    if x_TK.size(1) != weight.size(-1):
        raise RuntimeError(
            f"grouped_linear: K differs: x has {x_TK.size(1)}, weight {weight.size(-1)}"
        )
    check_dtypes("grouped_linear", x_TK, "weight", weight, recipe)


def apply_layer(
    x: Tensor,
    weights: Experts,
    bias: Tensor | None,
    m_splits: Tensor | Sequence[int],
    recipe: Recipe | None,
    options: LinearOptions = PLAIN_CALL,
) -> Tensor:
    """Compute :func:`grouped_linear` with the options that :class:`GroupedLinear` has besides.

    Args:
        x: [..., K].
        weights: one [E, N, K] or E of [N, K].
        bias: [E, N].
        m_splits: [E].
        recipe: how the GEMMs are computed.
        options: what differs from a plain call.
    """
    check_tensors("grouped_linear", ("x", "weight"), (x, weights[0]))
    if isinstance(m_splits, Tensor):
        check_tensors("grouped_linear", ("m_splits",), (m_splits,))
    elif not hasattr(m_splits, "__len__"):
        raise TypeError(
            "grouped_linear: m_splits must be a tensor or a list, the rows of each group, got "
            f"{m_splits!r}"
        )
    parameters = weights
    grad_enabled = torch.is_grad_enabled()
    if isinstance(weights[0], GroupedTensor):
        need_x = grad_enabled and x.requires_grad
        quantized = quantized_weight_of("grouped_linear", weights[0], recipe, need_x)
        options = options._replace(stored=StoredWeight(quantized))
    if recipe is None:
        recipe = UNQUANTIZED
    device = x.device
    dtype = autocast_dtype(device)
    if dtype is not None:
        if x.dtype in ACTIVATIONS:  # autocast leaves other dtypes alone
            x = x.to(dtype)
        weights = _autocast_weights(weights, recipe, dtype)
    x_TK = _as_rows("grouped_linear", x)
    _check_call(x_TK, weights, m_splits, recipe)
    if not isinstance(m_splits, Tensor):
        # Not as_tensor: Dynamo would compile a graph for each list.
        m_splits = torch.tensor(m_splits, device=device)
    elif m_splits.device != device:
        m_splits = m_splits.to(device)
    context = LinearContext(
        recipe, grad_enabled, weights, options, () if options.deferred_wgrad is None else parameters
    )
    one_op = context.has_one_op_forward
    offs_E = None if one_op else ops.splits_to_offsets(m_splits, x_TK.size(0))
    grad_inputs = weights
    if options.main_grad is not None:
        grad_inputs = parameters
    if options.deferred_wgrad is not None:
        # The parameters are differentiated in a graph of their own, by backward_dw. This tensor
        # makes autograd run the layer's backward where nothing else requires it.
        grad_inputs = (x.new_empty(0, requires_grad=True),)
    y_TN: Tensor = GroupedLinearFunction.apply(
        context, x_TK, bias, m_splits if one_op else None, offs_E, *grad_inputs
    )
    return y_TN if x.dim() == 2 else y_TN.reshape(*x.shape[:-1], y_TN.size(1))


# --- an MLP --------------------------------------------------------------------------------------


def grouped_mlp(
    x: Tensor,
    top_k_weights: Tensor,
    top_k_index: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    recipe: Recipe | None = None,
    state: tuple[RecipeState, RecipeState] | None = None,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: SwiGLU | Activation = PLAIN,
    max_rows: int | None = None,
    save_gate_up_in_fp8: bool = False,
) -> Tensor:
    """Send each token through its experts and sum their weighted outputs. Differentiable.

    With e = top_k_index[t, c] for the C experts of token t::

        gate, up = (gate_up_proj[e] @ x[t] + gate_up_proj_bias[e]).chunk(2)
        y[t] = sum over c of
            top_k_weights[t, c] * (down_proj[e] @ (silu(gate) * up) + down_proj_bias[e])

    This is with the default activation. Others are :class:`grouped_linear.SwiGLU` with options,
    :class:`grouped_linear.GeGLU`, :class:`grouped_linear.SquaredReLU`, and any
    :class:`grouped_linear.Activation`.

    The host reads nothing and every shape is static, so routing is data: no recompile, one CUDA
    graph for any routing. Rows are gathered, and no two threads add to one element: equal inputs
    give equal bits, gradients included. SwiGLU is computed in float32 and rounded once, and so is
    the weighted sum. ``Float8BlockScaling`` gathers, weights and computes SwiGLU and its gradient
    in the passes that quantize, with the bits of separate passes.

    Under torch.autocast GEMMs compute in the autocast dtype, as torch.nn.functional.linear does.

    Args:
        x: [..., H] bfloat16, float16 or float32; H and F are multiples of 16.
        top_k_weights: [..., C], of any floating dtype; used in float32.
        top_k_index: [..., C] int32 or int64, the experts chosen. A number outside [0, E) stands for
            no expert: it adds nothing, whatever x holds there.
        gate_up_proj: [E, 2 F, H]: gate, then up, or as activation says; [E, F, H] for one without a
            gate. Without a recipe of x's dtype; the quantizing recipes read any of the three. Under
            ``Float8BlockScaling`` it may also be a :class:`grouped_linear.GroupedTensor`, which is
            read as it is.
        down_proj: [E, H, F], the same.
        recipe: how the GEMMs are computed; None for x's dtype.
        state: of gate_up_proj and of down_proj, under a recipe that has a state:
            ``DelayedScaling``.
        gate_up_proj_bias: [E, 2 F] or [E, F], features as in gate_up_proj, of any of the three
            dtypes, which its gradient has, too; None adds nothing.
        down_proj_bias: [E, H], the same.
        activation: what replaces ``silu(gate) * up``, and how gate and up lie in gate_up_proj.
            SwiGLU is fused with what is before or after it; torch operations compute the others.
        max_rows: how many choices, of all tokens, memory is allocated for; None for all of them. It
            saves memory, and the time to clear what is not used, where most choices are of no
            expert. If there are more, the last ones, sorted by expert and then by token, are
            dropped as if they were of no expert. On the device
            ``((top_k_index >= 0) & (top_k_index < E)).sum()`` counts them.
        save_gate_up_in_fp8: keep the activation's input for the backward in e4m3, with a scale for
            each 128 features of a row, as DeepSeek-V3 was trained. That halves what an expert layer
            keeps and takes two passes. Outputs are the same; gradients of what is before the
            activation, and down_proj's, have an error of FP8's size.

    Returns:
        [..., H] of x's dtype, or autocast's.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number of features.
        TypeError: for what is no tensor.
        ValueError: for ``max_rows`` below 0, what is no recipe, a recipe without the state that it
            needs, a state without such a recipe, or a quantized weight under another recipe than
            ``Float8BlockScaling``.

    >>> x, scores = torch.randn(5, 16), torch.randn(5, 4).softmax(dim=-1)
    >>> gate_up_proj, down_proj = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    >>> grouped_mlp(x, *scores.topk(2), gate_up_proj, down_proj).shape
    torch.Size([5, 16])
    """
    check_recipe("grouped_mlp", recipe)
    check_flags("grouped_mlp", save_gate_up_in_fp8=save_gate_up_in_fp8)
    if (state is not None) != (recipe is not None and recipe.has_state):
        raise ValueError(
            "grouped_mlp: a recipe that has a state, and no other, takes two of them, "
            f"got recipe {recipe} and state {state}"
        )
    options = PLAIN_CALL, PLAIN_CALL
    if state is not None:
        gate_up, down = state
        options = (
            LinearOptions(gate_up.quantizer_states()),
            LinearOptions(down.quantizer_states()),
        )
    w, biases = (gate_up_proj, down_proj), (gate_up_proj_bias, down_proj_bias)
    return apply_mlp(
        x,
        top_k_weights,
        top_k_index,
        w,
        biases,
        recipe,
        options,
        Inside(activation, save_gate_up_in_fp8),
        max_rows,
    )


def _check_mlp_call(
    x: Tensor,
    top_k_weights: Tensor,
    top_k_index: Tensor,
    projections: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    max_rows: int | None,
    gated: bool,
) -> None:
    gate_up_proj, down_proj = projections
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
    if gate_up_proj.dim() != 3 or gate_up_proj.size(2) != x.size(-1):
        raise RuntimeError(
            f"grouped_mlp: gate_up_proj must be [E, {'2 F' if gated else 'F'}, {x.size(-1)}], as x "
            f"has {x.size(-1)} features, got {list(gate_up_proj.shape)}"
        )
    E, _, H = gate_up_proj.shape
    if down_proj.dim() != 3 or down_proj.shape[:2] != (E, H):
        raise RuntimeError(
            f"grouped_mlp: down_proj must be [{E}, {H}, F], as gate_up_proj has {E} experts of "
            f"{H} features, got {list(down_proj.shape)}"
        )
    if (1 + gated) * down_proj.size(2) != gate_up_proj.size(1):
        raise RuntimeError(
            f"grouped_mlp: F differs: down_proj has {down_proj.size(2)}, gate_up_proj "
            f"{gate_up_proj.size(1)} {'for gate and up' if gated else 'without a gate'}"
        )
    for name, w, bias in zip(("gate_up_proj", "down_proj"), projections, biases, strict=True):
        check_bias(bias, "grouped_mlp", f"{name}_bias")
        if bias is not None and bias.shape != w.shape[:2]:
            raise RuntimeError(
                f"grouped_mlp: {name}_bias must be {list(w.shape[:2])}, as {name} is "
                f"{list(w.shape)}, got {list(bias.shape)}"
            )
    if max_rows is not None and torch.compiler.is_compiling():  # it may be computed from x's size
        torch._check(max_rows >= 0, lambda: "grouped_mlp: max_rows must not be negative")
    elif max_rows is not None and max_rows < 0:
        raise ValueError(f"grouped_mlp: max_rows must not be negative, got {max_rows}")


def apply_mlp(
    x: Tensor,
    top_k_weights: Tensor,
    top_k_index: Tensor,
    projections: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    recipe: Recipe | None,
    options: tuple[LinearOptions, LinearOptions],
    inside: Inside,
    max_rows: int | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> Tensor:
    """Compute :func:`grouped_mlp` with the options that :class:`GroupedMLP` has besides.

    Args:
        x: [..., H].
        top_k_weights: [..., C].
        top_k_index: [..., C].
        projections: gate_up_proj [E, G, H] and down_proj [E, H, F].
        biases: of both, [E, G] and [E, H], or None.
        recipe: how the GEMMs are computed.
        options: what differs from a plain call, of gate_up_proj and of down_proj.
        inside: what lies between the two layers.
        max_rows: see :func:`grouped_mlp`; with a dispatcher it decides.
        dispatcher: where the experts of `projections` are those of one process of several.
    """
    activation = inside.activation
    check_activation("grouped_mlp", activation)
    names = "x", "top_k_weights", "top_k_index", "gate_up_proj", "down_proj"
    check_tensors("grouped_mlp", names, (x, top_k_weights, top_k_index, *projections))
    not_none = UNQUANTIZED if recipe is None else recipe
    dtype = autocast_dtype(x.device)
    x_TH = _as_rows("grouped_mlp", x)
    _check_mlp_call(x, top_k_weights, top_k_index, projections, biases, max_rows, activation.gated)
    if dtype is not None and x.dtype in ACTIVATIONS:
        x_TH = x_TH.to(dtype)
    grad_enabled = torch.is_grad_enabled()
    need_x = grad_enabled and x.requires_grad
    # Whether the second layer's dgrad runs: for every gradient but those of its own parameters.
    need_dh = grad_enabled and any(
        t is not None and t.requires_grad for t in (x, top_k_weights, projections[0], biases[0])
    )
    contexts, grad_inputs = [], []
    for name, w, given, columnwise in zip(
        names[-2:], projections, options, (need_x, need_dh), strict=True
    ):
        own = given
        if isinstance(w, GroupedTensor):
            quantized = quantized_weight_of("grouped_mlp", w, recipe, columnwise)
            own = given._replace(stored=StoredWeight(quantized))
        cast = (w,) if dtype is None else _autocast_weights((w,), not_none, dtype)
        check_dtypes("grouped_mlp", x_TH, name, cast[0], not_none)
        contexts.append(LinearContext(not_none, grad_enabled, cast, own))
        grad_inputs.append(cast[0] if own.main_grad is None else w)
    index_TC = top_k_index.reshape(-1, top_k_index.size(-1))
    weights_TC = top_k_weights.reshape(-1, top_k_weights.size(-1))
    dispatched = None
    if dispatcher is not None:
        dispatched = dispatcher.dispatch(x_TH, weights_TC, index_TC)
        x_TH, weights_TC, index_TC, max_rows, _ = dispatched
    routing = ops.sort_by_expert(index_TC, projections[0].size(0))
    if max_rows is not None:
        routing = truncate_routing(routing, max_rows)
    # A choice of no expert points to a row of zeros, which a weight of NaN would spoil.
    weights_TC = weights_TC.masked_fill(routing.row >= routing.offs[-1], 0)
    y_TH: Tensor = GroupedMLPFunction.apply(
        *contexts, inside, x_TH, weights_TC, *grad_inputs, *biases, *routing
    )
    if dispatcher is not None and dispatched is not None:
        y_TH = dispatcher.combine(y_TH, dispatched)
    return y_TH if x.dim() == 2 else y_TH.reshape(x.shape)
