# SPDX-License-Identifier: Apache-2.0
"""How long does an eager forward and backward of a small layer keep the host busy?

The layer is small enough for a GPU to wait for the host; a CPU's own work counts too. Autograd
runs on the calling thread: a thread of its own costs as much again, and varies. With
``--hugging-face`` also the experts of a converted model, frozen as below adapters, for which
transformers is needed.
"""

import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.alternatives import TorchGroupedLinear
from benchmarks.step_cases import RECIPES
from grouped_linear import Float8BlockScaling, GroupedLinear, convert, ops

E, M, N, K = 8, 32, 256, 256  # groups, rows a group, out_features, in_features
CHOSEN = 2  # experts of a token, of the E that a Hugging Face layer has
STEPS = 50  # a sample
BF16 = torch.bfloat16


def step_of(layer: nn.Module, device: torch.device, *m_splits: torch.Tensor) -> Callable[[], None]:
    layer.to(device=device, dtype=BF16)
    x = torch.randn(E * M, K, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(E * M, N, device=device, dtype=BF16)
    parameters = [x, *layer.parameters()]

    def step() -> None:
        layer(x, *m_splits).backward(dy)
        for p in parameters:
            p.grad = None

    return step


def step_of_experts(device: torch.device, *how: Any, **options: Any) -> Callable[[], None]:
    """A step of frozen experts below layers that learn, converted as told: T tokens of CHOSEN."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=K,
        moe_intermediate_size=N,
        num_experts=E,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=1,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(device=device, dtype=BF16)
    convert(model.requires_grad_(False), *how, **options)
    experts = model.model.layers[0].mlp.experts
    T = E * M // CHOSEN
    x = torch.randn(T, K, device=device, dtype=BF16, requires_grad=True)
    top_k_index = torch.arange(T * CHOSEN, device=device).view(T, CHOSEN) % E
    top_k_weights = torch.rand(T, CHOSEN, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(T, K, device=device, dtype=BF16)

    def step() -> None:
        experts(x, top_k_index, top_k_weights).backward(dy)
        x.grad = top_k_weights.grad = None

    return step


def microseconds_a_step(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(STEPS):
        step()
    return (time.perf_counter_ns() - start) / 1e3 / STEPS


def table(samples: dict[str, list[float]]) -> str:
    first = next(iter(samples.values()))
    rows = [["layer", "us", "(quartiles)", "times nn.Linear", "(quartiles)"]]
    for name, own in samples.items():
        us = timing.Spread.of(own)
        beside = timing.Spread.of([a / b for a, b in zip(own, first, strict=True)])
        rows.append(
            [
                name,
                f"{us.median:.1f}",
                f"({us.low:.1f} {us.high:.1f})",
                f"{beside.median:.2f}",
                f"({beside.low:.2f} {beside.high:.2f})",
            ]
        )
    return timing.markdown(rows)


def probe(device: torch.device) -> None:
    ops.group_quantize(torch.ones(1, 16, device=device), torch.ones(1, device=device).int())


def main() -> None:
    parser = timing.arguments_of_one_case(__doc__, rounds=40)
    parser.add_argument("--hugging-face", action="store_true", help="a model's frozen experts, too")
    args = parser.parse_args()
    device = timing.device_for(args.device, probe)
    m_splits = torch.full((E,), M, device=device)
    steps = {
        "nn.Linear": step_of(nn.Linear(K, N, bias=False), device),
        "torch grouped_mm": step_of(TorchGroupedLinear(E, K, N), device, m_splits),
    }
    for name, recipe in {"none": None, **RECIPES}.items():
        layer = GroupedLinear(E, K, N, bias=False, recipe=recipe)
        steps[f"GroupedLinear, recipe {name}"] = step_of(layer, device, m_splits)
    if args.hugging_face:
        block = Float8BlockScaling()
        for name, step in {
            "recipe none": step_of_experts(device),
            "recipe block": step_of_experts(device, block),
            "weights fp8": step_of_experts(device, block, weights="fp8"),
            "weights both": step_of_experts(device, block, weights="both"),
        }.items():
            steps[f"Hugging Face experts, frozen, {name}"] = step
    samples: dict[str, list[float]] = {name: [] for name in steps}
    with torch.autograd.set_multithreading_enabled(False):
        for step in steps.values():
            microseconds_a_step(step, device)
        for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
            for name, step in steps.items():
                samples[name].append(microseconds_a_step(step, device))
    header = [
        *timing.machine(device),
        f"commit {timing.git_commit()}, {date.today().isoformat()}",
        timing.command("bench_host"),
        f"{E} groups of {M} rows, N {N}, K {K}, bf16; {args.rounds} interleaved rounds of {STEPS} "
        "steps, medians with (quartiles), beside nn.Linear paired by round",
    ]
    parts = ["# bench_host", (__doc__ or "").split("\n\n")[0], "\n".join(f"- {h}" for h in header)]
    text = "\n\n".join([*parts, table(samples)]) + "\n"
    print(text)
    if args.write:
        (timing.RESULTS / f"bench_host_{timing.slug(device)}.md").write_text(text)


if __name__ == "__main__":
    main()
