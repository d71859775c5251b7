"""The ops, one documented function each: thin names for ``torch.ops.grouped_linear``.

T rows (tokens, or a fixed capacity), E groups (experts), K in_features, N out_features, B = 128.

``offs`` [E] int32 holds the END of each group's rows, as for ``torch.nn.functional.grouped_mm``:
group e owns the rows [offs[e-1], offs[e]). What rows at or past ``offs[-1]`` hold reaches nothing,
and outputs are zero there. ``scale`` multiplies to dequantize: ``x ~ q * scale``.

Every op raises RuntimeError with one sentence that names the op, the rule and the value: the same
one from fake tensors, CPU and CUDA. On CPU, offsets that decrease or leave the tensor raise too;
on a GPU they are clamped, because looking at them would wait for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from grouped_linear.meta_kernels.rules import Rules
from grouped_linear.ops.activation_forms import PLAIN, SwiGLU

_ops = torch.ops.grouped_linear


def _dtype_or(default: torch.dtype, dtype: torch.dtype | None) -> torch.dtype | None:
    """None for the dtype that an op's schema has by default.

    In every call torch looks for __torch_function__ in arguments that are neither tensors nor plain
    Python objects, a dtype for one: half a microsecond of four.
    """
    return None if dtype is default else dtype


class GroupQuantized(NamedTuple):
    """What :func:`group_quantize` returns; None stands for what was not asked for."""

    q: Tensor | None
    """[T, K] e4m3."""
    scale: Tensor | None
    """[ceil(K / 128), round_up(T, 4)] float32."""
    q_t: Tensor | None
    """[Tp / 128, K, 128] e4m3."""
    scale_t: Tensor | None
    """[Tp / 128, K] float32."""
    bias_grad: Tensor | None
    """[E, K] float32."""


class SortedByExpert(NamedTuple):
    """What :func:`sort_by_expert` returns, of R = T * C choices."""

    choice: Tensor
    """[R] int32, which entry of [T, C], flattened, each row is."""
    token: Tensor
    """[R] int32, which token each row is."""
    row: Tensor
    """[T, C] int32, the row of each choice."""
    offs: Tensor
    """[E] int32, the end of each expert's rows."""


class PerGroupQuantized(NamedTuple):
    """Rows quantized with one scale a group; None stands for what was not asked for."""

    q: Tensor | None
    """[T, K] e4m3 or e5m2."""
    scale: Tensor
    """[E] float32, for q and q_t."""
    q_t: Tensor | None
    """[Tp / 128, K, 128] of q's dtype."""
    bias_grad: Tensor | None
    """[E, K] float32."""


class MxQuantized(NamedTuple):
    """What :func:`group_quantize_mx` returns; None stands for what was not asked for."""

    q: Tensor | None
    """[T, K] e4m3."""
    scale: Tensor | None
    """[T, ceil(K / 32)] e8m0."""
    q_t: Tensor | None
    """[Tp / 128, K, 128] e4m3."""
    scale_t: Tensor | None
    """[Tp / 128, K, 4] e8m0."""
    bias_grad: Tensor | None
    """[E, K] float32."""


class MxRounded(NamedTuple):
    """What :func:`group_round_mx` returns; None stands for what was not asked for."""

    x_rowwise: Tensor | None
    """[T, K] bfloat16."""
    x_columnwise: Tensor | None
    """[T, K] bfloat16."""
    bias_grad: Tensor | None
    """[E, K] float32."""


class SwigluQuantized(NamedTuple):
    """What :func:`group_quantize_swiglu` returns; None stands for what was not asked for."""

    q: Tensor | None
    """[T, K] e4m3."""
    scale: Tensor | None
    """[ceil(K / 128), round_up(T, 4)] float32."""
    q_t: Tensor | None
    """[Tp / 128, K, 128] e4m3."""
    scale_t: Tensor | None
    """[Tp / 128, K] float32."""
    h: Tensor | None
    """[T, K] of gate_up's dtype."""


class QuantizedWeight(NamedTuple):
    """A quantized weight; None stands for what was not asked for."""

    q: Tensor
    """[E, N, K] e4m3."""
    scale: Tensor
    """Float32, for q and q_t: [E, ceil(N / 128), ceil(K / 128)], or [E] with one an expert."""
    q_t: Tensor | None
    """[E, K, N] e4m3."""


class BlockScaledLinear(NamedTuple):
    """What :func:`block_scaled_linear` returns; None stands for what was not asked for."""

    y: Tensor
    """[T, N] of x's dtype."""
    offs: Tensor
    """[E] int32 group ends."""
    x_t: Tensor | None
    """[Tp / 128, K, 128] e4m3, x for wgrad."""
    scale_x_t: Tensor | None
    """[Tp / 128, K] float32."""
    w_t: Tensor | None
    """[E, K, N] e4m3, the weight for dgrad."""
    scale_w: Tensor
    """[E, ceil(N / 128), ceil(K / 128)] float32, for w_t."""


class LinearGrad(NamedTuple):
    """What :func:`block_scaled_linear_grad` returns; None stands for what was not asked for."""

    dx: Tensor | None
    """[T, K] of dy's dtype."""
    dw: Tensor | None
    """[E, N, K]."""
    db: Tensor | None
    """[E, N] float32."""


def splits_to_offsets(
    m_splits: Tensor,
    num_rows: int,
    *,
    alignment: int = 1,
    stride: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Turn group sizes into group ends, in one launch.

    ``offs[e] = stride * min(num_rows, sum of round_up(m_splits[i], alignment) for i <= e)``.

    Args:
        m_splits: [E] int32 or int64, 1 <= E <= 1024. On a GPU negative sizes count as zero and sums
            saturate; on CPU negative sizes, and sizes that sum to more than num_rows, raise.
        num_rows: the rows there are, an upper bound of every end.
        alignment: every group's size is rounded up to a multiple of it.
        stride: elements a row, to get element offsets.
        dtype: of the result, int32 (what None means) or int64.

    Returns:
        [E] ends.

    Raises:
        RuntimeError: for a wrong shape or dtype, or where num_rows * stride does not fit in dtype.

    >>> splits_to_offsets(torch.tensor([3, 0, 5]), 10)
    tensor([3, 3, 8], dtype=torch.int32)
    """
    offs: Tensor = _ops.splits_to_offsets(m_splits, num_rows, alignment, stride, dtype)
    return offs


def group_quantize(
    x: Tensor,
    offs: Tensor,
    rows: Tensor | None = None,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
    share_scales: bool = False,
    factor: Tensor | None = None,
) -> GroupQuantized:
    """Quantize activations or gradients to e4m3 in 1x128 blocks, one pass over x for all outputs.

    Rowwise blocks are 128 features of one row and feed fprop and dgrad. Columnwise blocks are 128
    rows of one feature, counted from the group's first row, and feed wgrad. For each block, in
    float32::

        amax = max(largest finite |x|, amax_epsilon)
        factor = min(448 / amax, 2 ** 126)  # 1 where amax is 0; a power of two: rounded down to it
        q, scale = e4m3(x * factor), 1 / factor

    e4m3() rounds to nearest even; an infinity or NaN becomes NaN and spoils only itself.

    Args:
        x: [T, K] bfloat16, float16 or float32, K a multiple of 16. Any row stride is read; an inner
            stride other than 1 is copied.
        offs: [E] int32 group ends.
        rows: [T] int32 or int64: quantize x[rows] of x [S, K], tokens sorted by expert for one.
            What rows holds at and past offs[-1] is not looked at. On CPU an index outside x raises;
            on a GPU it is clamped into x.
        amax_epsilon: the smallest amax a block is scaled by.
        power_of_two_scales: make scales powers of two, so that they change no mantissa.
        rowwise: return q and scale.
        columnwise: return q_t and scale_t.
        bias_grad: return the sum of x over each group's rows, added in a fixed order.
        share_scales: 128 features of a columnwise block, counted from the first feature, take the
            scale of the largest of their amaxes (before amax_epsilon) where none but 0 is less than
            1/256 of it: wgrad reads such blocks of x 1.2 to 1.8 times as fast. e4m3 is a floating-
            point format: what is lost are bits of numbers below 2**-13 of the largest, at most
            2**-9.8 of their feature's own. Other blocks stay as they are.
        factor: [T] float32, with rows: quantize x[rows] * factor, rounded to x's dtype first.

    Returns:
        q [T, K]; scale [ceil(K / 128), round_up(T, 4)], one column a row of x; q_t [Tp / 128, K,
        128] with Tp = 128 * floor((T + 127 * min(E, T)) / 128): every group starts at a new block,
        and its last block is filled with zeros; scale_t [Tp / 128, K]; bias_grad [E, K] float32.
        Bytes that belong to no group are unspecified.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size, index or option.

    >>> x, offs = torch.randn(10, 64), torch.tensor([3, 10], dtype=torch.int32)
    >>> quantized = group_quantize(x, offs, columnwise=True)
    >>> quantized.q.shape, quantized.scale.shape, quantized.q_t.shape
    (torch.Size([10, 64]), torch.Size([1, 12]), torch.Size([2, 64, 128]))
    """
    scaling = amax_epsilon, power_of_two_scales
    q, scale, q_t, scale_t, grad = _ops.group_quantize(
        x, offs, rows, *scaling, rowwise, columnwise, bias_grad, share_scales, factor
    )
    return GroupQuantized(
        q if rowwise else None,
        scale if rowwise else None,
        q_t if columnwise else None,
        scale_t if columnwise else None,
        grad if bias_grad else None,
    )


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedByExpert:
    """Sort tokens' choices by expert; an expert's rows stay in the order of their tokens.

    Of the sorted rows, number i is entry ``choice[i]`` of `experts`, flattened, and of the token
    ``token[i] = choice[i] // C``; ``row.flatten()[choice[i]] = i``; expert e has the rows
    [offs[e-1], offs[e]). A counting sort: one launch up to 1024 choices, two above. Every number
    has one possible value, so CPU and GPU agree. Not differentiable.

    Args:
        experts: [T, C] int32 or int64, the experts of each token. A number outside [0, num_experts)
            stands for no expert: its rows come last, past ``offs[-1]``.
        num_experts: E, at most 1024.

    Returns:
        choice, token, row and offs, int32.

    Raises:
        RuntimeError: for a wrong shape, dtype or size.

    >>> sort_by_expert(torch.tensor([[1, 0], [2, 1], [-1, 2]]), 3).offs
    tensor([1, 3, 5], dtype=torch.int32)
    """
    return SortedByExpert(*_ops.sort_by_expert(experts, num_experts))


def gather_sum(y: Tensor, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum gathered rows, weighted or not: what brings experts' outputs back to their tokens.

    ``out[t] = sum over c of weight[t, c] * y[rows[t, c]]``, from the first c to the last, in
    float32 and rounded once. CPU and GPU give the same bits, but for those of a NaN. Not
    differentiable by itself: :class:`grouped_linear.GroupedMLP` is.

    Args:
        y: [R, H] bfloat16, float16 or float32, H a multiple of 16.
        rows: [T, C] int32 or int64. On CPU a number outside y raises; on a GPU it is clamped.
        weight: [T, C] float32; None for ones.

    Returns:
        [T, H] of y's dtype.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or number.

    >>> y = torch.tensor([[1.0] * 16, [10.0] * 16, [100.0] * 16])
    >>> gather_sum(y, torch.tensor([[0, 1], [2, 2]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]]))[:, 0]
    tensor([ 21., 100.])
    """
    out: Tensor = _ops.gather_sum(y, rows, weight)
    return out


def gather_dot(a: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Multiply rows with gathered rows: the gradient of :func:`gather_sum` by its weights.

    ``out[t, c] = a[t] . y[rows[t, c]]``, summed in float32 in an order that does not change. Not
    differentiable.

    Args:
        a: [T, H] of y's dtype.
        y: [R, H] bfloat16, float16 or float32, H a multiple of 16.
        rows: [T, C] int32 or int64. On CPU a number outside y raises; on a GPU it is clamped.

    Returns:
        [T, C] float32.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or number.

    >>> y = torch.tensor([[1.0] * 16, [2.0] * 16])
    >>> gather_dot(torch.ones(1, 16), y, torch.tensor([[1, 0]]))
    tensor([[32., 16.]])
    """
    out: Tensor = _ops.gather_dot(a, y, rows)
    return out


def swiglu(gate_up: Tensor, offs: Tensor, activation: SwiGLU = PLAIN) -> Tensor:
    """The gated activation between the two linear layers of an expert.

    With gate = gate_up[:, :K] and up = gate_up[:, K:]: ``h = silu(gate) * up``, silu(g) = g /
    (1 + exp(-g)), computed in float32 and rounded once. CPU and GPU do the same operations in the
    same order, so they give the same bits.

    Args:
        gate_up: [T, 2 K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        activation: other forms: :class:`grouped_linear.SwiGLU`.

    Returns:
        [T, K]; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> gate_up = torch.cat([torch.zeros(2, 16), torch.ones(2, 16)], dim=1)
    >>> swiglu(gate_up + 1, torch.tensor([1], dtype=torch.int32))[:, 0]  # silu(1) * 2
    tensor([1.4621, 0.0000])
    """
    h: Tensor = _ops.swiglu(gate_up, offs, *activation.arguments)
    return h


def swiglu_grad(dh: Tensor, gate_up: Tensor, offs: Tensor, activation: SwiGLU = PLAIN) -> Tensor:
    """The gradient of :func:`swiglu`.

    ``d_gate = dh * up * s * (1 + gate * (1 - s))`` with s = 1 / (1 + exp(-gate)), and ``d_up = dh *
    silu(gate)``, computed in float32 and rounded once. In general, with the g, u, alpha and beta
    of :class:`grouped_linear.SwiGLU` and s = 1 / (1 + exp(-alpha * g))::

        d_gate = dh * (u + beta) * s * (1 + alpha * g * (1 - s))  where gate <= limit, else 0
        d_up   = dh * g * s                                       where abs(up) <= limit, else 0

    Args:
        dh: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        gate_up: [T, 2 K] of dh's dtype.
        offs: [E] int32 group ends.
        activation: see :func:`swiglu`.

    Returns:
        d_gate_up [T, 2 K], laid out as gate_up is; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> swiglu_grad(torch.ones(1, 16), torch.zeros(1, 32), torch.tensor([1]).int()).shape
    torch.Size([1, 32])
    """
    d_gate_up: Tensor = _ops.swiglu_grad(dh, gate_up, offs, *activation.arguments)
    return d_gate_up


def group_quantize_swiglu(
    gate_up: Tensor,
    offs: Tensor,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    keep_h: bool = False,
    share_scales: bool = False,
    activation: SwiGLU = PLAIN,
) -> SwigluQuantized:
    """Quantize ``h = silu(gate) * up`` without writing h first.

    Bit for bit :func:`group_quantize` of :func:`swiglu`: h is rounded to gate_up's dtype, then
    quantized, in one pass over gate_up.

    Args:
        gate_up: [T, 2 K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        amax_epsilon: see :func:`group_quantize`.
        power_of_two_scales: see :func:`group_quantize`.
        rowwise: return q and scale.
        columnwise: return q_t and scale_t.
        keep_h: return h too.
        share_scales: see :func:`group_quantize`.
        activation: see :func:`swiglu`.

    Returns:
        q, scale, q_t and scale_t of h [T, K], laid out as :func:`group_quantize` does; h, zero at
        and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or option.

    >>> gate_up, offs = torch.randn(10, 128), torch.tensor([3, 10], dtype=torch.int32)
    >>> fused = group_quantize_swiglu(gate_up, offs)
    >>> unfused = group_quantize(swiglu(gate_up, offs), offs)
    >>> torch.equal(fused.q.view(torch.uint8), unfused.q.view(torch.uint8))
    True
    """
    q, scale, q_t, scale_t, h = _ops.group_quantize_swiglu(
        gate_up,
        offs,
        amax_epsilon,
        power_of_two_scales,
        rowwise,
        columnwise,
        keep_h,
        share_scales,
        *activation.arguments,
    )
    return SwigluQuantized(
        q if rowwise else None,
        scale if rowwise else None,
        q_t if columnwise else None,
        scale_t if columnwise else None,
        h if keep_h else None,
    )


def group_quantize_swiglu_grad(
    dh: Tensor,
    gate_up: Tensor,
    offs: Tensor,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
    activation: SwiGLU = PLAIN,
) -> GroupQuantized:
    """Quantize the gradient of :func:`swiglu` without writing it first.

    Bit for bit :func:`group_quantize` of :func:`swiglu_grad`, in one pass over dh and gate_up.

    Args:
        dh: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        gate_up: [T, 2 K] of dh's dtype.
        offs: [E] int32 group ends.
        amax_epsilon: see :func:`group_quantize`.
        power_of_two_scales: see :func:`group_quantize`.
        rowwise: return q and scale.
        columnwise: return q_t and scale_t.
        bias_grad: return the sum of d_gate_up over each group's rows.
        activation: see :func:`swiglu`.

    Returns:
        What :func:`group_quantize` returns for d_gate_up [T, 2 K].

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or option.

    >>> dh, gate_up = torch.randn(10, 64), torch.randn(10, 128)
    >>> dy = group_quantize_swiglu_grad(dh, gate_up, torch.tensor([3, 10], dtype=torch.int32))
    >>> dy.q.shape
    torch.Size([10, 128])
    """
    q, scale, q_t, scale_t, grad = _ops.group_quantize_swiglu_grad(
        dh,
        gate_up,
        offs,
        amax_epsilon,
        power_of_two_scales,
        rowwise,
        columnwise,
        bias_grad,
        *activation.arguments,
    )
    return GroupQuantized(
        q if rowwise else None,
        scale if rowwise else None,
        q_t if columnwise else None,
        scale_t if columnwise else None,
        grad if bias_grad else None,
    )


def group_quantize_current(
    x: Tensor,
    offs: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = False,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> PerGroupQuantized:
    """Quantize activations or gradients with one scale a group, from the group's own amax.

    The formula is that of :func:`group_quantize` with amax over all of a group's rows, and the
    largest number of the dtype for 448. x is read twice: once for the amax. In e5m2 an infinity
    stays one.

    Args:
        x: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        amax_epsilon: the smallest amax a group is scaled by.
        power_of_two_scales: make scales powers of two, so that they change no mantissa.
        rowwise: return q.
        columnwise: return q_t, with the layout and the padding that :func:`group_quantize` has.
        bias_grad: return the sum of x over each group's rows, added in a fixed order.

    Returns:
        q [T, K]; scale [E], 1 for an empty group; q_t [Tp / 128, K, 128]; bias_grad [E, K].

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or option.

    >>> x, offs = torch.tensor([[448.0] * 16, [7.0] * 16]), torch.tensor([1, 2], dtype=torch.int32)
    >>> quantized = group_quantize_current(x, offs)
    >>> quantized.scale, quantized.q[:, 0].float()
    (tensor([1.0000, 0.0156]), tensor([448., 448.]))
    """
    q, scale, q_t, grad = _ops.group_quantize_current(
        x, offs, dtype, amax_epsilon, power_of_two_scales, rowwise, columnwise, bias_grad
    )
    return PerGroupQuantized(
        q if rowwise else None,
        scale,
        q_t if columnwise else None,
        grad if bias_grad else None,
    )


def group_quantize_delayed_(
    amax: Tensor | None,
    x: Tensor,
    offs: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> PerGroupQuantized:
    """Quantize activations or gradients with given scales, one a group, and note their amax.

    ``q = fp8(x * (1 / scale[e]))``, in one pass over x. What is finite saturates at the dtype's
    largest number. ``amax[e]`` becomes the largest of itself and of the group's magnitudes, where
    what is not finite counts as infinity; doing that twice changes nothing.

    Args:
        amax: [E] float32, contiguous, raised in place; None to note nothing.
        x: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        scale: [E] float32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise: return q.
        columnwise: return q_t.
        bias_grad: return the sum of x over each group's rows, added in a fixed order.

    Returns:
        As :func:`group_quantize_current`, with the given scale.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> amax, scale = torch.zeros(2), torch.tensor([1.0, 2.0])
    >>> x, offs = torch.full((2, 16), 6.0), torch.tensor([1, 2], dtype=torch.int32)
    >>> group_quantize_delayed_(amax, x, offs, scale).q[:, 0].float(), amax
    (tensor([6., 3.]), tensor([6., 6.]))
    """
    q, q_t, grad = _ops.group_quantize_delayed_(
        amax, x, offs, scale, dtype, rowwise, columnwise, bias_grad
    )
    return PerGroupQuantized(
        q if rowwise else None,
        scale,
        q_t if columnwise else None,
        grad if bias_grad else None,
    )


def group_quantize_mx(
    x: Tensor,
    offs: Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> MxQuantized:
    """Quantize activations or gradients to MXFP8: e4m3 in blocks of 32 with E8M0 scales.

    Rowwise blocks are 32 features of one row, columnwise blocks 32 rows of one feature, counted
    from the group's first row. For each block::

        scale = 2 ** ceil(log2(largest finite |x| / 448)), between 2 ** -124 and 2 ** 119
        q = e4m3(x / scale)

    so that ``q * scale`` is always exactly a finite bfloat16 number. e4m3() rounds to nearest even
    and saturates; an infinity or NaN becomes NaN and spoils only itself.

    Args:
        x: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        rowwise: return q and scale.
        columnwise: return q_t and scale_t.
        bias_grad: return the sum of x over each group's rows, added in a fixed order.

    Returns:
        q [T, K]; scale [T, ceil(K / 32)]; q_t [Tp / 128, K, 128] as :func:`group_quantize` lays it
        out; scale_t [Tp / 128, K, 4]; bias_grad [E, K] float32. Bytes that belong to no group are
        unspecified.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or option.

    >>> x, offs = torch.full((2, 32), 3.0), torch.tensor([2], dtype=torch.int32)
    >>> quantized = group_quantize_mx(x, offs)
    >>> quantized.q[0, 0].float(), quantized.scale[0, 0].float()
    (tensor(384.), tensor(0.0078))
    """
    q, scale, q_t, scale_t, grad = _ops.group_quantize_mx(x, offs, rowwise, columnwise, bias_grad)
    return MxQuantized(
        q if rowwise else None,
        scale if rowwise else None,
        q_t if columnwise else None,
        scale_t if columnwise else None,
        grad if bias_grad else None,
    )


def group_round_mx(
    x: Tensor,
    offs: Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
) -> MxRounded:
    """Round to what MXFP8 can hold: :func:`group_quantize_mx` and back to bfloat16, in one pass.

    Going back is exact, so products of these are the products of the MXFP8 numbers.

    Args:
        x: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        rowwise: return x rounded in blocks of 32 features.
        columnwise: return x rounded in blocks of 32 rows.
        bias_grad: return the sum of x over each group's rows, added in a fixed order.

    Returns:
        x_rowwise and x_columnwise [T, K] bfloat16; bias_grad [E, K] float32. Rows that belong to no
        group are unspecified.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or option.

    >>> x, offs = torch.tensor([[100.0] + 31 * [3.3]]), torch.tensor([1], dtype=torch.int32)
    >>> group_round_mx(x, offs).x_rowwise[0, :2]
    tensor([96.0000,  3.2500], dtype=torch.bfloat16)
    """
    x_rowwise, x_columnwise, grad = _ops.group_round_mx(x, offs, rowwise, columnwise, bias_grad)
    return MxRounded(
        x_rowwise if rowwise else None,
        x_columnwise if columnwise else None,
        grad if bias_grad else None,
    )


def group_dequantize(q: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo the rowwise half of :func:`group_quantize`: ``x[t, k] = q[t, k] * scale[k // 128, t]``.

    Args:
        q: [T, K] e4m3.
        scale: [ceil(K / 128), round_up(T, 4)] float32.
        offs: [E] int32 group ends.
        dtype: of the result, bfloat16, float16 or float32.

    Returns:
        [T, K]; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> x, offs = torch.full((2, 16), 3.0), torch.tensor([1], dtype=torch.int32)
    >>> quantized = group_quantize(x, offs)
    >>> group_dequantize(quantized.q, quantized.scale, offs, torch.float32)[:, 0]
    tensor([3., 0.])
    """
    x: Tensor = _ops.group_dequantize(q, scale, offs, dtype)
    return x


def group_dequantize_t(
    q_t: Tensor, scale_t: Tensor, offs: Tensor, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """Undo the columnwise half of :func:`group_quantize`, back to row-major order.

    For row r of block b: ``x[t, k] = q_t[b, k, r] * scale_t[b, k]``.

    Args:
        q_t: [Tp / 128, K, 128] e4m3.
        scale_t: [Tp / 128, K] float32.
        offs: [E] int32 group ends.
        num_rows: T of the x that was quantized.
        dtype: of the result, bfloat16, float16 or float32.

    Returns:
        [T, K]; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> x, offs = torch.full((2, 16), 3.0), torch.tensor([1], dtype=torch.int32)
    >>> quantized = group_quantize(x, offs, columnwise=True)
    >>> group_dequantize_t(quantized.q_t, quantized.scale_t, offs, 2, torch.float32)[:, 0]
    tensor([3., 0.])
    """
    x: Tensor = _ops.group_dequantize_t(q_t, scale_t, offs, num_rows, dtype)
    return x


def grouped_bias_grad(dy: Tensor, offs: Tensor) -> Tensor:
    """Sum dy over each group's rows: the gradient of a grouped bias.

    Rows are added in float32 in a fixed order (the rows of a 128-row block in eights, then the
    blocks), so equal inputs give equal bits.

    Args:
        dy: [T, N] bfloat16, float16 or float32, N a multiple of 16.
        offs: [E] int32 group ends.

    Returns:
        [E, N] float32; zero for an empty group.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> grouped_bias_grad(torch.ones(5, 16), torch.tensor([2, 2, 5], dtype=torch.int32))[:, 0]
    tensor([2., 0., 3.])
    """
    grad: Tensor = _ops.grouped_bias_grad(dy, offs)
    return grad


def quantize_weight(
    w: Tensor,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
) -> QuantizedWeight:
    """Quantize a packed weight to e4m3 in 128x128 blocks, both layouts in one pass.

    The formula is that of :func:`group_quantize`, with amax over a block of 128 out_features and
    128 in_features of one expert. Blocks at the edges are smaller.

    Args:
        w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16.
        amax_epsilon: the smallest amax a block is scaled by.
        power_of_two_scales: make scales powers of two.
        columnwise: return q_t, which dgrad reads, as well.

    Returns:
        q [E, N, K]; scale [E, ceil(N / 128), ceil(K / 128)]; q_t [E, K, N], the bytes of q
        transposed.

    Raises:
        RuntimeError: for a wrong shape, dtype or size.

    >>> quantized = quantize_weight(torch.randn(2, 32, 144))
    >>> quantized.scale.shape, quantized.q_t.shape
    (torch.Size([2, 1, 2]), torch.Size([2, 144, 32]))
    """
    q, scale, q_t = _ops.quantize_weight(w, amax_epsilon, power_of_two_scales, columnwise)
    return QuantizedWeight(q, scale, q_t if columnwise else None)


def quantize_weight_list(
    w: Sequence[Tensor],
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    columnwise: bool = True,
) -> QuantizedWeight:
    """Quantize separate weights, one an expert: the bits of :func:`quantize_weight`, no stacking.

    Args:
        w: E tensors [N, K] bfloat16, float16 or float32, N and K multiples of 16, all alike.
        amax_epsilon: the smallest amax a block is scaled by.
        power_of_two_scales: make scales powers of two.
        columnwise: return q_t, which dgrad reads, as well.

    Returns:
        As :func:`quantize_weight` of ``torch.stack(w)``.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> w = [torch.ones(32, 16), torch.full((32, 16), 2.0)]
    >>> quantize_weight_list(w).scale.flatten()
    tensor([0.0039, 0.0078])
    """
    if not w:  # then torch has no tensor to tell which device's op it is
        Rules("quantize_weight_list").groups(0)
    q, scale, q_t = _ops.quantize_weight_list(
        list(w), amax_epsilon, power_of_two_scales, columnwise
    )
    return QuantizedWeight(q, scale, q_t if columnwise else None)


def quantize_weight_current(
    w: Tensor,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = False,
    columnwise: bool = True,
) -> QuantizedWeight:
    """Quantize a packed weight to e4m3 with one scale an expert, from the expert's own amax.

    The formula is that of :func:`group_quantize_current`.

    Args:
        w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16.
        amax_epsilon: the smallest amax an expert is scaled by.
        power_of_two_scales: make scales powers of two.
        columnwise: return q_t, which dgrad reads, as well.

    Returns:
        q [E, N, K]; scale [E]; q_t [E, K, N], the bytes of q transposed.

    Raises:
        RuntimeError: for a wrong shape, dtype or size.

    >>> quantize_weight_current(torch.full((2, 32, 16), 448.0)).scale
    tensor([1., 1.])
    """
    q, scale, q_t = _ops.quantize_weight_current(w, amax_epsilon, power_of_two_scales, columnwise)
    return QuantizedWeight(q, scale, q_t if columnwise else None)


def quantize_weight_delayed_(
    amax: Tensor | None, w: Tensor, scale: Tensor, *, columnwise: bool = True
) -> QuantizedWeight:
    """Quantize a packed weight to e4m3 with given scales, one an expert, and note its amax.

    The formula is that of :func:`group_quantize_delayed_`.

    Args:
        amax: [E] float32, contiguous, raised in place; None to note nothing.
        w: [E, N, K] bfloat16, float16 or float32, N and K multiples of 16.
        scale: [E] float32.
        columnwise: return q_t, which dgrad reads, as well.

    Returns:
        q [E, N, K]; the given scale; q_t [E, K, N], the bytes of q transposed.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> amax = torch.zeros(2)
    >>> quantize_weight_delayed_(amax, torch.ones(2, 32, 16), torch.ones(2)).q.float().mean(), amax
    (tensor(1.), tensor([1., 1.]))
    """
    q, q_t = _ops.quantize_weight_delayed_(amax, w, scale, columnwise)
    return QuantizedWeight(q, scale, q_t if columnwise else None)


def refresh_weight_(
    w: Tensor | Sequence[Tensor],
    refresh: Tensor | None,
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
) -> None:
    """Quantize a weight again, into the tensors of an earlier :func:`quantize_weight`.

    Args:
        w: [E, N, K], see :func:`quantize_weight`, or E tensors [N, K].
        refresh: a bool tensor of no dimensions on w's device, read there: where it is false, not a
            byte changes. None always refreshes.
        q: [E, N, K] e4m3, contiguous, written.
        scale: [E, ceil(N / 128), ceil(K / 128)] float32, contiguous, written.
        q_t: [E, K, N] e4m3, contiguous, written; or None.
        amax_epsilon: the smallest amax a block is scaled by.
        power_of_two_scales: make scales powers of two.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> w = torch.ones(2, 32, 16)
    >>> q, scale, q_t = quantize_weight(w)
    >>> refresh_weight_(8 * w, torch.tensor(False), q, scale, q_t)
    >>> scale[0].item()
    0.00390625
    >>> refresh_weight_(8 * w, torch.tensor(True), q, scale, q_t)
    >>> scale[0].item()
    0.03125
    """
    _ops.refresh_weight_(_experts(w), refresh, q, scale, q_t, amax_epsilon, power_of_two_scales)


def refresh_weight_current_(
    w: Tensor | Sequence[Tensor],
    refresh: Tensor | None,
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = False,
) -> None:
    """Quantize a weight again, into the tensors of a :func:`quantize_weight_current`.

    Args:
        w: [E, N, K] or E tensors [N, K]; those that do not lie one after the other in memory are
            gathered first.
        refresh: see :func:`refresh_weight_`.
        q: [E, N, K] e4m3, contiguous, written.
        scale: [E] float32, contiguous, written.
        q_t: [E, K, N] e4m3, contiguous, written; or None.
        amax_epsilon: the smallest amax an expert is scaled by.
        power_of_two_scales: make scales powers of two.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> w = torch.ones(2, 32, 16)
    >>> q, scale, q_t = quantize_weight_current(w)
    >>> refresh_weight_current_(448 * w, None, q, scale, q_t)
    >>> scale
    tensor([1., 1.])
    """
    _ops.refresh_weight_current_(
        _experts(w), refresh, q, scale, q_t, amax_epsilon, power_of_two_scales
    )


def refresh_weight_delayed_(
    amax: Tensor | None,
    w: Tensor | Sequence[Tensor],
    state: Tensor,
    refresh: Tensor | None,
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
) -> None:
    """Quantize a weight again, into the tensors of a :func:`quantize_weight_delayed_`.

    Args:
        amax: [E] float32, contiguous, raised in place where there is a refresh; None to note
            nothing.
        w: see :func:`refresh_weight_current_`.
        state: [E] float32, the scales to quantize with.
        refresh: see :func:`refresh_weight_`; where it is false amax stays as it was, too.
        q: [E, N, K] e4m3, contiguous, written.
        scale: [E] float32, contiguous, becomes a copy of state: what q was quantized with stays
            with q when state moves on.
        q_t: [E, K, N] e4m3, contiguous, written; or None.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> w, amax, scale = torch.ones(2, 32, 16), torch.zeros(2), torch.zeros(2)
    >>> q, _, q_t = quantize_weight_delayed_(None, w, torch.ones(2))
    >>> refresh_weight_delayed_(amax, 3 * w, torch.ones(2), None, q, scale, q_t)
    >>> q.float().mean(), scale, amax
    (tensor(3.), tensor([1., 1.]), tensor([3., 3.]))
    """
    _ops.refresh_weight_delayed_(amax, _experts(w), state, refresh, q, scale, q_t)


def refresh_weight_mx_(
    w: Tensor | Sequence[Tensor],
    refresh: Tensor | None,
    w_rowwise: Tensor,
    w_columnwise: Tensor | None,
) -> None:
    """Round a weight to MXFP8 again, into bf16 tensors that are kept.

    An expert's rows are a group of :func:`group_round_mx`: blocks run along K in w_rowwise, and
    along N, inside each expert, in w_columnwise.

    Args:
        w: see :func:`refresh_weight_current_`.
        refresh: see :func:`refresh_weight_`.
        w_rowwise: [E, N, K] bfloat16, contiguous, written.
        w_columnwise: [E, N, K] bfloat16, contiguous, written; or None.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> kept = torch.zeros(2, 32, 16, dtype=torch.bfloat16)
    >>> refresh_weight_mx_(torch.full((2, 32, 16), 3.0), None, kept, None)
    >>> kept.mean()
    tensor(3., dtype=torch.bfloat16)
    """
    _ops.refresh_weight_mx_(_experts(w), refresh, w_rowwise, w_columnwise)


def _experts(w: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [w] if isinstance(w, Tensor) else list(w)


def update_scales_(
    scale: Sequence[Tensor],
    amax: Sequence[Tensor],
    amax_history: Sequence[Tensor],
    fp8_max: Sequence[float],
    *,
    margin: int = 0,
    most_recent: bool = False,
) -> None:
    """Roll the scales of delayed scaling, for any number of operands at once.

    For each operand and group: amax becomes the history's first row (0 where it is not finite), the
    oldest row is dropped, and amax is 0 again. Then, unless that amax was not finite or the scale
    would follow from 0::

        factor = fp8_max / (the history's largest, or its first row where most_recent)
        scale = 1 / clamp(factor / 2 ** margin, 2 ** -126, 2 ** 126)

    Args:
        scale: one tensor [E] float32 an operand, written.
        amax: as many tensors [E] float32, read and zeroed.
        amax_history: as many tensors [H, E] float32, written, the latest step first.
        fp8_max: as many largest numbers, of each operand's dtype.
        margin: how many powers of two to stay below them.
        most_recent: take the latest amax, not the history's largest.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, size or option.

    >>> scale, amax, history = torch.ones(2), torch.tensor([896.0, 0.0]), torch.zeros(4, 2)
    >>> update_scales_([scale], [amax], [history], [448.0])
    >>> scale, amax, history[0]
    (tensor([2., 1.]), tensor([0., 0.]), tensor([896.,   0.]))
    """
    if not scale:  # then torch may have no tensor to tell which device's op it is
        Rules("update_scales_").check(False, lambda: "scale must not be empty")
    _ops.update_scales_(
        list(scale), list(amax), list(amax_history), list(fp8_max), margin, most_recent
    )


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each group of rows by its own matrix. Differentiable.

    For group e and its rows t: ``y[t] = a[t] @ b[e].T + bias[e]``.

    Args:
        a: [T, K] bfloat16, float16 or float32, rows sorted by group, K a multiple of 16.
        b: [E, N, K] of a's dtype, N a multiple of 16. A transposed view is read as it is, so dgrad
            is ``grouped_mm(dy, w.transpose(1, 2), offs)``.
        offs: [E] int32 group ends.
        bias: [E, N] of the result's dtype.
        out_dtype: of the result; a's dtype by default.

    Returns:
        [T, N]; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.
        NotImplementedError: in forward mode.

    >>> a, b, offs = torch.randn(5, 16), torch.randn(2, 32, 16), torch.tensor([2, 5])
    >>> y = grouped_mm(a, b, offs.int())
    >>> torch.allclose(y[2:], a[2:] @ b[1].T, atol=1e-5)
    True
    """
    if forward_ad._current_level >= 0:  # torch would leave the tangents of a custom op out
        for t in (a, b, bias):
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError("grouped_mm: forward-mode differentiation is not there")
    y: Tensor = _ops.grouped_mm(a, b, offs, bias, _dtype_or(a.dtype, out_dtype))
    return y


def grouped_mm_list(
    a: Tensor,
    b: Sequence[Tensor],
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    transpose_b: bool = False,
) -> Tensor:
    """Multiply each group of rows by its own matrix, of separate ones: :func:`grouped_mm`.

    Nothing is copied where the matrices lie one after the other in memory, as views of one tensor
    do; else they are gathered first. Addresses are looked at in every call.

    Args:
        a: [T, K], see :func:`grouped_mm`.
        b: E tensors [N, K] of a's dtype.
        offs: [E] int32 group ends.
        bias: [E, N] of the result's dtype.
        out_dtype: of the result; a's dtype by default.
        transpose_b: the matrices are [K, N]: ``y[t] = a[t] @ b[e] + bias[e]``.

    Returns:
        [T, N]; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> a, b, offs = torch.randn(5, 16), torch.randn(2, 32, 16), torch.tensor([2, 5]).int()
    >>> torch.equal(grouped_mm_list(a, b.unbind(), offs), grouped_mm(a, b, offs))
    True
    """
    y: Tensor = _ops.grouped_mm_list(a, list(b), offs, bias, out_dtype, transpose_b)
    return y


def grouped_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply each group of quantized rows by its own quantized matrix.

    ``y[t] = (a[t] * scale_a) @ (b[e] * scale_b).T + bias[e]``, summed in float32 with scales of
    blocks applied every 128 elements of K, and rounded once. Both operands have a scale a block, or
    both have a scale a group.

    Args:
        a: [T, K] e4m3, with scale_a [ceil(K / 128), round_up(T, 4)], as :func:`group_quantize`
            gives; or e4m3 or e5m2, with scale_a [E].
        b: [E, N, K] e4m3, with scale_b [E, ceil(N / 128), ceil(K / 128)] of any strides, as
            :func:`quantize_weight` gives, or with scale_b [E]. dgrad passes q_t and
            ``scale.transpose(1, 2)``, or scale [E] as it is.
        scale_a: see a.
        scale_b: see b.
        offs: [E] int32 group ends.
        bias: [E, N] of the result's dtype.
        out_dtype: of the result, bfloat16, float16 or float32.

    Returns:
        [T, N]; zero at and past offs[-1].

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> offs = torch.tensor([2, 5], dtype=torch.int32)
    >>> x, w = group_quantize(torch.ones(5, 16), offs), quantize_weight(torch.ones(2, 32, 16))
    >>> grouped_scaled_mm(x.q, w.q, x.scale, w.scale, offs)[0, 0]
    tensor(16., dtype=torch.bfloat16)
    """
    dtype = _dtype_or(torch.bfloat16, out_dtype)
    y: Tensor = _ops.grouped_scaled_mm(a, b, scale_a, scale_b, offs, bias, dtype)
    return y


def grouped_mm_wgrad(
    dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Weight gradients of a grouped product: for each group, ``dw[e] = dy.T @ x`` over its rows.

    Args:
        dy: [T, N] bfloat16, float16 or float32, N a multiple of 16.
        x: [T, K] of dy's dtype, K a multiple of 16.
        offs: [E] int32 group ends.
        out_dtype: of the result; dy's dtype by default.

    Returns:
        [E, N, K]; zero for an empty group.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> dy, x, offs = torch.ones(5, 16), torch.ones(5, 32), torch.tensor([2, 2, 5])
    >>> grouped_mm_wgrad(dy, x, offs.int())[:, 0, 0]
    tensor([2., 0., 3.])
    """
    dw: Tensor = _ops.grouped_mm_wgrad(dy, x, offs, _dtype_or(dy.dtype, out_dtype))
    return dw


def grouped_scaled_mm_wgrad(
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Weight gradients from columnwise data: for each group, ``dw[e] = dy.T @ x`` over its rows.

    Args:
        dy_t: [Tp / 128, N, 128] e4m3, with scale_dy_t [Tp / 128, N], from :func:`group_quantize`;
            or e4m3 or e5m2, with scale_dy_t [E], one a group.
        x_t: [Tp / 128, K, 128] e4m3, with scale_x_t [Tp / 128, K], from :func:`group_quantize`, or
            with scale_x_t [E]. On a GPU 128 features that share one are multiplied faster.
        scale_dy_t: see dy_t.
        scale_x_t: see x_t.
        offs: [E] int32 group ends, those that both were quantized with.
        out_dtype: of the result, bfloat16, float16 or float32.

    Returns:
        [E, N, K]; zero for an empty group.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    >>> dy = group_quantize(torch.ones(5, 16), offs, columnwise=True)
    >>> x = group_quantize(torch.ones(5, 32), offs, columnwise=True)
    >>> dw = grouped_scaled_mm_wgrad(dy.q_t, x.q_t, dy.scale_t, x.scale_t, offs)
    >>> dw[:, 0, 0]
    tensor([2., 0., 3.], dtype=torch.bfloat16)
    """
    dtype = _dtype_or(torch.bfloat16, out_dtype)
    dw: Tensor = _ops.grouped_scaled_mm_wgrad(dy_t, x_t, scale_dy_t, scale_x_t, offs, dtype)
    return dw


def grouped_mm_wgrad_(
    main_grad: Tensor, dy: Tensor, x: Tensor, offs: Tensor, overwrite: Tensor | None = None
) -> None:
    """Add weight gradients to main_grad in place: :func:`grouped_mm_wgrad`, accumulated.

    The sum is taken in float32 and rounded once. An empty group's main_grad stays as it was.

    Args:
        main_grad: [E, N, K] float32 or bfloat16, contiguous.
        dy: [T, N], see :func:`grouped_mm_wgrad`.
        x: [T, K], see :func:`grouped_mm_wgrad`.
        offs: [E] int32 group ends.
        overwrite: a bool tensor of no dimensions on main_grad's device, read there: where it is
            true, main_grad is written without being read, and an empty group's becomes zero.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> main_grad, offs = torch.ones(2, 16, 32), torch.tensor([5, 5], dtype=torch.int32)
    >>> grouped_mm_wgrad_(main_grad, torch.ones(5, 16), torch.ones(5, 32), offs)
    >>> main_grad[:, 0, 0]
    tensor([6., 1.])
    """
    _ops.grouped_mm_wgrad_(main_grad, dy, x, offs, overwrite)


def grouped_scaled_mm_wgrad_(
    main_grad: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
) -> None:
    """Add weight gradients from columnwise data to main_grad in place.

    :func:`grouped_scaled_mm_wgrad`, accumulated as :func:`grouped_mm_wgrad_` does.

    Args:
        main_grad: [E, N, K] float32 or bfloat16, contiguous.
        dy_t: [Tp / 128, N, 128], see :func:`grouped_scaled_mm_wgrad`.
        x_t: [Tp / 128, K, 128], see :func:`grouped_scaled_mm_wgrad`.
        scale_dy_t: see dy_t.
        scale_x_t: see x_t.
        offs: [E] int32 group ends.
        overwrite: see :func:`grouped_mm_wgrad_`.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> offs = torch.tensor([5, 5], dtype=torch.int32)
    >>> dy = group_quantize(torch.ones(5, 16), offs, columnwise=True)
    >>> x = group_quantize(torch.ones(5, 32), offs, columnwise=True)
    >>> main_grad = torch.ones(2, 16, 32)
    >>> grouped_scaled_mm_wgrad_(main_grad, dy.q_t, x.q_t, dy.scale_t, x.scale_t, offs)
    >>> main_grad[:, 0, 0]
    tensor([6., 1.])
    """
    _ops.grouped_scaled_mm_wgrad_(main_grad, dy_t, x_t, scale_dy_t, scale_x_t, offs, overwrite)


def grouped_mm_wgrad_list_(
    main_grad: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
) -> None:
    """Add weight gradients to a main_grad of each expert, in place: :func:`grouped_mm_wgrad_`.

    One product in place where they lie one after the other in memory; else they are gathered first
    and written back.

    Args:
        main_grad: E tensors [N, K] float32 or bfloat16, contiguous.
        dy: [T, N], see :func:`grouped_mm_wgrad`.
        x: [T, K], see :func:`grouped_mm_wgrad`.
        offs: [E] int32 group ends.
        overwrite: see :func:`grouped_mm_wgrad_`.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> main_grad, offs = [torch.ones(16, 32), torch.ones(16, 32)], torch.tensor([5, 5]).int()
    >>> grouped_mm_wgrad_list_(main_grad, torch.ones(5, 16), torch.ones(5, 32), offs)
    >>> [expert[0, 0].item() for expert in main_grad]
    [6.0, 1.0]
    """
    _ops.grouped_mm_wgrad_list_(list(main_grad), dy, x, offs, overwrite)


def grouped_scaled_mm_wgrad_list_(
    main_grad: Sequence[Tensor],
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy_t: Tensor,
    scale_x_t: Tensor,
    offs: Tensor,
    overwrite: Tensor | None = None,
) -> None:
    """Add weight gradients from columnwise data to a main_grad of each expert, in place.

    :func:`grouped_scaled_mm_wgrad_` as :func:`grouped_mm_wgrad_list_` does it.

    Args:
        main_grad: E tensors [N, K] float32 or bfloat16, contiguous.
        dy_t: [Tp / 128, N, 128], see :func:`grouped_scaled_mm_wgrad`.
        x_t: [Tp / 128, K, 128], see :func:`grouped_scaled_mm_wgrad`.
        scale_dy_t: see dy_t.
        scale_x_t: see x_t.
        offs: [E] int32 group ends.
        overwrite: see :func:`grouped_mm_wgrad_`.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or size.

    >>> offs = torch.tensor([5, 5], dtype=torch.int32)
    >>> dy = group_quantize(torch.ones(5, 16), offs, columnwise=True)
    >>> x = group_quantize(torch.ones(5, 32), offs, columnwise=True)
    >>> main_grad = [torch.ones(16, 32), torch.ones(16, 32)]
    >>> grouped_scaled_mm_wgrad_list_(main_grad, dy.q_t, x.q_t, dy.scale_t, x.scale_t, offs)
    >>> [expert[0, 0].item() for expert in main_grad]
    [6.0, 1.0]
    """
    _ops.grouped_scaled_mm_wgrad_list_(
        list(main_grad), dy_t, x_t, scale_dy_t, scale_x_t, offs, overwrite
    )


def block_scaled_linear(
    x: Tensor,
    w: Tensor,
    m_splits: Tensor,
    bias: Tensor | None = None,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    share_scales: bool = False,
    columnwise_x: bool = True,
    columnwise_w: bool = True,
) -> BlockScaledLinear:
    """A layer's forward under block scaling as one op, for what an op costs the host.

    :func:`splits_to_offsets`, :func:`group_quantize`, :func:`quantize_weight` and
    :func:`grouped_scaled_mm`, with their bits::

        y[t] = x[t] @ w[e].T + bias[e]  # for the rows t of group e

    Args:
        x: [T, K], see :func:`group_quantize`.
        w: [E, N, K], see :func:`quantize_weight`.
        m_splits: [E] rows of each group, see :func:`splits_to_offsets`.
        bias: [E, N] of x's dtype.
        amax_epsilon: the smallest amax a block is scaled by.
        power_of_two_scales: make scales powers of two.
        share_scales: see :func:`group_quantize`.
        columnwise_x: return x_t and scale_x_t, which wgrad reads.
        columnwise_w: return w_t, which dgrad reads.

    Returns:
        y [T, N], zero in rows at and past sum(m_splits), and what
        :func:`block_scaled_linear_grad` reads.

    Raises:
        RuntimeError: what those ops raise, in their names.

    >>> x, w = torch.randn(5, 16), torch.randn(2, 32, 16)
    >>> y, offs, *operands = block_scaled_linear(x, w, torch.tensor([2, 3]))
    >>> y.shape, offs.tolist()
    (torch.Size([5, 32]), [2, 5])
    """
    y, offs, x_t, scale_x_t, w_t, scale_w = _ops.block_scaled_linear(
        x,
        w,
        m_splits,
        bias,
        amax_epsilon,
        power_of_two_scales,
        share_scales,
        columnwise_x,
        columnwise_w,
    )
    return BlockScaledLinear(
        y,
        offs,
        x_t if columnwise_x else None,
        scale_x_t if columnwise_x else None,
        w_t if columnwise_w else None,
        scale_w,
    )


def block_scaled_linear_grad(
    dy: Tensor,
    offs: Tensor,
    x_t: Tensor | None,
    scale_x_t: Tensor | None,
    w_t: Tensor | None,
    scale_w: Tensor | None,
    *,
    amax_epsilon: float = 0.0,
    power_of_two_scales: bool = True,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
) -> LinearGrad:
    """The gradients of :func:`block_scaled_linear` as one op.

    :func:`group_quantize` of dy, :func:`grouped_scaled_mm` and :func:`grouped_scaled_mm_wgrad`,
    with their bits, for the rows t of group e::

        dx[t] = dy[t] @ w[e]    dw[e] = dy[group e].T @ x[group e]    db[e] = sum of dy[t]

    Args:
        dy: [T, N], see :func:`group_quantize`.
        offs: [E] int32 group ends.
        x_t: [Tp / 128, K, 128] e4m3; None computes no dw.
        scale_x_t: see x_t.
        w_t: [E, K, N] e4m3; None computes no dx.
        scale_w: [E, ceil(N / 128), ceil(K / 128)], see w_t.
        amax_epsilon: the smallest amax a block of dy is scaled by.
        power_of_two_scales: make dy's scales powers of two.
        bias_grad: return db.
        out_dtype: of dw; None for dy's.

    Returns:
        dx [T, K] of dy's dtype, dw [E, N, K] and db [E, N] float32; None for what was not computed.

    Raises:
        RuntimeError: what those ops raise, in their names; and where neither x_t nor w_t is given.

    >>> x, w = torch.ones(5, 16), torch.ones(2, 32, 16)
    >>> y, offs, *operands = block_scaled_linear(x, w, torch.tensor([2, 3]))
    >>> dx, dw, db = block_scaled_linear_grad(torch.ones_like(y), offs, *operands, bias_grad=True)
    >>> dx[0, 0].item(), dw[:, 0, 0].tolist(), db[:, 0].tolist()
    (32.0, [2.0, 3.0], [2.0, 3.0])
    """
    dx, dw, db = _ops.block_scaled_linear_grad(
        dy,
        offs,
        x_t,
        scale_x_t,
        w_t,
        scale_w,
        amax_epsilon,
        power_of_two_scales,
        bias_grad,
        out_dtype,
    )
    return LinearGrad(
        None if w_t is None else dx, None if x_t is None else dw, db if bias_grad else None
    )
