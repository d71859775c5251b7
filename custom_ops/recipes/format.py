# SPDX-License-Identifier: Apache-2.0
"""Formats: which numbers a tensor becomes before a GEMM multiplies it.

T rows, E groups, K in_features, N out_features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.meta_kernels.rules import ACTIVATIONS, E4M3, FP8, MAX_GROUPS, dtype_name
from grouped_linear.ops.constants import constant, is_finite, is_integer, is_number, keep_constants

#: A layer's weight: one tensor [E, N, K], or E tensors [N, K].
WeightList = tuple[Tensor, ...]

#: One operand of a GEMM: a tensor, or a weight of E tensors [N, K].
Values = Tensor | WeightList

#: Of a new tensor; None for torch's default.
Device = torch.device | str | None

#: The dtypes in which wgrad multiplies rows that are not quantized, and to which formats cast.
SIXTEEN_BITS = torch.bfloat16, torch.float16


class Operands(NamedTuple):
    """One tensor (x, a weight or dy) for the GEMMs that read it; None for what was not requested.

    The fields have the order in which quantizing ops return them. The tuple is flat because an
    eager layer makes three of them a call.
    """

    rowwise: Values | None
    """For GEMMs that reduce over the last dimension: x and the weight in fprop, dy in dgrad."""
    rowwise_scale: Tensor | None = None
    """Multiplies ``rowwise`` to dequantize it; None where ``rowwise`` is not quantized."""
    columnwise: Values | None = None
    """For GEMMs that reduce over another dimension: x and dy in wgrad, the weight in dgrad."""
    columnwise_scale: Tensor | None = None
    """Multiplies ``columnwise`` to dequantize it."""
    bias_grad: Tensor | None = None
    """[E, N] float32: the sums of dy over each group's rows."""
    rows: Tensor | None = None
    """[T] int32, where a GEMM gathers: it reads row ``rows[t]`` of ``rowwise`` for row t. Only this
    package sets it."""
    columnwise_rows: Tensor | None = None
    """[T] int32, the same rows of ``columnwise``. Only this package sets it."""


class Layouts(NamedTuple):
    """Which fields of :class:`Operands` are requested."""

    rowwise: bool
    columnwise: bool
    bias_grad: bool = False
    again: bool = False
    """Whether the forward has quantized the same tensor before: nothing is recorded, and compiled
    graphs make it again instead of keeping it."""


#: The layouts that calls ask for most: making a named tuple takes 0.35 us.
ROWWISE, BOTH = Layouts(True, False), Layouts(True, True)
COLUMNWISE_AGAIN = Layouts(False, True, again=True)
ROWWISE_AGAIN = Layouts(True, False, again=True)


def with_shared_scale(
    rowwise: Values | None,
    scale: Tensor | None,
    columnwise: Values | None,
    bias_grad: Tensor | None = None,
) -> Operands:
    """Operands whose two layouts have the same scales."""
    return Operands(rowwise, scale, columnwise, None if columnwise is None else scale, bias_grad)


def call_without_writes(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """A user's function, which must not write a tensor that a caller or the backward reads.

    In a graph it gets copies, which compilers leave out where nothing writes them, and in inference
    mode, which counts no writes. Elsewhere RuntimeError says that it has written one.
    """
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
        return function(*(t.clone() if isinstance(t, Tensor) else t for t in arguments))
    before = [t._version for t in tensors]
    result = function(*arguments)
    if [t._version for t in tensors] != before:
        raise RuntimeError(
            f"{name} has written its argument in place, which a caller or the backward reads: "
            "return a new tensor, or write a clone()"
        )
    return result


def check_amax_epsilon(owner: str, amax_epsilon: float) -> None:
    """Raise ValueError for what no amax can be compared with."""
    if not (is_finite(amax_epsilon) and amax_epsilon >= 0):
        got = f"{amax_epsilon:g}" if is_number(amax_epsilon) else repr(amax_epsilon)
        raise ValueError(f"{owner}: amax_epsilon must be finite and not negative, got {got}")


def check_flags(owner: str, **flags: Any) -> None:
    """Raise ValueError for what is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{owner}: {name} must be True or False, got {flag!r}")


def check_model(op: str, model: Any) -> None:
    """Raise TypeError for what is no module, as a class or a name."""
    if isinstance(model, nn.Module):
        return
    got = "None" if model is None else f"a {type(model).__name__}"
    if isinstance(model, type):
        got = f"the class {model.__name__}: make a model of it"
    raise TypeError(f"{op}: model must be a torch.nn.Module, got {got}")


def check_num_groups(layer: str, name: str, number: int) -> None:
    """Raise ValueError unless it is an integer from 1 to 1024."""
    if not is_integer(number):
        raise ValueError(f"{layer}: {name} must be an integer, got {number!r}")
    if not 1 <= number <= MAX_GROUPS:
        raise ValueError(f"{layer}: {name} must be between 1 and {MAX_GROUPS}, got {number}")


def changed_options(instance: Any) -> str:
    """The arguments of a dataclass that are not the defaults, as scikit-learn prints them."""
    options = (o for o in fields(instance) if o.init and o.repr)
    values = {o.name: (getattr(instance, o.name), o.default) for o in options}
    return ", ".join(f"{name}={v!r}" for name, (v, default) in values.items() if v != default)


@dataclass(frozen=True, repr=False)
class Format:
    """Which numbers a tensor becomes in one role of a layer: as input, weight or gradient.

    The default leaves the tensor as it is. The recipes of this package are made of formats with a
    ``scaling``; a format of your own has a function, ``quantize``.

    Args:
        dtype: of the numbers: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2`` with a scaling, a
            16-bit dtype to which the tensor is cast without one, or None for the tensor's own.
        scaling: what shares a scale. ``"block"``: 128 features of a row (rowwise), 128 rows of a
            feature (columnwise), or 128 x 128 of a weight. ``"group"``: a group's rows, or an
            expert's weight, by their own amax. ``"delayed"``: the same by the amax of earlier
            steps, see :class:`grouped_linear.DelayedScaling`. ``"mx"``: 32 numbers, multiplied in
            bfloat16. None: nothing is scaled.
        power_of_two_scales: round factors down to powers of two, so that scaling is exact.
        amax_epsilon: the smallest amax that a scale is computed from; not negative.
        share_scales: under ``"block"``, columnwise, let 128 features share a scale where that costs
            next to no precision; see :class:`grouped_linear.Float8BlockScaling`.
        wgrad_dtype: multiply the tensor itself in wgrad, cast to this 16-bit dtype. None: what
            wgrad multiplies is in this format, too.
        quantize: a function in place of all of these but ``wgrad_dtype``, called as
            ``quantize(t, offs, layouts)``: t [T, K] with the group ends offs [E] int32, or a weight
            t [E, N, K] with offs None. It returns a tensor that stands for both layouts, or
            :class:`grouped_linear.recipes.Operands` with those that ``layouts`` asks for, see
            docs/recipes.md. Any torch operation works; autograd is off. It must not write t or
            offs in place, which callers and the layer read.
        state: where ``"delayed"`` scaling reads scales and records amaxes. A layer sets it.
        records: whether amaxes are recorded there.
        qat: ``"mxfp4"`` rounds a weight that learns to MXFP4, see
            :func:`grouped_linear.ops.quantize_mxfp4`. With the scaling ``"block"`` its numbers are
            held in e4m3 (:class:`grouped_linear.Float8BlockScaling`), without a scaling they are
            multiplied beside 16 bits or float32. The gradient reaches the weight as if it had not
            been rounded.
        qat_dim: along which dimension of the stored weight its blocks run. ``convert`` sets -2 for
            one that is kept as [E, K, N].
        observer: for a tool, called with each operand that is made in this format, as
            ``observer(source, operands, offs, layouts)``. source is a tensor, or what rows are
            computed from (:class:`Gathered`, :class:`SwigluOf`, :class:`SwigluGradOf`), or a tuple
            with a weight's tensors; operands are made of it. offs are group ends, layouts those
            asked for; both are None for a weight. It must write none of them. With an observer ops
            are not fused, and numbers stay equal.

    Raises:
        ValueError: for options that contradict each other or are out of range.

    >>> def to_eighths(t, offs, layouts):
    ...     return (8 * t).round() / 8
    >>> from grouped_linear import GroupedLinear, Recipe
    >>> recipe = Recipe(weight=Format(quantize=to_eighths))
    >>> layer = GroupedLinear(2, 16, 32, bias=False, recipe=recipe)
    >>> layer.weight.data.fill_(1.03)[0, 0, 0], layer(torch.ones(1, 16), [1, 0])[0, 0]
    (tensor(1.0300), tensor(16., grad_fn=<SelectBackward0>))
    """

    dtype: torch.dtype | None = None
    scaling: Literal["block", "group", "delayed", "mx"] | None = None
    power_of_two_scales: bool = False
    amax_epsilon: float = 0
    share_scales: bool = False
    wgrad_dtype: torch.dtype | None = None
    quantize: Callable[[Tensor, Tensor | None, Layouts], Operands | Tensor] | None = None
    state: Any = None
    records: bool = True
    qat: Literal["mxfp4"] | None = None
    qat_dim: int = -1
    observer: Callable[..., None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_amax_epsilon("Format", self.amax_epsilon)
        check_flags(
            "Format",
            power_of_two_scales=self.power_of_two_scales,
            share_scales=self.share_scales,
            records=self.records,
        )
        if self.scaling not in (None, "block", "group", "delayed", "mx"):
            raise ValueError(
                "Format: scaling must be None, 'block', 'group', 'delayed' or 'mx', "
                f"got {self.scaling!r}"
            )
        dtypes = {None: (None, *SIXTEEN_BITS), "block": (E4M3,), "mx": (E4M3,)}
        fitting = dtypes.get(self.scaling, FP8)
        if self.dtype not in fitting:
            raise ValueError(
                f"Format: with scaling {self.scaling!r} dtype must be "
                f"{' or '.join(map(shown, fitting))}, got {shown(self.dtype)}"
            )
        if self.wgrad_dtype not in (None, *SIXTEEN_BITS):
            raise ValueError(
                "Format: wgrad_dtype must be None, bfloat16 or float16, "
                f"got {shown(self.wgrad_dtype)}"
            )
        if self.qat not in (None, "mxfp4"):
            raise ValueError(f"Format: qat must be None or 'mxfp4', got {self.qat!r}")
        if self.qat_dim not in ((-1,) if self.qat is None else (-1, -2)):
            raise ValueError(f"Format: qat_dim is -1, or with qat -2, got {self.qat_dim!r}")
        alone = (self.scaling, self.dtype, self.quantize) == (None, None, None)
        if self.qat is not None and not (alone or self.scaling == "block"):
            raise ValueError(
                "Format: qat goes with scaling 'block' or stands alone, without dtype and quantize"
            )
        if self.quantize is not None and not callable(self.quantize):
            raise ValueError(f"Format: quantize must be a function, got {self.quantize!r}")
        if self.quantize is not None and (self.scaling, self.dtype) != (None, None):
            raise ValueError(
                "Format: quantize takes the place of dtype and scaling: leave these out"
            )
        keep_constants(self, "amax_epsilon")
        options = tuple(getattr(self, o.name) for o in fields(self) if o.compare)
        object.__setattr__(self, "_compared", options)

    order_is_known = False
    role = "Format"
    """Which operand of which recipe it is, as errors name it; a recipe sets it."""

    def by_function(self, t: Tensor, offs_E: Tensor | None, layouts: Layouts) -> Operands:
        """The checked operands that :attr:`quantize` makes; a tensor stands for both layouts."""
        assert self.quantize is not None
        name = f"{self.role}: {getattr(self.quantize, '__name__', 'quantize')}"
        made: Any = call_without_writes(name, self.quantize, t, offs_E, layouts)
        if isinstance(made, Tensor):
            row, column = layouts.rowwise, layouts.columnwise
            made = Operands(made if row else None, None, made if column else None)
        if not isinstance(made, Operands):
            raise TypeError(f"{name} must return a tensor or Operands, got {type(made).__name__}")
        made = Operands(*made[:4])
        if layouts.rowwise:
            _check_operand(f"{name}: rowwise", made.rowwise, made.rowwise_scale, t, True)
        if layouts.columnwise:  # FP8 rows for wgrad are padded, as group_quantize returns them
            scale = made.columnwise_scale
            as_given = scale is None or offs_E is None
            _check_operand(f"{name}: columnwise", made.columnwise, scale, t, as_given)
            if offs_E is None and t.size(-2) == t.size(-1):
                self._check_order(name, t, made.columnwise)
        return made

    def _check_order(self, name: str, w_ENK: Tensor, columnwise: Any) -> None:
        """Raise RuntimeError for a columnwise weight that is [E, K, N], where its shape hides it.

        It is asked in eager mode, in a wait for the device: once, or until the weight is not zero.
        """
        if self.order_is_known or torch.compiler.is_compiling() or w_ENK.device.type == "meta":
            return
        if w_ENK.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        w, made = w_ENK[0].float(), columnwise[0].float()
        length = w.norm() * made.norm()
        alike, turned = ((w * m).sum() / length for m in (made, made.mT))
        if bool((alike < 0.5) & (turned > 0.8)):
            raise RuntimeError(
                f"{name}: columnwise must be [E, N, K], as the weight is, got its transpose: "
                "return columnwise.mT"
            )
        object.__setattr__(self, "order_is_known", bool(length != 0))

    @property
    def compared(self) -> tuple[Any, ...]:
        """The options by which formats are equal, which are constants.

        Dynamo takes the attributes of a tensor that is made in a graph for constants, as of a
        DTensor's local part (torch 2.13).
        """
        options: tuple[Any, ...] = self._compared  # type: ignore[attr-defined]
        return options

    @property
    def epsilon(self) -> float:
        """``amax_epsilon`` for an op, as a constant for Dynamo."""
        epsilon: float = constant(self, "amax_epsilon")
        return epsilon

    @property
    def scale_options(self) -> dict[str, Any]:
        """The options of quantizing ops. Hot paths name both: a dict takes half a microsecond."""
        return {"amax_epsilon": self.epsilon, "power_of_two_scales": self.power_of_two_scales}

    @property
    def weight_options(self) -> dict[str, Any]:
        """The options of ops that quantize a weight in this format."""
        options = self.scale_options
        return options if self.qat is None else options | {"mxfp4_dim": self.qat_dim}

    def scale_and_amax(self, again: bool = False) -> tuple[Tensor, Tensor | None]:
        """Delayed scaling's scale, and the amax to record in, unless the tensor was seen before."""
        return self.state.scale, self.state.amax if self.records and not again else None

    @property
    def reads_any_dtype(self) -> bool:
        """Whether a weight in this format may have another dtype than x.

        Where it may not, the layer demands one dtype, and casts the weight under torch.autocast.
        """
        return self.scaling is not None or self.qat is not None

    @property
    def changes_nothing(self) -> bool:
        """Whether the tensor stays as it is."""
        changes = self.scaling, self.dtype, self.quantize, self.qat
        return changes == (None, None, None, None)

    @property
    def in_blocks(self) -> bool:
        """Whether each block of numbers has a scale."""
        return self.scaling == "block"

    @property
    def stored_as(self) -> str | None:
        """What a weight that is stored in this format is: its scaling, or "mxfp4" for codes."""
        return "mxfp4" if self.scaling is None and self.qat is not None else self.scaling

    @property
    def transposes_columnwise(self) -> bool:
        """Whether the columnwise operand of a weight is FP8 data [E, K, N]."""
        return self.scaling in ("block", "group", "delayed")

    @property
    def rounds_to(self) -> "Format":
        """The format of the numbers, which fake_quantize's functions give in x's dtype."""
        format: Format | None = getattr(self.quantize, "rounds_to", None)
        return self if format is None else format.rounds_to

    def __repr__(self) -> str:
        return f"Format({changed_options(self)})"


def _check_operand(name: str, made: Any, scale: Any, t: Tensor, as_given: bool) -> None:
    """Raise for an operand of a user's function that no GEMM takes in the place of t."""
    dtypes = ACTIVATIONS if scale is None else FP8
    shape = list(t.shape)
    if (
        not isinstance(made, Tensor)
        or made.dtype not in dtypes
        or (as_given and made.shape != t.shape)
    ):
        got = type(made).__name__
        if isinstance(made, Tensor):
            got = f"{list(made.shape)} {dtype_name(made.dtype)}"
        wanted = "bfloat16, float16 or float32" if scale is None else "FP8 numbers for its scales"
        raise RuntimeError(
            f"{name} must be {shape if as_given else 'a tensor'} in {wanted}, of t "
            f"{shape} {dtype_name(t.dtype)}, got {got}"
        )


def shown(dtype: Any) -> str:
    """A dtype as sentences name it, or what was given in its place."""
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
