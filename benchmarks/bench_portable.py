# SPDX-License-Identifier: Apache-2.0
"""How close do the portable GEMMs come to what mma gives, to Triton's and to Hopper's own?

The portable kernels (csrc/cuda/gemm/sm80) run on any GPU here: this program sets
GROUPED_LINEAR_PORTABLE=1 itself. On Hopper they are in a library that was built with
GROUPED_LINEAR_BUILD_PORTABLE=1. The first row of a case is the roof, what mma alone gives
(benchmarks/mma_limit.cu, compiled where nvcc is found), and the second mma fed from shared memory.
In decode shapes the roof is a copy of as many bytes as the weights have. A Triton GEMM of ours
(benchmarks/triton_grouped.py) is restricted to mma, too, and takes the fastest of its tiles. On
Hopper, our kernels for it run in another process, right after the others of the case.

Without a GPU, and with TRITON_INTERPRET=1, it compares Triton's kernels with our ops on the CPU.

T rows, E groups, K in_features, N out_features.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import bench_grouped_mm as gemms
from benchmarks import timing
from benchmarks.shapes import SPLITS, Shape, group_sizes

ROOT = Path(__file__).parent.parent
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Those of docs/notes/gemm_sm80.md: large GEMMs, little work in a tile and in a group, and decode.
SHAPES = (
    Shape("8_groups", E=8, m=2048, N=4096, K=7168),
    Shape("32_groups", E=32, m=512, N=4096, K=2048),
    Shape("decode", E=32, m=20, N=4096, K=7168),
)
DECODE_ROWS = 64  # below it the bytes of weights take the time
OURS, HOPPERS = "ours, portable", "ours, wgmma (another process)"
LIMITS = {  # by what mma_limit.cu prints
    "register only": "mma alone",
    "ldmatrix and copies": "mma fed by ldmatrix and cp.async",
}
CLOSE = 0.01  # the largest relative distance of two roundings to 16 bits of the same sums
TRIAL_ROUNDS = 5  # of each tile that Triton may take


# --- what mma gives ------------------------------------------------------------------------------


def limits_of(printed: str) -> dict[str, dict[str, float]]:
    """TFLOP/s of mma_limit.cu by "bf16" or "fp8" and by the names of LIMITS: the best rounds."""
    found: dict[str, dict[str, float]] = {"bf16": {}, "fp8": {}}
    for line in printed.splitlines():
        match = re.match(r"(bf16|fp8), ([a-z ]+?)(?:,.*)?\s+best\s+([\d.]+).*TFLOP/s\s+(.*)", line)
        if match and match[2] in LIMITS:
            if match[4].strip() != "no error":
                raise RuntimeError(match[4].strip())
            found[match[1]][LIMITS[match[2]]] = float(match[3])
    return found


def measure_limits(report: timing.Report) -> dict[str, dict[str, float]]:
    """What this GPU's mma gives, or nothing; the report says why."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        report.note("mma by itself not measured: nvcc is not on the path")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/mma_limit"
        build = [nvcc, "-std=c++20", "-O3", "-arch=native", "-Icsrc", "-o", program]
        try:
            for command in ([*build, "benchmarks/mma_limit.cu"], [program]):
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            return limits_of(done.stdout)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()
            report.note(f"mma by itself not measured: {said[-1] if said else error}")
            return {}


def beside(us: float, measured: timing.Spread) -> timing.Timing:
    """A timing whose share is the speed beside a roof of so many microseconds."""
    share = timing.Spread(us / measured.median, us / measured.high, us / measured.low)
    return timing.Timing(measured, share)


def with_limits(
    timings: Mapping[str, timing.Timing], limits: Mapping[str, float], work: float
) -> dict[str, timing.Timing]:
    """Rows for the limits before the timings, and the shares of the first of them."""
    if not limits:
        return dict(timings)
    spreads = {name: timing.Spread.of([1e-6 * work / limit]) for name, limit in limits.items()}
    spreads |= {name: timed.microseconds for name, timed in timings.items()}
    first = next(iter(spreads.values())).median
    return {name: beside(first, spread) for name, spread in spreads.items()}


# --- Triton --------------------------------------------------------------------------------------


def triton_launch(
    triton: ModuleType, op: str, dtype: str, o: gemms.Operands
) -> tuple[torch.Tensor, Callable[[Any], Any], tuple[int, int]]:
    """The output, a call by its tile, and the columns and depth that tiles must divide."""
    (E, N, K), T, device = o.w_ENK.shape, len(o.x_TK), o.x_TK.device
    dtype_out = DTYPES[dtype]

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype_out, device=device)

    arch = None if device.type == "cpu" else "sm89" if dtype == "fp8" else "sm80"
    if op == "wgrad":
        dw = new(E, N, K)
        if dtype == "fp8":
            scales = o.dy.scale_t, o.x.scale_t
            launch = triton.scaled_wgrad(dw, o.dy.q_t, o.x.q_t, *scales, o.offs_E, arch)
        else:
            launch = triton.wgrad(dw, o.dy_TN, o.x_TK, o.offs_E, arch)
        return dw, launch, (K, triton.BLOCK)
    rows, y = (o.x, new(T, N)) if op == "fprop" else (o.dy, new(T, K))
    if dtype == "fp8":
        w_q, w_scale, w_q_t = o.w
        b, scale_b = (w_q, w_scale) if op == "fprop" else (w_q_t, w_scale.transpose(1, 2))
        launch = triton.fprop(y, rows.q, b, o.offs_E, (rows.scale, scale_b), arch)
    else:
        a, b = (o.x_TK, o.w_ENK) if op == "fprop" else (o.dy_TN, o.w_ENK.transpose(1, 2))
        launch = triton.fprop(y, a, b, o.offs_E, None, arch)
    return y, launch, (b.size(1), b.size(2))


def fastest_of_triton(
    op: str, dtype: str, o: gemms.Operands, report: timing.Report
) -> dict[str, timing.Call]:
    """Triton's GEMM with the fastest of its tiles, or nothing; the report says why."""
    try:
        from benchmarks import triton_grouped as triton
    except ImportError as error:
        report.note(f"Triton left out: {error}")
        return {}
    _, launch, (columns, depth) = triton_launch(triton, op, dtype, o)
    best, us, why = None, float("inf"), "no tile fits"
    for tile in triton.IN_FP8 if dtype == "fp8" else triton.IN_16_BITS:
        if columns % tile.n or depth % tile.k:
            continue
        try:
            kinds = triton.instructions(launch(tile))
            timed = timing.time_paired({"": lambda t=tile: launch(t)}, report.device, TRIAL_ROUNDS)
        except Exception as error:  # Triton's errors have no base class of their own
            why = (str(error) or type(error).__name__).splitlines()[0]
            continue
        if kinds != {"mma"}:
            raise SystemExit(f"Triton's GEMM has other instructions than mma: {kinds}")
        if timed[""].microseconds.median < us:
            best, us = tile, timed[""].microseconds.median
    if best is None:
        report.note(f"Triton left out of {op} {dtype}: {why}")
        return {}
    report.note(f"Triton's tile, {op} {dtype}, {len(o.x_TK)} rows: {described(best)}")

    def call() -> torch.Tensor:
        y, launch, _ = triton_launch(triton, op, dtype, o)
        launch(best)
        return y

    return {"Triton, mma": call}


def described(tile: Any) -> str:
    """A tile's shape and how it is computed."""
    cast = ", e4m3 to fp16 by itself" if tile.upcast else ""
    shape = f"{tile.m} x {tile.n} x {tile.k}"
    return f"{shape}, {tile.warps} warps, {tile.stages} stages, {tile.blocks} blocks an SM{cast}"


def check_triton() -> Iterator[str]:
    """Its kernels beside our ops on the CPU, one line each.

    Not in bfloat16, which the interpreter of Triton 3.6 multiplies as integers.
    """
    from benchmarks import triton_grouped as triton

    cpu, shape = torch.device("cpu"), Shape("small", E=5, m=40, N=256, K=256)
    for dtype, op in itertools.product(("fp16", "fp8"), gemms.OPS):
        o = gemms.Operands(shape, [0, 130, 3, 0, 61], DTYPES[dtype], cpu)
        y, launch, _ = triton_launch(triton, op, dtype, o)
        depth = triton.BLOCK if dtype == "fp8" else 64
        for upcast in (True, False) if dtype == "fp8" else (False,):
            launch(triton.Tile(64, 128, depth, warps=4, stages=1, upcast=upcast))
            off = distance(y, our_call(op, dtype, o)())
            if not off < CLOSE:
                raise SystemExit(f"Triton's {op} in {dtype} is {off:.3g} from ours")
            yield f"Triton's {op} in {dtype}{', upcast' * upcast}: {off:.2g} from ours"


# --- candidates ----------------------------------------------------------------------------------


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative, by Frobenius norms."""
    difference = torch.linalg.vector_norm(a.float() - b.float())
    return float(difference / torch.linalg.vector_norm(b.float()))


def our_call(op: str, dtype: str, o: gemms.Operands) -> timing.Call:
    return gemms.ours_fp8(op, o) if dtype == "fp8" else gemms.ours(op, o)


def candidates_for(
    op: str, dtype: str, case: str, o: gemms.Operands, report: timing.Report
) -> dict[str, timing.Call]:
    """Ours, and Triton's and torch's GEMMs where they agree with it."""
    ours, fp8 = our_call(op, dtype, o), dtype == "fp8"
    torchs = {}
    if dtype != "fp16":  # in FP16 torch reads group sizes on the host, which no graph captures
        torchs[f"torch F.grouped_mm{' bf16' * fp8}"] = gemms.torch_grouped_mm(op, o)
    others = {name: (call, CLOSE) for name, call in fastest_of_triton(op, dtype, o, report).items()}
    for name, call in timing.supported(torchs, report).items():
        others[name] = call, gemms.CLOSE["fp8" if fp8 else "bf16"]
    chosen = {OURS: ours}
    for name, (call, close) in others.items():
        if (off := distance(call(), ours())) < close:
            chosen[name] = call
        else:
            report.note(f"{name} left out of {case}: {off:.3g} from ours")
    return chosen


def operands_of(shape: Shape, splits: str, dtype: str, device: torch.device) -> gemms.Operands:
    torch.manual_seed(0)
    return gemms.Operands(shape, group_sizes(shape, splits), DTYPES[dtype], device)


# --- Hopper's own kernels, in another process ----------------------------------------------------

Hopper = Callable[[Mapping[str, Any]], timing.Spread]


@contextlib.contextmanager
def hoppers_own(device: torch.device) -> Iterator[Hopper | None]:
    """A function that times a case with the kernels for Hopper; None on other GPUs."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        yield None
        return
    environment = {k: v for k, v in os.environ.items() if k != "GROUPED_LINEAR_PORTABLE"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bench_portable", "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert worker.stdin
    assert worker.stdout
    commands, answers = worker.stdin, worker.stdout

    def timed(case: Mapping[str, Any]) -> timing.Spread:
        commands.write(json.dumps(case) + "\n")
        commands.flush()
        for line in answers:
            if line.startswith("{"):
                return timing.Spread(**json.loads(line))
        raise RuntimeError("the process of Hopper's kernels ended")

    try:
        yield timed
    finally:
        with contextlib.suppress(OSError):
            commands.close()
        worker.wait()


def work_on_cases() -> None:
    """The other process: a case in each line of the input, a spread in each of the output."""
    device = torch.device("cuda")
    for line in sys.stdin:
        case = json.loads(line)
        shape, op, dtype = Shape(*case["shape"]), case["op"], case["dtype"]
        o = operands_of(shape, case["splits"], dtype, device)
        timed = timing.time_paired({"": our_call(op, dtype, o)}, device, case["rounds"])
        print(json.dumps(vars(timed[""].microseconds)), flush=True)


# --- the table -----------------------------------------------------------------------------------


def measure(
    shape: Shape,
    splits: str,
    op: str,
    dtype: str,
    report: timing.Report,
    limits: Mapping[str, Mapping[str, float]],
    hopper: Hopper | None,
) -> None:
    """Add the rows of one case."""
    sizes, device = group_sizes(shape, splits), report.device
    T, N, K = sum(sizes), shape.N, shape.K
    o = operands_of(shape, splits, dtype, device)
    candidates = candidates_for(op, dtype, f"{shape.name} {op} {dtype}", o, report)
    work, decodes = 2.0 * T * N * K, shape.m < DECODE_ROWS
    if decodes:
        copy = timing.copy_of(gemms.bytes_of_weights(op, dtype, o), device)
        candidates = {"copy of the weights' bytes": copy, **candidates}
    timings = timing.time_paired(candidates, device, report.rounds)
    if hopper:
        asked = {"shape": shape, "splits": splits, "op": op, "dtype": dtype}
        first = next(iter(timings.values())).microseconds.median
        try:
            timings[HOPPERS] = beside(first, hopper({**asked, "rounds": report.rounds}))
        except (OSError, RuntimeError) as error:
            report.note(f"{HOPPERS} left out: {error}")
    if not decodes and limits:
        timings = with_limits(timings, limits["fp8" if dtype == "fp8" else "bf16"], work)
    case = {"shape": shape.name, "E": shape.E, "T": T, "N": N, "K": K, "splits": splits}
    report.add({**case, "op": op, "dtype": dtype}, timings, work)


def main() -> None:
    parser = timing.arguments(__doc__)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["even"])
    parser.add_argument("--ops", nargs="+", choices=gemms.OPS, default=gemms.OPS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--worker", action="store_true", help="for this program's own use")
    args = parser.parse_args()
    if args.worker:
        work_on_cases()
        return
    os.environ["GROUPED_LINEAR_PORTABLE"] = "1"  # the ops read it when first called
    if torch.device(args.device).type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            print(*check_triton(), sep="\n")
        sys.exit("the table needs a GPU; TRITON_INTERPRET=1 compares Triton's kernels with ours")
    device = timing.device_for(args.device, gemms.probe)
    question = "How close do the portable GEMMs come to what mma gives, and to Triton's?"
    report = timing.Report("bench_portable", question, "TFLOP/s", device, args.rounds)
    report.note("FP8 is e4m3, 1x128 and 128x128 blocks; its quantization is not in these times")
    limits = measure_limits(report)
    report.note("shares of what mma gives, and those of another process, are of medians")
    shapes = [shape for shape in SHAPES if shape.name in args.shapes]
    if args.quick:
        shapes = shapes[:1]
    with hoppers_own(device) as hopper:
        for case in itertools.product(shapes, args.splits, args.ops, args.dtypes):
            print(*case, file=sys.stderr, flush=True)
            measure(*case, report, limits, hopper)
    report.finish(
        args.write,
        mean_by=("op", "dtype"),
        in_mean=lambda case: case["shape"] != "decode",
        merge=args.merge,
    )


if __name__ == "__main__":
    main()
