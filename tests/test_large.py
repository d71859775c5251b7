# SPDX-License-Identifier: Apache-2.0
"""Tensors of more than 2^31 elements: their last rows and experts are what they are by themselves.

T rows, E groups, K in_features, N out_features.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_linear import Float8BlockScaling, GroupedLinear, ops
from support.compare import assert_same_bits
from support.devices import HAS_GPU, needs_gpu
from support.tensors import BF16, FP32

_ops = torch.ops.grouped_linear

K = N = 4096
T = 2**19 + 5000
LAST = 300
SIZES = (T - 2000, 0, 1000, LAST)  # and 700 rows past the last group
BEGIN, END = sum(SIZES[:-1]), sum(SIZES)
BLOCKS = tuple(-(-size // 128) for size in SIZES)
EXPERTS = 136  # where weights are large
assert min(T * K, EXPERTS * N * K) > 2**31

GB = 2**30
CPU_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CORES = os.cpu_count() or 1
GPU_MEMORY = torch.cuda.mem_get_info()[1] if HAS_GPU else 0
ON_CPU = pytest.mark.skipif(
    CPU_MEMORY < 100 * GB or CORES < 12, reason="needs 100 GB of memory and 12 cores"
)
ON_GPU = [needs_gpu, pytest.mark.skipif(GPU_MEMORY < 70 * GB, reason="needs a GPU of 70 GB")]
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)]
)


@pytest.fixture(autouse=True)
def alone(few_threads: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With all threads, and no other of these tests at a time: there is memory for one."""
    torch.set_num_threads(CORES)
    with open(tmp_path_factory.getbasetemp().parent / "test_large.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if HAS_GPU:
            torch.cuda.empty_cache()


def draw(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Some random numbers again and again: to draw so many takes a CPU minutes."""
    some = torch.randn(2**20 + 1, device=device).to(dtype)
    x = torch.empty(shape, dtype=dtype, device=device)
    for part in x.view(-1).split(len(some)):
        part.copy_(some[: len(part)])
    return x


def offs_of(device: str, *sizes: int) -> Tensor:
    return ops.splits_to_offsets(torch.tensor(sizes, device=device), T)


def of_last(t: Any) -> Any:
    """The part of rows, columns, blocks, sizes or experts that belongs to the last group."""
    if not isinstance(t, Tensor) or t.numel() == 0:
        return LAST if t is T else t
    if t.dtype == torch.int32:
        return offs_of(str(t.device), LAST)
    if len(t) == T:
        return t[BEGIN:END]
    if len(t) == len(SIZES):
        return t[-1:]
    if t.shape[-1] == T:  # T and LAST are multiples of 4
        return t[:, BEGIN:END]
    return t[sum(BLOCKS[:-1]) : sum(BLOCKS)]


def check(op: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """Calls op with all groups, and with the last one by itself; its results of all groups."""
    whole, alone = op(*args), op(*map(of_last, args))
    if isinstance(whole, Tensor):
        whole, alone = (whole,), (alone,)
    for all_groups, last in zip(whole, alone, strict=True):
        assert_same_bits(of_last(all_groups), last)
    return tuple(whole)


@DEVICES
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_quantized_rows(device: str, dtype: torch.dtype) -> None:
    x, offs = draw(device, T, K, dtype=dtype), offs_of(device, *SIZES)
    scale = torch.tensor([1.0, 2.0, 0.5, 0.01], device=device)
    both = {"columnwise": True, "bias_grad": True}
    e4m3 = torch.float8_e4m3fn
    q, q_scale, q_t, scale_t, _ = check(partial(_ops.group_quantize, **both), x, offs)
    check(_ops.group_dequantize, q, q_scale, offs, dtype)
    check(_ops.group_dequantize_t, q_t, scale_t, offs, T, dtype)
    order = torch.arange(T, device=device)
    gathered = _ops.group_quantize(x, offs, order, **both)
    assert_same_bits(of_last(gathered[0]), of_last(q))
    assert_same_bits(of_last(gathered[2]), of_last(q_t))
    del q, q_t, gathered
    check(partial(_ops.group_quantize_current, **both), x, offs, e4m3)
    check(partial(_ops.group_quantize_delayed, **both), x, offs, scale, None, e4m3)
    check(partial(_ops.group_quantize_mx, **both), x, offs)
    check(partial(_ops.group_round_mx, **both), x, offs)
    check(_ops.grouped_bias_grad, x, offs)


@DEVICES
def test_swiglu_and_sums(device: str) -> None:
    gate_up, dh, offs = draw(device, T, K), draw(device, T, K // 2), offs_of(device, *SIZES)
    check(_ops.swiglu, gate_up, offs)
    weight = draw(device, T, dtype=FP32)
    check(_ops.swiglu_grad, dh, gate_up, weight, offs)
    check(partial(_ops.group_quantize_swiglu, columnwise=True, keep_h=True), gate_up, offs)
    every = {"columnwise": True, "bias_grad": True, "h_columnwise": True}
    check(partial(_ops.group_quantize_swiglu_grad, **every), dh, gate_up, weight, offs)
    rows = torch.tensor([[T - 1, 5], [T - 2, T - 1]], device=device)
    taken = gate_up[rows].float()
    sums, dots = ops.gather_sum(gate_up, rows), ops.gather_dot(gate_up[:2], gate_up, rows)
    torch.testing.assert_close(sums, taken.sum(1).to(BF16))
    spread = ops.scatter_rows(gate_up[:2], rows, T)
    assert torch.equal(spread[[5, T - 2]], gate_up[:2])
    torch.testing.assert_close(dots, (gate_up[:2, None].float() * taken).sum(-1), rtol=0, atol=0.1)


@DEVICES
def test_products_of_many_rows(device: str) -> None:
    features = N if device == "cuda" else 16
    offs = offs_of(device, *SIZES)
    w = draw(device, len(SIZES), features, K)
    x = draw(device, T, K)
    y, *_ = check(_ops.grouped_mm, x, w.mT, offs)
    assert not y[END:].any()
    dx, *_ = check(_ops.grouped_mm, y, w, offs)
    assert not dx[END:].any()
    del dx
    dw = ops.grouped_mm_wgrad(y, x, offs)[-1:]
    torch.testing.assert_close(dw, ops.grouped_mm_wgrad(of_last(y), of_last(x), of_last(offs)))
    del y

    layers = []
    for rows, weight, sizes in ((x, w, SIZES), (of_last(x), w[-1:], (LAST,))):
        form = (len(sizes), K, features)
        layer = GroupedLinear(*form, bias=False, recipe=Float8BlockScaling(), dtype=BF16)
        layer.weight = torch.nn.Parameter(weight)
        leaf = rows.detach().requires_grad_()
        out = layer(leaf, torch.tensor(sizes, device=device))
        dy = torch.ones(1, 1, dtype=BF16, device=device).expand_as(out)
        out.backward(dy)
        assert leaf.grad is not None
        assert layer.weight.grad is not None
        layers.append((out.detach(), leaf.grad, layer.weight.grad))
    (out, dx, dw), alone = layers
    assert not out[END:].any()
    assert not dx[END:].any()
    for whole, last in zip((out, dx, dw), alone, strict=True):
        assert_same_bits(of_last(whole), last)


@DEVICES
def test_many_weights(device: str) -> None:
    sizes = [20 if device == "cuda" else 1] * EXPERTS
    rows, offs, alone = sizes[0], offs_of(device, *sizes), offs_of(device, sizes[0])
    w, x, dy = (
        draw(device, EXPERTS, N, K),
        draw(device, sum(sizes), K),
        draw(device, sum(sizes), N),
    )
    last_x, last_dy, last_w = x[-rows:], dy[-rows:], w[-1:]

    def same(whole: Tensor, last: Tensor) -> None:
        assert_same_bits(whole[-len(last) :], last)

    same(ops.grouped_mm(x, w.mT, offs), ops.grouped_mm(last_x, last_w.mT, alone))
    same(ops.grouped_mm(dy, w, offs), ops.grouped_mm(last_dy, last_w, alone))
    for dtype in (BF16, FP32):
        dw = ops.grouped_mm_wgrad(dy, x, offs, dtype)
        last_dw = ops.grouped_mm_wgrad(last_dy, last_x, alone, dtype)
        same(dw, last_dw)
    ops.grouped_mm_wgrad_(dw, dy, x, offs)
    torch.testing.assert_close(dw[-1:], 2 * last_dw)
    del dw, last_dw

    for quantize in (
        ops.quantize_weight,
        ops.quantize_weight_current,
        lambda w: ops.quantize_weight_list(list(w)),
    ):
        for whole, last in zip(quantize(w), quantize(last_w), strict=True):
            same(whole, last)
    wq, last_wq = ops.quantize_weight(w), ops.quantize_weight(last_w)
    del w
    columnwise = {"columnwise": True}
    (xq, dyq), (last_xq, last_dyq) = (
        [_ops.group_quantize(t, ends, **columnwise) for t in operands]
        for operands, ends in (((x, dy), offs), ((last_x, last_dy), alone))
    )
    y = ops.grouped_scaled_mm(xq[0], wq.q.mT, xq[1], wq.scale.mT, offs)
    last_w = last_wq.q.mT, last_wq.q_t.mT
    same(y, ops.grouped_scaled_mm(last_xq[0], last_w[0], last_xq[1], last_wq.scale.mT, alone))
    dx = ops.grouped_scaled_mm(dyq[0], wq.q_t.mT, dyq[1], wq.scale, offs)
    last_dx = ops.grouped_scaled_mm(last_dyq[0], last_w[1], last_dyq[1], last_wq.scale, alone)
    same(dx, last_dx)
    dw = ops.grouped_scaled_mm_wgrad(dyq[2], xq[2], dyq[3], xq[3], offs, FP32)
    last_dw = ops.grouped_scaled_mm_wgrad(
        last_dyq[2], last_xq[2], last_dyq[3], last_xq[3], alone, FP32
    )
    same(dw, last_dw)
