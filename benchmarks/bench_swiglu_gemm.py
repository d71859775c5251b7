# SPDX-License-Identifier: Apache-2.0
"""What does SwiGLU in a GEMM's epilogue save, and a token read once, not once an expert?

    python -m benchmarks.bench_swiglu_gemm

The GEMM of gate and up goes on with SwiGLU (`grouped_mm_swiglu`), and down's dgrad with SwiGLU's
gradient (`grouped_mm_swiglu_grad`): one kernel beside two, and beside the GEMM alone. Two rows of a
case bound it, and the slower one in a round is its roof: one dense product of as many rows, and a
copy of as many bytes as one kernel must read and write. The form "gpt_oss" has interleaved gate and
up, biases, alpha, beta and a limit, and the weights as GPT-OSS stores them.

A second table has the copies of tokens to their experts' rows: `scatter_rows`, which reads a token
once, beside an index, which reads it once an expert. Its roof is a copy of the bytes of the former.

On a GPU alone: on a CPU the same ops are two after another.

T tokens, C experts chosen for a token, R = T * C rows, E experts, H features of a token, F of an
expert.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.bench_expert_layer import TOKENS_AND_SIZES
from grouped_linear import SwiGLU, ops

BF16 = torch.bfloat16
FORMS = {
    "plain": SwiGLU(),
    "gpt_oss": SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True),
}
DENSE, COPY = "dense torch.mm", "copy of the bytes"
ALONE, TWO, ONE = "the GEMM alone", "two kernels", "one kernel"
INFERENCE = "one kernel, gate and up not kept"
INDEX, SCATTER = "index", "scatter_rows"
# d_weight is a sum of F products in float32, in one order or the other; sigmoid is approximate.
CLOSE = 1e-4


class Layer(NamedTuple):
    """The sizes of an expert layer."""

    T: int
    H: int
    F: int
    E: int
    C: int


LAYERS = {name: Layer(*sizes) for name, sizes in TOKENS_AND_SIZES.items()}
# gpt-oss-20b: hidden and intermediate 2880, 4 of 32 experts, 8192 tokens
LAYERS["gptoss"] = Layer(8192, 2880, 2880, 32, 4)
QUICK = ("qwen3_30b", "gptoss")


class Operands:
    """Of a layer in one form, with tokens sent to experts at random."""

    def __init__(self, layer: Layer, form: str, device: torch.device) -> None:
        T, H, F, E, C = layer
        self.layer, self.activation = layer, FORMS[form]
        experts_TC = torch.rand(T, E, device=device).topk(C).indices
        self.sorted = ops.sort_by_expert(experts_TC, E)
        self.offs_E = self.sorted.offs

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, dtype=BF16, device=device).mul_(scale)

        self.x_TH = normal(T, H)
        self.x_RH = self.x_TH[self.sorted.token]
        self.dy_RH = normal(T * C, H)
        self.weight_R = torch.rand(T * C, device=device)
        # The GEMMs read [E, H, 2 F] and [E, H, F]; one of the two is the view of a stored one.
        self.bias = None
        if form == "gpt_oss":
            self.bias = normal(E, 2 * F)
            self.gate_up_proj = normal(E, H, 2 * F, scale=H**-0.5)
            self.down_proj = normal(E, F, H, scale=F**-0.5).mT
        else:
            self.gate_up_proj = normal(E, 2 * F, H, scale=H**-0.5).mT
            self.down_proj = normal(E, H, F, scale=F**-0.5)
        self.gate_up_RF = ops.grouped_mm(self.x_RH, self.gate_up_proj, self.offs_E, self.bias)


def gate_up(o: Operands) -> dict[str, timing.Call]:
    """The GEMM of gate and up, and SwiGLU."""
    operands = o.x_RH, o.gate_up_proj, o.offs_E, o.bias

    def two() -> tuple[Tensor, Tensor]:
        gate_up_RF = ops.grouped_mm(*operands)
        return gate_up_RF, ops.swiglu(gate_up_RF, o.offs_E, o.activation)

    def one(keep_gate_up: bool) -> ops.SwigluGemm:
        return ops.grouped_mm_swiglu(*operands, keep_gate_up=keep_gate_up, activation=o.activation)

    return {
        ALONE: lambda: ops.grouped_mm(*operands),
        TWO: two,
        ONE: lambda: one(True),
        INFERENCE: lambda: one(False),
    }


def down_dgrad(o: Operands) -> dict[str, timing.Call]:
    """Down's dgrad, and SwiGLU's gradient."""
    dy_RH, w, rest = o.dy_RH, o.down_proj, (o.gate_up_RF, o.weight_R, o.offs_E)

    def two() -> ops.SwigluGrad:
        return ops.swiglu_grad(ops.grouped_mm(dy_RH, w, o.offs_E), *rest, o.activation)

    return {
        ALONE: lambda: ops.grouped_mm(dy_RH, w, o.offs_E),
        TWO: two,
        ONE: lambda: ops.grouped_mm_swiglu_grad(dy_RH, w, *rest, activation=o.activation),
    }


def copies(o: Operands) -> dict[str, timing.Call]:
    """Of tokens to their experts' rows."""
    return {
        INDEX: lambda: o.x_TH[o.sorted.token],
        SCATTER: lambda: ops.scatter_rows(o.x_TH, o.sorted.row, len(o.x_RH)),
    }


def flops(gemm: str, layer: Layer) -> int:
    """Of one call."""
    T, H, F, _, C = layer
    return 2 * T * C * H * (2 * F if gemm == "gate_up" else F)


def bytes_moved(what: str, layer: Layer) -> int:
    """What one kernel must read and write, in bfloat16; of copies what `scatter_rows` must."""
    T, H, F, E, C = layer
    R = T * C
    if what == "copies":
        return 2 * (T + R) * H + 4 * R
    if what == "gate_up":  # x and the weights; gate and up, h
        return 2 * (R * H + 2 * E * F * H + 3 * R * F)
    # dy and the weights; gate and up read, their gradients and h written; weights and theirs
    return 2 * (R * H + E * F * H + 5 * R * F) + 8 * R


def roofs(gemm: str, o: Operands) -> dict[str, timing.Call]:
    """What bounds the GEMM's FLOPs, and what bounds its bytes."""
    a, w = (o.x_RH, o.gate_up_proj) if gemm == "gate_up" else (o.dy_RH, o.down_proj)
    moved = bytes_moved(gemm, o.layer)
    return {DENSE: lambda: torch.mm(a, w[0]), COPY: timing.copy_of(moved, a.device)}


def check(what: str, one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
    """A fast wrong kernel is no result: ends the program where numbers differ."""
    for a, b in zip(one, two, strict=True):
        error = torch.linalg.vector_norm(a.float() - b.float())
        if not error <= CLOSE * torch.linalg.vector_norm(b.float()):
            raise SystemExit(f"{what}: one kernel and two give different results")


GEMMS = {"gate_up": gate_up, "down_dgrad": down_dgrad}


def measure(
    name: str, layer: Layer, device: torch.device, report: timing.Report, of_copies: timing.Report
) -> None:
    """Add a layer's rows to the two tables."""
    case: dict[str, str | int] = {"shape": name, **layer._asdict()}
    for form in FORMS:
        o = Operands(layer, form, device)
        for gemm, candidates_of in GEMMS.items():
            candidates = candidates_of(o)
            check(f"{name} {gemm} {form}", candidates[ONE](), candidates[TWO]())
            timings = timing.time_paired(
                roofs(gemm, o) | candidates, device, report.rounds, roofs=2
            )
            report.add(case | {"gemm": gemm, "form": form}, timings, flops(gemm, layer))
    candidates = copies(o)
    check(f"{name} copies", [candidates[SCATTER]()], [candidates[INDEX]()])
    moved = bytes_moved("copies", layer)
    roof = {COPY: timing.copy_of(moved, device)}
    of_copies.add(case, timing.time_paired(roof | candidates, device, report.rounds), moved)


def reports(device: torch.device, rounds: int) -> tuple[timing.Report, timing.Report]:
    """The tables of GEMMs and of copies, empty."""
    module = "bench_swiglu_gemm"
    report = timing.Report(
        module,
        "What does SwiGLU in the epilogue of a grouped GEMM save, beside a pass of its own?",
        "TFLOP/s",
        device,
        rounds,
    )
    report.note("FLOPs are those of the GEMM; a round's roof is the slower of the first two rows")
    of_copies = timing.Report(
        f"{module}_copies",
        "How close do copies of tokens to their experts' rows come to a plain copy?",
        "GB/s",
        device,
        rounds,
        module=module,
    )
    of_copies.note("bytes are those of scatter_rows, which reads a token once, for every row")
    return report, of_copies


def probe(device: torch.device) -> None:
    """Call every op that is timed, or raise the sentence that says why not."""
    o = Operands(Layer(T=16, H=16, F=64, E=2, C=1), "plain", device)
    for candidates_of in (*GEMMS.values(), copies):
        for call in candidates_of(o).values():
            call()


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=LAYERS)
    args = parser.parse_args()
    if torch.device(args.device).type == "cpu":
        sys.exit("bench_swiglu_gemm needs a GPU: on a CPU the ops are two after another")
    device = timing.device_for(args.device, probe)
    report, of_copies = reports(device, args.rounds)
    for name in args.shapes or (QUICK if args.quick else LAYERS):
        measure(name, LAYERS[name], device, report, of_copies)
        torch.cuda.empty_cache()
    report.finish(args.write, mean_by=("gemm", "form"), merge=args.merge)
    of_copies.finish(args.write, merge=args.merge)


if __name__ == "__main__":
    main()
