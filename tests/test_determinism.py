# SPDX-License-Identifier: Apache-2.0
"""The same inputs give the same bits with every number of threads; test_ops.py calls twice."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from grouped_linear import ops
from support.cases import distinct_variants
from support.check import poison_freed_memory
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import needs_gpu
from support.graphs import captured
from support.groups import GROUPS
from support.op_info import Sample
from support.ops import OPS
from support.samples import specified, variant_of
from support.tensors import BF16, FP32

# GEMMs of operands that are not FP8. On CPU they are torch's, whose bits depend on the number of
# threads, for BF16 as for float32 (torch 2.13, Xeon with AMX, 1 against 2 threads: [700, 2880] @
# [2880, 144] and [1000, 2880] @ [2880, 144] differ in BF16). So no test asserts them.
TORCH_GEMMS = {op for op in OPS if op.startswith("grouped_mm")}

# FP8 GEMMs. On a CPU without BF16 units they are torch's float32 GEMM of dequantized operands.
FP8_GEMMS = {op for op in OPS if op.startswith(("grouped_scaled_mm", "block_scaled_linear"))}
# Rows that threads share unevenly: within a group, over empty ones, one to each of many.
FEW_GROUPS = ("unaligned", "empty_middle", "capacity", "two_groups", "17_groups")
needs_bf16_units = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="needs a CPU with AVX-512 BF16"
)


def run(sample: Sample, device: str, threads: int = 1) -> list[Tensor]:
    torch.set_num_threads(threads)
    poison_freed_memory(device)
    return specified(sample, sample.results(device))


def cases_of_threads(op: str) -> list[tuple[str, str]]:
    """All of the few groups, and all variants that are more than numbers, in turn."""
    variants = distinct_variants(op)
    length = max(len(FEW_GROUPS), len(variants))
    return [(FEW_GROUPS[i % len(FEW_GROUPS)], variants[i % len(variants)]) for i in range(length)]


@pytest.mark.parametrize(
    ("op", "groups", "variant"),
    [
        pytest.param(op, groups, variant, marks=needs_bf16_units if op in FP8_GEMMS else ())
        for op in OPS
        if op not in TORCH_GEMMS
        for groups, variant in cases_of_threads(op)
    ],
)
def test_thread_counts_give_the_same_bits(op: str, groups: str, variant: str) -> None:
    sample = variant_of(op, GROUPS[groups], variant, BF16)
    expected = run(sample, "cpu", threads=1)
    for _ in range(3):  # on a busy machine two threads do not always meet
        assert_all_same_bits(run(sample, "cpu", threads=2), expected)


def fp8_gemms(out_dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Calls in which every thread computes.

    A task is a part of 384 x 256 of the result: there are 15 in fprop, 55 in dgrad and 99 in wgrad.
    A sum has 22 k-blocks in fprop, 5 in dgrad, and 5, 1 or 6 in wgrad.
    """
    T, E, K, N = 1412, 3, 2816, 560
    offs = torch.tensor([600, 700, T], dtype=torch.int32)
    x, dy, w = torch.randn(T, K), torch.randn(T, N), torch.randn(E, N, K)
    q = ops.group_quantize(x, offs, power_of_two_scales=False, columnwise=True)
    d = ops.group_quantize(dy, offs, power_of_two_scales=False, columnwise=True)
    w_q, scale_w, w_t = ops.quantize_weight(w, power_of_two_scales=False)
    grad = torch.randn(E, N, K, dtype=FP32).to(out_dtype)
    wgrad = (d.q_t, q.q_t, d.scale_t, q.scale_t, offs)

    def accumulated_wgrad() -> Tensor:
        main_grad = grad.clone()
        torch.ops.grouped_linear.grouped_scaled_mm_wgrad_(main_grad, *wgrad)
        return main_grad

    return {
        "fprop": lambda: ops.grouped_scaled_mm(
            q.q, w_q.mT, q.scale, scale_w.mT, offs, out_dtype=out_dtype
        ),
        "fprop_of_reversed_k_blocks": lambda: ops.grouped_scaled_mm(
            q.q.view(torch.uint8).view(T, -1, 128).flip(1).view(T, K).view(q.q.dtype),
            w_q.view(torch.uint8).view(E, N, -1, 128).flip(2).view(E, N, K).view(w_q.dtype).mT,
            q.scale.flip(0),
            scale_w.flip(2).mT,
            offs,
            out_dtype=out_dtype,
        ),
        "dgrad": lambda: ops.grouped_scaled_mm(
            d.q, w_t.mT, d.scale, scale_w, offs, out_dtype=out_dtype
        ),
        "wgrad": lambda: ops.grouped_scaled_mm_wgrad(*wgrad, out_dtype=out_dtype),
        "accumulated_wgrad": accumulated_wgrad,
    }


@needs_bf16_units
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", ["fprop", "dgrad", "wgrad", "accumulated_wgrad"])
def test_large_fp8_gemms_give_the_same_bits(name: str, out_dtype: torch.dtype) -> None:
    gemm = fp8_gemms(out_dtype)[name]
    torch.set_num_threads(1)
    expected = gemm()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads  # else this would pass by accident
        assert_same_bits(gemm(), expected)


@needs_gpu
@pytest.mark.parametrize(
    "operands",
    [
        "16 bits",
        "transposed weight",
        "gathered rows",
        "adapter",
        "blocks",
        "gathered blocks",
        "SwiGLU",
        "gathered rows, gradient of SwiGLU",
    ],
)
def test_gemms_that_share_the_gpu(operands: str) -> None:
    """Clusters of a persistent kernel start late where another kernel holds their SMs.

    On sm_90 each of the two products then has a counter of tiles, in memory that a replay finds as
    the replay before left it. What is expected is computed 2048 rows at a time, in too few tiles
    for that.
    """
    T, E, K, N = 16384, 8, 2048, 3072
    x = torch.randn(T, K, device="cuda", dtype=BF16)
    w = torch.randn(E, N, K, device="cuda", dtype=BF16)
    low = torch.randn(T, 16, device="cuda", dtype=BF16)
    up = torch.randn(E, 16, N, device="cuda", dtype=BF16)
    gate_up = torch.randn(T, 2 * N, device="cuda", dtype=BF16)
    numbers, ones = torch.randperm(T, device="cuda"), torch.ones(T, device="cuda")
    offs = torch.zeros(E, device="cuda", dtype=torch.int32)
    all_rows = torch.tensor([T], device="cuda", dtype=torch.int32)
    # Long and few tiles hold some SMs. Once these are free, the stream with priority takes them.
    long_x = torch.randn(256, 32768, device="cuda", dtype=BF16)
    long_w = torch.randn(1, 1024, 32768, device="cuda", dtype=BF16)
    long_offs = torch.tensor([256], device="cuda", dtype=torch.int32)
    holding, side = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def product(rows: slice, experts: slice, offs: Tensor) -> Tensor:
        if operands.endswith("blocks"):
            w_q, scale, _ = ops.quantize_weight(w[experts])
            if operands == "gathered blocks":
                q, of_rows = ops.group_quantize(x, all_rows), numbers[rows]
            else:
                q, of_rows = ops.group_quantize(x[rows], offs), None
            return ops.grouped_scaled_mm(q.q, w_q.mT, q.scale, scale.mT, offs, rows=of_rows)
        b = w[experts].mT
        if operands in ("transposed weight", "gathered rows, gradient of SwiGLU"):
            b = b.contiguous()
        if operands == "SwiGLU":
            return ops.grouped_mm_swiglu(x[rows], b, offs).h
        if operands == "gathered rows, gradient of SwiGLU":
            return ops.grouped_mm_swiglu_grad(
                x, b, gate_up[rows], ones[rows], offs, numbers[rows]
            ).d_gate_up
        if operands == "gathered rows":
            return ops.grouped_mm(x, b, offs, rows=numbers[rows])
        if operands == "adapter":
            return ops.grouped_mm(x[rows], b, offs, a_low=low[rows], b_low=up[experts])
        return ops.grouped_mm(x[rows], b, offs)

    def expected(ends: list[int]) -> Tensor:
        y = torch.zeros_like(results[0])
        for e, (begin, end) in enumerate(pairwise([0, *ends])):
            for first in range(begin, end, 2048):
                rows = slice(first, min(first + 2048, end))
                count = torch.tensor([rows.stop - first], device="cuda", dtype=torch.int32)
                y[rows] = product(rows, slice(e, e + 1), count)
        return y

    def both() -> tuple[Tensor, Tensor]:
        holding.wait_stream(torch.cuda.current_stream())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(holding):
            ops.grouped_mm(long_x, long_w.mT, long_offs)
        result = product(slice(T), slice(E), offs)
        with torch.cuda.stream(side):
            beside = product(slice(T), slice(E), offs)
        torch.cuda.current_stream().wait_stream(holding)
        torch.cuda.current_stream().wait_stream(side)
        return result, beside

    graph, results = captured(both)
    for ends in (
        [1000, 4000, 4001, 4100, 9000, 9500, 16000, 16384],
        [0] * 8,
        [0, 0, T, T, T, T, T, T],
        [100, 200, 300, 400, 500, 600, 700, 800],
        [0, 5000, 5000, 5000, 13000, 13000, 13001, 13001],
    ):
        offs.copy_(torch.tensor(ends))
        y = expected(ends)
        assert y.isfinite().all()
        for _ in range(3):
            poison_freed_memory("cuda")
            graph.replay()
            for result in (*results, *both()):
                assert torch.equal(result, y)
                result.fill_(torch.nan)  # which the next calls find


@needs_bf16_units
def test_another_order_of_sums_has_other_bits() -> None:
    """Else the comparison of thread counts would prove nothing."""
    gemms = fp8_gemms(FP32)
    expected, reordered = gemms["fprop"](), gemms["fprop_of_reversed_k_blocks"]()
    torch.testing.assert_close(reordered, expected, rtol=1e-4, atol=1e-3)
    assert not torch.equal(reordered, expected)


@needs_gpu
@pytest.mark.parametrize("operands", ["16 bits", "transposed weight", "blocks", "groups"])
def test_a_row_on_a_gpu_has_the_same_bits_among_few_rows_and_many(operands: str) -> None:
    """The portable kernels have other tiles where groups have few rows on average."""
    T, E, K, N = 107, 4, 1056, 528
    ends = [21, 21, 60, T]  # of T rows or of more, which belong to no group
    x = torch.randn(1024, K, device="cuda", dtype=BF16)
    w = torch.randn(E, N, K, device="cuda", dtype=BF16)
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    scales = torch.rand(2, E, device="cuda")

    def product(a: Tensor) -> Tensor:
        if operands == "16 bits":
            return ops.grouped_mm(a, w.mT, offs)
        if operands == "transposed weight":
            return ops.grouped_mm(a, w.mT.contiguous(), offs)
        if operands == "blocks":
            q, (w_q, w_scale, _) = ops.group_quantize(a, offs), ops.quantize_weight(w)
            return ops.grouped_scaled_mm(q.q, w_q.mT, q.scale, w_scale.mT, offs)
        a_q, w_q = (t.to(torch.float8_e4m3fn) for t in (a, w))
        return ops.grouped_scaled_mm(a_q, w_q.mT, *scales, offs)

    few, many = product(x[:T]), product(x)
    assert few.isfinite().all()
    assert_same_bits(few, many[:T])
    assert not many[T:].any()
