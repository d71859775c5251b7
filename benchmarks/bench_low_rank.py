# SPDX-License-Identifier: Apache-2.0
"""What does a low-rank second product cost in a grouped GEMM, beside products of its own?

    python -m benchmarks.bench_low_rank

An adapter of rank r on experts adds `a_low[t] @ b_low[e]` to what an expert computes, in fprop and
in dgrad. One kernel adds it to the GEMM's accumulators (`a_low` and `b_low` of `grouped_mm` and
`grouped_scaled_mm`). Three do it without: the GEMM, the second product and the sum, which rounds
twice more. The GEMM alone bounds them, and is the roof.

a_low itself, x times A^T or dy times B, is a GEMM that each of them needs. It is not timed here:
`bench_grouped_mm` has its shapes.

T rows, E groups, K in_features, N out_features of the GEMM at hand, r the rank.
"""

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.shapes import MODEL_SHAPES, Shape
from grouped_linear import ops

BF16 = torch.bfloat16
SHAPES = {s.name: s for s in MODEL_SHAPES if s.name in ("qwen3_30b_up", "qwen3_30b_down")}
RANKS = (16, 64)
GEMMS = ("fprop", "dgrad")
OPERANDS = ("bf16", "fp8_block")
ALONE, ONE, THREE = "the GEMM alone", "one kernel", "three kernels"
# Three kernels round in bfloat16 three times, one kernel once.
CLOSE = 2**-6


def candidates(
    shape: Shape, gemm: str, operands: str, r: int, device: torch.device
) -> dict[str, timing.Call]:
    """Of one case. b and b_low are stored as a layer stores them: dgrad reads what fprop reads."""
    T, E = shape.E * shape.m, shape.E
    N, K = (shape.N, shape.K) if gemm == "fprop" else (shape.K, shape.N)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, dtype=BF16, device=device).mul_(scale)

    offs_E = torch.arange(1, E + 1, device=device, dtype=torch.int32) * shape.m
    a_TK, w_ENK = normal(T, K), normal(E, N, K, scale=K**-0.5)
    b_EKN = w_ENK.mT if gemm == "fprop" else w_ENK.mT.contiguous()
    a_low, b_low = normal(T, r), normal(E, r, N, scale=r**-0.5)
    if gemm == "fprop":
        b_low = b_low.mT.contiguous().mT
    low = {"a_low": a_low, "b_low": b_low}

    if operands == "bf16":

        def first(**low: Tensor) -> Tensor:
            return ops.grouped_mm(a_TK, b_EKN, offs_E, **low)
    else:
        a, b = ops.group_quantize(a_TK, offs_E), ops.quantize_weight(w_ENK)

        def first(**low: Tensor) -> Tensor:
            return ops.grouped_scaled_mm(a.q, b.q.mT, a.scale, b.scale.mT, offs_E, **low)

    return {
        ALONE: first,
        ONE: lambda: first(**low),
        THREE: lambda: first().add_(ops.grouped_mm(a_low, b_low, offs_E)),
    }


def check(what: str, one: Tensor, three: Tensor) -> None:
    """A fast wrong kernel is no result."""
    error, size = (one - three).float().abs().max(), three.float().abs().max()
    if not error <= CLOSE * size:
        raise SystemExit(f"{what}: one kernel and three give different results")


def measure(
    shape: Shape,
    gemm: str,
    operands: str,
    r: int,
    device: torch.device,
    report: timing.Report,
) -> None:
    """Add a case's rows."""
    calls = candidates(shape, gemm, operands, r, device)
    check(f"{shape.name} {gemm} {operands} {r}", calls[ONE](), calls[THREE]())
    case: dict[str, str | int] = {"shape": shape.name, "gemm": gemm, "operands": operands, "r": r}
    work = 2 * shape.E * shape.m * shape.N * shape.K
    report.add(case, timing.time_paired(calls, device, report.rounds), work)


def probe(device: torch.device) -> None:
    """Call every op that is timed, or raise the sentence that says why not."""
    for operands in OPERANDS:
        for call in candidates(
            Shape("probe", 2, 8, 16, 32), "fprop", operands, 16, device
        ).values():
            call()


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    device = timing.device_for(args.device, probe)
    report = timing.Report(
        "bench_low_rank",
        "What does a low-rank second product cost in a grouped GEMM, beside products of its own?",
        "TFLOP/s",
        device,
        args.rounds,
    )
    report.note("FLOPs are those of the first product, which alone is the roof; 65536 rows")
    for name in args.shapes:
        for operands in OPERANDS:
            for gemm in GEMMS:
                for r in RANKS[:1] if args.quick else RANKS:
                    measure(SHAPES[name], gemm, operands, r, device, report)
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
    report.finish(args.write, mean_by=("operands", "gemm", "r"), merge=args.merge)


if __name__ == "__main__":
    main()
