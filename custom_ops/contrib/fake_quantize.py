# SPDX-License-Identifier: Apache-2.0
"""fake_quantize: a recipe's numbers in some roles and of some experts, multiplied in x's dtype.

T rows, E groups (experts), K in_features, N out_features.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grouped_linear import ops
from grouped_linear.ops.constants import is_integer
from grouped_linear.recipes.format import BOTH, ROWWISE, Format, Layouts, Operands
from grouped_linear.recipes.quantize import quantize
from grouped_linear.recipes.quantize_weight import quantize_weight
from grouped_linear.recipes.recipe import ROLES, Recipe, check_is_recipe


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
        check_is_recipe("fake_quantize", self.recipe)
        if self.recipe.has_state:
            raise ValueError(f"fake_quantize: needs a recipe without state, got {self.recipe!r}")
        for role in self.roles:
            if role not in ROLES:
                known = ", ".join(ROLES)
                raise ValueError(f"fake_quantize: roles must be of {known}, got {role!r}")
        for e in self.except_experts:
            if not is_integer(e) or e < 0:
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
    of_both: Format = field(init=False, compare=False, repr=False)  # with wgrad's operand, too

    def __post_init__(self) -> None:
        # Not in a call: Dynamo of torch 2.11 makes no frozen dataclass.
        object.__setattr__(self, "of_both", replace(self.rounds_to, wgrad_dtype=None))

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
        row: Any = made if isinstance(made, Tensor) else made.rowwise
        column: Any = made if isinstance(made, Tensor) else made.columnwise
        return Operands(
            None if row is None else torch.where(as_it_is, t, row),
            columnwise=None if column is None else torch.where(as_it_is, t, column),
        )

    def _rounded(self, t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Any:
        format = self.rounds_to
        if format.quantize is not None:
            return format.quantize(t, offs_E, layouts)
        if format.scaling is None:
            return t if format.dtype is None else t.to(format.dtype).to(t.dtype)
        if offs_E is None:
            w: Any = quantize_weight((t,), format, BOTH)
            if w.rowwise_scale is None:  # MXFP8: rounded already, each way
                return Operands(w.rowwise.to(t.dtype), None, w.columnwise.to(t.dtype))
            return times_scales(w.rowwise, w.rowwise_scale).to(t.dtype)
        made = quantize(t, self.of_both, offs_E, layouts)
        if format.wgrad_dtype is None:
            columnwise = self._columnwise(made, offs_E, t)
        else:  # the tensor itself, cast
            columnwise = t.to(format.wgrad_dtype).to(t.dtype)
        return Operands(self._rowwise(made, offs_E, t), None, columnwise)

    def _rowwise(self, made: Any, offs_E: Tensor, t: Tensor) -> Tensor | None:
        if made.rowwise is None or made.rowwise_scale is None:
            return None if made.rowwise is None else made.rowwise.to(t.dtype)
        if self.rounds_to.in_blocks:
            return ops.group_dequantize(made.rowwise, made.rowwise_scale, offs_E, t.dtype)
        scale_T = made.rowwise_scale[_group_of_rows(t.size(0), offs_E)]
        return (made.rowwise.float() * scale_T[:, None]).to(t.dtype)

    def _columnwise(self, made: Any, offs_E: Tensor, t: Tensor) -> Tensor | None:
        if made.columnwise is None or made.columnwise_scale is None:
            return None if made.columnwise is None else made.columnwise.to(t.dtype)
        if self.rounds_to.scaling == "group":  # the same bytes as rowwise
            whole = quantize(t, self.rounds_to, offs_E, ROWWISE)
            return self._rowwise(whole, offs_E, t)
        T, scale = t.size(0), made.columnwise_scale
        return ops.group_dequantize_t(made.columnwise, scale, offs_E, T, t.dtype)


def times_scales(q_ENK: Tensor, scale: Tensor) -> Tensor:
    """A weight's numbers in float32, by scales of blocks of 128 x 128 or of experts."""
    if scale.dim() == 1:
        return q_ENK.float() * scale[:, None, None]
    # Not repeat_interleave: compiled for a CPU by torch 2.13 it gives garbage where it is cut off.
    row, column = (torch.arange(n, device=scale.device) // 128 for n in q_ENK.shape[1:])
    return q_ENK.float() * scale[:, row][:, :, column]


def _group_of_rows(T: int, offs_E: Tensor) -> Tensor:
    row_T = torch.arange(T, dtype=torch.int32, device=offs_E.device)
    return torch.searchsorted(offs_E, row_T, right=True).clamp(max=len(offs_E) - 1)
