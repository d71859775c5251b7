"""Gradients: of the op grouped_mm, and of a whole grouped linear layer under a recipe.

T rows, E groups, K in_features, N out_features.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear import ops
from grouped_linear.autograd.once_differentiable import differentiable_once
from grouped_linear.recipes import (
    Experts,
    Float8BlockScaling,
    Operands,
    OutputMask,
    QuantizedWeight,
    QuantizerState,
    Recipe,
    Scheme,
    Unquantized,
    Values,
    is_transposed,
    quantized_operands,
)


def _weight_gradient(
    w_ENK: Tensor,
    dy: Tensor,
    x: Tensor,
    dy_scale: Tensor | None,
    x_scale: Tensor | None,
    offs_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """dy.T @ x over each group's rows, laid out as the weight is: autograd copies what is not.

    Of a weight that is stored as [E, K, N] it is x.T @ dy; e5m2 is multiplied as dy alone.
    """
    exchanged = is_transposed(w_ENK) and dy.dtype == x.dtype
    if exchanged:
        dy, x, dy_scale, x_scale = x, dy, x_scale, dy_scale
    if dy_scale is None or x_scale is None:
        dw = ops.grouped_mm_wgrad(dy, x, offs_E, dtype)
    else:
        dw = ops.grouped_scaled_mm_wgrad(dy, x, dy_scale, x_scale, offs_E, dtype)
    return dw.mT if exchanged else dw


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_TK, b_ENK, offs_E, bias_EN, _ = inputs
    ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
    ctx.save_for_backward(a_TK, b_ENK, offs_E)


@differentiable_once
def _grouped_mm_backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
    a_TK, b_ENK, offs_E = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    # The dispatcher drops trailing arguments that equal their defaults, so there may be no fourth.
    need_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    dy_cast_TN = dy_TN.to(a_TK.dtype)
    return (
        ops.grouped_mm(dy_cast_TN, b_ENK.transpose(1, 2), offs_E) if need_a else None,
        _weight_gradient(b_ENK, dy_cast_TN, a_TK, None, None, offs_E, b_ENK.dtype)
        if need_b
        else None,
        None,
        ops.grouped_bias_grad(dy_TN, offs_E).to(ctx.bias_dtype) if need_bias else None,
        None,
    )


torch.library.register_autograd(
    "grouped_linear::grouped_mm", _grouped_mm_backward, setup_context=_grouped_mm_setup
)


UNQUANTIZED = Unquantized()


class Call(NamedTuple):
    """One call of the layer: everything but what is differentiated."""

    recipe: Recipe
    grad_enabled: bool
    """Whether a backward may follow; needs_input_grad does not tell."""
    experts: Experts
    """The weight's numbers."""
    slots: tuple[QuantizerState, QuantizerState, QuantizerState] | None = None
    """Of x, weight and dy, where the recipe keeps a state."""
    kept: QuantizedWeight | None = None
    """The quantized weight to read in place of the experts."""
    refresh: "Tensor | bool" = False
    """Whether kept is quantized anew before; a flag on the device decides there."""
    save_input: bool = False
    """Save x itself, and quantize it for wgrad in the backward."""
    main_grad: Experts | None = None
    """What weight gradients are added to, in place of being returned."""
    overwrite: "Tensor | bool" = False
    """Whether main_grad is written over instead; a flag on the device decides there."""
    dummy_grad: bool = False
    """Return gradients of zero although they went into main_grad."""
    later: "deque[Wgrad] | None" = None
    """Where wgrad is put off to, in place of being computed in the backward."""
    differentiated: Experts = ()
    """What it is the gradient of then: the forward's weights, before autocast."""

    @property
    def has_one_op_forward(self) -> bool:
        """Whether an eager forward may be one op, which quantizes all of x and of the weight."""
        return self.kept is None and self._recipe_of_one_op is not None

    @property
    def one_op_backward(self) -> Float8BlockScaling | None:
        """The recipe, where an eager backward may be one op, which returns weight gradients."""
        plain = self.main_grad is None and self.later is None
        return self._recipe_of_one_op if plain else None

    @property
    def _recipe_of_one_op(self) -> Float8BlockScaling | None:
        """Of an eager call with one packed weight, stored as it is multiplied.

        A compiled graph has the ops inside: passes look for them, and there an op costs no time.
        """
        recipe = self.recipe
        if not isinstance(recipe, Float8BlockScaling) or torch.compiler.is_compiling():
            return None
        weight = self.experts[0]
        return None if self.save_input or weight.dim() == 2 or is_transposed(weight) else recipe

    def for_backward(self) -> "Call":
        """What the backward reads: of the weight its shape, layout and dtype, not its numbers.

        A parameter lives anyway. What was computed, learning or not, would live as long as the
        graph.
        """
        if not self.grad_enabled or torch.compiler.is_compiling():
            return self
        if all(
            isinstance(w, nn.Parameter) or (w.is_leaf and w.requires_grad) for w in self.experts
        ):
            return self
        return self._replace(
            experts=tuple(torch.empty_like(w, device="meta") for w in self.experts)
        )

    @property
    def scheme(self) -> Scheme:
        """What tensors become under the recipe."""
        return self.recipe or UNQUANTIZED

    def weight(self, columnwise: bool) -> Operands:
        """The weight for fprop, and for dgrad where it will read it: kept, or quantized now."""
        slot = None if self.slots is None else self.slots[1]
        if self.kept is None:
            return self.scheme.weight(self.experts, slot, columnwise)
        assert self.recipe is not None
        if self.refresh is not False:
            flag = None if self.refresh is True else self.refresh
            self.recipe.refresh_weight_(self.kept, self.experts, slot, flag)
        return quantized_operands(self.kept, columnwise)

    def gradient_slot(self, scale: Tensor | None) -> QuantizerState | None:
        """dy's slot in the backward, with the scale that was saved for it.

        Saved, so that an update between forward and backward raises; amax is only ever raised.
        """
        if self.slots is None:
            return None
        assert scale is not None
        return QuantizerState(scale, self.slots[2].amax)


def needs_grad_now(ctx: Any, needed: Sequence[bool], edges: slice) -> Sequence[bool]:
    """Which of the needed gradients this backward is run for.

    A forward knows what may be asked for; torch.autograd.grad of x asks for no weight's gradient,
    which must not be added to main_grad then, nor put off. Where it is only returned nobody asks
    this: it takes 3 us. A compiled backward computes them all, and so does one that is run for some
    of several experts' parameters.

    Args:
        ctx: of an eager backward, or of one that is traced.
        needed: of some inputs, as ctx.needs_input_grad.
        edges: where theirs are in ctx.next_functions, which has those of tensors alone.
    """
    if torch.compiler.is_compiling():
        return needed

    def runs(node: Any) -> bool:
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:  # a leaf, whose gradient torch.autograd.grad returns
            return True

    nodes = (node for node, _ in ctx.next_functions[edges])
    return [need and runs(node) for need, node in zip(needed, nodes, strict=True)]


def _below_autograd() -> AbstractContextManager[None]:
    """Where an op is part of another gradient, so that its own is not asked for.

    To ask, in Python, takes an eager grouped_mm 3.5 us of 10: 9 us of 71 in a forward and backward.
    """
    if torch.compiler.is_compiling():  # Dynamo knows no such guard, and a graph asks nothing
        return nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def _multiply(
    a: Values | None,
    scale_a: Tensor | None,
    b: Values | None,
    scale_b: Tensor | None,
    offs_E: Tensor,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
    transpose_b: bool = False,
) -> Tensor:
    """a[t] @ b[e].T + bias[e]: fprop and dgrad. transpose_b: of experts that are a list."""
    assert isinstance(a, Tensor)
    assert b is not None
    if isinstance(b, tuple):
        return ops.grouped_mm_list(a, b, offs_E, bias_EN, dtype, transpose_b=transpose_b)
    if scale_a is None or scale_b is None:
        with _below_autograd():
            return ops.grouped_mm(a, b, offs_E, bias_EN, dtype)
    return ops.grouped_scaled_mm(a, b, scale_a, scale_b, offs_E, bias_EN, dtype)


class Wgrad(NamedTuple):
    """The gradient of a weight, not yet computed: dy.T @ x over each group's rows."""

    call: Call
    dy: Tensor
    x: Tensor
    dy_scale: Tensor | None
    x_scale: Tensor | None
    offs: Tensor
    captured: bool = False
    """Whether a CUDA graph fills the tensors, each time it is replayed."""
    versions: tuple[int, int] | None = None
    """Of dy and x when this was put off; None where they may be written to meanwhile."""

    def deferred(self, captured: bool) -> "Wgrad":
        """The same for later: not with the graph that x came from, and told what is overwritten."""
        versions = None if captured else (self.dy._version, self.x._version)
        return self._replace(
            dy=self.dy.detach(), x=self.x.detach(), captured=captured, versions=versions
        )

    def compute(self) -> tuple[Tensor | None, ...]:
        """The gradient of each of the call's experts, or None where it went into main_grad."""
        if self.versions not in (None, (self.dy._version, self.x._version)):
            raise RuntimeError(
                "GroupedLinear: backward_dw: the layer's input, or the gradient of its output, was "
                "modified in place since the backward"
            )
        experts, main_grad = self.call.experts, self.call.main_grad
        if main_grad is None:
            dw_ENK = self._product(experts[0].dtype)
            return (dw_ENK,) if experts[0].dim() == 3 else dw_ENK.unbind()
        overwrite = self.call.overwrite
        if isinstance(overwrite, bool):
            flag = main_grad[0].new_ones((), dtype=torch.bool) if overwrite else None
        else:
            flag = overwrite
        self._add_to(main_grad, flag)
        if self.call.dummy_grad:
            return tuple(w.new_zeros((), device=self.dy.device).expand(w.shape) for w in experts)
        return (None,) * len(experts)

    def _product(self, dtype: torch.dtype) -> Tensor:
        call, dy, x, dy_scale, x_scale, offs, *_ = self
        return _weight_gradient(call.experts[0], dy, x, dy_scale, x_scale, offs, dtype)

    def _add_to(self, main_grad: Experts, overwrite: Tensor | None) -> None:
        _, dy, x, dy_scale, x_scale, offs, *_ = self
        apart = main_grad[0].dim() == 2
        if apart and torch.compiler.is_compiling():
            # Inductor clones all of a list that is written where its tensors share a buffer, as
            # main_grads do; one by one it writes them where they are.
            for grad, dw_NK in zip(main_grad, self._product(torch.float32), strict=True):
                total = grad + dw_NK
                grad.copy_(total if overwrite is None else torch.where(overwrite, dw_NK, total))
        elif dy_scale is None or x_scale is None:
            if apart:
                ops.grouped_mm_wgrad_list_(main_grad, dy, x, offs, overwrite)
            else:
                ops.grouped_mm_wgrad_(main_grad[0], dy, x, offs, overwrite)
        else:
            operands = dy, x, dy_scale, x_scale, offs
            if apart:
                ops.grouped_scaled_mm_wgrad_list_(main_grad, *operands, overwrite)
            else:
                ops.grouped_scaled_mm_wgrad_(main_grad[0], *operands, overwrite)


def wgrad_of(call: Call, dy: Operands, x: Tensor, x_scale: Tensor | None, offs_E: Tensor) -> Wgrad:
    """The weight gradient of dy and columnwise x."""
    assert isinstance(dy.columnwise, Tensor)
    return Wgrad(call, dy.columnwise, x, dy.columnwise_scale, x_scale, offs_E)


class DeferredWgrad(torch.autograd.Function):
    """A graph of its own for a gradient that was put off, so that autograd's hooks run for it."""

    @staticmethod
    def forward(ctx: Any, wgrad: Wgrad, *weights: Tensor) -> Tensor:
        """Something to call backward on."""
        ctx.wgrad = wgrad
        return weights[0].new_zeros(())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the layer's own backward left out."""
        return None, *ctx.wgrad.compute()


class GroupedLinearFunction(torch.autograd.Function):
    """y[t] = x[t] @ weight[e].T + bias[e], with dgrad and wgrad computed as the recipe says.

    Only what the backward will read is quantized and kept: nothing without gradients, columnwise x
    for wgrad, the transposed weight for dgrad.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Tensor | None) -> Tensor:
        """Fprop.

        Args:
            operands: x_TK; bias_EN; m_splits_E, rows of each group, where the forward is one op (as
                the caller decides: Dynamo may trace the caller and leave this to run in eager
                mode); offs_E, their ends, where it is not; then what weight gradients are of, one
                for each of the call's experts, or where they are put off any tensor that requires
                grad. Not a parameter each: where nothing needs a gradient and there are as many
                arguments as parameters, ctx among these, Dynamo passes no ctx (torch 2.11, 2.13).
        """
        x_TK, bias_EN, m_splits_E, offs_E, *_ = operands
        assert x_TK is not None
        needs = ctx.needs_input_grad
        need_x, need_weight = call.grad_enabled and needs[1], call.grad_enabled and any(needs[5:])
        ctx.call = call.for_backward()
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
        bias = None if bias_EN is None else bias_EN.to(x_TK.dtype)
        if offs_E is None:
            assert isinstance(call.recipe, Float8BlockScaling)
            assert m_splits_E is not None
            y, offs_E, *x_for_wgrad, w_t, w_scale = call.recipe.linear(
                x_TK, call.experts[0], m_splits_E, bias, need_weight, need_x
            )
            ctx.save_for_backward(offs_E, None, *x_for_wgrad, w_scale, w_t)
            return y
        x_slot, _, dy_slot = call.slots or (None, None, None)
        columns_now = need_weight and not call.save_input
        x = call.scheme.activation(x_TK, offs_E, x_slot, OutputMask(True, columns_now, False))
        w = call.weight(need_x)
        kept = x_TK if call.save_input and need_weight else x.columnwise
        ctx.save_for_backward(
            offs_E,
            None if dy_slot is None else dy_slot.scale,
            kept,
            x.columnwise_scale,
            w.columnwise_scale,
            *(w.columnwise if isinstance(w.columnwise, tuple) else (w.columnwise,)),
        )
        return _multiply(x.rowwise, x.scale, w.rowwise, w.scale, offs_E, bias, x_TK.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        """Dgrad, wgrad and the bias gradient, each only where it is needed."""
        call: Call = ctx.call
        _, need_x, need_bias, _, _, *need_weights = ctx.needs_input_grad
        if call.main_grad is not None or call.later is not None:
            edges = slice(-len(need_weights), None)
            need_weights = list(needs_grad_now(ctx, need_weights, edges))
        need_weight = any(need_weights)
        offs_E, dy_scale, x, x_scale, w_scale, *w = ctx.saved_tensors
        recipe = call.one_op_backward
        if recipe is not None and (need_x or need_weight):
            dx_TK, dw_ENK, db_EN = recipe.linear_grad(
                dy_TN,
                offs_E,
                (x, x_scale) if need_weight else (None, None),
                (w[0], w_scale) if need_x else (None, None),
                need_bias,
                call.experts[0].dtype,
            )
            if db_EN is not None:
                db_EN = db_EN.to(ctx.bias_dtype)
            return None, dx_TK, db_EN, None, None, dw_ENK
        # For the bias alone nothing is quantized.
        scheme = call.scheme if need_x or need_weight else UNQUANTIZED
        dy_slot = call.gradient_slot(dy_scale)
        dy = scheme.gradient(dy_TN, offs_E, dy_slot, OutputMask(need_x, need_weight, need_bias))
        dx_TK = db_EN = None
        dws: tuple[Tensor | None, ...] = (None,) * len(need_weights)
        if need_x:
            weight = scheme.for_dgrad(tuple(w) if w[0].dim() == 2 else w[0], w_scale)
            dx_TK = _multiply(dy.rowwise, dy.scale, *weight, offs_E, None, dy_TN.dtype, True)
        if need_weight:
            if call.save_input:  # never under delayed scaling, which alone has slots
                columns = scheme.activation(x, offs_E, None, OutputMask(False, True, False))
                x, x_scale = columns.columnwise, columns.columnwise_scale
            wgrad = wgrad_of(call, dy, x, x_scale, offs_E)
            if call.later is None:
                dws = wgrad.compute()
            else:
                captured = dy_TN.is_cuda and torch.cuda.is_current_stream_capturing()
                call.later.append(wgrad.deferred(captured))
        if dy.bias_grad is not None:
            db_EN = dy.bias_grad.to(ctx.bias_dtype)
        return None, dx_TK, db_EN, None, None, *dws


_implementations = torch.library.Library("grouped_linear", "IMPL")


def _bump_versions(op: torch._ops.OpOverload) -> None:
    """Make an in-place op increase the version of what it writes, as torch's own in-place ops do.

    Without this a tensor that was saved for backward and then overwritten would go unnoticed.
    """
    written = [
        i
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def tensors(argument: Any) -> Sequence[Tensor]:
        return (argument,) if isinstance(argument, Tensor) else argument or ()

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled():
            for i in written:
                if any(t.requires_grad for t in tensors(args[i])):
                    name = op._schema.arguments[i].name
                    raise RuntimeError(f"{op._opname}: {name} must not require grad")
        outputs = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version([t for i in written for t in tensors(args[i])])
        return outputs

    _implementations.impl(op, kernel, "ADInplaceOrView", with_keyset=True)


for _op in (
    torch.ops.grouped_linear.grouped_mm_wgrad_.default,
    torch.ops.grouped_linear.grouped_scaled_mm_wgrad_.default,
    torch.ops.grouped_linear.grouped_mm_wgrad_list_.default,
    torch.ops.grouped_linear.grouped_scaled_mm_wgrad_list_.default,
    torch.ops.grouped_linear.group_quantize_delayed_.default,
    torch.ops.grouped_linear.quantize_weight_delayed_.default,
    torch.ops.grouped_linear.update_scales_.default,
    torch.ops.grouped_linear.refresh_weight_.default,
    torch.ops.grouped_linear.refresh_weight_current_.default,
    torch.ops.grouped_linear.refresh_weight_delayed_.default,
    torch.ops.grouped_linear.refresh_weight_mx_.default,
):
    _bump_versions(_op)
