"""How close do the grouped products come to one dense product of the same size?

T rows, E groups, K in_features, N out_features.

The first row of every case is the roof: one dense product with the same rows, N and K, which no
grouped product has to beat. On CPU a loop over the groups stands beside ours too: of F.linear, or
for FP8 of bf16 products of the operands, dequantized first. The loop knows the sizes on the host;
ours and torch.nn.functional.grouped_mm read them where the data is.
"""

import itertools
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.shapes import MODEL_SHAPES, SPLITS, Shape, chosen_shapes, group_sizes, is_decode
from grouped_linear import ops

OPS = ("fprop", "dgrad", "wgrad")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
BLOCK = 128

# The largest relative distance (Frobenius) from the alternatives: a fast wrong product is no
# result. Two roundings to bf16 differ by about 2^-8; e4m3 rounds both operands to 4 bits.
CLOSE = {"bf16": 0.01, "fp32": 1e-4, "fp8": 0.06}


class Quantized(NamedTuple):
    q: Tensor  # [T, K]
    scale: Tensor  # [ceil(K/128), round_up(T, 4)]
    q_t: Tensor  # [Tp/128, K, 128]
    scale_t: Tensor  # [Tp/128, K]


def quantized(x_TK: Tensor, offs_E: Tensor) -> Quantized:
    q, scale, q_t, scale_t, _ = torch.ops.grouped_linear.group_quantize(
        x_TK, offs_E, columnwise=True
    )
    return Quantized(q, scale, q_t, scale_t)


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
        return quantized(self.x_TK, self.offs_E)

    @cached_property
    def dy(self) -> Quantized:
        return quantized(self.dy_TN, self.offs_E)

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
        return lambda: ops.grouped_mm(o.x_TK, o.w_ENK, o.offs_E)
    if op == "dgrad":
        return lambda: ops.grouped_mm(o.dy_TN, o.w_ENK.transpose(1, 2), o.offs_E)
    return lambda: ops.grouped_mm_wgrad(o.dy_TN, o.x_TK, o.offs_E)


def ours_fp8(op: str, o: Operands) -> timing.Call:
    x, dy, (w_q, w_scale, w_q_t) = o.x, o.dy, o.w
    if op == "fprop":
        return lambda: ops.grouped_scaled_mm(x.q, w_q, x.scale, w_scale, o.offs_E)
    if op == "dgrad":
        w_scale_t = w_scale.transpose(1, 2)
        return lambda: ops.grouped_scaled_mm(dy.q, w_q_t, dy.scale, w_scale_t, o.offs_E)
    return lambda: ops.grouped_scaled_mm_wgrad(dy.q_t, x.q_t, dy.scale_t, x.scale_t, o.offs_E)


def torch_grouped_mm(op: str, o: Operands) -> timing.Call:
    if op == "fprop":
        return lambda: F.grouped_mm(o.x_TK, o.w_ENK.transpose(1, 2), offs=o.offs_E)
    if op == "dgrad":
        return lambda: F.grouped_mm(o.dy_TN, o.w_ENK, offs=o.offs_E)
    return lambda: F.grouped_mm(o.dy_TN.t(), o.x_TK, offs=o.offs_E)


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


def candidates_for(
    op: str, dtype: str, o: Operands, report: timing.Report
) -> dict[str, timing.Call]:
    """The roof, ours, and the alternatives that run here and agree with ours."""
    fp8, on_cpu = dtype == "fp8", report.device.type == "cpu"
    in_bf16 = " bf16" if fp8 else ""  # the operands before they were quantized
    alternatives = {f"torch F.grouped_mm{in_bf16}": torch_grouped_mm(op, o)}
    if on_cpu and fp8:
        alternatives["dequantize + bf16 loop"] = lambda: dequantized_loop(op, o)
    elif on_cpu:
        alternatives["loop of F.linear"] = lambda: loop(op, o.x_TK, o.w_ENK, o.dy_TN, o.sizes)
    alternatives = timing.supported(alternatives, report)
    our_call = ours_fp8(op, o) if fp8 else ours(op, o)
    y = our_call()
    for name, call in alternatives.items():
        distance = float(torch.linalg.vector_norm(call() - y) / torch.linalg.vector_norm(y))
        if not distance < CLOSE[dtype]:
            raise SystemExit(f"{op} {dtype}: ours is {distance:.3g} from {name}")
    if fp8 and not on_cpu:
        first = {"dense torch._scaled_mm": roof_fp8(op, o)}
    else:
        first = {f"dense torch.mm{in_bf16}": roof(op, o)}
    return first | {"ours": our_call} | alternatives


def probe(device: torch.device) -> None:
    """Call every op that is timed, or raise the sentence that says why not."""
    o = Operands(Shape("probe", E=1, m=16, N=16, K=16), [16], torch.bfloat16, device)
    for op in OPS:
        ours(op, o)()
        ours_fp8(op, o)()


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", help="names in benchmarks/shapes.py")
    parser.add_argument("--splits", nargs="+", choices=SPLITS)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
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

    cases = list(itertools.product(chosen_shapes(args.shapes, device, args.quick), all_splits))
    for shape, splits in tqdm(cases, desc="shapes x splits", disable=None):
        sizes = group_sizes(shape, splits)
        T, N, K = sum(sizes), shape.N, shape.K
        operands = {d: Operands(shape, sizes, d, device) for d in {DTYPES[name] for name in dtypes}}
        for op, dtype in itertools.product(args.ops, dtypes):
            case = {"shape": shape.name, "E": shape.E, "T": T, "N": N, "K": K, "splits": splits}
            candidates = candidates_for(op, dtype, operands[DTYPES[dtype]], report)
            timings = timing.time_paired(candidates, device, report.rounds)
            report.add(case | {"op": op, "dtype": dtype}, timings, 2.0 * T * N * K)
    decode = {shape.name for shape in MODEL_SHAPES if is_decode(shape)}
    report.finish(
        not args.no_write,
        mean_by=("op", "dtype", "splits"),
        in_mean=lambda case: case["shape"] not in decode,
    )


if __name__ == "__main__":
    main()
