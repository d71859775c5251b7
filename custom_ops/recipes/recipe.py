# SPDX-License-Identifier: Apache-2.0
"""The class Recipe: a format for each of a layer's three operands.

T rows, E groups, K in_features, N out_features.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from grouped_linear.meta_kernels.rules import dtype_name
from grouped_linear.recipes.format import SIXTEEN_BITS, Format, changed_options, check_flags

AS_IT_IS = Format()

#: The operands of a linear layer.
ROLES = ("input", "weight", "grad_output")


def check_is_recipe(owner: str, recipe: Any, wanted: str = "a grouped_linear.Recipe") -> None:
    """Raise ValueError for anything but an instance of Recipe, also for a class of recipes."""
    if isinstance(recipe, Recipe):
        return
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        name = recipe.__name__
        raise ValueError(f"{owner}: recipe is the class {name}: call it, recipe={name}()")
    raise ValueError(f"{owner}: recipe must be {wanted}, got {recipe!r}")


@dataclass(frozen=True, repr=False)
class Recipe:
    """Which numbers a layer multiplies: a :class:`Format` for x, for the weight and for dy.

    A recipe is data. How a layer makes the numbers, and what it fuses, follows from the formats
    alone (``grouped_linear/recipes/quantize.py``). ``recipe=None`` is ``Recipe()``: every tensor as
    it is. The two operands of a GEMM must agree: both with scales of one kind, or both without.
    fprop reads ``input`` and ``weight`` rowwise; dgrad ``grad_output`` rowwise and ``weight``
    columnwise; wgrad ``grad_output`` and ``input`` columnwise.

    Args:
        input, weight, grad_output: the formats of x, of the weight, and of the output's gradient.
        requantize_weights: quantize the weight once more in the backward, instead of keeping the
            columnwise weight from the forward.

    Raises:
        ValueError: if a role is no Format, and for formats whose GEMMs could not be computed.

    Weights rounded to bfloat16, whatever dtype they are stored in, and x likewise:

    >>> import torch
    >>> bf16 = Format(dtype=torch.bfloat16)
    >>> Recipe(input=bf16, weight=bf16)
    Recipe(input=Format(dtype=torch.bfloat16), weight=Format(dtype=torch.bfloat16))
    """

    input: Format = AS_IT_IS
    weight: Format = AS_IT_IS
    grad_output: Format = AS_IT_IS
    requantize_weights: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_flags(name, requantize_weights=self.requantize_weights)
        for role in ROLES:
            if not isinstance(getattr(self, role), Format):
                raise ValueError(f"{name}: {role} must be a Format, got {getattr(self, role)!r}")
        x, w, dy = self.input, self.weight, self.grad_output
        if w.wgrad_dtype is not None:
            raise ValueError(f"{name}: wgrad_dtype is for input and grad_output, not for weight")
        if x.qat is not None or dy.qat is not None:
            raise ValueError(f"{name}: qat is for weight, not for input and grad_output")
        kinds = {
            "fprop": (_kind(x), _kind(w)),
            "dgrad": (_kind(dy), _kind(w)),
            "wgrad": (_kind(dy, True), _kind(x, True)),
        }
        for gemm, (left, right) in kinds.items():
            if not _agree(left, right):
                raise ValueError(_disagree(name, gemm, f"with {left}", f"with {right}"))
        for role, format in zip(ROLES, (x, w, dy), strict=True):
            if format.quantize is not None:  # whose errors name the role
                named = replace(format)
                object.__setattr__(named, "role", f"{name}: {role}")
                object.__setattr__(self, role, named)
        # Plain attributes, because each call asks.
        in_blocks = all(f.scaling == "block" for f in (x, w, dy)) and not dy.share_scales
        alike = len({(f.power_of_two_scales, f.amax_epsilon) for f in (x, w, dy)}) == 1
        plain = alike and all(f.observer is None for f in (x, w, dy)) and w.qat is None
        one_op = in_blocks and plain and not self.requantize_weights
        in_fp8 = x.wgrad_dtype is None and dy.wgrad_dtype is None
        set_attribute = object.__setattr__  # the dataclass is frozen
        known = all(None not in both and len(set(both)) == 1 for both in kinds.values())
        set_attribute(self, "checks_operands", not known)
        set_attribute(self, "has_linear_op", one_op)
        set_attribute(self, "has_linear_grad_op", one_op and in_fp8)
        needs_state = (f.scaling == "delayed" and f.state is None for f in (x, w, dy))
        set_attribute(self, "has_state", any(needs_state))
        set_attribute(self, "states", tuple(f.state for f in (x, dy) if f.state is not None))
        if w.qat is not None and w.qat_dim == -1:
            both = x, replace(w, qat_dim=-2), dy
            turned = Recipe(*both, requantize_weights=self.requantize_weights)
            set_attribute(self, "_transposed", turned)
        # fake_quantize rounds to FP8 in functions, and may leave some operands as they are.
        rounded = [f.rounds_to for f in (x, w, dy) if f.rounds_to != AS_IT_IS]
        are_blocks = all(f.scaling == "block" and not f.wgrad_dtype for f in rounded)
        if in_fp8 and rounded and are_blocks and not dy.rounds_to.share_scales:
            in_16_bits = {}
            for dtype in SIXTEEN_BITS:
                both = replace(x, wgrad_dtype=dtype), w, replace(dy, wgrad_dtype=dtype)
                in_16_bits[dtype] = Recipe(*both, requantize_weights=self.requantize_weights)
            set_attribute(self, "with_wgrad_in", in_16_bits)

    # Facts that follow from the formats; an observed layer copies them into another recipe.
    checks_operands = False  # whether a call alone shows if operands agree, as a function's
    has_linear_op = False  # whether an eager layer's forward can be one op
    has_linear_grad_op = False  # whether its backward can, too
    states: ClassVar[tuple[Any, ...]] = ()  # of input and grad_output: scales that a backward reads
    with_wgrad_in: ClassVar[dict[torch.dtype, "Recipe"]] = {}  # in blocks, but wgrad in 16 bits
    _transposed: ClassVar[Any] = None
    has_state = False
    """Whether a layer keeps a state for it from step to step; set by this class."""
    freezes_weights_as: ClassVar[tuple[str, ...]] = ()
    """How a layer's weights may be frozen in few bits: "fp8", "mxfp4" or both."""

    def keeps_weights_as(self, weights: str) -> bool:
        """Whether a layer may keep its weights in this way, "both", "fp8" or "mxfp4"."""
        if weights == "both":
            is_stored = self.weight.stored_as in ("block", "group", "mxfp4")
            return is_stored or self.weight.quantize is not None
        return weights in self.freezes_weights_as and self.weight.qat is None

    @property
    def transposed(self) -> "Recipe":
        """The recipe for a weight that is kept as [E, K, N], where blocks of MXFP4 run along K."""
        return self._transposed or self

    @property
    def why_rows_depend(self) -> str | None:
        """Why the numbers of a row of x may depend on other rows; None where they do not."""
        if self.input.quantize is not None:
            return f"a function of your own quantizes what {self!r} multiplies"
        if self.input.scaling in ("group", "delayed"):
            return (
                f"{self!r} has scales that all rows of an expert share, so a token's bits follow "
                "its batch"
            )
        return None

    def check_operands(self, gemm: str, a: Any, b: Any, scale_a: Any, scale_b: Any) -> None:
        """Raise RuntimeError for operands that a GEMM cannot multiply with each other."""
        b = b[0] if isinstance(b, tuple) else b
        if b.dtype == torch.uint8:  # codes of MXFP4, which are decoded to a
            return
        if (scale_a is None) != (scale_b is None) or (scale_a is None and a.dtype != b.dtype):
            left, right = (
                f"in {dtype_name(t.dtype)} with{'out' if scale is None else ''} scales"
                for t, scale in ((a, scale_a), (b, scale_b))
            )
            raise RuntimeError(_disagree(type(self).__name__, gemm, left, right))

    def options(self) -> dict[str, Any]:
        """The arguments that make an equal recipe."""
        return {o.name: getattr(self, o.name) for o in fields(self) if o.init}

    def __getstate__(self) -> dict[str, Any]:
        """The options alone: a copy makes its formats from them."""
        return self.options()

    def __setstate__(self, options: dict[str, Any]) -> None:
        self.__init__(**options)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({changed_options(self)})"


def _kind(format: Format, columnwise: bool = False) -> str | None:
    """The kind of an operand that a GEMM must know; None where only the function knows it."""
    if columnwise and format.wgrad_dtype is not None:
        return dtype_name(format.wgrad_dtype)
    if format.quantize is not None:
        return None
    if format.scaling == "mx":
        return "bfloat16"
    if format.stored_as == "mxfp4":
        return "codes of MXFP4"
    if format.scaling is None:
        return "the activations' dtype" if format.dtype is None else dtype_name(format.dtype)
    return "scales of blocks" if format.scaling == "block" else "scales of groups"


#: The left and the right operand of each GEMM.
OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


def _disagree(recipe: str, gemm: str, left: str, right: str) -> str:
    """The sentence about operands that a GEMM cannot multiply."""
    a, b = OPERANDS[gemm]
    return f"{recipe}: {gemm} cannot multiply {a} {left} and {b} {right}"


def _agree(left: str | None, right: str | None) -> bool:
    """Whether a GEMM may multiply these; of activations only the call knows the dtype."""
    if left is None or right is None or left == right:
        return True
    if right == "codes of MXFP4":  # which are decoded to a
        return not left.startswith("scales")
    return "the activations' dtype" in (left, right) and not any(
        kind.startswith("scales") for kind in (left, right)
    )


#: ``recipe=None``: every tensor as it is.
UNQUANTIZED = Recipe()
