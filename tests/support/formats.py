# SPDX-License-Identifier: Apache-2.0
"""Formats of this package as functions: what a user would write, in ops, one step after the other.

T rows, E groups, K in_features, N out_features.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from grouped_linear import Format, Recipe, ops
from grouped_linear.recipes import Layouts, Operands


@dataclass(frozen=True)
class Composed:
    """Quantizes as a format does, but as a function, which no fused op can take the place of."""

    format: Format

    def __call__(self, t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands:
        return self.weight(t, layouts) if offs_E is None else self.rows(t, offs_E, layouts)

    def rows(self, t_TK: Tensor, offs_E: Tensor, layouts: Layouts) -> Operands:
        format = self.format
        scales = {
            "amax_epsilon": format.amax_epsilon,
            "power_of_two_scales": format.power_of_two_scales,
        }
        both = {"rowwise": layouts.rowwise, "columnwise": layouts.columnwise}
        if format.scaling == "block":
            share = format.share_scales
            q = ops.group_quantize(t_TK, offs_E, **scales, **both, share_scales=share)
            return Operands(*q[:4])
        if format.scaling == "group":
            q_scale_qt = ops.group_quantize_current(t_TK, offs_E, format.dtype, **scales, **both)
            q, scale, q_t = q_scale_qt[:3]
            return Operands(q, scale, q_t, scale)
        assert format.scaling == "mx"
        rowwise, columnwise, _ = ops.group_round_mx(t_TK, offs_E, **both)
        return Operands(rowwise, None, columnwise)

    def weight(self, w_ENK: Tensor, layouts: Layouts) -> Operands:
        format = self.format
        if format.scaling == "mx":
            E, N, K = w_ENK.shape
            ends = N * w_ENK.new_ones(E).int().cumsum(0).int()
            rowwise, columnwise, _ = ops.group_round_mx(
                w_ENK.reshape(E * N, K), ends, columnwise=True
            )
            return Operands(rowwise.view(E, N, K), None, columnwise.view(E, N, K))
        scales = {
            "amax_epsilon": format.amax_epsilon,
            "power_of_two_scales": format.power_of_two_scales,
        }
        in_blocks = format.scaling == "block"
        quantize = ops.quantize_weight if in_blocks else ops.quantize_weight_current
        q, scale, q_t = quantize(w_ENK.contiguous(), **scales)
        return Operands(q, scale, q_t.transpose(1, 2), scale)


def as_it_is(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Tensor:
    """The format without scaling as a function."""
    return t


def composed(recipe: Recipe, *roles: str) -> Recipe:
    """The same recipe with functions in some roles, by default in all three."""
    formats = {}
    for role in ("input", "weight", "grad_output"):
        format = getattr(recipe, role)
        if not roles or role in roles:
            function = as_it_is if format.scaling is None else Composed(format)
            format = Format(quantize=function, wgrad_dtype=format.wgrad_dtype)
        formats[role] = format
    return Recipe(**formats, requantize_weights=recipe.requantize_weights)


def with_function(recipe: Recipe, role: str, function: object) -> Recipe:
    """The same recipe with a function before the quantizer of one role."""
    format = getattr(recipe, role)
    composed = Composed(format)  # not inside: Dynamo of torch 2.11 makes no frozen dataclass

    def quantize(t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands:
        return composed(function(t), offs_E, layouts)  # type: ignore[operator]

    own = Recipe(recipe.input, recipe.weight, recipe.grad_output)
    return replace(own, **{role: Format(quantize=quantize, wgrad_dtype=format.wgrad_dtype)})
