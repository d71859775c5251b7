# SPDX-License-Identifier: Apache-2.0
"""Does fine-tuning over FP8 or MXFP4 experts reach the loss that it reaches over BF16 ones?

    python -m benchmarks.lora_losses
    python -m benchmarks.lora_losses --model gpt_oss

One small mixture-of-experts model, one seed, one stream of tokens: PEFT as it comes over BF16
experts, and grouped adapters over FP8 experts; or over GPT-OSS's experts in MXFP4, and in BF16 that
is dequantized from the same numbers. LoRA is on attention and on all experts. Tokens come from a
random table of transitions, so the loss falls to that table's entropy.

It needs transformers, peft, and for GPT-OSS on a GPU accelerate.
"""

import argparse

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.bench_lora import EXPERTS, OF_GPT_OSS, OF_QWEN3, load, with_adapters

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 4,
}
MODELS = {
    "qwen3": ({**SIZES, "num_experts": 16, "moe_intermediate_size": 128}, OF_QWEN3),
    "gpt_oss": ({**SIZES, "num_local_experts": 16, "intermediate_size": 128}, OF_GPT_OSS),
}
VOCABULARY, BRANCHES = 512, 8
LAST = 20  # the final loss is the mean of so many steps


def tokens_of(transitions: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Sequences [batch, length] in which each token is one of BRANCHES that may follow."""
    chosen = torch.randint(BRANCHES, (batch, length), generator=generator)
    tokens = [torch.randint(VOCABULARY, (batch,), generator=generator)]
    for t in range(1, length):
        tokens.append(transitions[tokens[-1], chosen[:, t]])
    return torch.stack(tokens, dim=1)


def losses_of(weights: str, options: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    sizes, _ = MODELS[options.model]
    device = torch.device(options.device)
    model = load(options.model, {**sizes, "vocab_size": VOCABULARY}, weights, device)
    torch.manual_seed(1)
    model = with_adapters(model, weights, EXPERTS, rank=16, modules_to_save=["lm_head"]).train()
    model.to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    generator = torch.Generator().manual_seed(2)
    transitions = torch.randint(VOCABULARY, (VOCABULARY, BRANCHES), generator=generator)
    losses = []
    for _ in range(options.steps):
        tokens = tokens_of(transitions, 8, 128, generator).to(options.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_losses")
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    curves = {weights: losses_of(weights, options) for weights in MODELS[options.model][1]}
    final = {weights: sum(curve[-LAST:]) / LAST for weights, curve in curves.items()}
    table = [["experts", "first loss", f"mean of the last {LAST}", "to the first row's"]]
    for weights, curve in curves.items():
        share = final[weights] / next(iter(final.values()))
        table.append([weights, f"{curve[0]:.3f}", f"{final[weights]:.4f}", f"{share:.4f}"])
    about = (
        f"A small model, one seed, one stream of tokens, {options.steps} steps; LoRA on attention "
        "and all experts."
    )
    few_bits = "FP8" if options.model == "qwen3" else "MXFP4"
    title = f"Losses of LoRA over BF16 and over {few_bits} experts"
    text = timing.page(title, about, "lora_losses", device, timing.markdown(table))
    print(text)
    if not options.write:
        return
    from matplotlib.figure import Figure

    model = "" if options.model == "qwen3" else f"_{options.model}"
    stem = timing.RESULTS / f"lora_losses{model}_{timing.slug(device)}"
    stem.with_suffix(".md").write_text(text)
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for (weights, curve), style in zip(curves.items(), ("-", "--", ":", "-."), strict=False):
        axes.plot(curve, style, label=weights, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(stem.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
