"""Arithmetic of 128x128 blocks, for a weight that is kept quantized.

N out_features, K in_features; shapes are those of one expert, or of E experts with a leading E.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_linear import ops
from grouped_linear.meta_kernels.rules import BLOCK, E4M3
from grouped_linear.recipes import Float8BlockScaling


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size."""
    stride = [1]
    for n in reversed(size[1:]):
        stride.append(stride[-1] * n)
    return tuple(reversed(stride))


def transposed(q: Tensor) -> Tensor:
    """A transposed copy of q [..., N, K], as dgrad reads it: [..., K, N]."""
    return ops.transpose_weight(q) if q.dim() == 3 else ops.transpose_weight(q[None])[0]


def multiply_(w: Tensor, scale: Tensor) -> Tensor:
    """Multiply w [..., N, K] by the scales of its blocks, in place.

    >>> multiply_(torch.ones(144, 16), torch.tensor([[2.0], [3.0]]))[[127, 128], 0]
    tensor([2., 3.])
    """
    *_, N, K = w.shape
    whole = N // BLOCK
    per_column = scale[..., None].expand(*scale.shape, BLOCK).flatten(-2)[..., :K]
    w[..., : whole * BLOCK, :].unflatten(-2, (-1, BLOCK)).mul_(per_column[..., :whole, None, :])
    if N % BLOCK:
        w[..., whole * BLOCK :, :].mul_(per_column[..., whole:, :])
    return w


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``q * scale`` of each block, rounded once: every dtype holds all e4m3 numbers."""
    return multiply_(q.to(dtype), scale)


def round_stochastically(v: Tensor) -> Tensor:
    """Round float32 to e4m3, up with the probability that makes the expected value exact.

    A float32 has 20 more mantissa bits than an e4m3. A random number of 20 bits is added to them,
    then they are cut off.

    >>> torch.manual_seed(0) and round_stochastically(torch.full((1000,), 17.0)).float().unique()
    tensor([16., 18.])
    """
    smallest, dropped = 2.0**-6, 20  # the smallest normal number
    magnitude = v.abs()
    # Subnormal numbers have the spacing of the smallest normal ones: shift them up there to round.
    lift = (magnitude < smallest).to(v.dtype) * smallest
    bits = (magnitude + lift).view(torch.int32)
    noise = torch.randint(1 << dropped, v.shape, dtype=torch.int32, device=v.device)
    rounded = ((bits + noise) >> dropped << dropped).view(torch.float32) - lift
    rounded = rounded.clamp(max=torch.finfo(E4M3).max).copysign(v)
    return torch.where(v.isfinite(), rounded, torch.nan).to(E4M3)


def quantize_(
    q: Tensor,
    scale: Tensor,
    q_t: Tensor | None,
    w: Tensor,
    recipe: Float8BlockScaling,
    stochastic: bool,
) -> None:
    """Quantize w into the memory of q, scale and q_t."""
    if q.dim() == 2:
        q, scale, w = q[None], scale[None], w[None]
        q_t = None if q_t is None else q_t[None]
    w = w.detach().contiguous()
    ops.refresh_weight_(q, scale, q_t, w, **recipe.weight.scale_options)
    if stochastic:
        q.copy_(round_stochastically(multiply_(w.to(torch.float32, copy=True), 1 / scale)))
        if q_t is not None:
            q_t.copy_(q.transpose(1, 2))


@torch.no_grad()
def with_blocks(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    written: Tensor,
    recipe: Float8BlockScaling,
    stochastic: bool,
) -> tuple[Tensor, Tensor]:
    """q and scale, with those blocks of w in which `written` is true anywhere."""
    *lead, N, K = q.shape
    shape = (math.prod(lead), N, K)
    old_q, old_scale = q.reshape(shape), scale.reshape(-1, *scale.shape[-2:])
    new_q, new_scale = torch.empty_like(old_q), torch.empty_like(old_scale)
    quantize_(new_q, new_scale, None, w.reshape(shape), recipe, stochastic)
    written_blocks = F.max_pool2d(written.reshape(shape).float(), BLOCK, ceil_mode=True)
    in_written_block = multiply_(torch.ones(shape, device=w.device), written_blocks).bool()
    new_q = torch.where(in_written_block, new_q.view(torch.uint8), old_q.view(torch.uint8))
    new_scale = torch.where(written_blocks.bool(), new_scale, old_scale)
    return new_q.view(E4M3).view(q.shape), new_scale.view(scale.shape)


def differentiable(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.numbers(dtype)`` of a quantized tensor; its gradient goes to the tensor."""
    return _Numbers.apply(t, dtype)


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any, dtype: torch.dtype) -> Tensor:
        ctx.dtype = t.dtype
        return t.numbers(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
