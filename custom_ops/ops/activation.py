# SPDX-License-Identifier: Apache-2.0
"""The activation between an expert's two linear layers; SwiGLU alone or fused with quantization.

T rows, E groups, K features of h, Tp rows of the padded columnwise layout (see ops/quantize.py).
Of a layer: R rows, F features inside an expert, G features that the first layer computes.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from grouped_linear.ops.constants import constant, is_finite, is_number, keep_constants
from grouped_linear.ops.gradients import OPS
from grouped_linear.ops.quantize import requested


class Activation:
    """An activation of your own, between the two layers of :class:`grouped_linear.GroupedMLP`.

    A subclass gives the activation and its gradient in torch operations, which torch.compile fuses.
    The layer calls them in float32, rounds once, and keeps what it keeps with
    :class:`grouped_linear.SwiGLU`: the output of the first layer is the only tensor of rows.

    A layer is compiled and compared with its activation, so make it a ``@dataclass(frozen=True)``.
    Row t of a result may depend on row t of the arguments alone, and zeros must give zeros. Neither
    method may write gate_up in place: the layer keeps it for the backward.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Silu(Activation):  # without a gate
    ...     gated = False
    ...     def forward(self, up_RF):
    ...         return up_RF * up_RF.sigmoid()
    ...     def backward(self, dh_RF, up_RF):
    ...         s = up_RF.sigmoid()
    ...         return dh_RF * s * (1 + up_RF * (1 - s))
    >>> from grouped_linear import GroupedMLP
    >>> mlp = GroupedMLP(4, hidden_size=16, intermediate_size=32, activation=Silu())
    >>> mlp.gate_up_proj.shape
    torch.Size([4, 32, 16])
    """

    gated: ClassVar[bool] = True
    """Whether the first layer computes gate and up, G = 2 F features, or F alone."""

    @property
    def swiglu(self) -> "SwiGLU | None":
        """The form of SwiGLU that it is, which kernels compute; None where the methods do."""
        return None

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """h [R, F] float32, of the first layer's output [R, G] in float32."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        """The gradient [R, G] by gate_up, of the gradient by h; all float32."""
        raise NotImplementedError(f"{type(self).__name__} has no backward")


@dataclass(frozen=True)
class SwiGLU(Activation):
    """The form of the gated activation between the two linear layers of an expert.

    With g = min(gate, limit) and u = min(max(up, -limit), limit)::

        h = g * sigmoid(alpha * (g + cubic * g**3)) * (u + beta)

    The default is ``silu(gate) * up``. With two constants it is the tanh form of GELU: 0.5 * (1 +
    tanh(x)) = sigmoid(2 * x). Where the limit clamps gate or up, the gradient is zero; at the limit
    itself it passes, as torch.clamp's did until torch 2.13 (2.15's does not).

    ===============================  ===========================================================
    DeepSeek V4, GLM-5.3-Flash, Hy4  ``SwiGLU(limit=10.0)``, or the limit of the model's config
    MiniMax-M3                       ``SwiGLU(alpha=1.702, beta=1.0, limit=7.0)``
    GPT-OSS                          ``SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)``
    Gemma 4                          ``SwiGLU(alpha=1.5957691216057308, cubic=0.044715)``, which is
                                     ``GeGLU("tanh")``
    ===============================  ===========================================================

    sigmoid's relative error is below 2^-21. In float32 the tanh form of GELU may differ from
    torch's by rounding, most for negative gates, where 1 + tanh(x) loses what is small beside 1.

    Args:
        alpha: the factor inside the sigmoid.
        beta: the constant added to up.
        limit: positive, or None for no limit.
        interleaved: gate is gate_up[..., 0::2] and up is gate_up[..., 1::2]. Otherwise gate is the
            first half and up the second.
        cubic: the factor of the gate's cube inside the sigmoid, not negative.

    Raises:
        ValueError: for an option of a wrong type or out of range.

    >>> import torch
    >>> from grouped_linear import ops
    >>> gate_up = torch.cat([torch.full((1, 16), 3.0), torch.full((1, 16), 20.0)], dim=1)
    >>> ops.swiglu(gate_up, torch.tensor([1]).int(), SwiGLU(limit=2.0))[0, 0]  # silu(2) * 2
    tensor(3.5232)
    """

    alpha: float = 1
    beta: float = 0
    limit: float | None = None
    interleaved: bool = False
    cubic: float = 0

    def __post_init__(self) -> None:
        for name, number in (("alpha", self.alpha), ("beta", self.beta)):
            if not is_finite(number):
                raise ValueError(f"SwiGLU: {name} must be finite, got {number!r}")
        limit = self.limit
        if limit is not None and not (is_number(limit) and limit > 0):
            raise ValueError(f"SwiGLU: limit must be None or a positive float, got {limit!r}")
        if not isinstance(self.interleaved, bool):
            raise ValueError(f"SwiGLU: interleaved must be True or False, got {self.interleaved!r}")
        cubic = self.cubic
        if not (is_finite(cubic) and cubic >= 0):
            raise ValueError(f"SwiGLU: cubic must be finite and not negative, got {cubic!r}")
        keep_constants(self, "alpha", "beta", "limit", "cubic")

    @property
    def swiglu(self) -> "SwiGLU | None":
        """Itself; None of a subclass, whose own methods are called."""
        return self if type(self) is SwiGLU else None

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """h, in torch's operations."""
        g, u = self._clamped(gate_up_RG)
        return g * torch.sigmoid(self.alpha * (g + self.cubic * g**3)) * (u + self.beta)

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        """The gradient by gate and up; zero where the limit clamps them."""
        g, u = self._clamped(gate_up_RG)
        s = torch.sigmoid(self.alpha * (g + self.cubic * g**3))
        slope = self.alpha * (1 + 3 * self.cubic * g**2)
        d_gate = dh_RF * (u + self.beta) * s * (1 + g * slope * (1 - s))
        d_up = dh_RF * g * s
        if self.limit is not None:
            gate, up = self.split(gate_up_RG)
            d_gate = d_gate.masked_fill(gate > self.limit, 0)
            d_up = d_up.masked_fill(up.abs() > self.limit, 0)
        if self.interleaved:
            return torch.stack([d_gate, d_up], dim=2).flatten(1)
        return torch.cat([d_gate, d_up], dim=1)

    def split(self, gate_up_RG: Tensor) -> tuple[Tensor, Tensor]:
        """Views of gate and of up, [R, F] each."""
        if self.interleaved:
            return gate_up_RG[:, 0::2], gate_up_RG[:, 1::2]
        gate, up = gate_up_RG.chunk(2, dim=1)
        return gate, up

    def _clamped(self, gate_up_RG: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.split(gate_up_RG)
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)

    @property
    def arguments(self) -> tuple[float, float, float | None, bool, float]:
        """The arguments of ops: alpha, beta, limit, interleaved, cubic; constants for Dynamo."""
        if not torch.compiler.is_compiling():
            return self.alpha, self.beta, self.limit, self.interleaved, self.cubic
        alpha, beta, limit, cubic = (constant(self, n) for n in ("alpha", "beta", "limit", "cubic"))
        return alpha, beta, limit, self.interleaved, cubic


PLAIN = SwiGLU()
# gelu(gate, approximate="tanh") * up: alpha is 2 * sqrt(2 / pi).
GELU_TANH = SwiGLU(alpha=1.5957691216057308, cubic=0.044715)


@dataclass(frozen=True)
class GeGLU(Activation):
    """``gelu(gate) * up``, gate the first half and up the second, as Gemma 4 has it.

    Args:
        approximate: ``"none"`` or ``"tanh"``, as torch.nn.functional.gelu takes it. Gemma 4's is
            ``"tanh"``, which is a form of :class:`grouped_linear.SwiGLU`: the layer computes it as
            such, fused with what is before or after it. In float32 the result may differ by
            rounding from that of the methods here, which are torch's operations.

    Raises:
        ValueError: for another ``approximate``.

    >>> GeGLU("tanh").forward(torch.tensor([[1.0, 2.0]]))  # gelu(1) * 2
    tensor([[1.6824]])
    """

    approximate: Literal["none", "tanh"] = "none"

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise ValueError(
                f"GeGLU: approximate must be 'none' or 'tanh', got {self.approximate!r}"
            )

    @property
    def swiglu(self) -> SwiGLU | None:
        """With tanh a form of SwiGLU."""
        return GELU_TANH if type(self) is GeGLU and self.approximate == "tanh" else None

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """``gelu(gate) * up``."""
        gate, up = gate_up_RG.chunk(2, dim=1)
        return torch.nn.functional.gelu(gate, approximate=self.approximate) * up

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        """``dh * up * gelu'(gate)``, then ``dh * gelu(gate)``."""
        gate, up = gate_up_RG.chunk(2, dim=1)
        d_gate = torch.ops.aten.gelu_backward(dh_RF * up, gate, approximate=self.approximate)
        d_up = dh_RF * torch.nn.functional.gelu(gate, approximate=self.approximate)
        return torch.cat([d_gate, d_up], dim=1)


@dataclass(frozen=True)
class SquaredReLU(Activation):
    """``relu(up) ** 2``, without a gate, as Nemotron-H has it.

    >>> SquaredReLU().forward(torch.tensor([[-1.0, 3.0]]))
    tensor([[0., 9.]])
    """

    gated = False

    def forward(self, gate_up_RG: Tensor) -> Tensor:
        """``relu(up) ** 2``."""
        return gate_up_RG.relu().square()

    def backward(self, dh_RF: Tensor, gate_up_RG: Tensor) -> Tensor:
        """``2 * dh * relu(up)``."""
        return 2 * dh_RF * gate_up_RG.relu()


class SwigluQuantized(NamedTuple):
    """The results of :func:`group_quantize_swiglu`; None for one that was not requested.

    q, scale, q_t and scale_t are those of h, as :class:`GroupQuantized` has them; h [T, K] has
    gate_up's dtype.
    """

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    h: Tensor | None


class SwigluGrad(NamedTuple):
    """The results of :func:`swiglu_grad`.

    d_gate_up [T, 2 K] and the weighted h [T, K] have dh's dtype; d_weight is [T] float32.
    """

    d_gate_up: Tensor
    h: Tensor
    d_weight: Tensor


class SwigluGradQuantized(NamedTuple):
    """The results of :func:`group_quantize_swiglu_grad`; None for one that was not requested.

    The first five are those of d_gate_up [T, 2 K], the next two the q_t and scale_t of h [T, K], as
    :class:`GroupQuantized` has them; then the weighted h [T, K] of dh's dtype, and d_weight [T]
    float32.
    """

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    bias_grad: Tensor | None
    h_t: Tensor | None
    scale_h_t: Tensor | None
    h: Tensor | None
    d_weight: Tensor


def swiglu(gate_up: Tensor, offs: Tensor, activation: SwiGLU = PLAIN) -> Tensor:
    """The gated activation between the two linear layers of an expert.

    ``h = silu(gate) * up``, with gate = gate_up[:, :K] and up = gate_up[:, K:], is computed in
    float32 and rounded once, with the same bits on CPU and GPU.

    Args:
        gate_up: [T, 2 K] bfloat16, float16 or float32, K a multiple of 16.
        offs: [E] int32 group ends.
        activation: another form, see :class:`grouped_linear.SwiGLU`.

    Returns: [T, K]; zero at and past offs[-1].

    >>> gate_up = torch.cat([torch.zeros(2, 16), torch.ones(2, 16)], dim=1)
    >>> swiglu(gate_up + 1, torch.tensor([1], dtype=torch.int32))[:, 0]  # silu(1) * 2
    tensor([1.4621, 0.0000])
    """
    return OPS.swiglu(gate_up, offs, *activation.arguments)


def swiglu_grad(
    dh: Tensor, gate_up: Tensor, weight: Tensor, offs: Tensor, activation: SwiGLU = PLAIN
) -> SwigluGrad:
    """The backward of an expert's activation, whose output row t is weighted by weight[t].

    dh is the gradient by h = swiglu(gate_up) of the unweighted output. With the names of
    :class:`grouped_linear.SwiGLU` and s = 1 / (1 + exp(-alpha * (g + cubic * g**3)))::

        slope    = s * (1 + alpha * (g + 3 * cubic * g**3) * (1 - s))
        d_gate   = weight * dh * (u + beta) * slope    where gate <= limit, else 0
        d_up     = weight * dh * g * s                 where abs(up) <= limit, else 0
        h        = weight * swiglu(gate_up)
        d_weight = (dh * swiglu(gate_up)).sum(dim=1)   in a fixed order

    All are computed in float32 and rounded once. d_gate_up and h have the same bits on CPU and GPU.

    Args:
        dh: [T, K] bfloat16, float16 or float32, K a multiple of 16.
        gate_up: [T, 2 K] of dh's dtype.
        weight: [T] float32. Ones give the gradient of :func:`swiglu` itself.
        offs: [E] int32 group ends.
        activation: see :func:`swiglu`.

    Returns:
        d_gate_up [T, 2 K], laid out as gate_up is; h [T, K]; d_weight [T] float32. All are zero at
        and past offs[-1], whatever the arguments hold there.

    >>> grads = swiglu_grad(
    ...     torch.ones(1, 16), torch.ones(1, 32), torch.full((1,), 2.0), torch.tensor([1]).int())
    >>> grads.h[0, 0], grads.d_weight  # 2 * silu(1), 16 * silu(1)
    (tensor(1.4621), tensor([11.6969]))
    """
    return SwigluGrad(*OPS.swiglu_grad(dh, gate_up, weight, offs, *activation.arguments))


def group_quantize_swiglu(
    gate_up: Tensor,
    offs: Tensor,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    keep_h: bool = False,
    share_scales: bool = False,
    activation: SwiGLU = PLAIN,
) -> SwigluQuantized:
    """:func:`group_quantize` of h = :func:`swiglu` of gate_up [T, 2 K], with the same bits.

    In bfloat16 it is one pass, which does not write h; on a GPU other dtypes take two. With
    ``keep_h`` it returns h [T, K] too, zero at and past offs[-1].

    >>> gate_up, offs = torch.randn(10, 128), torch.tensor([3, 10], dtype=torch.int32)
    >>> quantized = group_quantize_swiglu(gate_up, offs, columnwise=True)
    >>> quantized.q.shape, quantized.q_t.shape
    (torch.Size([10, 64]), torch.Size([2, 64, 128]))
    """
    scaling, flags = (amax_epsilon, power_of_two_scales), (rowwise, columnwise, keep_h)
    outputs = OPS.group_quantize_swiglu(
        gate_up, offs, *scaling, *flags, share_scales, *activation.arguments
    )
    return SwigluQuantized(*requested(outputs, rowwise, columnwise, keep_h))


def group_quantize_swiglu_grad(
    dh: Tensor,
    gate_up: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    amax_epsilon: float = 0,
    power_of_two_scales: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    bias_grad: bool = False,
    h_columnwise: bool = False,
    keep_h: bool = False,
    share_h_scales: bool = False,
    activation: SwiGLU = PLAIN,
) -> SwigluGradQuantized:
    """:func:`group_quantize` of d_gate_up = :func:`swiglu_grad` [T, 2 K], with the same bits.

    ``h_columnwise`` returns the columnwise data of the weighted h [T, K] too, with
    ``share_h_scales`` as ``share_scales``; ``keep_h`` returns h itself, whose rows at and past
    offs[-1] hold anything. On a GPU it is one pass in bfloat16, if K is a multiple of 128, rows are
    aligned to 16 bytes, gate and up are not interleaved, and one of the two is asked for at most.

    >>> dh, gate_up, offs = torch.randn(10, 64), torch.randn(10, 128), torch.tensor([3, 10]).int()
    >>> dy = group_quantize_swiglu_grad(dh, gate_up, torch.rand(10), offs, h_columnwise=True)
    >>> dy.q.shape, dy.h_t.shape
    (torch.Size([10, 128]), torch.Size([2, 64, 128]))
    """
    scaling = amax_epsilon, power_of_two_scales
    flags = rowwise, columnwise, bias_grad, h_columnwise, keep_h, share_h_scales
    *outputs, h_t, scale_h_t, h, d_weight = OPS.group_quantize_swiglu_grad(
        dh, gate_up, weight, offs, *scaling, *flags, *activation.arguments
    )
    q, scale, q_t, scale_t, grad = requested(outputs, rowwise, columnwise, bias_grad)
    h_t, scale_h_t = (h_t, scale_h_t) if h_columnwise else (None, None)
    h = h if keep_h else None
    return SwigluGradQuantized(q, scale, q_t, scale_t, grad, h_t, scale_h_t, h, d_weight)
