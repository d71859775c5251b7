# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs in Triton, plain: a persistent loop over tiles of groups that end anywhere.

They stand beside the portable kernels (csrc/cuda/gemm/sm80), so they must take the same
instructions. `arch="sm80"` (or "sm89", which knows e4m3) does that on any GPU: Triton 3.6 and 3.7
choose layouts and instructions for that architecture (mma.sync and cp.async, no wgmma, no TMA), and
translate to PTX and machine code for the GPU at hand. TRITON_OVERRIDE_ARCH does the same for a
whole process. `instructions` says what came out.

Rows past the sum are not written: the benchmark has none. K and N are multiples of the tiles.

T rows, E groups, K in_features, N out_features.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

BLOCK = 128


class Tile(NamedTuple):
    """A tile of m x n with k at a time, and how it is computed."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    blocks: int = 1  # a multiprocessor
    upcast: bool = False  # e4m3 to float16 before the product


IN_16_BITS = (
    Tile(128, 256, 32, warps=8, stages=3),
    Tile(128, 256, 32, warps=8, stages=4),
    Tile(128, 256, 64, warps=8, stages=3),
    Tile(128, 128, 32, warps=4, stages=4, blocks=2),
    Tile(128, 128, 64, warps=4, stages=3, blocks=2),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(32, 128, 128, warps=4, stages=4, blocks=2),
    Tile(32, 64, 128, warps=4, stages=5, blocks=2),
)
IN_FP8 = tuple(
    Tile(m, 128, BLOCK, warps, stages, blocks, upcast)
    for upcast in (True, False)
    for m, warps, stages, blocks in ((128, 8, 3, 1), (128, 8, 4, 1), (64, 4, 3, 2), (32, 4, 4, 2))
)


@triton.jit
def fprop_kernel(
    a, b, y, scale_a, scale_b, offs, E, N, K, b_group, b_n, b_k, sa_k, sb_group, sb_n, sb_k,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """y[t] = a[t] @ b[e].T, dense a [T, K] and y [T, N]; scales of 1 x 128 and of 128 x 128."""
    tile = tl.program_id(0)
    n_tiles = N // BN
    first = 0
    begin = 0
    for e in range(E):
        end = tl.load(offs + e)
        m_tiles = tl.cdiv(end - begin, M)
        while tile < first + m_tiles * n_tiles:
            local = tile - first
            m0 = begin + (local % m_tiles) * M
            n0 = (local // m_tiles) * BN
            rows = m0 + tl.arange(0, M)
            rows_in = tl.minimum(rows, end - 1)
            columns = n0 + tl.arange(0, BN)
            ks = tl.arange(0, BK)
            a_at = a + rows_in.to(tl.int64)[:, None] * K + ks[None, :]
            b_at = b + columns[None, :] * b_n + ks[:, None] * b_k
            accum = tl.zeros((M, BN), tl.float32)
            for k in range(K // BK):
                a_tile = tl.load(a_at)
                b_tile = tl.load(b_at)
                if SCALED:
                    s_a = tl.load(scale_a + k * sa_k + rows_in)
                    s_b = tl.load(scale_b + (columns // 128) * sb_n + k * sb_k)
                    if UPCAST:
                        a_tile = a_tile.to(tl.float16)
                        b_tile = b_tile.to(tl.float16)
                    accum += tl.dot(a_tile, b_tile) * s_a[:, None] * s_b[None, :]
                else:
                    accum = tl.dot(a_tile, b_tile, accum)
                a_at += BK
                b_at += BK * b_k
            y_at = y + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(y_at, accum.to(y.dtype.element_ty), mask=rows[:, None] < end)
            tile += tl.num_programs(0)
        first += m_tiles * n_tiles
        begin = end
        b += b_group  # from group to group, in 64 bits
        scale_b += sb_group


@triton.jit
def wgrad_kernel(
    dy, x, dw, offs, E, N, K, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[e] = dy.T @ x over the rows of group e, dense dy [T, N], x [T, K], dw [E, N, K]."""
    tile = tl.program_id(0)
    m_tiles = N // M
    tiles = m_tiles * (K // BN)
    begin = 0
    for e in range(E):
        end = tl.load(offs + e)
        while tile < (e + 1) * tiles:
            local = tile - e * tiles
            ns = (local % m_tiles) * M + tl.arange(0, M)
            ks = (local // m_tiles) * BN + tl.arange(0, BN)
            accum = tl.zeros((M, BN), tl.float32)
            for r in range(begin, end, BK):
                rows = r + tl.arange(0, BK)
                inside = rows < end
                at = rows.to(tl.int64)
                dy_tile = tl.load(
                    dy + at[None, :] * N + ns[:, None], mask=inside[None, :], other=0.0
                )
                x_tile = tl.load(x + at[:, None] * K + ks[None, :], mask=inside[:, None], other=0.0)
                accum = tl.dot(dy_tile, x_tile, accum)
            at = dw + ns[:, None] * K + ks[None, :]
            tl.store(at, accum.to(dw.dtype.element_ty))
            tile += tl.num_programs(0)
        begin = end
        dw += N * K


@triton.jit
def scaled_wgrad_kernel(
    dy_t, x_t, dw, scale_dy, scale_x, offs, E, N, K,
    M: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same of columnwise data: dy_t [blocks, N, 128] and scale_dy [blocks, N], x's alike."""
    tile = tl.program_id(0)
    m_tiles = N // M
    tiles = m_tiles * (K // BN)
    begin = 0
    for e in range(E):
        end = tl.load(offs + e)
        blocks = tl.cdiv(end - begin, 128)
        while tile < (e + 1) * tiles:
            local = tile - e * tiles
            ns = (local % m_tiles) * M + tl.arange(0, M)
            ks = (local // m_tiles) * BN + tl.arange(0, BN)
            rows = tl.arange(0, 128)
            dy_at = dy_t + ns[:, None] * 128 + rows[None, :]
            x_at = x_t + ks[None, :] * 128 + rows[:, None]
            accum = tl.zeros((M, BN), tl.float32)
            for block in range(blocks):
                dy_tile = tl.load(dy_at)
                x_tile = tl.load(x_at)
                s_dy = tl.load(scale_dy + block * N + ns)
                s_x = tl.load(scale_x + block * K + ks)
                if UPCAST:
                    dy_tile = dy_tile.to(tl.float16)
                    x_tile = x_tile.to(tl.float16)
                accum += tl.dot(dy_tile, x_tile) * s_dy[:, None] * s_x[None, :]
                dy_at += N * 128
                x_at += K * 128
            at = dw + ns[:, None] * K + ks[None, :]
            tl.store(at, accum.to(dw.dtype.element_ty))
            tile += tl.num_programs(0)
        begin = end
        dw += N * K
        dy_t += blocks * N * 128
        x_t += blocks * K * 128
        scale_dy += blocks * N
        scale_x += blocks * K


Launch = Callable[[Tile], Any]


def programs(tile: Tile, device: torch.device) -> tuple[int]:
    if device.type == "cpu":
        return (3,)
    return (torch.cuda.get_device_properties(device).multi_processor_count * tile.blocks,)


def options(tile: Tile, arch: str | None) -> dict[str, Any]:
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    return how if arch is None else {**how, "arch": arch}


def fprop(
    y_TN: Tensor,
    a_TK: Tensor,
    b_ENK: Tensor,
    offs_E: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    arch: str | None = None,
) -> Launch:
    """A call by its tile. b may be a transposed view, and so may the scales of b be."""
    (E, N, K), scaled = b_ENK.shape, scales is not None
    scale_a, scale_b = scales if scales is not None else (a_TK, b_ENK)

    def launch(tile: Tile) -> Any:
        return fprop_kernel[programs(tile, y_TN.device)](
            a_TK, b_ENK, y_TN, scale_a, scale_b, offs_E, E, N, K, *b_ENK.stride(),
            scale_a.stride(0), *scale_b.stride(), tile.m, tile.n, tile.k, scaled, tile.upcast,
            **options(tile, arch),
        )  # fmt: skip

    return launch


def wgrad(
    dw_ENK: Tensor, dy_TN: Tensor, x_TK: Tensor, offs_E: Tensor, arch: str | None = None
) -> Launch:
    """A call by its tile."""

    def launch(tile: Tile) -> Any:
        return wgrad_kernel[programs(tile, dw_ENK.device)](
            dy_TN, x_TK, dw_ENK, offs_E, *dw_ENK.shape, tile.m, tile.n, tile.k,
            **options(tile, arch),
        )  # fmt: skip

    return launch


def scaled_wgrad(
    dw_ENK: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    scale_dy: Tensor,
    scale_x: Tensor,
    offs_E: Tensor,
    arch: str | None = None,
) -> Launch:
    """A call by its tile."""

    def launch(tile: Tile) -> Any:
        return scaled_wgrad_kernel[programs(tile, dw_ENK.device)](
            dy_t, x_t, dw_ENK, scale_dy, scale_x, offs_E, *dw_ENK.shape, tile.m, tile.n,
            tile.upcast, **options(tile, arch),
        )  # fmt: skip

    return launch


def instructions(compiled: Any) -> set[str]:
    """The kinds of tensor core instructions in a compiled kernel's PTX."""
    return set(re.findall(r"\b(wgmma|tcgen05|mma)\.", compiled.asm["ptx"]))
