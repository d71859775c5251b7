# SPDX-License-Identifier: Apache-2.0
"""fake_quantize: a recipe's numbers in some roles and of some experts, multiplied in x's dtype.

T rows, E groups (experts), K in_features, N out_features.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from grouped_linear import Format, Recipe, ops
from grouped_linear.contrib.layers import ROLES
from grouped_linear.recipes import Layouts, Operands


def fake_quantize(
    recipe: Recipe, roles: Iterable[str] = ROLES, *, except_experts: Iterable[int] = ()
) -> Recipe:
    """A recipe that rounds as another one does, in some roles alone, and multiplies in x's dtype.

    So one role, or one expert, can stay in high precision, to find which of them FP8 harms: GEMMs
    of FP8 take no operand without scales. It takes longer than the recipe, and than none.

    Args:
        recipe: rounds the numbers; without state.
        roles: of input, weight and grad_output those that are rounded; the others are as they are.
        except_experts: the numbers of experts that are rounded in no role: of those that a process
            has, where experts are spread over processes.

    Raises:
        ValueError: for a recipe with a state, another role, an expert that is no number, roles or
            experts that are no list, and experts under a format of your own; in a layer, for an
            expert that it does not have.

    >>> from grouped_linear import Float8BlockScaling, convert
    >>> forward_alone = fake_quantize(Float8BlockScaling(), ("input", "weight"))
    >>> forward_alone
    fake_quantize(Float8BlockScaling(), ('input', 'weight'))
    >>> forward_alone.grad_output
    Format()
    """
    for name, given in (("roles", roles), ("except_experts", except_experts)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ValueError(f"fake_quantize: {name} must be a list, got {given!r}")
    return FakeQuantization(recipe, tuple(roles), tuple(except_experts))


@dataclass(frozen=True, repr=False)
class FakeQuantization(Recipe):
    """The recipe that :func:`fake_quantize` makes, with its arguments."""

    input: Format = field(init=False, compare=False)
    weight: Format = field(init=False, compare=False)
    grad_output: Format = field(init=False, compare=False)
    recipe: Recipe
    roles: tuple[str, ...] = ROLES
    except_experts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            got = f"{self.recipe!r}: call it, if it is a class"
            raise ValueError(f"fake_quantize: recipe must be a grouped_linear.Recipe, got {got}")
        if self.recipe.has_state:
            raise ValueError(f"fake_quantize: needs a recipe without state, got {self.recipe!r}")
        for role in self.roles:
            if role not in ROLES:
                known = ", ".join(ROLES)
                raise ValueError(f"fake_quantize: roles must be of {known}, got {role!r}")
        for e in self.except_experts:
            if not isinstance(e, Integral) or isinstance(e, bool) or e < 0:
                raise ValueError(f"fake_quantize: except_experts must be numbers, got {e!r}")
        for role in ROLES:
            format = getattr(self.recipe, role) if role in self.roles else Format()
            if self.except_experts and format.quantize is not None:
                raise ValueError(
                    f"fake_quantize: except_experts needs formats with scales, got {self.recipe!r}"
                )
            if role in self.roles:
                format = Format(quantize=Rounded(format, self.except_experts))
            object.__setattr__(self, role, format)
        super().__post_init__()

    def __repr__(self) -> str:
        roles = "" if self.roles == ROLES else f", {self.roles}"
        experts = f", except_experts={list(self.except_experts)}" if self.except_experts else ""
        return f"fake_quantize({self.recipe!r}{roles}{experts})"


@dataclass(frozen=True)
class Rounded:
    """A format as a function that rounds: its numbers, dequantized to the tensor's dtype."""

    rounds_to: Format
    except_experts: tuple[int, ...] = ()

    def __call__(self, t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands | Tensor:
        """Layers call this, as ``Format(quantize=)`` describes."""
        made: Operands | Tensor = self._rounded(t, offs_E, layouts)
        if not self.except_experts:
            return made
        E = t.size(0) if offs_E is None else offs_E.size(0)
        if max(self.except_experts) >= E:
            raise ValueError(
                f"fake_quantize: except_experts has {max(self.except_experts)}, and the layer has "
                f"experts 0 to {E - 1}"
            )
        if offs_E is None:
            expert = torch.arange(E, device=t.device)[:, None, None]
        else:
            expert = _group_of_rows(t.size(0), offs_E)[:, None]
        as_it_is = torch.stack([expert == e for e in self.except_experts]).any(0)
        if isinstance(made, Tensor):
            return torch.where(as_it_is, t, made)
        both: Any = made.rowwise, made.columnwise
        row, column = (None if one is None else torch.where(as_it_is, t, one) for one in both)
        return Operands(row, None, column)

    def _rounded(self, t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Any:
        format = self.rounds_to
        if format.quantize is not None:
            return format.quantize(t, offs_E, layouts)
        if format.stored_as == "mxfp4":
            return ops.dequantize_mxfp4(*ops.quantize_mxfp4(t), t.dtype)
        if format.scaling is None:
            return t if format.dtype is None else t.to(format.dtype).to(t.dtype)
        return self._weight(t) if offs_E is None else self._rows(t, offs_E, layouts)

    def _weight(self, w_ENK: Tensor) -> Any:
        format, (E, N, K) = self.rounds_to, w_ENK.shape
        if format.scaling == "mx":  # each way by itself
            ends_E = N * torch.arange(1, E + 1, dtype=torch.int32, device=w_ENK.device)
            made: Any = self._rows(w_ENK.reshape(E * N, K), ends_E, Layouts(True, True))
            return Operands(made.rowwise.view(E, N, K), None, made.columnwise.view(E, N, K))
        in_blocks = format.scaling == "block"
        quantize: Any = ops.quantize_weight if in_blocks else ops.quantize_weight_current
        made = quantize(w_ENK.contiguous(), columnwise=False, **format.weight_options)
        # Not repeat_interleave: compiled for a CPU by torch 2.13 it gives garbage where it is cut.
        n, k = (torch.arange(size, device=w_ENK.device) // 128 for size in (N, K))
        scale = made.scale[:, n][:, :, k] if in_blocks else made.scale[:, None, None]
        return (made.q.float() * scale).to(w_ENK.dtype)

    def _rows(self, t_TK: Tensor, offs_E: Tensor, layouts: Layouts) -> Operands:
        format, dtype, columnwise = self.rounds_to, t_TK.dtype, layouts.columnwise
        options: dict[str, Any] = format.scale_options
        made: Any
        row: Any
        column: Any
        if format.scaling == "block":
            options |= {"share_scales": format.share_scales, "columnwise": columnwise}
            made = ops.group_quantize(t_TK, offs_E, **options)
            row, column = ops.group_dequantize(made.q, made.scale, offs_E, dtype), made.q_t
            if columnwise:
                column = ops.group_dequantize_t(column, made.scale_t, offs_E, len(t_TK), dtype)
        elif format.scaling == "mx":
            made = ops.group_round_mx(t_TK, offs_E, columnwise=columnwise)
            row, column = (None if t is None else t.to(dtype) for t in made[:2])
        else:  # the same bytes both ways
            options |= {"out_dtype": format.dtype}
            made = ops.group_quantize_current(t_TK, offs_E, **options)
            scale_T = made.scale[_group_of_rows(len(t_TK), offs_E)]
            row = column = (made.q.float() * scale_T[:, None]).to(dtype)
        if format.wgrad_dtype is not None:  # the tensor itself, cast
            column = t_TK.to(format.wgrad_dtype).to(dtype)
        return Operands(row if layouts.rowwise else None, None, column)


def _group_of_rows(T: int, offs_E: Tensor) -> Tensor:
    row_T = torch.arange(T, dtype=torch.int32, device=offs_E.device)
    return torch.searchsorted(offs_E, row_T, right=True).clamp(max=len(offs_E) - 1)
