# SPDX-License-Identifier: Apache-2.0
"""A fine-tuning step with LoRA: on attention alone, and on attention and all experts.

    python -m benchmarks.bench_lora            # the table, to results/, and a plot
    python -m benchmarks.bench_lora --compile  # the same steps under torch.compile
    python -m benchmarks.bench_lora --compile --model gpt_oss_20b
    python -m benchmarks.bench_lora --all      # experts in every format; with --compile too

Layers of Qwen3-30B-A3B or of GPT-OSS-20B with random weights, PEFT's adapters, AdamW over them.
"PEFT" is transformers' grouped_mm with PEFT as it comes, which adds the adapters to the weights in
every forward; GPT-OSS is then dequantized to BF16. "PEFT, FP8" is PEFT over transformers'
FP8Experts, whose kernels transformers downloads; a package `finegrained_fp8`, the folder of that
name in huggingface/kernels-community, has them without a network. A row that fails says why. Each
row is a process of its own, so that no row finds another one's memory. Weights are equal but for
rounding and tokens are equal, so first losses are alike. Times are of whole steps, each from an
idle GPU to an idle one; peaks are torch's, weights included. GPU time is the sum of a step's
kernels.

It needs transformers, peft and accelerate.
"""

import argparse
import contextlib
import copy
import itertools
import math
import statistics
import time
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from benchmarks import gpt_oss, timing
from grouped_linear import Float8BlockScaling, convert

PEFT, PEFT_FP8 = "PEFT, BF16", "PEFT, FP8"
BF16, FP8 = "ours, BF16", "ours, FP8"
MXFP4, MXFP4_FP8 = "ours, MXFP4", "ours, MXFP4, FP8 activations"
ATTENTION, EXPERTS = "attention", "attention and experts"
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
VOCABULARY = 32000
GIB = 2**30


class Model(NamedTuple):
    """What is measured of a model: so many of its layers in each row."""

    title: str
    sizes: dict[str, int]
    weights: tuple[str, ...]
    scopes: tuple[str, ...]
    others: tuple[str, ...] = ()
    """What --all measures besides, on experts."""


QWEN3 = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
TINY = {
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
OF_QWEN3, OTHERS = (PEFT, BF16, FP8), (PEFT_FP8, MXFP4)
OF_GPT_OSS = (PEFT, BF16, MXFP4, MXFP4_FP8)
MODELS = {
    "qwen3_30b": Model("Qwen3-30B-A3B", QWEN3, OF_QWEN3, (ATTENTION, EXPERTS), OTHERS),
    # Its other sizes are GptOssConfig's defaults.
    "gpt_oss_20b": Model("GPT-OSS-20B", {"num_local_experts": 32}, OF_GPT_OSS, (EXPERTS,)),
    "qwen3_tiny": Model(
        "a tiny Qwen3-MoE",
        {**TINY, "num_experts": 4, "moe_intermediate_size": 128},
        OF_QWEN3,
        (ATTENTION, EXPERTS),
        OTHERS,
    ),
    "gpt_oss_tiny": Model(
        "a tiny GPT-OSS",
        {**TINY, "num_local_experts": 4, "intermediate_size": 32},
        OF_GPT_OSS,
        (EXPERTS,),
    ),
}


class Row(NamedTuple):
    """Milliseconds of a step and of its kernels, GiB of the weights and at the peak, and losses."""

    scope: str
    weights: str
    step: float = math.nan
    kernels: float = math.nan
    held: float = math.nan
    peak: float = math.nan
    first_loss: float = math.nan
    last_loss: float = math.nan
    note: str = ""


def load(name: str, sizes: dict[str, Any], weights: str, device: torch.device) -> Any:
    """A model of these sizes on the device, whose experts are as a row says, or in BF16."""
    from transformers import GptOssConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if name.startswith("gpt_oss"):
        packed = weights in (MXFP4, MXFP4_FP8)
        return gpt_oss.load(GptOssConfig(**sizes, use_cache=False), device, packed=packed)
    config = Qwen3MoeConfig(**sizes, use_cache=False)
    config._experts_implementation = "grouped_mm"
    with device:
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    if weights in (MXFP4, MXFP4_FP8):
        convert(model, weights="mxfp4")
    elif weights == PEFT_FP8:
        quantized = copy.deepcopy(model)
        convert(quantized, weights="fp8")
        use_fp8_experts(model, quantized)
    return model


def use_fp8_experts(model: Any, converted: Any) -> None:
    """Put transformers' FP8Experts in place of a model's, with the numbers of a converted one."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations import finegrained_fp8 as of_transformers

    with contextlib.suppress(ImportError):
        import finegrained_fp8 as kernels

        # Else it downloads them in the first forward.
        of_transformers._FINEGRAINED_FP8 = of_transformers.FineGrainedFP8(
            kernels.matmul_2d, kernels.matmul_batched, kernels.matmul_grouped
        )
    of_transformers.replace_with_fp8_linear(
        model, [".*self_attn", "mlp.gate", "lm_head"], FineGrainedFP8Config()
    )
    state = converted.state_dict()
    for name in [*state]:
        module_name, _, own = name.rpartition(".")
        if (frozen := getattr(converted.get_submodule(module_name), "frozen_weight", None)) is None:
            continue
        if (weight := frozen(own)) is not None:  # whose state is bytes
            state |= {name: weight.values, f"{name}_scale_inv": weight.scale}
    model.load_state_dict(state, assign=True)


def with_adapters(model: Any, weights: str, scope: str, rank: int, **options: Any) -> Any:
    """The frozen model, converted as a row says, with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model

    from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters

    model.requires_grad_(False)
    if weights == BF16:
        convert(model)
    elif weights == FP8:
        convert(model, Float8BlockScaling(), weights="fp8")
    elif weights == MXFP4_FP8:  # loading has converted the model without a recipe
        convert(model, Float8BlockScaling())
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=list(EXPERT_PARAMETERS) if scope == EXPERTS else None,
        **options,
    )
    if weights in (PEFT, PEFT_FP8):
        return get_peft_model(model, lora)
    model = get_peft_model(model, for_packed_experts(lora))
    if scope == EXPERTS:
        use_grouped_adapters(model)
    return model


class Step:
    """A model that learns from the same tokens in every step."""

    def __init__(self, options: argparse.Namespace, scope: str, weights: str) -> None:
        device = torch.device(options.device)
        sizes = {**MODELS[options.model].sizes, "num_hidden_layers": options.layers}
        model = load(options.model, {**sizes, "vocab_size": VOCABULARY}, weights, device)
        model = with_adapters(model, weights, scope, options.rank).train()
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        for p in self.adapters:
            p.data = p.data.to(torch.bfloat16)
        self.held = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0
        self.optimizer = torch.optim.AdamW(self.adapters, lr=1e-4, fused=True)
        generator = torch.Generator(device).manual_seed(0)
        shape = options.batch, options.context
        self.tokens = torch.randint(VOCABULARY, shape, device=device, generator=generator)
        self.forward = torch.compile(model) if options.compile else model
        self.losses: list[torch.Tensor] = []

    def __call__(self) -> None:
        loss = self.forward(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


def measure(
    options: argparse.Namespace, name: str, turn: contextlib.AbstractContextManager[object]
) -> list[Row]:
    """One row, by its scope and weights; times are taken within the turn."""
    row = Row(*name.split(": "))
    try:
        step = Step(options, row.scope, row.weights)
        for _ in range(3):
            step()
    except Exception as error:
        sentence = " ".join(str(error).split())
        row = row._replace(note=f"{type(error).__name__}: {sentence[:200]}")
        step = None
    with turn:
        if step is not None:
            row = timed(row, step, options)
    print(row, flush=True)
    return [row]


def timed(row: Row, step: Step, options: argparse.Namespace) -> Row:
    """The row with its numbers, of a step that is compiled by now."""
    on_gpu = torch.device(options.device).type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    synchronize()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        step()
        synchronize()
    if options.profile:
        print(row, profile.key_averages().table("self_device_time_total", 25, 60), flush=True)
    kernels = sum(e.self_device_time_total for e in profile.key_averages()) / 1e3
    losses = step.losses[0].item(), step.losses[-1].item()
    unlearnt = len(step.adapters) - len(step.optimizer.state)  # AdamW's state comes with gradients
    note = f"{unlearnt} of {len(step.adapters)} factors get no gradient" if unlearnt else ""
    return Row(
        row.scope, row.weights, statistics.median(times), kernels, step.held, peak, *losses, note
    )


def plot(rows: list[Row], path: str) -> None:
    """Step and peak, a bar a row."""
    from matplotlib.figure import Figure

    palette = ("#999999", "#56B4E9", "#D55E00", "#E69F00")
    scopes, weights = (list(dict.fromkeys(column)) for column in list(zip(*rows, strict=True))[:2])
    width = 0.81 / len(weights)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (key, title) in zip(
        figure.subplots(1, 2), {"step": "step, ms", "peak": "peak, GiB"}.items(), strict=True
    ):
        for row in rows:
            i, j = scopes.index(row.scope), weights.index(row.weights)
            bars = axes.bar(
                i + (j - (len(weights) - 1) / 2) * width,
                getattr(row, key),
                0.93 * width,
                color=palette[j],
                label=row.weights if i == 0 else None,
            )
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
        axes.set_xticks(range(len(scopes)), [f"LoRA on {scope}" for scope in scopes])
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def page(rows: list[Row], options: argparse.Namespace) -> str:
    """The table, under the sentences that say what it is of, and over what is noted of its rows."""
    head = (
        "LoRA on|experts|step, ms|kernels, ms|weights, GiB|peak, GiB|tokens/s|first loss|last loss"
    )
    table, notes = [head.split("|")], []
    for row in rows:
        if row.note:
            notes.append(f"\n- {row.weights}: {row.note}.")
        speed = 1e3 * options.batch * options.context / row.step
        numbers = (
            *(f"{row.step:.1f}", f"{row.kernels:.1f}", f"{row.held:.2f}", f"{row.peak:.2f}"),
            *(f"{speed:,.0f}", f"{row.first_loss:.3f}", f"{row.last_loss:.3f}"),
        )
        table.append([row.scope, row.weights, *("" if n == "nan" else n for n in numbers)])
    about = (
        f"{options.layers} layers of {MODELS[options.model].title}, {options.batch} x "
        f"{options.context} tokens, rank {options.rank}. PEFT is transformers' grouped_mm with "
        f"PEFT as it comes. Losses are of the first and the last of {options.rounds + 4} steps on "
        f"the same random tokens. {packages()}."
    )
    title = f"A fine-tuning step with LoRA, {'compiled' if options.compile else 'eager'}"
    device = torch.device(options.device)
    text = timing.page(title, about, "bench_lora", device, timing.markdown(table))
    return text + "".join(notes) + "\n" if notes else text


def packages() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft"))


def parser() -> argparse.ArgumentParser:
    """The options, all of which have defaults."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.bench_lora")
    options.add_argument("--model", choices=MODELS, default="qwen3_30b")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--device", default="cuda")
    options.add_argument("--compile", action="store_true")
    options.add_argument("--all", action="store_true", help="LoRA on experts in every format")
    options.add_argument(
        "--at-once", type=int, default=1, help="rows that load and compile at once"
    )
    options.add_argument("--profile", action="store_true", help="print each row's slowest kernels")
    options.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return options


def main() -> None:
    options = parser().parse_args()
    of_model = MODELS[options.model]
    scopes, weights = of_model.scopes, of_model.weights
    if options.all:
        scopes, weights = (EXPERTS,), weights + of_model.others
    names = [": ".join(row) for row in itertools.product(scopes, weights)]
    rows = timing.side_by_side(partial(measure, options), names, options.at_once)
    text = page(rows, options)
    print(text)
    if options.write:
        model = "" if options.model == "qwen3_30b" else f"_{options.model}"
        how = ("_all" if options.all else "") + ("_compiled" if options.compile else "")
        stem = f"bench_lora{model}{how}_{timing.slug(torch.device(options.device))}"
        (timing.RESULTS / f"{stem}.md").write_text(text)
        if not options.all:
            plot(rows, str(timing.RESULTS / f"{stem}.png"))


if __name__ == "__main__":
    main()
