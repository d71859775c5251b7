"""A fine-tuning step with LoRA: on attention alone, and on attention and all experts.

    python -m benchmarks.bench_lora            # the table, to results/, and a plot
    python -m benchmarks.bench_lora --compile  # the same steps under torch.compile

Layers of Qwen3-30B-A3B with random weights, PEFT's adapters, AdamW over them. "PEFT" is
transformers' grouped_mm with PEFT as it comes, which adds the adapters to the weights in every
forward. Each row is a process of its own, so that no row finds another one's memory. Times are
between CUDA events around whole steps; peaks are torch's, weights included. GPU time is the sum of
a step's kernels.

It needs transformers and peft.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import torch

from benchmarks import timing

PEFT, BF16, FP8 = "PEFT, BF16", "ours, BF16", "ours, FP8"
WEIGHTS = (PEFT, BF16, FP8)
ATTENTION, EXPERTS = "attention", "attention and experts"
SCOPES = (ATTENTION, EXPERTS)
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
GIB = 2**30


def with_adapters(model: Any, weights: str, scope: str, rank: int, **options: Any) -> Any:
    """The frozen model, converted as a row says, with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model

    from grouped_linear import Float8BlockScaling, convert
    from grouped_linear.integrations.peft import use_grouped_adapters

    model.requires_grad_(False)
    if weights == BF16:
        convert(model)
    elif weights == FP8:
        convert(model, Float8BlockScaling(), weights="fp8")
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=list(EXPERT_PARAMETERS) if scope == EXPERTS else None,
        **options,
    )
    model = get_peft_model(model, lora)
    if weights != PEFT and scope == EXPERTS:
        use_grouped_adapters(model)
    return model


def make_model(weights: str, scope: str, options: argparse.Namespace) -> Any:
    """The model with its adapters, on the device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_hidden_layers=options.layers,
        vocab_size=32000,
        num_experts=options.experts,
        num_experts_per_tok=8,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        use_cache=False,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(options.device):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model = with_adapters(model, weights, scope, options.rank)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    return model


def measure(weights: str, scope: str, options: argparse.Namespace) -> dict[str, float]:
    """One row: milliseconds of a step and of its kernels, GiB of the weights and at the peak."""
    model = make_model(weights, scope, options)
    held = torch.cuda.memory_allocated() / GIB
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, fused=True)
    tokens = torch.randint(32000, (options.batch, options.context), device=options.device)
    forward = torch.compile(model) if options.compile else model

    def step() -> None:
        forward(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / GIB
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = sum(e.self_device_time_total for e in profile.key_averages()) / 1e3
    return {"step": statistics.median(times), "kernels": kernels, "held": held, "peak": peak}


def in_own_process(weights: str, scope: str, arguments: list[str]) -> dict[str, float]:
    """The same in another process."""
    row = [sys.executable, "-m", "benchmarks.bench_lora", *arguments, "--row", weights, scope]
    done = subprocess.run(row, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def plot(rows: dict[tuple[str, str], dict[str, float]], path: str) -> None:
    """Step and peak, a bar a row."""
    from matplotlib.figure import Figure

    colours = {PEFT: "#999999", BF16: "#56B4E9", FP8: "#D55E00"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (key, title) in zip(
        figure.subplots(1, 2), {"step": "step, ms", "peak": "peak, GiB"}.items(), strict=True
    ):
        for i, scope in enumerate(SCOPES):
            for j, weights in enumerate(WEIGHTS):
                value = rows[weights, scope][key]
                bars = axes.bar(
                    i + (j - 1) * 0.27,
                    value,
                    0.25,
                    color=colours[weights],
                    label=weights if i == 0 else None,
                )
                axes.bar_label(bars, fmt="%.1f", fontsize=8)
        axes.set_xticks(range(len(SCOPES)), [f"LoRA on {scope}" for scope in SCOPES])
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_lora")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.row:
        print(json.dumps(measure(*options.row, options)))
        return
    device = torch.device(options.device)
    rows = {
        (weights, scope): in_own_process(weights, scope, given)
        for scope in SCOPES
        for weights in WEIGHTS
    }
    table = [["LoRA on", "experts", "step, ms", "kernels, ms", "weights, GiB", "peak, GiB"]]
    for (weights, scope), row in rows.items():
        numbers = [f"{row[key]:.1f}" for key in ("step", "kernels")]
        table.append([scope, weights, *numbers, f"{row['held']:.2f}", f"{row['peak']:.2f}"])
    stem = f"bench_lora{'_compiled' * options.compile}_{timing.slug(device)}"
    how = "compiled" if options.compile else "eager"
    about = (
        f"{options.layers} layers of Qwen3-30B-A3B, {options.batch} x {options.context} tokens, "
        f"rank {options.rank}. PEFT is transformers' grouped_mm with PEFT as it comes."
    )
    title = f"A fine-tuning step with LoRA, {how}"
    text = timing.page(title, about, "bench_lora", device, timing.markdown(table))
    print(text)
    if options.write:
        (timing.RESULTS / f"{stem}.md").write_text(text)
        plot(rows, str(timing.RESULTS / f"{stem}.png"))


if __name__ == "__main__":
    main()
