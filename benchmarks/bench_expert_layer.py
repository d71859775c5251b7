# SPDX-License-Identifier: Apache-2.0
"""A whole expert layer: what its forward and backward take, and what it keeps between the two.

    python -m benchmarks.bench_expert_layer

Router, top-k, experts, weighted sum; compiled, forward and backward as one CUDA graph, with a cold
L2 cache, beside torch's grouped_mm in BF16 in the same run, and SonicMoE's layers, which are not
compiled, where they are installed (alternatives.py). Ours routes with router_logits and
ops.topk_experts, torch with torch.topk. Kept is what is allocated between forward and backward
besides x, the output and the parameters; peak is the most that is allocated during both.

With --write the rows replace those of the same shapes in benchmarks/results/.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.alternatives import SONIC_MOE, sonic_moe
from benchmarks.moe_model import MixtureOfExperts, ModelSize
from benchmarks.step_cases import CACHED, Candidate, experts_of

MIB = 1 << 20
TOKENS_AND_SIZES = {
    # name: tokens, hidden, intermediate, experts, chosen
    "qwen3_30b": (8192, 2048, 768, 128, 8),
    "sonic_7b": (24576, 1536, 256, 128, 8),
    "sonic_30b": (32768, 4096, 1024, 128, 8),
    "dsv3_ep8": (4096, 7168, 2048, 32, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
    "qwen3_next": (8192, 2048, 512, 512, 10),
}
SONIC_MOES = tuple(Candidate(name, "bf16", "eager") for name in SONIC_MOE)
CANDIDATES = (
    Candidate("torch", "bf16", "compiled"),
    *SONIC_MOES,
    Candidate("ours", "bf16", "compiled"),
    Candidate("ours", "block", "compiled"),
    Candidate("ours", "requantized", "compiled"),
    Candidate("ours", "block" + CACHED, "compiled"),
    Candidate("ours", "bf16_wgrad" + CACHED, "compiled"),
    Candidate("ours", "bf16", "compiled", gate_up_in_fp8=True),
    Candidate("ours", "block" + CACHED, "compiled", gate_up_in_fp8=True),
)
BY_NAME = {str(candidate): candidate for candidate in CANDIDATES}


def layer_of(candidate: Candidate, name: str) -> tuple[nn.Module, Tensor]:
    """The layer, in BF16 on the GPU, and an input that needs a gradient."""
    tokens, hidden, intermediate, experts, chosen = TOKENS_AND_SIZES[name]
    size = ModelSize(1, hidden, 1, tokens, experts, chosen, intermediate)
    torch.manual_seed(0)
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    if candidate in SONIC_MOES:
        package = SONIC_MOE[candidate.implementation]
        sonic = sonic_moe(package, experts, chosen, hidden, intermediate)
        return sonic.to("cuda", torch.bfloat16), x
    routes = candidate.implementation == "ours"
    layer = MixtureOfExperts(size, experts_of(candidate), routes).to("cuda", torch.bfloat16)
    return layer, x


def step_of(layer: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """The forward, compiled unless it is SonicMoE's, and forward and backward."""
    compiles = isinstance(layer, MixtureOfExperts)
    forward = torch.compile(layer, fullgraph=True) if compiles else layer
    leaves = [x, *layer.parameters()]
    dy = torch.randn_like(x)

    def both() -> Any:
        return torch.autograd.grad(forward(x)[0], leaves, dy)

    return forward, both


def memory_of(forward: Any, both: Any, x: Tensor) -> tuple[float, float]:
    """Kept and peak, in MiB."""
    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = forward(x)[0]
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    del y
    torch.cuda.reset_peak_memory_stats()
    both()
    return kept / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


COLUMNS = ("shape", "layer", "ms", "times_torch", "kept_mib", "peak_mib", "commit")
HOW = (
    "Router, top-k, experts, weighted sum; compiled; forward and backward as one CUDA graph, cold "
    "L2, medians.\nOurs routes with router_logits and ops.topk_experts, torch with torch.topk.\n"
    "Kept: allocated between forward and backward besides x, the output and the parameters. "
    "times_torch: the median of the rounds' own ratios."
)


def measure(
    candidates: Sequence[Candidate], rounds: int, name: str, turn: timing.Turn
) -> list[tuple[str, ...]]:
    """Rows of one shape. The layers take turns, so all are in memory at once."""
    torch._dynamo.config.recompile_limit = len(CANDIDATES) + 1  # of one module's forward
    calls, memory = {}, {}
    for candidate in candidates:
        layer, x = layer_of(candidate, name)
        forward, both = step_of(layer, x)
        memory[str(candidate)] = memory_of(forward, both, x)
        calls[str(candidate)] = partial(both)
    with turn:
        timings = timing.time_paired(calls, torch.device("cuda"), rounds=rounds)
    rows = []
    for candidate_name, measured in timings.items():
        kept, peak = memory[candidate_name]
        ms, share = measured.microseconds.median / 1000, measured.share.median
        row = (name, candidate_name, f"{ms:.3f}", f"{share:.2f}", f"{kept:.0f}", f"{peak:.0f}")
        print(f"| {' | '.join(row)} |", flush=True)
        rows.append((*row, timing.git_commit()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=TOKENS_AND_SIZES, default=TOKENS_AND_SIZES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="shapes that compile side by side")
    parser.add_argument("--candidates", nargs="+", choices=BY_NAME, default=list(BY_NAME))
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| shape | layer | ms | times torch | kept, MiB | peak, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    chosen = [BY_NAME[name] for name in options.candidates]
    of_shape = partial(measure, chosen, options.rounds)
    rows = timing.side_by_side(of_shape, list(options.shapes), options.at_once)
    if options.write:
        timing.replace_rows("bench_expert_layer", COLUMNS, rows, HOW)


if __name__ == "__main__":
    main()
