# SPDX-License-Identifier: Apache-2.0
"""How close do the quantizers, routing and sums of gathered rows come to a copy of as many bytes?

T rows, E groups, K features, N out_features.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.shapes import LAUNCH_BOUND, SPLITS, Shape, chosen_shapes, group_sizes
from grouped_linear import SwiGLU, ops

# What is asked of group_quantize: fprop without gradients, with them, and the backward's dy.
FORMS: dict[str, dict[str, bool]] = {
    "rowwise": {},
    "both layouts": {"columnwise": True},
    "both, shared scales": {"columnwise": True, "share_scales": True},
    "both + bias grad": {"columnwise": True, "bias_grad": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK = 128
CHOSEN = 8  # rows a token, where rows are sorted, gathered for experts or summed
EXPERTS = 128  # that they are sorted by
GATHERED = f"group_quantize, gathered, each row {CHOSEN} times"
# Fused input forms, both layouts: elements read for every quantized one.
FUSED = {
    "group_quantize, gathered": 1.0,
    GATHERED: 1 / CHOSEN,
    "swiglu": 2.0,
    "swiglu_grad": 1.5,
    "swiglu_grad and h": 1.5,
    "swiglu, MiniMax-M3": 2.0,
    "swiglu_grad, MiniMax-M3": 1.5,
    "swiglu_grad and h, MiniMax-M3": 1.5,
    "swiglu, GPT-OSS": 2.0,
    "swiglu_grad, GPT-OSS": 1.5,
    "swiglu_grad and h, GPT-OSS": 1.5,
}
ACTIVATIONS = {
    "MiniMax-M3": SwiGLU(alpha=1.702, beta=1.0, limit=7.0),
    "GPT-OSS": SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True),
}


def bytes_quantized(sizes: Sequence[int], K: int, element: int, form: dict[str, bool]) -> int:
    """Bytes that group_quantize must read and write: x, and what its groups fill of each output."""
    T, blocks = sum(sizes), sum(-(-size // BLOCK) for size in sizes)
    moved = T * K * element + T * K + 4 * T * -(-K // BLOCK)
    if form.get("columnwise"):
        moved += blocks * BLOCK * K + 4 * blocks * K
    if form.get("bias_grad"):
        moved += 4 * len(sizes) * K
    return moved


def fused_form(name: str, x_TK: torch.Tensor, offs_E: torch.Tensor) -> timing.Call:
    """The call of one of FUSED; what it quantizes has K features."""
    T, K = x_TK.shape
    both = {"columnwise": True}
    if name == "group_quantize, gathered":
        order = torch.randperm(T, device=x_TK.device)
        return lambda: ops.group_quantize(x_TK, offs_E, order, **both)
    if name == GATHERED:
        # Sorted stably, an expert's tokens stay in order.
        row = torch.arange(T, dtype=offs_E.dtype, device=x_TK.device)
        expert = torch.searchsorted(offs_E, row, right=True)
        token = (expert * T + torch.randperm(T, device=x_TK.device)).sort().values % T // CHOSEN
        return lambda: ops.group_quantize(x_TK[: -(-T // CHOSEN)], offs_E, token, **both)
    op, _, model = name.partition(", ")
    activation = ACTIVATIONS.get(model, SwiGLU())
    if op == "swiglu":
        gate_up = torch.randn(T, 2 * K, device=x_TK.device).to(x_TK.dtype)
        return lambda: ops.group_quantize_swiglu(gate_up, offs_E, activation=activation, **both)
    half, weight = x_TK[:, : K // 2].contiguous(), torch.rand(T, device=x_TK.device)
    both["h_columnwise"] = op == "swiglu_grad and h"
    return lambda: ops.group_quantize_swiglu_grad(
        half, x_TK, weight, offs_E, activation=activation, **both
    )


def bytes_fused(name: str, sizes: Sequence[int], K: int, element: int) -> int:
    """Bytes that one of FUSED must read and write; weights and their gradients are float32."""
    T, blocks = sum(sizes), sum(-(-size // BLOCK) for size in sizes)
    moved = bytes_quantized(sizes, K, element, {"columnwise": True})
    moved += int(T * K * element * (FUSED[name] - 1))
    if name.startswith("swiglu_grad"):
        moved += 8 * T
    if name.startswith("swiglu_grad and h"):
        moved += (BLOCK + 4) * blocks * (K // 2)
    return moved


def unfused_swiglu(x_TK: torch.Tensor, offs_E: torch.Tensor) -> dict[str, tuple[timing.Call, int]]:
    """SwiGLU of a gate_up [T, K] and its backward, written as they are, and the bytes they move."""
    T, K = x_TK.shape
    half, weight = x_TK[:, : K // 2].contiguous(), torch.rand(T, device=x_TK.device)
    element = T * K // 2 * x_TK.itemsize
    grad = partial(ops.swiglu_grad, half, x_TK, weight, offs_E)
    return {
        "swiglu, not quantized": (partial(ops.swiglu, x_TK, offs_E), 3 * element),
        "swiglu_grad, not quantized": (grad, 6 * element + 8 * T),
    }


def sums_of_rows(x_TK: torch.Tensor) -> dict[str, tuple[timing.Call, int]]:
    """Every CHOSEN rows, in any order, for one token, and the bytes that each op must move."""
    R, K = x_TK.shape
    T = R // CHOSEN
    rows = torch.randperm(R, device=x_TK.device)[: T * CHOSEN].view(T, CHOSEN)
    weight = torch.rand(T, CHOSEN, device=x_TK.device)
    numbers = (8 + 4) * T * CHOSEN  # of rows; weights, or products
    moved = (T * CHOSEN + T) * K * x_TK.itemsize + numbers
    experts = torch.randint(EXPERTS, (T, CHOSEN), device=x_TK.device)
    logits = torch.randn(T, EXPERTS, device=x_TK.device, dtype=x_TK.dtype)
    scoring: Any = {"score_function": "softmax", "normalize": True}
    weights, chosen = ops.topk_experts(logits, CHOSEN, **scoring)
    x_bf16 = x_TK[:T].bfloat16()
    d_logits, router = (x_bf16.new_ones(n, m) for n, m in ((T, EXPERTS), (EXPERTS, K)))
    return {
        "topk_experts": (
            partial(ops.topk_experts, logits, CHOSEN, **scoring),
            logits.nbytes + 12 * T * CHOSEN,
        ),
        "topk_experts_grad": (
            partial(ops.topk_experts_grad, weights, logits, chosen, **scoring),
            2 * logits.nbytes + 12 * T * CHOSEN,
        ),
        "addmm": (
            partial(ops.addmm, x_bf16, d_logits, router),
            2 * x_bf16.nbytes + d_logits.nbytes,
        ),
        "sort_by_expert": (partial(ops.sort_by_expert, experts, EXPERTS), (8 + 12) * T * CHOSEN),
        "gather_sum": (partial(ops.gather_sum, x_TK, rows, weight), moved),
        "gather_dot": (partial(ops.gather_dot, x_TK[:T], x_TK, rows), moved),
    }


def bytes_of_weight(shape: Shape, element: int) -> int:
    """Bytes that quantize_weight must read and write, both layouts."""
    E, N, K = shape.E, shape.N, shape.K
    return E * N * K * (element + 2) + 4 * E * -(-N // BLOCK) * -(-K // BLOCK)


def bytes_per_group(sizes: Sequence[int], K: int, element: int, reads: int) -> int:
    """Bytes of both layouts with a scale a group, x read so many times."""
    T, blocks = sum(sizes), sum(-(-size // BLOCK) for size in sizes)
    return T * K * (reads * element + 1) + blocks * BLOCK * K


def quantizers_of_recipes(
    x_TK: torch.Tensor, offs_E: torch.Tensor, sizes: Sequence[int]
) -> dict[str, tuple[timing.Call, int]]:
    """The other recipes' ops, both layouts, and the bytes that each must move."""
    (T, K), element = x_TK.shape, x_TK.itemsize
    scale_E, amax_E = (torch.ones(len(sizes), device=x_TK.device) for _ in range(2))
    both = {"columnwise": True}
    delayed = partial(ops.group_quantize_delayed, x_TK, offs_E, scale_E, amax_E, **both)
    mx_bytes = bytes_per_group(sizes, K, element, 1)
    return {
        "group_quantize_current": (
            partial(ops.group_quantize_current, x_TK, offs_E, **both),
            bytes_per_group(sizes, K, element, 2),
        ),
        "group_quantize_delayed": (delayed, bytes_per_group(sizes, K, element, 1)),
        "group_quantize_mx": (
            partial(ops.group_quantize_mx, x_TK, offs_E, **both),
            mx_bytes + mx_bytes // 32 - T * K * element // 32,
        ),
        "group_round_mx": (
            partial(ops.group_round_mx, x_TK, offs_E, **both),
            T * K * (element + 4),
        ),
    }


def add_nodes(report: timing.Report) -> None:
    """What one more of them costs a CUDA graph of many, where there is little to quantize."""
    sizes = group_sizes(LAUNCH_BOUND, "even")
    T, K = sum(sizes), LAUNCH_BOUND.K
    x_TK = torch.randn(T, K, dtype=torch.bfloat16, device=report.device)
    offs_E = offsets(sizes, report.device)
    for name, form in FORMS.items():
        columns = case(f"{name}, node of a graph", LAUNCH_BOUND, "even", f"[{T}, {K}]", "bf16")
        moved = bytes_quantized(sizes, K, x_TK.itemsize, form)
        candidates = {
            "copy": timing.copy_of(moved, report.device),
            "ours": partial(ops.group_quantize, x_TK, offs_E, **form),
        }
        report.add(columns, timing.time_nodes(candidates, report.rounds), moved)


def offsets(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return ops.splits_to_offsets(torch.tensor(sizes, device=device), sum(sizes))


def probe(device: torch.device) -> None:
    """Call every op that is timed, or raise the sentence that says why not."""
    ops.group_quantize(torch.ones(1, 16, device=device), offsets([1], device))
    ops.quantize_weight(torch.ones(1, 16, 16, device=device))
    ops.quantize_weight_list([torch.ones(16, 16, device=device)])
    x, offs = torch.ones(1, 16, device=device), offsets([1], device)
    timed = quantizers_of_recipes(x, offs, [1]) | sums_of_rows(x.expand(CHOSEN, -1))
    for call, _ in timed.values():
        call()


def case(op: str, shape: Shape, splits: str, size: str, dtype: str) -> dict[str, str | int]:
    where = {"op": op, "shape": shape.name, "splits": splits, "size": size}
    return {**where, "E": shape.E, "dtype": dtype}


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", help="names in benchmarks/shapes.py")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["even", "skew"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    args = parser.parse_args()
    device = timing.device_for(args.device, probe)
    report = timing.Report(
        "bench_group_quantize",
        "How close do the quantizers come to a copy of as many bytes, read and written?",
        "GB/s",
        device,
        args.rounds,
    )

    def add(
        columns: dict[str, str | int], call: timing.Call, moved: int, clone: bool = False
    ) -> None:
        candidates = {"copy": timing.copy_of(moved, device)}
        if clone:
            candidates["clone"] = timing.clone_of(moved, device)
        candidates["ours"] = call
        report.add(columns, timing.time_paired(candidates, device, report.rounds), moved)

    for shape in tqdm(chosen_shapes(args.shapes, device, args.quick), desc="shapes", disable=None):
        for dtype, splits in itertools.product(args.dtypes, args.splits):
            sizes = group_sizes(shape, splits)
            T, K, element = sum(sizes), shape.K, DTYPES[dtype].itemsize
            x_TK = torch.randn(T, K, dtype=DTYPES[dtype], device=device)
            offs_E = offsets(sizes, device)
            for name, form in FORMS.items():
                columns = case(f"group_quantize, {name}", shape, splits, f"[{T}, {K}]", dtype)
                call = partial(ops.group_quantize, x_TK, offs_E, **form)
                # The memory of a CUDA graph is there before it runs, but a CPU's may be new.
                clone = device.type == "cpu"
                add(columns, call, bytes_quantized(sizes, K, element, form), clone)
            for name, (call, moved) in quantizers_of_recipes(x_TK, offs_E, sizes).items():
                add(case(f"{name}, both layouts", shape, splits, f"[{T}, {K}]", dtype), call, moved)
            for name, (call, moved) in (sums_of_rows(x_TK) | unfused_swiglu(x_TK, offs_E)).items():
                add(case(name, shape, splits, f"[{T}, {K}]", dtype), call, moved)
            for name in FUSED:
                columns = case(f"{name}, both layouts", shape, splits, f"[{T}, {K}]", dtype)
                moved = bytes_fused(name, sizes, K, element)
                add(columns, fused_form(name, x_TK, offs_E), moved)
        for dtype in args.dtypes:
            E, _, N, K = shape[1:]
            w_ENK = torch.randn(E, N, K, dtype=DTYPES[dtype], device=device)
            columns = case("quantize_weight", shape, "", f"[{N}, {K}]", dtype)
            moved = bytes_of_weight(shape, w_ENK.itemsize)
            add(columns, partial(ops.quantize_weight, w_ENK), moved)
            columns = case("quantize_weight_list", shape, "", f"[{N}, {K}]", dtype)
            add(columns, partial(ops.quantize_weight_list, list(w_ENK)), moved)
            columns = case("quantize_weight_current", shape, "", f"[{N}, {K}]", dtype)
            call = partial(ops.quantize_weight_current, w_ENK)
            add(columns, call, w_ENK.numel() * (2 * w_ENK.itemsize + 2))
        q_ENK = torch.randint(256, shape[1:2] + shape[3:], dtype=torch.uint8, device=device)
        q_ENK = q_ENK.view(torch.float8_e4m3fn)
        columns = case("transpose_weight", shape, "", f"[{N}, {K}]", "e4m3")
        add(columns, partial(ops.transpose_weight, q_ENK), 2 * q_ENK.numel())
    if device.type == "cuda" and "bf16" in args.dtypes and not args.shapes:
        add_nodes(report)
    report.finish(args.write, mean_by=("op", "dtype"), merge=args.merge)


if __name__ == "__main__":
    main()
