# SPDX-License-Identifier: Apache-2.0
"""Whole models with LoRA on attention and all experts: ours, and PEFT alone, on one GPU.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python -m benchmarks.finetune_peers --at-once 3
    python -m benchmarks.finetune_peers --models gpt_oss_20b --rows "PEFT, BF16" --layers 8

Ours is examples/finetune_experts.py. PEFT's rows begin with the numbers of its experts, dequantized
to BF16, and have its adapters, optimizer, tokens and checkpoints. They have the tables on the GPU
and transformers' loss; "the example's loss" has its loss, and the tables on the host. Each row is a
process of its own; one that fails says why. Peaks are torch's, of all steps. The first step, which
compiles, is in no time. What a record says of others stays.

It needs transformers, peft, tqdm and matplotlib.
"""

import argparse
import copy
import gc
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.bench_lora import packages

sys.path.append(str(Path(__file__).parents[1] / "examples"))

OURS_FP8, OURS_MXFP4 = "ours, FP8", "ours, MXFP4"
PEFT, PEFT_LOSS = "PEFT, BF16", "PEFT, BF16, the example's loss"
COMPILED = ", compiled"
ROWS = {
    "gpt_oss_20b": (OURS_MXFP4, OURS_MXFP4 + COMPILED, PEFT, PEFT_LOSS),
    "qwen3_30b": (OURS_FP8, OURS_FP8 + COMPILED, OURS_MXFP4, OURS_MXFP4 + COMPILED, PEFT),
}
NUMBERS = {
    "step, ms": ".0f",
    "tokens/s": ",.0f",
    "frozen on the GPU, GiB": ".2f",
    "peak, GiB": ".2f",
    "reserved, GiB": ".2f",
    "first loss": ".4f",
    "last loss": ".4f",
}
GIB = 2**30
OTHERS = "## Others"  # what follows it in a record stays


def dequantize(model: Any) -> None:
    """Put transformers' experts in place of ours, with the same numbers in BF16."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        own = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer, of_own in zip(model.model.layers, own.model.layers, strict=True):
        state = layer.mlp.state_dict()
        for name in ("gate_up_proj", "down_proj"):
            w = layer.mlp.experts.dequantize(name, torch.bfloat16)
            state[f"experts.{name}"] = w.contiguous()  # as transformers has it
            del state[f"experts.{name}_scale_inv"]
        of_own.mlp.load_state_dict(state, assign=True)
        layer.mlp = of_own.mlp
    model.requires_grad_(False)


class Training:
    """A model that learns from the same tokens in every step."""

    def __init__(self, options: argparse.Namespace, name: str, weights: str) -> None:
        import finetune_experts as example

        from grouped_linear.integrations.peft import for_packed_experts, use_grouped_adapters

        is_compiled = weights.endswith(COMPILED)
        weights = weights.removesuffix(COMPILED)
        is_ours = weights in (OURS_FP8, OURS_MXFP4)
        device, config = options.device, copy.deepcopy(example.MODELS[name][0])
        config.num_hidden_layers = options.layers or config.num_hidden_layers
        torch.manual_seed(0)
        frozen = "mxfp4" if weights == OURS_MXFP4 else "fp8"
        model = example.make_model(config, frozen, device, host=False)
        if not is_ours:
            dequantize(model)
        if weights == PEFT:
            model.model.embed_tokens.to(device)
            model.lm_head.to(device)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.held = sum(p.nbytes for p in model.parameters() if p.device.type == device)
        torch.manual_seed(1)
        lora = for_packed_experts(example.LORA) if is_ours else example.LORA
        self.model = example.with_adapters(model, lora, device, checkpoint=True)
        if is_ours:
            use_grouped_adapters(self.model)
        if is_compiled:
            example.compile_layers(model)
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=1e-3, fused=True)
        torch.manual_seed(2)
        tokens = torch.randint(config.vocab_size, (options.batch, options.tokens))
        self.forward: Callable[[], Tensor] = lambda: example.loss_of(model, tokens)
        if weights == PEFT:
            tokens = tokens.to(device)
            self.forward = lambda: self.model(input_ids=tokens, labels=tokens).loss
        self.train = example.train

    def __call__(self, steps: int) -> tuple[list[float], list[float]]:
        return self.train(self.forward, self.optimizer, steps)


def measure(
    options: argparse.Namespace, name: str, turn: AbstractContextManager[object]
) -> list[dict[str, str]]:
    """A row by its columns, and a note; steps but the first one are within the turn."""
    model, weights = name.split(": ")
    row, training = {"model": model, "layers": "", "experts": weights, "note": ""}, None
    try:
        training = Training(options, model, weights)
        losses, _ = training(1)
    except Exception as error:
        row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        training = None
    with turn:
        if training is not None:
            more, seconds = training(options.steps - 1)
            peaks = [0, 0]
            if options.device == "cuda":
                peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            step = statistics.median(seconds)
            memory = [size / GIB for size in (training.held, *peaks)]
            speed = options.batch * options.tokens / step
            values = 1e3 * step, speed, *memory, losses[0], more[-1]
            row |= {n: f"{v:{f}}" for (n, f), v in zip(NUMBERS.items(), values, strict=True)}
            row["layers"] = str(len(training.model.get_base_model().model.layers))
    print(row, flush=True)
    return [row]


def page(rows: list[dict[str, str]], options: argparse.Namespace) -> str:
    """The table, over what is noted of its rows."""
    columns = ["model", "layers", "experts", *NUMBERS]
    table = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    notes = [f"- {row['model']}, {row['experts']}: {row['note']}.\n" for row in rows if row["note"]]
    about = (
        f"{options.batch} x {options.tokens} tokens, LoRA of rank 16 on attention and all experts, "
        "layers checkpointed, adapters and AdamW in BF16, random weights. PEFT's experts have the "
        "numbers of ours in MXFP4 (GPT-OSS) or FP8 (Qwen3), and compute by transformers' "
        "grouped_mm. Compiled rows compile attention and experts. Ours, and PEFT with the "
        "example's loss, have embedding and head on the host. A step is the median of all but the "
        f"first; losses are of the first and the last of {options.steps}, on the same tokens. "
        f"{packages()}."
    )
    title, device = "Fine-tuning whole models, beside others", torch.device(options.device)
    text = timing.page(title, about, "finetune_peers", device, timing.markdown(table))
    return "\n".join([text, "".join(notes)]) if notes else text


def parser() -> argparse.ArgumentParser:
    """The options, all of which have defaults."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.finetune_peers")
    options.add_argument("--models", nargs="+", choices=ROWS, default=[*ROWS])
    options.add_argument("--rows", nargs="+", help="their names; all by default")
    options.add_argument("--layers", type=int, help="of each model; all by default")
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--device", default="cuda")
    options.add_argument("--at-once", type=int, default=1, help="rows in memory at once")
    options.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return options


def main() -> None:
    options = parser().parse_args()
    wanted = [(model, row) for model in options.models for row in ROWS[model]]
    names = [f"{m}: {row}" for m, row in wanted if not options.rows or row in options.rows]
    text = page(timing.side_by_side(partial(measure, options), names, options.at_once), options)
    print(text)
    if options.write:
        stem = f"finetune_peers_{timing.slug(torch.device(options.device))}"
        path = timing.RESULTS / f"{stem}.md"
        kept = path.read_text().partition(OTHERS)[1:] if path.exists() else ()
        path.write_text("\n".join([text, "".join(kept)]) if kept else text)


if __name__ == "__main__":
    main()
