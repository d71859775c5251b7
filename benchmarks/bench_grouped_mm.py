# SPDX-License-Identifier: Apache-2.0
"""How close do the grouped products come to one dense product of the same size?

T rows, E groups, K in_features, N out_features.

The first row of every case is the roof: one dense product with the same rows, N and K. Where bytes
may take longer than products (decode shapes and float32 gradients) a copy of as many bytes as the
weights have stands beside it, and the slower of the two is the roof; for low-rank factors it is a
copy of as many bytes as the rows have. "record" is the best share that public implementations
reached in the same case; public_record_h200.csv says how that was measured.

On CPU a loop over the groups stands beside ours too: of F.linear, or for FP8 of bf16 products of
the operands, dequantized first. The loop knows the sizes on the host; ours and torch's grouped
products read them where the data is.

On an H200 the default run takes minutes. It can be measured in pieces that are put together:

    python -m benchmarks.bench_grouped_mm --splits even skew
    python -m benchmarks.bench_grouped_mm --splits zipf one --merge
    python -m benchmarks.bench_grouped_mm --ops wgrad_fp32 wgrad_add_fp32 --merge
"""

import csv
import itertools
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.shapes import (
    MODEL_SHAPES,
    SPLITS,
    Shape,
    chosen_shapes,
    group_sizes,
    is_decode,
    is_low_rank,
)
from grouped_linear import ops

OPS = ("fprop", "dgrad", "wgrad")
# The weight gradient stored as float32, and added to a float32 main_grad.
FLOAT32_OPS = ("wgrad_fp32", "wgrad_add_fp32")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
BLOCK = 128
RECORD = Path(__file__).parent / "public_record_h200.csv"
# The case that is also timed back to back: large products, unequal groups.
SUSTAINED = ("dsv3_ep32_up", "skew")

# The largest relative distance (Frobenius) from the alternatives: a fast wrong product is no
# result. Two roundings to bf16 differ by about 2^-8; e4m3 rounds both operands to 4 bits, and two
# products of operands that were scaled differently are 0.053 apart (normal numbers).
CLOSE = {"bf16": 0.01, "fp32": 1e-4, "fp8": 0.07}


class Quantized(NamedTuple):
    q: Tensor  # [T, K]
    scale: Tensor  # [ceil(K/128), round_up(T, 4)]
    q_t: Tensor  # [Tp/128, K, 128]
    scale_t: Tensor  # [Tp/128, K]


def quantized(x_TK: Tensor, offs_E: Tensor, share_scales: bool = False) -> Quantized:
    q, scale, q_t, scale_t, _ = torch.ops.grouped_linear.group_quantize(
        x_TK, offs_E, columnwise=True, share_scales=share_scales
    )
    return Quantized(q, scale, q_t, scale_t)


def rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of e4m3 with one scale each, as torch._scaled_grouped_mm reads them."""
    scale = x.abs().amax(-1).float().clamp(min=1e-12) / 448
    return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


class Operands:
    """The operands of one shape and its group sizes; FP8 ones are made when first asked for."""

    def __init__(self, shape: Shape, sizes: list[int], dtype: torch.dtype, device: torch.device):
        T = sum(sizes)
        self.sizes = sizes
        self.offs_E = ops.splits_to_offsets(torch.tensor(sizes, device=device), T)
        self.x_TK = torch.randn(T, shape.K, dtype=dtype, device=device)
        self.w_ENK = torch.randn(shape.E, shape.N, shape.K, dtype=dtype, device=device)
        self.dy_TN = torch.randn(T, shape.N, dtype=dtype, device=device)

    @cached_property
    def x(self) -> Quantized:
        return quantized(self.x_TK, self.offs_E, share_scales=True)

    @cached_property
    def x_of_own_scales(self) -> Quantized:
        return quantized(self.x_TK, self.offs_E)

    @cached_property
    def dy(self) -> Quantized:
        return quantized(self.dy_TN, self.offs_E)

    @cached_property
    def main_grad_ENK(self) -> Tensor:
        return torch.zeros_like(self.w_ENK, dtype=torch.float32)

    @cached_property
    def w(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [E, N, K], scale [E, ceil(N/128), ceil(K/128)], q_t [E, K, N]."""
        q, scale, q_t = torch.ops.grouped_linear.quantize_weight(self.w_ENK)
        return q, scale, q_t


def roof(op: str, o: Operands) -> timing.Call:
    """One dense product of the same rows, N and K, on the same data."""
    w_NK = o.w_ENK[0]
    if op == "fprop":
        return lambda: torch.mm(o.x_TK, w_NK.t())
    if op == "dgrad":
        return lambda: torch.mm(o.dy_TN, w_NK)
    return lambda: torch.mm(o.dy_TN.t(), o.x_TK)


def roof_fp8(op: str, o: Operands) -> timing.Call:
    """The same in FP8 with one scale a tensor and fast accumulation: the fastest that torch has."""
    w_q, _, w_q_t = o.w
    if op == "fprop":
        a, b_t = o.x.q, w_q[0]
    elif op == "dgrad":
        a, b_t = o.dy.q, w_q_t[0]
    else:
        a, b_t = transposed(o.dy.q), transposed(o.x.q)
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(
        a, b_t.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def transposed(q_TK: Tensor) -> Tensor:
    """[K, T], with T filled up to the multiple of 16 that torch._scaled_mm asks for."""
    bytes_KT = F.pad(q_TK.view(torch.uint8).t(), (0, -len(q_TK) % 16))
    return bytes_KT.contiguous().view(q_TK.dtype)


def ours(op: str, o: Operands) -> timing.Call:
    if op == "fprop":
        return lambda: ops.grouped_mm(o.x_TK, o.w_ENK.mT, o.offs_E)
    if op == "dgrad":
        return lambda: ops.grouped_mm(o.dy_TN, o.w_ENK, o.offs_E)
    if op == "wgrad_add_fp32":
        main_grad_ENK = o.main_grad_ENK
        return lambda: ops.grouped_mm_wgrad_(main_grad_ENK, o.dy_TN, o.x_TK, o.offs_E)
    out_dtype = torch.float32 if op == "wgrad_fp32" else None
    return lambda: ops.grouped_mm_wgrad(o.dy_TN, o.x_TK, o.offs_E, out_dtype)


def ours_fp8(op: str, o: Operands, own_scales: bool = False) -> timing.Call:
    """own_scales: x's features share none in wgrad, as if they lay too far apart."""
    x, dy, (w_q, w_scale, w_q_t) = o.x_of_own_scales if own_scales else o.x, o.dy, o.w
    if op == "fprop":
        return lambda: ops.grouped_scaled_mm(x.q, w_q.mT, x.scale, w_scale.mT, o.offs_E)
    if op == "dgrad":
        return lambda: ops.grouped_scaled_mm(dy.q, w_q_t.mT, dy.scale, w_scale, o.offs_E)
    operands = dy.q_t, x.q_t, dy.scale_t, x.scale_t, o.offs_E
    if op == "wgrad_add_fp32":
        main_grad_ENK = o.main_grad_ENK
        return lambda: ops.grouped_scaled_mm_wgrad_(main_grad_ENK, *operands)
    out_dtype = torch.float32 if op == "wgrad_fp32" else torch.bfloat16
    return lambda: ops.grouped_scaled_mm_wgrad(*operands, out_dtype)


def torch_grouped_mm(op: str, o: Operands) -> timing.Call:
    if op == "fprop":
        return lambda: F.grouped_mm(o.x_TK, o.w_ENK.mT, offs=o.offs_E)
    if op == "dgrad":
        return lambda: F.grouped_mm(o.dy_TN, o.w_ENK, offs=o.offs_E)
    if op == "wgrad":
        return lambda: F.grouped_mm(o.dy_TN.t(), o.x_TK, offs=o.offs_E)
    dw = torch_grouped_mm("wgrad", o)
    if op == "wgrad_fp32":
        return lambda: dw().float()
    main_grad_ENK = o.main_grad_ENK
    return lambda: main_grad_ENK.add_(dw())


def torch_scaled_grouped_mm(op: str, o: Operands) -> timing.Call | None:
    """Torch's FP8 product with a scale a row; None where it has none for these groups."""
    if op == "fprop":
        (a, scale_a), (b_t, scale_b) = rowwise(o.x_TK), rowwise(o.w_ENK)
    elif op == "dgrad":
        (a, scale_a), (b_t, scale_b) = rowwise(o.dy_TN), rowwise(o.w_ENK.mT.contiguous())
    elif op == "wgrad" and len(set(o.sizes)) == 1 and o.sizes[0] % 16 == 0:
        # It reads both operands along the rows, where each group begins at a multiple of 16.
        (a, scale_a), (b_t, scale_b) = (rowwise_of_groups(x, o.sizes) for x in (o.dy_TN, o.x_TK))
    else:
        return None
    return lambda: torch._scaled_grouped_mm(
        a,
        b_t.mT,
        scale_a,
        scale_b,
        offs=o.offs_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def rowwise_of_groups(x_TK: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """q [K, T] and scale [E * K], a scale for each feature of each group; groups of one size."""
    E, K = len(sizes), x_TK.size(1)
    q_KEm, scale_KE = rowwise(x_TK.t().contiguous().view(K, E, sizes[0]))
    return q_KEm.view(K, -1), scale_KE.t().reshape(-1)


def bytes_of_weights(op: str, dtype: str, o: Operands) -> int:
    """What a call must at least read of the weights or move of their gradients."""
    E, N, K = o.w_ENK.shape
    if op == "wgrad":
        return E * N * K * o.w_ENK.itemsize
    if op == "wgrad_fp32":
        return E * N * K * 4
    used = sum(size > 0 for size in o.sizes)
    if op == "wgrad_add_fp32":  # read and written
        return used * N * K * 8
    return used * N * K * (1 if dtype == "fp8" else o.w_ENK.itemsize)


def bytes_of_rows(op: str, dtype: str, o: Operands) -> int:
    """What a call must at least read and write of the rows of x, of y and of their gradients."""
    x, y = o.x_TK.numel(), o.dy_TN.numel()
    read, size = {"fprop": x, "dgrad": y}.get(op, x + y), 1 if dtype == "fp8" else o.x_TK.itemsize
    return read * size + (0 if op.startswith("wgrad") else (x + y - read) * o.x_TK.itemsize)


def loop(op: str, x_TK: Tensor, w_ENK: Tensor, dy_TN: Tensor, sizes: list[int]) -> Tensor:
    """The product as a loop of F.linear over the groups."""
    xs, dys = x_TK.split(sizes), dy_TN.split(sizes)
    if op == "fprop":
        return torch.cat([F.linear(x, w) for x, w in zip(xs, w_ENK, strict=True)])
    if op == "dgrad":
        return torch.cat([F.linear(dy, w.t()) for dy, w in zip(dys, w_ENK, strict=True)])
    return torch.stack([F.linear(dy.t(), x.t()) for dy, x in zip(dys, xs, strict=True)])


def dequantized_loop(op: str, o: Operands) -> Tensor:
    """What FP8 operands cost without FP8 products: dequantize the two that are read, then loop."""
    x_TK, w_ENK, dy_TN = o.x_TK, o.w_ENK, o.dy_TN
    T, bf16 = len(x_TK), torch.bfloat16
    if op == "fprop":
        x_TK = ops.group_dequantize(o.x.q, o.x.scale, o.offs_E, bf16)
    elif op == "dgrad":
        dy_TN = ops.group_dequantize(o.dy.q, o.dy.scale, o.offs_E, bf16)
    if op == "wgrad":
        x_TK = ops.group_dequantize_t(o.x.q_t, o.x.scale_t, o.offs_E, T, bf16)
        dy_TN = ops.group_dequantize_t(o.dy.q_t, o.dy.scale_t, o.offs_E, T, bf16)
    else:
        w_ENK = dequantized_weight(o.w[0], o.w[1])
    return loop(op, x_TK, w_ENK, dy_TN, o.sizes)


def dequantized_weight(q_ENK: Tensor, scale: Tensor) -> Tensor:
    N, K = q_ENK.shape[1:]
    scale_ENK = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :N, :K]
    return (q_ENK.float() * scale_ENK).bfloat16()


def alternatives_for(
    op: str, dtype: str, o: Operands, report: timing.Report
) -> dict[str, timing.Call]:
    """What runs here, whether it agrees with ours or not."""
    fp8, on_cpu = dtype == "fp8", report.device.type == "cpu"
    alternatives = {f"torch F.grouped_mm{' bf16' if fp8 else ''}": torch_grouped_mm(op, o)}
    scaled = torch_scaled_grouped_mm(op, o) if fp8 and not on_cpu else None
    if scaled:
        alternatives["torch._scaled_grouped_mm rowwise"] = scaled
    if on_cpu and op in OPS and fp8:
        alternatives["dequantize + bf16 loop"] = lambda: dequantized_loop(op, o)
    elif on_cpu and op in OPS:
        alternatives["loop of F.linear"] = lambda: loop(op, o.x_TK, o.w_ENK, o.dy_TN, o.sizes)
    return timing.supported(alternatives, report)


def agreeing(
    alternatives: dict[str, timing.Call], y: Tensor, case: str, close: float, report: timing.Report
) -> dict[str, timing.Call]:
    """The alternatives whose result is ours, or the end where none is."""
    chosen = {}
    for name, call in alternatives.items():
        distance = float(torch.linalg.vector_norm(call() - y) / torch.linalg.vector_norm(y))
        if distance < close:
            chosen[name] = call
        else:
            report.note(f"{name} left out of {case}: {distance:.3g} from ours")
    if alternatives and not chosen:
        raise SystemExit(f"{case}: ours differs from {', '.join(alternatives)}")
    return chosen


def candidates_for(
    op: str, dtype: str, case: str, o: Operands, report: timing.Report
) -> dict[str, timing.Call]:
    """The dense product, ours, and the alternatives that run here and agree with ours."""
    fp8 = dtype == "fp8"
    alternatives = alternatives_for(op, dtype, o, report)
    our_call = ours_fp8(op, o) if fp8 else ours(op, o)
    if op != "wgrad_add_fp32":  # which each call adds to
        alternatives = agreeing(alternatives, our_call(), case, CLOSE[dtype], report)
    if fp8 and report.device.type != "cpu":
        first = {"dense torch._scaled_mm": roof_fp8(op, o)}
    else:
        first = {f"dense torch.mm{' bf16' if fp8 else ''}": roof(op, o)}
    calls = {"ours": our_call}
    if fp8 and op not in ("fprop", "dgrad"):
        calls["ours, own scales of x"] = ours_fp8(op, o, own_scales=True)
    return first | calls | alternatives


def with_copy(
    candidates: dict[str, timing.Call], of_what: str, moved: int, device: torch.device
) -> dict[str, timing.Call]:
    """The copy that is a second roof goes after the first."""
    (name, product), *others = candidates.items()
    copy = timing.copy_of(moved, device)
    return {name: product, f"copy of the {of_what}' bytes": copy, **dict(others)}


def sustained(candidates: dict[str, timing.Call], seconds: float) -> dict[str, timing.Timing]:
    """The roof and ours, a second each."""
    roof_name = next(iter(candidates))
    timed = {name: candidates[name] for name in (roof_name, "ours")}
    timings = timing.time_sustained(timed, seconds)
    return {f"{name}, sustained": measured for name, measured in timings.items()}


def public_record(device: torch.device) -> dict[tuple[str, ...], float]:
    """Shares by (shape, splits, op, dtype), of the GPU that they were measured on alone."""
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        return {}
    with RECORD.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (row["shape"], row["splits"], row["op"], row["dtype"]): float(row["share"])
            for row in rows
        }


def probe(device: torch.device) -> None:
    """Call every op that is timed, or raise the sentence that says why not."""
    o = Operands(Shape("probe", E=1, m=16, N=16, K=16), [16], torch.bfloat16, device)
    for op in OPS + FLOAT32_OPS:
        ours(op, o)()
        ours_fp8(op, o)()


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", help="names in benchmarks/shapes.py")
    parser.add_argument("--splits", nargs="+", choices=SPLITS)
    parser.add_argument("--ops", nargs="+", choices=OPS + FLOAT32_OPS, default=OPS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument(
        "--sustained",
        type=float,
        default=1.0,
        help=f"seconds back to back on a GPU in {', '.join(SUSTAINED)}; 0: not at all",
    )
    args = parser.parse_args()
    device = timing.device_for(args.device, probe)
    on_cpu = device.type == "cpu"
    all_splits = ["skew"] if on_cpu else ["even", "skew"] if args.quick else list(SPLITS)
    all_splits = args.splits or all_splits
    dtypes = args.dtypes or (["bf16", "fp32", "fp8"] if on_cpu else ["bf16", "fp8"])
    report = timing.Report(
        "bench_grouped_mm",
        "How close do the grouped products come to one dense product of the same size?",
        "TFLOP/s",
        device,
        args.rounds,
    )
    report.note("FP8 is e4m3, 1x128 and 128x128 blocks; its quantization is not in these times")

    report.note(
        "where a copy of the weights' or the rows' bytes is the second row, a round's roof is the "
        "slower of both"
    )
    records = public_record(device)
    if records:
        report.note(f"record: the best public implementation's share, see {RECORD.name}")
    if not on_cpu and args.sustained:
        report.note(f"sustained: {args.sustained:g} s back to back, 3 rounds, warm L2")

    decode = {shape.name for shape in MODEL_SHAPES if is_decode(shape)}
    low_rank = {shape.name for shape in MODEL_SHAPES if is_low_rank(shape)}
    cases = list(itertools.product(chosen_shapes(args.shapes, device, args.quick), all_splits))
    for shape, splits in tqdm(cases, desc="shapes x splits", disable=None):
        sizes = group_sizes(shape, splits)
        T, N, K = sum(sizes), shape.N, shape.K
        operands = {d: Operands(shape, sizes, d, device) for d in {DTYPES[name] for name in dtypes}}
        for op, dtype in itertools.product(args.ops, dtypes):
            case = {"shape": shape.name, "E": shape.E, "T": T, "N": N, "K": K, "splits": splits}
            o, name = operands[DTYPES[dtype]], f"{shape.name} {splits} {op} {dtype}"
            candidates = candidates_for(op, dtype, name, o, report)
            roofs = 1
            if shape.name in low_rank:
                roofs = 2
                candidates = with_copy(candidates, "rows", bytes_of_rows(op, dtype, o), device)
            elif op in FLOAT32_OPS or shape.name in decode:
                roofs = 2
                moved = bytes_of_weights(op, dtype, o)
                candidates = with_copy(candidates, "weights", moved, device)
            timings = timing.time_paired(candidates, device, report.rounds, roofs=roofs)
            if (shape.name, splits) == SUSTAINED and roofs == 1 and not on_cpu and args.sustained:
                timings |= sustained(candidates, args.sustained)
            record = records.get((shape.name, splits, op, dtype))
            report.add(case | {"op": op, "dtype": dtype}, timings, 2.0 * T * N * K, record)
    report.finish(
        args.write,
        mean_by=("op", "dtype", "splits"),
        in_mean=lambda case: case["shape"] not in decode | low_rank,
        merge=args.merge,
    )


if __name__ == "__main__":
    main()
