"""The experts of a mixture-of-experts layer as one module: router output in, weighted sum out.

T tokens, C experts chosen for a token, R rows (T * C, or a bound and one), E experts, H features of
a token, F features inside an expert, G = 2 F for gate and up together.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.autograd.linear import UNQUANTIZED, Call, _multiply, needs_grad_now, wgrad_of
from grouped_linear.autograd.once_differentiable import differentiable_once
from grouped_linear.autograd.routing import (
    gradient_of_rows,
    gradient_of_weights,
    sum_of_rows,
    truncate_routing,
    weight_of_rows,
)
from grouped_linear.meta_kernels.rules import (
    ACTIVATIONS,
    FEATURE_MULTIPLE,
    MAX_GROUPS,
    dtype_name,
)
from grouped_linear.nn.functional import as_rows, autocast_dtype, autocast_weights, check_bias
from grouped_linear.nn.gradient_accumulation import cache_plan, main_grad_plan, read_flag
from grouped_linear.ops.activation_forms import PLAIN, SwiGLU
from grouped_linear.quantized.tensor import GroupedTensor
from grouped_linear.quantized.weight import (
    check_quantized_weight,
    convert_assigned,
    kept_weight,
)
from grouped_linear.quantized.weight_cache import WeightCache
from grouped_linear.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Operands,
    OutputMask,
    QuantizerState,
    Recipe,
    Scheme,
)
from grouped_linear.recipes.delayed_state import DelayedScalingState

# The four places where a tensor is made only to be quantized. Block scaling has an op that does
# both in one pass, with the same bits; under any other recipe the tensor is made first.


def _tokens(
    scheme: Scheme,
    x_TH: Tensor,
    routing: ops.SortedByExpert,
    slot: QuantizerState | None,
    columnwise: bool,
) -> Operands:
    """``scheme.activation(x[token])``."""
    wanted = OutputMask(True, columnwise, False)
    if not isinstance(scheme, Float8BlockScaling):
        return scheme.activation(x_TH[routing.token], routing.offs, slot, wanted)
    return scheme.quantized(
        x_TH,
        routing.offs,
        wanted,
        share_scales=scheme.share_x_scales,
        rows_T=routing.token,
    )


def _activated(
    scheme: Scheme,
    gate_up_RG: Tensor,
    offs_E: Tensor,
    activation: SwiGLU,
    slot: QuantizerState | None,
    columnwise: bool,
) -> Operands:
    """``scheme.activation(swiglu(gate_up))``."""
    if not isinstance(scheme, Float8BlockScaling):
        h_RF = ops.swiglu(gate_up_RG, offs_E, activation)
        return scheme.activation(h_RF, offs_E, slot, OutputMask(True, columnwise, False))
    q, scale, q_t, scale_t, _ = ops.group_quantize_swiglu(
        gate_up_RG,
        offs_E,
        amax_epsilon=scheme.epsilon,
        power_of_two_scales=scheme.power_of_two_scales,
        columnwise=columnwise,
        share_scales=scheme.share_x_scales,
        activation=activation,
    )
    return Operands(q, scale, q_t, scale_t)


def _gate_up_gradient(
    scheme: Scheme,
    dh_RF: Tensor,
    gate_up_RG: Tensor,
    offs_E: Tensor,
    activation: SwiGLU,
    slot: QuantizerState | None,
    wanted: OutputMask,
) -> Operands:
    """``scheme.gradient(swiglu_grad(dh, gate_up))``."""
    if not isinstance(scheme, Float8BlockScaling):
        d_gate_up_RG = ops.swiglu_grad(dh_RF, gate_up_RG, offs_E, activation)
        return scheme.gradient(d_gate_up_RG, offs_E, slot, wanted)
    d_gate_up = ops.group_quantize_swiglu_grad(
        dh_RF,
        gate_up_RG,
        offs_E,
        amax_epsilon=scheme.epsilon,
        power_of_two_scales=scheme.power_of_two_scales,
        rowwise=wanted.rowwise,
        columnwise=wanted.columnwise,
        bias_grad=wanted.bias_grad,
        activation=activation,
    )
    return Operands(*d_gate_up)


def _output_gradient(
    scheme: Scheme,
    d_out_TH: Tensor,
    weight_TC: Tensor,
    routing: ops.SortedByExpert,
    slot: QuantizerState | None,
    wanted: OutputMask,
) -> Operands:
    """``scheme.gradient(gradient_of_rows(d_out))``."""
    if not isinstance(scheme, Float8BlockScaling):
        dy_RH = gradient_of_rows(d_out_TH, weight_TC, routing)
        return scheme.gradient(dy_RH, routing.offs, slot, wanted)
    return scheme.quantized(
        d_out_TH,
        routing.offs,
        wanted,
        share_scales=False,
        rows_T=routing.token,
        factor_T=weight_of_rows(weight_TC, routing),
    )


class GroupedMLPFunction(torch.autograd.Function):
    """Gather, gate and up, SwiGLU, down, weighted sum: :func:`grouped_mlp` of sorted rows.

    For the backward are kept: columnwise x and swiglu, for wgrad; the transposed weights, for
    dgrad; gate_up's product in the activations' dtype, from which swiglu's gradient is computed as
    it is quantized; and the experts' outputs, if the routing weights need a gradient. Each only
    where a gradient needs it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_call: Call,
        down_call: Call,
        activation: SwiGLU,
        x_TH: Tensor,
        weight_TC: Tensor,
        gate_up_EGH: Tensor,
        down_EHF: Tensor,
        gate_up_bias_EG: Tensor | None,
        down_bias_EH: Tensor | None,
        *routing_tensors: Tensor,
    ) -> Tensor:
        """Gather, two products an expert, weighted sum.

        Args:
            gate_up_call: of the first product; its recipe is both's.
            down_call: of the second.
            activation: between them.
            gate_up_EGH: what the first call's weight gradient is of.
            down_EHF: what the second call's is of.
            routing_tensors: what a SortedByExpert holds.
        """
        needed = [gate_up_call.grad_enabled and need for need in ctx.needs_input_grad[3:9]]
        need_x, need_weight, need_gate_up, need_down, need_gate_up_bias, _ = needed
        need_h = need_x or need_gate_up or need_gate_up_bias
        scheme = gate_up_call.scheme
        routing = ops.SortedByExpert(*routing_tensors)
        offs_E, dtype = routing.offs, x_TH.dtype
        x_slot, _, d_gate_up_slot = gate_up_call.slots or (None, None, None)
        h_slot, _, dy_slot = down_call.slots or (None, None, None)

        x = _tokens(scheme, x_TH, routing, x_slot, need_gate_up)
        gate_up = gate_up_call.weight(columnwise=need_x)
        biases = gate_up_bias_EG, down_bias_EH
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        gate_up_bias_EG, down_bias_EH = (None if b is None else b.to(dtype) for b in biases)
        gate_up_RG = _multiply(
            x.rowwise, x.scale, gate_up.rowwise, gate_up.scale, offs_E, gate_up_bias_EG, dtype
        )
        h = _activated(scheme, gate_up_RG, offs_E, activation, h_slot, need_down)
        down = down_call.weight(columnwise=need_h)
        y_RH = _multiply(h.rowwise, h.scale, down.rowwise, down.scale, offs_E, down_bias_EH, dtype)

        ctx.activation = activation
        ctx.calls = gate_up_call.for_backward(), down_call.for_backward()
        ctx.save_for_backward(
            *routing,
            weight_TC,
            gate_up_RG if need_h else None,
            y_RH if need_weight else None,
            *(t for o in (x, gate_up, h, down) for t in (o.columnwise, o.columnwise_scale)),
            *(None if slot is None else slot.scale for slot in (d_gate_up_slot, dy_slot)),
        )
        return sum_of_rows(y_RH, routing.row, weight_TC)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out_TH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the routing weights and the parameters, each only where needed."""
        need_x, _, need_gate_up, need_down, need_gate_up_bias, need_down_bias = (
            ctx.needs_input_grad[3:9]
        )
        gate_up_call, down_call = ctx.calls
        if gate_up_call.main_grad is not None or down_call.main_grad is not None:
            needed = need_gate_up, need_down
            need_gate_up, need_down = needs_grad_now(ctx, needed, slice(2, 4))
        need_h = need_x or need_gate_up or need_gate_up_bias
        saved = ctx.saved_tensors
        routing = ops.SortedByExpert(*saved[:4])
        weight_TC, gate_up_RG, y_RH = saved[4:7]
        x, x_scale, gate_up, gate_up_scale, h, h_scale, down, down_scale = saved[7:15]
        d_gate_up_slot = gate_up_call.gradient_slot(saved[15])
        dy_slot = down_call.gradient_slot(saved[16])
        offs_E, dtype = routing.offs, d_out_TH.dtype
        scheme = gate_up_call.scheme

        d_weight_TC = gradient_of_weights(d_out_TH, weight_TC, y_RH, routing)
        dx_TH = d_gate_up_EGH = d_down_EHF = d_gate_up_bias_EG = d_down_bias_EH = None
        if need_h or need_down or need_down_bias:
            wanted = OutputMask(need_h, need_down, need_down_bias)
            # For a bias alone nothing is quantized.
            own = scheme if need_h or need_down else UNQUANTIZED
            dy = _output_gradient(own, d_out_TH, weight_TC, routing, dy_slot, wanted)
            if dy.bias_grad is not None:
                d_down_bias_EH = dy.bias_grad.to(ctx.bias_dtypes[1])
        if need_down:
            (d_down_EHF,) = wgrad_of(down_call, dy, h, h_scale, offs_E).compute()
        if need_h:
            w, w_scale = scheme.for_dgrad(down, down_scale)
            dh_RF = _multiply(dy.rowwise, dy.scale, w, w_scale, offs_E, None, dtype)
            wanted = OutputMask(need_x, need_gate_up, need_gate_up_bias)
            own = scheme if need_x or need_gate_up else UNQUANTIZED
            d = _gate_up_gradient(
                own, dh_RF, gate_up_RG, offs_E, ctx.activation, d_gate_up_slot, wanted
            )
            if need_gate_up:
                (d_gate_up_EGH,) = wgrad_of(gate_up_call, d, x, x_scale, offs_E).compute()
            if d.bias_grad is not None:
                d_gate_up_bias_EG = d.bias_grad.to(ctx.bias_dtypes[0])
            if need_x:
                w, w_scale = scheme.for_dgrad(gate_up, gate_up_scale)
                dx_RH = _multiply(d.rowwise, d.scale, w, w_scale, offs_E, None, dtype)
                dx_TH = sum_of_rows(dx_RH, routing.row)
        of_weights = d_gate_up_EGH, d_down_EHF, d_gate_up_bias_EG, d_down_bias_EH
        return None, None, None, dx_TH, d_weight_TC, *of_weights, *(None,) * len(routing)


def grouped_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    recipe: Recipe = None,
    state: tuple[DelayedScalingState, DelayedScalingState] | None = None,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: SwiGLU = PLAIN,
    max_rows: int | None = None,
) -> Tensor:
    """Send each token through its experts and add up what they give. Differentiable.

    With e = experts[t, c] for the C experts of token t::

        gate, up = (gate_up_proj[e] @ x[t] + gate_up_proj_bias[e]).chunk(2)
        y[t] = sum over c of weights[t, c] * (down_proj[e] @ (silu(gate) * up) + down_proj_bias[e])

    That is with the activation of default; others are in :class:`grouped_linear.SwiGLU`.

    The host reads nothing and every shape is static, so routing is data: no recompile, one CUDA
    graph for any of it. Rows are gathered, never added to one place by several threads: equal
    inputs give equal bits, gradients included. swiglu is computed in float32 and rounded once, and
    so is the weighted sum. Under ``Float8BlockScaling`` gathering, weighting, swiglu and its
    gradient happen in the passes that quantize, with the bits they have apart.

    Under torch.autocast products take the autocast dtype, as in torch.nn.functional.linear.

    Args:
        x: [..., H] bfloat16, float16 or float32; H and F are multiples of 16.
        weights: [..., C], of any floating dtype; they take part in float32.
        experts: [..., C] int32 or int64. A number outside [0, E) stands for no expert: it adds
            nothing, whatever x holds there.
        gate_up_proj: [E, 2 F, H]: gate, then up, or as activation says. Of x's dtype without a
            recipe, of any of the three with one. Under ``Float8BlockScaling`` also a
            :class:`grouped_linear.GroupedTensor`, read as it is.
        down_proj: [E, H, F], the same.
        recipe: how the products are computed; None for x's dtype.
        state: what ``DelayedScaling`` remembers of gate_up_proj and of down_proj; for it alone.
        gate_up_proj_bias: [E, 2 F], gate and up as in gate_up_proj, of any of the three dtypes,
            which its gradient has, too; None adds nothing.
        down_proj_bias: [E, H], the same.
        activation: what is computed in place of ``silu(gate) * up``, and how gate and up lie in
            gate_up_proj: see :class:`grouped_linear.SwiGLU`.
        max_rows: how many choices there is room for, of all tokens; None for all of them. Memory,
            and the time to clear what is not used, follow from it: for tokens most of whose choices
            are of no expert. Of more choices, sorted by expert and then by token, the last ones are
            dropped as if they were of no expert; ``((experts >= 0) & (experts < E)).sum()`` tells,
            on the device, how many there are.

    Returns:
        [..., H] of x's dtype, or autocast's.

    Raises:
        ValueError: for shapes that do not fit, ``max_rows`` below 0, ``DelayedScaling`` without a
            state, a state without it, or a quantized weight under another recipe than
            ``Float8BlockScaling``.
        RuntimeError: for a wrong dtype, device or number of features.

    >>> x, scores = torch.randn(5, 16), torch.randn(5, 4).softmax(dim=-1)
    >>> gate_up_proj, down_proj = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    >>> grouped_mlp(x, *scores.topk(2), gate_up_proj, down_proj).shape
    torch.Size([5, 16])
    """
    if (state is not None) != isinstance(recipe, DelayedScaling):
        raise ValueError(
            "grouped_mlp: DelayedScaling, and it alone, takes a state: two DelayedScalingStates, "
            f"got recipe {recipe} and state {state}"
        )
    plans: list[dict[str, Any]] = [{}, {}]
    if state is not None:
        plans = [{"slots": s.slots()} for s in state]
    w, biases = (gate_up_proj, down_proj), (gate_up_proj_bias, down_proj_bias)
    return apply_mlp(x, weights, experts, w, biases, recipe, plans, activation, max_rows)


def _check_activation(op: str, activation: SwiGLU) -> None:
    if not isinstance(activation, SwiGLU):
        raise ValueError(f"{op}: activation must be a SwiGLU, got {activation!r}")


def apply_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    projections: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    recipe: Recipe,
    plans: list[dict[str, Any]],
    activation: SwiGLU,
    max_rows: int | None = None,
) -> Tensor:
    """:func:`grouped_mlp` with what :class:`GroupedMLP` has besides.

    Args:
        x: [..., H].
        weights: [..., C].
        experts: [..., C].
        projections: gate_up_proj [E, 2 F, H] and down_proj [E, H, F].
        biases: of both, [E, 2 F] and [E, H], or None.
        recipe: how the products are computed.
        plans: further fields of :class:`grouped_linear.autograd.linear.Call`, of gate_up_proj and
            of down_proj.
        activation: see :func:`grouped_mlp`.
        max_rows: see :func:`grouped_mlp`.
    """
    gate_up_proj, down_proj = projections
    _check_activation("grouped_mlp", activation)
    x_TH = as_rows("grouped_mlp", x)
    if any(t.dim() == 0 or t.size(-1) == 0 for t in (weights, experts)):
        raise ValueError(
            "grouped_mlp: weights and experts must be [..., C] with C positive, got "
            f"{list(weights.shape)} and {list(experts.shape)}"
        )
    if x.dim() == weights.dim() == experts.dim() and torch.compiler.is_compiling():
        for t in (weights, experts):
            for i in range(x.dim() - 1):  # sizes that are not known yet are held to be the same
                torch._check(
                    x.size(i) == t.size(i),
                    lambda: "grouped_mlp: x, weights and experts differ in their tokens",
                )
    elif not x.shape[:-1] == weights.shape[:-1] == experts.shape[:-1]:
        shapes = ", ".join(str(list(t.shape)) for t in (x, weights, experts))
        raise ValueError(f"grouped_mlp: x, weights and experts differ in their tokens: {shapes}")
    if weights.size(-1) != experts.size(-1):
        raise ValueError(
            f"grouped_mlp: C differs: weights has {weights.size(-1)}, experts {experts.size(-1)}"
        )
    if experts.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"grouped_mlp: experts must be int32 or int64, got {dtype_name(experts.dtype)}"
        )
    if gate_up_proj.dim() != 3 or gate_up_proj.size(2) != x.size(-1):
        raise ValueError(
            f"grouped_mlp: gate_up_proj must be [E, 2 F, {x.size(-1)}], as x has {x.size(-1)} "
            f"features, got {list(gate_up_proj.shape)}"
        )
    E, _, H = gate_up_proj.shape
    if down_proj.dim() != 3 or down_proj.shape[:2] != (E, H):
        raise ValueError(
            f"grouped_mlp: down_proj must be [{E}, {H}, F], as gate_up_proj has {E} experts of "
            f"{H} features, got {list(down_proj.shape)}"
        )
    if 2 * down_proj.size(2) != gate_up_proj.size(1):
        raise ValueError(
            f"grouped_mlp: F differs: down_proj has {down_proj.size(2)}, gate_up_proj "
            f"{gate_up_proj.size(1)} for gate and up"
        )
    for name, w, bias in zip(("gate_up_proj", "down_proj"), projections, biases, strict=True):
        check_bias(bias, "grouped_mlp", f"{name}_bias")
        if bias is not None and bias.shape != w.shape[:2]:
            raise ValueError(
                f"grouped_mlp: {name}_bias must be {list(w.shape[:2])}, as {name} is "
                f"{list(w.shape)}, got {list(bias.shape)}"
            )
    if max_rows is not None and torch.compiler.is_compiling():  # it may follow from x's size
        torch._check(max_rows >= 0, lambda: "grouped_mlp: max_rows must not be negative")
    elif max_rows is not None and max_rows < 0:
        raise ValueError(f"grouped_mlp: max_rows must not be negative, got {max_rows}")
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype in ACTIVATIONS:
        x_TH = x_TH.to(dtype)
    need_x = torch.is_grad_enabled() and x.requires_grad
    need_h = need_x or (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (gate_up_proj, biases[0]))
    )
    calls, grad_inputs = [], []
    for w, plan, columnwise in zip(projections, plans, (need_x, need_h), strict=True):
        if isinstance(w, GroupedTensor):
            plan["kept"] = kept_weight("grouped_mlp", w, recipe, columnwise)
        own = (w,) if dtype is None else autocast_weights((w,), recipe, dtype)
        calls.append(Call(recipe, torch.is_grad_enabled(), own, **plan))
        grad_inputs.append(own[0] if calls[-1].main_grad is None else w)
    routing = ops.sort_by_expert(experts.reshape(-1, experts.size(-1)), E)
    if max_rows is not None:
        routing = truncate_routing(routing, max_rows)
    # A choice of no expert has a row of zeros, which a weight of NaN would spoil.
    weights = weights.masked_fill(routing.row.view(experts.shape) >= routing.offs[-1], 0)
    y_TH: Tensor = GroupedMLPFunction.apply(
        *calls,
        activation,
        x_TH,
        weights.reshape(-1, weights.size(-1)),
        *grad_inputs,
        *biases,
        *routing,
    )
    return y_TH.reshape(x.shape)


class GroupedMLP(nn.Module):
    """SwiGLU experts and their weighted sum, as fast as the ops allow: :func:`grouped_mlp`.

    Args:
        num_experts: E, at most 1024.
        hidden_size: H, a multiple of 16.
        intermediate_size: F, a multiple of 16.
        bias: whether both products add a bias.
        activation: what they have between them: see :class:`grouped_linear.SwiGLU`.
        recipe: how the products are computed; None computes in the activations' dtype.
        cache_weights: allocate room for both quantized weights, so that ``is_first_microbatch`` can
            keep them from one micro-batch to the next. Without a recipe there is nothing to keep.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``, an attribute of both
            weights (float32 or bfloat16, of its shape), in the product itself, and leave ``grad``
            alone. ``grad_added_to_main_grad`` and ``overwrite_main_grad`` are heeded as
            :class:`grouped_linear.GroupedLinear` does. A bias has its gradient in ``grad``.
        quantized_weight: make both weights :class:`grouped_linear.GroupedTensor`, which are kept
            quantized, under ``Float8BlockScaling``. They are drawn in `dtype`, then quantized.
        stochastic_rounding: round them by chance when an optimizer steps them.
        dtype: of the parameters.
        device: of the parameters. After ``device="meta"`` call ``to_empty(device=...)`` and
            ``reset_parameters()``.

    Attributes:
        num_experts, hidden_size, intermediate_size, activation, recipe: as given.
        gate_up_proj: [E, 2 F, H]: gate, then up, or as activation says.
        down_proj: [E, H, F].
        gate_up_proj_bias: [E, 2 F], or None.
        down_proj_bias: [E, H], or None.
        gate_up_state: what ``DelayedScaling`` remembers of gate_up_proj; None under other recipes.
        down_state: the same of down_proj.
        gate_up_cache: the quantized gate_up_proj that is kept, see
            :class:`grouped_linear.quantized.weight_cache.WeightCache`; None without
            ``cache_weights``.
        down_cache: the same of down_proj.

    Raises:
        ValueError: for a configuration that no call could run.

    >>> mlp = GroupedMLP(num_experts=4, hidden_size=16, intermediate_size=32)
    >>> x, scores = torch.randn(2, 5, 16), torch.randn(2, 5, 4).softmax(dim=-1)
    >>> mlp(x, *scores.topk(2)).shape
    torch.Size([2, 5, 16])

    Steps of several micro-batches, whose weights are quantized once and whose gradients are added
    up where the optimizer reads them:

    >>> mlp = GroupedMLP(4, 16, 32, recipe=Float8BlockScaling(), cache_weights=True,
    ...                  fuse_wgrad_accumulation=True)
    >>> for p in (mlp.gate_up_proj, mlp.down_proj):
    ...     p.main_grad = torch.empty_like(p)
    >>> for i in range(3):
    ...     mlp(x, *scores.topk(2), is_first_microbatch=i == 0).square().mean().backward()
    >>> mlp.down_proj.grad is None, bool(mlp.down_proj.main_grad.any())
    (True, True)

    Weights in FP8 alone, which an optimizer steps:

    >>> mlp = GroupedMLP(4, 16, 32, recipe=Float8BlockScaling(), quantized_weight=True)
    >>> mlp.down_proj.q.dtype
    torch.float8_e4m3fn
    >>> optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    >>> mlp(x, *scores.topk(2)).square().mean().backward()
    >>> optimizer.step()
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None
    gate_up_state: DelayedScalingState | None
    down_state: DelayedScalingState | None
    gate_up_cache: WeightCache | None
    down_cache: WeightCache | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: SwiGLU = PLAIN,
        recipe: Recipe = None,
        cache_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
        quantized_weight: bool = False,
        stochastic_rounding: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts <= MAX_GROUPS:
            raise ValueError(
                f"GroupedMLP: num_experts must be between 1 and {MAX_GROUPS}, got {num_experts}"
            )
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, size in sizes.items():
            if size <= 0 or size % FEATURE_MULTIPLE:
                raise ValueError(
                    f"GroupedMLP: {name} must be a positive multiple of {FEATURE_MULTIPLE}, "
                    f"got {size}"
                )
        if not isinstance(recipe, Recipe):
            raise ValueError(
                "GroupedMLP: recipe must be None or one of grouped_linear's recipes, "
                f"got {recipe!r}"
            )
        _check_activation("GroupedMLP", activation)
        check_quantized_weight(
            "GroupedMLP",
            recipe,
            quantized_weight,
            cache_weights,
            stochastic_rounding=stochastic_rounding,
        )
        self.num_experts = num_experts
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.activation, self._recipe = activation, recipe
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.quantized_weight = quantized_weight
        E, H, F = num_experts, hidden_size, intermediate_size
        for name, shape in (("gate_up_proj", (E, 2 * F, H)), ("down_proj", (E, H, F))):
            w = torch.empty(shape, dtype=dtype, device=device)
            if quantized_weight:
                assert isinstance(recipe, Float8BlockScaling)
                w = GroupedTensor.quantize(w, recipe, stochastic_rounding=stochastic_rounding)
            self.register_parameter(name, nn.Parameter(w))
        for name, features in (("gate_up_proj_bias", 2 * F), ("down_proj_bias", H)):
            b = nn.Parameter(torch.empty(E, features, dtype=dtype, device=device)) if bias else None
            self.register_parameter(name, b)
        self.gate_up_state = self.down_state = None
        if isinstance(recipe, DelayedScaling):
            self.gate_up_state = DelayedScalingState(recipe, E, device)
            self.down_state = DelayedScalingState(recipe, E, device)
        self.gate_up_cache = self.down_cache = None
        if cache_weights and recipe is not None:
            self.gate_up_cache = WeightCache(recipe, E, 2 * F, H, device)
            self.down_cache = WeightCache(recipe, E, H, F, device)
        self.reset_parameters()

    @property
    def recipe(self) -> Recipe:
        """How products are computed. Another recipe has other states: make another module."""
        return self._recipe

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters as nn.Linear does, forget scales and caches; nothing on meta."""
        if self.gate_up_proj.is_meta:
            return
        for weight_ENK, bias_EN in (
            (self.gate_up_proj, self.gate_up_proj_bias),
            (self.down_proj, self.down_proj_bias),
        ):
            bound = 1 / math.sqrt(weight_ENK.size(2))
            if bias_EN is not None:
                nn.init.uniform_(bias_EN, -bound, bound)
            if not self.quantized_weight:
                nn.init.uniform_(weight_ENK, -bound, bound)
            else:  # draw what any other layer draws, then quantize it
                drawn_ENK = torch.empty_like(weight_ENK)
                weight_ENK.copy_(nn.init.uniform_(drawn_ENK, -bound, bound))
        for state in (self.gate_up_state, self.down_state, self.gate_up_cache, self.down_cache):
            if state is not None:
                state.reset()

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        is_first_microbatch: Tensor | bool | None = None,
        *,
        max_rows: int | None = None,
    ) -> Tensor:
        """Send x [..., H] through ``experts`` [..., C] and sum by ``weights`` [..., C].

        Args:
            x: see :func:`grouped_mlp`.
            weights: see :func:`grouped_mlp`.
            experts: see :func:`grouped_mlp`.
            is_first_microbatch: of those between two steps of the optimizer. True quantizes both
                weights into their caches, and writes their gradients over main_grad; False reads
                the caches and adds to main_grad. A bool tensor of no dimensions on x's device
                decides the same there, so that one graph does both. None quantizes the weights for
                this call alone, and adds to main_grad.
            max_rows: see :func:`grouped_mlp`.

        Raises:
            RuntimeError: as :func:`grouped_mlp`, or where False reads a cache that was not filled.
                On the device nobody looks: a flag that is false then reads NaN.
            ValueError: as :func:`grouped_mlp`, or for ``is_first_microbatch`` under a recipe and
                without ``cache_weights``, unless the weights are kept quantized anyway.
        """
        keeps_weight = self.gate_up_cache is not None or self.quantized_weight
        first = read_flag("GroupedMLP", is_first_microbatch, x, self._recipe, keeps_weight)
        plans: list[dict[str, Any]] = []
        for name, w, state, cache in (
            ("gate_up_proj", self.gate_up_proj, self.gate_up_state, self.gate_up_cache),
            ("down_proj", self.down_proj, self.down_state, self.down_cache),
        ):
            plan = cache_plan("GroupedMLP", cache, first)
            if state is not None:
                plan["slots"] = state.slots()
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
                plan |= main_grad_plan("GroupedMLP", {name: w}, first)
            plans.append(plan)
        return apply_mlp(
            x,
            weights,
            experts,
            (self.gate_up_proj, self.down_proj),
            (self.gate_up_proj_bias, self.down_proj_bias),
            self._recipe,
            plans,
            self.activation,
            max_rows,
        )

    def extra_repr(self) -> str:
        """The options that tell layers apart."""
        E, H, F = self.down_proj.shape
        bias, activation = self.down_proj_bias is not None, self.activation
        return (
            f"num_experts={E}, hidden_size={H}, intermediate_size={F}, bias={bias}, "
            f"activation={activation}, recipe={self.recipe}"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load parameters of either kind."""
        if args[0].get("assign_to_params_buffers"):  # of the local metadata
            convert_assigned(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
