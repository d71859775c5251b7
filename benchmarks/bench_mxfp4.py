# SPDX-License-Identifier: Apache-2.0
"""How fast are grouped GEMMs of a weight in MXFP4, beside those of the weight in BF16 and FP8?

    python -m benchmarks.bench_mxfp4

A frozen base of GPT-OSS is read by fprop and dgrad as it is published, four bits an element and a
scale for each 32. The roofs are this library's `grouped_mm` of the weight in BF16, and
`grouped_scaled_mm` of the weight in FP8. Where groups have few rows, as in generation, the weight's
bytes bound the product: there the roof is a read of the packed bytes of the experts that have rows,
half as many bytes copied. Where unsloth_zoo is installed its GEMM, in Triton, takes turns, too. A
second table has `quantize_mxfp4` and `dequantize_mxfp4`, beside a copy that moves as many bytes.

T rows, E groups, K in_features, N out_features.
"""

import argparse
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import alternatives, timing
from grouped_linear import ops

BF16 = torch.bfloat16
TOP = 4  # experts a token


class Size(NamedTuple):
    """A weight of GPT-OSS: gate and up, or down."""

    E: int
    N: int
    K: int


SIZES = {
    "20b_gate_up": Size(32, 5760, 2880),
    "20b_down": Size(32, 2880, 2880),
    "120b_gate_up": Size(128, 5760, 2880),
    "120b_down": Size(128, 2880, 2880),
}
TOKENS = 8192
FEW_TOKENS = (1, 8, 64)
FEW_SIZES = ("20b_gate_up", "120b_gate_up")
PARTS = ("many", "few", "quantize")


def routed(tokens: int, E: int, device: torch.device) -> Tensor:
    """Group ends of `tokens` tokens with TOP random experts each."""
    generator = torch.Generator(device).manual_seed(0)
    chosen = torch.multinomial(torch.ones(tokens, E, device=device), TOP, generator=generator)
    return chosen.flatten().bincount(minlength=E).cumsum(0).int()


def normal(*sizes: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return torch.randn(*sizes, dtype=BF16, device=device).mul_(scale)


def check(what: str, y: Tensor, expected: Tensor) -> None:
    """A fast wrong kernel is no result."""
    error, size = (y - expected).float().abs().max(), expected.float().abs().max()
    if not error <= 2**-6 * size:
        raise SystemExit(f"{what}: MXFP4 and its dequantized weight give different results")


def measure(
    name: str, operands: str, gemm: str, device: torch.device, report: timing.Report
) -> None:
    """Many rows: the roof is the same GEMM of the same numbers, stored in a."""
    E, N, K = SIZES[name]
    offs_E = routed(TOKENS if device.type == "cuda" else 8, E, device)
    T = int(offs_E[-1])
    w = ops.quantize_mxfp4(normal(E, N, K, device=device, scale=K**-0.5))
    w_ENK = ops.dequantize_mxfp4(w.q, w.scale)
    is_fprop = gemm == "fprop"
    a = normal(T, K if is_fprop else N, device=device)
    if operands == "bf16":
        b = w_ENK.mT if is_fprop else w_ENK
        calls = {
            "bf16": lambda: ops.grouped_mm(a, b, offs_E),
            "mxfp4": lambda: ops.grouped_mm_mxfp4(a, w.q, w.scale, offs_E, transpose_b=is_fprop),
        }
    else:
        x, stored = ops.group_quantize(a, offs_E), ops.quantize_weight(w_ENK)
        assert stored.q_t is not None
        q, scale = (stored.q, stored.scale) if is_fprop else (stored.q_t, stored.scale.mT)
        calls = {
            "fp8": lambda: ops.grouped_scaled_mm(x.q, q.mT, x.scale, scale.mT, offs_E),
            "mxfp4": lambda: ops.grouped_mm_mxfp4(
                x.q, w.q, w.scale, offs_E, scale_a=x.scale, transpose_b=is_fprop
            ),
        }
    del w_ENK
    if operands == "bf16" and (unsloth := alternatives.unsloth_mxfp4(device)) is not None:
        blocks, counts_E = w.q.unflatten(-1, (-1, 16)), offs_E.diff(prepend=offs_E.new_zeros(1))
        calls["unsloth mxfp4"] = lambda: unsloth(a, blocks, w.scale, counts_E, is_fprop)
    expected, *given = (call() for call in calls.values())
    for y in given:
        check(f"{name} {operands} {gemm}", y, expected)
    case: dict[str, str | int] = {"weight": name, "a": operands, "gemm": gemm, "T": T}
    report.add(case, timing.time_paired(calls, device, report.rounds), 2 * T * N * K)


def measure_few(
    name: str, gemm: str, tokens: int, device: torch.device, report: timing.Report
) -> None:
    """Few rows: the roof is a copy that moves as many bytes as the experts with rows have."""
    E, N, K = SIZES[name]
    offs_E = routed(tokens, E, device)
    T = int(offs_E[-1])
    counts_E = offs_E.diff(prepend=offs_E.new_zeros(1))
    w = ops.quantize_mxfp4(normal(E, N, K, device=device, scale=K**-0.5))
    w_ENK = ops.dequantize_mxfp4(w.q, w.scale)
    is_fprop = gemm == "fprop"
    b = w_ENK.mT if is_fprop else w_ENK
    a = normal(T, K if is_fprop else N, device=device)
    packed = int((counts_E > 0).sum()) * N * (K // 2 + K // 32)
    source = torch.empty(packed // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {
        "packed bytes": lambda: target.copy_(source),
        "bf16": lambda: ops.grouped_mm(a, b, offs_E),
        "mxfp4": lambda: ops.grouped_mm_mxfp4(a, w.q, w.scale, offs_E, transpose_b=is_fprop),
    }
    if (unsloth := alternatives.unsloth_mxfp4(device)) is not None:
        blocks = w.q.unflatten(-1, (-1, 16))
        calls["unsloth mxfp4"] = lambda: unsloth(a, blocks, w.scale, counts_E, is_fprop)
    expected = calls["bf16"]()
    for other in list(calls)[2:]:
        check(f"{name} {tokens} tokens {other} {gemm}", calls[other](), expected)
    case: dict[str, str | int] = {"weight": name, "a": "bf16", "gemm": f"few {gemm}", "T": T}
    report.add(case, timing.time_paired(calls, device, report.rounds), 2 * T * N * K)


def measure_quantize(name: str, device: torch.device, report: timing.Report) -> None:
    """The ops between BF16 and MXFP4: 2 bytes a number, and 17 for each 32 numbers."""
    E, N, K = SIZES[name]
    w_ENK = normal(E, N, K, device=device, scale=K**-0.5)
    w = ops.quantize_mxfp4(w_ENK)
    moved = w_ENK.nbytes + w.q.nbytes + w.scale.nbytes
    calls = {
        "copy": timing.copy_of(moved, device),
        "quantize_mxfp4": lambda: ops.quantize_mxfp4(w_ENK),
        "dequantize_mxfp4": lambda: ops.dequantize_mxfp4(w.q, w.scale),
    }
    timings = timing.time_paired(calls, device, report.rounds)
    report.add({"weight": name, "E": E, "N": N, "K": K}, timings, moved)


def reports(device: torch.device, rounds: int) -> tuple[timing.Report, timing.Report]:
    """The tables of GEMMs and of quantization, empty."""
    module = "bench_mxfp4"
    report = timing.Report(
        module,
        "How fast are grouped GEMMs of a weight in MXFP4, beside BF16 and FP8?",
        "TFLOP/s",
        device,
        rounds,
    )
    report.note("8192 tokens, 4 random experts each; few: 1, 8 and 64 tokens")
    unsloth = alternatives.unsloth_mxfp4(device) is not None
    version = metadata.version("unsloth_zoo") if unsloth else "left out: not installed"
    report.note(f"unsloth_zoo: {version}")
    of_quantize = timing.Report(
        f"{module}_quantize",
        "How close do quantize_mxfp4 and dequantize_mxfp4 come to a plain copy?",
        "GB/s",
        device,
        rounds,
        module=module,
    )
    return report, of_quantize


def probe(device: torch.device) -> None:
    """Call every op that is timed, or raise the sentence that says why not."""
    w = ops.quantize_mxfp4(normal(2, 32, 64, device=device))
    offs = torch.tensor([3, 8], dtype=torch.int32, device=device)
    ops.grouped_mm_mxfp4(normal(8, 64, device=device), w.q, w.scale, offs)


def main() -> None:
    parser: argparse.ArgumentParser = timing.arguments(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    device = timing.device_for(args.device, probe)
    report, of_quantize = reports(device, args.rounds)
    sizes = args.sizes[:1] if args.quick else args.sizes
    for name in sizes if "many" in args.parts else ():
        for operands in ("bf16", "fp8"):
            for gemm in ("fprop", "dgrad"):
                measure(name, operands, gemm, device, report)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    if "few" in args.parts:
        for name in [name for name in sizes if name in FEW_SIZES]:
            for gemm in ("fprop", "dgrad"):
                for tokens in FEW_TOKENS[:1] if args.quick else FEW_TOKENS:
                    measure_few(name, gemm, tokens, device, report)
    for name in sizes if "quantize" in args.parts else ():
        measure_quantize(name, device, of_quantize)
    if report.rows:
        report.finish(args.write, mean_by=("a", "gemm"), merge=args.merge)
    if of_quantize.rows:
        of_quantize.finish(args.write, merge=args.merge)


if __name__ == "__main__":
    main()
