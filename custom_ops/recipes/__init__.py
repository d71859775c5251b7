"""How a layer's matrix products are computed: frozen dataclasses, passed as ``recipe=``.

A recipe says what x, the weight and dy become before they are multiplied, in three methods that
the layer's gradient calls. They return :class:`Operands`: data and scales for the two products each
tensor takes part in. How operands are multiplied follows from them, so no recipe appears in the
gradient by name.

T rows, E groups, K in_features, N out_features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import BLOCK, E4M3, FP8, MAX_MARGIN, ceil_div, dtype_name

#: A weight's numbers: one tensor [E, N, K], or E tensors [N, K].
Experts = tuple[Tensor, ...]

#: What a product reads: a tensor, or a weight of E tensors [N, K], also for dgrad.
Values = Tensor | Experts


class Operands(NamedTuple):
    """A tensor for the products it takes part in; None for what was not asked for.

    In the order in which ops return it, and flat: an eager layer is called often.
    """

    rowwise: Values | None
    """For the sum over its last dimension: x and weight in fprop, dy in dgrad."""
    scale: Tensor | None
    """What ``rowwise`` is multiplied by, where it is quantized."""
    columnwise: Values | None
    """For the sum over rows: x and dy in wgrad; the weight in dgrad, see Scheme.for_dgrad."""
    columnwise_scale: Tensor | None
    bias_grad: Tensor | None = None


class OutputMask(NamedTuple):
    """What is asked for of x or dy; see :class:`Operands`."""

    rowwise: bool
    columnwise: bool
    bias_grad: bool


class QuantizerState(NamedTuple):
    """What delayed scaling remembers of one operand."""

    scale: Tensor
    """[E] float32, only read."""
    amax: Tensor | None
    """[E] float32, raised in place to the largest magnitudes; None records nothing."""


class QuantizedWeight(NamedTuple):
    """A weight as a recipe keeps it from one call to the next."""

    values: Tensor
    """[E, N, K]."""
    scale: Tensor | None
    columnwise: Tensor | None
    """[E, K, N], for dgrad."""


class Scheme(Protocol):
    """What x, the weight and dy become before they are multiplied."""

    def activation(
        self, x_TK: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """X for fprop (rowwise) and wgrad (columnwise)."""
        ...

    def weight(self, experts: Experts, slot: QuantizerState | None, columnwise: bool) -> Operands:
        """The weight for fprop, and for dgrad where it will read it."""
        ...

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """A columnwise weight as [E, K, N], with its scales, where it is one tensor.

        Apart from `weight`, so that what is saved for backward is a kept tensor itself: a view
        that a compiled graph makes has its own version, and a refresh would go unnoticed.
        """
        ...

    def gradient(
        self, dy_TN: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """Dy for dgrad (rowwise), wgrad (columnwise) and the bias."""
        ...


class Quantizing(Scheme, Protocol):
    """A scheme under which a weight can be kept."""

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """Tensors for a weight, their contents unspecified."""
        ...

    def refresh_weight_(
        self,
        kept: QuantizedWeight,
        experts: Experts,
        slot: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """Quantize a weight into kept, unless the flag, read on the device, is false."""
        ...


def _is_watched() -> bool:
    """Whether a mode sees every eager op, as selective activation checkpointing does.

    What it keeps of a forward it does not compute again. An op that fills tensors returns nothing,
    so that a policy that keeps its results would leave new tensors unfilled.
    """
    return not torch.compiler.is_compiling() and is_in_torch_dispatch_mode()


def _weight_of_list(
    scheme: Quantizing, experts: Experts, slot: QuantizerState | None, columnwise: bool
) -> Operands:
    """What ``scheme.weight`` gives, for a weight that no op quantizes into new tensors."""
    if _is_watched() and experts[0].dim() == 2:
        experts = (torch.stack(experts),)
        return scheme.weight(experts, slot, columnwise)
    *_, N, K = experts[0].shape
    E = len(experts[0]) if experts[0].dim() == 3 else len(experts)
    kept = scheme.new_weight(E, N, K, experts[0].device, columnwise)
    scheme.refresh_weight_(kept, experts, slot, None)
    return quantized_operands(kept)


def _new_fp8_weight(
    E: int,
    N: int,
    K: int,
    device: torch.device | str | None,
    columnwise: bool,
    scale_shape: tuple[int, ...],
) -> QuantizedWeight:
    return QuantizedWeight(
        torch.empty(E, N, K, dtype=E4M3, device=device),
        torch.empty(scale_shape, dtype=torch.float32, device=device),
        torch.empty(E, K, N, dtype=E4M3, device=device) if columnwise else None,
    )


def quantized_operands(kept: QuantizedWeight, columnwise: bool = True) -> Operands:
    """A kept weight for fprop and, where asked for, dgrad."""
    values, scale, turned = kept
    return _of_one_scale(values, scale, turned if columnwise else None)


def _of_one_scale(
    rowwise: Values | None,
    scale: Tensor | None,
    columnwise: Values | None,
    bias_grad: Tensor | None = None,
) -> Operands:
    """What has the same scales in both layouts."""
    return Operands(rowwise, scale, columnwise, None if columnwise is None else scale, bias_grad)


def is_transposed(w_ENK: Tensor) -> bool:
    """Whether a weight is a view of one that is stored as [E, K, N]."""
    return not w_ENK.is_contiguous() and w_ENK.mT.is_contiguous()


def _either_way(quantize: Callable[..., Any], w_ENK: Tensor, columnwise: bool) -> Operands:
    """What ``quantize`` makes of a weight, read as it is stored: squares are squares either way."""
    if not is_transposed(w_ENK):
        return _of_one_scale(*quantize(w_ENK, columnwise=columnwise))
    turned, scale, q = quantize(w_ENK.mT, columnwise=True)
    if scale.dim() == 3:  # of blocks
        scale = scale.mT.contiguous()
    return _of_one_scale(q, scale, turned if columnwise else None)


class _WithEpsilon:
    """A recipe with an ``amax_epsilon``."""

    amax_epsilon: float
    _epsilon_text: str

    def __post_init__(self) -> None:
        amax_epsilon = self.amax_epsilon
        if not (math.isfinite(amax_epsilon) and amax_epsilon >= 0):
            raise ValueError(
                f"{type(self).__name__}: amax_epsilon must be finite and not negative, "
                f"got {amax_epsilon:g}"
            )
        object.__setattr__(self, "_epsilon_text", repr(float(amax_epsilon)))

    @property
    def epsilon(self) -> float:
        """What ops are given: a constant for Dynamo, which takes a string for one.

        It makes a float that changes, or any with ``dynamic=True``, an input of the graph on the
        CPU, and then cannot compile two layers of one recipe (torch 2.13).
        """
        return float(self._epsilon_text)


@dataclass(frozen=True)
class Unquantized:
    """Products in the activations' own dtype: what a recipe of None stands for."""

    def activation(
        self, x_TK: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """X as it is."""
        return Operands(
            x_TK if wanted.rowwise else None, None, x_TK if wanted.columnwise else None, None
        )

    def weight(self, experts: Experts, slot: QuantizerState | None, columnwise: bool) -> Operands:
        """The weight as it is."""
        w: Values = experts if experts[0].dim() == 2 else experts[0]
        return Operands(w, None, w if columnwise else None, None)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """The weight, turned; separate experts are turned by their product."""
        return columnwise if isinstance(columnwise, tuple) else columnwise.transpose(1, 2), None

    def gradient(
        self, dy_TN: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """Dy as it is, with its sums over rows."""
        bias_grad = ops.grouped_bias_grad(dy_TN, offs_E) if wanted.bias_grad else None
        return self.activation(dy_TN, offs_E, slot, wanted)._replace(bias_grad=bias_grad)


@dataclass(frozen=True)
class Float8BlockScaling(_WithEpsilon):
    """FP8 (e4m3) products with one float32 scale a block.

    Activations and gradients share a scale over 1x128 blocks (128 features of one token for fprop
    and dgrad, 128 tokens of one feature for wgrad), weights over 128x128 blocks; so does x in wgrad
    where it costs next to no precision (``share_x_scales``). Products are summed in float32 with
    the scales applied every 128 elements. For each block::

        amax = max(largest finite magnitude, amax_epsilon)
        factor = min(448 / amax, 2 ** 126)      # 1 where amax is 0
        q, scale = e4m3(x * factor), 1 / factor

    Args:
        power_of_two_scales: round ``factor`` down to a power of two, so that scaling is exact.
        amax_epsilon: the smallest amax a block is scaled by; not negative.
        share_x_scales: 128 features of x share the scale of their largest amax over 128 tokens in
            wgrad, where none of their amaxes but 0 is less than 1/256 of it. On an H200 wgrad is
            then 1.2 to 1.8 times as fast as with scales of their own; adding to a float32 main_grad
            may be bound by its bytes either way. e4m3 is a floating-point format: a number moves by
            at most 2**-9.8 of its feature's amax, which is nothing where amaxes are near. False:
            every feature always has a scale of its own. fprop, dgrad and gradients are the same
            either way.

    Raises:
        ValueError: if ``amax_epsilon`` is negative or not finite.

    >>> Float8BlockScaling()
    Float8BlockScaling(power_of_two_scales=True, amax_epsilon=0.0, share_x_scales=True)
    """

    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0
    share_x_scales: bool = True

    def activation(
        self, x_TK: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """X in 1x128 blocks, columnwise with shared scales where that is asked for."""
        return self.quantized(x_TK, offs_E, wanted, share_scales=self.share_x_scales)

    def weight(self, experts: Experts, slot: QuantizerState | None, columnwise: bool) -> Operands:
        """The weight in 128x128 blocks."""
        options: dict[str, Any] = {
            "amax_epsilon": self.epsilon,
            "power_of_two_scales": self.power_of_two_scales,
        }
        if experts[0].dim() == 2:
            listed = ops.quantize_weight_list(experts, columnwise=columnwise, **options)
            return _of_one_scale(*listed)
        return _either_way(partial(ops.quantize_weight, **options), experts[0], columnwise)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """Tensors for a weight in FP8, one scale a block."""
        scales = (E, ceil_div(N, BLOCK), ceil_div(K, BLOCK))
        return _new_fp8_weight(E, N, K, device, columnwise, scales)

    def refresh_weight_(
        self,
        kept: QuantizedWeight,
        experts: Experts,
        slot: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """The weight in 128x128 blocks, into kept."""
        assert kept.scale is not None
        ops.refresh_weight_(
            experts,
            refresh,
            kept.values,
            kept.scale,
            kept.columnwise,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
        )

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """[E, K, N], with the scales of [E, N, K] turned over."""
        assert scale is not None
        return columnwise, scale.transpose(1, 2)

    def gradient(
        self, dy_TN: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """Dy in 1x128 blocks."""
        return self.quantized(dy_TN, offs_E, wanted, share_scales=False)

    def linear(
        self,
        x_TK: Tensor,
        w_ENK: Tensor,
        m_splits_E: Tensor,
        bias_EN: Tensor | None,
        columnwise_x: bool,
        columnwise_w: bool,
    ) -> ops.BlockScaledLinear:
        """A layer's forward, with what its backward reads, in one op."""
        return ops.block_scaled_linear(
            x_TK,
            w_ENK,
            m_splits_E,
            bias_EN,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            share_scales=self.share_x_scales,
            columnwise_x=columnwise_x,
            columnwise_w=columnwise_w,
        )

    def linear_grad(
        self,
        dy_TN: Tensor,
        offs_E: Tensor,
        x: tuple[Tensor | None, Tensor | None],
        w: tuple[Tensor | None, Tensor | None],
        bias_grad: bool,
        dtype: torch.dtype,
    ) -> ops.LinearGrad:
        """Its backward in one op, from columnwise x and w, each with its scales or None."""
        return ops.block_scaled_linear_grad(
            dy_TN,
            offs_E,
            *x,
            *w,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            bias_grad=bias_grad,
            out_dtype=None if dtype is dy_TN.dtype else dtype,
        )

    def quantized(
        self,
        t_SK: Tensor,
        offs_E: Tensor,
        wanted: OutputMask,
        *,
        share_scales: bool,
        rows_T: Tensor | None = None,
        factor_T: Tensor | None = None,
    ) -> Operands:
        """The arguments of :func:`grouped_linear.ops.group_quantize`, with this recipe's scales."""
        t = ops.group_quantize(
            t_SK,
            offs_E,
            rows_T,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            rowwise=wanted.rowwise,
            columnwise=wanted.columnwise,
            bias_grad=wanted.bias_grad,
            share_scales=share_scales,
            factor=factor_T,
        )
        return Operands(*t)


@dataclass(frozen=True)
class Float8CurrentScaling(_WithEpsilon):
    """FP8 products with one float32 scale a group, from the group's own amax.

    Every expert's weight, and each expert's rows of activations and gradients, share one scale. For
    each group::

        amax = max(largest finite magnitude, amax_epsilon)
        factor = min(fp8_max / amax, 2 ** 126)      # 1 where amax is 0
        q, scale = fp8(x * factor), 1 / factor

    Args:
        power_of_two_scales: round ``factor`` down to a power of two, so that scaling is exact.
        amax_epsilon: the smallest amax a group is scaled by; not negative.
        gradient_dtype: of quantized gradients, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``
            (more range, less precision). Activations and weights are e4m3.

    Raises:
        ValueError: for an ``amax_epsilon`` that is negative or not finite, or another dtype.

    >>> Float8CurrentScaling(gradient_dtype=torch.float8_e5m2).gradient_dtype
    torch.float8_e5m2
    """

    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0
    gradient_dtype: torch.dtype = E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_dtype not in FP8:
            raise ValueError(
                "Float8CurrentScaling: gradient_dtype must be float8_e4m3fn or float8_e5m2, "
                f"got {dtype_name(self.gradient_dtype)}"
            )

    def activation(
        self, x_TK: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """X in e4m3, one scale a group."""
        return self._quantize(x_TK, offs_E, E4M3, wanted)

    def weight(self, experts: Experts, slot: QuantizerState | None, columnwise: bool) -> Operands:
        """The weight in e4m3, one scale an expert."""
        if experts[0].dim() == 2:
            return _weight_of_list(self, experts, slot, columnwise)
        quantize = partial(
            ops.quantize_weight_current,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
        )
        return _either_way(quantize, experts[0], columnwise)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """Tensors for a weight in FP8, one scale an expert."""
        return _new_fp8_weight(E, N, K, device, columnwise, (E,))

    def refresh_weight_(
        self,
        kept: QuantizedWeight,
        experts: Experts,
        slot: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """The weight in e4m3 with one scale an expert, into kept."""
        assert kept.scale is not None
        ops.refresh_weight_current_(
            experts,
            refresh,
            kept.values,
            kept.scale,
            kept.columnwise,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
        )

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """[E, K, N], with the scales of [E, N, K]."""
        return columnwise, scale

    def gradient(
        self, dy_TN: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """Dy in the gradients' dtype, one scale a group."""
        return self._quantize(dy_TN, offs_E, self.gradient_dtype, wanted)

    def _quantize(
        self, x_TK: Tensor, offs_E: Tensor, dtype: torch.dtype, wanted: OutputMask
    ) -> Operands:
        x = ops.group_quantize_current(
            x_TK,
            offs_E,
            dtype,
            amax_epsilon=self.epsilon,
            power_of_two_scales=self.power_of_two_scales,
            rowwise=wanted.rowwise,
            columnwise=wanted.columnwise,
            bias_grad=wanted.bias_grad,
        )
        return _of_one_scale(*x)


@dataclass(frozen=True)
class DelayedScaling:
    """FP8 products with one float32 scale a group, from the amax of earlier steps.

    Quantizing is one pass: the scale is known before, and the amax of what passes by is kept for
    later. Activations and weights are e4m3, gradients e5m2 (HYBRID). For each operand (x, weight,
    dy) and group a :class:`grouped_linear.DelayedScalingState` holds the scale, the amax since the
    last update and a history of amax; ``GroupedLinear`` has one. Scales change only in
    :func:`grouped_linear.update_scales`, called once a step for the whole model, after the last
    backward::

        amax = the history's largest ("max"), or the last step's ("most_recent")
        scale = 1 / clamp(fp8_max / amax / 2 ** margin, 2 ** -126, 2 ** 126)

    An amax of zero (a group without tokens) and one that is not finite (a step that diverged) keep
    the scale. Scales are 1 at first: the first step saturates what is larger than 448.

    Args:
        margin: how many powers of two to stay below the format's largest number; 0 to 64.
        amax_history_len: steps in the history.
        amax_compute_algo: ``"max"`` or ``"most_recent"``.

    Raises:
        ValueError: for an option out of range.

    >>> DelayedScaling()
    DelayedScaling(margin=0, amax_history_len=1024, amax_compute_algo='max')
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= MAX_MARGIN:
            raise ValueError(
                f"DelayedScaling: margin must be between 0 and {MAX_MARGIN}, got {self.margin}"
            )
        if self.amax_history_len < 1:
            raise ValueError(
                f"DelayedScaling: amax_history_len must be positive, got {self.amax_history_len}"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                "DelayedScaling: amax_compute_algo must be 'max' or 'most_recent', "
                f"got {self.amax_compute_algo!r}"
            )

    def activation(
        self, x_TK: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """X in e4m3, scaled as earlier steps say."""
        return self._quantize(x_TK, offs_E, slot, E4M3, wanted)

    def weight(self, experts: Experts, slot: QuantizerState | None, columnwise: bool) -> Operands:
        """The weight in e4m3, scaled as earlier steps say."""
        if experts[0].dim() == 2:
            return _weight_of_list(self, experts, slot, columnwise)
        assert slot is not None
        w = ops.quantize_weight_delayed_(slot.amax, experts[0], slot.scale, columnwise=columnwise)
        return _of_one_scale(*w)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """Tensors for a weight in FP8, one scale an expert."""
        return _new_fp8_weight(E, N, K, device, columnwise, (E,))

    def refresh_weight_(
        self,
        kept: QuantizedWeight,
        experts: Experts,
        slot: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """The weight in e4m3, scaled as earlier steps say, into kept; with those scales."""
        assert slot is not None
        assert kept.scale is not None
        out = kept.values, kept.scale, kept.columnwise
        ops.refresh_weight_delayed_(slot.amax, experts, slot.scale, refresh, *out)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """[E, K, N], with the scales of [E, N, K]."""
        return columnwise, scale

    def gradient(
        self, dy_TN: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """Dy in e5m2, scaled as earlier steps say."""
        return self._quantize(dy_TN, offs_E, slot, torch.float8_e5m2, wanted)

    def _quantize(
        self,
        x_TK: Tensor,
        offs_E: Tensor,
        slot: QuantizerState | None,
        dtype: torch.dtype,
        wanted: OutputMask,
    ) -> Operands:
        assert slot is not None
        x = ops.group_quantize_delayed_(
            slot.amax,
            x_TK,
            offs_E,
            slot.scale,
            dtype,
            rowwise=wanted.rowwise,
            columnwise=wanted.columnwise,
            bias_grad=wanted.bias_grad,
        )
        return _of_one_scale(*x)


@dataclass(frozen=True)
class MXFP8BlockScaling:
    """Products of MXFP8 numbers: e4m3 with a power of two as the scale of each 1x32 block.

    Blocks are 32 features of one token for fprop and dgrad, and 32 tokens of one feature, counted
    from the group's first, for wgrad; a weight's run along K for fprop and along N for dgrad. A
    block's scale is the smallest power of two that brings its amax to at most 448, between 2^-124
    and 2^119, where every product ``q * scale`` is exactly a finite bfloat16 number.

    Hopper multiplies no MX numbers, so operands are dequantized, exactly, to bfloat16, and the
    bfloat16 products run: the numbers are the format's, the speed is bfloat16's.

    >>> MXFP8BlockScaling()
    MXFP8BlockScaling()
    """

    def activation(
        self, x_TK: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """X rounded to MXFP8 along each dimension, as bfloat16."""
        return self.gradient(x_TK, offs_E, slot, wanted)

    def weight(self, experts: Experts, slot: QuantizerState | None, columnwise: bool) -> Operands:
        """The weight rounded to MXFP8 along each dimension, as bfloat16."""
        if not _is_watched() or experts[0].dim() == 2:
            return _weight_of_list(self, experts, slot, columnwise)
        E, N, K = experts[0].shape
        ends_E = torch.arange(N, E * N + 1, N, dtype=torch.int32, device=experts[0].device)
        w = ops.group_round_mx(experts[0].reshape(E * N, K), ends_E, columnwise=columnwise)
        turned = None if w.x_columnwise is None else w.x_columnwise.view(E, N, K).transpose(1, 2)
        assert w.x_rowwise is not None
        return Operands(w.x_rowwise.view(E, N, K), None, turned, None, None)

    def new_weight(
        self, E: int, N: int, K: int, device: torch.device | str | None, columnwise: bool = True
    ) -> QuantizedWeight:
        """Tensors for a rounded weight."""
        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        rowwise = torch.empty(E, N, K, **like)
        return QuantizedWeight(
            rowwise, None, torch.empty(E, N, K, **like).transpose(1, 2) if columnwise else None
        )

    def refresh_weight_(
        self,
        kept: QuantizedWeight,
        experts: Experts,
        slot: QuantizerState | None,
        refresh: Tensor | None,
    ) -> None:
        """The weight rounded to MXFP8 along each dimension, into kept."""
        turned = None if kept.columnwise is None else kept.columnwise.transpose(1, 2)
        ops.refresh_weight_mx_(experts, refresh, kept.values, turned)

    def for_dgrad(self, columnwise: Values, scale: Tensor | None) -> tuple[Values, Tensor | None]:
        """[E, K, N], as it is."""
        return columnwise, scale

    def gradient(
        self, dy_TN: Tensor, offs_E: Tensor, slot: QuantizerState | None, wanted: OutputMask
    ) -> Operands:
        """Dy rounded to MXFP8 along each dimension, as bfloat16."""
        rowwise, columnwise, bias_grad = ops.group_round_mx(
            dy_TN,
            offs_E,
            rowwise=wanted.rowwise,
            columnwise=wanted.columnwise,
            bias_grad=wanted.bias_grad,
        )
        return Operands(rowwise, None, columnwise, None, bias_grad)


#: A recipe, or ``None`` for products in the activations' own dtype.
Recipe = Float8BlockScaling | Float8CurrentScaling | DelayedScaling | MXFP8BlockScaling | None
